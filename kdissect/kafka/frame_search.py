"""What speaks for a frame at a place: the headers of requests and responses, graded and counted.

A boundary is *certain* when the frame before it ended there, or when the stream began there with a
SYN. Everywhere else (behind a gap, at a start in the middle, behind a size that cannot be) a frame
must be found by evidence, and one false lock costs more than a late one: a wrong size jumps over
everything behind it. So points are counted for what a frame shows and what the next two frames
behind it show; a contradiction in any of them refuses the place.

*Requests* have a size, a known api key and version, a client id that is text and often one already
seen on this connection, and a correlation id a little above the last one.

*Responses* have a size and a correlation id only. What looks like them inside of other responses:
a record batch (batch length, leader epoch), arrays of small integers, legacy message sets. So an id
counts when its request was sent before this packet, is not answered, and is next in order or
nearly; ids of unseen requests only while they rise, by small steps as long as there are others. The
byte behind the id tells more than it seems: it is the high byte of a throttle time, an error code
or an array length, or the tag count, so it is 0 (255 for the error -1), where a record batch has
its magic. Two answers tell themselves: the list of versions and the list of mechanisms that
connections begin with. Java clients number what SASL needs apart (RESERVED), and may send what was
numbered earlier a little later (FALL_MAX).

Numbers of headers go into a small int64 array, see `SIZE` and following.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kdissect.jit import inlined, kernel, load_u8, load_u16, load_u32
from kdissect.kafka.sasl_detection import (
    end_of_mechanism,
    is_broker_token,
    is_client_token,
    is_mechanisms,
)
from kdissect.tcp.byte_ranges import Pieces, find, int64, peek, peek_u8

# Grades of a request header. ABSENT: one of its bytes is missing. NEVER: no size of a request.
# POOR: a size, nothing else. FAIR: also a client id that is text. GOOD: also a known API.
ABSENT, _NEVER, POOR, FAIR, GOOD = range(5)

# What a header said; -1 where its bytes are missing (a correlation id is kept unsigned).
SIZE, KEY, API_VERSION, CORRELATION, CLIENT_LENGTH, CLIENT_HASH, HEADER_WIDTH = range(7)

REQUEST_SIZE_MIN = 8  # api key, api version, correlation id
RESPONSE_SIZE_MIN = 4  # correlation id
CLIENT_BYTES_READ = 64  # of a client id, to tell whether it is text and which one it is
API_KEYS, API_VERSIONS = 128, 64  # shape of the table of known APIs

CONTROLLED_SHUTDOWN = 7  # its version 0 has a header without client id
SASL_HANDSHAKE = 17

LOCK_POINTS = 4  # a place needs so many to start a chain of frames
LOCK_POINTS_UNASKED = 5  # a response whose request is not in the capture
STEP_MAX = 64  # ids of unseen requests may rise by so much
RISE_MAX = 1 << 16  # by so much behind a gap where no request of a connection was captured
REQUEST_STEP_MAX = 1000
FALL_MAX = 4  # ids may come so much too late
RESERVED, RESERVED_COUNT = 0x7FFFFFF8, 8  # ids that Java clients keep for SASL
TELLING_POINTS = 4  # for an answer that tells itself, at the start of a segment
HANDSHAKE_POINTS = 5  # for a SaslHandshake request that is a mechanism's name to its end
_TOKENS_AHEAD_MAX = 4  # requests in a row that are looked through for a token
NAMELESS_POINTS = 2  # what a request without a client id owes: zeros read like one
LOOKED_BEHIND, LOOKED_BEHIND_NAMELESS = 2, 4  # frames behind a place that must agree
ENTRIES_MIN = 3  # APIs that a broker has
ENTRIES_READ = 8  # of an ApiVersions response
FEATURES_MAX = 16  # tagged fields in it, and their largest number
SMALL_ID = 256  # ids below are numbers that messages are full of
WINDOW = 64  # outstanding requests looked at around the guessed place
CLOCK_SLACK_NS = 5_000_000  # two taps, and `-i any`, may be so far apart

CLIENTS_MAX = 8  # client ids remembered of a connection


class Kafka(NamedTuple):
    """known: uint8[API_KEYS * API_VERSIONS], 1 for versions that exist. limit: int64[1], the
    largest size of a frame."""

    known: npt.NDArray[np.uint8]
    limit: npt.NDArray[np.int64]


class Stream(NamedTuple):
    """One stream for the searches: its pieces [start, stop) and the end of the last one."""

    pieces: Pieces
    start: int
    stop: int
    end: int


@inlined
def step(number: int, last: int) -> int:
    """How far an id has risen since the last one, 0 to 2^32 - 1: ids wrap."""
    return (number - last) & 0xFFFFFFFF


@inlined
def is_reserved(number: int) -> bool:
    return RESERVED <= number < RESERVED + RESERVED_COUNT


@inlined
def is_text(byte: int) -> bool:
    return byte >= 32 and byte != 127


@kernel
def request_header(pieces: Any, index: int, stop: int, pos: int, kafka: Any, header: Any) -> int:
    """Read the request header behind the size prefix at `pos`; its grade.

    `index` is a piece at or before `pos`. Work is bounded: CLIENT_BYTES_READ bytes at most.
    """
    header[:] = -1
    size = peek(pieces, index, stop, pos, 4)
    header[SIZE] = size
    if size < 0:
        return ABSENT
    if size < REQUEST_SIZE_MIN or size > kafka.limit[0]:
        return _NEVER
    key = peek(pieces, index, stop, pos + 4, 2)
    api_version = peek(pieces, index, stop, pos + 6, 2)
    header[CORRELATION] = peek(pieces, index, stop, pos + 8, 4)
    header[KEY] = key
    header[API_VERSION] = api_version
    if key < 0 or api_version < 0 or header[CORRELATION] < 0:
        return ABSENT
    known = key < API_KEYS and api_version < API_VERSIONS
    known = known and kafka.known[key * API_VERSIONS + api_version] != 0
    if key == CONTROLLED_SHUTDOWN and api_version == 0:
        header[CLIENT_HASH] = 0
        return GOOD if size == 12 and known else POOR  # a broker id is all that follows
    if size < 10:
        return POOR
    length = peek(pieces, index, stop, pos + 12, 2)
    if length < 0:
        return ABSENT
    if length == 0xFFFF:
        header[CLIENT_HASH] = 0
        return GOOD if known else POOR
    header[CLIENT_LENGTH] = length
    if length > size - 10:
        return POOR
    mixed = length
    at = pos + 14
    for place in range(at, at + min(length, CLIENT_BYTES_READ)):
        while index < stop and pieces.pos[index] + pieces.length[index] <= place:
            index += 1
        byte = peek_u8(pieces, index, stop, place)
        if byte < 0:
            break
        if not is_text(byte):
            return POOR
        mixed = (mixed * 31 + byte) & 0xFFFFFFFFFFFF
    header[CLIENT_HASH] = mixed
    if known:
        return GOOD
    return FAIR if length else POOR


@kernel
def quick_request(address: Any, available: int, limit: int, known: Any, header: Any) -> bool:
    """`request_header` for the usual case: all of it in `available` bytes at `address`, and GOOD.

    False says nothing but that `request_header` must be asked. It takes no pieces, since handing
    them to a helper costs more than all the rest.
    """
    if available < 14:
        return False
    size = load_u32(address)
    key = load_u16(address + np.uint64(4))
    api_version = load_u16(address + np.uint64(6))
    length = load_u16(address + np.uint64(12))
    if size < 10 or size > limit or key >= API_KEYS or api_version >= API_VERSIONS:
        return False
    if not known[key * API_VERSIONS + api_version] or length > size - 10:
        return False
    if key == CONTROLLED_SHUTDOWN or length > CLIENT_BYTES_READ or length > available - 14:
        return False
    mixed = length
    for place in range(14, 14 + length):
        byte = load_u8(address + np.uint64(place))
        if not is_text(byte):
            return False
        mixed = (mixed * 31 + byte) & 0xFFFFFFFFFFFF
    header[SIZE] = size
    header[KEY] = key
    header[API_VERSION] = api_version
    header[CORRELATION] = load_u32(address + np.uint64(8))
    header[CLIENT_LENGTH] = length
    header[CLIENT_HASH] = mixed
    return True


@kernel
def is_handshake(stream: Any, index: int, pos: int, header: Any) -> bool:
    """Whether the SaslHandshake request at `pos` is one to its end: its mechanism."""
    at = pos + 14 + max(header[CLIENT_LENGTH], 0)
    end = pos + 4 + header[SIZE]
    return end_of_mechanism(stream.pieces, index, stream.stop, at, end) == end


@kernel
def request_points(
    stream: Any, index: int, pos: int, kafka: Any, last_id: int, clients: Any, client_count: int,
    header: Any, following: Any,
) -> int:  # fmt: skip
    """How much speaks for a request at `pos` (see the top), -1 when something speaks against it.

    last_id: correlation id of the last request, -1 none. clients int64[], client_count: hashes of
    the client ids of this connection. header, following: scratch; `header` is that of `pos`.
    """
    pieces = stream.pieces
    if request_header(pieces, index, stream.stop, pos, kafka, header) != GOOD:
        return -1
    points = 0
    is_seen = False
    for number in range(client_count):
        if clients[number] == header[CLIENT_HASH]:
            is_seen = True
    looked_behind = LOOKED_BEHIND
    if header[CLIENT_LENGTH] > 0:
        points += 2 if is_seen else (1 if client_count == 0 else 0)
    elif is_seen:
        points += 1
    elif header[KEY] != CONTROLLED_SHUTDOWN:
        # Zeros within a message read like it, again and again where messages repeat.
        if client_count > 0 or pos != pieces.pos[index]:
            return -1
        points -= NAMELESS_POINTS
        looked_behind = LOOKED_BEHIND_NAMELESS
    if last_id >= 0:
        risen = step(header[CORRELATION], last_id)
        if 0 < risen <= REQUEST_STEP_MAX:
            points += 2
        elif not is_seen:
            fallen = step(last_id, header[CORRELATION])
            if header[CLIENT_LENGTH] <= 0 or not 0 < fallen <= FALL_MAX:
                return -1
    if pos == pieces.pos[index]:
        points += 1
    at = pos
    size = header[SIZE]
    correlation = header[CORRELATION]
    client = header[CLIENT_HASH]
    key = header[KEY]
    spoken = key << 16 | header[API_VERSION]
    if key == SASL_HANDSHAKE and is_handshake(stream, index, pos, header):
        points += HANDSHAKE_POINTS
    for _ in range(looked_behind):
        if key == SASL_HANDSHAKE:
            break  # what follows may be a token
        at += 4 + size
        if at >= stream.end:
            if at == stream.end:
                points += 2
            break
        index = find(pieces, index, stream.stop, at)
        grade = request_header(pieces, index, stream.stop, at, kafka, following)
        if grade == ABSENT:
            if pieces.pos[index] > at and pieces.pos[index - 1] + pieces.length[index - 1] == at:
                points += 2  # the next frame is in a gap, this one ends with a segment
            break
        if grade != GOOD:
            return -1
        points += 2
        if following[CLIENT_HASH] == client:
            if not 0 < step(following[CORRELATION], correlation) <= REQUEST_STEP_MAX:
                if header[CLIENT_LENGTH] <= 0:
                    return -1  # responses read like requests of this kind
                counted = (following[KEY] << 16 | following[API_VERSION]) - spoken
                if (
                    not is_seen
                    and following[CORRELATION] == correlation
                    and 0 < counted <= STEP_MAX
                ):
                    # Produce responses: their ids read like keys and versions, the count of
                    # topics like an id, and the topic like a client.
                    return -1
                points -= 1
            elif header[CLIENT_LENGTH] > 0:
                points += 1
        size = following[SIZE]
        correlation = following[CORRELATION]
        key = following[KEY]
        spoken = key << 16 | following[API_VERSION]
    return points


@kernel
def find_request(
    stream: Any, index: int, pos: int, kafka: Any, last_id: int, clients: Any, client_count: int,
    may_be_token: bool, header: Any, following: Any,
) -> int:  # fmt: skip
    """The first place at or behind `pos` with LOCK_POINTS for a request, -1 without any.

    may_be_token: a segment that is a bare token by its size and shape counts too. Linear in the
    bytes: nearly every place falls at its size, key or version.
    """
    pieces = stream.pieces
    limit = kafka.limit[0]
    for number in range(index, stream.stop):
        begin = max(pos, pieces.pos[number])
        whole = pieces.pos[number] + pieces.length[number]
        if may_be_token and begin == pieces.pos[number]:
            size = peek(pieces, number, stream.stop, begin, 4)
            if size + 4 == pieces.length[number] and is_client_token(stream, number, begin, size):
                return begin
        for at in range(begin, whole):
            if whole - at >= 8:
                address = pieces.address[number] + np.uint64(at - pieces.pos[number])
                size = load_u32(address)
                if size < REQUEST_SIZE_MIN or size > limit:
                    continue
                key = load_u16(address + np.uint64(4))
                api_version = load_u16(address + np.uint64(6))
                if key >= API_KEYS or api_version >= API_VERSIONS:
                    continue
                if not kafka.known[key * API_VERSIONS + api_version]:
                    continue
            points = request_points(
                stream, number, at, kafka, last_id, clients, client_count, header, following
            )
            if points >= LOCK_POINTS:
                return at
    return -1


# ---- responses ----


class Asked(NamedTuple):
    """Requests of a connection that may be answered, in stream order (the rows of all connections).

    `correlation` unsigned; `time` when the first byte was sent; `kind` 0 expects a response, 1 is a
    SASL token, 2 expects none (acks=0).
    """

    correlation: npt.NDArray[np.int64]
    time: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int64]


@kernel
def response_header(pieces: Any, index: int, stop: int, pos: int, limit: int, header: Any) -> bool:
    """Read size and correlation id at `pos`; whether a response can begin so (missing bytes can).

    The byte behind the id must be 0 or 255, see the top.
    """
    header[:] = -1
    size = peek(pieces, index, stop, pos, 4)
    header[SIZE] = size
    if size < 0:
        return True
    if size < RESPONSE_SIZE_MIN or size > limit:
        return False
    header[CORRELATION] = peek(pieces, index, stop, pos + 4, 4)
    if size == RESPONSE_SIZE_MIN:
        return True
    while index < stop and pieces.pos[index] + pieces.length[index] <= pos + 8:
        index += 1
    byte = peek_u8(pieces, index, stop, pos + 8)
    return byte <= 0 or byte == 255


@kernel
def find_asked(asked: Any, first: int, stop: int, correlation: int, sent_before: int) -> int:
    """The nearest request of [first, stop) with this id, sent by then; -1 without one.

    Looks at the next WINDOW requests and at WINDOW around the place where the id should be if all
    ids rise by one; never further, so that a search stays linear.
    """
    near = min(stop, first + WINDOW)
    for row in range(first, near):
        if asked.time[row] > sent_before:
            return -1
        if asked.correlation[row] == correlation and asked.kind[row] == 0:
            return row
    if near >= stop:
        return -1
    guess = near + step(correlation, asked.correlation[near])
    if guess - WINDOW >= stop:
        return -1
    for row in range(max(near, guess - WINDOW), min(stop, guess + 1)):
        if asked.time[row] > sent_before:
            return -1
        if asked.correlation[row] == correlation and asked.kind[row] == 0:
            return row
    return -1


@inlined
def _is_of_the_future(asked: Any, first: int, last: int, correlation: int, now: int) -> bool:
    """Whether a request with a lower id, of the next WINDOW, was sent only after `now`."""
    for row in range(first, min(last, first + WINDOW)):
        if asked.time[row] > now:
            return step(correlation, asked.correlation[row]) <= RISE_MAX
    return False


@inlined
def expecting(asked: Any, first: int, stop: int) -> int:
    """The next request of [first, stop) that is to be answered, `stop` without one."""
    while first < stop and asked.kind[first] == 2:
        first += 1
    return first


@inlined
def _are_ranges(pieces: Any, index: int, stop: int, at: int, count: int, width: int) -> bool:
    """Whether the first of `count` entries at `at` are key, lowest and highest version."""
    for _ in range(min(count, ENTRIES_READ)):
        key = peek(pieces, index, stop, at, 2)
        low = peek(pieces, index, stop, at + 2, 2)
        high = peek(pieces, index, stop, at + 4, 2)
        if not (0 <= key < API_KEYS and 0 <= low <= high < API_VERSIONS):
            return False
        if width == 7 and peek(pieces, index, stop, at + 6, 1) != 0:
            return False  # no tagged fields
        at += width
    return True


@kernel
def end_of_tags(pieces: Any, index: int, stop: int, at: int, end: int) -> int:
    """Where the section of a few tagged fields at `at` ends, -1 where there is none."""
    count = peek(pieces, index, stop, at, 1)
    at += 1
    if not 0 <= count <= FEATURES_MAX:
        return -1
    for _ in range(count):
        tag = peek(pieces, index, stop, at, 1)
        size = peek(pieces, index, stop, at + 1, 1)
        at += 2
        if not 0 <= tag <= FEATURES_MAX or size < 0:
            return -1
        if size >= 128:
            more = peek(pieces, index, stop, at, 1)
            at += 1
            if not 0 <= more < 128:
                return -1
            size += (more - 1) << 7
        at += size
        if at > end:
            return -1
    return int64(at)


@kernel
def is_api_versions(stream: Any, index: int, pos: int, size: int) -> bool:
    """Whether the frame at `pos` is an ApiVersions response: a list of 6 or 7 bytes each.

    Up to v2 it is error code, int32 count, (key, min, max)*, from v1 on a throttle time; from v3
    on the count is compact, and each entry and the whole end with tagged fields. No broker has
    fewer than ENTRIES_MIN, but a refusal (error 35) may name one.
    """
    pieces = stream.pieces
    stop = stream.stop
    error = peek(pieces, index, stop, pos + 8, 2)
    if error != 0 and error != 35:
        return False
    least = ENTRIES_MIN if error == 0 else 1
    count = peek(pieces, index, stop, pos + 10, 4)
    if least <= count < API_KEYS and size in (10 + 6 * count, 14 + 6 * count):
        return _are_ranges(pieces, index, stop, pos + 14, count, 6)
    count = peek(pieces, index, stop, pos + 10, 1) - 1
    if not least <= count < API_KEYS - 1 or size < 12 + 7 * count:
        return False
    if not _are_ranges(pieces, index, stop, pos + 11, count, 7):
        return False
    end = pos + 4 + size
    return end_of_tags(pieces, index, stop, pos + 15 + 7 * count, end) == end


@kernel
def response_points(
    stream: Any, index: int, pos: int, limit: int, asked: Any, first: int, last: int, last_id: int,
    rise_max: int, time: int, header: Any, following: Any,
) -> int:  # fmt: skip
    """How much speaks for a response at `pos`, -1 when something speaks against it.

    asked[first:last] are the requests not answered so far; last_id the id of the last response,
    -1 none; rise_max: by how much ids of unseen requests may rise here (RISE_MAX or STEP_MAX);
    time of the packet with `pos`. A response whose request was not captured must be worth
    LOCK_POINTS_UNASKED, so its points come reduced by the difference.
    """
    pieces = stream.pieces
    if not response_header(pieces, index, stream.stop, pos, limit, header):
        return -1
    correlation = header[CORRELATION]
    if correlation < 0:
        return -1
    size = header[SIZE]
    begins = pos == pieces.pos[index]
    tells_mechanisms = begins and is_mechanisms(stream, index, pos, size)
    tells = tells_mechanisms or (begins and is_api_versions(stream, index, pos, size))
    row = find_asked(asked, first, last, correlation, time + CLOCK_SLACK_NS)
    if row >= 0:
        points = 3 if row == expecting(asked, first, last) else 2
    else:
        if correlation == 0 and not begins:
            return -1  # the size of a record set and its first offset
        points = LOCK_POINTS - LOCK_POINTS_UNASKED
        if is_reserved(correlation) and begins:
            points += 3
        elif not tells:
            # Clients ask for versions first, with an id that others came before.
            now = time + CLOCK_SLACK_NS
            if _is_of_the_future(asked, first, last, correlation, now):
                return -1
            if last_id >= 0:
                risen = step(correlation, last_id)
                if not 0 < risen <= rise_max and not 0 < step(last_id, correlation) <= FALL_MAX:
                    return -1
                points += 1 if 0 < risen <= STEP_MAX else 0
            elif first < last:
                # Its request may have come before the first one that is there, or among them.
                away = asked.correlation[first] - correlation
                if asked.kind[first] == 1 or away == 0 or abs(away) > STEP_MAX:
                    return -1
                points += 1
    if begins:
        points += TELLING_POINTS if tells else 1
    elif correlation < SMALL_ID:
        points -= 1 if row >= 0 else 2
    at = pos
    for number in range(2):
        at += 4 + size
        # A segment that is one frame, and nothing behind it to agree.
        fits = number == 0 and begins and at == pos + pieces.length[index]
        if number == 0 and tells_mechanisms:
            points += 3 if fits else 0
            break  # what follows may be a token
        if at >= stream.end:
            if at == stream.end:
                points += 3 if fits else 1
            elif number == 0:
                points -= 1
            break
        behind = find(pieces, index, stream.stop, at)
        if behind > 0 and pieces.pos[behind] > at:
            if pieces.pos[behind - 1] + pieces.length[behind - 1] == at:
                points += 3 if fits else 1  # the next frame is in a gap
            break
        index = behind
        if not response_header(pieces, index, stream.stop, at, limit, following):
            return -1
        if at == pieces.pos[index]:
            points += 1
        if following[SIZE] < 0 or following[CORRELATION] < 0:
            break
        start = row + 1 if row >= 0 else first
        after = find_asked(asked, start, last, following[CORRELATION], time + (1 << 40))
        if after >= 0:
            points += 2
            row = after
        elif 0 < step(following[CORRELATION], correlation) <= STEP_MAX:
            points += 1
        elif not (
            0 < step(correlation, following[CORRELATION]) <= FALL_MAX
            or (begins and (is_reserved(correlation) or is_reserved(following[CORRELATION])))
        ):
            return -1
        correlation = following[CORRELATION]
        size = following[SIZE]
    return points


@inlined
def token_asked(asked: Any, first: int, last: int, sent_before: int) -> int:
    """The next request of [first, last) that is a bare token and was sent by then, -1 without."""
    for row in range(first, min(last, first + _TOKENS_AHEAD_MAX)):
        if asked.time[row] > sent_before:
            return -1
        if asked.kind[row] == 1:
            return row
    return -1


@kernel
def find_response(
    stream: Any, index: int, pos: int, limit: int, asked: Any, first: int, last: int, last_id: int,
    rise_max: int, may_be_token: bool, times: Any, header: Any, following: Any,
) -> int:  # fmt: skip
    """The first place at or behind `pos` with LOCK_POINTS for a response, -1 without any.

    may_be_token: as for `find_request`. An empty token is a segment of four zeros where a token
    was asked, or a response follows. times int64[]: of the segments the pieces came from.
    """
    pieces = stream.pieces
    for number in range(index, stream.stop):
        begin = max(pos, pieces.pos[number])
        whole = pieces.pos[number] + pieces.length[number]
        time = times[pieces.segment[number]]
        if may_be_token and begin == pieces.pos[number]:
            size = peek(pieces, number, stream.stop, begin, 4)
            if size + 4 == pieces.length[number]:
                if is_broker_token(stream, number, begin, size):
                    return begin
                behind = number + 1
                if size == 0 and token_asked(asked, first, last, time + CLOCK_SLACK_NS) >= 0:
                    return begin
                if size == 0 and behind < stream.stop and pieces.pos[behind] == whole:
                    points = response_points(
                        stream, behind, whole, limit, asked, first, last, last_id, rise_max,
                        times[pieces.segment[behind]], header, following,
                    )  # fmt: skip
                    if points >= LOCK_POINTS:
                        return begin
        for at in range(begin, whole):
            if whole - at >= 9:
                address = pieces.address[number] + np.uint64(at - pieces.pos[number])
                size = load_u32(address)
                if size < RESPONSE_SIZE_MIN or size > limit:
                    continue
                byte = load_u8(address + np.uint64(8))
                if size > RESPONSE_SIZE_MIN and byte != 0 and byte != 255:
                    continue
            points = response_points(
                stream, number, at, limit, asked, first, last, last_id, rise_max, time, header,
                following,
            )  # fmt: skip
            if points >= LOCK_POINTS:
                return at
    return -1
