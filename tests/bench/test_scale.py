"""What `bench/scale.py` computes: a run of any size has bounded parts."""

import pickle

from bench.scale import GB, planned, planned_run, shared


def test_each_unit_is_in_one_task() -> None:
    """Scan tasks share out the splits and the inputs to hash; the tasks' plan has no splits."""
    plan = planned_run(10, 1)
    units = [pair for row in plan.scan_rows() for pair in pickle.loads(row.data)]
    assert [number for number, _ in units] == list(range(len(units)))
    splits = [unit for _, unit in units if not isinstance(unit, int | str)]
    assert sum(split.end - split.pos for split in splits) == 10 * GB
    assert len(units) - len(splits) == len(plan.files) == 10
    assert not shared(plan).plan.splits


def test_a_task_stays_small() -> None:
    """At 10 TB the plan in each task has less than 200 kB, and its units less than 10 kB."""
    plan = planned_run(10_240, 1)
    assert len(pickle.dumps(shared(plan))) < 200_000
    assert max(len(row.data) for row in plan.scan_rows()) < 10_000


def test_tasks_grow_slower_than_the_input() -> None:
    """Ten times the bytes have at most ten times the tasks, buckets and slots."""
    small, large = planned(10, 1), planned(100, 1)
    for name in ("tasks", "buckets", "slots", "keys of events"):
        assert int(small[name]) < int(large[name]) <= 11 * int(small[name])
