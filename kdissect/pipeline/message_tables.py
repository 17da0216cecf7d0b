"""Write decoded exchanges to `exchanges`, to the table of each API, and to `anomalies`."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Bools, Indices, Positions, take
from kdissect.codec.internal_records import names_metadata_log
from kdissect.codec.redaction import TEXT, hide_tags, may_hold_secrets, redact_column, secret_apis
from kdissect.kafka.assembly import Anomaly
from kdissect.pipeline.options import Options
from kdissect.pipeline.step_rows import DATE, Sink
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import SASL_TOKEN, ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.status import REASONS, Status
from kdissect.tables.anomalies import anomaly_columns, in_parts, texts, texts_of_kinds
from kdissect.tables.arrow_arrays import binaries
from kdissect.tables.embedded import EmbeddedFault, add_decoded
from kdissect.tables.exchanges import exchanges_table
from kdissect.tables.message_chunk import DecodeStatus, MessageChunk, VersionSource, begin_ns
from kdissect.tables.payload import FULL
from kdissect.tables.schemas import UNKNOWN_TAGS, Column, api_schema, table_of

NO_BYTES = pa.scalar(None, pa.binary())

_EMBEDDED_FAULTS = {
    Status.INVALID_UTF8: Anomaly.INVALID_UTF8,
    Status.CORRUPT: Anomaly.DECOMPRESSION_FAILED,
    Status.LIMIT: Anomaly.DECOMPRESSION_LIMIT,
}


class TableOutput(NamedTuple):
    """The sink that takes the rows of exchanges, and the options of the run."""

    options: Options
    sink: Sink

    def of_day(self, chunk: MessageChunk) -> TableOutput:
        """For the rows of a chunk: with `partition_by`, a sink for those of its day."""
        if self.options.partition_by is None:
            return self
        day = np.datetime64(int(begin_ns(chunk.exchanges)[0]), "ns").astype("datetime64[D]")

        def sink(name: str, table: pa.Table) -> None:
            self.sink(name if name == "anomalies" else f"{name}{DATE}{day}", table)

        return self._replace(sink=sink)


def write_tables(chunk: MessageChunk, output: TableOutput) -> None:
    """Write the rows of `exchanges`, of the API tables, and of anomalies in messages."""
    _write_message_anomalies(chunk, output)
    output.sink("exchanges", exchanges_table(chunk))
    _write_apis(chunk, output)
    _write_tokens(chunk, output)


def _write_apis(chunk: MessageChunk, output: TableOutput) -> None:
    for api_key in sorted({key for key, _ in chunk.decoded}):
        is_good = np.zeros(len(chunk.status), np.bool_)
        for side in (REQUEST, RESPONSE):
            if (decoded := chunk.decoded.get((api_key, side))) is not None:
                is_good[decoded.rows[decoded.columns.status == 0]] = True
        rows = np.flatnonzero(is_good)
        if not len(rows):
            continue
        sides = [chunk.columns(api_key, side, rows) for side in (REQUEST, RESPONSE)]
        bodies, tags = [body for body, _ in sides], [tag for _, tag in sides]
        _write_api(chunk, output, api_key, rows, bodies, tags)


def _write_tokens(chunk: MessageChunk, output: TableOutput) -> None:
    """Write SASL tokens without Kafka headers as rows of SaslAuthenticate; they have no version."""
    frames = chunk.frames
    is_token = frames.exchanges["is_sasl_token"] != 0
    sides = REQUEST, RESPONSE
    is_present = [frames.whole(s) & (frames.exchanges[SIDES[s]]["size"] >= 0) for s in sides]
    rows = np.flatnonzero(is_token & (is_present[REQUEST] | is_present[RESPONSE]))
    if not len(rows):
        return
    bodies = []
    for side in sides:
        size = np.where(is_present[side], frames.end[:, side] - frames.start[:, side], 0)[rows]
        data = binaries(frames.buf, frames.start[rows, side], size)
        absent = pa.array(~is_present[side][rows])
        bodies.append(pa.StructArray.from_arrays([data], ["auth_bytes"], mask=absent))
    tags = [pa.nulls(len(rows), UNKNOWN_TAGS)] * 2
    _write_api(chunk, output, ApiKey.SASL_AUTHENTICATE, rows, bodies, tags, is_token=True)


def _write_api(
    chunk: MessageChunk,
    output: TableOutput,
    api_key: int,
    rows: Indices,
    bodies: list[pa.Array],
    tags: list[pa.Array],
    is_token: bool = False,
) -> None:
    """Write the table of one API, with decoded columns for messages embedded in its bytes fields.

    is_token: the rows are SASL tokens without Kafka headers.
    """
    bodies = _with_embedded(chunk, output, api_key, bodies, rows)
    if not output.options.reveal_secrets:
        tags = [
            hide_tags(each) if may_hold_secrets(api_key, side) else each
            for side, each in enumerate(tags)
        ]
    exchanges = take(chunk.exchanges, rows)
    request, response = exchanges["request"], exchanges["response"]
    columns: dict[str, Column] = {
        "exchange_id": exchanges["exchange_id"],
        "connection_id": chunk.frames.connection_ids[rows],
        "api_version": (chunk.frames.api_version[rows], np.full(len(rows), not is_token)),
        "request_time": (request["time_ns"], request["size"] >= 0),
        "response_time": (response["time_ns"], response["size"] >= 0),
        "request": bodies[REQUEST],
        "response": bodies[RESPONSE],
        "request_unknown_tags": tags[REQUEST],
        "response_unknown_tags": tags[RESPONSE],
    }
    schema = api_schema(bodies[REQUEST].type, bodies[RESPONSE].type)
    name = SASL_TOKEN if is_token else catalog.api(api_key).name
    output.sink(f"apis/{name}", table_of(schema, columns))


def _with_embedded(
    chunk: MessageChunk, output: TableOutput, api_key: int, bodies: list[pa.Array], rows: Indices
) -> list[pa.Array]:
    """Both sides' bodies with embedded messages decoded and secrets removed."""
    reveal = output.options.reveal_secrets
    nesting = output.options.limits.nesting
    request, response, faults = add_decoded(api_key, bodies[0], bodies[1], reveal, nesting)
    by_kind: dict[tuple[Anomaly, int], list[EmbeddedFault]] = defaultdict(list)
    for fault in faults:
        kind = _EMBEDDED_FAULTS.get(fault.status, Anomaly.MALFORMED_EMBEDDED)
        by_kind[kind, fault.side].append(fault)
    for (kind, side), some in by_kind.items():
        where = f"{catalog.api(api_key).name} {SIDES[side]} > "
        detail = pa.array([where + fault.detail for fault in some], pa.string())
        at = rows[[fault.row for fault in some]]
        add_anomalies(chunk, output, kind, at, side, detail)
    return [request, response] if reveal else [redact_column(request), redact_column(response)]


# -- anomalies ------------------------------------------------------------------------------


def _write_message_anomalies(chunk: MessageChunk, output: TableOutput) -> None:
    """Write rows for messages that do not decode, have surplus bytes, or have no definition."""
    frames = chunk.frames
    for (api_key, side), decoded in chunk.decoded.items():
        rows, columns = decoded.rows, decoded.columns
        failed = np.flatnonzero(columns.status)
        is_limit = columns.status[failed] == Status.LIMIT
        for kind, failures in (
            (Anomaly.MALFORMED_MESSAGE, failed[~is_limit]),
            (Anomaly.LIMIT, failed[is_limit]),
        ):
            if len(failures):
                reason = _malformed(chunk, api_key, side, failures)
                add_anomalies(chunk, output, kind, rows[failures], side, reason)
        name = catalog.api(api_key).name
        if len(at := np.flatnonzero(columns.surplus > 0)):
            surplus, end = columns.surplus[at], frames.end[rows[at], side]
            text = f"{{n}} bytes after the end of a {name} {SIDES[side]}"
            detail = texts(text, len(at), n=surplus)
            place = (end - surplus, end)
            add_anomalies(chunk, output, Anomaly.SURPLUS_BYTES, rows[at], side, detail, place)
        if len(at := np.flatnonzero(columns.invalid_utf8)):
            detail = texts(f"a string of a {name} {SIDES[side]} is no UTF-8", len(at))
            add_anomalies(chunk, output, Anomaly.INVALID_UTF8, rows[at], side, detail)
    _without_definition(chunk, output)


def _malformed(chunk: MessageChunk, api_key: int, side: int, failed: Indices) -> pa.Array:
    """Text per failed message of an API and side: the reason, the field and the position."""
    decoded = chunk.decoded[api_key, side]
    columns = decoded.columns
    path = columns.error_paths(failed)
    return texts(
        f"{catalog.api(api_key).name} v{{version}} {SIDES[side]}{{path}}, pos {{pos}}: {{why}}",
        len(failed),
        version=chunk.frames.versions(side)[decoded.rows[failed]],
        path=pc.if_else(pc.equal(path, ""), "", pc.binary_join_element_wise(" > ", path, "")),
        pos=columns.error_pos[failed],
        why=texts_of_kinds(
            columns.status[failed], lambda code, some: texts(REASONS[Status(code)], len(some))
        ),
    )


def _without_definition(chunk: MessageChunk, output: TableOutput) -> None:
    """Write rows for messages whose API or version has no definition."""
    exchanges = chunk.frames.exchanges
    for state, kind in (
        (DecodeStatus.UNKNOWN_API, Anomaly.UNKNOWN_API),
        (DecodeStatus.UNKNOWN_VERSION, Anomaly.UNKNOWN_VERSION),
    ):
        # a response without a request has another anomaly already
        has_request = exchanges["request"]["size"] >= 0
        # KIP-511: a client probes with its newest ApiVersions version; a broker that does not know
        # it answers in v0 with the versions that it supports. That is no fault.
        probe = (chunk.version_source == VersionSource.FALLBACK_V0) & (
            chunk.status[:, RESPONSE] == DecodeStatus.OK
        )
        for side in (REQUEST, RESPONSE):
            rows = np.flatnonzero((chunk.status[:, side] == state) & has_request & ~probe)
            if not len(rows):
                continue
            undefined = take(exchanges, rows)
            detail = texts(
                "no definition for api key {key} version {version}",
                len(rows),
                key=undefined["api_key"],
                version=undefined["api_version"],
            )
            add_anomalies(chunk, output, kind, rows, side, detail)


def _of_metadata_log(chunk: MessageChunk, rows: Indices, side: int) -> Bools:
    """bool[rows]: the message is about the metadata log. Its name is looked for in all bytes, since
    the message does not decode."""
    frames = chunk.frames
    found, place = np.unique(rows, return_inverse=True)
    messages = (
        frames.buf[begin:end].tobytes()
        for begin, end in zip(frames.start[found, side], frames.end[found, side], strict=True)
    )
    named = [names_metadata_log(message) for message in messages]
    return np.array(named, np.bool_)[place]


def add_anomalies(
    chunk: MessageChunk,
    output: TableOutput,
    kind: Anomaly,
    rows: Indices,
    side: int,
    detail: pa.Array,
    place: tuple[Positions, Positions] | None = None,
    data: pa.Array | None = None,
) -> None:
    """Write anomalies of one side of the exchanges `rows`; a row may occur repeatedly.

    place: start and end of the faulty bytes in the buffer; default: the whole message. data: of
    faults in records, whose position is that of `place`: the bytes to show instead, where not null.
    """
    options, frames = output.options, chunk.frames
    message_start = frames.start[rows, side]
    start, end = place or (message_start, frames.end[rows, side])
    inside = 0 * start if data is None else 4 + start - message_start
    data_max = options.limits.anomaly_data
    size = np.minimum(end - start, data_max)
    for part in in_parts(size):
        some = rows[part]
        exchanges = frames.exchanges[some]
        column = exchanges[SIDES[side]]
        shown = binaries(frames.buf, start[part], size[part])
        if data is not None:
            shown = pc.coalesce(pc.binary_slice(data[part], 0, data_max), shown)
        api_key = exchanges["api_key"]
        if not options.reveal_secrets:
            secret = np.isin(api_key, list(secret_apis()))
            if data is None:  # records that were read are redacted one by one
                secret |= _of_metadata_log(chunk, some, side)
            shown = pc.if_else(pa.array(secret), pa.scalar(TEXT.encode()), shown)
        if options.payload != FULL:
            keys = np.unique(api_key).tolist()
            keys = [key for key in keys if catalog.may_hold_records(key, side)]
            shown = pc.if_else(pa.array(np.isin(api_key, keys)), NO_BYTES, shown)
        is_captured = column["source"] >= 0
        table = anomaly_columns(
            np.full(len(exchanges), kind, np.uint8),
            detail=detail[part],
            connection_id=frames.connection_ids[some],
            exchange_id=exchanges["exchange_id"],
            capture_id=(chunk.capture_id(side)[some], is_captured),
            packet=(column["packet"], is_captured),
            direction=np.full(len(exchanges), side),
            pos=column["pos"] + inside[part],
            byte_count=(end - start)[part],
            data=shown,
        )
        output.sink("anomalies", table)
