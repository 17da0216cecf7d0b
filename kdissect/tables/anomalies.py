"""Rows of `anomalies`: a fault with its position, a clause of detail, and some of its bytes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.kafka.assembly import ERROR, INFO, NO_DIRECTION, WARNING, Anomaly
from kdissect.tables.arrow_arrays import ints, names_of
from kdissect.tables.schemas import ANOMALIES

Ints = npt.NDArray[Any]

DATA_MAX = 4096  # default: bytes that `data` shows; byte_count has their number
SEVERITIES = ("info", "warning", "error")
DIRECTIONS = ("request", "response", None)

SEVERITY: dict[Anomaly, int] = {
    Anomaly.CAPTURE_CUT: ERROR,
    Anomaly.PACKET_CUT: WARNING,
    Anomaly.GAP: WARNING,
    Anomaly.OVERLAP_CONFLICT: WARNING,
    Anomaly.UNFRAMED_BYTES: WARNING,
    Anomaly.PARTIAL_FRAME: WARNING,
    Anomaly.MALFORMED_MESSAGE: ERROR,
    Anomaly.MALFORMED_RECORDS: ERROR,
    Anomaly.MALFORMED_EMBEDDED: WARNING,
    Anomaly.UNKNOWN_API: WARNING,
    Anomaly.UNKNOWN_VERSION: WARNING,
    Anomaly.WRONG_CRC: ERROR,
    Anomaly.RECORD_COUNT_MISMATCH: ERROR,
    Anomaly.UNKNOWN_MAGIC: ERROR,
    Anomaly.DECOMPRESSION_FAILED: ERROR,
    Anomaly.DECOMPRESSION_LIMIT: ERROR,
    Anomaly.LIMIT: WARNING,
    Anomaly.RESPONSE_WITHOUT_REQUEST: INFO,
    Anomaly.DUPLICATE_RESPONSE: WARNING,
    Anomaly.OUT_OF_ORDER_RESPONSE: WARNING,
    Anomaly.SEQUENCE_GAP: WARNING,
    Anomaly.SEQUENCE_DUPLICATE: WARNING,
    Anomaly.INVALID_UTF8: WARNING,
    Anomaly.NEGATIVE_LATENCY: INFO,
    Anomaly.CLOCK_STEP: INFO,
    Anomaly.SURPLUS_BYTES: INFO,
    Anomaly.NOT_DECRYPTED: INFO,
    Anomaly.LOST_FRAGMENTS: WARNING,
    Anomaly.CAPTURE_LATE: WARNING,
    Anomaly.CAPTURE_GROWN: WARNING,
    Anomaly.CAPTURE_REPEATED: INFO,
    Anomaly.CAPTURE_MISSING: ERROR,
    Anomaly.NOT_A_CAPTURE: WARNING,
    Anomaly.STATE_LOST: WARNING,
    Anomaly.LATE_PACKETS: WARNING,
    Anomaly.LATE_NAMES: INFO,
    Anomaly.CARRY_LIMIT: INFO,
    Anomaly.PROXY_HEADER: WARNING,
}

# Details of stream faults; {a}, {b} and {n} stand for numbers of the ANOMALY row.
STREAM_DETAILS: dict[Anomaly, str] = {
    Anomaly.GAP: "{n} bytes of the stream are not in the capture",
    Anomaly.OVERLAP_CONFLICT: "{n} retransmitted bytes differ from the first copy, which counts",
    Anomaly.UNFRAMED_BYTES: "{n} bytes without a known frame boundary",
    Anomaly.PARTIAL_FRAME: "a frame announced {a} bytes, of which {n} are missing",
    Anomaly.RESPONSE_WITHOUT_REQUEST: "correlation id {a} answers no request of the capture",
    Anomaly.DUPLICATE_RESPONSE: "correlation id {a} was answered before",
    Anomaly.OUT_OF_ORDER_RESPONSE: "the response with correlation id {a} came after that with {b}",
    Anomaly.NEGATIVE_LATENCY: "the response is {a} ns older than the end of its request",
    Anomaly.CLOCK_STEP: "packet times step back by {a} ns",
    Anomaly.PACKET_CUT: "the capture holds {a} of the {b} bytes of a segment",
}


# LIMIT rows of a stream: a frame size, which covers no bytes; rows that are not listed.
_FRAME_LIMIT = "a size prefix of {a} bytes is beyond the limit of frame_size, {b}"
_LISTED_LIMIT = "{a} runs of bytes, of which the limit of gaps lists {b}; one row covers the others"

# Why a TLS connection was not decrypted, by `a` of its ANOMALY row (tls.decrypt).
_NOT_DECRYPTED = (
    "the beginning of the TLS handshake is not in the capture",
    "no key log has the secret of this TLS connection",
    "the version or cipher suite of this TLS connection is not supported",
    "the key log's secret does not fit this TLS connection",
)

# Faults of a PROXY protocol header, by `a` of its ANOMALY row (tcp.proxy_protocol).
_PROXY_HEADER = (
    "the line of a PROXY protocol header does not end within 107 bytes",
    "a PROXY protocol header has no valid addresses",
    "a PROXY protocol header has an unknown version",
)


@dataclass(slots=True)
class AnomalyRow:
    """One anomaly as values; None if a column does not apply. For anomalies that are few."""

    kind: Anomaly
    detail: str
    connection_id: int | None = None
    exchange_id: int | None = None
    capture_id: int | None = None
    packet: int | None = None
    direction: int = 2
    pos: int | None = None
    byte_count: int | None = None
    data: bytes | None = None


def anomalies_table(rows: Iterable[AnomalyRow], data_max: int = DATA_MAX) -> pa.Table:
    """`anomalies` from rows, with `data_max` bytes of their data."""
    listed = list(rows)
    return anomaly_columns(
        np.array([row.kind for row in listed], np.uint8),
        pa.array([row.detail for row in listed], pa.string()),
        connection_id=pa.array([row.connection_id for row in listed], pa.int64()),
        exchange_id=pa.array([row.exchange_id for row in listed], pa.int64()),
        capture_id=pa.array([row.capture_id for row in listed], pa.int64()),
        packet=pa.array([row.packet for row in listed], pa.int64()),
        direction=np.array([row.direction for row in listed], np.uint8),
        pos=pa.array([row.pos for row in listed], pa.int64()),
        byte_count=pa.array([row.byte_count for row in listed], pa.int64()),
        data=pa.array(
            [None if row.data is None else row.data[:data_max] for row in listed], pa.binary()
        ),
    )


def anomaly_columns(
    kind: Ints, detail: pa.Array, *, direction: Ints | None = None, **columns: pa.Array
) -> pa.Table:
    """`anomalies` from columns of equal length; columns that are missing become null.

    kind: kafka.assembly.Anomaly. direction: 0, 1, or 2 for none.
    """
    count = len(kind)
    if direction is None:
        direction = np.full(count, NO_DIRECTION)
    columns |= {
        "kind": _KIND_NAMES.take(pa.array(kind)),
        "severity": _SEVERITY_NAMES.take(pa.array(kind)),
        "direction": pa.array(DIRECTIONS, pa.string()).take(pa.array(direction)),
        "detail": detail,
    }
    return pa.table(
        [
            columns[field.name] if field.name in columns else pa.nulls(count, field.type)
            for field in ANOMALIES
        ],
        schema=ANOMALIES,
    )


def in_parts(sizes: Ints, rows_max: int = 1 << 14, bytes_max: int = 16 << 20) -> list[slice]:
    """Slices of rows, each with few enough bytes (`sizes`) to copy at a time."""
    number = np.cumsum(sizes) // bytes_max + np.arange(len(sizes)) // rows_max
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(sizes)]
    return [slice(low, high) for low, high in itertools.pairwise(edges) if low < high]


_KIND_NAMES = pa.array(names_of(Anomaly), pa.string())
_SEVERITY_NAMES = pa.array([SEVERITIES[SEVERITY[kind]] for kind in sorted(Anomaly)], pa.string())
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
    anomalies: npt.NDArray[np.void],
    connection_ids: npt.NDArray[np.int64],
    capture_ids: list[int],
    data: pa.Array,
) -> pa.Table:
    """`anomalies` from ANOMALY rows of an assembly; data[i] has the bytes of row i."""

    def text(code: int, rows: Ints) -> pa.Array:
        kind = Anomaly(code)
        some = anomalies[rows]
        if kind is Anomaly.NOT_DECRYPTED:
            return pa.array(_NOT_DECRYPTED, pa.string()).take(pa.array(some["a"]))
        if kind is Anomaly.LIMIT:
            numbers = {"a": some["a"], "b": some["b"]}
            return pc.if_else(
                pa.array(some["byte_count"] > 0),
                texts(_LISTED_LIMIT, len(some), **numbers),
                texts(_FRAME_LIMIT, len(some), **numbers),
            )
        if kind is Anomaly.PROXY_HEADER:
            return pa.array(_PROXY_HEADER, pa.string()).take(pa.array(some["a"]))
        template = STREAM_DETAILS.get(kind, kind.name.lower().replace("_", " "))
        return texts(template, len(some), a=some["a"], b=some["b"], n=some["byte_count"])

    connection, source = anomalies["connection"], anomalies["source"]
    return anomaly_columns(
        anomalies["kind"],
        texts_of_kinds(anomalies["kind"], text),
        connection_id=ints(
            np.append(connection_ids, 0)[connection], pa.int64(), valid=connection >= 0
        ),
        exchange_id=ints(anomalies["exchange_id"], pa.int64(), anomalies["exchange_id"] != 0),
        capture_id=ints(np.array([*capture_ids, 0], np.int64)[source], pa.int64(), source >= 0),
        packet=ints(anomalies["packet"], pa.int64(), anomalies["packet"] >= 0),
        direction=anomalies["direction"],
        pos=ints(anomalies["pos"], pa.int64(), anomalies["pos"] >= 0),
        byte_count=ints(anomalies["byte_count"], pa.int64()),
        data=data,
    )
