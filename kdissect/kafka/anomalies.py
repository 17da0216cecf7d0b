"""Anomalies that the assembly of a batch finds, as rows of ANOMALY."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.arrays import Rows, joined
from kdissect.kafka.assembly import (
    ANOMALY,
    NO_DIRECTION,
    Anomaly,
    Protocol,
)
from kdissect.kafka.exchanges import FRAMES_AT_ONCE, Frames, Ints, Pairs
from kdissect.kafka.frame_tables import BAD_SIZE
from kdissect.kafka.pairing import IN_ORDER, OUT_OF_ORDER, SECOND, UNASKED
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.tcp.proxy_protocol import HeaderFault
from kdissect.tcp.reassembly import Streams
from kdissect.tls.plaintext import TlsConnections

_SIZES_END = 2**31  # Kafka's sizes are int32, so a larger one is no size prefix


def found_anomalies(
    streams: Streams,
    table: Rows,
    frames: tuple[Frames, Frames],
    pairs: Pairs,
    exchanges: Rows,
    tls: TlsConnections,
    header_faults: dict[int, tuple[HeaderFault, int]],
    frame_size_max: int,
) -> Rows:
    """All anomalies, sorted by connection, direction, position and kind.

    table: CONNECTION[connections]. frames: by direction. header_faults: of PROXY headers, by
    connection (fault, segment).
    """
    faults = joined([one.faults for one in frames])
    faults = _placed(faults, streams.segments, faults["packet"].copy())
    parts = [
        faults,
        _too_large(faults, frame_size_max),
        _conflicts(streams, table),
        _rows(Anomaly.NOT_DECRYPTED, NO_DIRECTION, list(tls.failed), a=list(tls.failed.values())),
        _proxy_headers(streams, table["protocol"], header_faults),
    ]
    passed = np.zeros(0, np.int64)
    if (pairs.responses["outcome"] == OUT_OF_ORDER).any():
        passed = np.maximum.accumulate(pairs.responses["partner"])
    for first in range(0, len(exchanges), FRAMES_AT_ONCE):
        rows = slice(first, first + FRAMES_AT_ONCE)
        some = exchanges[rows]
        parts += _cut_frames(some, pairs, rows)
        parts += _odd_responses(some, pairs, pairs.response[rows], passed)
    return _in_order(joined(parts))


def _in_order(rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    return rows[np.lexsort((rows["kind"], rows["pos"], rows["direction"], rows["connection"]))]


def _rows(kind: Any, direction: Any, connection: Any, **columns: Any) -> Any:
    """Rows of ANOMALY, without a packet or position unless given."""
    made = np.zeros(len(connection), ANOMALY)
    made["source"] = made["packet"] = made["pos"] = -1
    made["kind"], made["direction"] = kind, direction
    made["connection"] = connection
    for name, values in columns.items():
        made[name] = values
    return made


def _placed(rows: Any, segments: Any, segment: Ints) -> Any:
    """The rows with the packets of their segments (-1: none)."""
    has_segment = segment >= 0
    for name in ("source", "packet"):
        rows[name][has_segment] = segments[name][segment[has_segment]]
    return rows


def _of_frames(
    kind: Anomaly, direction: int, exchanges: Rows, chosen: Ints, **columns: Any
) -> Rows:
    """Anomalies about the frames of a direction, those of the `chosen` exchanges."""
    rows = exchanges[chosen]
    side = rows[SIDES[direction]]
    return _rows(
        kind, direction, rows["connection"], exchange_id=rows["exchange_id"],
        **{name: side[name] for name in ("source", "packet", "pos")}, **columns,
    )  # fmt: skip


def _cut_frames(exchanges: Rows, pairs: Pairs, rows: slice) -> list[Rows]:
    """Frames with missing bytes; `rows`: those of the exchanges among all."""
    parts = []
    for direction, frames, row_of in (
        (REQUEST, pairs.requests, pairs.request),
        (RESPONSE, pairs.responses, pairs.response),
    ):
        side = exchanges[SIDES[direction]]
        cut = np.flatnonzero((side["size"] >= 0) & (side["is_whole"] == 0))
        size = side["size"][cut]
        missing = size + 4 - frames["captured"][row_of[rows][cut]]
        parts.append(
            _of_frames(Anomaly.PARTIAL_FRAME, direction, exchanges, cut, a=size, byte_count=missing)
        )
    return parts


def _odd_responses(exchanges: Rows, pairs: Pairs, response: Ints, passed: Ints) -> list[Rows]:
    """Responses that came without a request, twice, out of order, or before their requests ended.

    response: their rows, -1 if an exchange has none. passed: for each row, the latest request
    answered so far, if any response is out of order.
    """
    is_there = response >= 0
    came = np.full(len(response), IN_ORDER, np.uint8)
    came[is_there] = pairs.responses["outcome"][response[is_there]]
    parts = []
    for kind, how in (
        (Anomaly.RESPONSE_WITHOUT_REQUEST, UNASKED),
        (Anomaly.DUPLICATE_RESPONSE, SECOND),
        (Anomaly.OUT_OF_ORDER_RESPONSE, OUT_OF_ORDER),
    ):
        rows = np.flatnonzero(came == how)
        before: Ints | int = 0
        if how == OUT_OF_ORDER and len(rows):
            # the earlier response that answered the latest request
            first = np.searchsorted(passed, passed[response[rows]])
            before = pairs.responses["correlation"][first].astype(np.int32)
        ids = exchanges["correlation_id"][rows]
        parts.append(_of_frames(kind, RESPONSE, exchanges, rows, a=ids, b=before))
    late = exchanges["request"]["end_time_ns"] - exchanges["response"]["time_ns"]
    is_pair = (exchanges["request"]["size"] >= 0) & is_there
    is_pair &= exchanges["is_sasl_token"] == 0
    rows = np.flatnonzero(is_pair & (late > 0))
    parts.append(_of_frames(Anomaly.NEGATIVE_LATENCY, RESPONSE, exchanges, rows, a=late[rows]))
    return parts


def _conflicts(streams: Streams, table: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Overlapping segments of Kafka connections whose bytes differ."""
    conflicts = streams.conflicts
    stream, connection = conflicts["stream"], conflicts["stream"] >> 1
    is_kafka = table["protocol"][connection] == Protocol.KAFKA
    rows = _rows(
        Anomaly.OVERLAP_CONFLICT, (stream & 1) ^ table["client_side"][connection],
        connection, pos=conflicts["pos"], byte_count=conflicts["byte_count"],
    )  # fmt: skip
    return _placed(rows, streams.segments, conflicts["segment"])[is_kafka]


def _proxy_headers(
    streams: Streams, protocol: Any, faults: dict[int, tuple[HeaderFault, int]]
) -> npt.NDArray[np.void]:
    """A row for each malformed PROXY header of a connection with Kafka or TLS."""
    connections = [row for row in faults if protocol[row] in (Protocol.KAFKA, Protocol.TLS)]
    rows = _rows(
        Anomaly.PROXY_HEADER, REQUEST, connections,
        a=[faults[row][0] for row in connections],
        byte_count=streams.facts.connections["proxy_byte_count"][connections],
    )  # fmt: skip
    segment = np.array([faults[row][1] for row in connections], np.int64)
    return _placed(rows, streams.segments, segment)


def _too_large(faults: Rows, frame_size_max: int) -> Rows:
    """A LIMIT row for each size prefix beyond the limit, unless it is text."""
    size = faults["b"]
    is_size = (faults["kind"] == Anomaly.UNFRAMED_BYTES) & (faults["a"] == BAD_SIZE)
    is_size &= (size > frame_size_max) & (size < _SIZES_END) & ~_is_text(size)
    rows = faults[is_size]
    rows["kind"] = Anomaly.LIMIT
    rows["a"], rows["b"], rows["byte_count"] = rows["b"], frame_size_max, 0
    rows["extent_count"] = 0
    return rows


def _is_text(sizes: Any) -> Any:
    """bool[n]: whether the four bytes of a size are printable, as in other protocols."""
    letters = [(sizes >> shift) & 255 for shift in (24, 16, 8, 0)]
    return np.all([(letter >= 32) & (letter < 127) for letter in letters], axis=0)
