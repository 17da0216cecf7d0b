"""Requests with their responses, by correlation id and order, many in flight.

Theory of operation
-------------------
A broker answers the requests of a connection in order; so a response belongs to the first request
with its id that is not answered yet, nearly always the oldest one. Ids repeat and wrap, which
changes nothing: the order decides. A request that is passed over keeps waiting; an answer that
comes for it later is out of order. SASL tokens carry no id and pair in order among themselves.

An id with a later request that was not sent yet does not count: the same id belonged to a request
that was not captured. Clocks of two taps differ, so a request with an id of its own may appear up
to CLOCKS_MAX_NS later than its response (an anomaly says so); one whose id its neighbour shares
must come first.

What becomes of a request is the table PAIRING, by its state and what happens next. OUTSTANDING
waits, SILENT asked for no answer (Produce with acks=0), ANSWERED has one, UNKNOWN was not seen.
Behind the last response a closed connection is why the answer never came. Before it, when bytes of
the response stream are missing, the answer was lost in the capture.

Lookup: a request waits in a chain of its id's bucket, in order; ids that are answered in order are
found without a look at the table. So the time is linear, for any ids that do not collide, and a
bucket is searched CHAIN_MAX deep at most.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from kdissect.accelerate import inlined, kernel
from kdissect.stream.framing import SILENT as SILENT_KIND
from kdissect.stream.framing import TOKEN as TOKEN_KIND
from kdissect.stream.index import PairStatus
from kdissect.stream.pieces import int64

CLOCKS_MAX_NS = 1_000_000_000
CHAIN_MAX = 1024  # requests with the same id (or its bucket) that are looked at for a response


class State(IntEnum):
    """Of the request with a response's id, before the event."""

    UNKNOWN = 0
    OUTSTANDING = 1
    SILENT = 2
    ANSWERED = 3


class Event(IntEnum):
    RESPONSE = 0
    CLOSE = 1  # FIN, RST or a reused port, before any answer
    LOSS = 2  # the answer lies in a gap of the response stream, or the capture ended before it


# Status of the exchange that the event makes or ends.
PAIRING = {
    (State.UNKNOWN, Event.RESPONSE): PairStatus.REQUEST_MISSING,
    (State.OUTSTANDING, Event.RESPONSE): PairStatus.PAIRED,
    (State.SILENT, Event.RESPONSE): PairStatus.PAIRED,
    (State.ANSWERED, Event.RESPONSE): PairStatus.REQUEST_MISSING,  # and an anomaly
    (State.OUTSTANDING, Event.CLOSE): PairStatus.CONNECTION_CLOSED,
    (State.OUTSTANDING, Event.LOSS): PairStatus.RESPONSE_MISSING,
    (State.SILENT, Event.CLOSE): PairStatus.NO_RESPONSE_EXPECTED,
    (State.SILENT, Event.LOSS): PairStatus.NO_RESPONSE_EXPECTED,
}
EVENTS = len(Event)
STATUS = tuple(
    int(PAIRING.get((state, event), 255)) for state in State for event in Event
)  # by state * EVENTS + event

_RESPONSE, _CLOSE, _LOSS = (int(event) for event in Event)
_UNKNOWN, _OUTSTANDING, _SILENT, _ANSWERED = (int(state) for state in State)

IN_ORDER, OUT_OF_ORDER, SECOND, UNASKED = 0, 1, 2, 3  # how a response came


@inlined
def _may_answer(asked: Any, row: int, start: int, stop: int, time: int) -> bool:
    """Whether a response of this time can belong to the request `row`, as clocks go."""
    if asked.time[row] <= time:
        return True
    if asked.time[row] > time + CLOCKS_MAX_NS:
        return False
    shared = (row > start and asked.correlation[row - 1] == asked.correlation[row]) or (
        row + 1 < stop and asked.correlation[row + 1] == asked.correlation[row]
    )
    return not shared


@kernel
def pair(
    asked: Any, asked_start: Any, answer_id: Any, answer_kind: Any, answer_time: Any,
    answer_start: Any, is_closed: Any, has_loss: Any, answer_of: Any, request_of: Any, status: Any,
    came: Any,
) -> None:  # fmt: skip
    """Pair the requests and responses of each connection.

    asked: the requests of all connections in stream order; those of a connection are
    asked_start[c]:asked_start[c + 1]. answer_id, answer_kind, answer_time, answer_start: the
    responses likewise. is_closed, has_loss uint8: of each connection, whether it was seen closing
    and whether bytes of its response stream are missing.
    Fills answer_of int64 (-1: none), status uint8 of each request, request_of int64 (-1: none) and
    came uint8 of each response.
    """
    longest = 0
    for connection in range(len(asked_start) - 1):
        longest = max(longest, asked_start[connection + 1] - asked_start[connection])
    size = 16
    while size < 2 * longest:
        size *= 2
    head = np.empty(size, np.int64)
    tail = np.empty(size, np.int64)
    behind = np.empty(len(answer_of), np.int64)  # next request of the same bucket
    for connection in range(len(asked_start) - 1):
        start = asked_start[connection]
        stop = asked_start[connection + 1]
        size = 16
        while size < 2 * (stop - start):
            size *= 2
        mask = size - 1
        chained = start  # requests before it are in the buckets
        used_buckets = False
        for row in range(start, stop):
            answer_of[row] = -1
        first = start  # requests before it are answered or SILENT or passed over
        highest = start - 1  # the last request answered
        for answer in range(answer_start[connection], answer_start[connection + 1]):
            correlation = answer_id[answer]
            time = answer_time[answer]
            kind = answer_kind[answer]
            while first < stop and (answer_of[first] >= 0 or asked.kind[first] == SILENT_KIND):
                first += 1
            row = int64(-1)
            seen = False
            if (
                first < stop
                and asked.kind[first] == kind
                and (kind == TOKEN_KIND or asked.correlation[first] == correlation)
            ):
                if _may_answer(asked, first, start, stop, time):
                    row = first
            if row < 0 and kind != TOKEN_KIND:
                if not used_buckets:
                    used_buckets = True
                    head[:size] = -1
                while chained < stop:
                    if asked.kind[chained] != TOKEN_KIND:
                        at = asked.correlation[chained] & mask
                        behind[chained] = -1
                        if head[at] < 0:
                            head[at] = chained
                        else:
                            behind[tail[at]] = chained
                        tail[at] = chained
                    chained += 1
                at = correlation & mask
                candidate = head[at]
                silent = int64(-1)
                for _ in range(CHAIN_MAX):
                    if candidate < 0:
                        break
                    if asked.correlation[candidate] == correlation:
                        if answer_of[candidate] >= 0:
                            seen = True
                            after = behind[candidate]
                            if (
                                candidate == head[at]
                                and after >= 0
                                and asked.correlation[after] == correlation
                                and answer_of[after] >= 0
                            ):
                                head[at] = after  # one answered request of an id is enough
                        elif _may_answer(asked, candidate, start, stop, time):
                            if asked.kind[candidate] != SILENT_KIND:
                                row = candidate
                                break
                            if silent < 0:
                                silent = candidate
                    candidate = behind[candidate]
                if row < 0:
                    row = silent
            request_of[answer] = row
            if row < 0:
                came[answer] = SECOND if seen else UNASKED
                continue
            came[answer] = IN_ORDER if row > highest else OUT_OF_ORDER
            highest = max(highest, row)
            answer_of[row] = answer
            status[row] = STATUS[_OUTSTANDING * EVENTS + _RESPONSE]
        for row in range(start, stop):
            if answer_of[row] >= 0:
                continue
            state = _SILENT if asked.kind[row] == SILENT_KIND else _OUTSTANDING
            lost = row < highest and has_loss[connection] != 0
            event = _CLOSE if is_closed[connection] and not lost else _LOSS
            status[row] = STATUS[state * EVENTS + event]


@kernel
def in_order(
    asked_start: Any, answer_start: Any, asked_segment: Any, answer_segment: Any, request_of: Any,
    answer_of: Any, exchange_request: Any, exchange_response: Any,
) -> int:  # fmt: skip
    """Exchanges by connection and first byte: fills their request and response rows; the count.

    Requests keep the order of their stream. Responses without a request stand before the first
    request that was captured behind them (segments are numbered in assembly order).
    """
    count = 0
    for connection in range(len(asked_start) - 1):
        answer = answer_start[connection]
        end = answer_start[connection + 1]
        for row in range(asked_start[connection], asked_start[connection + 1] + 1):
            is_last = row == asked_start[connection + 1]
            while answer < end and (
                request_of[answer] >= 0 or is_last or answer_segment[answer] < asked_segment[row]
            ):
                if request_of[answer] < 0:
                    exchange_request[count] = -1
                    exchange_response[count] = answer
                    count += 1
                answer += 1
            if not is_last:
                exchange_request[count] = row
                exchange_response[count] = answer_of[row]
                count += 1
    return count
