"""What a window leaves for the next one: the state of its connections, and the bytes they carry.

See `carry` for the terms.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kdissect.arrays import gather_ranges
from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import ACK, COUNTED_BEFORE, FIN, RST, SEGMENT, SYN
from kdissect.kafka.assembly import EXTENT, Anomaly, Protocol
from kdissect.kafka.exchanges import NO_RESPONSE
from kdissect.kafka.frame_search import RESERVED, RESERVED_COUNT
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.resume.continued import (
    LOOKED_AT_MAX,
    NO_POSITION,
    Bools,
    Complete,
    Continued,
    Settled,
    exchanges_of,
    places_of,
)
from kdissect.resume.open_connection import (
    NO_NUMBER,
    Ints,
    OpenConnection,
    Phase,
    Rows,
    is_resumed,
)
from kdissect.tcp.columns import DUPLICATE
from kdissect.tls.session import RecordPoint, TlsState

FORGOTTEN_NS = 60_000_000_000  # a closed connection is forgotten: half of MSL (RFC 9293, 3.4.1)
TLS_HANDSHAKE_BYTES = 64 << 10  # in which both sides have said hello and shown certificates
TAIL_MAX, TAIL_KEPT = 1 << 20, 64 << 10  # bytes in no frame; of these, searched again
DEFERRED_MIN = 256 << 10  # of a frame that are missing, so that the connection waits for them
LOOKED_AT_SMALL = 16 << 10  # up to here every new byte of an unknown connection is looked at
RESERVED_IDS = np.arange(RESERVED, RESERVED + RESERVED_COUNT)
# Protocols that the first bytes of a connection decide, whatever comes later.
_DECIDED_AT_ONCE = np.array([Protocol.HTTP, Protocol.HTTP2, Protocol.ZOOKEEPER])


@dataclass(frozen=True, slots=True)
class CarryLimits:
    """connection_max: connections of which something is known; carried_max: bytes carried of all,
    connection_bytes_max: of one."""

    connection_max: int = 16384
    carried_max: int = 256 << 20
    connection_bytes_max: int = 128 << 20


@dataclass(frozen=True, slots=True)
class Resumption:
    """By stream, where the next window begins.

    pos: position after the last complete frame; in plaintext, if the stream is decrypted. carried:
    the same in the TCP stream, which may begin with a part of a TLS record before. is_boundary:
    whether a frame begins there. missing: bytes of the last frame that were not captured yet.
    points: of decrypted streams, where decryption resumes.
    """

    pos: Ints
    carried: Ints
    is_boundary: Bools
    missing: Ints
    points: dict[int, RecordPoint]


def resumption(c: Continued, ready: Settled, done: Complete) -> Resumption:
    """Find where each stream resumes: after its complete frames, which come before all others."""
    pos, framed, ends = np.zeros((3, 2 * len(c)), np.int64)
    ends[:] = c.ends
    for stream, opened in c.opened_streams():
        ends[stream] = opened.end
    for frames in c.frames:
        rows = frames.has & done.is_done
        np.maximum.at(pos, frames.stream[rows], frames.end[rows])
        np.maximum.at(framed, frames.stream[frames.has], frames.end[frames.has])
    was_boundary = c.before["earlier"]["streams"]["is_boundary"].reshape(-1) != 0
    begins = np.repeat(is_resumed(c.before), 2)
    is_boundary = (pos > 0) | np.where(begins, was_boundary, c.sides["has_syn"] != 0)
    # a search that finds nothing does not go over all of it again
    is_lost = (done.open_from == NO_POSITION) & (ready.limit - pos > TAIL_MAX)
    is_lost &= np.repeat(c.is_kafka, 2)
    pos[is_lost] = ready.limit[is_lost] - TAIL_KEPT
    is_boundary[is_lost] = False
    is_other = ~c.is_kafka | c.is_given_up | (c.before["phase"] == Phase.OTHER)
    pos = np.where(np.repeat(is_other, 2), c.ends, pos)
    carried, points = pos.copy(), {}
    for stream, opened in c.opened_streams():
        if opened.can_resume:
            carried[stream], points[stream] = opened.point(int(pos[stream]))
    missing = np.where(framed > 0, np.maximum(framed - ends, 0), 0)
    return Resumption(pos, carried, is_boundary, missing, points)


def must_end(
    c: Continued, at: Resumption, done: Complete, limits: CarryLimits, secret_apis: Set[int]
) -> Bools:
    """bool[connections]: its carried bytes would be too many, or have a message with secrets.

    secret_apis: keys of APIs whose messages must not be carried; with any, SASL tokens must not
    either.
    """
    size = np.maximum(c.ends - at.carried, 0).reshape(-1, 2).sum(axis=1)
    size[~c.is_last] = 0
    found = size > limits.connection_bytes_max
    found |= (size > 0) & (size.sum() > limits.carried_max)
    exchanges = c.assembly.exchanges
    is_secret = np.isin(exchanges["api_key"], list(secret_apis))
    is_secret |= (exchanges["is_sasl_token"] != 0) & bool(secret_apis)
    is_secret &= ~c.is_tls[c.of] & ~done.is_done
    found[c.of[is_secret]] = True
    return found & c.is_last


def phases(c: Continued, is_confirmed: Bools, is_over: Bools, has_key_logs: bool) -> Ints:
    """int64[connections]: the Phase after this window."""
    captured = c.sides["byte_count"].reshape(-1, 2).sum(axis=1)
    # key logs may come a little later than the records
    most = np.where(c.is_unread_tls, TLS_HANDSHAKE_BYTES * has_key_logs, LOOKED_AT_MAX)
    found = np.where(captured <= most, Phase.LOOKING, Phase.OTHER)
    is_decided = np.isin(c.assembly.connections["protocol"], _DECIDED_AT_ONCE)
    found[is_decided | (c.before["phase"] == Phase.OTHER)] = Phase.OTHER
    found = np.where(c.is_kafka, np.where(is_confirmed, Phase.KAFKA, Phase.LOOKING), found)
    found[c.is_given_up] = Phase.OTHER
    phase: Ints = np.where(is_over, Phase.OVER, found).astype(np.int64)
    return phase


def is_cut_short(c: Continued, phase: Ints) -> Bools:
    """bool[connections]: a limit ends the search for Kafka in a connection that goes on."""
    before = c.before["phase"]
    is_decided = np.isin(c.assembly.connections["protocol"], _DECIDED_AT_ONCE)
    is_decided |= c.is_unread_tls & (before != Phase.KAFKA)
    ignored: Bools = (phase == Phase.OTHER) & (before != Phase.OTHER) & ~is_decided & c.is_last
    return ignored


def final_anomalies(
    c: Continued, phase: Ints, carried: Ints, done: Complete
) -> npt.NDArray[np.void]:
    """The anomalies that come with this window: those of an exchange come with it, others when the
    bytes of their place are carried no more."""
    anomalies = c.assembly.anomalies.copy()
    of = anomalies["connection"]
    stream, has_place = places_of(anomalies, c.client)
    left = carried[stream] + c.before["base"].reshape(-1)[stream] - anomalies["pos"]
    is_open = has_place & (phase[of] != Phase.OVER)
    is_final = (phase[of] != Phase.LOOKING) & (~is_open | (left > 0))
    rows, exchange = exchanges_of(anomalies, c.assembly.exchanges["exchange_id"])
    is_final[rows] = done.is_done[exchange]
    is_run = np.isin(anomalies["kind"], (Anomaly.GAP, Anomaly.UNFRAMED_BYTES))
    size = anomalies["byte_count"]
    is_part = is_open & is_run & is_final
    anomalies["byte_count"] = np.where(is_part, np.minimum(size, left), size)
    return anomalies[is_final]


# -- state ----------------------------------------------------------------------------------


def next_rows(
    c: Continued, at: Resumption, ready: Settled, done: Complete, phase: Ints, closed_ns: int
) -> Rows:
    """OPEN[connections] after this window. closed_ns: `Patience.closed_ns`."""
    rows = c.before.copy()
    rows["phase"], rows["is_closed"] = phase, c.is_closed
    is_over = phase == Phase.OVER
    passed = np.where(np.repeat(is_over, 2), c.ends, at.carried).reshape(-1, 2)
    passed[phase == Phase.LOOKING] = 0
    rows["base"] += passed
    seq = c.seq_of_start.reshape(-1, 2)
    rows["seq"] = np.where(seq != NO_NUMBER, (seq + passed) & 0xFFFFFFFF, rows["seq"])
    open_count = np.bincount(c.of[~done.is_done], minlength=len(c))
    rows["exchange_count"] = np.where(is_over, 0, open_count)
    rows["connection"] = _counts(c, at, done, phase)
    facts = c.streams.facts
    rows["tcp"], rows["tcp_sides"] = facts.connections, facts.sides.reshape(-1, 2)
    rows["earlier"] = _earlier(c, at, done, phase)
    rows["may_begin_until"] = ready.begin_until
    due = np.where(c.is_closed, c.last_time + closed_ns, ready.until)
    rows["due"] = np.where(is_over, c.last_time + FORGOTTEN_NS, np.minimum(due, ready.until))
    return rows


def _enough(c: Continued, at: Resumption, phase: Ints) -> Ints:
    """int64[connections, 2]: `OpenConnection.enough`."""
    enough = np.zeros((len(c), 2), np.int64)
    missing = at.missing.reshape(-1, 2)
    has_large_frame = (phase == Phase.KAFKA) & (missing.max(axis=1, initial=0) >= DEFERRED_MIN)
    enough[has_large_frame] = np.maximum(missing[has_large_frame], 1)
    captured = c.sides["byte_count"].reshape(-1, 2).sum(axis=1)
    # so that work on an unknown connection grows with its size
    is_unknown = (phase == Phase.LOOKING) & (captured > LOOKED_AT_SMALL)
    enough[is_unknown] = captured[is_unknown, None] // 2
    return enough


def _earlier(c: Continued, at: Resumption, done: Complete, phase: Ints) -> npt.NDArray[np.void]:
    """EARLIER[connections], for the kernels."""
    earlier, connections = c.before["earlier"].copy(), c.assembly.connections
    spoken = connections["protocol"]
    # of TLS that is not read the position of the next record is unknown
    is_unread = np.isin(spoken, (Protocol.NONE, Protocol.KAFKA, Protocol.TLS))
    spoken = np.where(is_unread, Protocol.OTHER, spoken)
    spoken = np.where(phase == Phase.KAFKA, Protocol.KAFKA, spoken)
    earlier["protocol"] = np.where(phase == Phase.LOOKING, Protocol.NONE, spoken)
    earlier["client_side"] = c.client
    stream = c.streams_of(RESPONSE)
    lacks = c.sides["end"][stream] > c.sides["byte_count"][stream]
    earlier["has_loss"] = lacks | (is_resumed(c.before) & (earlier["has_loss"] != 0))
    has_end = earlier["response_end"] != NO_RESPONSE
    earlier["response_end"] -= np.where(has_end, at.carried[stream], 0)
    frames = c.frames[RESPONSE]
    rows = _in_order(frames.pos, done.is_done & frames.has)
    end_time = c.assembly.exchanges["response"]["end_time_ns"]
    earlier["response_end"][c.of[rows]] = frames.end[rows] - at.pos[frames.stream[rows]]
    earlier["response_time"][c.of[rows]] = end_time[rows]
    earlier["streams"] = _streams(c, at, done).reshape(-1, 2)
    return earlier


def _streams(c: Continued, at: Resumption, done: Complete) -> npt.NDArray[np.void]:
    """STREAM[streams] after the complete exchanges."""
    streams = c.before["earlier"]["streams"].reshape(-1).copy()
    exchanges = c.assembly.exchanges
    key, version = exchanges["api_key"], exchanges["api_version"]
    ids = exchanges["correlation_id"].astype(np.int64) & 0xFFFFFFFF
    is_token = exchanges["is_sasl_token"] != 0
    has_id = ~is_token & ~np.isin(ids, RESERVED_IDS)
    is_handshake = key == ApiKey.SASL_HANDSHAKE
    is_early = is_token | is_handshake | (key == ApiKey.API_VERSIONS)
    for frames in c.frames:
        rows = _in_order(frames.pos, done.is_done & frames.has)  # so the last frame stays
        stream = frames.stream[rows]
        streams["was_framed"][stream] = 1
        streams["in_tokens"][stream] = (is_token | (is_handshake & (version == 0)))[rows]
        streams["is_young"][stream[~is_early[rows]]] = 0
        named = has_id[rows]
        streams["last_id"][stream[named]] = ids[rows[named]]
    streams["is_boundary"] = at.is_boundary
    return streams


def _in_order(pos: Ints, chosen: Bools) -> Ints:
    """The chosen rows, ordered by position."""
    rows = np.flatnonzero(chosen)
    return rows[np.argsort(pos[rows], kind="stable")]


def _counts(c: Continued, at: Resumption, done: Complete, phase: Ints) -> npt.NDArray[np.void]:
    """CONNECTION[connections] without the counts that the carried bytes give again."""
    rows = c.assembly.connections.copy()
    for name, again in _carried_counts(c, at, done).items():
        for way in (REQUEST, RESPONSE):
            counts = rows["direction"][name][:, way]
            counts -= again[c.streams_of(way)]
            counts[phase == Phase.LOOKING] = 0  # all of it is carried
    return rows


def _carried_counts(c: Continued, at: Resumption, done: Complete) -> dict[str, Ints]:
    """By stream: counts of the bytes from the position on where it resumes."""
    sides, count, start = c.sides, 2 * len(c), at.carried
    piece_count = sides["piece_stop"] - sides["piece_start"]
    index, first = gather_ranges(sides["piece_start"], piece_count)
    pieces, stream = c.streams.pieces[index], np.repeat(np.arange(count), piece_count)
    end_before = np.append(0, pieces["end"])[:-1]
    end_before[first[piece_count > 0]] = 0
    is_hole = pieces["pos"] > np.maximum(end_before, start[stream])
    byte_count, framed, last = np.zeros((3, count), np.int64)
    size = np.maximum(pieces["end"] - np.maximum(pieces["pos"], start[stream]), 0)
    np.add.at(byte_count, stream, size)
    np.maximum.at(last, stream, pieces["end"])
    gap_count = np.bincount(stream[is_hole], minlength=count)
    gap_count += sides["end"] > np.maximum(last, start)
    extents = c.assembly.extents
    is_here = extents["source"] >= 0
    before = np.append(0, np.cumsum(np.where(is_here, extents["length"], 0)))
    for way, frames in enumerate(c.frames):
        rows = np.flatnonzero(frames.has & ~done.is_done)
        column = c.assembly.exchanges[SIDES[way]][rows]
        first = column["extent_start"]
        captured = before[first + column["extent_count"]] - before[first] + 4
        np.add.at(framed, frames.stream[rows], captured)
    unframed = byte_count - framed
    for number, opened in c.opened_streams():
        text, pos = opened.table, int(at.pos[number])
        inside = text["pos"] + text["length"] - np.maximum(text["pos"], pos)
        lost = sum(size for place, size, _ in opened.lost if place >= start[number])
        unframed[number] = np.maximum(inside, 0).sum() - framed[number] + lost
    return {
        "byte_count": byte_count,
        "framed_byte_count": byte_count - unframed,
        "unframed_byte_count": unframed,
        "missing_byte_count": np.maximum(sides["end"] - start, 0) - byte_count,
        "gap_count": gap_count,
    }


# -- carried segments -----------------------------------------------------------------------


def carried_segments(
    c: Continued, at: Resumption, ready: Settled, phase: Ints, sources: Sources
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint8]]:
    """(SEGMENT rows to carry, cut where the carried bytes begin; their bytes).

    `endpoints` is the row of their connection, `pos` a position in the bytes of all.
    """
    segments, connection = c.streams.segments, c.streams.connection.astype(np.int64)
    mark, flags, length = c.streams.mark, segments["flags"], segments["length"].astype(np.int64)
    goes_on = c.is_last[connection] & (mark != DUPLICATE)
    is_whole = goes_on & (phase == Phase.LOOKING)[connection]
    is_whole &= (length > 0) | ((flags & (SYN | FIN | RST)) != 0)
    resumes = goes_on & ((phase == Phase.KAFKA) | (phase == Phase.OTHER))[connection]
    resumes &= segments["packet"] > 0  # no SYN of ours
    is_known = c.seq_of_start[c.stream] != NO_NUMBER
    wanted = (c.seq_of_start + at.carried) & 0xFFFFFFFF
    number = segments["seq"].astype(np.int64) + ((flags & SYN) != 0)
    ahead = ((number - wanted[c.stream] + 0x80000000) & 0xFFFFFFFF) - 0x80000000
    has_bytes = resumes & (mark == 0) & is_known & (length > 0) & (ahead + length > 0)
    is_end = resumes & (mark == 0) & ((flags & (FIN | RST)) != 0)  # as a segment without bytes
    is_end[_acknowledgements(c, ready, resumes)] = True
    rows = np.flatnonzero(is_whole | has_bytes | is_end)
    cut = np.where(is_known, np.clip(-ahead, 0, length), 0)
    cut = np.where(is_end & ~has_bytes, length, cut)
    cut[is_whole] = 0
    cut, keeps_bytes, is_cut = cut[rows], (is_whole | has_bytes)[rows], ~is_whole[rows]
    kept = segments[rows]
    kept["seq"] = np.where(is_cut, number[rows] + cut, kept["seq"]) & 0xFFFFFFFF
    kept["flags"] = np.where(is_cut, kept["flags"] & (0xFF ^ SYN), kept["flags"])
    captured = kept["captured"].astype(np.int64)
    kept["captured"] = np.where(keeps_bytes, np.maximum(captured - cut, 0), 0)
    kept["length"] -= cut.astype(np.int32)
    kept["endpoints"] = connection[rows]
    kept["ip_id"] |= COUNTED_BEFORE
    kept["pos"] += np.minimum(cut, captured)
    data = payload(kept, sources)
    captured = kept["captured"].astype(np.int64)
    kept["pos"] = np.cumsum(captured) - captured
    return kept, data


def payload(segments: npt.NDArray[np.void], sources: Sources) -> npt.NDArray[np.uint8]:
    """The captured bytes of SEGMENT rows, one after the other; valid until the next call."""
    extents = np.zeros(len(segments), EXTENT)
    for name, column in (("pos", "pos"), ("length", "captured"), ("source", "source")):
        extents[name] = segments[column]
    extents = extents[extents["length"] > 0]
    return sources.gather(extents) if len(extents) else np.zeros(0, np.uint8)


def _acknowledgements(c: Continued, ready: Settled, resumes: Bools) -> Ints:
    """The last acknowledgement of each stream with a hole that may still be filled, or of bytes
    after the captured ones."""
    is_short = c.sides["end"] > c.ends
    is_ack = resumes & ((c.streams.segments["flags"] & ACK) != 0)
    rows = []
    for stream in np.flatnonzero(ready.has_hole | is_short).tolist():
        rows += np.flatnonzero(is_ack & (c.stream == stream ^ 1))[-1:].tolist()
    return np.array(rows, np.int64)


def next_connections(
    c: Continued, rows: Rows, at: Resumption, segments: npt.NDArray[np.void],
    data: npt.NDArray[np.uint8],
) -> list[OpenConnection]:  # fmt: skip
    """The last connection of each pair of endpoints, with its carried segments."""
    bounds = np.searchsorted(segments["endpoints"], np.arange(len(c) + 1))
    ends = np.append(0, np.cumsum(segments["captured"], dtype=np.int64))
    first_byte = ends[bounds]
    segments["pos"] -= first_byte[segments["endpoints"]]
    packed, plain, rtt = segments.tobytes(), data.tobytes(), c.streams.facts.rtt
    size = SEGMENT.itemsize
    enough = _enough(c, at, rows["phase"]).tolist()
    rtt_bounds = np.searchsorted(rtt["stream"], 2 * np.arange(len(c) + 1))
    found = []
    for row in np.flatnonzero(c.is_last).tolist():
        low, high = bounds[row : row + 2].tolist()
        counts = rtt[rtt_bounds[row] : rtt_bounds[row + 1]].copy()
        counts["stream"] -= 2 * row
        tls = None
        if row in c.tls.sessions and 2 * row in at.points and 2 * row + 1 in at.points:
            tls = TlsState(c.tls.sessions[row], (at.points[2 * row], at.points[2 * row + 1]))
        kept = bytearray(packed[low * size : high * size])
        carried = bytearray(plain[first_byte[row] : first_byte[row + 1]])
        one = OpenConnection(rows[row : row + 1].copy(), kept, carried, counts, tls)
        found.append(replace(one, enough=(enough[row][0], enough[row][1])))
    return found
