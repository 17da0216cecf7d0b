"""What `bench/scale.py` computes: a run of any size has bounded parts."""

import pickle
from pathlib import Path

import numpy as np

from bench.scale import FRAGMENTS, planned, planned_run
from kdissect.pipeline.plan import RunPlan
from kdissect.pipeline.set_folder import SetFolder
from kdissect.pipeline.task_table import share_in


def test_each_unit_is_in_one_task(tmp_path: Path) -> None:
    """Scan tasks share out the splits, with their fragments, and the inputs to hash."""
    plan = planned_run(10, 1)
    units = [pair for row in plan.scan_rows() for pair in pickle.loads(row.data)]
    assert [number for number, _ in units] == list(range(len(units)))
    splits = [unit for _, unit in units if not isinstance(unit, int | str)]
    assert sum(split.end - split.pos for split in splits) == plan.byte_count
    assert len(units) - len(splits) == len(plan.files) == 10
    parts = [split.fragments for split in splits if split.fragments is not None]
    assert sum(len(part.completed) for part in parts) == 10 * FRAGMENTS // 2
    for split in splits:
        if split.fragments is not None:
            packets = split.fragments.batch.segments["packet"]
            assert split.number_before < packets.min()
            assert packets.max() <= split.last_number
    assert not plan.for_tasks(share_in(SetFolder(str(tmp_path)), "run", ""))[0].splits


def test_a_task_stays_small(tmp_path: Path) -> None:
    """At 10 TB the plan of a task has 10 kB and its units 2 MB; it finds the inputs in a file."""
    plan = planned_run(10_240, 1)
    shared = plan.for_tasks(share_in(SetFolder(str(tmp_path)), "run", ""))
    assert len(pickle.dumps(shared)) < 10_000
    assert max(len(row.data) for row in plan.scan_rows()) < 2_000_000  # with their fragments
    found = RunPlan.of_task(shared)
    assert [found.files[number] for number in (0, 10_239)] == [plan.files[0], plan.files[-1]]
    assert np.array_equal(found.capture_ids, plan.capture_ids)
    assert (found.byte_count, found.task_count) == (plan.byte_count, plan.task_count)


def test_tasks_grow_slower_than_the_input() -> None:
    """Ten times the bytes have at most ten times the tasks, buckets and slots."""
    small, large = planned(10, 1, 1000), planned(100, 1, 1000)
    for name in ("tasks", "buckets", "slots", "keys of events"):
        assert int(small[name]) < int(large[name]) <= 11 * int(small[name])
