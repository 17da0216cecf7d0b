"""Pairing of requests and responses by searching lists.

A broker answers the requests of a connection in their order (Kafka's protocol guide, "Network"). A
request waits, wants no answer (Produce with acks=0), or had its answer in a break.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

EXPECTS, TOKEN, SILENT = 0, 1, 2  # kinds of a request
IN_ORDER, OUT_OF_ORDER, SECOND, UNASKED = 0, 1, 2, 3  # how a response came
CLOCKS_APART_NS = 10**9  # clocks of two taps
TOKENS_AHEAD = 64


class PairStatus(IntEnum):
    """The numbers of `exchanges.status`, in the order of `docs/tables.md`."""

    PAIRED = 0
    NO_RESPONSE_EXPECTED = 1
    REQUEST_MISSING = 2
    RESPONSE_MISSING = 3
    CONNECTION_CLOSED = 4


class Request(NamedTuple):
    correlation_id: int
    time_ns: int
    kind: int  # EXPECTS, TOKEN, SILENT
    place: int = 1  # in the capture


class Response(NamedTuple):
    correlation_id: int
    time_ns: int
    kind: int  # EXPECTS or TOKEN
    is_behind_break: bool = False
    place: int = 0


def may_answer(requests: Sequence[Request], row: int, response: Response) -> bool:
    """A request comes before its response, by place or clock. The clocks of two taps differ, but
    then it has no neighbour's id, and an id at all."""
    time_ns = response.time_ns
    is_before = requests[row].time_ns <= time_ns or requests[row].place <= response.place
    if is_before or requests[row].kind == TOKEN:
        return is_before
    neighbours = [*requests[max(0, row - 1) : row], *requests[row + 1 : row + 2]]
    own = all(other.correlation_id != requests[row].correlation_id for other in neighbours)
    return own and requests[row].time_ns <= time_ns + CLOCKS_APART_NS


def pair(
    requests: Sequence[Request], responses: Sequence[Response], is_closed: bool
) -> tuple[list[int], list[PairStatus], list[int], list[bool]]:
    """Of one connection: the response of each request (-1 none), its status, how each response
    came, and whose answer was in a break."""
    answer_of = [-1] * len(requests)
    is_lost = [False] * len(requests)
    status = [PairStatus.RESPONSE_MISSING] * len(requests)
    came = []
    highest = -1

    for answer, response in enumerate(responses):
        wanted = TOKEN if response.kind == TOKEN else EXPECTS
        is_behind = response.is_behind_break
        waiting = [row for row in range(len(requests)) if answer_of[row] < 0 and not is_lost[row]]
        found = -1
        if wanted == TOKEN and is_behind:
            for row in waiting:
                if highest < row <= highest + TOKENS_AHEAD and requests[row].kind == TOKEN:
                    if not may_answer(requests, row, response):
                        break
                    found = row
        elif wanted == TOKEN:
            oldest = [row for row in waiting if requests[row].kind != SILENT][:1]
            if oldest and requests[oldest[0]].kind == TOKEN:
                row = oldest[0]
                found = row if may_answer(requests, row, response) else -1
        else:
            same = [
                row
                for row in waiting
                if requests[row].kind != TOKEN
                and requests[row].correlation_id == response.correlation_id
                and may_answer(requests, row, response)
            ]
            expecting = [row for row in same if requests[row].kind == EXPECTS]
            in_order = [row for row in expecting if row > highest]
            if is_behind and in_order:
                found = in_order[-1]
            else:
                found = next(iter(expecting or same), -1)
        if is_behind:
            for row in waiting:
                if highest < row < found and requests[row].kind != SILENT:
                    is_lost[row] = True
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
        status[found] = PairStatus.PAIRED
    for row, request in enumerate(requests):
        if answer_of[row] < 0:
            if is_lost[row]:
                status[row] = PairStatus.RESPONSE_MISSING
            elif request.kind == SILENT:
                status[row] = PairStatus.NO_RESPONSE_EXPECTED
            elif is_closed and row > highest:
                status[row] = PairStatus.CONNECTION_CLOSED
    return answer_of, status, came, is_lost
