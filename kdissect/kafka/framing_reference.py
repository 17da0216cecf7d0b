"""Framing as plain Python over one stream: the definition of `framing.py`.

Frames come out as tuples. The theory of operation is there and in `evidence.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kdissect.kafka.acks_reference import acks
from kdissect.kafka.evidence_reference import (
    CERTAIN_SLACK_NS,
    Kafka,
    find_asked,
    identity,
    is_api_versions,
    is_reserved,
    request_header,
    request_points,
    response_header,
    response_points,
    rises,
    token_asked,
)
from kdissect.kafka.frame_search import (
    ABSENT,
    CLIENTS_MAX,
    CLOCK_SLACK_NS,
    FAIR,
    FALL_MAX,
    GOOD,
    LOCK_POINTS,
    NEVER,
    POOR,
    RESPONSE_SIZE_MIN,
    SASL_HANDSHAKE,
    STEP_MAX,
    WINDOW,
)
from kdissect.kafka.frame_tables import EXPECTS, SILENT, TOKEN
from kdissect.kafka.framing import ASKS_VERSIONS, TOKEN_SIZE_MAX
from kdissect.kafka.pairing_reference import Request
from kdissect.kafka.sasl_evidence_reference import is_broker_token, is_client_token, is_mechanisms
from kdissect.tcp.pieces_reference import PlainStream


class Frame(NamedTuple):
    pos: int
    size: int
    key: int
    api_version: int
    correlation_id: int
    kind: int


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
