"""Splits the byte ranges of a stream into frames by their size prefixes, across gaps.

Theory of operation
-------------------
A walk is either on a certain boundary, or searches for one (`frame_search.py`). On a certain
boundary, the size prefix gives the position of the next one, so a gap inside a frame does no harm.
The walk searches where a capture begins in the middle, and after a gap over a size prefix. It also
searches after a size or header that no frame has: negative, beyond the limit, or other text.

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

A walk stops where its tables are full, and continues from there at the next call.
"""

from __future__ import annotations

from kdissect.arrays import Indices, Rows, Struct
from kdissect.jit import inlined, int64, kernel, part
from kdissect.kafka import frame_search as search
from kdissect.kafka import frame_tables, sasl_detection
from kdissect.kafka.acks import acks_of
from kdissect.kafka.assembly import Protocol
from kdissect.kafka.frame_tables import EXPECTS, SILENT, TOKEN, Tables
from kdissect.kafka.response_bodies import BodyDecoder, are_other_bytes
from kdissect.kafka.walk import CLIENTS_MAX, NO_REQUEST, KafkaStreams, Stream, stream_of
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST
from kdissect.tcp.byte_ranges import find

TOKEN_SIZE_MAX = 1 << 20  # bytes; a larger frame is no SASL token
# A stream refuses at most so many responses that searches found: REFUSED_MIN, and one more for each
# SEGMENTS_PER_REFUSAL segments.
REFUSED_MIN = 4
SEGMENTS_PER_REFUSAL = 8
_API_VERSIONS, _PRODUCE = int(ApiKey.API_VERSIONS), int(ApiKey.PRODUCE)

# What is at the position of a walk, if it is no frame with a header and no token: no size prefix
# was captured, a frame without captured header, no frame.
_SIZE_MISSING, _HEADER_MISSING, _NO_FRAME = -1, -2, -3


# ---- steps of both walks ----


@inlined
def _enter(
    walk: Struct, connection: int, streams: KafkaStreams, number: int, pending_start: Indices
) -> None:
    """Begin with a stream; `number` is its own."""
    origin = streams.origin[number]
    walk["connection"] = connection
    walk["is_inside"] = 1
    walk["pos"] = 0
    walk["covered"] = 0
    # RFC 9293, 3.4: the SYN's sequence number is known, so the first byte of the stream is too.
    walk["begins"] = origin["is_boundary"]
    walk["is_certain"] = origin["is_boundary"]
    walk["reason"] = frame_tables.SIZE_MISSING if origin["is_boundary"] else frame_tables.MID_STREAM
    walk["size_read"] = -1
    walk["in_tokens"] = origin["in_tokens"]
    walk["is_first"] = 1 - origin["was_framed"]
    walk["is_young"] = origin["is_young"]
    walk["last_id"] = origin["last_id"]
    walk["client_count"] = 0
    walk["refused_count"] = 0
    if walk["direction"] != REQUEST:
        walk["next_request"] = pending_start[connection]
        walk["stop_request"] = pending_start[connection + 1]
        # the stream of the requests is the other one of the connection
        has_requests = walk["next_request"] < walk["stop_request"]
        if has_requests or streams.origin[number ^ 1]["was_framed"]:
            walk["rise_max"] = search.STEP_MAX
        else:
            walk["rise_max"] = search.RISE_MAX


@inlined
def _lock(walk: Struct, pos: int) -> None:
    """Continue at the boundary `pos` that the search found; tokens may be there."""
    walk["pos"] = pos
    walk["is_certain"] = 1
    walk["in_tokens"] = walk["is_young"]


@inlined
def _go_on(walk: Struct, kind: int, captured_from: int) -> None:
    """Go on from a position without a frame. captured_from: position of the next captured byte."""
    if kind == _HEADER_MISSING:
        # the boundary after the frame is certain
        walk["reason"] = frame_tables.HEADER_MISSING
        walk["size_read"] = walk["header"]["size"]
        walk["pos"] += 4 + walk["header"]["size"]
        return
    walk["is_certain"] = 0
    if kind == _SIZE_MISSING:
        walk["reason"] = frame_tables.SIZE_MISSING
        walk["pos"] = max(walk["pos"], captured_from)
    else:
        walk["reason"] = frame_tables.NO_FRAME
        walk["size_read"] = walk["header"]["size"]
        walk["pos"] += 1


@part
def _piece_at(stream: Stream, index: int, pos: int) -> int:
    """The first piece from `index` on that ends after `pos`: nearly always `index` or the next
    one."""
    while index < stream.stop and stream.pieces[index]["end"] <= pos:
        index += 1
    return index


@kernel
def walk_on(
    streams: KafkaStreams,
    walk: Struct,
    pending: Rows,
    pending_start: Indices,
    tables: Tables,
    decoder: BodyDecoder,
) -> None:
    """Find the next frames of a direction, in the streams of Kafka connections.

    walk: WALK. pending: for responses FRAME[n], the requests of all connections; those of a
    connection begin at pending_start[connection]. tables: empty ones. It returns in two cases:

    - they are full; `extents_needed` of the walk is what the next frame needs
    - it is at the end; `connection` of the walk is past the last one
    """
    header = walk["header"]
    is_request = walk["direction"] == REQUEST
    walk["extents_needed"] = 0
    for connection in range(walk["connection"], len(streams.protocol)):
        if streams.protocol[connection] != int64(Protocol.KAFKA):
            continue
        number = 2 * connection + (int64(streams.client_side[connection]) ^ walk["direction"])
        stream = stream_of(streams, number)
        if not walk["is_inside"]:
            _enter(walk, connection, streams, number, pending_start)
        index = find(stream.pieces, stream.start, stream.stop, walk["pos"])
        while True:
            if not frame_tables.has_room(tables, 0):
                return
            pos = walk["pos"]
            index = _piece_at(stream, index, pos)
            if index >= stream.stop:
                break
            if not walk["is_certain"]:
                if is_request:
                    pos = search.find_request(stream, index, pos, walk)
                else:
                    pos = search.find_response(stream, index, pos, walk, pending)
                if pos < 0:
                    break
                index = _piece_at(stream, index, pos)
                if not is_request and _is_refused(stream, index, pos, walk, pending, decoder):
                    walk["refused_count"] += 1
                    walk["pos"] = pos + 1
                    continue
                _lock(walk, pos)
            request = int64(NO_REQUEST)
            if is_request:
                kind = _request_kind(stream, index, walk)
            else:
                kind, request = _response_kind(stream, index, walk, pending)
            if kind < 0:
                _go_on(walk, kind, stream.pieces[index]["pos"])
                continue
            extent_count = frame_tables.extents_max(stream, index, pos + 4 + header["size"])
            if not frame_tables.has_room(tables, extent_count):
                walk["extents_needed"] = extent_count
                return
            if is_request:
                kind = _learn_request(stream, index, kind, walk)
            else:
                _learn_response(stream, index, kind, request, walk)
            if pos > walk["covered"]:
                frame_tables.put_unframed(stream, pos, walk, tables)
            frame_tables.put_frame(stream, index, kind, walk, tables)
        if walk["covered"] < stream.end:
            frame_tables.put_unframed(stream, stream.end, walk, tables)
        walk["is_inside"] = 0
    walk["connection"] = len(streams.protocol)


# ---- requests ----


@inlined
def _remember(walk: Struct, client: int) -> None:
    """Add a client id's hash to the known ones, up to CLIENTS_MAX."""
    count = walk["client_count"]
    for number in range(count):
        if walk["clients"][number] == client:
            return
    if count < CLIENTS_MAX:
        walk["clients"][count] = client
        walk["client_count"] = count + 1


@inlined
def _ends_well(stream: Stream, index: int, pos: int, walk: Struct) -> bool:
    """Return whether a request, or the end of the stream, follows a frame that ends at `pos`.

    A request of an unknown version without client id has little of its own. Two of them with
    consecutive ids are enough.
    """
    if pos >= stream.end:
        return pos == stream.end
    header, following = walk["header"], walk["following"]
    after = find(stream.pieces, index, stream.stop, pos)
    if search.request_header(stream, after, pos, walk, following) == search.GOOD:
        return True
    is_nameless = header["client_hash"] == 0 and following["client_hash"] == 0
    return is_nameless and search.step(following["correlation"], header["correlation"]) == 1


@kernel
def _request_kind(stream: Stream, index: int, walk: Struct) -> int:
    """Classify the bytes at the position of the walk, and read and grade the header there.

    Returns EXPECTS, TOKEN, _SIZE_MISSING, _HEADER_MISSING or _NO_FRAME.
    """
    header = walk["header"]
    grade = search.request_header(stream, index, walk["pos"], walk, header)
    walk["grade"] = grade
    if grade == search.GOOD:
        return EXPECTS
    size = header["size"]
    if size < 0:
        return _SIZE_MISSING
    # GSSAPI before KIP-43 (clients of 0.9): no handshake, the connection begins with a bare token.
    has_version = search.is_known(walk, header)
    is_bare = walk["is_first"] and walk["begins"] and grade < search.FAIR and not has_version
    # KIP-43: tokens after a SaslHandshake of version 0 have a size prefix and no request header.
    # (KIP-152: after version 1 they come in SaslAuthenticate requests.)
    is_token = walk["in_tokens"] or (is_bare and grade != search.ABSENT)
    if is_token and size <= TOKEN_SIZE_MAX:
        header["key"] = -1
        header["api_version"] = -1
        header["correlation"] = -1
        return TOKEN
    if grade == search.ABSENT:
        # A row needs api key, version and correlation id; the client id may be missing.
        if header["correlation"] >= 0 and header["key"] >= 0 and header["api_version"] >= 0:
            return EXPECTS
        return _HEADER_MISSING
    # On a certain boundary a printable client id or a known API is enough. Without them, a request
    # must follow the frame.
    if grade == search.FAIR:
        return EXPECTS
    if grade == search.POOR:
        is_request = has_version or _ends_well(stream, index, walk["pos"] + 4 + size, walk)
        return EXPECTS if is_request else _NO_FRAME
    return _NO_FRAME


@kernel
def _learn_request(stream: Stream, index: int, kind: int, walk: Struct) -> int:
    """Record facts of this request that help with later ones; returns its kind, now with SILENT."""
    walk["is_first"] = 0
    if kind == TOKEN:
        walk["in_tokens"] = 1
        return kind
    header = walk["header"]
    key = header["key"]
    walk["in_tokens"] = key == search.SASL_HANDSHAKE and header["api_version"] == 0
    # ApiVersions (KIP-35) may come before a handshake.
    walk["is_young"] &= key in (search.SASL_HANDSHAKE, _API_VERSIONS)
    if not search.is_reserved(header["correlation"]):
        walk["last_id"] = header["correlation"]
    if walk["grade"] != search.GOOD:
        return kind
    _remember(walk, header["client_hash"])
    # Kafka protocol: a Produce with acks=0 gets no response
    if key == _PRODUCE and acks_of(stream, index, walk["pos"], header) == 0:
        return SILENT
    return kind


# ---- responses ----


@inlined
def _is_near(pending: Rows, first: int, last: int, correlation: int, last_id: int) -> bool:
    """Return whether an id without a captured request is plausible, given the ids around it."""
    if last_id >= 0 and (
        0 < search.step(correlation, last_id) <= search.STEP_MAX
        or 0 < search.step(last_id, correlation) <= search.FALL_MAX
    ):
        return True
    for row in range(first, min(last, first + search.WINDOW)):
        if pending[row]["kind"] != TOKEN:
            return abs(pending[row]["correlation"] - correlation) <= search.STEP_MAX
    return False


@inlined
def _is_token(stream: Stream, index: int, is_plausible: bool, walk: Struct, pending: Rows) -> bool:
    """Return whether the frame of the walk, whose id matches no request, is a SASL token without
    header (KIP-43)."""
    header = walk["header"]
    size = header["size"]
    first, last = walk["next_request"], walk["stop_request"]
    token_expected = first < last and pending[first]["kind"] == TOKEN
    if walk["is_young"] and size > 0:
        if sasl_detection.is_broker_token(stream, index, walk["pos"], size):
            return True
    if walk["is_young"] and size == 0:
        return walk["in_tokens"] != 0 or token_expected
    if token_expected:
        return not is_plausible or not _is_near(
            pending, first, last, header["correlation"], walk["last_id"]
        )
    return False


@kernel
def _is_refused(
    stream: Stream, index: int, pos: int, walk: Struct, pending: Rows, decoder: BodyDecoder
) -> bool:
    """Return whether the bytes at `pos` do not decode as a response to the request with their
    correlation id.

    After some refusals in a stream, it keeps what it finds. So the time stays linear in the bytes.
    """
    refused_max = REFUSED_MIN + (stream.stop - stream.start) // SEGMENTS_PER_REFUSAL
    if walk["refused_count"] >= refused_max:
        return False
    header = walk["header"]
    search.response_header(stream, index, pos, walk, header)
    request = search.find_pending(
        pending,
        walk["next_request"],
        walk["stop_request"],
        header["correlation"],
        stream.times[stream.pieces[index]["segment"]] + search.CLOCK_SLACK_NS,
    )
    if request == NO_REQUEST:
        return False
    return are_other_bytes(stream, index, pos, header["size"], pending[request], decoder)


@kernel
def _response_kind(stream: Stream, index: int, walk: Struct, pending: Rows) -> tuple[int, int]:
    """Classify the bytes at the position of the walk, and read the header there.

    Returns (EXPECTS, TOKEN, _SIZE_MISSING, _HEADER_MISSING or _NO_FRAME; row of its request or
    NO_REQUEST).
    """
    pos, last, header = walk["pos"], walk["stop_request"], walk["header"]
    first = search.expecting(pending, walk["next_request"], last)
    walk["next_request"] = first
    # Response header: size int32, correlation id int32 (then tagged fields, KIP-482).
    is_plausible = search.response_header(stream, index, pos, walk, header)
    size = header["size"]
    correlation = header["correlation"]
    if size < 0:
        return int64(_SIZE_MISSING), int64(NO_REQUEST)
    # The common case: a broker answers the requests of a connection in order.
    if first < last and pending[first]["kind"] == EXPECTS:
        if correlation == pending[first]["correlation"]:
            return int64(EXPECTS), first
    sent_before = stream.times[stream.pieces[index]["segment"]] + search.CERTAIN_SLACK_NS
    request = int64(NO_REQUEST)
    listed = int64(search.NO_LIST)
    if correlation >= 0:
        request = search.find_pending(pending, first, last, correlation, sent_before)
        if walk["is_young"] and is_plausible:
            listed = search.names_listed(stream, index, pos, size)
    if request < 0 and listed == search.NO_LIST and size <= TOKEN_SIZE_MAX:
        if _is_token(stream, index, is_plausible, walk, pending):
            header["correlation"] = -1
            # KIP-43: the broker answers tokens with tokens, in order.
            return int64(TOKEN), int64(search.pending_token(pending, first, last, sent_before))
    if size < search.RESPONSE_SIZE_MIN or size > walk["size_max"]:
        return int64(_NO_FRAME), request
    if correlation < 0:
        return int64(_HEADER_MISSING), request
    is_response = True
    if request < 0 and listed != search.MECHANISMS:
        # Its request was not captured. A response header must follow it. At the end of the stream
        # it must look like a response itself.
        is_response = is_plausible
        at = pos + 4 + size
        if at < stream.end:
            after = find(stream.pieces, index, stream.stop, at)
            is_response = search.response_header(stream, after, at, walk, walk["following"])
    return int64(EXPECTS) if is_response else int64(_NO_FRAME), request


@kernel
def _learn_response(stream: Stream, index: int, kind: int, request: int, walk: Struct) -> None:
    """Record facts of this response that help with later ones. request: row of its request."""
    header = walk["header"]
    if kind == EXPECTS:
        if not search.is_reserved(header["correlation"]):
            walk["last_id"] = header["correlation"]
        if walk["is_young"]:
            listed = search.names_listed(stream, index, walk["pos"], header["size"])
            # KIP-43: tokens may follow a list of mechanisms.
            walk["in_tokens"] = listed == search.MECHANISMS
            walk["is_young"] = listed != search.NO_LIST
    if request >= 0:
        walk["next_request"] = request + 1
    header["key"] = -1
    header["api_version"] = -1
