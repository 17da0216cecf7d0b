"""Pairs requests with their responses, by correlation id and order, many in flight.

Theory of operation
-------------------
A broker answers the requests of a connection in order. So a response belongs to the first request
with its id that is not answered yet, nearly always the oldest one. Ids repeat and wrap, which
changes nothing: the order decides. A request that is passed over keeps waiting; a response that
comes for it later is out of order. SASL tokens carry no id and pair in order among themselves.

If bytes before a response are in no frame, a *hole*, the order says more. Responses were in it, so
requests that are passed over there are LOST: a later response with their id answers a later
request. And as no client has two requests with the same id (or two tokens) in flight at once, a
response after a hole belongs to the youngest request it can belong to: those before had their
responses in the hole.

A later request with the id that was not sent yet does not count: the id belonged to a request that
was not captured. Clocks of two taps differ, so a request with an id of its own may appear up to
CLOCKS_MAX_NS later than its response (an anomaly says so). One whose id its neighbour shares must
come first, and one that the response's segment does not acknowledge was not there yet. (Made
captures may have acknowledgements that mean nothing: they count if any of the connection's reaches
a request.)

The table PAIRING says what becomes of a request, by its state and the next event. OUTSTANDING
waits, SILENT wants no response (Produce with acks=0), ANSWERED has one, LOST had one in a hole,
UNKNOWN was not captured. After the last response, a closed connection is the reason for a missing
response. Before it, if bytes of the response stream are missing, the capture lost the response.

Lookup: a request waits in a chain of its id's bucket, in order. Ids that are answered in order are
found without the table. So the time is linear, for any ids that do not collide, and a bucket is
searched CHAIN_MAX deep at most.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kdissect.capture.scratch import Scratch
from kdissect.jit import inlined, kernel
from kdissect.kafka.assembly import PairStatus
from kdissect.kafka.frame_tables import SILENT as SILENT_KIND
from kdissect.kafka.frame_tables import TOKEN as TOKEN_KIND
from kdissect.tcp.byte_ranges import int64

CLOCKS_MAX_NS = 1_000_000_000
TOKENS_AHEAD_MAX = 64  # requests after the last answered one that are searched for a token
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
WAITING, IS_LOST = -1, -2

NOT_ACKNOWLEDGED = -1  # of a response whose segment acknowledges nothing


@inlined
def _may_answer(requests: Any, row: int, start: int, stop: int, time: int, acked: int) -> bool:
    """Return whether a response of this time can belong to the request `row`, as clocks go."""
    request = requests[row]
    if request["time"] <= time:
        return True
    if request["time"] > time + CLOCKS_MAX_NS:
        return False
    correlation = request["correlation"]
    if row > start and requests[row - 1]["correlation"] == correlation:
        return False
    if row + 1 < stop and requests[row + 1]["correlation"] == correlation:
        return False
    return request["end"] <= acked


@inlined
def _unwrapped(number: int, near: int) -> int:
    """The position near `near` whose lowest 32 bits are `number`."""
    return near + ((number - near + 0x80000000) & 0xFFFFFFFF) - 0x80000000


ANSWERS = np.dtype([
    ("correlation", "i8"),
    ("time", "i8"),
    ("kind", "i8"),
    # position in the request stream, modulo 2^32, that its segment acknowledges, or
    # NOT_ACKNOWLEDGED
    ("acknowledged", "i8"),
    ("is_behind_hole", "i8"),  # bytes before it are in no frame
])  # fmt: skip


class RequestRows(NamedTuple):
    """The requests of all connections in stream order; those of connection c are rows start[c] to
    start[c + 1]. rows: PENDING[n].

    `pair` fills answer_of (-1: none), status and is_lost (its response was in a hole).
    """

    rows: npt.NDArray[np.void]
    start: npt.NDArray[np.int64]
    answer_of: npt.NDArray[np.int64]
    status: npt.NDArray[np.uint8]
    is_lost: npt.NDArray[np.uint8]


class ResponseRows(NamedTuple):
    """The responses likewise. rows: ANSWERS[n]. `pair` fills request_of (-1: none) and came."""

    rows: npt.NDArray[np.void]
    start: npt.NDArray[np.int64]
    request_of: npt.NDArray[np.int64]
    came: npt.NDArray[np.uint8]


class Buckets(NamedTuple):
    """Room for the chains of waiting requests: first and last of each bucket, and of each request
    the next one of its bucket."""

    head: npt.NDArray[np.int64]
    tail: npt.NDArray[np.int64]
    following: npt.NDArray[np.int64]


def buckets_for(start: npt.NDArray[np.int64], scratch: Scratch) -> Buckets:
    """Buckets for `RequestRows.start`: a power of two, for the connection with most requests."""
    longest = int(np.diff(start).max(initial=0))
    count = max(BUCKETS_MIN, 1 << max(0, longest - 1).bit_length())
    return Buckets(*(scratch.empty(size, np.int64) for size in (count, count, int(start[-1]))))


@kernel
def pair(requests: Any, responses: Any, is_closed: Any, has_loss: Any, buckets: Any) -> None:
    """Pair the RequestRows and ResponseRows of each connection, and fill their references.

    is_closed, has_loss uint8: by connection, whether its end was captured, and whether bytes of
    its responses are missing. buckets: `Buckets`, whatever is in them.
    """
    pending, answers = requests.rows, responses.rows
    answer_of, status, is_lost = requests.answer_of, requests.status, requests.is_lost
    head, tail, following = buckets.head, buckets.tail, buckets.following
    for connection in range(len(requests.start) - 1):
        start = requests.start[connection]
        stop = requests.start[connection + 1]
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
        acked = int64(0)  # so far
        reach = int64(0)  # the highest of all
        for answer in range(responses.start[connection], responses.start[connection + 1]):
            response = answers[answer]
            if response["acknowledged"] != NOT_ACKNOWLEDGED:
                acked = _unwrapped(response["acknowledged"], acked)
                reach = max(reach, acked)
        tells_acks = start < stop and reach >= pending[start]["end"]
        acked = int64(0)
        for answer in range(responses.start[connection], responses.start[connection + 1]):
            response = answers[answer]
            correlation = response["correlation"]
            time = response["time"]
            kind = response["kind"]
            hole = response["is_behind_hole"] != 0
            if response["acknowledged"] != NOT_ACKNOWLEDGED:
                acked = _unwrapped(response["acknowledged"], acked)
            is_acknowledged = tells_acks and response["acknowledged"] != NOT_ACKNOWLEDGED
            here = acked if is_acknowledged else int64(1 << 62)
            while first < stop and (
                answer_of[first] != WAITING or pending[first]["kind"] == SILENT_KIND
            ):
                first += 1
            row = int64(-1)
            seen = False
            if kind == TOKEN_KIND and hole:
                for candidate in range(highest + 1, min(stop, highest + 1 + TOKENS_AHEAD_MAX)):
                    if pending[candidate]["kind"] != TOKEN_KIND or answer_of[candidate] != WAITING:
                        continue
                    if not _may_answer(pending, candidate, start, stop, time, here):
                        break
                    row = candidate
            elif (
                not hole
                and first < stop
                and pending[first]["kind"] == kind
                and (kind == TOKEN_KIND or pending[first]["correlation"] == correlation)
            ):
                if _may_answer(pending, first, start, stop, time, here):
                    row = first
            if row < 0 and kind != TOKEN_KIND:
                if not used_buckets:
                    used_buckets = True
                    for at in range(size):
                        head[at] = -1
                while chained < stop:
                    if pending[chained]["kind"] != TOKEN_KIND:
                        at = pending[chained]["correlation"] & mask
                        following[chained] = -1
                        if head[at] < 0:
                            head[at] = chained
                        else:
                            following[tail[at]] = chained
                        tail[at] = chained
                    chained += 1
                at = correlation & mask
                candidate = head[at]
                before = int64(-1)  # in the chain
                silent = int64(-1)
                for _ in range(CHAIN_MAX):
                    if candidate < 0:
                        break
                    after = following[candidate]
                    is_kept = True
                    if pending[candidate]["correlation"] == correlation:
                        if answer_of[candidate] != WAITING:
                            # One answered request of an id is enough, and none that is lost.
                            is_kept = answer_of[candidate] != IS_LOST and not seen
                            seen |= answer_of[candidate] != IS_LOST
                        elif _may_answer(pending, candidate, start, stop, time, here):
                            if pending[candidate]["kind"] != SILENT_KIND:
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
                            following[before] = after
                        if tail[at] == candidate:
                            tail[at] = before
                    candidate = after
                if row < 0:
                    row = silent
            if hole:
                # Answers come in order: what waits between these was answered in the hole.
                for candidate in range(highest + 1, row):
                    if (
                        answer_of[candidate] == WAITING
                        and pending[candidate]["kind"] != SILENT_KIND
                    ):
                        answer_of[candidate] = IS_LOST
                        is_lost[candidate] = 1
            responses.request_of[answer] = row
            if row < 0:
                responses.came[answer] = SECOND if seen else UNASKED
                continue
            responses.came[answer] = IN_ORDER if row > highest else OUT_OF_ORDER
            highest = max(highest, row)
            answer_of[row] = answer
            status[row] = STATUS[_OUTSTANDING * EVENTS + _RESPONSE]
        for row in range(start, stop):
            if answer_of[row] >= 0:
                continue
            state = _SILENT if pending[row]["kind"] == SILENT_KIND else _OUTSTANDING
            if answer_of[row] == IS_LOST:
                state = _LOST
            answer_of[row] = -1
            lost = row < highest and has_loss[connection] != 0
            event = _CLOSE if is_closed[connection] and not lost else _LOSS
            status[row] = STATUS[state * EVENTS + event]


@kernel
def in_order(
    requests: Any, responses: Any, request_segment: Any, response_segment: Any,
    exchange_request: Any, exchange_response: Any,
) -> int:  # fmt: skip
    """Exchanges by connection and first byte: fills their request and response rows; the count.

    Requests keep the order of their stream. Responses without a request stand before the first
    request that was captured after them (segments are numbered in assembly order).
    """
    count = 0
    for connection in range(len(requests.start) - 1):
        answer = responses.start[connection]
        end = responses.start[connection + 1]
        for row in range(requests.start[connection], requests.start[connection + 1] + 1):
            is_last = row == requests.start[connection + 1]
            while answer < end and (
                responses.request_of[answer] >= 0
                or is_last
                or response_segment[answer] < request_segment[row]
            ):
                if responses.request_of[answer] < 0:
                    exchange_request[count] = -1
                    exchange_response[count] = answer
                    count += 1
                answer += 1
            if not is_last:
                exchange_request[count] = row
                exchange_response[count] = requests.answer_of[row]
                count += 1
    return count
