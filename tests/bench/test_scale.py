"""What `bench/scale.py` computes: a run of any size has bounded parts."""

import pickle

from bench.scale import GB, planned, planned_run


def test_each_unit_is_in_one_task() -> None:
    """Scan tasks share out the splits and the inputs to hash; the tasks' plan has no splits."""
    plan = planned_run(10, 1)
    units = [pair for task in plan.scan_tasks() for pair in task]
    assert [number for number, _ in units] == list(range(len(units)))
    splits = [unit for _, unit in units if not isinstance(unit, int | str)]
    assert sum(split.end - split.pos for split in splits) == 10 * GB
    assert len(units) - len(splits) == len(plan.files) == 10
    assert not plan.for_tasks().splits


def test_a_task_stays_small() -> None:
    """At 1 TB the plan in each task has less than 1 MB, and its units less than 10 kB."""
    plan = planned_run(1024, 1)
    assert len(pickle.dumps(plan.for_tasks())) < 1_000_000
    assert max(len(pickle.dumps(units)) for units in plan.scan_tasks()) < 10_000


def test_tasks_grow_slower_than_the_input() -> None:
    """Ten times the bytes have at most ten times the tasks, buckets and slots."""
    small, large = planned(10, 1), planned(100, 1)
    for name in ("tasks", "buckets", "slots", "keys of events"):
        assert int(small[name]) < int(large[name]) <= 11 * int(small[name])
