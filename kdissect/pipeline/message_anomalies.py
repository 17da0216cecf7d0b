"""Anomalies of single messages, with as many bytes as the options allow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import take
from kdissect.codec.redaction import TEXT, secret_apis
from kdissect.kafka.assembly import Anomaly, Assembly
from kdissect.pipeline.frame_buffer import FrameBuffer
from kdissect.pipeline.message_chunks import MessageChunk
from kdissect.pipeline.options import Options
from kdissect.pipeline.step_rows import Sink
from kdissect.protocol import catalog
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES, Type, walk
from kdissect.status import REASONS, Status
from kdissect.tables.anomalies import anomaly_columns, in_parts, texts, texts_of_kinds
from kdissect.tables.arrow_arrays import binaries
from kdissect.tables.exchanges import DecodeStatus, VersionSource
from kdissect.tables.payload import FULL

NO_BYTES = pa.scalar(None, pa.binary())

Ints = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TableOutput:
    """The sink that takes the rows of exchanges, and the data that all these rows share."""

    assembly: Assembly
    capture_ids: list[int]
    options: Options
    sink: Sink

    def connection_ids(self, exchanges: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
        """int64[n]: connection ids of EXCHANGE rows."""
        ids: npt.NDArray[np.int64] = self.assembly.connections["connection_id"]
        return ids[exchanges["connection"]]


def write_message_anomalies(chunk: MessageChunk, output: TableOutput) -> None:
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
                add_anomalies(output, frames, kind, rows[failures], side, reason)
        name = catalog.api(api_key).name
        if len(at := np.flatnonzero(columns.surplus > 0)):
            surplus, end = columns.surplus[at], frames.end[rows[at], side]
            text = f"{{n}} bytes after the end of a {name} {SIDES[side]}"
            detail = texts(text, len(at), n=surplus)
            place = (end - surplus, end)
            add_anomalies(output, frames, Anomaly.SURPLUS_BYTES, rows[at], side, detail, place)
        if len(at := np.flatnonzero(columns.invalid_utf8)):
            detail = texts(f"a string of a {name} {SIDES[side]} is no UTF-8", len(at))
            add_anomalies(output, frames, Anomaly.INVALID_UTF8, rows[at], side, detail)
    _without_definition(chunk, output)


def _malformed(chunk: MessageChunk, api_key: int, side: int, failed: Ints) -> pa.Array:
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
            add_anomalies(output, chunk.frames, kind, rows, side, detail)


def add_anomalies(
    output: TableOutput,
    frames: FrameBuffer,
    kind: Anomaly,
    rows: Ints,
    side: int,
    detail: pa.Array,
    place: tuple[Ints, Ints] | None = None,
    packet_pos: Ints | None = None,
    data: pa.Array | None = None,
) -> None:
    """Write anomalies of one side of the exchanges `rows` of `frames`; a row may occur repeatedly.

    place: start and end of the faulty bytes in the buffer; default: the whole message. packet_pos:
    added to the message's stream position. data: bytes to show instead, where not null.
    """
    options = output.options
    start, end = place or (frames.start[rows, side], frames.end[rows, side])
    data_max = options.limits.anomaly_data
    size = np.minimum(end - start, data_max)
    for part in in_parts(size):
        exchanges = frames.exchanges[rows[part]]
        column = exchanges[SIDES[side]]
        shown = binaries(frames.buf, start[part], size[part])
        if data is not None:
            shown = pc.coalesce(pc.binary_slice(data[part], 0, data_max), shown)
        api_key = exchanges["api_key"]
        if not options.reveal_secrets:
            secret = pa.array(np.isin(api_key, list(secret_apis())))
            shown = pc.if_else(secret, pa.scalar(TEXT.encode()), shown)
        if options.payload != FULL:
            keys = [key for key in np.unique(api_key).tolist() if _may_hold_records(key, side)]
            shown = pc.if_else(pa.array(np.isin(api_key, keys)), NO_BYTES, shown)
        pos, is_captured = column["pos"], column["source"] >= 0
        captures = np.array([*output.capture_ids, 0], np.int64)[column["source"]]
        table = anomaly_columns(
            np.full(len(exchanges), kind, np.uint8),
            detail=detail[part],
            connection_id=output.connection_ids(exchanges),
            exchange_id=exchanges["exchange_id"],
            capture_id=(captures, is_captured),
            packet=(column["packet"], is_captured),
            direction=np.full(len(exchanges), side),
            pos=pos if packet_pos is None else pos + packet_pos[part],
            byte_count=(end - start)[part],
            data=shown,
        )
        output.sink("anomalies", table)


@cache
def _may_hold_records(api_key: int, side: int) -> bool:
    """Return whether messages of that API and side may hold records; True for an unknown API."""
    if api_key not in catalog.apis():
        return True
    fields = walk(catalog.api(api_key).side(SIDES[side]).fields)
    return any(field.type is Type.RECORDS for field in fields)
