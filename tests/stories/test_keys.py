"""Events moved by key: the same stories however many keys, and nothing lost on the way."""

import numpy as np
import pyarrow as pa
import pytest

import kdissect
from kdissect.pipeline import plan
from kdissect.stories import events
from kdissect.stories.events import Collector, event_table, unpack
from tests.cases import cases
from tests.material import needs_material
from tests.truth.material import Capture
from tests.truth.rows import set_differences


@needs_material
@cases("name", ["transactions/transactions"], heavy=["share_streams/streams"])
def test_the_number_of_keys_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small keys of events give the tables of few large ones."""
    capture = Capture(name)
    monkeypatch.setattr(plan, "EVENT_KEY_BYTES", 100_000)
    monkeypatch.setattr(events, "_ROW_BYTES_MAX", 3_000)
    many = kdissect.read(str(capture.path), reveal_secrets=True, split_bytes=70_000)
    assert not set_differences(capture.tables, many)


@pytest.mark.parametrize("key_count", [1, 2, 17, 4096])
def test_each_event_comes_out_once_with_the_key_of_its_group(key_count: int) -> None:
    """Each row comes out once, and all rows of a group or a producer have one key."""
    collector = Collector(key_count)
    numbers = np.arange(500)
    for part in np.array_split(numbers, 7):
        groups = pa.array([f"group {n % 23}" for n in part])
        collector.add("groups", event_table("groups", group_id=groups, pos=pa.array(part)))
        ids = pa.array(part % 31 - 1)
        collector.add("producers", event_table("producers", producer_id=ids, pos=pa.array(part)))
    seen: dict[str, list[int]] = {"groups": [], "producers": []}
    key_of: dict[object, int] = {}
    for key, data in collector.packed():
        assert 0 <= key < key_count
        for name, column in (("groups", "group_id"), ("producers", "producer_id")):
            for row in unpack([data])[name].to_pylist():
                seen[name].append(row["pos"])
                assert key_of.setdefault(row[column], key) == key
    assert sorted(seen["groups"]) == sorted(seen["producers"]) == numbers.tolist()
    assert not list(collector.packed())
