"""Table sets made for tests: from rows, and from real ones with every name replaced."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

import kdissect
from kdissect.api import Table, Tables
from kdissect.kafka.assembly import DIRECTION
from kdissect.pipeline.table_set import MANIFEST, commit, read_manifest, staging
from kdissect.pipeline.table_writer import ParquetSink
from kdissect.sql.requests import schema_of_api
from kdissect.tables.schemas import FIXED_TABLES, TOPICS

Row = dict[str, Any]
ENDS = {"client_ip": "10.0.0.1", "broker_ip": "10.0.0.9", "broker_port": 9092}
Change = Callable[[pa.Table], pa.Table]

SECOND_US = 1_000_000
START_US = 1_790_000_000 * SECOND_US

# A formula, the end of an element, new elements, an expression, reordered text, a control.
HOSTILE = (
    "=cmd|' /C calc'!A0"
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`&lt;{{7*7}}${7*7}"
    "\u202egnp.exe\x07\n=cmd()"
)
_NAMES = frozenset(
    (
        *("client_id", "client_ids", "client_software_name", "client_software_version"),
        *("principal", "topic", "topics", "name", "group_id", "member_id", "transactional_id"),
        *("detail", "error_message", "message", "host", "rack", "path", "error", "tls_sni"),
        *("group_instance_id", "resource_name", "leader", "protocol_name"),
    )
)


def tables(manifest: Row | None = None, **rows: pa.Table | Iterable[Row]) -> Tables:
    """A table set of these rows; keys are names, with ``__`` for ``/`` (``apis__Fetch``).

    Rows of ``apis/*`` need only the fields that matter.
    """
    made: dict[str, pa.Table] = {
        name: schema.empty_table() for name, schema in FIXED_TABLES.items()
    }
    for key, value in rows.items():
        group, _, api = key.partition("__")
        name = key.replace("__", "/")
        if not isinstance(value, pa.Table):
            schema = schema_of_api(api) if group == "apis" else FIXED_TABLES.get(name)
            value = pa.Table.from_pylist(list(value), schema=schema)
        made[name] = value
    of_nothing = {
        "options": {"ports": [], "keylog": []},
        "inputs": [],
        "totals": {"captures": 0, "packets": 0, "bytes": 0},
        "timings": {},
    }
    return Tables(
        {name: Table(name, pads.dataset(table)) for name, table in made.items()},
        of_nothing | (manifest or {}),
    )


def changed(source: Tables, name: str, change: Change) -> Tables:
    """The tables with one of them changed."""
    made = {each: source[each] for each in source.names}
    made[name] = Table(name, pads.dataset(change(source[name].to_arrow())))
    return Tables(made, source.manifest)


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    """The table with other values in a column, of its type."""
    field = table.schema.field(name)
    array = pa.array(values, field.type) if isinstance(values, list) else values.cast(field.type)
    return table.set_column(table.schema.get_field_index(name), field, array)


def exchange(
    number: int, *, second: float = 0, at_us: int = 0, latency_us: int | None = 1000, **values: Any
) -> Row:
    """A row of exchanges: one client, one connection unless said otherwise.

    second, at_us: when the request was sent, after the start.
    """
    asked = at(second) + at_us
    row: Row = {
        **ENDS,
        "exchange_id": number,
        "connection_id": 1,
        "client_port": 50000,
        "api_key": 3,
        "api_name": "Metadata",
        "api_version": 12,
        "correlation_id": number,
        "client_id": "app",
        "request_time": asked,
        "request_end_time": asked,
        "request_time_ns": asked * 1000,
        "request_size": 100,
        "request_capture_id": 7,
        "request_packet": number * 2,
        "request_pos": number * 100,
        "status": "response_missing",
        "decode_status": "ok",
        "topics": [],
        "error_codes": [],
    }
    if latency_us is not None:
        row |= {
            "response_time": asked + latency_us,
            "response_end_time": asked + latency_us,
            "response_time_ns": (asked + latency_us) * 1000,
            "latency_ms": latency_us / 1000,
            "duration_ms": latency_us / 1000,
            "queued_ms": 0.0,
            "service_ms": latency_us / 1000,
            "wait": "answer",
            "response_size": 200,
            "response_packet": number * 2 + 1,
            "response_pos": number * 100,
            "status": "paired",
            "error_code": 0,
        }
    return row | values


def hostile(source: Tables, text: str = HOSTILE) -> Tables:
    """The same tables with every name of the capture's replaced by one that attacks."""

    def attack(array: pa.Array) -> pa.Array:
        if pa.types.is_string(array.type):
            return pc.binary_join_element_wise(text, array, " ")
        return array

    changed = {}
    for name in source.names:
        table = source[name].to_arrow()
        # the names of definitions and of file formats are no capture's
        columns = [
            _map_named(column.combine_chunks(), attack, field.name in _NAMES)
            for column, field in zip(table.columns, table.schema, strict=True)
        ]
        changed[name] = pa.table(columns, schema=table.schema)
    return Tables(
        {name: Table(name, pads.dataset(table)) for name, table in changed.items()}, source.manifest
    )


def _map_named(array: Any, change: Callable[[pa.Array], pa.Array], named: bool) -> Any:
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    kind = array.type
    if pa.types.is_map(kind) or not len(array):
        return array
    if pa.types.is_list(kind):
        values = _map_named(array.values, change, named)
        return pa.ListArray.from_arrays(array.offsets, values, type=kind, mask=array.is_null())
    if pa.types.is_struct(kind):
        children = [
            _map_named(array.field(i), change, kind.field(i).name in _NAMES)
            for i in range(kind.num_fields)
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())
    return change(array) if named else array


_COUNTS = {f"{side}_{name}": 0 for side in ("request", "response") for name in DIRECTION.names}
LENGTH_S = 60  # of the captures


def at(seconds: float) -> int:
    """Return a time so many seconds after the start, as the tables have it."""
    return START_US + round(seconds * SECOND_US)


def connection(number: int = 1, **values: Any) -> Row:
    """A row of `connections`: an open connection of one client to one broker."""
    row: Row = {
        **ENDS,
        "connection_id": number,
        "client_port": 50000 + number,
        "first_time": at(0),
        "last_time": at(LENGTH_S),
        "handshake_seen": True,
        "close_reason": "capture_end",
        "is_kafka": True,
        "is_tls": False,
        "protocol": "kafka",
        "client_ids": ["app"],
    }
    return _COUNTS | row | values


def found(**rows: Any) -> list[Row]:
    """Return the incidents of a table set of these rows, in a capture of a minute."""
    capture = {"capture_id": 7, "path": "trace.pcap", "format": "pcap"}
    times = {"first_time": at(0), "last_time": at(LENGTH_S)}
    rows.setdefault("captures", [capture | times])
    incidents: list[Row] = tables(**rows).incidents().to_pylist()
    return incidents


def alarms(**rows: Any) -> list[Row]:
    """Return the incidents above information."""
    return [row for row in found(**rows) if row["severity"] != "info"]


def expect(
    incident: Row, kind: str, severity: str | None = None, *,
    start: float | None = None, end: float | None = None, **values: Any,
) -> None:  # fmt: skip
    """Assert columns of an incident. start, end: in seconds after the start of the capture."""
    wanted: Row = {"kind": kind, "severity": severity or incident["severity"], **values}
    for name, second in (("start_time", start), ("end_time", end)):
        if second is not None:
            wanted[name] = datetime.fromtimestamp(at(second) / SECOND_US, UTC)
    assert {name: incident[name] for name in wanted} == wanted


def rows(tables: Tables, name: str) -> list[dict[str, Any]]:
    return tables[name].to_pylist()


def kinds(tables: Tables) -> list[str]:
    return sorted(row["kind"] for row in rows(tables, "anomalies"))


def all_rows(tables: Tables) -> dict[str, list[str]]:
    """Every table as a sorted list of its rows' text."""
    return {name: sorted(map(repr, tables[name].to_pylist())) for name in tables.names}


def topics_table(*names: str) -> pa.Table:
    rows = [
        {"topic": name, "topic_id": "A" * 22, "first_time": None, "source": "x"} for name in names
    ]
    return pa.Table.from_pylist(rows, schema=TOPICS)


# A manifest without rows and captures, for `commit`.
NO_INPUTS = {"options": {"ports": [], "keylog": []}, "inputs": [], "timings": {}}
NO_INPUTS["totals"] = {"captures": 0, "packets": 0, "bytes": 0}


def write_topics(out: str, *names: str) -> None:
    """Write a table set that names these topics to a folder or URL."""
    with staging(out) as run_id:
        sink = ParquetSink(out, run_id, "t")
        sink("topics", topics_table(*names))
        commit(out, run_id, sink.close(), NO_INPUTS)


def topics_in(out: str) -> list[str]:
    return kdissect.open(out).topics.to_arrow()["topic"].to_pylist()


def set_files(out: str) -> list[str]:
    """The files of the table set in a folder or at a URL, and of its saved state, by name."""
    manifest = read_manifest(out)
    state = manifest.get("state", {}).get("tables", {})
    entries = (*manifest["tables"].values(), *state.values())
    return sorted([MANIFEST, *(name for entry in entries for name in entry["files"])])
