"""Pieces of a stream to frames by their size prefixes, over gaps and from starts in the middle.

Theory of operation
-------------------
A walk stands on a boundary that is certain, or it searches for one (`frame_search.py`). On a
certain boundary the size prefix tells the next one: a gap inside of a frame ends nothing. Only a
gap over a size prefix, and a size that cannot be (negative, beyond the limit, text of another
protocol), make the walk search. So a lost packet costs the frames it overlaps.

Requests come first, without looking at responses. Responses are framed with the requests at hand:
an id that was asked is the evidence that a search needs.

A frame whose header is there becomes a row even when bytes of it are missing, in the middle or at
the end of the stream; the header of a request ends behind its correlation id here. Bytes that are
in no frame are noted as unframed with the reason, so that bytes = framed + unframed.

SASL: behind a SaslHandshake of version 0 the client sends bare tokens, framed by size only, until a
request header is recognised again; a first frame that is no request is such a token too (GSSAPI of
0.9 clients). The broker answers tokens with tokens, in order. Tokens come before all other traffic:
while a stream had nothing but versions, handshakes and tokens it is *young*, and in a young stream
a search finds tokens too (`sasl_detection`).

Tables are flat int64 arrays that grow by doubling; their columns are named below.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdissect.jit import fetch_ahead, inlined, load_u32, making_kernel
from kdissect.kafka.acks import acks_of, quick_acks
from kdissect.kafka.assembly import Protocol
from kdissect.kafka.frame_search import (  # fmt: skip
    ABSENT,
    API_VERSION,
    CLIENT_HASH,
    CLIENT_LENGTH,
    CLIENTS_MAX,
    CORRELATION,
    FAIR,
    FALL_MAX,
    GOOD,
    HEADER_WIDTH,
    KEY,
    POOR,
    RESPONSE_SIZE_MIN,
    RISE_MAX,
    SASL_HANDSHAKE,
    SIZE,
    STEP_MAX,
    WINDOW,
    Stream,
    find_asked,
    find_request,
    find_response,
    is_api_versions,
    is_reserved,
    quick_request,
    request_header,
    response_header,
    step,
    token_asked,
)
from kdissect.kafka.frame_tables import (
    AFTER_GAP,
    BAD_SIZE,
    EXPECTS,
    EXTENT_WIDTH,
    EXTENTS,
    FAULT_WIDTH,
    FRAME_WIDTH,
    FRAMES,
    HEADER_CUT,
    NO_BOUNDARY,
    SILENT,
    TOKEN,
    extents_max,
    put_frame,
    put_gaps,
    put_unframed,
    put_whole_frame,
)
from kdissect.kafka.sasl_detection import is_broker_token, is_mechanisms
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.tcp.byte_ranges import find, grown, int64
from kdissect.tcp.columns import END, PIECE_START, PIECE_STOP, SIDE_WIDTH

TOKEN_SIZE_MAX = 1 << 20  # a SASL token larger than this is no token
ASKS_VERSIONS = 18  # ApiVersions, which may come before a handshake

# Where a walk over the streams goes on, int64[STATE_WIDTH], all 0 at first: the connection, whether
# the walk stands inside of it (then the fields behind count), and what it knows there.
# CLIENTS: CLIENTS_MAX hashes. WALK_FIRST: the first request that is not answered or passed over.
(
    WALK_CONNECTION, WALK_INSIDE, WALK_POS, WALK_COVERED, WALK_CERTAIN, WALK_REASON, WALK_BAD_SIZE,
    WALK_IN_TOKENS, WALK_IS_FIRST, WALK_IS_YOUNG, WALK_LAST_ID, WALK_FIRST, WALK_CLIENT_COUNT,
    WALK_CLIENTS,
) = range(14)  # fmt: skip
STATE_WIDTH = WALK_CLIENTS + CLIENTS_MAX
AHEAD = 8  # pieces: the first bytes of that one are on their way from memory meanwhile

# Bits of a stream's `has_origin`. ORIGIN: position 0 is a boundary. RESUMED: frames came before it,
# which the caller has had (`resume/carry.py`); the last of them began bare SASL tokens (IN_TOKENS),
# or was a request that a response may be told by (HAS_ASKED). Above them, from LAST_ID on: one more
# than the correlation id of the last frame, 0 where that is not known.
# YOUNG: a stream that had nothing but versions, handshakes and tokens.
ORIGIN, RESUMED, IN_TOKENS, HAS_ASKED, YOUNG = 1, 2, 4, 8, 16
LAST_ID = 8


@inlined
def stream_of(pieces: Any, sides: Any, number: int) -> Any:
    at = number * SIDE_WIDTH
    start = sides[at + PIECE_START]
    stop = sides[at + PIECE_STOP]
    end = int64(0)
    if stop > start:
        end = pieces.pos[stop - 1] + pieces.length[stop - 1]
    return Stream(pieces, start, stop, end)


@inlined
def _remember(clients: Any, count: int, client: int) -> int:
    for number in range(count):
        if clients[number] == client:
            return count
    if count < CLIENTS_MAX:
        clients[count] = client
        return count + 1
    return count


@inlined
def _ends_well(stream: Any, index: int, pos: int, kafka: Any, following: Any) -> bool:
    """Whether a frame that ends at `pos` is followed by a request, or by nothing."""
    if pos >= stream.end:
        return pos == stream.end
    behind = find(stream.pieces, index, stream.stop, pos)
    return request_header(stream.pieces, behind, stream.stop, pos, kafka, following) == GOOD


@making_kernel
def some_requests(
    pieces: Any, source: Any, sides: Any, client_side: Any, protocol: Any, has_origin: Any,
    kafka: Any, state: Any, most: int,
) -> Any:  # fmt: skip
    """Frames of the request streams of all Kafka connections: (frames, extents, faults, used).

    client_side uint8, protocol uint8 of each connection; has_origin int64 of each stream: 0, or
    bits that begin with ORIGIN if it began with a SYN, so that position 0 is a boundary. A call
    finds at most `most` frames and goes on where `state` says the last call stopped; the walk is
    over when the connection in `state` is the one after the last.
    """
    frames = np.empty(1024 * FRAME_WIDTH, np.int64)
    extents = np.empty(1024 * EXTENT_WIDTH, np.int64)
    faults = np.empty(64 * FAULT_WIDTH, np.int64)
    used = np.zeros(3, np.int64)
    header = np.empty(HEADER_WIDTH, np.int64)
    following = np.empty(HEADER_WIDTH, np.int64)
    clients = np.zeros(CLIENTS_MAX, np.int64)
    limit = kafka.limit[0]
    for connection in range(state[WALK_CONNECTION], len(protocol)):
        if protocol[connection] != int64(Protocol.KAFKA):
            continue
        number = 2 * connection + int64(client_side[connection])
        stream = stream_of(pieces, sides, number)
        stop = stream.stop
        index = stream.start
        pos = int64(0)
        covered = int64(0)  # end of the last frame
        certain = has_origin[number] != 0
        reason = AFTER_GAP if certain else NO_BOUNDARY
        bad_size = int64(-1)
        in_tokens = has_origin[number] & IN_TOKENS != 0
        is_first = has_origin[number] & RESUMED == 0
        is_young = is_first or has_origin[number] & YOUNG != 0
        last_id = (int64(has_origin[number]) >> LAST_ID) - 1
        client_count = int64(0)
        if state[WALK_INSIDE]:
            state[WALK_INSIDE] = 0
            pos = state[WALK_POS]
            index = find(pieces, stream.start, stop, pos)
            covered = state[WALK_COVERED]
            certain = state[WALK_CERTAIN] != 0
            reason = state[WALK_REASON]
            bad_size = state[WALK_BAD_SIZE]
            in_tokens = state[WALK_IN_TOKENS] != 0
            is_first = state[WALK_IS_FIRST] != 0
            is_young = state[WALK_IS_YOUNG] != 0
            last_id = state[WALK_LAST_ID]
            client_count = state[WALK_CLIENT_COUNT]
            clients[:] = state[WALK_CLIENTS:]
        while True:
            if used[FRAMES] >= most:
                state[WALK_CONNECTION] = connection
                state[WALK_INSIDE] = 1
                state[WALK_POS] = pos
                state[WALK_COVERED] = covered
                state[WALK_CERTAIN] = certain
                state[WALK_REASON] = reason
                state[WALK_BAD_SIZE] = bad_size
                state[WALK_IN_TOKENS] = in_tokens
                state[WALK_IS_FIRST] = is_first
                state[WALK_IS_YOUNG] = is_young
                state[WALK_LAST_ID] = last_id
                state[WALK_CLIENT_COUNT] = client_count
                state[WALK_CLIENTS:] = clients
                return frames, extents, faults, used
            while index < stop and pieces.pos[index] + pieces.length[index] <= pos:
                index += 1
            if index >= stop:
                break
            if not certain:
                pos = find_request(
                    stream, index, pos, kafka, last_id, clients, client_count, is_young, header,
                    following,
                )  # fmt: skip
                if pos < 0:
                    break
                while pieces.pos[index] + pieces.length[index] <= pos:
                    index += 1
                in_tokens = is_young
                certain = True
            if index + AHEAD < stop:
                fetch_ahead(pieces.address[index + AHEAD])
            available = pieces.pos[index] + pieces.length[index] - pos
            address = pieces.address[index] + np.uint64(max(0, pos - pieces.pos[index]))
            quick = pos >= pieces.pos[index]
            if quick and quick_request(address, available, limit, kafka.known, header):
                grade = GOOD
            else:
                grade = request_header(pieces, index, stop, pos, kafka, header)
            size = header[SIZE]
            if size < 0:
                # A gap over the prefix, or the stream ends in it.
                certain = False
                reason = HEADER_CUT
                pos = max(pos, pieces.pos[index])
                if pieces.pos[index] <= pos:  # bytes of a broken prefix: search behind it too
                    reason = AFTER_GAP
                continue
            kind = EXPECTS
            accept = grade >= FAIR
            if is_first and grade < FAIR and has_origin[number] and size <= TOKEN_SIZE_MAX:
                in_tokens = grade != ABSENT
            if in_tokens and grade != GOOD and size <= TOKEN_SIZE_MAX:
                accept = True
                kind = TOKEN
                header[KEY] = -1
                header[API_VERSION] = -1
                header[CORRELATION] = -1
            elif grade == ABSENT:
                accept = header[CORRELATION] >= 0 and header[KEY] >= 0 and header[API_VERSION] >= 0
                if not accept:
                    # The boundary behind it is known all the same.
                    reason = HEADER_CUT
                    bad_size = size
                    if pos + 4 + size > stream.end:
                        break
                    pos += 4 + size
                    continue
            elif grade == POOR:
                accept = _ends_well(stream, index, pos + 4 + size, kafka, following)
            if not accept:
                certain = False
                reason = BAD_SIZE
                bad_size = size
                pos += 1
                continue
            is_first = False
            if kind == EXPECTS:
                in_tokens = header[KEY] == SASL_HANDSHAKE and header[API_VERSION] == 0
                is_young &= header[KEY] == SASL_HANDSHAKE or header[KEY] == ASKS_VERSIONS
                if not is_reserved(header[CORRELATION]):
                    last_id = header[CORRELATION]
                if grade == GOOD:
                    client_count = _remember(clients, client_count, header[CLIENT_HASH])
                    if header[KEY] == 0:
                        acks = int64(-1)
                        if quick:
                            acks = quick_acks(
                                address, min(available, 4 + size), header[API_VERSION],
                                header[CLIENT_LENGTH],
                            )  # fmt: skip
                        if acks < 0:
                            acks = acks_of(pieces, index, stop, pos, header)
                        if acks == 0:
                            kind = SILENT
            if pos > covered:
                extents, faults = put_unframed(
                    pieces, source, find(pieces, stream.start, stop, covered), stop, covered, pos,
                    REQUEST, connection, reason, bad_size, extents, faults, used,
                )  # fmt: skip
            frames = grown(frames, used[FRAMES] * FRAME_WIDTH, FRAME_WIDTH)
            if quick and 0 < size <= available - 4:
                extents = grown(extents, used[EXTENTS] * EXTENT_WIDTH, EXTENT_WIDTH)
                put_whole_frame(
                    pieces, source, index, connection, pos, header, kind, frames, extents, used
                )
            else:
                room = extents_max(pieces, index, stop, pos + 4 + size) * EXTENT_WIDTH
                extents = grown(extents, used[EXTENTS] * EXTENT_WIDTH, room)
                put_frame(
                    pieces, source, index, stop, connection, pos, header, kind, frames, extents,
                    used,
                )  # fmt: skip
            pos += 4 + size
            covered = pos
            reason = AFTER_GAP
            bad_size = int64(-1)
        if covered < stream.end:
            extents, faults = put_unframed(
                pieces, source, find(pieces, stream.start, stop, covered), stop, covered,
                stream.end, REQUEST, connection, reason, bad_size, extents, faults, used,
            )  # fmt: skip
        faults = put_gaps(
            pieces, stream.start, stop, sides[number * SIDE_WIDTH + END], REQUEST, connection,
            faults, used,
        )  # fmt: skip
    state[WALK_CONNECTION] = len(protocol)
    return frames, extents, faults, used


@inlined
def _is_near(asked: Any, first: int, last: int, correlation: int, last_id: int) -> bool:
    """Whether an id that was not asked is one that could have been, beside those that were."""
    if last_id >= 0 and (
        0 < step(correlation, last_id) <= STEP_MAX or 0 < step(last_id, correlation) <= FALL_MAX
    ):
        return True
    for row in range(first, min(last, first + WINDOW)):
        if asked.kind[row] != TOKEN:
            return abs(asked.correlation[row] - correlation) <= STEP_MAX
    return False


@making_kernel
def some_responses(
    pieces: Any, source: Any, times: Any, sides: Any, client_side: Any, protocol: Any,
    has_origin: Any, kafka: Any, asked: Any, asked_start: Any, state: Any, most: int,
) -> Any:  # fmt: skip
    """Frames of the response streams, otherwise as `some_requests`.

    times int64: of the segments. asked: `frame_search.Asked`, the requests of all connections;
    those of a connection are asked_start[connection] and following.
    """
    frames = np.empty(1024 * FRAME_WIDTH, np.int64)
    extents = np.empty(1024 * EXTENT_WIDTH, np.int64)
    faults = np.empty(64 * FAULT_WIDTH, np.int64)
    used = np.zeros(3, np.int64)
    header = np.empty(HEADER_WIDTH, np.int64)
    following = np.empty(HEADER_WIDTH, np.int64)
    limit = kafka.limit[0]
    for connection in range(state[WALK_CONNECTION], len(protocol)):
        if protocol[connection] != int64(Protocol.KAFKA):
            continue
        number = 2 * connection + 1 - int64(client_side[connection])
        stream = stream_of(pieces, sides, number)
        stop = stream.stop
        index = stream.start
        pos = int64(0)
        covered = int64(0)
        certain = has_origin[number] != 0
        reason = AFTER_GAP if certain else NO_BOUNDARY
        bad_size = int64(-1)
        in_tokens = has_origin[number] & IN_TOKENS != 0
        is_young = has_origin[number] & RESUMED == 0 or has_origin[number] & YOUNG != 0
        last_id = (int64(has_origin[number]) >> LAST_ID) - 1
        first = asked_start[connection]  # the first request that is not answered or passed over
        last = asked_start[connection + 1]
        has_asked = first < last or has_origin[number] & HAS_ASKED != 0
        rise_max = int64(STEP_MAX if has_asked else RISE_MAX)
        if state[WALK_INSIDE]:
            state[WALK_INSIDE] = 0
            pos = state[WALK_POS]
            index = find(pieces, stream.start, stop, pos)
            covered = state[WALK_COVERED]
            certain = state[WALK_CERTAIN] != 0
            reason = state[WALK_REASON]
            bad_size = state[WALK_BAD_SIZE]
            in_tokens = state[WALK_IN_TOKENS] != 0
            is_young = state[WALK_IS_YOUNG] != 0
            last_id = state[WALK_LAST_ID]
            first = state[WALK_FIRST]
        while True:
            if used[FRAMES] >= most:
                state[WALK_CONNECTION] = connection
                state[WALK_INSIDE] = 1
                state[WALK_POS] = pos
                state[WALK_COVERED] = covered
                state[WALK_CERTAIN] = certain
                state[WALK_REASON] = reason
                state[WALK_BAD_SIZE] = bad_size
                state[WALK_IN_TOKENS] = in_tokens
                state[WALK_IS_YOUNG] = is_young
                state[WALK_LAST_ID] = last_id
                state[WALK_FIRST] = first
                return frames, extents, faults, used
            while index < stop and pieces.pos[index] + pieces.length[index] <= pos:
                index += 1
            if index >= stop:
                break
            if not certain:
                pos = find_response(
                    stream, index, pos, limit, asked, first, last, last_id, rise_max, is_young,
                    times, header, following,
                )  # fmt: skip
                if pos < 0:
                    break
                while pieces.pos[index] + pieces.length[index] <= pos:
                    index += 1
                in_tokens = is_young
                certain = True
            while first < last and asked.kind[first] == SILENT:
                first += 1
            if index + AHEAD < stop:
                fetch_ahead(pieces.address[index + AHEAD])
            available = pieces.pos[index] + pieces.length[index] - pos
            quick = pos >= pieces.pos[index]
            plausible = False
            expected = False
            if quick and available >= 8 and first < last:
                # The usual case: the oldest request is answered.
                address = pieces.address[index] + np.uint64(pos - pieces.pos[index])
                header[SIZE] = load_u32(address)
                header[CORRELATION] = load_u32(address + np.uint64(4))
                expected = (
                    header[CORRELATION] == asked.correlation[first]
                    and asked.kind[first] == EXPECTS
                    and RESPONSE_SIZE_MIN <= header[SIZE] <= limit
                )
            if not expected:
                plausible = response_header(pieces, index, stop, pos, limit, header)
            size = header[SIZE]
            if size < 0:
                certain = False
                reason = HEADER_CUT
                pos = max(pos, pieces.pos[index])
                if pieces.pos[index] <= pos:
                    reason = AFTER_GAP
                continue
            kind = EXPECTS
            row = first if expected else int64(-1)
            if not expected and header[CORRELATION] >= 0:
                time = times[pieces.segment[index]] + (1 << 40)  # certain: clocks may differ
                row = find_asked(asked, first, last, header[CORRELATION], time)
            tells_mechanisms = False
            tells = False
            if is_young and not expected and plausible and header[CORRELATION] >= 0:
                tells_mechanisms = is_mechanisms(stream, index, pos, size)
                tells = tells_mechanisms or is_api_versions(stream, index, pos, size)
            is_token = False
            if row < 0 and not tells and size <= TOKEN_SIZE_MAX:
                asked_token = first < last and asked.kind[first] == TOKEN
                if is_young and size > 0 and is_broker_token(stream, index, pos, size):
                    is_token = True
                elif is_young and size == 0:
                    is_token = in_tokens or asked_token
                elif asked_token:
                    is_token = not plausible or not _is_near(
                        asked, first, last, header[CORRELATION], last_id
                    )
            if is_token:
                kind = TOKEN
                header[CORRELATION] = -1
                row = token_asked(asked, first, last, times[pieces.segment[index]] + (1 << 40))
                accept = True
            elif size < RESPONSE_SIZE_MIN or size > limit:
                accept = False
            elif header[CORRELATION] < 0:
                # The header is cut: a row needs its id, the boundary behind it is known.
                reason = HEADER_CUT
                bad_size = size
                if pos + 4 + size > stream.end:
                    break
                pos += 4 + size
                continue
            elif row >= 0 or tells_mechanisms:
                accept = True
            else:
                accept = plausible
                at = pos + 4 + size
                if at < stream.end:
                    behind = find(pieces, index, stop, at)
                    accept = response_header(pieces, behind, stop, at, limit, following)
            if not accept:
                certain = False
                reason = BAD_SIZE
                bad_size = size
                pos += 1
                continue
            if kind == EXPECTS:
                if not is_reserved(header[CORRELATION]):
                    last_id = header[CORRELATION]
                if is_young:
                    in_tokens = tells_mechanisms or (
                        expected and is_mechanisms(stream, index, pos, size)
                    )
                    is_young = (
                        tells
                        or in_tokens
                        or (expected and is_api_versions(stream, index, pos, size))
                    )
            if row >= 0:
                first = row + 1
            if pos > covered:
                extents, faults = put_unframed(
                    pieces, source, find(pieces, stream.start, stop, covered), stop, covered, pos,
                    RESPONSE, connection, reason, bad_size, extents, faults, used,
                )  # fmt: skip
            header[KEY] = -1
            header[API_VERSION] = -1
            frames = grown(frames, used[FRAMES] * FRAME_WIDTH, FRAME_WIDTH)
            if quick and 0 < size <= available - 4:
                extents = grown(extents, used[EXTENTS] * EXTENT_WIDTH, EXTENT_WIDTH)
                put_whole_frame(
                    pieces, source, index, connection, pos, header, kind, frames, extents, used
                )
            else:
                room = extents_max(pieces, index, stop, pos + 4 + size) * EXTENT_WIDTH
                extents = grown(extents, used[EXTENTS] * EXTENT_WIDTH, room)
                put_frame(
                    pieces, source, index, stop, connection, pos, header, kind, frames, extents,
                    used,
                )  # fmt: skip
            pos += 4 + size
            covered = pos
            reason = AFTER_GAP
            bad_size = int64(-1)
        if covered < stream.end:
            extents, faults = put_unframed(
                pieces, source, find(pieces, stream.start, stop, covered), stop, covered,
                stream.end, RESPONSE, connection, reason, bad_size, extents, faults, used,
            )  # fmt: skip
        faults = put_gaps(
            pieces, stream.start, stop, sides[number * SIDE_WIDTH + END], RESPONSE, connection,
            faults, used,
        )  # fmt: skip
    state[WALK_CONNECTION] = len(protocol)
    return frames, extents, faults, used
