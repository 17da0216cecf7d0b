"""The reassembly kernels against an oracle of dictionaries; their work is linear."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import (
    ACK,
    ENDPOINTS,
    FIN,
    FRAGMENT_PART,
    NO_HEADER,
    PSH,
    RST,
    SEGMENT,
    SYN,
    SegmentBatch,
)
from kdissect.tcp import overlaps
from kdissect.tcp import reassembly as r
from kdissect.tcp.columns import DUPLICATE
from tests.builders.segments import batch_of, in_memory
from tests.oracles import reassembly as oracle
from tests.oracles.segments import Segment
from tests.steps import assert_linear

WINDOW_NS = 10_000_000


def kernel(segments: list[Segment]) -> tuple[list[int], list[tuple[Any, Any]]]:
    """The kernels' result in the words of the oracle."""
    batch, memory = batch_of(segments)
    streams = r.reassemble([batch], memory, WINDOW_NS)
    found = []
    for number, side in enumerate(streams.sides):
        owner: dict[int, int] = {}
        last = 0
        for piece in range(side["piece_start"], side["piece_stop"]):
            pos, end, _, file_pos, row = streams.pieces[piece].tolist()
            assert pos >= last
            last = end
            for at in range(pos, last):
                owner[at] = row
                place = file_pos + at - pos
                assert batch.segments["pos"][row] <= place
        told = {
            row: (pos, size) for to, row, pos, size in streams.conflicts.tolist() if to == number
        }
        assert side["byte_count"] == len(owner)
        end = int(side["end"])
        gaps = [at for at in range(min(end, 4000)) if at not in owner]
        if end < 4000:
            runs = sum(1 for at in gaps if at - 1 not in set(gaps))
            assert side["gap_count"] == runs
        found.append(
            oracle.Stream(
                owner, told, end, int(side["segment_count"]), int(side["duplicate_count"]),
                int(side["retransmitted_count"]), int(side["out_of_order_count"]),
            )
        )  # fmt: skip
    pairs = [(found[2 * at], found[2 * at + 1]) for at in range(len(found) // 2)]
    return [int(one) for one in streams.connection], pairs


flags = st.sampled_from(
    (ACK, ACK, ACK | PSH, ACK | PSH, ACK | PSH, ACK | FIN, RST, RST | ACK, SYN, SYN | ACK, 0)
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Segment]:
    """Segments around two streams near the wrap, or anywhere; some of them twice."""
    isn = [draw(st.sampled_from((0, 100, 2**31, 2**32 - 20))) for _ in range(2)]
    made: list[Segment] = []
    clock = 0
    for number in range(draw(st.integers(0, 16))):
        clock += draw(st.sampled_from((0, 1000, 6_000_000, 20_000_000)))
        if made and draw(st.integers(0, 5)) == 0:
            old = draw(st.sampled_from(made))
            shown = draw(st.sampled_from((old.payload, old.payload[:2])))
            rest = bytes([65]) * (old.length - len(shown)) * draw(st.integers(0, 1))
            made.append(replace(old, time_ns=clock, payload=shown + rest))
            continue
        side = draw(st.integers(0, 1))
        jump = draw(st.sampled_from((0,) * 12 + (2**23, 2**26, 2**31 - 7, 2**32 - 2**29)))
        length = draw(st.sampled_from((0, 0, 1, 1, 2, 5, 9)))
        payload = bytes(draw(st.integers(65, 67)) for _ in range(length))
        cut = draw(st.sampled_from((length,) * 5 + (length // 2,)))
        part = draw(st.sampled_from((0,) * 12 + (FRAGMENT_PART, FRAGMENT_PART, NO_HEADER)))
        if part == NO_HEADER:  # as the scan makes it
            made.append(Segment(clock, side, 0, 0, 0, number % 7, 0, 0, marks=part))
            continue
        made.append(
            Segment(
                clock, side, draw(flags), (isn[side] + draw(st.integers(0, 30)) + jump) % 2**32,
                (isn[1 - side] + draw(st.integers(0, 34))) % 2**32, number % 7, 0, length,
                payload[:cut], marks=part,
            )
        )  # fmt: skip
    return made


@given(conversations())
def test_the_kernels_reassemble_as_the_oracle(segments: list[Segment]) -> None:
    """Loss, reordering, duplicates, overlaps, wraps, new connections, cut packets."""
    assert kernel(segments) == oracle.reassemble(segments, WINDOW_NS)


def synthetic(seq: Any) -> tuple[SegmentBatch, Sources]:
    rows = np.zeros(len(seq), SEGMENT)
    rows["seq"] = seq
    rows["flags"] = ACK
    rows["length"] = rows["captured"] = 10
    rows["packet"] = np.arange(len(seq)) + 1
    rows["ip_id"] = rows["packet"] & 0xFFFF
    rows["time_ns"] = rows["packet"] * 1000
    return SegmentBatch(np.zeros(1, ENDPOINTS), rows), in_memory(b"x" * 4096)


def with_gaps(count: int) -> Any:
    batch, memory = synthetic(np.arange(count, dtype=np.int64) * 20)
    return r.reassemble([batch], memory, WINDOW_NS)


def interleaved(count: int) -> Any:
    """Every second segment repeats one from anywhere."""
    half = count // 2
    seq = np.empty(2 * half, np.int64)
    seq[0::2] = 1_000_000 + np.arange(half) * 10
    seq[1::2] = 1_000_000 + (np.arange(half) * 7919 % half) * 10
    batch, memory = synthetic(seq)
    return r.reassemble([batch], memory, WINDOW_NS)


@pytest.mark.parametrize("work", [with_gaps, interleaved])
def test_work_is_linear_in_the_segments(work: Any) -> None:
    """Twice the segments cost at most twice the work, with gaps or retransmissions between them."""
    assert_linear(work, 300)


def test_a_million_gaps_and_interleaved_retransmissions() -> None:
    """Counts of gaps and of retransmissions are right for very large streams."""
    streams = with_gaps(1_000_000)
    assert streams.sides[0]["gap_count"] == 999_999
    streams = interleaved(200_000)
    side = streams.sides[0]
    assert side["byte_count"] == 1_000_000
    assert side["retransmitted_count"] + side["out_of_order_count"] > 90_000


def test_across_captures_the_running_time_orders() -> None:
    """Two captures of one connection: a clock that steps back does not break its packets' order."""
    rows = np.zeros(5, SEGMENT)
    rows["source"] = (1, 1, 0, 0, 0)
    rows["packet"] = (1, 2, 1, 2, 3)
    rows["time_ns"] = (50, 60, 10, 5, 55)
    segments, _ = r.ordered([SegmentBatch(np.zeros(1, ENDPOINTS), rows)])
    assert [(int(s["source"]), int(s["packet"])) for s in segments] == [
        (0, 1), (0, 2), (1, 1), (0, 3), (1, 2),
    ]  # fmt: skip


def test_streams_cut_into_runs_have_the_pieces_of_the_whole() -> None:
    """More segments than a run of blocks has, moved about and repeated: as bytes are painted."""
    count, size = 5 * overlaps.BLOCK // 2, 10
    rng = np.random.default_rng(3)
    place = np.arange(count) * size
    near = np.argsort(np.arange(count) + rng.integers(0, 40, count), kind="stable")
    place = place[near]
    again = rng.random(count) < 0.02
    place[again] -= size * rng.integers(0, 2 * overlaps.BLOCK, int(again.sum())) // 3
    lost = rng.random(count) < 0.01
    place[lost] += 3
    place = np.maximum(place, 0)
    rows = np.zeros(count + 1, SEGMENT)
    rows["flags"] = ACK
    rows["flags"][0] = SYN
    rows["seq"][1:] = 1 + place
    rows["captured"][1:] = rows["length"][1:] = size
    rows["ip_id"] = rows["packet"] = np.arange(count + 1)
    rows["time_ns"] = np.arange(count + 1) * 1000
    rows["pos"][1:] = np.arange(count) * size
    batch = SegmentBatch(np.zeros(1, ENDPOINTS), rows)
    memory = in_memory(rng.bytes(count * size))
    streams = r.reassemble([batch], memory, 0)
    painted = np.full(place.max() + size, -1)
    for row in range(count - 1, -1, -1):
        painted[place[row] : place[row] + size] = row + 1
    found = np.full(len(painted), -1)
    for pos, end, _, _, row in streams.pieces.tolist():
        assert (found[pos:end] == -1).all()
        found[pos:end] = row
    assert found.tolist() == painted.tolist()
    side = streams.sides[0]
    won = np.bincount(painted[painted > 0], minlength=count + 1)[1:]
    highest = np.maximum.accumulate(np.append(0, place + size))[:-1]
    assert side["retransmitted_count"] == (won < size).sum()
    assert side["out_of_order_count"] == ((won == size) & (place < highest)).sum()
    assert side["byte_count"] == (painted > 0).sum()


segment_keys = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 9)), max_size=60
)


@given(segment_keys, st.booleans())
def test_order_of_segments(keys: list[tuple[int, int, int]], is_shuffled: bool) -> None:
    """By (pair, time, source, packet), a time that goes back in a source counting as the last."""
    rows = np.zeros(len(keys), SEGMENT)
    if not is_shuffled:
        keys = sorted(keys, key=lambda key: key[1])
    for number, (pair, source, when) in enumerate(keys):
        rows[number]["endpoints"], rows[number]["source"] = pair, source
        rows[number]["time_ns"], rows[number]["packet"] = when, number + 1
    if is_shuffled:
        rows["packet"] = rows["packet"][::-1].copy()
    order, start = r.ordered([SegmentBatch(np.zeros(3, ENDPOINTS), rows)])
    last: dict[tuple[int, int], int] = {}
    expected = []
    for row in sorted(rows.tolist(), key=lambda row: (row[7], row[8], row[2])):
        pair, source = row[8], row[7]
        last[pair, source] = max(last.get((pair, source), 0), row[0])
        expected.append((pair, last[pair, source], source, row[2]))
    if len(set(rows["source"].tolist())) > 1:
        expected.sort()
    assert order["packet"].tolist() == [row[3] for row in sorted(expected, key=lambda row: row[0])]
    assert start.tolist() == [0, *np.cumsum(np.bincount(rows["endpoints"], minlength=3)).tolist()]


def test_a_table_of_duplicates_that_begins_anew() -> None:
    """Copies are found in pairs with more packets than the table takes."""
    count = 3 * r.COPIES_MAX // 2
    rows = np.zeros(2 * count, SEGMENT)
    rows["flags"] = ACK
    rows["ack"] = np.repeat(np.arange(count), 2)
    rows["ip_id"] = rows["ack"] & 0xFFFF
    rows["packet"] = np.arange(2 * count)
    rows["time_ns"] = np.arange(2 * count) * 1000
    streams = r.reassemble([SegmentBatch(np.zeros(1, ENDPOINTS), rows)], in_memory(b"1"), WINDOW_NS)
    assert (streams.mark == np.tile([0, DUPLICATE], count)).all()
