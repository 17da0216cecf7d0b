"""Columns of the page's tables: their order, labels and formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdissect import text as f
from kdissect.text import visible

WORD_MAX = 28  # characters; longer words may be broken
PAGE_ROWS = 60  # rows of a table on the page; the CSV file has all
_LONG_TEXT = 100  # longer texts open with a click

_TEXT_MAX = 1000
_HEAD_TEXT = 64

Row = Mapping[str, Any]

_FORMATS: dict[str, Callable[[Any], str]] = {
    "count": f.count,
    "bytes": f.byte_size,
    "ms": f.decimal,
    "decimal": f.decimal,
    "duration": f.duration,
    "share": f.share,
    "ratio": f.ratio,
    "time": f.moment,
    "day": f.day,
}
_TIMES = frozenset(("time", "day"))
NUMBERS = frozenset(_FORMATS) - _TIMES


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    key: of the row. kind: how values are written. bar: each value also as a share of the largest.
    help: what the number is, if the key means something else here than in other tables.
    """

    key: str
    label: str
    kind: str = "text"
    bar: bool = False
    help: str = ""

    @property
    def is_number(self) -> bool:
        return self.kind in NUMBERS

    @property
    def meaning(self) -> str:
        """One sentence for the heading's tooltip."""
        return self.help or _MEANINGS[self.key]


@dataclass(frozen=True, slots=True)
class Cell:
    """The content of a table cell. `sort` orders the column; `bar` is a percentage."""

    kind: str
    text: str
    sort: str | float | None = None
    bar: float | None = None
    rest: str = ""  # what a long text goes on with
    note: str = ""

    @property
    def word_length(self) -> int:
        """Characters of the longest word."""
        return max(map(len, f"{self.text} {self.rest} {self.note}".split()), default=0)

    @property
    def is_long(self) -> bool:
        """It has a word that is broken where the column ends."""
        return self.kind != "packet" and self.word_length > WORD_MAX


@dataclass(frozen=True, slots=True)
class View:
    """A table of the page.

    levels: per column, the narrowest window that shows it: 1 any, 2 from 700 pixels, 3 from 1400;
    columns of level 4 are only in a row's details.
    """

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    levels: tuple[int, ...]
    total: int
    csv: str | None = None
    note: str = ""

    @property
    def cut_levels(self) -> list[int]:
        """Levels of windows that do not show all columns."""
        return [level for level in (1, 2, 3) if max(self.levels) > level]


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
    count = len(every) if total is None else total
    return View(id_, caption, tuple(kept), cells, _levels(kept, cells), count, csv, note)


# Per level: pixels of a table in the narrowest window, those that a text column takes at most, and
# estimates of a character's and of a cell's padding. Texts wrap where they are wider.
_ROOMS = ((375, 120, 7.0, 14), (640, 180, 7.5, 20), (1140, 260, 7.5, 20))
_BUTTON = 24


def _levels(columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]) -> tuple[int, ...]:
    """Columns in the order of importance get the room that there is; the first has always some."""
    levels = [len(_ROOMS) + 1] * len(columns)
    for level, (room, *sizes) in enumerate(_ROOMS, 1):
        widths = [
            _width(column, [row[place] for row in rows], *sizes)
            for place, column in enumerate(columns)
        ]
        left = room - _BUTTON - sum(w for w, of in zip(widths, levels, strict=True) if of < level)
        for place, width in enumerate(widths):
            if levels[place] > level and (width <= left or place == 0):
                levels[place] = level
                left -= width
    return tuple(levels)


def _width(
    column: Column, cells: list[Cell], text_max: float, character: float, padding: float
) -> float:
    """Pixels that a column needs: its longest heading word and its values."""
    value = max(len(cell.text) + len(cell.note) + bool(cell.note) for cell in cells) * character
    if column.kind == "packet":
        value += padding
    elif not column.is_number and column.kind not in _TIMES:
        words = max(min(cell.word_length, WORD_MAX) for cell in cells) * character
        value = max(min(value, text_max), words)
    heading = max(map(len, column.label.split())) * (character + 1)
    return max(value, heading) + padding


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
        return _text_cell("text", name, visible(row.get("client_ip")))
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
    return _text_cell("code" if kind == "code" else "text", text)


def _text_cell(kind: str, text: str, note: str = "") -> Cell:
    if len(text) > _LONG_TEXT:
        return Cell(kind, text[:_HEAD_TEXT], text[:80], rest=text[_HEAD_TEXT:], note=note)
    return Cell(kind, text or f.NONE, text, note=note)


def _packet(row: Row, value: Any, captures: Mapping[Any, str]) -> Cell:
    """Wireshark's display filter for a packet, and the file when there are several."""
    if value is None:
        return Cell("text", f.NONE)
    path = captures.get(row.get("capture_id"), "")
    note = visible(path.replace("\\", "/").rpartition("/")[2], 300) if len(captures) > 1 else ""
    return Cell("packet", f"frame.number == {value}", value, note=note)


# What the columns say: one sentence a number, the same in every table that has it.
_MEANINGS = {
    "answers": "Responses that the broker sent without holding them back.",
    "api": "The kind of request, by Kafka's name.",
    "api_version": "The version of the request.",
    "api_versions": "The versions of each kind of request that the client sent.",
    "batch_size_max": "Size of the largest record batch.",
    "batch_size_p50": "Median size of a record batch.",
    "batch_size_p95": "95 % of the record batches are smaller.",
    "batches": "Number of record batches.",
    "begin_time": "Time of the first request, UTC.",
    "broker": "Address and port of the broker.",
    "byte_count": "Bytes, without the headers of packets.",
    "bytes": "Size of the record batches, as sent.",
    "cluster_id": "Id of the cluster, as the broker gave it.",
    "client_address": "Address and port of the client.",
    "client_id": "Name that the client gives itself, and its address.",
    "client_ids": "Names that the clients of the connection give themselves.",
    "clients": "Client ids, each at each of its addresses.",
    "close_reason": "What ended the connection.",
    "closed_by": "The side that sent the first FIN or RST.",
    "codec": "Compression of the record batches.",
    "codecs": "Compression of the record batches.",
    "commit_errors": "OffsetCommit requests that got an error.",
    "commits": "Commits of this group and partition.",
    "compression_ratio": "Bytes of the records divided by their bytes in the batch.",
    "connection_count": "Number of TCP connections.",
    "connections": "Number of TCP connections.",
    "detail": "What happened, in words.",
    "direction": "Whether records were written, read or replicated.",
    "download_ms": "Time in ms from the first to the last byte of the response.",
    "duration_ms": "Time in ms from begin to end.",
    "error": "Kafka's name of the error code.",
    "error_name": "Kafka's name of the error code.",
    "errors": "Responses with an error code that is no normal step of the protocol.",
    "event": "What happened.",
    "exchange_id": "Id of the exchange, for kdissect show --exchange.",
    "exchanges": "Requests with their responses, or either alone.",
    "first_time": "Time of the first one, UTC.",
    "gap_count": "Places in the stream where bytes are missing.",
    "generation": "Number of the group's generation.",
    "group_id": "Name of the consumer group.",
    "group_p50": "Median time in ms that JoinGroup and SyncGroup waited for other members.",
    "groups": "Groups that the client is a member of or commits for.",
    "handshake_rtt_ms": "Time in ms of the TCP handshake.",
    "heartbeat_errors": "Heartbeats that got an error.",
    "joins": "Number of JoinGroup requests.",
    "kind": "The fault, by its name in the table anomalies.",
    "lane": "The group, or the member.",
    "latency_p95": "95th percentile in ms of service time and the wait for earlier requests of "
    "the connection.",
    "leaves": "Members that left.",
    "long_polls": "Fetches that the broker held until there was data or the client's time was up.",
    "max": "Longest service time of an answer, in ms.",
    "members": "Member ids in the capture.",
    "missing_byte_count": "Bytes of the streams that the capture does not have.",
    "out_of_order_segment_count": "TCP segments that came after a later one.",
    "outcome": "How the transaction ended.",
    "p50": "Median service time in ms: half of the answers took less.",
    "p95": "95 % of the answers had a shorter service time, in ms.",
    "p99": "99 % of the answers had a shorter service time, in ms.",
    "packet": "Wireshark's display filter of the packet; a click copies it.",
    "partition": "Number of the partition.",
    "partitions": "Partitions in the capture.",
    "poll_p50": "Median time in ms that the broker held a long poll.",
    "principal": "User that the client authenticated as.",
    "producer_id": "Number that the broker gave the producer.",
    "protocol": "What the connection carries.",
    "proxied_from": "Address and port of the client before a proxy.",
    "queued_ms": "Wait in ms for the responses to earlier requests of the connection.",
    "read_bytes": "Size of the record batches that consumers read.",
    "read_records": "Records that consumers read.",
    "rebalances": "Rebalances of the group in the capture.",
    "record_size_mean": "Mean size of a record, uncompressed.",
    "records": "Number of records.",
    "records_per_batch": "Mean number of records in a batch.",
    "request_bytes": "Size of the requests.",
    "request_packet": "Wireshark's display filter of the packet; a click copies it.",
    "request_rtt_ms_p50": "Median time in ms until the broker acknowledged a segment of the "
    "client, at the capture point.",
    "request_time": "Time of the request, UTC.",
    "response_bytes": "Size of the responses.",
    "response_rtt_ms_p50": "Median time in ms until the client acknowledged a segment of the "
    "broker, at the capture point.",
    "retransmitted_segment_count": "TCP segments that were sent again.",
    "retransmitted_share": "Retransmitted segments, of all segments of the connection.",
    "role": "broker: one of its connections carries requests that only brokers send.",
    "sasl_mechanism": "How the client authenticated.",
    "segment_count": "Number of TCP segments.",
    "service_ms": "Time in ms that the broker took, from the end of the request or of the "
    "previous response to the first byte of the response.",
    "severity": "How bad the fault is.",
    "software": "Client library and its version, as the client gives them.",
    "status": "Why there is no response.",
    "tls_sni": "Host name in the TLS handshake.",
    "tls_version": "Version of TLS.",
    "topic": "Name of the topic.",
    "topics": "Names of the topics.",
    "transactional_id": "Name of the transactional producer.",
    "transactional_ids": "Names of the client's transactional producers.",
    "transactions": "Transactions in the capture.",
    "unanswered": "Requests without a response, of which the capture misses no byte.",
    "uncompressed_bytes": "Size of the records, uncompressed.",
    "upload_ms": "Time in ms from the first to the last byte of the request.",
    "why": "The reason, in words.",
    "window_scales": "Window scale options of the client's and the broker's SYN.",
    "write_bytes": "Size of the record batches that producers wrote.",
    "write_records": "Records that producers wrote.",
    "zero_window_ms": "Time in ms in which either side had closed its receive window.",
}

C = Column

_LATENCY = (
    C("exchanges", "exchanges", "count", bar=True),
    C("p50", "p50 ms", "ms"),
    C("p95", "p95 ms", "ms", bar=True),
    C("errors", "errors", "count"),
    C("p99", "p99 ms", "ms"),
    C("max", "max ms", "ms"),
    C("answers", "answers", "count"),
    C("unanswered", "unanswered", "count"),
    C("long_polls", "long polls", "count"),
    C("latency_p95", "p95 with queue ms", "ms"),
    C("poll_p50", "poll p50 ms", "ms"),
    C("group_p50", "member wait p50 ms", "ms"),
)
LATENCY_APIS = (C("api", "API"), *_LATENCY)
TIME_SPENT = (
    C("api", "API"),
    C("service_ms", "service ms", "ms", bar=True, help="Sum of the answers' service time, in ms."),
    C("answers", "answers", "count"),
    C("queued_ms", "queued ms", "ms"),
    C("upload_ms", "upload ms", "ms"),
    C("download_ms", "download ms", "ms"),
)
LATENCY_CLIENTS = (
    C("client_id", "client", "client"),
    *_LATENCY,
    C("is_broker", "broker", "flag", help="The client is a broker of the cluster."),
)
LATENCY_BROKERS = (C("broker", "broker"), *_LATENCY)
SLOWEST = (
    C("api", "API"),
    C("service_ms", "service ms", "ms", bar=True),
    C("client_id", "client", "client"),
    C("request_packet", "packet", "packet"),
    C("topics", "topics", "list"),
    C("error_name", "error"),
    C("request_time", "sent at (UTC)", "time"),
    C("group_id", "group"),
    C("broker", "broker"),
    C("queued_ms", "queued before ms", "ms"),
    C("upload_ms", "upload ms", "ms"),
    C("download_ms", "download ms", "ms"),
    C("api_version", "version"),
    C("exchange_id", "exchange", "code"),
)
ERROR_CODES = (
    C("error", "error", "code"),
    C("count", "count", "count", bar=True, help="How often the code is in a response."),
    C("api", "API"),
    C("clients", "clients", "count"),
    C("packet", "first packet", "packet"),
    C("topics", "topics", "list"),
    C("routine", "why it is routine", help="Why the code is a normal step of the protocol."),
    C("is_retriable", "retriable", "flag", help="The client may send the request again."),
    C("exchanges", "answers", "count", help="Responses that have the code."),
)
ERROR_PLACES = (
    C("error", "error", "code"),
    C("count", "count", "count", bar=True, help="How often the code is in this field."),
    C("api", "API"),
    C("topic", "topic"),
    C("packet", "first packet", "packet"),
    C("clients", "clients", "list", help="Client ids that got it."),
    C("subject", "about", help="What the code is about, if not a topic."),
    C("message", "message", help="The broker's message."),
    C("path", "where", "code", help="The field of the response that has the code."),
    C("partitions", "partitions", "list", help="Numbers of the partitions."),
    C("first_time", "first at (UTC)", "time"),
    C("exchange_id", "first exchange", "code"),
)
UNANSWERED = (
    C("api", "API"),
    C("count", "requests", "count", bar=True, help="Requests without a response."),
    C("client_id", "client", "client"),
    C("status", "why", "code"),
    C("packet", "first packet", "packet"),
    C("broker", "broker"),
    C("first_time", "first at (UTC)", "time"),
)
CLIENTS = (
    C("client_id", "client", "client"),
    C("change", "change", help="Requests from the given time on, compared with those before."),
    C("exchanges", "exchanges", "count", bar=True),
    C("errors", "errors", "count"),
    C("p95", "p95 ms", "ms"),
    C("role", "role"),
    C("software", "software"),
    C("principal", "principal"),
    C("unanswered", "unanswered", "count"),
    C("request_bytes", "sent", "bytes"),
    C("response_bytes", "received", "bytes"),
    C("connections", "connections", "count"),
    C("p50", "p50 ms", "ms"),
    C("sasl_mechanism", "SASL"),
    C("tls_version", "TLS"),
    C("changes", "changes", "list", help="Seen for the first time (+), or not seen again (-)."),
    C("topics_written", "writes", "list", help="Topics of its Produce requests."),
    C("topics_read", "reads", "list", help="Topics that it fetched."),
    C("groups", "groups", "list"),
    C("transactional_ids", "transactional ids", "list"),
    C("api_versions", "API versions", "list"),
    C("observed_ms", "observed", "duration", help="Time in which it had an open connection."),
    C("first_time", "first at (UTC)", "time"),
    C("last_time", "last at (UTC)", "time", help="Time of its last request, UTC."),
)
SESSIONS = (
    C("tls_version", "TLS"),
    C("tls_cipher", "cipher suite", help="Cipher suite of the connections, by IANA's name."),
    C("sasl_mechanism", "SASL"),
    C("connections", "connections", "count", bar=True),
    C("client_hosts", "client hosts", "count", help="Addresses that clients connect from."),
    C("alerts", "failed handshakes", "count", help="Handshakes that ended with a fatal alert."),
    C("broker_ports", "ports", "list", help="Ports of the brokers."),
)
CERTIFICATES = (
    C("address", "address", help="The broker or the client host that presents it."),
    C("state", "state", help="Its validity at the last connection in the capture."),
    C("not_after", "expires", "day", help="End of its validity, UTC."),
    C("subject", "subject", help="Name of its owner."),
    C("days_left", "days left", "decimal", help="Days from the last connection to its end."),
    C("issuer", "issuer", help="Name of the authority that signed it."),
    C("side", "of", help="The side of the connection that presents it."),
    C("connections", "connections", "count"),
    C("not_before", "valid from", "day", help="Begin of its validity, UTC."),
)
LOGINS = (
    C("principal", "principal"),
    C("sasl_mechanism", "SASL"),
    C("client_ip", "client host", help="Address of the client."),
    C("accepted", "accepted", "count", help="Connections with answers to later requests."),
    C("refused", "refused", "count", bar=True, help="Connections whose login failed."),
    C("errors", "errors", "list", help="Kafka's names of the error codes."),
    C("undecided", "undecided", "count", help="Connections that show neither."),
    C("first_time", "first at (UTC)", "time"),
    C("last_time", "last at (UTC)", "time", help="Time of the last packet, UTC."),
)
READINESS = (
    C("client_id", "client", "client"),
    C("verdict", "verdict", "level", help="Whether the client works with that release."),
    C("request_count", "requests", "count", bar=True, help="Requests in the capture."),
    C("why", "why"),
    C("upgrade", "what to do", help="The release of the client library that works."),
    C("requests", "not taken", "list", help="Requests that the release does not take."),
    C("old_formats", "formats not taken", "list", help="Record formats that it does not take."),
    C("software", "software"),
    C("principal", "principal"),
    C("connection_count", "connections", "count"),
)
TOPICS_COLUMNS = (
    C("topic", "topic"),
    C("write_bytes", "written", "bytes", bar=True),
    C("read_bytes", "read", "bytes", bar=True),
    C("writers", "writers", "count", help="Clients that wrote."),
    C("readers", "readers", "count", help="Clients that read."),
    C("partitions", "partitions seen", "count"),
    C("write_records", "records written", "count"),
    C("read_records", "records read", "count"),
    C("codecs", "codecs", "list"),
    C("compression_ratio", "compression", "ratio"),
    C("replicate_bytes", "replicated", "bytes", help="Size of the batches that brokers copied."),
    C("batch_size_p50", "batch p50", "bytes"),
    C("batch_size_max", "batch max", "bytes"),
    C("records_per_batch", "records a batch", "decimal"),
    C("record_size_mean", "record mean", "bytes"),
)
TOPIC_CLIENTS = (
    C("topic", "topic"),
    C("direction", "does"),
    C("client_id", "client", "client"),
    C("bytes", "bytes", "bytes", bar=True),
    C("records", "records", "count"),
    C("packet", "first packet", "packet"),
    C("batches", "batches", "count"),
    C("partitions", "partitions", "count"),
    C("codecs", "codecs", "list"),
    C("exchanges", "requests", "count", help="Requests for the topic."),
    C("magics", "formats", "list", help="Record formats: 0 and 1 are old message sets."),
    C("first_time", "first at (UTC)", "time"),
)
CODECS = (
    C("direction", "direction"),
    C("codec", "codec", "code"),
    C("bytes", "bytes", "bytes", bar=True),
    C("compression_ratio", "compression", "ratio"),
    C("batches", "batches", "count"),
    C("records", "records", "count"),
    C("records_per_batch", "records a batch", "decimal"),
    C("batch_size_p50", "batch p50", "bytes"),
    C("record_size_mean", "record mean", "bytes"),
    C("uncompressed_bytes", "uncompressed", "bytes"),
    C("batch_size_p95", "batch p95", "bytes"),
    C("batch_size_max", "batch max", "bytes"),
)
GROUPS_COLUMNS = (
    C("group_id", "group"),
    C("rebalances", "rebalances", "count", bar=True),
    C("rebalance_ms", "in all ms", "ms", help="Sum of the time of all rebalances, in ms."),
    C("rebalance_ms_max", "longest ms", "ms", help="Time of the longest rebalance, in ms."),
    C("members", "members seen", "count"),
    C("clients", "clients", "count"),
    C("heartbeat_errors", "heartbeats refused", "count"),
    C("commit_errors", "commits refused", "count"),
    C("group_type", "type", help="The protocol of the group."),
    C("joins", "joins", "count"),
    C("leaves", "leaves", "count"),
)
REBALANCES = (
    C("group_id", "group"),
    C("duration_ms", "took ms", "ms", bar=True),
    C("why", "why"),
    C("begin_time", "began (UTC)", "time"),
    C("packet", "packet", "packet"),
    C("generation", "generation", "count"),
    C("detail", "who took part", help="Members that took part."),
)
STORY = (
    C("event", "event", "code"),
    C("time", "at (UTC)", "time", help="Time of the event, UTC."),
    C("lane", "who"),
    C("duration_ms", "took ms", "ms"),
    C("detail", "detail"),
    C("packet", "packet", "packet"),
    C("generation", "generation", "count"),
)
_TRANSACTION_TIMES = (
    C("p50", "p50 ms", "ms", help="Median time in ms of a transaction."),
    C("p95", "p95 ms", "ms", help="95 % of the transactions took less, in ms."),
    C("max", "max ms", "ms", help="Time in ms of the longest transaction."),
)
OUTCOMES = (
    C("outcome", "outcome", "code"),
    C("count", "transactions", "count", bar=True, help="Transactions that ended so."),
    C("records", "records", "count"),
    *_TRANSACTION_TIMES,
)
PRODUCERS = (
    C("transactional_id", "transactional id"),
    C("transactions", "transactions", "count", bar=True),
    C("commits", "commit", "count", help="Transactions that were committed."),
    C("aborts", "abort", "count", help="Transactions that were aborted."),
    C("fenced", "fenced", "count", help="Transactions whose producer was replaced by a newer one."),
    C("open", "open", "count", help="Transactions whose end the capture does not have."),
    C("records", "records", "count"),
    *_TRANSACTION_TIMES[::2],
    C("producer_ids", "producer ids", "count", help="Different producer ids."),
    C("producer_epoch_max", "highest epoch", "count", help="Highest epoch of the producer."),
)
TRANSACTIONS_COLUMNS = (
    C("transactional_id", "transactional id"),
    C("outcome", "outcome", "code"),
    C("duration_ms", "took ms", "ms", bar=True),
    C("record_count", "records", "count", help="Records of the transaction."),
    C("begin_time", "began (UTC)", "time"),
    C("client_id", "client", "client"),
    C("packet", "first packet", "packet"),
    C("partitions", "partitions", "list", help="Partitions that the transaction wrote to."),
    C("producer_id", "producer id"),
    C("producer_epoch", "epoch", help="Epoch of the producer."),
)
THROTTLING = (
    C("client_id", "client", "client"),
    C("throttle_ms", "throttled ms", "ms", bar=True, help="Sum of the throttle times, in ms."),
    C("api", "API"),
    C("responses", "answers", "count", help="Responses with a throttle time."),
    C("throttle_ms_max", "longest ms", "ms", help="Longest throttle time, in ms."),
    C("packet", "longest, packet", "packet"),
    C("broker", "broker"),
    C("first_time", "first at (UTC)", "time"),
)
LAG = (
    C("group_id", "group"),
    C("lag_at_end", "at the end", "count", bar=True, help="Records behind at the capture's end."),
    C("topic", "topic"),
    C("partition", "partition", "count"),
    C("lag_max", "highest lag", "count", help="Records behind at the worst commit."),
    C("lag_at_last_commit", "at last commit", "count", help="Records behind at the last commit."),
    C("log_end", "log end", "count", help="Highest end of the log in any response."),
    C("last_committed", "last committed", "count", help="Offset of the last commit."),
    C("commits", "commits", "count"),
    C("first_committed", "first committed", "count", help="Offset of the first commit."),
    C("undecided_commits", "undecided", "count", help="Commits whose end the capture lacks."),
)
LOSSY = (
    C("client_address", "client"),
    C("retransmitted_segment_count", "retransmitted", "count", bar=True),
    C("retransmitted_share", "share", "share"),
    C("broker", "broker"),
    C("missing_byte_count", "missing", "bytes"),
    C("gap_count", "gaps", "count"),
    C("out_of_order_segment_count", "out of order", "count"),
    C("client_ids", "client ids"),
    C("segment_count", "segments", "count"),
    C("handshake_rtt_ms", "handshake ms", "ms"),
    C("request_rtt_ms_p50", "client RTT ms", "ms"),
    C("response_rtt_ms_p50", "broker RTT ms", "ms"),
    C("zero_window_ms", "closed window ms", "ms"),
    C("window_scales", "window scales"),
    C("proxied_from", "proxied from"),
    C("close_reason", "ended by", "code"),
    C("closed_by", "closed by", "code"),
)
OTHERS = (
    C("client_address", "client"),
    C("protocol", "protocol", "code"),
    C("byte_count", "bytes", "bytes", bar=True),
    C("broker", "server", help="Address and port of the server."),
    C("tls_sni", "server name"),
    C("tls_version", "TLS"),
    C("first_time", "first at (UTC)", "time"),
    C("close_reason", "ended by", "code"),
)
ANOMALY_KINDS = (
    C("kind", "kind", "code"),
    C("severity", "severity", "level"),
    C("count", "count", "count", bar=True, help="How often the fault was found."),
    C("bytes", "bytes", "bytes", help="Bytes that the faults cover."),
    C("connections", "connections", "count"),
)
ANOMALIES_COLUMNS = (
    C("kind", "kind", "code"),
    C("severity", "severity", "level"),
    C("packet", "packet", "packet"),
    C("detail", "what"),
    C("client_address", "client"),
    C("broker", "broker"),
    C("api", "API"),
    C("direction", "direction", help="Whether the request or the response has the fault."),
    C("byte_count", "bytes", "bytes", help="Bytes that the fault covers."),
    C("exchange_id", "exchange", "code"),
)
CAPTURES = (
    C("file", "file", help="Name of the capture file."),
    C("packet_count", "packets", "count", bar=True, help="Packets in the file."),
    C("byte_count", "packet bytes", "bytes", help="Size of the packets, without file headers."),
    C("first_time", "first packet (UTC)", "day", help="Time of the first packet, UTC."),
    C("error", "error", help="Why the file could not be read to its end."),
    C("truncated_packet_count", "cut packets", "count", help="Packets that were saved in part."),
    C("duplicate_packet_count", "duplicates", "count", help="Packets that are there twice."),
    C("ignored_packet_count", "ignored", "count", help="Packets that carry no TCP to be read."),
    C("last_time", "last packet (UTC)", "day", help="Time of the last packet, UTC."),
    C("ignored", "why ignored", help="Why packets were ignored, with their numbers."),
    C("format", "format", help="pcap or pcapng."),
    C("compression", "compression", help="Compression of the file."),
)
PROTOCOLS = (
    C("protocol", "protocol", "code"),
    C("connections", "connections", "count", bar=True),
    C("bytes", "bytes", "bytes", help="Bytes of the connections, both ways."),
)
BROKERS_COLUMNS = (
    C("node_id", "node", help="Id of the broker in its cluster."),
    C("host", "host", help="Host name that the broker advertises."),
    C("port", "port", help="Port that the broker advertises."),
    C("ip", "address", help="Address of the broker in the capture."),
    C("rack", "rack", help="Rack of the broker."),
    C("cluster_id", "cluster id", "code"),
)


def _differences(*names: str) -> tuple[Column, ...]:
    """Percentiles of the broker's time less the capture's."""
    return tuple(
        C(name, f"{name} ms", "ms", help=f"Broker's time less the capture's in ms: {meaning}.")
        for name in names
        for meaning in [_SHARES.get(name) or f"{name[1:]} % of the exchanges are below"]
    )


_SHARES = {"p50": "median", "min": "least", "max": "most"}
BROKER_TIMES = (
    C("api", "API"),
    C("count", "exchanges", "count", bar=True, help="Exchanges that capture and log have."),
    *_differences("p50", "p99", "p1", "p5", "p25", "p75", "p95", "min", "max"),
)
