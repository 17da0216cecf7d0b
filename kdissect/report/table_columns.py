"""Tables of the page: which columns, in which order, said how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdissect import text as f
from kdissect.text import visible

PAGE_ROWS = 60  # rows of a table on the page; the CSV file has all
_LONG_TEXT = 100  # longer texts open when asked

_TEXT_MAX = 1000
_HEAD_TEXT = 64

Row = Mapping[str, Any]

_FORMATS: dict[str, Callable[[Any], str]] = {
    "count": f.count,
    "bytes": f.byte_size,
    "ms": f.decimal,
    "decimal": f.decimal,
    "share": f.share,
    "ratio": f.ratio,
    "time": f.moment,
    "day": f.day,
}
_TIMES = frozenset(("time", "day"))
NUMBERS = frozenset(_FORMATS) - _TIMES


@dataclass(frozen=True, slots=True)
class Column:
    """key: of the row; kind: how it is said; bar: shown as a share of the column's largest too."""

    key: str
    label: str
    kind: str = "text"
    bar: bool = False
    help: str = ""

    @property
    def is_number(self) -> bool:
        return self.kind in NUMBERS


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a cell. `sort` orders the column; `bar` is a percentage."""

    kind: str
    text: str
    sort: str | float | None = None
    bar: float | None = None
    rest: str = ""  # what a long text goes on with
    note: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """A table of the page."""

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    total: int
    csv: str | None = None
    note: str = ""


def view(
    id_: str,
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Row],
    *,
    total: int | None = None,
    csv: str | None = None,
    note: str = "",
    captures: Mapping[Any, str] | None = None,
    limit: int = PAGE_ROWS,
    dated: bool = False,
) -> View | None:
    """A table of the first `limit` rows; None without rows.

    Columns without anything but zeros are left out.
    """
    every = list(rows)
    shown = every[:limit]
    if not shown:
        return None
    kept = [column for column in columns if any(_has(row.get(column.key)) for row in shown)]
    tops = {
        column.key: max((row.get(column.key) or 0 for row in shown), default=0) or 1
        for column in kept
        if column.bar
    }
    cells = tuple(
        tuple(_cell(row, column, tops.get(column.key), captures or {}, dated) for column in kept)
        for row in shown
    )
    return View(id_, caption, tuple(kept), cells, len(every) if total is None else total, csv, note)


def _has(value: Any) -> bool:
    return value is not None and value not in ([], "", 0)


def _cell(
    row: Row, column: Column, top: float | None, captures: Mapping[Any, str], dated: bool
) -> Cell:
    value = row.get(column.key)
    kind = column.kind
    if kind == "packet":
        return _packet(row, value, captures)
    if kind == "client":
        name = visible(row.get("client_id"), 300) or "(none)"
        return Cell("text", name, name, note=visible(row.get("client_ip")))
    if kind in _FORMATS:
        if kind in _TIMES:
            said = f.dated if dated and kind == "time" else _FORMATS[kind]
            return Cell("time", said(value), value or "")
        bar = None if top is None or not value else round(100 * value / top, 1)
        return Cell("number", _FORMATS[kind](value), value, bar)
    if kind == "list":
        value = ", ".join(str(item) for item in value or [] if item is not None)
    if kind == "flag":
        return Cell("text", column.label if value else "", 1 if value else 0)
    text = visible(None if value is None else str(value), _TEXT_MAX)
    if kind == "level":
        return Cell("level", text, text)
    name = "code" if kind == "code" else "text"
    if len(text) > _LONG_TEXT:
        return Cell(name, text[:_HEAD_TEXT], text[:80], rest=text[_HEAD_TEXT:])
    return Cell(name, text or f.NONE, text)


def _packet(row: Row, value: Any, captures: Mapping[Any, str]) -> Cell:
    """Wireshark's display filter for a packet, and the file when there are several."""
    if value is None:
        return Cell("text", f.NONE)
    path = captures.get(row.get("capture_id"), "")
    note = visible(path.replace("\\", "/").rpartition("/")[2], 300) if len(captures) > 1 else ""
    return Cell("packet", f"frame.number == {value}", value, note=note)


C = Column

_LATENCY = (
    C("exchanges", "exchanges", "count", bar=True),
    C("answers", "answers", "count"),
    C("p50", "p50 ms", "ms"),
    C("p95", "p95 ms", "ms", bar=True),
    C("p99", "p99 ms", "ms"),
    C("max", "max ms", "ms"),
    C(
        "latency_p95",
        "p95 with queue ms",
        "ms",
        help="latency_ms: with the wait behind earlier requests of the connection",
    ),
    C("long_polls", "long polls", "count"),
    C("poll_p50", "poll p50 ms", "ms"),
    C("group_p50", "member wait p50 ms", "ms"),
    C("unanswered", "unanswered", "count"),
    C("errors", "errors", "count"),
)
LATENCY_APIS = (C("api", "API"), *_LATENCY)
TIME_SPENT = (
    C("api", "API"),
    C("answers", "answers", "count"),
    C("upload_ms", "upload ms", "ms", help="requests, first to last byte"),
    C("queued_ms", "queued ms", "ms", help="behind earlier requests of the connection"),
    C("service_ms", "service ms", "ms", bar=True, help="at the broker"),
    C("download_ms", "download ms", "ms", help="responses, first to last byte"),
)
LATENCY_CLIENTS = (
    C("client_id", "client", "client"),
    C("is_broker", "broker", "flag"),
    *_LATENCY,
)
LATENCY_BROKERS = (C("broker", "broker"), *_LATENCY)
SLOWEST = (
    C("api", "API"),
    C("api_version", "version"),
    C("client_id", "client", "client"),
    C("broker", "broker"),
    C("service_ms", "service ms", "ms", bar=True),
    C("queued_ms", "queued before ms", "ms"),
    C("upload_ms", "upload ms", "ms"),
    C("download_ms", "download ms", "ms"),
    C("request_time", "asked at (UTC)", "time"),
    C("topics", "topics", "list"),
    C("group_id", "group"),
    C("error_name", "error"),
    C("request_packet", "packet", "packet"),
    C("exchange_id", "exchange", "code"),
)
ERROR_CODES = (
    C("error", "error", "code"),
    C("api", "API"),
    C("count", "count", "count", bar=True),
    C("exchanges", "answers", "count"),
    C("clients", "clients", "count"),
    C("topics", "topics", "list"),
    C("is_retriable", "retriable", "flag"),
    C("routine", "why it is routine"),
    C("packet", "first packet", "packet"),
)
ERROR_PLACES = (
    C("error", "error", "code"),
    C("api", "API"),
    C("path", "where", "code"),
    C("topic", "topic"),
    C("partitions", "partitions", "list"),
    C("subject", "about"),
    C("message", "message"),
    C("clients", "clients", "list"),
    C("count", "count", "count", bar=True),
    C("first_time", "first at (UTC)", "time"),
    C("packet", "first packet", "packet"),
    C("exchange_id", "first exchange", "code"),
)
UNANSWERED = (
    C("api", "API"),
    C("client_id", "client", "client"),
    C("broker", "broker"),
    C("status", "why", "code"),
    C("count", "requests", "count", bar=True),
    C("first_time", "first at (UTC)", "time"),
    C("packet", "first packet", "packet"),
)
CLIENTS = (
    C("client_id", "client", "client"),
    C("role", "role"),
    C("software", "software"),
    C("principal", "principal"),
    C("sasl_mechanism", "SASL"),
    C("tls_version", "TLS"),
    C("connections", "connections", "count"),
    C("exchanges", "exchanges", "count", bar=True),
    C("errors", "errors", "count"),
    C("unanswered", "unanswered", "count"),
    C("p50", "p50 ms", "ms"),
    C("p95", "p95 ms", "ms"),
    C("request_bytes", "sent", "bytes"),
    C("response_bytes", "received", "bytes"),
    C("groups", "groups", "list"),
    C("transactional_ids", "transactional ids", "list"),
    C("api_versions", "API versions", "list"),
)
READINESS = (
    C("verdict", "verdict", "level"),
    C("client_id", "client", "client"),
    C("software", "software"),
    C("principal", "principal"),
    C("connection_count", "connections", "count"),
    C("request_count", "requests", "count", bar=True),
    C("requests", "not taken", "list"),
    C("old_formats", "formats not taken", "list"),
    C("why", "why"),
    C("upgrade", "what to do"),
)
TOPICS_COLUMNS = (
    C("topic", "topic"),
    C("writers", "writers", "count"),
    C("readers", "readers", "count"),
    C("partitions", "partitions seen", "count"),
    C("write_bytes", "written", "bytes", bar=True),
    C("write_records", "records written", "count"),
    C("read_bytes", "read", "bytes", bar=True),
    C("read_records", "records read", "count"),
    C("replicate_bytes", "replicated", "bytes"),
    C("codecs", "codecs", "list"),
    C("compression_ratio", "compression", "ratio"),
    C("batch_size_p50", "batch p50", "bytes"),
    C("batch_size_max", "batch max", "bytes"),
    C("records_per_batch", "records a batch", "decimal"),
    C("record_size_mean", "record mean", "bytes"),
)
TOPIC_CLIENTS = (
    C("topic", "topic"),
    C("direction", "does"),
    C("client_id", "client", "client"),
    C("records", "records", "count"),
    C("bytes", "bytes", "bytes", bar=True),
    C("batches", "batches", "count"),
    C("partitions", "partitions", "count"),
    C("exchanges", "requests", "count"),
    C("codecs", "codecs", "list"),
    C("magics", "formats", "list", help="magic: 0 and 1 are old message sets"),
    C("first_time", "first at (UTC)", "time"),
    C("packet", "first packet", "packet"),
)
CODECS = (
    C("direction", "direction"),
    C("codec", "codec", "code"),
    C("batches", "batches", "count"),
    C("records", "records", "count"),
    C("bytes", "bytes", "bytes", bar=True),
    C("uncompressed_bytes", "uncompressed", "bytes"),
    C("compression_ratio", "compression", "ratio"),
    C("records_per_batch", "records a batch", "decimal"),
    C("batch_size_p50", "batch p50", "bytes"),
    C("batch_size_p95", "batch p95", "bytes"),
    C("batch_size_max", "batch max", "bytes"),
    C("record_size_mean", "record mean", "bytes"),
)
GROUPS_COLUMNS = (
    C("group_id", "group"),
    C("group_type", "type"),
    C("members", "members seen", "count"),
    C("clients", "clients", "count"),
    C("rebalances", "rebalances", "count", bar=True),
    C("rebalance_ms", "in all ms", "ms"),
    C("rebalance_ms_max", "longest ms", "ms"),
    C("joins", "joins", "count"),
    C("leaves", "leaves", "count"),
    C("heartbeat_errors", "heartbeats refused", "count"),
    C("commit_errors", "commits refused", "count"),
)
REBALANCES = (
    C("group_id", "group"),
    C("generation", "generation", "count"),
    C("begin_time", "began (UTC)", "time"),
    C("duration_ms", "took ms", "ms", bar=True),
    C("why", "why"),
    C("detail", "who took part"),
    C("packet", "packet", "packet"),
)
STORY = (
    C("time", "at (UTC)", "time"),
    C("event", "event", "code"),
    C("lane", "who"),
    C("generation", "generation", "count"),
    C("duration_ms", "took ms", "ms"),
    C("detail", "detail"),
    C("packet", "packet", "packet"),
)
OUTCOMES = (
    C("outcome", "outcome", "code"),
    C("count", "transactions", "count", bar=True),
    C("records", "records", "count"),
    C("p50", "p50 ms", "ms"),
    C("p95", "p95 ms", "ms"),
    C("max", "max ms", "ms"),
)
PRODUCERS = (
    C("transactional_id", "transactional id"),
    C("transactions", "transactions", "count", bar=True),
    C("commits", "commit", "count"),
    C("aborts", "abort", "count"),
    C("fenced", "fenced", "count"),
    C("open", "open", "count"),
    C("records", "records", "count"),
    C("p50", "p50 ms", "ms"),
    C("max", "max ms", "ms"),
    C("producer_ids", "producer ids", "count"),
    C("producer_epoch_max", "highest epoch", "count"),
)
TRANSACTIONS_COLUMNS = (
    C("transactional_id", "transactional id"),
    C("outcome", "outcome", "code"),
    C("begin_time", "began (UTC)", "time"),
    C("duration_ms", "took ms", "ms", bar=True),
    C("record_count", "records", "count"),
    C("partitions", "partitions", "list"),
    C("producer_id", "producer id"),
    C("producer_epoch", "epoch"),
    C("client_id", "client", "client"),
    C("packet", "first packet", "packet"),
)
THROTTLING = (
    C("client_id", "client", "client"),
    C("api", "API"),
    C("broker", "broker"),
    C("responses", "answers", "count"),
    C("throttle_ms", "throttled ms", "ms", bar=True),
    C("throttle_ms_max", "longest ms", "ms"),
    C("first_time", "first at (UTC)", "time"),
    C("packet", "longest, packet", "packet"),
)
LAG = (
    C("group_id", "group"),
    C("topic", "topic"),
    C("partition", "partition", "count"),
    C("commits", "commits", "count"),
    C("undecided_commits", "undecided", "count"),
    C("first_committed", "first committed", "count"),
    C("last_committed", "last committed", "count"),
    C("log_end", "log end", "count"),
    C("lag_max", "highest lag", "count"),
    C("lag_at_last_commit", "at last commit", "count"),
    C("lag_at_end", "at the end", "count", bar=True),
)
LOSSY = (
    C("client_address", "client"),
    C("broker", "broker"),
    C("client_ids", "client ids"),
    C("segment_count", "segments", "count"),
    C("retransmitted_segment_count", "retransmitted", "count", bar=True),
    C("retransmitted_share", "share", "share"),
    C("out_of_order_segment_count", "out of order", "count"),
    C("gap_count", "gaps", "count"),
    C("missing_byte_count", "missing", "bytes"),
    C("handshake_rtt_ms", "handshake ms", "ms"),
    C("close_reason", "closed by", "code"),
)
OTHERS = (
    C("client_address", "client"),
    C("broker", "server"),
    C("protocol", "protocol", "code"),
    C("tls_version", "TLS"),
    C("tls_sni", "server name"),
    C("byte_count", "bytes", "bytes", bar=True),
    C("first_time", "first at (UTC)", "time"),
    C("close_reason", "closed by", "code"),
)
ANOMALY_KINDS = (
    C("kind", "kind", "code"),
    C("severity", "severity", "level"),
    C("count", "count", "count", bar=True),
    C("bytes", "bytes", "bytes"),
    C("connections", "connections", "count"),
)
ANOMALIES_COLUMNS = (
    C("kind", "kind", "code"),
    C("severity", "severity", "level"),
    C("detail", "what"),
    C("client_address", "client"),
    C("broker", "broker"),
    C("api", "API"),
    C("direction", "direction"),
    C("byte_count", "bytes", "bytes"),
    C("packet", "packet", "packet"),
    C("exchange_id", "exchange", "code"),
)
CAPTURES = (
    C("file", "file"),
    C("format", "format"),
    C("compression", "compression"),
    C("packet_count", "packets", "count", bar=True),
    C("byte_count", "bytes", "bytes"),
    C("first_time", "first packet (UTC)", "day"),
    C("last_time", "last packet (UTC)", "day"),
    C("truncated_packet_count", "cut packets", "count"),
    C("duplicate_packet_count", "duplicates", "count"),
    C("ignored_packet_count", "ignored", "count"),
    C("ignored", "why ignored"),
    C("error", "error"),
)
PROTOCOLS = (
    C("protocol", "protocol", "code"),
    C("connections", "connections", "count", bar=True),
    C("bytes", "bytes", "bytes"),
)
BROKERS_COLUMNS = (
    C("node_id", "node"),
    C("host", "host"),
    C("port", "port"),
    C("rack", "rack"),
    C("ip", "address"),
    C("cluster_id", "cluster id", "code"),
)
BROKER_TIMES = (
    C("api", "API"),
    C("count", "exchanges", "count", bar=True),
    C("p1", "p1 ms", "ms"),
    C("p5", "p5 ms", "ms"),
    C("p25", "p25 ms", "ms"),
    C("p50", "p50 ms", "ms"),
    C("p75", "p75 ms", "ms"),
    C("p95", "p95 ms", "ms"),
    C("p99", "p99 ms", "ms"),
    C("min", "min ms", "ms"),
    C("max", "max ms", "ms"),
)
