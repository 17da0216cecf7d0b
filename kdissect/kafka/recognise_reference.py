"""Recognising a protocol as plain Python over two streams: the definition of `recognise.py`.

The rules and their order are at the top of that module; streams and headers are those of
`pieces_reference.py` and `evidence_reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdissect.kafka.acks_reference import may_be_produce
from kdissect.kafka.assembly import Protocol
from kdissect.kafka.detection import (
    PARTIAL_SIZE_MAX,
    REPLIES_LOOKED_AT,
    SEGMENTS_LOOKED_AT,
    TLS_RECORD_MAX,
    TOKENS_MAX,
)
from kdissect.kafka.evidence_reference import (
    Kafka,
    identity,
    is_api_versions,
    request_header,
    request_points,
    response_header,
    response_points,
    rises,
)
from kdissect.kafka.frame_search import (
    ABSENT,
    API_VERSIONS,
    FAIR,
    GOOD,
    KEYS,
    LOCK_POINTS,
    REQUEST_STEP_MAX,
    STEP_MAX,
)
from kdissect.kafka.framing import TOKEN_SIZE_MAX
from kdissect.kafka.sasl_evidence_reference import is_mechanisms
from kdissect.tcp.pieces_reference import PlainStream

METHODS = (b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"PATC", b"CONN", b"HTTP")
PATHS, PING, WATCH = b"/", 11, 2**32 - 1  # ZooKeeper's
OPCODE_MAX = 110


def text_protocol(stream: PlainStream, pos: int) -> Protocol:
    """HTTP or HTTP2 by the four bytes at `pos`."""
    word = bytes(stream.byte(at) or 0 for at in range(pos, pos + 4))
    if word in METHODS:
        return Protocol.HTTP
    return Protocol.HTTP2 if word == b"PRI " else Protocol.NONE


def is_tls(stream: PlainStream, pos: int) -> bool:
    """One record that begins with a hello, two records, or one that ends with the stream."""
    for seen in range(2):
        kind, version = stream.number(pos, 1), stream.number(pos + 1, 2)
        length = stream.number(pos + 3, 2)
        if kind is None or version is None or length is None:
            return seen > 0
        fits = 20 <= kind <= 23 and 0x0300 <= version <= 0x0304 and 0 < length <= TLS_RECORD_MAX
        if not fits:
            return False
        if kind == 22 and seen == 0 and stream.byte(pos + 5) in (1, 2):
            return True
        pos += 5 + length
        if pos >= stream.end:
            return pos == stream.end
    return True


def is_zookeeper(stream: PlainStream) -> bool:
    """A connect packet, a ping, or a request with a path among the first three frames."""
    pos = stream.next_byte(0)
    if pos is None:
        return False
    for _ in range(3):
        size, first, second = (stream.number(pos + at, 4) for at in (0, 4, 8))
        if size is None or first is None or second is None or size < 8:
            return False
        password = {44: 28, 45: 28, 36: 20, 37: 20}.get(size)
        if first == 0 and password is not None and stream.number(pos + password, 4) == 16:
            return True
        if (size, first, second) == (8, 2**32 - 2, PING):
            return True
        path = stream.number(pos + 12, 4)
        if path is not None and 0 < path <= size - 12 and second <= OPCODE_MAX:
            if stream.byte(pos + 16) == PATHS[0]:
                return True
        pos += 4 + size
        if pos >= stream.end:
            return False
    return False


def are_zookeeper_replies(stream: PlainStream, pos: int) -> bool:
    zxids: list[int] = []
    has_ping = False
    count = 0
    while count < REPLIES_LOOKED_AT and pos < stream.end:
        numbers = [stream.number(pos + at, 4) for at in (0, 4, 8, 12, 16)]
        if None in numbers:
            break
        size, xid, epoch, low, error = (number or 0 for number in numbers)
        if size < 16 or not (error == 0 or error > 0xFFFFFF00):
            return False
        if xid != WATCH:
            zxids.append(epoch << 32 | low)
            has_ping |= xid == 2**32 - 2 and size == 16
            if sorted(zxids) != zxids:
                return False
        count += 1
        pos += 4 + size
    return count >= 3 and (has_ping or all(0 < zxid >> 32 < 0x100000 for zxid in zxids))


def begins_with_requests(stream: PlainStream, kafka: Kafka, is_named: bool) -> bool:
    pos = stream.next_byte(0)
    if pos is None:
        return False
    for number in range(TOKENS_MAX + 1):
        header = request_header(stream, pos, kafka)
        grade, size = header.grade, header.size
        if is_named and grade == GOOD and (header.client or "").startswith("0 "):
            return False
        is_bare = (header.client or "0 ").startswith("0 ")
        if (
            grade == GOOD
            and header.key == 0
            and is_bare
            and not may_be_produce(stream, pos, header)
        ):
            return False
        if grade in (GOOD, FAIR):
            assert size is not None
            end = pos + 4 + size
            if end == stream.end:
                return not is_named or header.key != 0
            if end > stream.end:
                return grade == GOOD and size <= PARTIAL_SIZE_MAX
            following = request_header(stream, end, kafka)
            if following.grade == GOOD:
                assert header.correlation_id is not None
                assert following.correlation_id is not None
                is_next = rises(following.correlation_id, header.correlation_id, REQUEST_STEP_MAX)
                return not is_named or (identity(following) == identity(header) and is_next)
            begins = stream.has_origin and number == 0
            return grade == GOOD and (following.grade == ABSENT or begins)
        if grade == ABSENT:
            return (
                number == 0
                and header.key is not None
                and header.api_version is not None
                and header.key < KEYS
                and header.api_version < API_VERSIONS
                and (header.key, header.api_version) in kafka.known
                and 8 <= (size or 0) <= PARTIAL_SIZE_MAX
            )
        assert size is not None
        if not stream.has_origin or size > TOKEN_SIZE_MAX or pos + 4 + size >= stream.end:
            return False
        pos += 4 + size
    return False


def begins_with_responses(stream: PlainStream, limit: int) -> bool:
    is_plausible, size, first = response_header(stream, 0, limit)
    if not is_plausible or size is None or first is None or 4 + size > stream.end:
        return False
    if is_api_versions(stream, 0, size) or is_mechanisms(stream, 0, size):
        return True
    if not stream.has_origin or 4 + size == stream.end:
        return False
    is_plausible, behind, second = response_header(stream, 4 + size, limit)
    if not is_plausible or behind is None or second is None:
        return False
    return rises(second, first, STEP_MAX)


def speaks_kafka(
    requests: PlainStream, responses: PlainStream, kafka: Kafka, is_against_ports: bool
) -> Protocol:
    """Rules 4 and 5: by what a search finds in either direction, or how responses begin."""
    for at, byte in enumerate(requests.data):
        if byte is not None and request_points(requests, at, kafka, None, []) >= LOCK_POINTS:
            header = request_header(requests, at, kafka)
            assert header.size is not None
            is_alone = header.key == 0 and at + 4 + header.size >= requests.end
            if is_against_ports and is_alone:
                break
            return Protocol.KAFKA
    if begins_with_responses(responses, kafka.limit):
        return Protocol.KAFKA
    for at, byte in enumerate(responses.data):
        if byte is None:
            continue
        if response_points(responses, at, kafka.limit, [], 0, None) >= LOCK_POINTS:
            is_other = are_zookeeper_replies(responses, at)
            return Protocol.ZOOKEEPER if is_other else Protocol.KAFKA
    return Protocol.NONE


def recognise(
    streams: Sequence[PlainStream], told: int | None, guessed: int, is_hinted: bool, kafka: Kafka
) -> tuple[Protocol, int]:
    """(protocol, side of the client). told: the client by the handshake; guessed: by ports."""
    if not any(stream.end for stream in streams):
        return Protocol.NONE, guessed if told is None else told
    is_keeper = any(is_zookeeper(stream) for stream in streams)
    if not is_keeper:
        turns = [(guessed, True), (1 - guessed, True), (guessed, False)]
        for side, is_named in turns if told is None else [(told, False)]:
            if begins_with_requests(streams[side], kafka, is_named):
                return Protocol.KAFKA, side
    client = guessed if told is None else told
    if is_keeper:
        return Protocol.ZOOKEEPER, client
    for stream in streams:
        first = stream.next_byte(0)
        if first is not None and is_tls(stream, first):
            return Protocol.TLS, client
        if first == 0 and text_protocol(stream, 0):
            return text_protocol(stream, 0), client
    for side in (guessed, 1 - guessed) if told is None else (told,):
        is_against = told is None and side != guessed
        found = speaks_kafka(streams[side], streams[1 - side], kafka, is_against)
        if found:
            return found, side
    if is_hinted:
        return Protocol.KAFKA, client
    for stream in streams:
        for pos in sorted(stream.starts)[:SEGMENTS_LOOKED_AT]:
            found = text_protocol(stream, pos)
            if found or is_tls(stream, pos):
                return found or Protocol.TLS, client
    return Protocol.OTHER, client
