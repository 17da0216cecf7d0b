"""`wait` of `exchanges` beside the times of the broker's request log.

The log splits the time of a request. `remoteTimeMs` is the time that a request waited in the
broker: a Fetch for data, a JoinGroup or SyncGroup for the other members. A Fetch also had to wait
if the Produce requests that wrote its records were sent after it, wherever it was in the broker. A
Fetch that outlasts its max_wait_ms is an answer: the broker was late.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from kdissect import Tables
from kdissect.protocol.api_keys import ApiKey
from lab.truth.logged import Key, read_requests
from lab.truth.section import RIGHT, UNDECIDED, WHOLE, Judged, Section, recordings

POLL_MIN_MS = 1.0  # a shorter wait is none
POLL_LATE, POLL_LATE_MS = 1.1, 100.0  # as in docs/report.md
POLLS = (ApiKey.FETCH, ApiKey.SHARE_FETCH)
GROUP_WAITS = (ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP)


class Fetch(NamedTuple):
    """Facts of a Fetch in the capture. is_ahead: its records were written after it was sent."""

    max_wait_ms: int
    is_ahead: bool


_FETCHES = """
    with written as (
        select b.topic, b.partition, p.base_offset, e.request_time
        from (select exchange_id, unnest(t.partition_responses) p
            from (select exchange_id, unnest(response.responses) t from api_produce)) r
        join record_batches b on b.exchange_id = r.exchange_id and b.partition = r.p.index
        join exchanges e on e.exchange_id = r.exchange_id
    ), returned as (
        select b.exchange_id, min(w.request_time) request_time
        from record_batches b left join written w using (topic, partition, base_offset)
        where b.source = 'fetch' group by all
    )
    select client_port, correlation_id, api_key, f.request.max_wait_ms max_wait_ms,
        coalesce(r.request_time > e.request_end_time, false) is_ahead
    from api_fetch f join exchanges e using (exchange_id) left join returned r using (exchange_id)
"""


def read_fetches(tables: Tables) -> dict[Key, Fetch]:
    """The facts of each Fetch."""
    return {tuple(row[:3]): Fetch(*row[3:]) for row in _tuples(tables.sql(_FETCHES).to_arrow())}


def _tuples(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    yield from zip(*table.to_pydict().values(), strict=True)


def read_waits(log: Path, fetches: dict[Key, Fetch]) -> Iterator[tuple[Key, str]]:
    """The true wait of each request in a log."""
    for key, _, row in read_requests(log):
        wait = "group" if key[2] in GROUP_WAITS else "answer"
        if key in fetches:
            fetch = fetches[key]
            is_late = row["totalTimeMs"] > fetch.max_wait_ms * POLL_LATE + POLL_LATE_MS
            if not is_late and (row["remoteTimeMs"] >= POLL_MIN_MS or fetch.is_ahead):
                wait = "long_poll"
        yield key, wait


def compare(_: str, tables: Tables, capture: Path) -> Judged:
    """Requests by their wait; polls apart."""
    columns = ["client_port", "correlation_id", "api_key", "wait", "status"]
    waits = {
        tuple(row[:3]): row[3]
        for row in _tuples(tables.exchanges.to_arrow(columns))
        if row[4] == "paired"
    }
    counts, wrong = Counter[str](), []
    log = capture.with_name("server.log")
    for key, truth in read_waits(log, read_fetches(tables)):
        if key not in waits:
            continue
        if waits[key] not in (UNDECIDED, truth):
            wrong.append(f"{key}: {waits[key]}, and it is {truth}")
            continue
        kind = "polls " if key[2] in POLLS else ""
        counts[kind + (UNDECIDED if waits[key] == UNDECIDED else RIGHT)] += 1
    return counts, wrong


SECTION = Section(
    "Wait",
    "`wait` of `exchanges` beside the broker's request log, which has the time that a request waited "
    f"in the broker. A poll waited if that time is {POLL_MIN_MS:g} ms or more, or if the records that "
    "it returned were sent to the broker after it. A poll that outlasts its max_wait_ms is an answer. "
    "Recorded from members that join and leave while producers pause.",
    compare,
    recordings,
    (f"polls {RIGHT}", f"polls {UNDECIDED}", RIGHT, UNDECIDED),
    WHOLE,
)
