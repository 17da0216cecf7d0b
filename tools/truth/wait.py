"""`wait` of `exchanges` beside the times of the broker's request log.

The log splits the time of a request. `remoteTimeMs` is the time that a request waited in the
broker: a Fetch for data, a JoinGroup or SyncGroup for the other members.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import kdissect
from kdissect import Tables
from kdissect.protocol.api_keys import ApiKey
from tools.truth import logged

POLL_MIN_MS = 1.0  # a shorter wait is none
POLLS = (ApiKey.FETCH, ApiKey.SHARE_FETCH)
GROUP_WAITS = (ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP)
_REQUEST = "Completed request:"
Key = tuple[int, int, int]  # client port, correlation id, API key


def read_waits(log: Path) -> Iterator[tuple[Key, str]]:
    """The wait of each request in a log."""
    for line in log.read_text(errors="replace").splitlines():
        if _REQUEST not in line:
            continue
        row = json.loads(line.partition(_REQUEST)[2])
        api_key = row["requestHeader"]["requestApiKey"]
        port = int(row["connection"].split("-")[1].rpartition(":")[2])
        wait = "answer"
        if api_key in GROUP_WAITS:
            wait = "group"
        elif api_key in POLLS and row["remoteTimeMs"] >= POLL_MIN_MS:
            wait = "long_poll"
        yield (port, row["requestHeader"]["correlationId"], api_key), wait


def compare(tables: Tables, log: Path) -> Counter[tuple[bool, str]]:
    """Counts of requests, by whether they are polls and `right`, `wrong` or `undecided`."""
    columns = ["client_port", "correlation_id", "api_key", "wait", "status"]
    waits = {
        (row["client_port"], row["correlation_id"], row["api_key"]): row["wait"]
        for row in tables.exchanges.to_arrow(columns).to_pylist()
        if row["status"] == "paired"
    }
    counts = Counter[tuple[bool, str]]()
    for key, truth in read_waits(log):
        if key in waits:
            wait = waits[key]
            outcome = "undecided" if wait is None else "right" if wait == truth else "wrong"
            counts[key[2] in POLLS, outcome] += 1
    return counts


def section(_: Path) -> str:
    """The section of the page."""
    rows = []
    total = Counter[tuple[bool, str]]()
    for path in logged.made():
        counts = compare(kdissect.read(path / "capture.pcap"), path / "server.log")
        total += counts
        rows.append(f"| {path.name} | {_cells(counts)} |")
    return "\n".join(
        [
            "## Wait",
            "",
            "`wait` of `exchanges` beside the broker's request log, which has the time that a "
            f"request waited in the broker. A poll waited if that time is {POLL_MIN_MS:g} ms or "
            "more. Recorded from members that join and leave while producers pause.",
            "",
            "| recording | polls right | wrong | undecided | others right | wrong | undecided |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *rows,
            f"| all | {_cells(total)} |",
        ]
    )


def _cells(counts: Counter[tuple[bool, str]]) -> str:
    outcomes = ("right", "wrong", "undecided")
    return " | ".join(str(counts[is_poll, each]) for is_poll in (True, False) for each in outcomes)
