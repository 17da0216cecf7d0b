"""Finds frame boundaries: grades the headers of requests and responses, and scores positions.

A boundary is *certain* if the previous frame ends there, or if the stream begins there with a SYN.
Elsewhere (after a gap over a size prefix, at a start in the middle, after an impossible size) a
frame must be found by evidence. `framing` decides when to search, and refuses a response whose
bytes do not decode. Resynchronising late loses a few messages; resynchronising wrongly loses
everything after it, because a wrong size skips over it. So a position scores points for its own
frame and for the next two (four, if a request has no client id). A frame that cannot be one rejects
it, here or next; a doubtful id costs points, or rejects it if nothing else speaks for it.

*Requests* have a size, a known api key and version, and a correlation id a little above the last
one. Their client id is null or printable, and often occurred before on the connection.

*Responses* have a size and a correlation id only. Inside other responses, record batches (batch
length, leader epoch), arrays of small integers and legacy message sets resemble them. So a
correlation id scores if its request was sent before this packet, has no response yet, and is the
next one or near it. Ids of uncaptured requests score if they rise by small steps (STEP_MAX) from
the last response, or lie as near to the first pending request. The byte after the id helps: it is
the high byte of a throttle time, error code or array length, or a tag count. So it is 0 (or 255 for
error -1), where a record batch has its magic. Two responses identify themselves: the list of
versions and the list of SASL mechanisms that connections begin with. Java clients number SASL
requests separately (RESERVED), and may send a request after others with higher ids (FALL_MAX).

The kernels take the walk that searches (`walk.WALK`) and read a header into a row of `HEADER`.
Those for responses take the requests of all connections (pending: FRAME).
"""

from __future__ import annotations

import numpy as np

from kdissect.arrays import Rows, Struct
from kdissect.jit import inlined, int64, kernel, load_u8, load_u16, load_u32
from kdissect.kafka import sasl_detection
from kdissect.kafka.frame_tables import EXPECTS, SILENT, TOKEN
from kdissect.kafka.walk import API_KEYS, API_VERSIONS, Stream
from kdissect.tcp.byte_ranges import find, peek, peek_u8

# Grades of a request header. ABSENT: one of its bytes is missing. _NEVER: the size is impossible.
# POOR: a possible size only. FAIR: also a printable client id. GOOD: a known API, and a client id
# that is printable, empty or null.
ABSENT, _NEVER, POOR, FAIR, GOOD = range(5)

REQUEST_SIZE_MIN = 8  # api key, api version, correlation id
RESPONSE_SIZE_MIN = 4  # correlation id
CLIENT_BYTES_READ = 64  # bytes of a client id that are tested for text and hashed

CONTROLLED_SHUTDOWN = 7  # its version 0 has request header v0, without client id
SASL_HANDSHAKE = 17

LOCK_POINTS = 4  # a position with this score starts a chain of frames
UNMATCHED_POINTS = 1  # deducted for a response whose request was not captured
STEP_MAX = 64  # largest rise between ids of uncaptured requests
RISE_MAX = 1 << 16  # the same after a gap, if no request of the connection was captured
REQUEST_STEP_MAX = 1000
FALL_MAX = 4  # ids may be this much below the last one
RESERVED, RESERVED_COUNT = 0x7FFFFFF8, 8  # ids that Java clients use for SASL
TELLING_POINTS = 4  # for a self-identifying response at the start of a segment
HANDSHAKE_POINTS = 5  # for a SaslHandshake request that ends with a mechanism's name
_TOKENS_AHEAD_MAX = 4  # requests that are looked through for a token
NAMELESS_POINTS = 2  # deducted for a request without client id, because zeros resemble it
FOLLOWING, FOLLOWING_NAMELESS = 2, 4  # so many frames after a position must agree
ENTRIES_MIN = 3  # a broker has at least so many APIs
ENTRIES_READ = 8  # of an ApiVersions response
FEATURES_MAX = 16  # tagged fields in it
SMALL_ID = 256  # messages are full of numbers below this
WINDOW = 64  # pending requests examined around the expected one
CLOCK_SLACK_NS = 5_000_000  # clock difference between two taps, or with `-i any`
CERTAIN_SLACK_NS = 1 << 40  # the same where the boundary is certain

# Lists that connections begin with.
NO_LIST, VERSIONS, MECHANISMS = 0, 1, 2


@inlined
def step(number: int, last: int) -> int:
    """Return the distance from the last correlation id, 0 to 2^32 - 1; ids wrap around."""
    return (number - last) & 0xFFFFFFFF


@inlined
def is_reserved(number: int) -> bool:
    return RESERVED <= number < RESERVED + RESERVED_COUNT


@inlined
def is_text(byte: int) -> bool:
    # a client id that was read from a file may end with a line end
    return (byte >= 32 and byte != 127) or 9 <= byte <= 13


@inlined
def is_known(walk: Struct, header: Struct) -> bool:
    """Return whether an API has the version in the header."""
    key, api_version = header["key"], header["api_version"]
    is_inside = 0 <= key < API_KEYS and 0 <= api_version < API_VERSIONS
    return is_inside and walk["known"][key * API_VERSIONS + api_version] != 0


@inlined
def _clear(header: Struct) -> None:
    header["size"] = -1
    header["key"] = -1
    header["api_version"] = -1
    header["correlation"] = -1
    header["client_length"] = -1
    header["client_hash"] = -1


@kernel
def request_header(stream: Stream, index: int, pos: int, walk: Struct, header: Struct) -> int:
    """Read the request header at `pos` (its size prefix) into `header`; returns its grade.

    index: a piece at or before `pos`. At most CLIENT_BYTES_READ bytes of the client id are read.
    """
    pieces, stop = stream.pieces, stream.stop
    _clear(header)
    size = peek(pieces, index, stop, pos, 4)
    header["size"] = size
    # size int32, api_key int16, api_version int16, correlation_id int32, client_id int16 + text.
    # KIP-482: request header v2 keeps this client_id, only tagged fields follow it.
    if size < 0:
        return ABSENT
    if size < REQUEST_SIZE_MIN or size > walk["size_max"]:
        return _NEVER
    key = peek(pieces, index, stop, pos + 4, 2)
    api_version = peek(pieces, index, stop, pos + 6, 2)
    header["correlation"] = peek(pieces, index, stop, pos + 8, 4)
    header["key"] = key
    header["api_version"] = api_version
    if key < 0 or api_version < 0 or header["correlation"] < 0:
        return ABSENT
    has_version = is_known(walk, header)
    if key == CONTROLLED_SHUTDOWN and api_version == 0:
        header["client_hash"] = 0
        return GOOD if size == 12 and has_version else POOR  # a broker id is all that follows
    if size < 10:
        return POOR
    length = peek(pieces, index, stop, pos + 12, 2)
    if length < 0:
        return ABSENT
    # length -1: the client id is null; no other length is negative
    if length >= 0x8000:
        header["client_hash"] = 0
        return GOOD if has_version and length == 0xFFFF else POOR
    header["client_length"] = length
    if length > size - 10:
        return POOR
    # hash of the client id: polynomial of base 31
    mixed = length
    at = pos + 14
    for place in range(at, at + min(length, CLIENT_BYTES_READ)):
        while index < stop and pieces[index]["end"] <= place:
            index += 1
        byte = peek_u8(pieces, index, stop, place)
        if byte < 0:
            break
        if not is_text(byte):
            return POOR
        mixed = (mixed * 31 + byte) & 0xFFFFFFFFFFFF
    header["client_hash"] = mixed
    if has_version:
        return GOOD
    return FAIR if length else POOR


@kernel
def _is_handshake(stream: Stream, index: int, pos: int, header: Struct) -> bool:
    """Return whether the SaslHandshake request at `pos` ends exactly after the mechanism's name."""
    at = pos + 14 + max(header["client_length"], 0)
    end = pos + 4 + header["size"]
    return sasl_detection.end_of_mechanism(stream, index, at, end) == end


@kernel
def _request_points(stream: Stream, index: int, pos: int, walk: Struct) -> int:
    """Score of a request at `pos` (see the module), whose header the walk gets; -1 if something
    contradicts it."""
    pieces = stream.pieces
    header = walk["header"]
    following = walk["following"]
    last_id = walk["last_id"]
    client_count = walk["client_count"]
    if request_header(stream, index, pos, walk, header) != GOOD:
        return -1
    points = 0
    is_seen = False
    for number in range(client_count):
        if walk["clients"][number] == header["client_hash"]:
            is_seen = True
    frame_count = FOLLOWING
    # evidence of the frame itself: client id, correlation id, start of a segment
    if header["client_length"] > 0:
        points += 2 if is_seen else (1 if client_count == 0 else 0)
    # A missing client id scores nothing, even if it was seen: zeros inside a request have it too.
    elif not is_seen and header["key"] != CONTROLLED_SHUTDOWN:
        # Zeros inside a message resemble it, repeatedly if messages repeat.
        if client_count > 0 or pos != pieces[index]["pos"]:
            return -1
        points -= NAMELESS_POINTS
        frame_count = FOLLOWING_NAMELESS
    if last_id >= 0:
        risen = step(header["correlation"], last_id)
        if 0 < risen <= REQUEST_STEP_MAX:
            points += 2
        elif not is_seen:
            fallen = step(last_id, header["correlation"])
            if header["client_length"] <= 0 or not 0 < fallen <= FALL_MAX:
                return -1
    if pos == pieces[index]["pos"]:
        points += 1
    at = pos
    size = header["size"]
    correlation = header["correlation"]
    client = header["client_hash"]
    key = header["key"]
    api_version = key << 16 | header["api_version"]
    if key == SASL_HANDSHAKE and _is_handshake(stream, index, pos, header):
        points += HANDSHAKE_POINTS
    # evidence of the next frames: each must be a request, preferably of the same client with the
    # next id
    for _ in range(frame_count):
        if key == SASL_HANDSHAKE:
            break  # SASL tokens may follow
        at += 4 + size
        if at >= stream.end:
            if at == stream.end:
                points += 2
            break
        index = find(pieces, index, stream.stop, at)
        grade = request_header(stream, index, at, walk, following)
        if grade == ABSENT:
            if pieces[index]["pos"] > at and pieces[index - 1]["end"] == at:
                points += 2  # the next frame is in a gap, and this one ends with a segment
            break
        if grade != GOOD:
            return -1
        points += 2
        if following["client_hash"] == client:
            if not 0 < step(following["correlation"], correlation) <= REQUEST_STEP_MAX:
                if header["client_length"] <= 0:
                    return -1  # responses resemble requests without client id
                counted = (following["key"] << 16 | following["api_version"]) - api_version
                if (
                    not is_seen
                    and following["correlation"] == correlation
                    and 0 < counted <= STEP_MAX
                ):
                    # Produce responses: their ids resemble keys and versions, the number of topics
                    # an id, and the topic a client id.
                    return -1
                points -= 1
            elif header["client_length"] > 0:
                points += 1
        size = following["size"]
        correlation = following["correlation"]
        key = following["key"]
        api_version = key << 16 | following["api_version"]
    return points


@kernel
def find_request(stream: Stream, index: int, pos: int, walk: Struct) -> int:
    """First position at or after `pos` with LOCK_POINTS for a request; -1 if there is none.

    In a young stream it also stops at a segment with the size and shape of a SASL token. Time is
    linear in the bytes: size, key or version rejects nearly every position.
    """
    pieces = stream.pieces
    limit = walk["size_max"]
    known = walk["known"]
    for number in range(index, stream.stop):
        begin = max(pos, pieces[number]["pos"])
        whole = pieces[number]["end"]
        if walk["is_young"] and begin == pieces[number]["pos"]:
            size = peek(pieces, number, stream.stop, begin, 4)
            is_segment = begin + 4 + size == whole
            if is_segment and sasl_detection.is_client_token(stream, number, begin, size):
                return begin
        for at in range(begin, whole):
            if whole - at >= 8:
                address = pieces[number]["address"] + np.uint64(at - pieces[number]["pos"])
                size = load_u32(address)
                if size < REQUEST_SIZE_MIN or size > limit:
                    continue
                key = load_u16(address + np.uint64(4))
                api_version = load_u16(address + np.uint64(6))
                if key >= API_KEYS or api_version >= API_VERSIONS:
                    continue
                if not known[key * API_VERSIONS + api_version]:
                    continue
            if _request_points(stream, number, at, walk) >= LOCK_POINTS:
                return at
    return -1


# ---- responses ----


@kernel
def response_header(stream: Stream, index: int, pos: int, walk: Struct, header: Struct) -> bool:
    """Read size and correlation id at `pos`; whether a response can begin so (True if bytes miss).

    The byte after the id must be 0 or 255; see the module.
    """
    _clear(header)
    size = peek(stream.pieces, index, stream.stop, pos, 4)
    header["size"] = size
    if size < 0:
        return True
    if size < RESPONSE_SIZE_MIN or size > walk["size_max"]:
        return False
    header["correlation"] = peek(stream.pieces, index, stream.stop, pos + 4, 4)
    if size == RESPONSE_SIZE_MIN:
        return True
    byte = peek(stream.pieces, index, stream.stop, pos + 8, 1)
    return byte <= 0 or byte == 255


@kernel
def find_pending(pending: Rows, first: int, stop: int, correlation: int, sent_before: int) -> int:
    """The nearest pending request in [first, stop) with this id, sent by `sent_before`; -1 if
    none.

    It examines the next WINDOW requests, the one that the id suggests if ids rise by one, and the
    WINDOW requests before that one. So a search stays linear.
    """
    near = min(stop, first + WINDOW)
    for row in range(first, near):
        if pending[row]["time"] > sent_before:
            return -1
        if pending[row]["correlation"] == correlation and pending[row]["kind"] == EXPECTS:
            return row
    if near >= stop:
        return -1
    guess = near + step(correlation, pending[near]["correlation"])
    if guess - WINDOW >= stop:
        return -1
    for row in range(max(near, guess - WINDOW), min(stop, guess + 1)):
        if pending[row]["time"] > sent_before:
            return -1
        if pending[row]["correlation"] == correlation and pending[row]["kind"] == EXPECTS:
            return row
    return -1


@inlined
def _is_of_the_future(pending: Rows, first: int, last: int, correlation: int, now: int) -> bool:
    """Return whether one of the next WINDOW requests has a lower id and was sent only after
    `now`."""
    for row in range(first, min(last, first + WINDOW)):
        if pending[row]["time"] > now:
            return step(correlation, pending[row]["correlation"]) <= RISE_MAX
    return False


@inlined
def expecting(pending: Rows, first: int, stop: int) -> int:
    """The first request in [first, stop) that expects a response; `stop` if none."""
    while first < stop and pending[first]["kind"] == SILENT:
        first += 1
    return first


@inlined
def _are_ranges(stream: Stream, index: int, at: int, count: int, width: int) -> bool:
    """Return whether the first of `count` entries at `at` are (api key, lowest, highest
    version)."""
    pieces, stop = stream.pieces, stream.stop
    for _ in range(min(count, ENTRIES_READ)):
        key = peek(pieces, index, stop, at, 2)
        low = peek(pieces, index, stop, at + 2, 2)
        high = peek(pieces, index, stop, at + 4, 2)
        if not (0 <= key < API_KEYS and 0 <= low <= high < API_VERSIONS):
            return False
        if width == 7 and peek(pieces, index, stop, at + 6, 1) != 0:
            return False  # the entry has no tagged fields
        at += width
    return True


@kernel
def _is_api_versions(stream: Stream, index: int, pos: int, size: int) -> bool:
    """Return whether the frame at `pos` is an ApiVersions response: a list of entries of 6 or 7
    bytes.

    v0-2: error code, int32 count, (key, min, max)*, and from v1 on a throttle time. From v3 on the
    count is compact, and entries and body end with tagged fields. A broker has at least ENTRIES_MIN
    APIs, but a refusal (error 35, KIP-511) may list one.
    """
    pieces = stream.pieces
    stop = stream.stop
    error = peek(pieces, index, stop, pos + 8, 2)
    if error != 0 and error != 35:
        return False
    least = ENTRIES_MIN if error == 0 else 1
    count = peek(pieces, index, stop, pos + 10, 4)
    if least <= count < API_KEYS and size in (10 + 6 * count, 14 + 6 * count):
        return _are_ranges(stream, index, pos + 14, count, 6)
    count = peek(pieces, index, stop, pos + 10, 1) - 1
    if not least <= count < API_KEYS - 1 or size < 12 + 7 * count:
        return False
    if not _are_ranges(stream, index, pos + 11, count, 7):
        return False
    # KIP-482: the count of tagged fields, which have at least two bytes each
    tag_count = peek(pieces, index, stop, pos + 15 + 7 * count, 1)
    left = size - 12 - 7 * count
    if tag_count == 0:
        return left == 0
    return 0 < tag_count <= FEATURES_MAX and 2 * tag_count <= left


@kernel
def names_listed(stream: Stream, index: int, pos: int, size: int) -> int:
    """MECHANISMS or VERSIONS if the frame at `pos` is a response with such a list, else NO_LIST."""
    if sasl_detection.is_mechanisms(stream, index, pos, size):
        return MECHANISMS
    return VERSIONS if _is_api_versions(stream, index, pos, size) else NO_LIST


@kernel
def _response_points(stream: Stream, index: int, pos: int, walk: Struct, pending: Rows) -> int:
    """Score of a response at `pos`; -1 if something contradicts it.

    The walk has the requests without response so far, and the id of the last response.
    """
    pieces = stream.pieces
    header = walk["header"]
    following = walk["following"]
    first = walk["next_request"]
    last = walk["stop_request"]
    last_id = walk["last_id"]
    time = stream.times[pieces[index]["segment"]]
    if not response_header(stream, index, pos, walk, header):
        return -1
    correlation = header["correlation"]
    if correlation < 0:
        return -1
    size = header["size"]
    begins = pos == pieces[index]["pos"]
    listed = names_listed(stream, index, pos, size) if begins else int64(NO_LIST)
    # evidence of the frame itself: its correlation id
    row = find_pending(pending, first, last, correlation, time + CLOCK_SLACK_NS)
    if row >= 0:
        points = 3 if row == expecting(pending, first, last) else 2
    else:
        if not begins and (correlation < SMALL_ID or step(correlation, last_id) > STEP_MAX):
            # Any bytes that happen to end at a boundary would score for the true frames behind
            # them. So the id must say something itself.
            return -1
        points = -UNMATCHED_POINTS
        if is_reserved(correlation) and begins:
            points += 3
        elif listed == NO_LIST:
            # Clients ask for versions first, even if earlier requests of this id range are pending.
            now = time + CLOCK_SLACK_NS
            if _is_of_the_future(pending, first, last, correlation, now):
                return -1
            if last_id >= 0:
                risen = step(correlation, last_id)
                if (
                    not 0 < risen <= walk["rise_max"]
                    and not 0 < step(last_id, correlation) <= FALL_MAX
                ):
                    return -1
                points += 1 if 0 < risen <= STEP_MAX else 0
            elif first < last:
                # Its request may lie before the first captured one, or among them.
                away = pending[first]["correlation"] - correlation
                if pending[first]["kind"] == TOKEN or away == 0 or abs(away) > STEP_MAX:
                    return -1
                points += 1
    # evidence of position: the start of a segment
    if begins:
        points += 1 if listed == NO_LIST else TELLING_POINTS
    elif correlation < SMALL_ID:
        points -= 1
    at = pos
    # evidence of the next two frames
    for number in range(2):
        at += 4 + size
        # the segment is exactly this frame, and no later frame can confirm it
        fits = number == 0 and begins and at == pieces[index]["end"]
        if number == 0 and listed == MECHANISMS:
            points += 3 if fits else 0
            break  # SASL tokens may follow
        if at >= stream.end:
            if at == stream.end:
                points += 3 if fits else 1
            elif number == 0:
                points -= 1
            break
        behind = find(pieces, index, stream.stop, at)
        if pieces[behind]["pos"] > at:
            if pieces[behind - 1]["end"] == at:
                points += 3 if fits else 1  # the next frame is in a gap
            break
        index = behind
        if not response_header(stream, index, at, walk, following):
            return -1
        if at == pieces[index]["pos"]:
            points += 1
        if following["size"] < 0 or following["correlation"] < 0:
            break
        start = row + 1 if row >= 0 else first
        after = find_pending(
            pending, start, last, following["correlation"], time + CERTAIN_SLACK_NS
        )
        if after >= 0:
            points += 2
            row = after
        elif 0 < step(following["correlation"], correlation) <= STEP_MAX:
            points += 1
        elif not (
            0 < step(correlation, following["correlation"]) <= FALL_MAX
            or (begins and (is_reserved(correlation) or is_reserved(following["correlation"])))
        ):
            return -1
        correlation = following["correlation"]
        size = following["size"]
    return points


@inlined
def pending_token(pending: Rows, first: int, last: int, sent_before: int) -> int:
    """The next pending request in [first, last) that is a SASL token and was sent by then; -1 if
    none."""
    for row in range(first, min(last, first + _TOKENS_AHEAD_MAX)):
        if pending[row]["time"] > sent_before:
            return -1
        if pending[row]["kind"] == TOKEN:
            return row
    return -1


@kernel
def find_response(stream: Stream, index: int, pos: int, walk: Struct, pending: Rows) -> int:
    """First position at or after `pos` with LOCK_POINTS for a response; -1 if there is none.

    In a young stream it also stops at a token, as `find_request`. A segment of four zeros is an
    empty token if a token is pending, or if a response follows.
    """
    pieces = stream.pieces
    limit = walk["size_max"]
    for number in range(index, stream.stop):
        begin = max(pos, pieces[number]["pos"])
        whole = pieces[number]["end"]
        if walk["is_young"] and begin == pieces[number]["pos"]:
            size = peek(pieces, number, stream.stop, begin, 4)
            if begin + 4 + size == whole:
                if sasl_detection.is_broker_token(stream, number, begin, size):
                    return begin
                behind = number + 1
                first, last = walk["next_request"], walk["stop_request"]
                now = stream.times[pieces[number]["segment"]] + CLOCK_SLACK_NS
                if size == 0 and pending_token(pending, first, last, now) >= 0:
                    return begin
                if size == 0 and behind < stream.stop and pieces[behind]["pos"] == whole:
                    if _response_points(stream, behind, whole, walk, pending) >= LOCK_POINTS:
                        return begin
        for at in range(begin, whole):
            if whole - at >= 9:
                address = pieces[number]["address"] + np.uint64(at - pieces[number]["pos"])
                size = load_u32(address)
                if size < RESPONSE_SIZE_MIN or size > limit:
                    continue
                byte = load_u8(address + np.uint64(8))
                if size > RESPONSE_SIZE_MIN and byte != 0 and byte != 255:
                    continue
            if _response_points(stream, number, at, walk, pending) >= LOCK_POINTS:
                return at
    return -1
