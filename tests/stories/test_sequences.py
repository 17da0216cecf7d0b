"""Gaps and repeats of sequences, against a definition that walks batch by batch."""

from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.stories.events import NO_TIME, PRODUCER_EVENT, EventKind, sorted_events
from kdissect.stories.sequences import WRAP, sequence_anomalies

NO_ANSWER = None


def table(rows: list[dict[str, Any]]) -> pa.Table:
    place = {"connection_id": 1, "order": 0, "topic": "orders", "partition": 0, "end_ns": NO_TIME}
    step = {"step": int(EventKind.PRODUCE), "error_code": 0, "flag": False}
    usual = {**place, **step, "producer_id": 7, "producer_epoch": 0}
    full = [
        {**usual, "time_ns": number * 1000, "pos": number, "exchange_id": number + 1, **row}
        for number, row in enumerate(rows)
    ]
    return sorted_events(pa.Table.from_pylist(full, schema=PRODUCER_EVENT))


def batch(base: int, count: int, error: int | None = 0, **more: Any) -> dict[str, Any]:
    return {"base_sequence": base, "sequence_count": count, "error_code": error, **more}


def anomaly_rows(rows: list[dict[str, Any]]) -> list[tuple[str, int | None]]:
    """(kind, exchange id) of all anomalies; the exchange id is the number of the row, from 1."""
    told = sequence_anomalies(table(rows)).to_pylist()
    return [(row["kind"].upper(), row["exchange_id"]) for row in told]


_LAST = WRAP - 3
_INIT = {"step": int(EventKind.INIT), "topic": None, "partition": None}
_WHOLE = {
    "batches that continue each other": [batch(0, 5), batch(5, 1), batch(6, 100)],
    "a capture that starts in the middle": [batch(400, 5), batch(405, 5)],
    "a retry that fills a gap": [batch(0, 5), batch(10, 5), batch(5, 5)],
    # NOT_LEADER_OR_FOLLOWER, then OUT_OF_ORDER_SEQUENCE_NUMBER of what was on its way
    "refused batches that are sent again, on another connection": [
        *(batch(0, 5, 6), batch(5, 5, 45), batch(10, 5, 45)),
        *(batch(base, 5, connection_id=2) for base in (0, 5, 10)),
        batch(15, 1),
    ],
    "numbers that continue with 0 after 2^31 - 1": [batch(_LAST, 3), batch(0, 4), batch(4, 1)],
    "a batch over the end of the numbers": [batch(_LAST, 5), batch(2, 4)],
    "other epochs, partitions, topics and producers": [
        *(batch(0, 5), batch(3, 5, producer_epoch=1), batch(0, 5, partition=1)),
        *(batch(100, 5, topic="other"), batch(70, 1, producer_id=8)),
    ],
    "an id that another cluster gives again": [_INIT, batch(0, 5), _INIT, batch(0, 5)],
    "a client before 2.5 after UNKNOWN_PRODUCER_ID": [
        *(batch(0, 5), batch(5, 5, 59), batch(0, 5), batch(5, 5))
    ],
    "requests of one time, by their position": [
        batch(base, 5, pos=pos, time_ns=5) for base, pos in ((10, 200), (5, 90), (0, 10))
    ],
}


@pytest.mark.parametrize("rows", _WHOLE.values(), ids=_WHOLE)
def test_runs_without_an_anomaly(rows: list[dict[str, Any]]) -> None:
    """Neither a gap nor a repeat."""
    assert anomaly_rows(rows) == []


def test_a_gap() -> None:
    """Missing numbers are a gap, with their count and the batch after them."""
    assert anomaly_rows([batch(0, 5), batch(9, 1), batch(10, 2)]) == [("SEQUENCE_GAP", 2)]
    (row,) = sequence_anomalies(table([batch(0, 5), batch(9, 1)])).to_pylist()
    said = "producer 7 epoch 0, orders-0: 4 sequence numbers before 9 are in no batch"
    assert row["detail"] == said


def test_repeats() -> None:
    """The same numbers again are a duplicate, also if the first copy has no response."""
    assert anomaly_rows([batch(0, 5), batch(0, 5)]) == [("SEQUENCE_DUPLICATE", 2)]
    assert anomaly_rows([batch(0, 5), batch(5, 5, 46)]) == [("SEQUENCE_DUPLICATE", 2)]
    assert anomaly_rows([batch(0, 5, NO_ANSWER), batch(0, 5)]) == [("SEQUENCE_DUPLICATE", 2)]
    (row,) = sequence_anomalies(table([batch(0, 5, NO_ANSWER), batch(0, 5)])).to_pylist()
    assert "an earlier copy was not answered" in row["detail"]


def test_a_gap_at_the_end_of_the_numbers() -> None:
    """The number before 0 is in no batch."""
    assert anomaly_rows([batch(_LAST, 2), batch(0, 4)]) == [("SEQUENCE_GAP", 2)]


def plain(rows: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """Return the gaps and repeats of runs that do not wrap, by the definition for a partition."""
    gaps, repeats = set(), set()
    by_partition: dict[int, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for number, row in enumerate(rows, start=1):
        by_partition[row["partition"]].append((number, row))
    for some in by_partition.values():
        covered = {n for _, row in some for n in range(_base(row), _base(row) + _count(row))}
        seen: dict[int, bool] = {}
        lowest = min(_base(row) for _, row in some)
        for number, row in some:
            base = _base(row)
            refused = row["error_code"] not in (0, None, 46)
            if seen.get(base) or row["error_code"] == 46:
                repeats.add(("SEQUENCE_DUPLICATE", number))
            seen[base] = seen.get(base, False) or not refused
            first = not any(_base(other) == base for n, other in some if n < number)
            if base > lowest and base - 1 not in covered and first:
                gaps.add(("SEQUENCE_GAP", number))
    return gaps | repeats


def _base(row: dict[str, Any]) -> int:
    return int(row["base_sequence"])


def _count(row: dict[str, Any]) -> int:
    return int(row["sequence_count"])


_batches = st.lists(
    st.builds(
        batch,
        st.integers(0, 40),
        st.integers(1, 9),
        st.sampled_from([0, 0, 0, None, 6, 45, 46]),
        partition=st.integers(0, 2),
    ),
    max_size=25,
)


@given(_batches)
def test_agrees_with_the_definition(rows: list[dict[str, Any]]) -> None:
    """Random runs have the anomalies of a walk batch by batch."""
    assert {kind_id for kind_id in anomaly_rows(rows) if kind_id[1] is not None} == plain(rows)


@pytest.mark.parametrize("count", [-5, 0, 2**62])
def test_absurd_counts_do_no_harm(count: int) -> None:
    """The reader of messages keeps counts within 1 to 2^31-1; nothing overflows all the same."""
    anomaly_rows([batch(0, max(1, min(count, 2**31 - 1))), batch(2**31 - 1, 1)])
