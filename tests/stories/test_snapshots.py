"""Joining fragments: little is held, and whatever the fragments say, each byte is told once."""

import random
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kdissect.codec.record_codec import encode_batch
from kdissect.kafka.assembly import Anomaly
from kdissect.stories.snapshots import (
    BatchFragment,
    Fault,
    Headless,
    JoinedBatches,
    Joiner,
    Snapshot,
)


def fragment(position: int, data: bytes, follower: int = 1, **how: Any) -> BatchFragment:
    known = {
        "snapshot": Snapshot("10.0.0.1 9093", "__cluster_metadata", None, 0, 9, 1, 1 << 40),
        "connection_id": follower,
        "exchange_id": 1,
        "time_ns": 0,
        "capture_id": 1,
        "packet": 1,
        "pos": 0,
        "piece_end": position + len(data),
        "is_first": True,
        "begins": False,
        "ends": False,
        "batch_index": 0,
        "spare_index": 1,
        "spare_step": 1,
    }
    return BatchFragment(position=position, data=data, follower=follower, **(known | how))


BATCH = encode_batch(
    [{"offset": n, "timestamp_ms": 5, "key": None, "value": bytes([n]) * 50} for n in range(9)]
)

anything = st.builds(
    fragment,
    st.integers(-3, 900) | st.sampled_from([-(2**63), 2**63 - 1]),
    st.binary(max_size=40) | st.integers(0, 560).map(lambda n: (BATCH * 2)[n : n + 300]),
    st.integers(-1, 2),
    is_first=st.booleans(),
    begins=st.booleans(),
    ends=st.booleans(),
    piece_end=st.integers(0, 1000),
    connection_id=st.integers(0, 2),
    time_ns=st.integers(0, 3),
).filter(lambda each: not (each.begins and each.is_first)) | st.just(
    fragment(0, b"", begins=True, ends=True, piece_end=300)
)


@given(st.lists(anything, max_size=12), st.sampled_from([40, 300, 1 << 20]))
@settings(max_examples=400, deadline=None)
def test_anything_is_survived(fragments: list[BatchFragment], limit: int) -> None:
    """In order or not; no more bytes come out than went in."""
    packed = [BatchFragment.from_bytes(each.to_bytes()) for each in fragments]
    assert packed == fragments
    for listed in (fragments, sorted(fragments, key=lambda each: each.order)):
        found = list(Joiner(limit, 2 * limit).join(listed))
        told = sum(len(one.data) for one in found if isinstance(one, JoinedBatches))
        told += sum(one.size for one in found if isinstance(one, Headless))
        assert told <= sum(len(each.data) for each in fragments)


@given(st.permutations(range(5)), st.integers(1, 500))
@settings(max_examples=50, deadline=None)
def test_of_several_at_one_position_the_order_does_not_matter(order: list[int], cut: int) -> None:
    fragments = [fragment(0, b"", begins=True, ends=True, piece_end=cut)]
    fragments.append(fragment(0, BATCH[:cut], begins=True, is_first=False))
    behind = [BATCH[cut:], BATCH[cut:], BATCH[cut:-1], b"x" * 8, BATCH[cut : cut + 5]]
    for n in order:
        ends = n < 2
        fragments.append(fragment(cut, behind[n], exchange_id=n, time_ns=10 - n, ends=ends))
    found = list(Joiner(1 << 20).join(fragments))
    [joined] = [one for one in found if isinstance(one, JoinedBatches)]
    assert (joined.data, joined.at.exchange_id) == (BATCH, 1)
    faults = [one for one in found if isinstance(one, Fault)]
    conflicts = [one for one in faults if one.kind == Anomaly.OVERLAP_CONFLICT]
    assert [one.at.exchange_id for one in conflicts] == [3]


def test_what_is_held_is_bounded() -> None:
    """Hundreds of downloads that each claim a large batch: the limit, not the memory, ends it."""
    data = bytes(8) + (1 << 20).to_bytes(4, "big") + random.Random(1).randbytes(5000)
    count, held_max = 400, 1 << 20
    joiner = Joiner(2 << 20, held_max)

    def fragments() -> Iterator[BatchFragment]:
        for follower in range(count):
            yield fragment(0, b"", follower, begins=True, ends=True, piece_end=len(data))
            yield fragment(0, data, follower, begins=True, is_first=False)
            assert joiner._held <= held_max + len(data)
        for position in range(len(data), 20 * len(data), len(data)):
            for follower in range(count):
                yield fragment(position, data, follower)
                assert joiner._held <= held_max + len(data)

    found = list(joiner.join(fragments()))
    limits = [one for one in found if isinstance(one, Fault) and one.kind == Anomaly.LIMIT]
    assert limits
    told = sum(len(one.data) for one in found if isinstance(one, JoinedBatches))
    told += sum(one.size for one in found if isinstance(one, Headless))
    assert told == 20 * count * len(data)
