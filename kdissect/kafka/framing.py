"""Splits the byte ranges of a stream into frames by their size prefixes, across gaps.

Theory of operation
-------------------
A walk is either on a certain boundary, or searches for one (`frame_search.py`). On a certain
boundary, the size prefix gives the position of the next one, so a gap inside a frame does no harm.
The walk searches only after a gap over a size prefix, or after an impossible size (negative, beyond
the limit, text of another protocol). So a lost packet costs only the frames that it overlaps.

Requests are framed first, without responses. Responses are framed with the requests at hand: the
correlation id of a pending request is the evidence that a search needs. A whole response to such a
request, up to 1 MiB, has to decode as well (`response_bodies.py`).

A frame whose header was captured becomes a row, even if bytes in its middle or at its end are
missing. For this purpose a request header ends after the correlation id. Bytes in no frame are
recorded as unframed with the reason, so that bytes = framed + unframed.

SASL (KIP-43): after SaslHandshake v0 the client sends tokens with a size prefix only, until a
request header is recognised again. If the first frame is no request, it is such a token too (GSSAPI
of 0.9 clients). The broker answers tokens with tokens, in order. Tokens come before all other
traffic. A stream is *young* while it had only ApiVersions, SaslHandshake and tokens; in a young
stream a search also finds tokens (`sasl_detection`).

The walks write tables that grow by doubling (`frame_tables.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kdissect.jit import inlined, kernel, making_kernel, making_part, part
from kdissect.kafka.acks import acks_of
from kdissect.kafka.assembly import Protocol
from kdissect.kafka.frame_search import (  # fmt: skip
    ABSENT,
    CERTAIN_SLACK_NS,
    CLIENTS_MAX,
    CLOCK_SLACK_NS,
    FAIR,
    FALL_MAX,
    GOOD,
    HEADER,
    POOR,
    RESPONSE_SIZE_MIN,
    RISE_MAX,
    SASL_HANDSHAKE,
    STEP_MAX,
    WINDOW,
    Stream,
    find_pending,
    find_request,
    find_response,
    is_api_versions,
    is_reserved,
    pending_token,
    request_header,
    response_header,
    step,
)
from kdissect.kafka.frame_tables import (
    AFTER_GAP,
    BAD_SIZE,
    EXPECTS,
    EXTENTS,
    FRAMES,
    HEADER_CUT,
    NO_BOUNDARY,
    SILENT,
    TOKEN,
    Tables,
    empty_tables,
    extents_max,
    put_frame,
    put_gaps,
    put_unframed,
)
from kdissect.kafka.sasl_detection import is_broker_token, is_mechanisms
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.tcp.byte_ranges import Pieces, find, grown, int64

TOKEN_SIZE_MAX = 1 << 20  # bytes; a larger frame is no SASL token
_API_VERSIONS, _PRODUCE = int(ApiKey.API_VERSIONS), int(ApiKey.PRODUCE)

# Position of a walk, WalkState.walk[0]. `connection` is the current one;
# `is_inside` says whether the other fields describe a position in it.
WALK = np.dtype([
    ("connection", "i8"),
    ("is_inside", "i8"),
    ("pos", "i8"),  # of the next size prefix, or where the search starts
    ("covered", "i8"),  # end of the last frame
    ("is_certain", "i8"),  # whether `pos` is a boundary
    ("reason", "i8"),  # why bytes from `covered` on are unframed
    ("bad_size", "i8"),  # size prefix that `reason` is about, -1 if none
    ("in_tokens", "i8"),  # whether SASL tokens without headers are expected
    ("is_first", "i8"),  # of requests: whether no frame came before
    ("is_young", "i8"),  # whether only versions, handshakes and tokens came before
    ("last_id", "i8"),  # correlation id of the last frame, -1 if none
    ("client_count", "i8"),  # of requests: number of entries in WalkState.clients
    ("next_request", "i8"),  # of responses: first request neither answered nor passed over
    ("found", "i8"),  # of responses: last position that the search found, -1 if none
    ("request", "i8"),  # of responses: the request that a response at `found` answers, NO_REQUEST
    ("refused_count", "i8"),  # of responses: positions that the search found, and that were none
])  # fmt: skip

NO_REQUEST = -1

# Further results for a position on a boundary, beside EXPECTS (of a response: it has a header) and
# TOKEN.
_HEADER_MISSING, _NO_FRAME = -1, -2

# What is known of a stream at its position 0. A stream that continues has this from earlier windows
# (`resume.carry`).
STREAM = np.dtype([
    ("is_boundary", "u1"),  # whether a frame begins at position 0
    ("was_framed", "u1"),  # whether frames came before it
    ("in_tokens", "u1"),  # whether SASL tokens follow the last of these
    ("is_young", "u1"),  # whether all of these are versions, handshakes and tokens
    ("last_id", "<i8"),  # correlation id of the last of these, -1 if none
])  # fmt: skip


def new_streams(is_boundary: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """STREAM[n] of streams before their first frame. is_boundary: bool[n]."""
    streams = np.zeros(len(is_boundary), STREAM)
    streams["is_boundary"] = is_boundary
    streams["is_young"] = 1
    streams["last_id"] = -1
    return streams


class KafkaStreams(NamedTuple):
    """The streams of all connections, Kafka or not; connection c has streams 2c and 2c + 1.

    times: int64, source: per segment. sides: SIDE. origin: STREAM per stream.
    client_side, protocol: uint8 per connection.
    """

    pieces: Pieces
    source: npt.NDArray[Any]
    times: npt.NDArray[np.int64]
    sides: npt.NDArray[np.void]
    client_side: npt.NDArray[np.uint8]
    protocol: npt.NDArray[np.uint8]
    origin: npt.NDArray[np.void]


class WalkState(NamedTuple):
    """The point at which a walk continues. walk: WALK[1]. clients: int64[CLIENTS_MAX], hashes of
    client ids. headers: HEADER[2], scratch for the header of a frame and of the next ones."""

    walk: npt.NDArray[Any]
    clients: npt.NDArray[np.int64]
    headers: npt.NDArray[Any]

    @property
    def connection(self) -> int:
        """The connection that the walk has reached."""
        return int(self.walk["connection"][0])


def walk_state() -> WalkState:
    """The state before the first step of a walk."""
    walk = np.zeros(1, WALK)
    walk["request"] = NO_REQUEST
    return WalkState(walk, np.zeros(CLIENTS_MAX, np.int64), np.zeros(2, HEADER))


@inlined
def bounds_of(pieces: Any, sides: Any, number: int) -> Any:
    """Return `Stream.start`, `stop` and `end` of the stream with this number."""
    start, stop = sides[number]["piece_start"], sides[number]["piece_stop"]
    end = int64(0)
    if stop > start:
        end = pieces[stop - 1]["end"]
    return start, stop, end


# ---- steps of both walks ----


@inlined
def _enter(walk: Any, connection: int, origin: Any, first_request: int) -> None:
    """Start a connection's stream, or continue inside it; `origin` is the stream's STREAM."""
    walk["connection"] = connection
    if walk["is_inside"]:
        walk["is_inside"] = 0
        return
    walk["pos"] = 0
    walk["covered"] = 0
    # RFC 9293, 3.4: the SYN's sequence number is known, so the first byte of the stream is too.
    walk["is_certain"] = origin["is_boundary"]
    walk["reason"] = AFTER_GAP if origin["is_boundary"] else NO_BOUNDARY
    walk["bad_size"] = -1
    walk["in_tokens"] = origin["in_tokens"]
    walk["is_first"] = 1 - origin["was_framed"]
    walk["is_young"] = origin["is_young"]
    walk["last_id"] = origin["last_id"]
    walk["client_count"] = 0
    walk["next_request"] = first_request
    walk["found"] = -1
    walk["refused_count"] = 0


@inlined
def _lose_boundary(walk: Any, piece_pos: int) -> None:
    """Search from the first captured byte on: the size prefix at `pos` is in a gap or cut off."""
    walk["is_certain"] = 0
    walk["reason"] = AFTER_GAP
    walk["pos"] = max(walk["pos"], piece_pos)


@inlined
def _pass_over(walk: Any, size: int) -> None:
    """Skip a frame without a captured header; the boundary after it is certain."""
    walk["reason"] = HEADER_CUT
    walk["bad_size"] = size
    walk["pos"] += 4 + size


@inlined
def _refuse(walk: Any, size: int) -> None:
    """Search from the next byte on: the size prefix at `pos` is impossible."""
    walk["is_certain"] = 0
    walk["reason"] = BAD_SIZE
    walk["bad_size"] = size
    walk["pos"] += 1


@inlined
def _lock(walk: Any, pos: int) -> None:
    """Continue at the boundary `pos` that the search found; tokens may be there."""
    walk["pos"] = pos
    walk["is_certain"] = 1
    walk["in_tokens"] = walk["is_young"]


@part
def _piece_at(pieces: Any, index: int, stop: int, pos: int) -> int:
    """The first piece from `index` on that ends after `pos`: nearly always `index` or the next
    one."""
    while index < stop and pieces[index]["end"] <= pos:
        index += 1
    return index


@making_part
def _append_frame(
    stream: Any, source: Any, times: Any, index: int, header: Any, kind: int, walk: Any, tables: Any
) -> Any:
    """Append a row for the frame at `pos` and step over it; returns the tables."""
    end = walk["pos"] + 4 + header["size"]
    rows = extents_max(stream.pieces, index, stream.stop, end)
    frames = grown(tables.frames, tables.used[FRAMES], 1)
    extents = grown(tables.extents, tables.used[EXTENTS], rows)
    tables = Tables(frames, extents, tables.faults, tables.used)
    put_frame(stream, source, times, index, header, kind, walk, tables)
    walk["pos"] = end
    walk["covered"] = end
    walk["reason"] = AFTER_GAP
    walk["bad_size"] = -1
    return tables


@making_kernel
def _end_stream(stream: Any, source: Any, size: int, direction: int, walk: Any, tables: Any) -> Any:
    """Record unframed bytes at the end of a stream of `size` bytes, and its gaps; the tables."""
    if walk["covered"] < stream.end:
        tables = put_unframed(stream, source, stream.end, direction, walk, tables)
    faults = put_gaps(stream, size, direction, walk["connection"], tables.faults, tables.used)
    return Tables(tables.frames, tables.extents, faults, tables.used)


# ---- requests ----


@inlined
def _remember(clients: Any, count: int, client: int) -> int:
    """Add a client id's hash to the known ones, up to CLIENTS_MAX; returns their number."""
    for number in range(count):
        if clients[number] == client:
            return count
    if count < CLIENTS_MAX:
        clients[count] = client
        return count + 1
    return count


@inlined
def _ends_well(stream: Any, index: int, pos: int, kafka: Any, following: Any) -> bool:
    """Return whether a request, or the end of the stream, follows a frame that ends at `pos`."""
    if pos >= stream.end:
        return pos == stream.end
    after = find(stream.pieces, index, stream.stop, pos)
    return request_header(stream.pieces, after, stream.stop, pos, kafka, following) == GOOD


@kernel
def _doubtful_request(
    stream: Any, index: int, grade: int, begins: int, kafka: Any, walk: Any, header: Any,
    following: Any,
) -> int:  # fmt: skip
    """Classify the bytes at the boundary `pos` if the header there is not GOOD.

    begins: whether a frame begins at position 0. Returns EXPECTS, TOKEN, _HEADER_MISSING or
    _NO_FRAME.
    """
    size = header["size"]
    # GSSAPI before KIP-43 (clients of 0.9): no handshake, the connection begins with a bare token.
    if walk["is_first"] and grade < FAIR and begins and size <= TOKEN_SIZE_MAX:
        walk["in_tokens"] = grade != ABSENT
    # KIP-43: tokens after a SaslHandshake of version 0 have a size prefix and no request header.
    # (KIP-152: after version 1 they come in SaslAuthenticate requests.)
    if walk["in_tokens"] and size <= TOKEN_SIZE_MAX:
        header["key"] = -1
        header["api_version"] = -1
        header["correlation"] = -1
        return TOKEN
    if grade == ABSENT:
        # A row needs api key, version and correlation id; the client id may be missing.
        if header["correlation"] >= 0 and header["key"] >= 0 and header["api_version"] >= 0:
            return EXPECTS
        return _HEADER_MISSING
    # On a certain boundary a printable client id is enough, even if the API is unknown. Without it,
    # a request must follow the frame.
    if grade == FAIR:
        return EXPECTS
    if grade == POOR:
        at = walk["pos"] + 4 + size
        return EXPECTS if _ends_well(stream, index, at, kafka, following) else _NO_FRAME
    return _NO_FRAME


@kernel
def _learn_request(walk: Any, clients: Any, header: Any, grade: int) -> None:
    """Record facts of this request that help with later ones."""
    key = header["key"]
    walk["in_tokens"] = key == SASL_HANDSHAKE and header["api_version"] == 0
    # ApiVersions (KIP-35) may come before a handshake.
    walk["is_young"] &= key in (SASL_HANDSHAKE, _API_VERSIONS)
    if not is_reserved(header["correlation"]):
        walk["last_id"] = header["correlation"]
    if grade == GOOD:
        walk["client_count"] = _remember(clients, walk["client_count"], header["client_hash"])


@making_kernel
def some_requests(streams: Any, kafka: Any, state: Any, most: int) -> Any:
    """Frames of the request streams of Kafka connections: `Tables`.

    streams: `KafkaStreams`. kafka: `Kafka`. state: `WalkState`. A call returns about `most` frames;
    the next call continues from `state`. The walk is over if state.connection is past the last
    connection.
    """
    tables = empty_tables()
    header = state.headers[0]
    following = state.headers[1]
    pieces = streams.pieces
    source = streams.source
    times = streams.times
    sides = streams.sides
    clients = state.clients
    walk = state.walk[0]
    for connection in range(walk["connection"], len(streams.protocol)):
        if streams.protocol[connection] != int64(Protocol.KAFKA):
            continue
        number = 2 * connection + int64(streams.client_side[connection])
        origin = streams.origin[number]
        start, stop, end = bounds_of(pieces, sides, number)
        stream = Stream(pieces, start, stop, end)
        _enter(walk, connection, origin, 0)
        index = find(pieces, start, stop, walk["pos"])
        while True:
            if tables.used[FRAMES] >= most:
                walk["is_inside"] = 1
                return tables
            pos = walk["pos"]
            index = _piece_at(pieces, index, stop, pos)
            if index >= stop:
                break
            if not walk["is_certain"]:
                pos = find_request(
                    stream, index, pos, kafka, walk["last_id"], clients, walk["client_count"],
                    walk["is_young"] != 0, header, following,
                )  # fmt: skip
                if pos < 0:
                    break
                index = _piece_at(pieces, index, stop, pos)
                _lock(walk, pos)
            grade = request_header(pieces, index, stop, pos, kafka, header)
            size = header["size"]
            if size < 0:
                _lose_boundary(walk, pieces[index]["pos"])
                continue
            kind = int64(EXPECTS)
            if grade != GOOD:
                kind = _doubtful_request(
                    stream,
                    index,
                    grade,
                    int64(origin["is_boundary"]),
                    kafka,
                    walk,
                    header,
                    following,
                )
            if kind == _HEADER_MISSING:
                _pass_over(walk, size)
                continue
            if kind == _NO_FRAME:
                _refuse(walk, size)
                continue
            walk["is_first"] = 0
            if kind == EXPECTS:
                _learn_request(walk, clients, header, grade)
                if grade == GOOD and header["key"] == _PRODUCE:
                    # Kafka protocol: a Produce with acks=0 gets no response
                    if acks_of(pieces, index, stop, pos, header) == 0:
                        kind = SILENT
            if pos > walk["covered"]:
                tables = put_unframed(stream, source, pos, REQUEST, walk, tables)
            tables = _append_frame(stream, source, times, index, header, kind, walk, tables)
        size = sides[number]["end"]
        tables = _end_stream(stream, source, size, REQUEST, walk, tables)
    walk["connection"] = len(streams.protocol)
    return tables


# ---- responses ----


@inlined
def _is_near(pending: Any, first: int, last: int, correlation: int, last_id: int) -> bool:
    """Return whether an id without a captured request is plausible, given the ids around it."""
    if last_id >= 0 and (
        0 < step(correlation, last_id) <= STEP_MAX or 0 < step(last_id, correlation) <= FALL_MAX
    ):
        return True
    for row in range(first, min(last, first + WINDOW)):
        if pending[row]["kind"] != TOKEN:
            return abs(pending[row]["correlation"] - correlation) <= STEP_MAX
    return False


@inlined
def _is_token(
    stream: Any, index: int, pending: Any, last: int, is_plausible: bool, walk: Any, header: Any
) -> bool:
    """Return whether the frame at `pos`, whose id matches no request, is a SASL token without
    header (KIP-43)."""
    size = header["size"]
    first = walk["next_request"]
    token_expected = first < last and pending[first]["kind"] == TOKEN
    if walk["is_young"] and size > 0 and is_broker_token(stream, index, walk["pos"], size):
        return True
    if walk["is_young"] and size == 0:
        return walk["in_tokens"] != 0 or token_expected
    if token_expected:
        return not is_plausible or not _is_near(
            pending, first, last, header["correlation"], walk["last_id"]
        )
    return False


@kernel
def _doubtful_response(
    stream: Any, index: int, is_plausible: bool, limit: int, pending: Any, last: int,
    sent_before: int, walk: Any, header: Any, following: Any,
) -> Any:  # fmt: skip
    """Classify the bytes at the boundary `pos` if they do not answer the next request.

    Returns (EXPECTS, TOKEN, _HEADER_MISSING or _NO_FRAME; row of its request or -1; whether it is a
    list of SASL mechanisms; whether it is such a list or a list of versions).
    """
    pieces = stream.pieces
    pos = walk["pos"]
    size = header["size"]
    correlation = header["correlation"]
    first = walk["next_request"]
    request = int64(-1)
    if correlation >= 0:
        request = find_pending(pending, first, last, correlation, sent_before)
    lists_mechanisms = False
    begins = False
    if walk["is_young"] and is_plausible and correlation >= 0:
        lists_mechanisms = is_mechanisms(stream, index, pos, size)
        begins = lists_mechanisms or is_api_versions(stream, index, pos, size)
    if request < 0 and not begins and size <= TOKEN_SIZE_MAX:
        if _is_token(stream, index, pending, last, is_plausible, walk, header):
            header["correlation"] = -1
            # KIP-43: the broker answers tokens with tokens, in order.
            request = pending_token(pending, first, last, sent_before)
            return int64(TOKEN), int64(request), lists_mechanisms, begins
    if size < RESPONSE_SIZE_MIN or size > limit:
        return int64(_NO_FRAME), request, lists_mechanisms, begins
    if correlation < 0:
        return int64(_HEADER_MISSING), request, lists_mechanisms, begins
    is_response = True
    if request < 0 and not lists_mechanisms:
        # Its request was not captured: another response, or the end, must follow.
        is_response = is_plausible
        at = pos + 4 + size
        if at < stream.end:
            after = find(pieces, index, stream.stop, at)
            is_response = response_header(pieces, after, stream.stop, at, limit, following)
    kind = int64(EXPECTS) if is_response else int64(_NO_FRAME)
    return kind, request, lists_mechanisms, begins


@making_kernel
def some_responses(
    streams: Any, kafka: Any, pending: Any, pending_start: Any, state: Any, most: int
) -> Any:
    """Frames of the response streams; otherwise like `some_requests`.

    pending: FRAME rows of the requests of all connections; those of a connection begin at
    pending_start[connection]. The walk also returns to its caller where a search found a response
    to a request (WALK.request), for a test of its body.
    """
    tables = empty_tables()
    header = state.headers[0]
    following = state.headers[1]
    limit = kafka.limit[0]
    pieces = streams.pieces
    source = streams.source
    sides = streams.sides
    times = streams.times
    walk = state.walk[0]
    for connection in range(walk["connection"], len(streams.protocol)):
        if streams.protocol[connection] != int64(Protocol.KAFKA):
            continue
        number = 2 * connection + 1 - int64(streams.client_side[connection])
        origin = streams.origin[number]
        start, stop, end = bounds_of(pieces, sides, number)
        stream = Stream(pieces, start, stop, end)
        last = pending_start[connection + 1]
        asked_before = streams.origin[2 * connection + int64(streams.client_side[connection])]
        has_requests = pending_start[connection] < last or asked_before["was_framed"] != 0
        rise_max = int64(STEP_MAX if has_requests else RISE_MAX)
        _enter(walk, connection, origin, pending_start[connection])
        index = find(pieces, start, stop, walk["pos"])
        while True:
            if tables.used[FRAMES] >= most:
                walk["is_inside"] = 1
                return tables
            pos = walk["pos"]
            index = _piece_at(pieces, index, stop, pos)
            if index >= stop:
                break
            first = walk["next_request"]
            if not walk["is_certain"]:
                pos = find_response(
                    stream, index, pos, limit, pending, first, last, walk["last_id"], rise_max,
                    walk["is_young"] != 0, times, header, following,
                )  # fmt: skip
                if pos < 0:
                    break
                index = _piece_at(pieces, index, stop, pos)
                if walk["found"] != pos:
                    # The caller decodes the response there, and continues the walk.
                    walk["found"] = pos
                    response_header(pieces, index, stop, pos, limit, header)
                    sent_before = times[pieces[index]["segment"]] + CLOCK_SLACK_NS
                    walk["request"] = find_pending(
                        pending, first, last, header["correlation"], sent_before
                    )
                    if walk["request"] >= 0:
                        walk["pos"] = pos
                        walk["is_inside"] = 1
                        return tables
                _lock(walk, pos)
            while first < last and pending[first]["kind"] == SILENT:
                first += 1
            walk["next_request"] = first
            # Response header: size int32, correlation id int32 (then tagged fields, KIP-482).
            is_plausible = response_header(pieces, index, stop, pos, limit, header)
            # The common case: a broker answers the requests of a connection in order.
            is_next = (
                first < last
                and header["correlation"] == pending[first]["correlation"]
                and pending[first]["kind"] == EXPECTS
            )
            size = header["size"]
            if size < 0:
                _lose_boundary(walk, pieces[index]["pos"])
                continue
            kind = int64(EXPECTS)
            request = first
            lists_mechanisms = False
            begins = False
            if not is_next:
                sent_before = times[pieces[index]["segment"]] + CERTAIN_SLACK_NS
                kind, request, lists_mechanisms, begins = _doubtful_response(
                    stream, index, is_plausible, limit, pending, last, sent_before, walk, header,
                    following,
                )  # fmt: skip
            if kind == _HEADER_MISSING:
                _pass_over(walk, size)
                continue
            if kind == _NO_FRAME:
                _refuse(walk, size)
                continue
            if kind == EXPECTS:
                if not is_reserved(header["correlation"]):
                    walk["last_id"] = header["correlation"]
                if walk["is_young"]:
                    # KIP-43: tokens may follow a list of mechanisms.
                    if is_next:
                        lists_mechanisms = is_mechanisms(stream, index, pos, size)
                        begins = lists_mechanisms or is_api_versions(stream, index, pos, size)
                    walk["in_tokens"] = lists_mechanisms
                    walk["is_young"] = begins
            if request >= 0:
                walk["next_request"] = request + 1
            if pos > walk["covered"]:
                tables = put_unframed(stream, source, pos, RESPONSE, walk, tables)
            header["key"] = -1
            header["api_version"] = -1
            tables = _append_frame(stream, source, times, index, header, kind, walk, tables)
        size = sides[number]["end"]
        tables = _end_stream(stream, source, size, RESPONSE, walk, tables)
    walk["connection"] = len(streams.protocol)
    return tables
