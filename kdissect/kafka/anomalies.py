"""Anomalies that the assembly of a batch finds, as rows of ANOMALY, and how many are listed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.kafka.assembly import (
    ANOMALY,
    NO_DIRECTION,
    Anomaly,
    Protocol,
)
from kdissect.kafka.exchanges import Frames, Ids, Ints, Pairs, late_responses
from kdissect.kafka.frame_tables import BAD_SIZE
from kdissect.kafka.options import StreamOptions
from kdissect.kafka.pairing import OUT_OF_ORDER, SECOND, UNASKED
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.tcp.proxy_protocol import HeaderFault
from kdissect.tcp.reassembly import Streams
from kdissect.tls.plaintext import TlsConnections

_SIZES_END = 2**31  # Kafka's sizes are int32, so a larger one is no size prefix


def found_anomalies(
    streams: Streams,
    table: npt.NDArray[np.void],
    requests: Frames,
    responses: Frames,
    pairs: Pairs,
    tls: TlsConnections,
    header_faults: dict[int, tuple[HeaderFault, int]],
) -> npt.NDArray[np.void]:
    """All anomalies, sorted by connection, direction, position and kind.

    table: CONNECTION[connections]. header_faults: of PROXY headers, by connection (fault, segment).
    """
    segments = streams.segments
    parts = [
        _of_framing(requests, segments, 0),
        _of_framing(responses, segments, len(requests.extents)),
        _conflicts(streams, table),
        _rows(Anomaly.NOT_DECRYPTED, NO_DIRECTION, list(tls.failed), a=list(tls.failed.values())),
        _proxy_headers(streams, table["protocol"], header_faults),
    ]
    ids = Ids(table["connection_id"], requests, responses, pairs.request_of)
    for direction, frames, ids_of in (
        (REQUEST, requests, ids.of_requests),
        (RESPONSE, responses, ids.of_responses),
    ):
        rows = frames.cut()
        size = frames.table["size"][rows]
        missing = size + 4 - frames.table["captured"][rows]
        parts.append(
            _of_frames(
                Anomaly.PARTIAL_FRAME, direction, frames, rows, segments,
                exchange_id=ids_of(rows), a=size, byte_count=missing,
            )
        )  # fmt: skip
    for kind, how in (
        (Anomaly.RESPONSE_WITHOUT_REQUEST, UNASKED),
        (Anomaly.DUPLICATE_RESPONSE, SECOND),
        (Anomaly.OUT_OF_ORDER_RESPONSE, OUT_OF_ORDER),
    ):
        rows = np.flatnonzero(pairs.came == how)
        passed: Ints | int = 0
        if how == OUT_OF_ORDER and len(rows):
            passed = _correlation_ids(responses, _passed(pairs.request_of, rows))
        parts.append(
            _of_frames(
                kind, RESPONSE, responses, rows, segments,
                exchange_id=ids.of_responses(rows), a=_correlation_ids(responses, rows), b=passed,
            )
        )  # fmt: skip
    rows, late = late_responses(requests, responses, pairs.request_of, segments)
    parts.append(
        _of_frames(
            Anomaly.NEGATIVE_LATENCY, RESPONSE, responses, rows, segments,
            exchange_id=ids.of_responses(rows), a=late,
        )
    )  # fmt: skip
    return _in_order(np.concatenate(parts))


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


def _of_framing(frames: Frames, segments: Any, extent_base: int) -> npt.NDArray[np.void]:
    """Faults of framing."""
    rows = frames.faults.copy()
    rows["extent_start"] += extent_base
    return _placed(rows, segments, frames.faults["packet"])


def _of_frames(
    kind: Anomaly, direction: int, frames: Frames, rows: Ints, segments: Any,
    **columns: Any,
) -> npt.NDArray[np.void]:  # fmt: skip
    """Anomalies about whole frames; `rows`: of a direction's table."""
    table = frames.table[rows]
    made = _rows(kind, direction, table["connection"], pos=table["pos"], **columns)
    return _placed(made, segments, table["first"])


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


def _correlation_ids(frames: Frames, rows: Ints) -> Ints:
    """Correlation ids as signed int32 values, as Kafka shows them."""
    return frames.table["correlation"][rows].astype(np.uint32).view(np.int32).astype(np.int64)


def _passed(request_of: Ints, rows: Ints) -> Ints:
    """For out-of-order responses: row of an earlier response that answered a later request."""
    highest = np.maximum.accumulate(request_of)
    return np.searchsorted(highest, highest[rows])  # the response that set the maximum


# -- limits ---------------------------------------------------------------------------------


def bounded(anomalies: npt.NDArray[np.void], options: StreamOptions) -> npt.NDArray[np.void]:
    """The anomalies of a batch, sorted by connection, direction and position, within the limits.

    Of a direction's gaps, the first `gaps_max` are kept; one more row covers the rest, and a LIMIT
    row says so. The same holds for its unframed byte ranges. A size prefix beyond `frame_size_max`
    adds a LIMIT row, unless it is text.
    """
    kind = anomalies["kind"]
    parts = [anomalies]
    unframed = kind == Anomaly.UNFRAMED_BYTES
    beyond = (anomalies["b"] > options.frame_size_max) & (anomalies["b"] < _SIZES_END)
    beyond &= ~_is_text(anomalies["b"])
    rows = anomalies[unframed & (anomalies["a"] == BAD_SIZE) & beyond].copy()
    if len(rows):
        rows["a"] = rows["b"]
        parts.append(_limit_rows(rows, rows["a"], options.frame_size_max, 0))
    for one in (Anomaly.GAP, Anomaly.UNFRAMED_BYTES):
        if int((kind == one).sum()) > options.gaps_max:
            parts = _listed(parts, one, options.gaps_max)
    if len(parts) == 1:
        return anomalies
    return _in_order(np.concatenate(parts))


def _is_text(sizes: Any) -> Any:
    """bool[n]: whether the four bytes of a size are printable, as in other protocols."""
    letters = [(sizes >> shift) & 255 for shift in (24, 16, 8, 0)]
    return np.all([(letter >= 32) & (letter < 127) for letter in letters], axis=0)


def _limit_rows(rows: Any, a: Any, limit: int, byte_count: Any) -> Any:
    rows["kind"] = Anomaly.LIMIT
    rows["a"], rows["b"], rows["byte_count"] = a, limit, byte_count
    rows["extent_count"] = 0
    return rows


def _listed(parts: list[Any], kind: Anomaly, most: int) -> list[Any]:
    """parts[0] with at most `most` rows of a kind per direction, and rows that cover the others."""
    anomalies = parts[0]
    places = np.flatnonzero(anomalies["kind"] == kind)
    rows = anomalies[places]
    stream = rows["connection"].astype(np.int64) * 2 + rows["direction"]
    starts = np.flatnonzero(np.diff(stream, prepend=-1))
    rank = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
    behind = rank >= most
    if not behind.any():
        return parts
    first = places[rank == most]
    covering = anomalies[first].copy()
    group = np.cumsum(rank[behind] == most) - 1
    byte_count = np.zeros(len(first), np.int64)
    np.add.at(byte_count, group, rows["byte_count"][behind])
    covering["byte_count"] = byte_count
    covering["extent_count"] = 0
    limit_rows = _limit_rows(covering.copy(), most + np.bincount(group), most, byte_count)
    left = np.ones(len(anomalies), np.bool_)
    left[places[behind]] = False
    return [anomalies[left], *parts[1:], covering, limit_rows]
