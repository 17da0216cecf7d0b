"""Write decoded exchanges to `exchanges` and to the table of each API."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.arrays import take
from kdissect.codec.message_columns import body_type
from kdissect.codec.redaction import hide_tags, may_hold_secrets, redact_column
from kdissect.kafka.assembly import Anomaly
from kdissect.pipeline.message_anomalies import TableOutput, add_anomalies
from kdissect.pipeline.message_chunks import MessageChunk
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role, role_of
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES, walk
from kdissect.status import Status
from kdissect.tables.arrow_arrays import labels, names_of, numbers
from kdissect.tables.embedded import EmbeddedFault, add_decoded
from kdissect.tables.exchanges import SASL_TOKEN, DecodeStatus, ExchangeFacts, exchanges_table
from kdissect.tables.schemas import UNKNOWN_TAGS, api_schema, table_of
from kdissect.tables.waits import Wait, waits

Ints = npt.NDArray[np.int64]

_EMBEDDED_FAULTS = {
    Status.INVALID_UTF8: Anomaly.INVALID_UTF8,
    Status.CORRUPT: Anomaly.DECOMPRESSION_FAILED,
    Status.LIMIT: Anomaly.DECOMPRESSION_LIMIT,
}


def write_tables(chunk: MessageChunk, output: TableOutput) -> None:
    """Write the rows of `exchanges` and of the API tables."""
    write_exchanges(chunk, output)
    _write_apis(chunk, output)
    _write_tokens(chunk, output)


def write_exchanges(chunk: MessageChunk, output: TableOutput) -> None:
    has_error = np.zeros(len(chunk.status), bool)
    for (api_key, side), decoded in chunk.decoded.items():
        if side == RESPONSE:
            versions = chunk.frames.versions(RESPONSE)[decoded.rows]
            has_error[decoded.rows] = _error_versions(api_key)[versions] & (
                decoded.columns.status == 0
            )
    is_decoded = (chunk.status == DecodeStatus.OK).all(axis=1)
    wait, is_known = waits(chunk.frames.exchanges, is_decoded, chunk.marks)
    facts = ExchangeFacts(
        chunk.status, chunk.version_source, has_error,
        labels(wait, names_of(Wait), is_known), chunk.client_ids,
    )  # fmt: skip
    assembly = output.assembly
    table = exchanges_table(
        assembly.endpoints,
        assembly.connections,
        chunk.frames.exchanges,
        output.capture_ids,
        facts,
        chunk.marks,
    )
    output.sink("exchanges", table)


@cache
def _error_versions(api_key: int) -> npt.NDArray[np.bool_]:
    """bool by api_version: whether the response's definition has an error code."""
    response = catalog.api(api_key).response
    roles = [
        {role_of(api_key, field) for field in walk(response.fields, api_version)}
        for api_version in range(response.versions.last + 1)
    ]
    return np.array([Role.ERROR_CODE in each for each in roles], bool)


def _write_apis(chunk: MessageChunk, output: TableOutput) -> None:
    for api_key in sorted({key for key, _ in chunk.decoded}):
        is_good = np.zeros(len(chunk.status), np.bool_)
        for side in (REQUEST, RESPONSE):
            if (decoded := chunk.decoded.get((api_key, side))) is not None:
                is_good[decoded.rows[decoded.columns.status == 0]] = True
        rows = np.flatnonzero(is_good)
        if not len(rows):
            continue
        sides = [_side_columns(chunk, api_key, side, rows) for side in (REQUEST, RESPONSE)]
        bodies, tags = [body for body, _ in sides], [tag for _, tag in sides]
        api_version = numbers(chunk.frames.api_version[rows], pa.int16())
        name = catalog.api(api_key).name
        _write_api(chunk, output, api_key, name, rows, api_version, bodies, tags)


def _side_columns(
    chunk: MessageChunk, api_key: int, side: int, rows: Ints
) -> tuple[pa.Array, pa.Array]:
    """(bodies, unknown tags) of one side of the rows; null if a row's side was not decoded."""
    decoded = chunk.decoded.get((api_key, side))
    if decoded is None:
        kind = body_type(api_key, SIDES[side])
        return pa.nulls(len(rows), kind), pa.nulls(len(rows), UNKNOWN_TAGS)
    body = decoded.columns.body
    if len(decoded.rows) == len(rows) and bool(np.all(decoded.rows == rows)):
        return body, decoded.columns.unknown_tags
    at = np.searchsorted(decoded.rows, rows)
    is_decoded = (at < len(decoded.rows)) & (
        decoded.rows[np.minimum(at, len(decoded.rows) - 1)] == rows
    )
    via = pa.array(at, pa.int64(), mask=~is_decoded)
    return body.take(via), decoded.columns.unknown_tags.take(via)


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
        start, end = frames.start[rows, side].tolist(), frames.end[rows, side].tolist()
        tokens = [
            {"auth_bytes": frames.buf[a:b].tobytes()} if is_there else None
            for a, b, is_there in zip(start, end, is_present[side][rows], strict=True)
        ]
        bodies.append(pa.array(tokens, pa.struct([("auth_bytes", pa.binary())])))
    none = pa.nulls(len(rows), pa.int16())
    tags = [pa.nulls(len(rows), UNKNOWN_TAGS)] * 2
    _write_api(chunk, output, ApiKey.SASL_AUTHENTICATE, SASL_TOKEN, rows, none, bodies, tags)


def _write_api(
    chunk: MessageChunk, output: TableOutput, api_key: int, name: str, rows: Ints,
    api_version: pa.Array, bodies: list[pa.Array], tags: list[pa.Array],
) -> None:  # fmt: skip
    """Write the table of one API, with decoded columns for messages embedded in its bytes
    fields."""
    bodies = _with_embedded(chunk, output, api_key, bodies, rows)
    if not output.options.reveal_secrets:
        tags = [
            hide_tags(each) if may_hold_secrets(api_key, side) else each
            for side, each in enumerate(tags)
        ]
    exchanges = take(chunk.frames.exchanges, rows)
    request, response = exchanges["request"], exchanges["response"]
    columns = {
        "exchange_id": exchanges["exchange_id"],
        "connection_id": output.connection_ids(exchanges),
        "api_version": api_version,
        "request_time": (request["time_ns"], request["size"] >= 0),
        "response_time": (response["time_ns"], response["size"] >= 0),
        "request": bodies[REQUEST],
        "response": bodies[RESPONSE],
        "request_unknown_tags": tags[REQUEST],
        "response_unknown_tags": tags[RESPONSE],
    }
    schema = api_schema(bodies[REQUEST].type, bodies[RESPONSE].type)
    output.sink(f"apis/{name}", table_of(schema, columns))


def _with_embedded(
    chunk: MessageChunk, output: TableOutput, api_key: int, bodies: list[pa.Array], rows: Ints
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
        add_anomalies(output, chunk.frames, kind, at, side, detail)
    return [request, response] if reveal else [redact_column(request), redact_column(response)]
