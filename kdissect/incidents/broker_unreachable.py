"""`broker_unreachable`: connections to a broker could not be made.

An advertised address that never worked is another kind: `advertised_address_unreachable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from kdissect.incidents.evidence import Evidence, Row, lasted_ms
from kdissect.incidents.incident import BAD, INFO, SEVERITIES, WARN, Incident, Kind
from kdissect.incidents.outages import make_outages
from kdissect.text import duration, plural

KIND = Kind("broker_unreachable", "broker", "connection attempts to a broker failed", "network")
# A client that starts early or races with a restart fails once or twice, then succeeds.
ATTEMPTS_MIN = 3
LENGTH_MIN_MS = 1000
# Listeners of one node close within so long of each other.
ONE_NODE = timedelta(milliseconds=250)


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the outages, those of one node's listeners together."""
    make_outages(evidence)
    nodes: list[list[Row]] = []
    for row in evidence.rows(
        "FROM outages WHERE era > 0 OR back IS NOT NULL OR NOT is_advertised ORDER BY start, broker"
    ):
        if severity := _severity(row):
            near = nodes[-1][0] if nodes else None
            if near and row["start"] - near["start"] <= ONE_NODE and _ip(near) == _ip(row):
                nodes[-1].append({**row, "severity": severity})
            else:
                nodes.append([{**row, "severity": severity}])
    for listeners in nodes:
        yield _outage(evidence, listeners)


def _severity(row: Row) -> str | None:
    """Return the severity of an outage; None if it is too short to matter.

    It follows from what the clients lost: nothing, if other brokers led the node's partitions,
    served its clients meanwhile, and no request was lost that a broker answers at once.
    """
    is_single = row["attempts"] < ATTEMPTS_MIN and row["syns"] < ATTEMPTS_MIN
    if not row["requests"] and (is_single or lasted_ms(row) < LENGTH_MIN_MS):
        return None
    if not row["era"]:
        return WARN if row["back"] is None else INFO
    # a controller's listener, which no client uses
    is_internal = row["is_brokers"] and not row["is_advertised"]
    return INFO if _lost_nothing(row) or is_internal or not row["is_clients"] else BAD


def _lost_nothing(row: Row) -> bool:
    has_left = row["is_announced"] or row["has_moved"]
    return bool(has_left and row["is_served"] and not row["lost"])


def _ip(row: Row) -> str:
    address: str = row["broker"]
    return address.rpartition(":")[0]


def _outage(evidence: Evidence, listeners: list[Row]) -> Incident:
    """Return the incident of a node: its subject is the listener of its clients."""
    start = min(row["start"] for row in listeners)
    listeners = [{**row, "start": start} for row in listeners]
    listeners.sort(key=lambda row: (SEVERITIES.index(row["severity"]), -row["requests"]))
    first, *others = listeners
    requests = sum(row["requests"] for row in listeners)
    ids = [number for row in listeners for number in (*row["closed_ids"], *row["failed_ids"])]
    sentences = [f"{first['broker']} {_beginning(first)}."]
    if first["closed_connections"]:
        closed = plural(first["closed_connections"], "connection")
        sentences.append(f"It closed {closed} at the beginning.")
    if first["is_announced"]:
        sentences.append("It had announced its shutdown.")
    elif _lost_nothing(first):
        sentences.append("Metadata named other leaders for its partitions before.")
    if first["is_served"]:
        sentences.append("Other brokers served its clients meanwhile.")
    if requests:
        sentences.append(f"{plural(requests, 'request')} had no response.")
    sentences.append(f"It {_ending(first)}.")
    sentences += [f"{row['broker']} of the same machine {_ending(row)}." for row in others]
    return evidence.incident(
        first,
        KIND,
        first["severity"],
        first["broker"],
        " ".join(sentences),
        request_count=requests,
        time_lost_ms=lasted_ms(first),
        exchange_ids=[number for row in listeners for number in row["exchange_ids"] or ()],
        connection_ids=ids,
        next_command=evidence.follow(ids),
        brokers=frozenset(row["broker"] for row in listeners),
    )


def _beginning(row: Row) -> str:
    kind = "refused" if row["refusals"] == row["attempts"] else "unanswered"
    attempts = plural(row["attempts"], f"{kind} connection attempt")
    was_up, comes_back = row["era"] > 0, row["back"] is not None
    return f"was not up yet: {attempts}" if comes_back and not was_up else f"had {attempts}"


def _ending(row: Row) -> str:
    return (
        "was not reached again"
        if row["back"] is None
        else f"was back after {duration(lasted_ms(row))}"
    )
