"""Anomalies that the assembly of a batch finds, as rows of ANOMALY."""

from __future__ import annotations

import numpy as np

from kdissect.arrays import Bools, Bytes, Indices, Ints, Rows, joined
from kdissect.jit import int64, kernel
from kdissect.kafka.assembly import ANOMALY, NO_DIRECTION, Anomaly, Protocol
from kdissect.kafka.exchanges import FRAMES_AT_ONCE, Frames, Pairs
from kdissect.kafka.frame_tables import NO_FRAME, NOT_DECRYPTED
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
        _gaps(streams, table),
        _conflicts(streams, table),
        *_lost_records(streams, table, tls),
        _rows(Anomaly.NOT_DECRYPTED, NO_DIRECTION, [*tls.failed], reason=[*tls.failed.values()]),
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


def _in_order(rows: Rows) -> Rows:
    return rows[np.lexsort((rows["kind"], rows["pos"], rows["direction"], rows["connection"]))]


def _rows(
    kind: Anomaly, direction: int | Ints, connection: list[int] | Ints, **columns: list[int] | Ints
) -> Rows:
    """Rows of ANOMALY, without a packet or position unless given."""
    made = np.zeros(len(connection), ANOMALY)
    made["source"] = made["packet"] = made["pos"] = -1
    made["kind"], made["direction"] = kind, direction
    made["connection"] = connection
    for name, values in columns.items():
        made[name] = values
    return made


def _placed(rows: Rows, segments: Rows, segment: Ints) -> Rows:
    """The rows with the packets of their segments (-1: none)."""
    has_segment = segment >= 0
    for name in ("source", "packet"):
        rows[name][has_segment] = segments[name][segment[has_segment]]
    return rows


def _of_frames(
    kind: Anomaly, direction: int, exchanges: Rows, chosen: Ints, **columns: Ints
) -> Rows:
    """Anomalies about the frames of a direction, those of the `chosen` exchanges."""
    rows = exchanges[chosen]
    columns |= {name: rows[SIDES[direction]][name] for name in ("source", "packet", "pos")}
    return _rows(kind, direction, rows["connection"], exchange_id=rows["exchange_id"], **columns)


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
        counts = {"number": size, "byte_count": missing}
        parts.append(_of_frames(Anomaly.PARTIAL_FRAME, direction, exchanges, cut, **counts))
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
        before = np.zeros(len(rows), np.int32)
        if how == OUT_OF_ORDER and len(rows):
            # the earlier response that answered the latest request
            first = np.searchsorted(passed, passed[response[rows]])
            before = pairs.responses["correlation"][first].astype(np.int32)
        ids, is_token = exchanges["correlation_id"][rows], exchanges["is_sasl_token"][rows]
        numbers = {"number": ids, "other": before, "reason": is_token}
        parts.append(_of_frames(kind, RESPONSE, exchanges, rows, **numbers))
    late = exchanges["request"]["end_time_ns"] - exchanges["response"]["time_ns"]
    is_pair = (exchanges["request"]["size"] >= 0) & is_there
    is_pair &= exchanges["is_sasl_token"] == 0
    rows = np.flatnonzero(is_pair & (late > 0))
    parts.append(_of_frames(Anomaly.NEGATIVE_LATENCY, RESPONSE, exchanges, rows, number=late[rows]))
    return parts


def _gaps(streams: Streams, table: Rows) -> Rows:
    """The gaps of Kafka's streams."""
    sides = streams.sides
    chosen = np.flatnonzero(np.repeat(table["protocol"] == Protocol.KAFKA, 2))
    stream = np.repeat(chosen, sides["gap_count"][chosen])
    rows = _rows(Anomaly.GAP, _direction(stream, table), stream >> 1)
    _fill_gaps(streams.pieces, sides, chosen, rows)
    return _placed(rows, streams.segments, rows["packet"].copy())


@kernel
def _fill_gaps(pieces: Rows, sides: Rows, chosen: Indices, gaps: Rows) -> None:
    """Fill in where the gaps of the chosen streams are; `packet` becomes the segment after it, or
    the last one. There are as many as `gap_count` says."""
    row = 0
    for stream in chosen:
        side = sides[stream]
        here = int64(0)
        segment = int64(-1)
        for index in range(side["piece_start"], side["piece_stop"] + 1):
            is_end = index == side["piece_stop"]
            until = side["end"] if is_end else pieces[index]["pos"]
            if not is_end:
                segment = pieces[index]["segment"]
            if until > here:
                gaps[row]["packet"] = segment
                gaps[row]["pos"] = here
                gaps[row]["byte_count"] = until - here
                row += 1
            if not is_end:
                here = pieces[index]["end"]


def _direction(stream: Ints, table: Rows) -> Ints:
    """REQUEST or RESPONSE, of streams by their numbers."""
    direction: Ints = (stream & 1) ^ table["client_side"][stream >> 1]
    return direction


def _lost_records(streams: Streams, table: Rows, tls: TlsConnections) -> list[Rows]:
    """Records in decrypted streams of Kafka that could not be decrypted."""
    parts = []
    for connection, opened in tls.opened.items():
        for side in (0, 1):
            lost = np.array(opened[side].lost, np.int64).reshape(-1, 3)
            if table["protocol"][connection] == Protocol.KAFKA:
                stream = np.full(len(lost), 2 * connection + side)
                rows = _rows(Anomaly.UNFRAMED_BYTES, _direction(stream, table), stream >> 1)
                rows["pos"], rows["byte_count"] = lost[:, 0], lost[:, 1]
                rows["reason"], rows["number"] = NOT_DECRYPTED, -1
                parts.append(_placed(rows, streams.segments, lost[:, 2]))
    return parts


def _conflicts(streams: Streams, table: Rows) -> Rows:
    """Overlapping segments of Kafka connections whose bytes differ."""
    conflicts = streams.conflicts
    stream = conflicts["stream"]
    where = {"pos": conflicts["pos"], "byte_count": conflicts["byte_count"]}
    rows = _rows(Anomaly.OVERLAP_CONFLICT, _direction(stream, table), stream >> 1, **where)
    is_kafka = table["protocol"][stream >> 1] == Protocol.KAFKA
    return _placed(rows, streams.segments, conflicts["segment"])[is_kafka]


def _proxy_headers(
    streams: Streams, protocol: Bytes, faults: dict[int, tuple[HeaderFault, int]]
) -> Rows:
    """A row for each malformed PROXY header of a connection with Kafka or TLS."""
    found = [row for row in faults if protocol[row] in (Protocol.KAFKA, Protocol.TLS)]
    size = streams.facts.connections["proxy_byte_count"][found]
    kinds: list[int] = [faults[row][0] for row in found]
    rows = _rows(Anomaly.PROXY_HEADER, REQUEST, found, reason=kinds, byte_count=size)
    segment = np.array([faults[row][1] for row in found], np.int64)
    return _placed(rows, streams.segments, segment)


def _too_large(faults: Rows, frame_size_max: int) -> Rows:
    """A LIMIT row for each size prefix beyond the limit, unless it is text."""
    size = faults["number"]
    is_size = (faults["kind"] == Anomaly.UNFRAMED_BYTES) & (faults["reason"] == NO_FRAME)
    is_size &= (size > frame_size_max) & (size < _SIZES_END) & ~_is_text(size)
    rows = faults[is_size]
    rows["kind"] = Anomaly.LIMIT
    rows["other"] = frame_size_max
    rows["reason"] = rows["byte_count"] = rows["extent_count"] = 0
    return rows


def _is_text(sizes: Ints) -> Bools:
    """bool[n]: whether the four bytes of a size are printable, as in other protocols."""
    letters = [(sizes >> shift) & 255 for shift in (24, 16, 8, 0)]
    is_text: Bools = np.all([(letter >= 32) & (letter < 127) for letter in letters], axis=0)
    return is_text
