"""Pairs requests with their responses, by correlation id and order, many in flight.

Theory of operation
-------------------
A broker answers the requests of a connection in order. So a response belongs to the first request
with its id that is not answered yet, nearly always the oldest one. Ids come again after a while,
which changes nothing: the order decides. A request that is passed over keeps waiting; a response
that comes for it later is out of order. SASL tokens carry no id and pair in order among themselves.

The order says more after a *break*: bytes before a response that are in no frame. Responses were in
it, so requests that are passed over there are LOST: a later response with their id answers a later
request. No client has two requests with the same id (or two tokens) in flight at once. So a
response after a break belongs to the youngest request that it can answer: those before had their
responses in the break.

A response that no request can have asked for is UNASKED: its request was not captured. It is SECOND
if a request with its id was answered before. A request with its id that was sent later is not its
request. Clocks of two taps differ, so a request may appear up to CLOCKS_MAX_NS later than its
response (an anomaly says so). That holds for no token, and for no request whose neighbour has the
same id.

Produce with acks=0 wants no response. The response of a request before the last answered one is
missing, because it came before that answer. For later requests the reason is the closed connection.
Whether a response may be in bytes that the capture lacks is another question (`sql.requests`).

Lookup: a request waits in a chain of its id's bucket, in order. Ids that are answered in order are
found without the table. So the time is linear, for any ids that do not collide, and a bucket is
searched CHAIN_MAX deep at most.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kdissect.arrays import Bytes, Indices, Rows
from kdissect.capture.scratch import Scratch
from kdissect.jit import inlined, int64, kernel
from kdissect.kafka.assembly import PairStatus
from kdissect.kafka.exchanges import Frames
from kdissect.kafka.frame_tables import NO_BREAK, SILENT, TOKEN

CLOCKS_MAX_NS = 1_000_000_000  # by so much the clocks of two captures may differ
TOKENS_AHEAD_MAX = 64  # requests after the last answered one that are searched for a token
BUCKETS_MIN = 16  # of the table of ids
CHAIN_MAX = 1024  # requests with the same id (or its bucket) that are looked at for a response

IN_ORDER, OUT_OF_ORDER, SECOND, UNASKED = 0, 1, 2, 3  # how a response came: `outcome` of its frame


class Buckets(NamedTuple):
    """Room for the chains of waiting requests: first and last of each bucket, and of each request
    the next one of its bucket."""

    head: Indices
    tail: Indices
    following: Indices


def buckets_for(start: Indices, scratch: Scratch) -> Buckets:
    """Buckets for the requests of connections, which begin at rows `start`: a power of two, for
    the connection with most requests."""
    longest = int(np.diff(start).max(initial=0))
    count = max(BUCKETS_MIN, 1 << max(0, longest - 1).bit_length())
    return Buckets(*(scratch.empty(size, np.int64) for size in (count, count, int(start[-1]))))


class _Answer(NamedTuple):
    """A response while it is paired, and the requests of its connection: rows start to stop.

    highest: the last request answered before it. first: the segment of its first byte.
    """

    start: int
    stop: int
    highest: int
    correlation: int
    first: int
    time: int
    kind: int
    is_behind_break: bool


@inlined
def _waits(requests: Rows, row: int) -> bool:
    """Return whether a request has no answer yet, and had none in a break."""
    waits: bool = requests[row]["partner"] < 0 and requests[row]["is_lost"] == 0
    return waits


@inlined
def _may_answer(answer: _Answer, requests: Rows, row: int) -> bool:
    """Return whether a response can belong to the request `row`: it was captured later, or its
    clock says so."""
    request = requests[row]
    if request["first"] <= answer.first or request["time"] <= answer.time:
        return True
    if request["kind"] == TOKEN or request["time"] > answer.time + CLOCKS_MAX_NS:
        return False
    correlation = request["correlation"]
    if row > answer.start and requests[row - 1]["correlation"] == correlation:
        return False
    return row + 1 == answer.stop or requests[row + 1]["correlation"] != correlation


@inlined
def _token_behind_break(answer: _Answer, requests: Rows) -> int:
    """The youngest token request that a token behind a break can answer; -1 without one."""
    found = int64(-1)
    begin = answer.highest + 1
    for row in range(begin, min(answer.stop, begin + TOKENS_AHEAD_MAX)):
        if requests[row]["kind"] == TOKEN and _waits(requests, row):
            if not _may_answer(answer, requests, row):
                break
            found = row
    return found


@inlined
def _is_next(answer: _Answer, requests: Rows, row: int) -> bool:
    """Return whether a response without a break before it answers `row`, the oldest that waits."""
    if row == answer.stop or requests[row]["kind"] != answer.kind:
        return False
    if answer.kind != TOKEN and requests[row]["correlation"] != answer.correlation:
        return False
    return _may_answer(answer, requests, row)


@inlined
def _fill(buckets: Buckets, mask: int, requests: Rows, start: int, stop: int) -> None:
    """Chain all requests that have an id."""
    for at in range(mask + 1):
        buckets.head[at] = -1
    for row in range(start, stop):
        if requests[row]["kind"] == TOKEN:
            continue
        at = requests[row]["correlation"] & mask
        buckets.following[row] = -1
        if buckets.head[at] < 0:
            buckets.head[at] = row
        else:
            buckets.following[buckets.tail[at]] = row
        buckets.tail[at] = row


@inlined
def _look_up(answer: _Answer, requests: Rows, buckets: Buckets, mask: int) -> tuple[int, bool]:
    """(the request with the id of a response, -1 without one; whether another was answered).

    Requests that no response can answer any more leave the chain.
    """
    at = answer.correlation & mask
    row = buckets.head[at]
    before = int64(-1)  # in the chain
    found = int64(-1)
    silent = int64(-1)
    is_second = False
    for _ in range(CHAIN_MAX):
        if row < 0:
            break
        after = buckets.following[row]
        is_kept = True
        if requests[row]["correlation"] == answer.correlation:
            if not _waits(requests, row):
                # One answered request of an id is enough, and none that is lost.
                is_answered = requests[row]["is_lost"] == 0
                is_kept = is_answered and not is_second
                is_second |= is_answered
            elif _may_answer(answer, requests, row):
                if requests[row]["kind"] != SILENT:
                    if found < 0 or row > answer.highest:
                        found = row
                    if not answer.is_behind_break:
                        break
                elif silent < 0:
                    silent = row
        if is_kept:
            before = row
        else:
            if before < 0:
                buckets.head[at] = after
            else:
                buckets.following[before] = after
        row = after
    return (found if found >= 0 else silent), is_second


@kernel
def pair(asking: Frames, answering: Frames, is_closed: Bytes, buckets: Buckets) -> None:
    """Pair the requests and responses of every connection.

    is_closed: uint8, by connection, whether its end was captured. buckets: whatever is in them.
    """
    requests, request_start = asking.table, asking.start
    responses, response_start = answering.table, answering.start
    for connection in range(len(request_start) - 1):
        start = request_start[connection]
        stop = request_start[connection + 1]
        mask = int64(BUCKETS_MIN - 1)
        while mask + 1 < stop - start:
            mask = 2 * mask + 1
        is_filled = False
        first = start  # requests before it do not wait, or are SILENT
        highest = start - 1  # the last request answered
        for number in range(response_start[connection], response_start[connection + 1]):
            response = responses[number]
            is_behind = response["before"] != NO_BREAK
            correlation, time, kind = response["correlation"], response["time"], response["kind"]
            begin = response["first"]
            answer = _Answer(start, stop, highest, correlation, begin, time, kind, is_behind)
            while first < stop and (
                not _waits(requests, first) or requests[first]["kind"] == SILENT
            ):
                first += 1
            row = int64(-1)
            is_second = False
            if not is_behind:
                if _is_next(answer, requests, first):
                    row = first
            elif answer.kind == TOKEN:
                row = _token_behind_break(answer, requests)
            if row < 0 and answer.kind != TOKEN:
                if not is_filled:
                    _fill(buckets, mask, requests, start, stop)
                    is_filled = True
                row, is_second = _look_up(answer, requests, buckets, mask)
            if is_behind:
                # Answers come in order: what waits between these was answered in the break.
                for passed in range(highest + 1, row):
                    if _waits(requests, passed) and requests[passed]["kind"] != SILENT:
                        requests[passed]["is_lost"] = 1
            response["partner"] = row
            if row < 0:
                response["outcome"] = SECOND if is_second else UNASKED
                continue
            response["outcome"] = IN_ORDER if row > highest else OUT_OF_ORDER
            highest = max(highest, row)
            requests[row]["partner"] = number
            requests[row]["outcome"] = PairStatus.PAIRED
        for row in range(start, stop):
            request = requests[row]
            if request["partner"] >= 0:
                continue
            if request["kind"] == SILENT:
                request["outcome"] = PairStatus.NO_RESPONSE_EXPECTED
            elif is_closed[connection] and row > highest:
                request["outcome"] = PairStatus.CONNECTION_CLOSED
            else:
                request["outcome"] = PairStatus.RESPONSE_MISSING


@kernel
def number_exchanges(
    asking: Frames, answering: Frames, exchange_request: Indices, exchange_response: Indices
) -> int:
    """Exchanges by connection and first byte: fills their request and response rows; the count.

    Requests keep the order of their stream. Responses without a request stand before the first
    request that was captured after them (segments are numbered in assembly order).
    """
    requests, request_start = asking.table, asking.start
    responses, response_start = answering.table, answering.start
    count = 0
    for connection in range(len(request_start) - 1):
        answer = response_start[connection]
        end = response_start[connection + 1]
        for row in range(request_start[connection], request_start[connection + 1] + 1):
            is_last = row == request_start[connection + 1]
            while answer < end and (
                responses[answer]["partner"] >= 0
                or is_last
                or responses[answer]["first"] < requests[row]["first"]
            ):
                if responses[answer]["partner"] < 0:
                    exchange_request[count] = -1
                    exchange_response[count] = answer
                    count += 1
                answer += 1
            if not is_last:
                exchange_request[count] = row
                exchange_response[count] = requests[row]["partner"]
                count += 1
    return count
