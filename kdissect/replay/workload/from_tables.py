"""A table set as the source of a replay: frames rebuilt from the rows of its tables.

A message is the row of its API encoded again, its records are those of `record_batches` and
`records` in new batches: the same records and headers, another compressed form. What the tables do
not hold (payload or secrets that were hidden, messages that were not decoded) is not rebuilt, and
the exchange says why.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import UUID

import pyarrow as pa

from kdissect.api import Tables, open_tables
from kdissect.codec.message import Message, encode_message
from kdissect.codec.message_codec import UNKNOWN_TAGS, Layout, layout
from kdissect.codec.record_codec import encode_entry
from kdissect.errors import EncodeError
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.protocol.model import Type
from kdissect.replay.model import ANONYMOUS_PRINCIPAL, Connection, Exchange
from kdissect.replay.workload.messages import NO_API, entries
from kdissect.tables.redaction import ALWAYS_HIDDEN, CONFIGS, TEXT

_RECORD_APIS: dict[int, str] = {
    ApiKey.PRODUCE: "request",
    ApiKey.FETCH: "response",
    ApiKey.SHARE_FETCH: "response",
}
_US = 1000

Row = dict[str, Any]


class _CannotRebuild(Exception):
    """The reason why a message of the tables cannot become a frame: one clause."""


def read_connections(path: str) -> tuple[list[Connection], list[str]]:
    """The connections of a table set, and notes on missing parts."""
    tables = open_tables(path)
    options = tables.manifest.get("options", {})
    payload = options.get("payload", "full")
    notes = [*tables.notes]
    if payload != "full":
        notes.append(
            f"{path}: dissected with --payload {payload}: messages with records are not rebuilt"
        )
    if not options.get("reveal_secrets", False):
        notes.append(
            f"{path}: dissected without --reveal-secrets: requests that held secrets are skipped"
        )
    connections = _connections(tables)
    records = _Records(tables, payload)
    frames = _frames(tables, records)
    captures = {
        row["capture_id"]: row["path"]
        for row in tables.captures.to_arrow(["capture_id", "path"]).to_pylist()
    }
    ordered = tables.exchanges.to_arrow().sort_by(
        [("request_time_ns", "ascending"), ("request_pos", "ascending")]
    )
    for row in _rows(ordered):
        owner = connections.get(row["connection_id"])
        if owner is not None:
            owner.exchanges.append(_exchange(row, frames, captures))
    return [each for each in connections.values() if each.exchanges], notes


def _rows(table: pa.Table) -> Iterator[Row]:
    for batch in table.to_batches(max_chunksize=4096):
        yield from batch.to_pylist()


def _ns(moment: datetime | None) -> int:
    if moment is None:
        return -1
    epoch = datetime(1970, 1, 1, tzinfo=moment.tzinfo)
    delta = moment - epoch
    return ((delta.days * 86400 + delta.seconds) * 1_000_000 + delta.microseconds) * _US


def _connections(tables: Tables) -> dict[int, Connection]:
    connections = {}
    columns = ["connection_id", "client_ip", "client_port", "broker_ip", "broker_port",
               "first_time", "last_time", "is_kafka", "is_tls", "sasl_mechanism", "principal",
               "handshake_seen"]  # fmt: skip
    for row in _rows(tables.connections.to_arrow(columns)):
        if row["is_kafka"]:
            connections[row["connection_id"]] = Connection(
                connection_id=row["connection_id"],
                number=-1,
                client=(row["client_ip"], row["client_port"]),
                broker=(row["broker_ip"], row["broker_port"]),
                start_time_ns=_ns(row["first_time"]),
                end_time_ns=_ns(row["last_time"]),
                is_tls=bool(row["is_tls"]),
                sasl_mechanism=row["sasl_mechanism"],
                principal=row["principal"] or (ANONYMOUS_PRINCIPAL if _is_anonymous(row) else ""),
            )
    return connections


def _is_anonymous(row: Row) -> bool:
    """Return whether a connection, captured from its start, has neither TLS nor SASL."""
    return row["handshake_seen"] and not row["is_tls"] and not row["sasl_mechanism"]


def _exchange(row: Row, frames: _FrameRows, captures: dict[int, str]) -> Exchange:
    api_key = NO_API if row["api_key"] is None else row["api_key"]
    has_request = row["request_time_ns"] is not None
    status = row["status"]
    exchange = Exchange(
        exchange_id=row["exchange_id"],
        connection=-1,
        index=-1,
        api_key=api_key,
        api_version=-1 if row["api_version"] is None else row["api_version"],
        correlation_id=-1 if row["correlation_id"] is None else row["correlation_id"],
        client_id=row["client_id"],
        request=None,
        response=None,
        request_time_ns=row["request_time_ns"] if has_request else row["response_time_ns"],
        request_end_time_ns=_ns(row["request_end_time"]),
        response_time_ns=_or(row["response_time_ns"], -1),
        response_end_time_ns=_ns(row["response_end_time"]),
        expects_response=status != "no_response_expected",
        request_packet=_or(row["request_packet"], -1),
        response_packet=_or(row["response_packet"], -1),
        capture=captures.get(row["request_capture_id"] or row["response_capture_id"], ""),
    )
    for side in ("request", "response"):
        frame: bytes | None = None
        reason = ""
        state = row[f"{side}_decode_status"]
        if state == "absent":
            reason = "it is not in the capture"
        elif state != "ok" or api_key == NO_API:
            reason = f"the tables do not hold it whole ({state})"
        else:
            try:
                frame = frames.frame(exchange, row, side)
            except _CannotRebuild as cause:
                reason = str(cause)
        if side == "response" and not exchange.expects_response:
            reason = ""
        setattr(exchange, side, frame)
        setattr(exchange, f"{side}_missing", reason)
    return exchange


def _or(value: Any, other: Any) -> Any:
    return other if value is None else value


class _FrameRows:
    """Rows of apis/* by API and exchange, made to frames."""

    def __init__(self, bodies: dict[int, tuple[int, Row]], records: _Records) -> None:
        self.bodies = bodies
        self.records = records

    def frame(self, exchange: Exchange, row: Row, side: str) -> bytes:
        found = self.bodies.get(exchange.exchange_id)
        if found is None or found[1][side] is None:
            raise _CannotRebuild("the tables do not hold the message")
        _, api_row = found
        api = catalog.api(exchange.api_key)
        api_version = exchange.api_version
        values = api_row[side]
        if (
            exchange.api_key == ApiKey.API_VERSIONS
            and side == "response"
            and values.get("error_code") == ErrorCode.UNSUPPORTED_VERSION
        ):
            api_version = 0  # KIP-511
        number = 0 if side == "request" else 1
        if side == "request":
            _check_secrets(exchange.api_key, number, values)
        body = _values(layout(api.side(side), api_version), values)
        _put_tags(body, api_row[f"{side}_unknown_tags"])
        if _RECORD_APIS.get(exchange.api_key) == side:
            self.records.put(exchange.exchange_id, exchange.api_key, body)
        header: Row = {"correlation_id": exchange.correlation_id}
        if side == "request":
            header["client_id"] = row["client_id"]
            if api.request_header_version(api_version) == 0:
                del header["client_id"]
        try:
            return encode_message(Message(exchange.api_key, api_version, side, header, body))
        except (EncodeError, ValueError) as error:
            raise _CannotRebuild(f"its row cannot be encoded: {error}") from None


def _frames(tables: Tables, records: _Records) -> _FrameRows:
    bodies: dict[int, tuple[int, Row]] = {}
    for name in tables.names:
        if not name.startswith("apis/"):
            continue
        key = catalog.api(name.removeprefix("apis/")).key
        columns = ["exchange_id", "request", "response", "request_unknown_tags",
                   "response_unknown_tags"]  # fmt: skip
        for row in _rows(tables[name].to_arrow(columns)):
            bodies[row["exchange_id"]] = (key, row)
    return _FrameRows(bodies, records)


def _check_secrets(api_key: int, side: int, values: Row) -> None:
    paths = list(ALWAYS_HIDDEN.get((api_key, side), ()))
    paths += [f"{path}.{value}" for path, _, value, _ in CONFIGS.get((api_key, side), ())]
    for path in paths:
        leaves: list[Any] = [values]
        for name in path.split("."):
            inner = [one.get(name) for one in leaves if isinstance(one, dict)]
            leaves = []
            for each in inner:
                leaves += each if isinstance(each, list) else [each]
        if any(each in (TEXT, TEXT.encode()) for each in leaves):
            raise _CannotRebuild("it holds secrets; dissect with --reveal-secrets")


def _values(struct_layout: Layout, row: Row) -> Row:
    """A struct's row as the values of one version of it."""
    values: Row = {}
    for name, slot in struct_layout.by_name.items():
        if slot.field.type is Type.RECORDS:
            values[name] = b""
            continue
        value = row.get(name)
        if value is None:
            if slot.nullable:
                values[name] = None
            continue
        if slot.inner is not None:
            inner = slot.inner
            value = (
                [_values(inner, each) for each in value]
                if slot.field.is_array
                else _values(inner, value)
            )
        elif slot.field.type is Type.UUID:
            value = [_uuid(each) for each in value] if slot.field.is_array else _uuid(value)
        values[name] = value
    return values


def _uuid(text: str) -> UUID:
    return UUID(bytes=base64.urlsafe_b64decode(text + "=="))


def _put_tags(body: Row, rows: list[Row] | None) -> None:
    """Unknown tagged fields back to the structs that had them, by path: ``topics[3].replicas``."""
    for row in entries(rows):
        holder: Any = body
        for step in row["path"].replace("]", "").split(".") if row["path"] else ():
            name, *indices = step.split("[")
            if name:
                holder = holder[name]
            for index in indices:
                holder = holder[int(index)]
        holder.setdefault(UNKNOWN_TAGS, {})[row["tag"]] = row["data"]


class _Records:
    """The batches of each exchange, in wire order, with their records."""

    def __init__(self, tables: Tables, payload: str) -> None:
        self.payload = payload
        self.batches: dict[int, list[Row]] = defaultdict(list)
        if payload != "full":
            return
        for row in _rows(tables.record_batches.to_arrow()):
            self.batches[row["exchange_id"]].append({**row, "records": []})
        index: dict[tuple[int, int], Row] = {}
        for exchange_id, rows in self.batches.items():
            rows.sort(key=lambda row: int(row["batch_index"]))
            for row in rows:
                index[exchange_id, row["batch_index"]] = row
        for row in _rows(tables.records.to_arrow()):
            batch = index.get((row["exchange_id"], row["batch_index"]))
            if batch is not None:
                batch["records"].append(row)

    def put(self, exchange_id: int, api_key: int, body: Row) -> None:
        """Fill the record data of a Produce request, or of a Fetch or ShareFetch response."""
        if self.payload != "full":
            raise _CannotRebuild("records were hidden; dissect with --payload full")
        batches = list(self.batches.get(exchange_id, ()))
        is_produce = api_key == ApiKey.PRODUCE
        for topic in entries(body.get("topic_data" if is_produce else "responses")):
            for partition in entries(topic.get("partition_data" if is_produce else "partitions")):
                number = partition.get("index", partition.get("partition_index"))
                data = bytearray()
                while batches and batches[0]["partition"] == number and _is_of(batches[0], topic):
                    data += self._entry(batches.pop(0), is_produce)
                partition["records"] = bytes(data)
                if is_produce and not data:
                    raise _CannotRebuild("the tables do not hold its records")
        if batches:
            raise _CannotRebuild("batches of the tables belong to none of its partitions")

    @staticmethod
    def _entry(batch: Row, is_produce: bool) -> bytes:
        if batch["is_partial"]:
            return b""  # the cut end of a fetch
        if batch["magic"] not in (0, 1, 2) or len(batch["records"]) != batch["record_count"]:
            raise _CannotRebuild("the tables do not hold all its records")
        records = sorted(batch["records"], key=lambda row: int(row["record_index"]))
        records = [{**row, "headers": row["headers"] or []} for row in records]
        if is_produce:  # the table's offsets are those that the broker gave
            first = batch["base_offset"]
            records = [{**row, "offset": first + at} for at, row in enumerate(records)]
        return encode_entry(batch, records)


def _is_of(batch: Row, topic: Row) -> bool:
    """Return whether the batch lies in that topic of the message: by id where it has one, else by
    name."""
    if topic.get("topic_id") is not None:
        return batch["topic_id"] is not None and _uuid(batch["topic_id"]) == topic["topic_id"]
    return bool(batch["topic"] == (topic.get("name") or topic.get("topic")))
