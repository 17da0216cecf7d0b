"""What bytes of a stream say of requests and responses, as plain Python: the definitions of
`evidence.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kdissect.kafka.frame_search import (
    ABSENT,
    API_VERSIONS,
    CLIENT_BYTES_READ,
    CLOCK_SLACK_NS,
    CONTROLLED_SHUTDOWN,
    ENTRIES_MIN,
    ENTRIES_READ,
    FAIR,
    FALL_MAX,
    FEATURES_MAX,
    GOOD,
    HANDSHAKE_POINTS,
    KEYS,
    LOCK_POINTS,
    LOCK_POINTS_UNASKED,
    LOOKED_BEHIND,
    LOOKED_BEHIND_NAMELESS,
    NAMELESS_POINTS,
    NEVER,
    POOR,
    REQUEST_SIZE_MIN,
    REQUEST_STEP_MAX,
    RESERVED,
    RESERVED_COUNT,
    RESPONSE_SIZE_MIN,
    RISE_MAX,
    SASL_HANDSHAKE,
    SMALL_ID,
    STEP_MAX,
    TELLING_POINTS,
    TOKENS_AHEAD_MAX,
    WINDOW,
)
from kdissect.kafka.frame_tables import EXPECTS, SILENT, TOKEN
from kdissect.kafka.pairing_reference import Request
from kdissect.kafka.sasl_evidence_reference import end_of_mechanism, is_mechanisms
from kdissect.tcp.pieces_reference import PlainStream

CERTAIN_SLACK_NS = 1 << 40  # on a certain boundary clocks do not count


class Kafka(NamedTuple):
    known: set[tuple[int, int]]
    limit: int


class Header(NamedTuple):
    grade: int
    size: int | None = None
    key: int | None = None
    api_version: int | None = None
    correlation_id: int | None = None
    client: str | None = None  # None: not there, null, or ControlledShutdown v0


def request_header(stream: PlainStream, pos: int, kafka: Kafka) -> Header:
    size = stream.number(pos, 4)
    if size is None:
        return Header(ABSENT)
    if not REQUEST_SIZE_MIN <= size <= kafka.limit:
        return Header(NEVER, size)
    key, api_version = stream.number(pos + 4, 2), stream.number(pos + 6, 2)
    correlation_id = stream.number(pos + 8, 4)
    if key is None or api_version is None or correlation_id is None:
        return Header(ABSENT, size, key, api_version, correlation_id)

    def graded(grade: int, client: str | None = None) -> Header:
        return Header(grade, size, key, api_version, correlation_id, client)

    is_known = (key, api_version) in kafka.known
    if (key, api_version) == (CONTROLLED_SHUTDOWN, 0):
        return graded(GOOD if size == 12 and is_known else POOR)
    if size < 10:
        return graded(POOR)
    length = stream.number(pos + 12, 2)
    if length is None:
        return graded(ABSENT)
    if length == 0xFFFF:
        return graded(GOOD if is_known else POOR)
    if length > size - 10:
        return graded(POOR)
    name = []
    for at in range(pos + 14, pos + 14 + min(length, CLIENT_BYTES_READ)):
        byte = stream.byte(at)
        if byte is None:
            break
        if byte < 32 or byte == 127:
            return graded(POOR)
        name.append(byte)
    client = f"{length} {bytes(name).decode('latin-1')}"
    return graded(GOOD if is_known else FAIR if length else POOR, client)


def has_name(header: Header) -> bool:
    return header.client is not None and not header.client.startswith("0 ")


def identity(header: Header) -> str:
    """What is compared of a client id: null, none and empty are alike."""
    return header.client if header.client is not None and has_name(header) else ""


def rises(number: int, last: int, most: int) -> bool:
    return 0 < (number - last) % 2**32 <= most


def is_handshake(stream: PlainStream, pos: int, header: Header) -> bool:
    assert header.size is not None
    name = int(header.client.split(" ")[0]) if header.client else 0
    end = pos + 4 + header.size
    return end_of_mechanism(stream, pos + 14 + name, end) == end


def is_reserved(correlation_id: int) -> bool:
    return RESERVED <= correlation_id < RESERVED + RESERVED_COUNT


def request_points(
    stream: PlainStream, pos: int, kafka: Kafka, last_id: int | None, clients: list[str]
) -> int:
    header = request_header(stream, pos, kafka)
    if header.grade != GOOD:
        return -1
    assert header.size is not None
    assert header.correlation_id is not None
    is_seen = identity(header) in clients
    points = 0
    if has_name(header):
        points += 2 if is_seen else 0 if clients else 1
    elif is_seen:
        points += 1
    elif header.key != CONTROLLED_SHUTDOWN:
        if clients or pos not in stream.starts:
            return -1
        points -= NAMELESS_POINTS
    is_nameless = not has_name(header) and not is_seen and header.key != CONTROLLED_SHUTDOWN
    if last_id is not None:
        if rises(header.correlation_id, last_id, REQUEST_STEP_MAX):
            points += 2
        elif not is_seen:
            if not has_name(header) or not rises(last_id, header.correlation_id, FALL_MAX):
                return -1
    points += pos in stream.starts
    if header.key == SASL_HANDSHAKE and is_handshake(stream, pos, header):
        points += HANDSHAKE_POINTS
    at, this = pos, header
    for _ in range(LOOKED_BEHIND_NAMELESS if is_nameless else LOOKED_BEHIND):
        if this.key == SASL_HANDSHAKE:
            break
        assert this.size is not None
        assert this.correlation_id is not None
        at += 4 + this.size
        if at >= stream.end:
            return points + 2 * (at == stream.end)
        following = request_header(stream, at, kafka)
        if following.grade == ABSENT:
            is_lost = stream.byte(at) is None and stream.byte(at - 1) is not None
            points += 2 * is_lost
            break
        if following.grade != GOOD:
            return -1
        points += 2
        assert following.correlation_id is not None
        if identity(following) == identity(header):
            if not rises(following.correlation_id, this.correlation_id, REQUEST_STEP_MAX):
                if not has_name(header):
                    return -1
                assert None not in (this.key, this.api_version)
                assert None not in (following.key, following.api_version)
                before, after = (
                    (one.key or 0) << 16 | (one.api_version or 0) for one in (this, following)
                )
                is_same = following.correlation_id == this.correlation_id
                if not is_seen and is_same and 0 < after - before <= STEP_MAX:
                    return -1
                points -= 1
            elif has_name(header):
                points += 1
        this = following
    return points


def response_header(
    stream: PlainStream, pos: int, limit: int
) -> tuple[bool, int | None, int | None]:
    """(whether a response can begin so, size, correlation id)."""
    size = stream.number(pos, 4)
    if size is None:
        return True, None, None
    if not RESPONSE_SIZE_MIN <= size <= limit:
        return False, size, None
    correlation_id = stream.number(pos + 4, 4)
    is_plausible = size == RESPONSE_SIZE_MIN or stream.byte(pos + 8) in (None, 0, 255)
    return is_plausible, size, correlation_id


def find_asked(
    asked: Sequence[Request], first: int, correlation_id: int, sent_before: int
) -> int | None:
    near = min(len(asked), first + WINDOW)
    rows = list(range(first, near))
    if near < len(asked):
        guess = near + (correlation_id - asked[near].correlation_id) % 2**32
        rows += range(max(near, guess - WINDOW), min(len(asked), guess + 1))
    for row in rows:
        if asked[row].time_ns > sent_before:
            return None
        if asked[row].correlation_id == correlation_id and asked[row].kind == EXPECTS:
            return row
    return None


def are_ranges(stream: PlainStream, at: int, count: int, width: int) -> bool:
    for start in range(at, at + width * min(count, ENTRIES_READ), width):
        key, low, high = (stream.number(start + place, 2) for place in (0, 2, 4))
        if key is None or low is None or high is None:
            return False
        if key >= KEYS or not low <= high < API_VERSIONS:
            return False
        if width == 7 and stream.byte(start + 6) != 0:
            return False
    return True


def end_of_tags(stream: PlainStream, at: int, end: int) -> int | None:
    count = stream.byte(at)
    if count is None or count > FEATURES_MAX:
        return None
    at += 1
    for _ in range(count):
        tag, size = stream.byte(at), stream.byte(at + 1)
        at += 2
        if tag is None or tag > FEATURES_MAX or size is None:
            return None
        if size >= 128:
            more = stream.byte(at)
            if more is None or more >= 128:
                return None
            size = size % 128 + 128 * more
            at += 1
        at += size
        if at > end:
            return None
    return at


def is_api_versions(stream: PlainStream, pos: int, size: int) -> bool:
    error = stream.number(pos + 8, 2)
    if error not in (0, 35):
        return False
    least = 1 if error else ENTRIES_MIN
    count = stream.number(pos + 10, 4)
    if count is not None and least <= count < KEYS and size in (10 + 6 * count, 14 + 6 * count):
        return are_ranges(stream, pos + 14, count, 6)
    compact = (stream.number(pos + 10, 1) or 0) - 1
    if not least <= compact < KEYS - 1 or size < 12 + 7 * compact:
        return False
    if not are_ranges(stream, pos + 11, compact, 7):
        return False
    return end_of_tags(stream, pos + 15 + 7 * compact, pos + 4 + size) == pos + 4 + size


def response_points(
    stream: PlainStream, pos: int, limit: int, asked: Sequence[Request], first: int,
    last_id: int | None,
) -> int:  # fmt: skip
    is_plausible, size, correlation_id = response_header(stream, pos, limit)
    if not is_plausible or correlation_id is None or size is None:
        return -1
    time_ns = stream.times[pos]
    begins = pos in stream.starts
    tells_mechanisms = begins and is_mechanisms(stream, pos, size)
    tells = tells_mechanisms or (begins and is_api_versions(stream, pos, size))
    row = find_asked(asked, first, correlation_id, time_ns + CLOCK_SLACK_NS)
    waiting = [at for at in range(first, len(asked)) if asked[at].kind != SILENT]
    if row is not None:
        points = 3 if row == waiting[0] else 2
    else:
        if correlation_id == 0 and not begins:
            return -1
        points = LOCK_POINTS - LOCK_POINTS_UNASKED
        if is_reserved(correlation_id) and begins:
            points += 3
        elif not tells:
            now = time_ns + CLOCK_SLACK_NS
            later = [request for request in asked[first : first + WINDOW] if request.time_ns > now]
            if later and (correlation_id - later[0].correlation_id) % 2**32 <= RISE_MAX:
                return -1
            if last_id is not None:
                has_asked = asked or stream.has_asked
                if not rises(correlation_id, last_id, STEP_MAX if has_asked else RISE_MAX):
                    if not rises(last_id, correlation_id, FALL_MAX):
                        return -1
                points += rises(correlation_id, last_id, STEP_MAX)
            elif first < len(asked):
                away = abs(asked[first].correlation_id - correlation_id)
                if asked[first].kind == TOKEN or not 0 < away <= STEP_MAX:
                    return -1
                points += 1
    if begins:
        points += TELLING_POINTS if tells else 1
    elif correlation_id < SMALL_ID:
        points -= 1 if row is not None else 2
    at = pos
    if tells_mechanisms:
        return points + 3 * stream.is_piece(pos, pos + 4 + size)
    for number in range(2):
        at += 4 + size
        fits = number == 0 and stream.is_piece(pos, at)
        if at > stream.end:
            return points - (number == 0)
        if at == stream.end:
            return points + (3 if fits else 1)
        if stream.byte(at) is None:
            return points + (3 if fits else int(stream.byte(at - 1) is not None))
        is_plausible, size_behind, id_behind = response_header(stream, at, limit)
        if not is_plausible:
            return -1
        points += at in stream.starts
        if size_behind is None or id_behind is None:
            break
        start = row + 1 if row is not None else first
        after = find_asked(asked, start, id_behind, time_ns + CERTAIN_SLACK_NS)
        if after is not None:
            points += 2
            row = after
        elif rises(id_behind, correlation_id, STEP_MAX):
            points += 1
        elif not rises(correlation_id, id_behind, FALL_MAX) and not (
            begins and (is_reserved(correlation_id) or is_reserved(id_behind))
        ):
            return -1
        size, correlation_id = size_behind, id_behind
    return points


def token_asked(asked: Sequence[Request], first: int, sent_before: int) -> int | None:
    for row in range(first, min(len(asked), first + TOKENS_AHEAD_MAX)):
        if asked[row].time_ns > sent_before:
            return None
        if asked[row].kind == TOKEN:
            return row
    return None
