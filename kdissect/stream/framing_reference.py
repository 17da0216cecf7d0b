"""Framing as plain Python over one stream: the definition of `evidence.py`, `sasl_evidence.py` and
`framing.py`.

A stream is a list of bytes, None where one is missing, and the places where pieces begin. Frames
come out as tuples. The theory of operation is in those two modules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kdissect.stream.acks import ACKS_MAX, FLEXIBLE_PRODUCE, TAGS_MAX
from kdissect.stream.evidence import (
    ABSENT,
    API_VERSIONS,
    CLIENT_BYTES_READ,
    CLIENTS_MAX,
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
from kdissect.stream.frame_rows import EXPECTS, SILENT, TOKEN
from kdissect.stream.framing import ASKS_VERSIONS, TOKEN_SIZE_MAX
from kdissect.stream.pairing_reference import Request
from kdissect.stream.sasl_evidence import (
    MECHANISM_MAX,
    MECHANISMS_MAX,
    TOKEN_BYTES_READ,
)

CERTAIN_SLACK_NS = 1 << 40  # on a certain boundary clocks do not count


@dataclass
class PlainStream:
    """data: bytes by position, None missing; starts: where pieces begin; times: of each byte."""

    data: Sequence[int | None]
    starts: set[int]
    times: Sequence[int]
    has_origin: bool
    is_resumed: bool = False  # these and the next: see the bits of `has_origin` in `framing.py`
    is_in_tokens: bool = False
    has_asked: bool = False
    last_id: int | None = None
    was_young: bool = False
    end: int = field(init=False)

    def __post_init__(self) -> None:
        there = [at for at, byte in enumerate(self.data) if byte is not None]
        self.end = there[-1] + 1 if there else 0

    def byte(self, pos: int) -> int | None:
        return self.data[pos] if 0 <= pos < self.end else None

    def number(self, pos: int, count: int) -> int | None:
        value = 0
        for at in range(pos, pos + count):
            byte = self.byte(at)
            if byte is None:
                return None
            value = value << 8 | byte
        return value

    def bytes_at(self, pos: int, count: int) -> bytes | None:
        there = [self.byte(at) for at in range(pos, pos + count)]
        return None if None in there else bytes(byte for byte in there if byte is not None)

    def is_piece(self, pos: int, end: int) -> bool:
        """Whether the bytes [pos, end) are one piece, all of it."""
        inside = self.data[pos:end]
        return (
            pos in self.starts
            and len(inside) == end - pos
            and None not in inside
            and not any(at in self.starts for at in range(pos + 1, end))
            and (self.byte(end) is None or end in self.starts)
        )

    def next_byte(self, pos: int) -> int | None:
        """The first position at or behind `pos` that was captured."""
        return next((at for at in range(pos, self.end) if self.data[at] is not None), None)


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


class Frame(NamedTuple):
    pos: int
    size: int
    key: int
    api_version: int
    correlation_id: int
    kind: int


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


MECHANISM = re.compile(rb"[A-Z0-9_-]{1,%d}" % MECHANISM_MAX)


def end_of_mechanism(stream: PlainStream, pos: int, end: int) -> int | None:
    length = stream.number(pos, 2)
    if length is None or pos + 2 + length > end:
        return None
    name = stream.bytes_at(pos + 2, length)
    return pos + 2 + length if name and MECHANISM.fullmatch(name) else None


def is_mechanisms(stream: PlainStream, pos: int, size: int) -> bool:
    count = stream.number(pos + 10, 4)
    if stream.number(pos + 8, 2) not in (0, 33, 34) or count is None:
        return False
    at = pos + 14
    for _ in range(count if 0 < count <= MECHANISMS_MAX else 0):
        end = end_of_mechanism(stream, at, pos + 4 + size)
        if end is None:
            return False
        at = end
    return 0 < count <= MECHANISMS_MAX and at == pos + 4 + size


def is_gss(start: bytes, size: int) -> bool:
    if start[0] == 0x60:
        if start[1] < 128:
            return start[1] == size - 2 and start[2] == 6
        if start[1] == 0x81:
            return start[2] == size - 3 and start[3] == 6
        return start[1] == 0x82 and int.from_bytes(start[2:], "big") == size - 4
    return start[:2] == b"\5\4" and start[2] < 8 and start[3] == 255


def is_said(stream: PlainStream, pos: int, size: int) -> bool:
    said = stream.bytes_at(pos + 4, min(size, TOKEN_BYTES_READ))
    return said is not None and all((at >= 32 or at == 1) and at != 127 for at in said)


def is_client_token(stream: PlainStream, pos: int, size: int) -> bool:
    if size == 1:
        return stream.byte(pos + 4) == 1
    start = stream.bytes_at(pos + 4, 4)
    if size < 4 or start is None:
        return False
    if is_gss(start, size):
        return True
    if start[:2] in (b"n,", b"y,", b"p=", b"c="):
        return is_said(stream, pos, size)
    said = stream.bytes_at(pos + 4, size) if size <= TOKEN_BYTES_READ else None
    if said is None or any(0 < byte < 32 or byte == 127 for byte in said):
        return False
    parts = said.split(b"\0")
    return len(parts) == 3 and parts[1] != b"" and parts[2] != b""


def is_broker_token(stream: PlainStream, pos: int, size: int) -> bool:
    start = stream.bytes_at(pos + 4, 4)
    if size < 4 or start is None:
        return False
    says = start[:2] in (b"r=", b"v=", b"e=") or start[:1] == b"{"
    return is_gss(start, size) or (says and is_said(stream, pos, size))


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


def uvarint(stream: PlainStream, at: int) -> tuple[int | None, int]:
    """(value, next position); None where a byte of it is missing or there are more than 5."""
    value = 0
    for number in range(5):
        byte = stream.byte(at)
        at += 1
        if byte is None:
            return None, at
        value |= (byte & 127) << 7 * number
        if byte < 128:
            return value, at
    return None, at


def acks_at(stream: PlainStream, pos: int, header: Header) -> int | None:
    """Where a Produce request has its acks; None where that cannot be told."""
    assert header.size is not None
    assert header.api_version is not None
    end = pos + 4 + header.size
    at = pos + 14 + (int(header.client.split(" ")[0]) if header.client else 0)

    if header.api_version >= FLEXIBLE_PRODUCE:
        tags, at = uvarint(stream, at)
        if tags is None or tags > TAGS_MAX:
            return None
        for _ in range(tags):
            _, at = uvarint(stream, at)
            size, at = uvarint(stream, at)
            if size is None or size > end - at:
                return None
            at += size
        length, at = uvarint(stream, at)
        if length is None:
            return None
        at += max(0, length - 1)
    elif header.api_version >= 3:
        length = stream.number(at, 2)
        if length is None:
            return None
        at += 2 + (length if length < 0x8000 else 0)
    return at


def acks(stream: PlainStream, pos: int, header: Header) -> int | None:
    """acks of a Produce request, as an unsigned number; None where it cannot be read."""
    assert header.size is not None
    at = acks_at(stream, pos, header)
    return None if at is None or at + 2 > pos + 4 + header.size else stream.number(at, 2)


def may_be_produce(stream: PlainStream, pos: int, header: Header) -> bool:
    """Whether what follows the header of a Produce request can be one; missing bytes can."""
    assert header.size is not None
    assert header.api_version is not None
    at = acks_at(stream, pos, header)
    end = pos + 4 + header.size
    if at is None:
        return True
    if at + 7 > end or ACKS_MAX < (stream.number(at, 2) or 0) < 0xFFFF:
        return False
    if header.api_version < FLEXIBLE_PRODUCE:
        return (stream.number(at + 6, 4) or 0) * 6 <= end - (at + 10)
    count, at = uvarint(stream, at + 6)
    return ((count or 0) - 1) * 3 <= end - at


def frame_requests(stream: PlainStream, kafka: Kafka) -> list[Frame]:
    frames: list[Frame] = []
    clients: list[str] = []
    last_id = stream.last_id
    is_young = stream.was_young or not stream.is_resumed
    pos = 0

    def speaks_at(at: int) -> bool:
        size = stream.number(at, 4)
        if is_young and size is not None and stream.is_piece(at, at + 4 + size):
            if is_client_token(stream, at, size):
                return True
        return request_points(stream, at, kafka, last_id, clients) >= LOCK_POINTS

    certain, in_tokens = stream.has_origin, stream.is_in_tokens
    while stream.next_byte(pos) is not None:
        if not certain:
            found = next(
                (
                    at
                    for at in range(pos, stream.end)
                    if stream.data[at] is not None and speaks_at(at)
                ),
                None,
            )
            if found is None:
                break
            pos, certain, in_tokens = found, True, is_young
        header = request_header(stream, pos, kafka)
        size, grade = header.size, header.grade
        if size is None:
            certain = False
            pos = stream.next_byte(pos) or 0
            continue
        is_first = not frames and not stream.is_resumed
        if is_first and grade < FAIR and stream.has_origin and size <= TOKEN_SIZE_MAX:
            in_tokens = grade != ABSENT
        if in_tokens and grade != GOOD and size <= TOKEN_SIZE_MAX:
            frames.append(Frame(pos, size, -1, -1, -1, TOKEN))
            pos += 4 + size
            continue
        if grade == ABSENT and None in header[2:5]:
            if pos + 4 + size > stream.end:
                break
            pos += 4 + size
            continue
        if grade == POOR:
            behind = pos + 4 + size
            is_good = request_header(stream, behind, kafka).grade == GOOD
            accept = behind == stream.end or (behind < stream.end and is_good)
        else:
            accept = grade != NEVER
        if not accept:
            certain = False
            pos += 1
            continue
        key, api_version = header.key, header.api_version
        assert key is not None
        assert api_version is not None
        assert header.correlation_id is not None
        in_tokens = (key, api_version) == (SASL_HANDSHAKE, 0)
        is_young = is_young and key in (SASL_HANDSHAKE, ASKS_VERSIONS)
        if not is_reserved(header.correlation_id):
            last_id = header.correlation_id
        kind = EXPECTS
        if grade == GOOD:
            if identity(header) not in clients and len(clients) < CLIENTS_MAX:
                clients.append(identity(header))
            if key == 0 and acks(stream, pos, header) == 0:
                kind = SILENT
        frames.append(Frame(pos, size, key, api_version, header.correlation_id, kind))
        pos += 4 + size
    return frames


# ---- responses ----


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


def is_near(asked: Sequence[Request], first: int, correlation_id: int, last_id: int | None) -> bool:
    if last_id is not None:
        if rises(correlation_id, last_id, STEP_MAX) or rises(last_id, correlation_id, FALL_MAX):
            return True
    others = [one for one in asked[first : first + WINDOW] if one.kind != TOKEN]
    return bool(others) and abs(others[0].correlation_id - correlation_id) <= STEP_MAX


def frame_responses(stream: PlainStream, limit: int, asked: Sequence[Request]) -> list[Frame]:
    frames: list[Frame] = []
    last_id = stream.last_id
    first = pos = 0
    certain, in_tokens = stream.has_origin, stream.is_in_tokens
    is_young = stream.was_young or not stream.is_resumed

    def speaks_at(at: int) -> bool:
        def is_response(place: int) -> bool:
            points = response_points(stream, place, limit, asked, first, last_id)
            return points >= LOCK_POINTS

        size = stream.number(at, 4)
        if is_young and size is not None and stream.is_piece(at, at + 4 + size):
            if is_broker_token(stream, at, size):
                return True
            now = stream.times[at] + CLOCK_SLACK_NS
            if size == 0 and token_asked(asked, first, now) is not None:
                return True
            if size == 0 and stream.byte(at + 4) is not None and is_response(at + 4):
                return True
        return is_response(at)

    while stream.next_byte(pos) is not None:
        if not certain:
            found = next(
                (
                    at
                    for at in range(pos, stream.end)
                    if stream.data[at] is not None and speaks_at(at)
                ),
                None,
            )
            if found is None:
                break
            pos, certain, in_tokens = found, True, is_young
        while first < len(asked) and asked[first].kind == SILENT:
            first += 1
        is_plausible, size, correlation_id = response_header(stream, pos, limit)
        if size is None:
            certain = False
            pos = stream.next_byte(pos) or 0
            continue
        row = None
        if correlation_id is not None:
            is_oldest = first < len(asked) and asked[first].kind == EXPECTS
            if is_oldest and asked[first].correlation_id == correlation_id:
                row = first
            else:
                until = stream.times[pos] + CERTAIN_SLACK_NS
                row = find_asked(asked, first, correlation_id, until)
        has_header = is_plausible and correlation_id is not None
        tells_mechanisms = has_header and is_mechanisms(stream, pos, size)
        tells = tells_mechanisms or (has_header and is_api_versions(stream, pos, size))
        kind = EXPECTS
        is_token = False
        if row is None and not (is_young and tells) and size <= TOKEN_SIZE_MAX:
            asked_token = first < len(asked) and asked[first].kind == TOKEN
            if is_young and size > 0 and is_broker_token(stream, pos, size):
                is_token = True
            elif is_young and size == 0:
                is_token = in_tokens or asked_token
            elif asked_token:
                number = -1 if correlation_id is None else correlation_id
                is_token = not is_plausible or not is_near(asked, first, number, last_id)
        if is_token:
            kind, correlation_id, accept = TOKEN, -1, True
            row = token_asked(asked, first, stream.times[pos] + CERTAIN_SLACK_NS)
        elif not RESPONSE_SIZE_MIN <= size <= limit:
            accept = False
        elif correlation_id is None:
            if pos + 4 + size > stream.end:
                break
            pos += 4 + size
            continue
        elif row is not None or (is_young and tells_mechanisms):
            accept = True
        else:
            accept = is_plausible
            if pos + 4 + size < stream.end:
                accept = response_header(stream, pos + 4 + size, limit)[0]
        if not accept:
            certain = False
            pos += 1
            continue
        assert correlation_id is not None
        if kind == EXPECTS:
            if not is_reserved(correlation_id):
                last_id = correlation_id
            in_tokens = is_young and tells_mechanisms
            is_young = is_young and tells
        if row is not None:
            first = row + 1
        frames.append(Frame(pos, size, -1, -1, correlation_id, kind))
        pos += 4 + size
    return frames
