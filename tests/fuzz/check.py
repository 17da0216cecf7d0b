"""What must hold for the tables of any capture, and for a mutated one beside the original."""

import ipaddress
import random
import resource
from collections import Counter, defaultdict
from typing import Any

from kdissect.accounts import check
from kdissect.errors import CaptureError
from tests.fuzz.bases import Base, base, read_bytes, sources
from tests.fuzz.mutate import Mutated, mutated
from tests.truth.rows import set_differences

GROWN_BYTES_MAX = 1 << 30  # of the process, beyond what it needed before
# Columns that facts of the whole capture fill, or that hold the place in the file.
OF_THE_CAPTURE = {"topics", "topic", "topic_id", "capture_id", "request_capture_id",
                  "response_capture_id"}  # fmt: skip
OF_CONNECTIONS = {"connections", "exchanges", "record_batches", "records", "anomalies"}
PLACES = {"packet", "request_packet", "response_packet"}


class Broken(AssertionError):
    """An invariant does not hold; the message says which and where."""


def need(holds: bool, *what: Any) -> None:
    if not holds:
        raise Broken(" ".join(map(str, what)))


def check_tables(tables: Any, packet_count: int | None, faults: frozenset[str]) -> None:
    """All packets are counted, and the accounts of the tables add up, except some."""
    (capture,) = tables.captures.to_pylist()
    if packet_count is not None:
        need(capture["packet_count"] == packet_count, "packets", capture, packet_count)
    found = [fault for fault in check(tables)["faults"] if fault["account"] not in faults]
    need(not found, "accounts", *found[:3])


def _untouched_rows(base: Base, tables: Any, result: Mutated, known: set[int]) -> dict[str, Any]:
    """Rows of connections whose packets were not changed, by table, as a multiset of texts."""
    assert result.touched is not None
    out = set(OF_THE_CAPTURE) | (PLACES if result.is_renumbered else set())
    touched = set()
    for row in tables.connections.to_pylist():
        ends = frozenset(
            (ipaddress.ip_address(row[f"{end}_ip"]).packed, row[f"{end}_port"])
            for end in ("client", "broker")
        )
        if ends in result.touched or row["connection_id"] not in known:
            touched.add(row["connection_id"])
    own: dict[int, int] = {}
    for row in tables.exchanges.to_arrow(["exchange_id", "connection_id"]).to_pylist():
        own[row["exchange_id"]] = row["connection_id"]
    rows: dict[str, Any] = defaultdict(Counter)
    for name in tables.names:
        if name not in OF_CONNECTIONS and not name.startswith(("apis/", "internal/")):
            continue  # made of several connections
        for row in tables[name].to_pylist():
            exchange = row.get("exchange_id")
            connection = own.get(exchange) if exchange else row.get("connection_id")
            if connection in touched or exchange in result.frames or connection is None:
                continue
            if name == "connections" and result.frames:
                continue  # names and users come from bodies
            if name == "anomalies" and (
                row["kind"].startswith("sequence_") or (exchange is None and result.frames)
            ):
                continue  # of several exchanges together
            shown = {key: value for key, value in row.items() if key not in out}
            if name == "connections":
                shown.pop("principal")  # a token's owner is told by another connection
            rows[name][repr(shown)] += 1
    return rows


def check_untouched(base: Base, tables: Any, result: Mutated) -> int:
    """What the mutation cannot have changed is as it was; the count of rows compared."""
    if result.touched is None:
        return 0
    known = set(base.tables.connections.to_arrow(["connection_id"]).column(0).to_pylist())
    before = _untouched_rows(base, base.tables, result, known)
    after = _untouched_rows(base, tables, result, known)
    compared = 0
    for name in before.keys() | after.keys():
        lost, new = before[name] - after[name], after[name] - before[name]
        need(
            not lost and not new, f"{name}: untouched rows changed:", list(lost)[:2], "became",
            list(new)[:2],
        )  # fmt: skip
        compared += sum(before[name].values())
    return compared


def made(seed: int) -> tuple[Base, str, Mutated, random.Random]:
    """The case of a seed: always the same one for the same sources."""
    choose = random.Random(seed)
    source = choose.randrange(len(sources()) + 2)  # the vectors twice as often
    origin = base(choose.randrange(4), min(source, len(sources())))
    what, result = mutated(origin, choose)
    return origin, what, result, choose


def check_bytes(
    data: bytes,
    packet_count: int | None = None,
    may_refuse: bool = True,
    split_bytes: int = 0,
    faults: frozenset[str] = frozenset(),
) -> Any:
    """Tables of a capture, with all that holds for any; None where it is refused as no capture.

    faults: accounts that need not add up.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        tables = read_bytes(data)
    except CaptureError:
        need(may_refuse, "refused")
        return None
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    need(grown < GROWN_BYTES_MAX, "resident bytes", grown)
    check_tables(tables, packet_count, faults)
    if split_bytes:
        found = set_differences(tables, read_bytes(data, split_bytes=split_bytes))
        need(not found, "other rows with splits of", split_bytes, *found[:2])
    return tables


def check_case(seed: int) -> tuple[str, int]:
    """Run one case; returns (mutation, compared rows), or raises Broken or kdissect's error."""
    origin, what, result, choose = made(seed)
    split_bytes = choose.choice((0, 0, 0, 1, 5000, 40_000))
    tables = check_bytes(
        result.data, result.packet_count, result.may_refuse, split_bytes, origin.faults
    )
    compared = 0 if tables is None else check_untouched(origin, tables, result)
    return f"{origin.name}: {what}", compared
