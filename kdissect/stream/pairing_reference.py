"""Pairing as plain Python: the definition that `pairing.pair` is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kdissect.stream.framing import EXPECTS, SILENT, TOKEN
from kdissect.stream.index import PairStatus
from kdissect.stream.pairing import (
    CLOCKS_MAX_NS,
    IN_ORDER,
    OUT_OF_ORDER,
    PAIRING,
    SECOND,
    UNASKED,
    Event,
    State,
)  # fmt: skip


class Request(NamedTuple):
    correlation_id: int
    time_ns: int
    kind: int  # EXPECTS, TOKEN, SILENT


class Response(NamedTuple):
    correlation_id: int
    time_ns: int
    kind: int  # EXPECTS or TOKEN


def may_answer(requests: Sequence[Request], row: int, time_ns: int) -> bool:
    """A request is not younger than its response, but for clocks; never with a neighbour's id."""
    if requests[row].time_ns <= time_ns:
        return True
    neighbours = [*requests[max(0, row - 1) : row], *requests[row + 1 : row + 2]]
    own = all(other.correlation_id != requests[row].correlation_id for other in neighbours)
    return own and requests[row].time_ns <= time_ns + CLOCKS_MAX_NS


def pair(
    requests: Sequence[Request], responses: Sequence[Response], is_closed: bool, has_loss: bool
) -> tuple[list[int], list[PairStatus], list[int]]:
    """Of one connection: the response of each request (-1 none), its status, and how each came."""
    answer_of = [-1] * len(requests)
    status = [PairStatus.RESPONSE_MISSING] * len(requests)
    came = []
    highest = -1
    for answer, response in enumerate(responses):
        wanted = TOKEN if response.kind == TOKEN else EXPECTS
        waiting = [row for row in range(len(requests)) if answer_of[row] < 0]
        found = -1
        if wanted == TOKEN:
            oldest = [row for row in waiting if requests[row].kind != SILENT][:1]
            if oldest and requests[oldest[0]].kind == TOKEN:
                found = next((r for r in oldest if may_answer(requests, r, response.time_ns)), -1)
        else:
            same = [
                row
                for row in waiting
                if requests[row].kind != TOKEN
                and requests[row].correlation_id == response.correlation_id
                and may_answer(requests, row, response.time_ns)
            ]
            expecting = [row for row in same if requests[row].kind == EXPECTS]
            found = next(iter(expecting or same), -1)
        if found < 0:
            seen = wanted == EXPECTS and any(
                answer_of[row] >= 0
                and requests[row].kind != TOKEN
                and requests[row].correlation_id == response.correlation_id
                for row in range(len(requests))
            )
            came.append(SECOND if seen else UNASKED)
            continue
        came.append(IN_ORDER if found > highest else OUT_OF_ORDER)
        highest = max(highest, found)
        answer_of[found] = answer
        state = State.SILENT if requests[found].kind == SILENT else State.OUTSTANDING
        status[found] = PAIRING[state, Event.RESPONSE]
    for row, request in enumerate(requests):
        if answer_of[row] < 0:
            state = State.SILENT if request.kind == SILENT else State.OUTSTANDING
            lost = has_loss and row < highest
            status[row] = PAIRING[state, Event.CLOSE if is_closed and not lost else Event.LOSS]
    return answer_of, status, came
