"""Requests with their responses, by correlation id and order, many in flight.

Theory of operation
-------------------
A broker answers the requests of a connection in order; so a response belongs to the first request
with its id that is not answered yet, nearly always the oldest one. Ids repeat and wrap, which
changes nothing: the order decides. A request that is passed over keeps waiting; an answer that
comes for it later is out of order. SASL tokens carry no id and pair in order among themselves.

Where bytes in front of a response are in no frame, a *hole*, the order says more. Answers were in
it, so requests that are passed over there are LOST: their answers were in the hole, and what comes
later with their id answers a later request. And as no client has two requests with the same id (or
two tokens) in flight at once, a response behind a hole belongs to the youngest one it can belong
to, not to the oldest: those before had their answers in the hole.

An id with a later request that was not sent yet does not count: the same id belonged to a request
that was not captured. Clocks of two taps differ, so a request with an id of its own may appear up
to CLOCKS_MAX_NS later than its response (an anomaly says so); one whose id its neighbour shares
must come first, and one that the response's segment does not acknowledge was not there yet. (Made
captures may have acknowledgements that mean nothing: they count where any of the connection's
reaches a request.)

What becomes of a request is the table PAIRING, by its state and what happens next. OUTSTANDING
waits, SILENT asked for no answer (Produce with acks=0), ANSWERED has one, LOST had one in a hole,
UNKNOWN was not seen.
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
import numpy.typing as npt

from kdissect.jit import inlined, kernel
from kdissect.kafka.assembly import PairStatus
from kdissect.kafka.frame_tables import SILENT as SILENT_KIND
from kdissect.kafka.frame_tables import TOKEN as TOKEN_KIND
from kdissect.tcp.byte_ranges import int64

CLOCKS_MAX_NS = 1_000_000_000
TOKENS_AHEAD_MAX = 64  # requests behind the last one answered that are looked at for a token
BUCKETS_MIN = 16  # of the table of ids
CHAIN_MAX = 1024  # requests with the same id (or its bucket) that are looked at for a response


class PairState(IntEnum):
    """Of the request with a response's id, before the event."""

    UNKNOWN = 0
    OUTSTANDING = 1
    SILENT = 2
    ANSWERED = 3
    LOST = 4


class Event(IntEnum):
    RESPONSE = 0
    CLOSE = 1  # FIN, RST or a reused port, before any answer
    LOSS = 2  # the answer lies in a gap of the response stream, or the capture ended before it


# Status of the exchange that the event makes or ends.
PAIRING = {
    (PairState.UNKNOWN, Event.RESPONSE): PairStatus.REQUEST_MISSING,
    (PairState.OUTSTANDING, Event.RESPONSE): PairStatus.PAIRED,
    (PairState.SILENT, Event.RESPONSE): PairStatus.PAIRED,
    (PairState.ANSWERED, Event.RESPONSE): PairStatus.REQUEST_MISSING,  # and an anomaly
    (PairState.LOST, Event.RESPONSE): PairStatus.REQUEST_MISSING,
    (PairState.LOST, Event.CLOSE): PairStatus.RESPONSE_MISSING,
    (PairState.LOST, Event.LOSS): PairStatus.RESPONSE_MISSING,
    (PairState.OUTSTANDING, Event.CLOSE): PairStatus.CONNECTION_CLOSED,
    (PairState.OUTSTANDING, Event.LOSS): PairStatus.RESPONSE_MISSING,
    (PairState.SILENT, Event.CLOSE): PairStatus.NO_RESPONSE_EXPECTED,
    (PairState.SILENT, Event.LOSS): PairStatus.NO_RESPONSE_EXPECTED,
}
EVENTS = len(Event)
STATUS = tuple(
    int(PAIRING.get((state, event), 255)) for state in PairState for event in Event
)  # by state * EVENTS + event

_RESPONSE, _CLOSE, _LOSS = (int(event) for event in Event)
_UNKNOWN, _OUTSTANDING, _SILENT, _ANSWERED, _LOST = (int(state) for state in PairState)

IN_ORDER, OUT_OF_ORDER, SECOND, UNASKED = 0, 1, 2, 3  # how a response came


# Of a request, in answer_of while a connection is paired; else -1 or a response.
WAITING, IS_LOST, WAS_ANSWERED = -1, -2, -3

NOT_ACKNOWLEDGED = (
    -1
)  # acknowledgement of a response whose segment has none, or one that says nothing


@inlined
def _may_answer(
    asked: Any, asked_end: Any, row: int, start: int, stop: int, time: int, acked: int
) -> bool:
    """Whether a response of this time can belong to the request `row`, as clocks go."""
    if asked.time[row] <= time:
        return True
    if asked.time[row] > time + CLOCKS_MAX_NS:
        return False
    shared = (row > start and asked.correlation[row - 1] == asked.correlation[row]) or (
        row + 1 < stop and asked.correlation[row + 1] == asked.correlation[row]
    )
    return not shared and asked_end[row] <= acked


@inlined
def _unwrapped(number: int, near: int) -> int:
    """The position near `near` whose lowest 32 bits are `number`."""
    return near + ((number - near + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def bucket_count(asked_start: npt.NDArray[np.int64]) -> int:
    """How many buckets `pair` needs: a power of two, for the connection with most requests."""
    longest = int(np.diff(asked_start).max(initial=0))
    return max(BUCKETS_MIN, 1 << max(0, longest - 1).bit_length())


@kernel
def pair(
    asked: Any, asked_end: Any, asked_start: Any, is_done: Any, answer_id: Any, answer_kind: Any,
    answer_time: Any, answer_ack: Any, is_behind_hole: Any, answer_start: Any, is_closed: Any,
    has_loss: Any, answer_of: Any, request_of: Any, status: Any, came: Any, is_lost: Any, head: Any,
    tail: Any, behind: Any,
) -> None:  # fmt: skip
    """Pair the requests and responses of each connection.

    asked: the requests of all connections in stream order; those of a connection are
    asked_start[c]:asked_start[c + 1]. asked_end int64: where they end in their streams. is_done
    uint8: what was answered by a response that is not among these. answer_id, answer_kind,
    answer_time, answer_start: the responses likewise; answer_ack int64: position in the request
    stream, modulo 2^32, that the segment acknowledges, or NOT_ACKNOWLEDGED. is_behind_hole
    uint8: bytes directly before it are in no frame. is_closed, has_loss uint8: of each connection,
    whether it was seen closing and whether bytes of its response stream are missing.
    Fills answer_of int64 (-1: none), status uint8, is_lost uint8 (its answer was in a hole) of each
    request, request_of int64 (-1: none) and came uint8 of each response.
    head, tail: int64[bucket_count(asked_start)], and behind: int64 of each request (the next one of
    the same bucket) are room for the table, whatever is in them.
    """
    for connection in range(len(asked_start) - 1):
        start = asked_start[connection]
        stop = asked_start[connection + 1]
        size = BUCKETS_MIN
        while size < stop - start:
            size *= 2
        mask = size - 1
        chained = start  # requests before it are in the buckets
        used_buckets = False
        first = start  # requests before it are answered or SILENT or LOST
        highest = start - 1  # the last request answered
        for row in range(start, stop):
            answer_of[row] = WAITING
            is_lost[row] = 0
            if is_done[row]:
                answer_of[row] = WAS_ANSWERED
                highest = row
        acked = int64(0)  # so far
        reach = int64(0)  # the highest of all
        for answer in range(answer_start[connection], answer_start[connection + 1]):
            if answer_ack[answer] != NOT_ACKNOWLEDGED:
                acked = _unwrapped(answer_ack[answer], acked)
                reach = max(reach, acked)
        tells_acks = start < stop and reach >= asked_end[start]
        acked = int64(0)
        for answer in range(answer_start[connection], answer_start[connection + 1]):
            correlation = answer_id[answer]
            time = answer_time[answer]
            kind = answer_kind[answer]
            hole = is_behind_hole[answer] != 0
            if answer_ack[answer] != NOT_ACKNOWLEDGED:
                acked = _unwrapped(answer_ack[answer], acked)
            told = tells_acks and answer_ack[answer] != NOT_ACKNOWLEDGED
            here = acked if told else int64(1 << 62)
            while first < stop and (
                answer_of[first] != WAITING or asked.kind[first] == SILENT_KIND
            ):
                first += 1
            row = int64(-1)
            seen = False
            if kind == TOKEN_KIND and hole:
                for candidate in range(highest + 1, min(stop, highest + 1 + TOKENS_AHEAD_MAX)):
                    if asked.kind[candidate] != TOKEN_KIND or answer_of[candidate] != WAITING:
                        continue
                    if not _may_answer(asked, asked_end, candidate, start, stop, time, here):
                        break
                    row = candidate
            elif (
                not hole
                and first < stop
                and asked.kind[first] == kind
                and (kind == TOKEN_KIND or asked.correlation[first] == correlation)
            ):
                if _may_answer(asked, asked_end, first, start, stop, time, here):
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
                before = int64(-1)  # in the chain
                silent = int64(-1)
                for _ in range(CHAIN_MAX):
                    if candidate < 0:
                        break
                    after = behind[candidate]
                    is_kept = True
                    if asked.correlation[candidate] == correlation:
                        if answer_of[candidate] != WAITING:
                            # One answered request of an id is enough, and none that is lost.
                            is_kept = answer_of[candidate] != IS_LOST and not seen
                            seen |= answer_of[candidate] != IS_LOST
                        elif _may_answer(asked, asked_end, candidate, start, stop, time, here):
                            if asked.kind[candidate] != SILENT_KIND:
                                if row < 0 or candidate > highest:
                                    row = candidate
                                if not hole:
                                    break
                            elif silent < 0:
                                silent = candidate
                    if is_kept:
                        before = candidate
                    else:
                        if before < 0:
                            head[at] = after
                        else:
                            behind[before] = after
                        if tail[at] == candidate:
                            tail[at] = before
                    candidate = after
                if row < 0:
                    row = silent
            if hole:
                # Answers come in order: what waits between these was answered in the hole.
                for candidate in range(highest + 1, row):
                    if answer_of[candidate] == WAITING and asked.kind[candidate] != SILENT_KIND:
                        answer_of[candidate] = IS_LOST
                        is_lost[candidate] = 1
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
            if answer_of[row] == IS_LOST:
                state = _LOST
            answer_of[row] = -1
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
