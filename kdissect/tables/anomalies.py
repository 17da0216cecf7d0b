"""Rows of `anomalies`: a fault with its position, a clause of detail, and some of its bytes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Ids, Ints, Rows
from kdissect.kafka.assembly import NO_DIRECTION, Anomaly
from kdissect.tables.arrow_arrays import names_of
from kdissect.tables.schemas import ANOMALIES, Column, table_of

DIRECTIONS = ("request", "response", None)

# Severities; that of all other kinds is "warning".
_ERRORS = {
    Anomaly.CAPTURE_CUT,
    Anomaly.MALFORMED_MESSAGE,
    Anomaly.MALFORMED_RECORDS,
    Anomaly.WRONG_CRC,
    Anomaly.RECORD_COUNT_MISMATCH,
    Anomaly.UNKNOWN_MAGIC,
    Anomaly.DECOMPRESSION_FAILED,
    Anomaly.DECOMPRESSION_LIMIT,
    Anomaly.CAPTURE_MISSING,
}
_INFOS = {
    Anomaly.RESPONSE_WITHOUT_REQUEST,
    Anomaly.NEGATIVE_LATENCY,
    Anomaly.SURPLUS_BYTES,
    Anomaly.NOT_DECRYPTED,
    Anomaly.LATE_NAMES,
    Anomaly.CARRY_LIMIT,
}


def severity_of(kind: Anomaly) -> str:
    """The value of anomalies.severity."""
    return "error" if kind in _ERRORS else "info" if kind in _INFOS else "warning"


# Details of faults in streams, by `reason` of the ANOMALY row, which has {number}, {other} and {n},
# its bytes. A kind without an entry says its name.
STREAM_DETAILS: dict[Anomaly, tuple[str, ...]] = {
    Anomaly.GAP: ("{n} bytes of the stream are not in the capture",),
    Anomaly.OVERLAP_CONFLICT: ("{n} retransmitted bytes differ from the first copy, which counts",),
    Anomaly.UNFRAMED_BYTES: (  # kafka.frame_tables
        "{n} bytes without a known frame boundary: a size prefix is not in the capture",
        "{n} bytes without a known frame boundary: no frame can begin there",
        "{n} bytes of a frame whose header is not in the capture",
        "{n} bytes without a known frame boundary: the connection began before the capture",
        "{n} bytes of TLS records that could not be decrypted",
    ),
    Anomaly.PARTIAL_FRAME: ("a frame announced {number} bytes, of which {n} are missing",),
    Anomaly.RESPONSE_WITHOUT_REQUEST: (
        "correlation id {number} answers no request of the capture",
        "a SASL token answers no request of the capture",
    ),
    Anomaly.DUPLICATE_RESPONSE: ("correlation id {number} was answered before",),
    Anomaly.OUT_OF_ORDER_RESPONSE: (
        "the response with correlation id {number} came after that with {other}",
        "a SASL token came after the response to a later request",
    ),
    Anomaly.NEGATIVE_LATENCY: ("the response is {number} ns older than the end of its request",),
    Anomaly.LIMIT: ("a size prefix of {number} bytes is beyond the limit of frame_size, {other}",),
    Anomaly.NOT_DECRYPTED: (  # tls.decrypt
        "the beginning of the TLS handshake is not in the capture",
        "no key log has the secret of this TLS connection",
        "the version or cipher suite of this TLS connection is not supported",
        "the key log's secret does not fit this TLS connection",
        "the key log has the secret of one side of this TLS connection only",
    ),
    Anomaly.PROXY_HEADER: (  # tcp.proxy_protocol
        "the line of a PROXY protocol header does not end within 107 bytes",
        "a PROXY protocol header has no valid addresses",
        "a PROXY protocol header has an unknown version",
    ),
}
_REASON_BITS = 3


class AnomalyRow(NamedTuple):
    """An anomaly of a file or of a whole run; None if a column does not apply."""

    kind: Anomaly
    detail: str
    capture_id: int | None = None
    packet: int | None = None
    pos: int | None = None
    byte_count: int | None = None


def anomalies_table(rows: Iterable[AnomalyRow]) -> pa.Table:
    """`anomalies` from rows."""
    listed = list(rows)
    kinds = np.array([row.kind for row in listed], np.uint8)
    columns: dict[str, Any] = {
        name: [getattr(row, name) for row in listed] for name in AnomalyRow._fields[1:]
    }
    return anomaly_columns(kinds, **columns)


def anomaly_columns(kind: Ints, *, direction: Ints | None = None, **columns: Column) -> pa.Table:
    """`anomalies` from columns of equal length, as `schemas.table_of` takes them.

    Columns that are missing become null. kind: kafka.assembly.Anomaly. direction: 0, 1, or 2 for
    none.
    """
    count = len(kind)
    if direction is None:
        direction = np.full(count, NO_DIRECTION)
    columns |= {
        "kind": _KIND_NAMES.take(pa.array(kind)),
        "severity": _SEVERITY_NAMES.take(pa.array(kind)),
        "direction": pa.array(DIRECTIONS, pa.string()).take(pa.array(direction)),
    }
    for field in ANOMALIES:
        columns.setdefault(field.name, pa.nulls(count, field.type))
    return table_of(ANOMALIES, columns)


def in_parts(sizes: Ints, rows_max: int = 1 << 14, bytes_max: int = 16 << 20) -> list[slice]:
    """Slices of rows, each with few enough bytes (`sizes`) to copy at a time."""
    number = np.cumsum(sizes) // bytes_max + np.arange(len(sizes)) // rows_max
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(sizes)]
    return [slice(low, high) for low, high in itertools.pairwise(edges) if low < high]


_KIND_NAMES = pa.array(names_of(Anomaly), pa.string())
_SEVERITY_NAMES = pa.array([severity_of(kind) for kind in sorted(Anomaly)], pa.string())
_PLACE = re.compile(r"\{(\w+)\}")


def texts(template: str, count: int, **columns: Ints | pa.Array) -> pa.Array:
    """string[count]: the template with {names} replaced by the row's values of these columns."""
    parts = _PLACE.split(template)
    if len(parts) == 1:
        return pa.repeat(pa.scalar(template, pa.string()), count)
    joined = [
        pc.cast(pa.array(columns[part]), pa.string()) if number % 2 else pa.scalar(part)
        for number, part in enumerate(parts)
    ]
    return pc.binary_join_element_wise(*joined, "")


def texts_of_kinds(codes: Ints, text: Callable[[int, Ints], pa.Array]) -> pa.Array:
    """string[n]: for each code, the result of `text` for its rows, in the order of the rows."""
    parts, rows = [pa.array([], pa.string())], [np.zeros(0, np.int64)]
    for code in np.unique(codes).tolist():
        rows.append(np.flatnonzero(codes == code))
        parts.append(text(code, rows[-1]))
    return pa.concat_arrays(parts).take(pa.array(np.argsort(np.concatenate(rows))))


def stream_anomalies(
    anomalies: Rows, connection_ids: Ids, capture_ids: Ids | list[int], data: pa.Array
) -> pa.Table:
    """`anomalies` from ANOMALY rows of an assembly; data[i] has the bytes of row i."""

    def text(code: int, rows: Ints) -> pa.Array:
        kind, reason = Anomaly(code >> _REASON_BITS), code & ((1 << _REASON_BITS) - 1)
        some = anomalies[rows]
        templates = STREAM_DETAILS.get(kind) or (kind.name.lower().replace("_", " "),)
        numbers = {name: some[name] for name in ("number", "other")}
        return texts(templates[reason], len(some), n=some["byte_count"], **numbers)

    texts_by = anomalies["kind"].astype(np.int64) << _REASON_BITS | anomalies["reason"]
    connection, source = anomalies["connection"], anomalies["source"]
    return anomaly_columns(
        anomalies["kind"],
        detail=texts_of_kinds(texts_by, text),
        connection_id=(np.append(connection_ids, 0)[connection], connection >= 0),
        exchange_id=(anomalies["exchange_id"], anomalies["exchange_id"] != 0),
        capture_id=(np.append(np.asarray(capture_ids, np.int64), 0)[source], source >= 0),
        packet=(anomalies["packet"], anomalies["packet"] >= 0),
        direction=anomalies["direction"],
        pos=(anomalies["pos"], anomalies["pos"] >= 0),
        byte_count=anomalies["byte_count"],
        data=data,
    )
