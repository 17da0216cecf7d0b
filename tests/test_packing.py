"""Packed arrays of rows unpack to themselves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kdissect.capture.segments import ENDPOINTS, SEGMENT, SegmentBatch
from kdissect.packing import pack, unpack

DTYPES = (
    np.dtype([("time_ns", "<i8"), ("port", "<u2"), ("ip", "u1", (16,))]),
    np.dtype(np.uint8),
    np.dtype(np.int64),
)


@given(st.lists(st.binary(max_size=400), min_size=len(DTYPES), max_size=len(DTYPES)))
def test_packed_arrays_come_back(data: list[bytes]) -> None:
    """Arrays of any rows, and empty ones, unpack to themselves."""
    arrays = [
        np.frombuffer(part[: len(part) // dtype.itemsize * dtype.itemsize], dtype)
        for part, dtype in zip(data, DTYPES, strict=True)
    ]
    for before, after in zip(arrays, unpack(pack(arrays), DTYPES), strict=True):
        assert after.dtype == before.dtype
        assert after.tobytes() == before.tobytes()


def test_an_index_becomes_small() -> None:
    """Rows like the ones before them cost a few bytes each."""
    rows = np.zeros(1000, DTYPES[0])
    rows["time_ns"] = 1_700_000_000 * 10**9 + 1000 * np.arange(1000)
    packed = pack([rows])
    assert len(packed) < rows.nbytes // 3
    assert unpack(packed, DTYPES[:1])[0].tobytes() == rows.tobytes()


def test_segments_of_many_senders_become_small() -> None:
    """A segment costs some bits of its time, place, sender and sequence number each."""
    random = np.random.default_rng(1)
    segments = np.zeros(20_000, SEGMENT)
    segments["length"] = segments["captured"] = 50 + 10 * random.integers(0, 4, len(segments))
    segments["time_ns"] = 10**18 + np.cumsum(random.integers(1, 50_000, len(segments)))
    segments["packet"] = np.cumsum(random.integers(1, 4, len(segments)))
    segments["pos"] = np.cumsum(segments["length"] + 70) + 200 * segments["packet"]
    segments["endpoints"] = random.integers(0, 200, len(segments))
    for number in range(200):
        own = segments["endpoints"] == number
        segments["seq"][own] = 2**31 + np.cumsum(segments["length"][own])
    batch = SegmentBatch(np.zeros(200, ENDPOINTS), segments)
    packed = batch.to_bytes()
    assert len(packed) < 6 * len(segments)
    assert SegmentBatch.from_bytes(packed).segments.tobytes() == segments.tobytes()


def test_segments_come_back_in_their_order() -> None:
    """Also those of one packet, as fragments give."""
    segments = np.zeros(6, SEGMENT)
    segments["packet"] = [1, 2, 2, 3, 4, 5]
    segments["endpoints"], segments["side"] = [1, 0, 0, 1, 0, 1], [1, 0, 0, 0, 1, 1]
    segments["seq"] = [5, 2**32 - 1, 0, 7, 1, 3]  # sequence numbers wrap
    batch = SegmentBatch(np.zeros(2, ENDPOINTS), segments)
    back = SegmentBatch.from_bytes(batch.to_bytes())
    assert back.segments.tobytes() == segments.tobytes()
