"""What a window leaves: its final anomalies, the state of its connections, and what they carry.

See `carry` for the terms.
"""

from __future__ import annotations

import numpy as np

from kdissect.arrays import Bools, Bytes, Ints, Rows, gather_ranges
from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import ACK, COUNTED_BEFORE, FIN, RST, SYN
from kdissect.kafka.assembly import EXTENT, Anomaly, Protocol
from kdissect.kafka.exchanges import NO_RESPONSE
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.resume.assembled_window import AssembledWindow
from kdissect.resume.open_connection import NO_NUMBER, OpenConnection
from kdissect.resume.progress import Progress
from kdissect.tcp.columns import DUPLICATE
from kdissect.tls.session import TlsState


def final_anomalies(window: AssembledWindow, progress: Progress) -> Rows:
    """The anomalies that come with this window, with positions and ids of whole connections.

    Those of an exchange come with it, others when the bytes of their place are carried no more.
    """
    anomalies = window.assembly.anomalies.copy()
    connection, direction = anomalies["connection"].astype(np.int64), anomalies["direction"]
    has_place = (direction <= RESPONSE) & (anomalies["pos"] >= 0)
    stream = 2 * connection + (window.client_side[connection] ^ (direction.astype(np.int64) & 1))
    left = progress.carried[stream] - anomalies["pos"]
    anomalies["pos"] += np.where(has_place, window.before["base"].reshape(-1)[stream], 0)
    is_open = has_place & ~progress.is_over[connection]
    is_final = (progress.protocol[connection] != Protocol.NONE) & (~is_open | (left > 0))
    rows = np.flatnonzero(anomalies["exchange_id"] != 0)
    order = np.argsort(window.id_here)
    exchange = order[np.searchsorted(window.id_here[order], anomalies["exchange_id"][rows])]
    anomalies["exchange_id"][rows] = window.assembly.exchanges["exchange_id"][exchange]
    is_final[rows] = progress.is_done[exchange]
    is_run = np.isin(anomalies["kind"], (Anomaly.GAP, Anomaly.UNFRAMED_BYTES))
    size = anomalies["byte_count"]
    is_part = is_open & is_run & is_final
    anomalies["byte_count"] = np.where(is_part, np.minimum(size, left), size)
    return anomalies[is_final]


# -- state ----------------------------------------------------------------------------------


def next_rows(window: AssembledWindow, progress: Progress) -> Rows:
    """OPEN[connections] after this window."""
    rows = window.before.copy()
    passed = progress.carried.reshape(-1, 2)
    rows["base"] += passed
    seq = window.seq_of_start.reshape(-1, 2)
    rows["seq"] = np.where(seq != NO_NUMBER, (seq + passed) & 0xFFFFFFFF, rows["seq"])
    connection = window.connection_of[~progress.is_done]
    rows["exchange_count"] = np.bincount(connection, minlength=len(window))
    rows["connection"] = window.assembly.connections
    for name, again in _carried_counts(window, progress).items():
        counts = rows["connection"]["direction"][name]
        for way in (REQUEST, RESPONSE):
            counts[:, way] -= again[window.streams_of(way)]
        counts[progress.protocol == Protocol.NONE] = 0  # all of it is carried
    facts = window.streams.facts
    rows["tcp"], rows["tcp_sides"] = facts.connections, facts.sides.reshape(-1, 2)
    rows["earlier"] = _earlier(window, progress)
    rows["may_begin_until"], rows["due"] = progress.settled.begin_until, progress.due
    return rows


def _earlier(window: AssembledWindow, progress: Progress) -> Rows:
    """EARLIER[connections], for the kernels."""
    earlier = window.before["earlier"].copy()
    earlier["protocol"] = progress.protocol
    earlier["client_side"] = window.client_side
    stream = window.streams_of(RESPONSE)
    has_end = earlier["response_end"] != NO_RESPONSE
    earlier["response_end"] -= np.where(has_end, progress.carried[stream], 0)
    frames = window.frames[RESPONSE]
    rows = _in_order(frames.pos, progress.is_done & frames.has)
    end_time = window.assembly.exchanges["response"]["end_time_ns"]
    connection = window.connection_of[rows]
    earlier["response_end"][connection] = frames.end[rows] - progress.pos[frames.stream[rows]]
    earlier["response_time"][connection] = end_time[rows]
    earlier["streams"] = _streams(window, progress).reshape(-1, 2)
    return earlier


def _streams(window: AssembledWindow, progress: Progress) -> Rows:
    """STREAM[streams] after the complete exchanges."""
    streams = window.before["earlier"]["streams"].reshape(-1).copy()
    for frames in window.frames:
        rows = _in_order(frames.pos, progress.is_done & frames.has)  # so the last frame stays
        streams[frames.stream[rows]] = frames.after[rows]
    streams["is_boundary"] = progress.is_boundary
    return streams


def _in_order(pos: Ints, chosen: Bools) -> Ints:
    """The chosen rows, ordered by position."""
    rows = np.flatnonzero(chosen)
    return rows[np.argsort(pos[rows], kind="stable")]


def _carried_counts(window: AssembledWindow, progress: Progress) -> dict[str, Ints]:
    """By stream: counts of the bytes from the position on where it resumes."""
    sides, count, start = window.sides, 2 * len(window), progress.carried
    piece_count = sides["piece_stop"] - sides["piece_start"]
    index, first = gather_ranges(sides["piece_start"], piece_count)
    pieces, stream = window.streams.pieces[index], np.repeat(np.arange(count), piece_count)
    end_before = np.append(0, pieces["end"])[:-1]
    end_before[first[piece_count > 0]] = 0
    is_gap = pieces["pos"] > np.maximum(end_before, start[stream])
    byte_count, framed, last = np.zeros((3, count), np.int64)
    size = np.maximum(pieces["end"] - np.maximum(pieces["pos"], start[stream]), 0)
    np.add.at(byte_count, stream, size)
    np.maximum.at(last, stream, pieces["end"])
    gap_count = np.bincount(stream[is_gap], minlength=count)
    gap_count += sides["end"] > np.maximum(last, start)
    extents = window.assembly.extents
    is_here = extents["source"] >= 0
    before = np.append(0, np.cumsum(np.where(is_here, extents["length"], 0)))
    for way, frames in enumerate(window.frames):
        rows = np.flatnonzero(frames.has & ~progress.is_done)
        column = window.assembly.exchanges[SIDES[way]][rows]
        first = column["extent_start"]
        captured = before[first + column["extent_count"]] - before[first] + 4
        np.add.at(framed, frames.stream[rows], captured)
    unframed = byte_count - framed
    for number, opened in progress.settled.opened:
        text, pos = opened.table, int(progress.pos[number])
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


def carried_segments(window: AssembledWindow, progress: Progress) -> Rows:
    """SEGMENT rows to carry, cut where the carried bytes begin, by connection.

    `endpoints` is the row of their connection.
    """
    segments, connection = window.streams.segments, window.streams.connection.astype(np.int64)
    mark, stream = window.streams.mark, window.segment_stream
    flags, length = segments["flags"], segments["length"].astype(np.int64)
    goes_on = (window.is_last & ~progress.is_gone)[connection] & (mark != DUPLICATE)
    is_looking = (progress.protocol == Protocol.NONE)[connection]
    is_whole = goes_on & is_looking
    is_whole &= (length > 0) | ((flags & (SYN | FIN | RST)) != 0)
    resumes = goes_on & ~is_looking & (segments["packet"] > 0)  # no SYN of ours
    is_known = window.seq_of_start[stream] != NO_NUMBER
    wanted = (window.seq_of_start + progress.carried) & 0xFFFFFFFF
    number = segments["seq"].astype(np.int64) + ((flags & SYN) != 0)
    ahead = ((number - wanted[stream] + 0x80000000) & 0xFFFFFFFF) - 0x80000000
    has_bytes = resumes & (mark == 0) & is_known & (length > 0) & (ahead + length > 0)
    is_end = resumes & ((flags & (FIN | RST)) != 0)  # as a segment without bytes
    # and the last acknowledgement of bytes that are missing
    lacks = progress.settled.has_gap | (window.sides["end"] > window.ends)
    acks = np.flatnonzero(resumes & ((flags & ACK) != 0) & lacks[stream ^ 1])
    last_ack = np.full(2 * len(window), -1)
    np.maximum.at(last_ack, stream[acks], acks)
    is_end[last_ack[last_ack >= 0]] = True
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
    kept["marks"] |= COUNTED_BEFORE
    kept["pos"] += np.minimum(cut, captured)
    return kept


def payload(segments: Rows, sources: Sources) -> Bytes:
    """The captured bytes of SEGMENT rows, one after the other; valid until the next call. Their
    `pos` becomes the position there."""
    captured = segments["captured"].astype(np.int64)
    extents = np.zeros(len(segments), EXTENT)
    extents["pos"], extents["length"] = segments["pos"], captured
    extents["source"] = segments["source"]
    segments["pos"] = np.cumsum(captured) - captured
    return sources.gather(extents)


def next_connections(
    window: AssembledWindow, progress: Progress, sources: Sources
) -> dict[int, OpenConnection]:
    """By pair of endpoints, its last connection with the segments that it carries."""
    rows, segments = next_rows(window, progress), carried_segments(window, progress)
    data = payload(segments, sources).tobytes()
    bounds = np.searchsorted(segments["endpoints"], np.arange(len(window) + 1))
    first_byte = np.append(0, np.cumsum(segments["captured"], dtype=np.int64))[bounds]
    segments["pos"] -= first_byte[segments["endpoints"]]
    rtt, points = window.streams.facts.rtt, progress.points
    rtt_bounds = np.searchsorted(rtt["stream"], 2 * np.arange(len(window) + 1))
    found = {}
    for row in np.flatnonzero(window.is_last & ~progress.is_gone).tolist():
        counts = rtt[rtt_bounds[row] : rtt_bounds[row + 1]].copy()
        counts["stream"] -= 2 * row
        tls = None
        if row in window.tls.sessions and 2 * row in points and 2 * row + 1 in points:
            tls = TlsState(window.tls.sessions[row], (points[2 * row], points[2 * row + 1]))
        found[int(window.endpoints[row])] = OpenConnection(
            rows[row : row + 1].copy(),
            segments[bounds[row] : bounds[row + 1]].copy(),
            data[first_byte[row] : first_byte[row + 1]],
            counts,
            tls,
        )
    return found
