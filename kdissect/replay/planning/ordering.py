"""Finds the steps that wait for each other.

Theory of operation
-------------------
The capture orders events: a client sends a request, and sees its response. A step waits for another
step if the capture shows that the client had seen the other's response before it sent this request,
and if the two have one of these in common:

- their connection: a client's next request may follow from the last response that it saw. Requests
  that it pipelined stay pipelined.
- a resource of the broker (see `resources`): a read waits for earlier writes, and a write waits for
  earlier writes and reads.

All these dependencies go from an earlier event to a later one, so they cannot form a cycle.

If writes wait for each other, waiting for the last of them is enough. So a resource remembers only
its *frontier*: the last answered write of each connection that no other of these waited for.

Two orders are visible only in the content of responses, and may contradict the times of the events.
They are *soft*: the plan drops them if they would close a cycle.

- Two Produce requests in flight at once on one partition were written in the order of their base
  offsets. Those of Produce with acks 0 follow from the gaps between the others.
- A Fetch that waited at the broker returned records that were produced meanwhile (`wait_for_data`).

A JoinGroup or SyncGroup waits at the broker until other members act, so it has no response when
they send their requests. Such requests wait until it was *sent* (`Step.follows`).

Time runs out on a broker, too: a classic group removes a member that sends nothing for its session
timeout. Static members go in this way instead of leaving (KIP-345). A coordinator aborts a
transaction that is open longer than its producer asked for, and refuses what the producer sends for
it then. At the target these times run anew. The run asks it, before a request that needs it, until
they are over (`Step.awaits`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.batch_headers import headers
from kdissect.replay.model import TRANSACTIONS, Mode, ReplayPlan, Resource, Step
from kdissect.replay.workload.messages import (
    NOT_MADE_YET,
    CapturedTopics,
    bodies,
    entries,
    error_codes,
    member_of,
    request_body,
    response_body,
)

# brokers announce new and deleted topics some time after they answered that it is done
_ANNOUNCE_NS = 2_000_000_000
_CHANGES_TOPICS = frozenset({ApiKey.CREATE_TOPICS, ApiKey.DELETE_TOPICS, ApiKey.CREATE_PARTITIONS})
_SHOWS_TOPICS = frozenset({ApiKey.METADATA, ApiKey.DESCRIBE_TOPIC_PARTITIONS})
_WAITS_FOR_MEMBERS = frozenset({ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP})
_READS = frozenset({Mode.READ, Mode.READ_NO_BLOCK})
_WRITES = frozenset({Mode.WRITE, Mode.COMMUTING_WRITE})
# Mode of a request -> modes of earlier ones that it waits for.
_WAITED_FOR = {
    Mode.READ: _WRITES,
    Mode.READ_NO_BLOCK: _WRITES,
    Mode.WRITE: _WRITES | {Mode.READ},
    Mode.COMMUTING_WRITE: frozenset({Mode.WRITE, Mode.READ}),
}
_MS_NS = 1_000_000
_GROUP_NS = 5_000_000_000  # until the coordinator has removed a member
# transaction.abort.timed.out.transaction.cleanup.interval.ms is 10 s by default.
_TRANSACTION_NS = 15_000_000_000
_MEMBER_APIS = frozenset({ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT, ApiKey.OFFSET_COMMIT})
_GROUP_APIS = _MEMBER_APIS | {
    ApiKey.JOIN_GROUP, ApiKey.LIST_GROUPS, ApiKey.DESCRIBE_GROUPS, ApiKey.DELETE_GROUPS,
    ApiKey.OFFSET_DELETE, ApiKey.TXN_OFFSET_COMMIT, ApiKey.CONSUMER_GROUP_HEARTBEAT,
}  # fmt: skip
_ABORTED = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_TXN_STATE, ErrorCode.PRODUCER_FENCED,
        ErrorCode.CONCURRENT_TRANSACTIONS,  # the coordinator aborts it
    }
)  # fmt: skip
_CIRCLE = (
    "some requests that were in flight at once are sent in another order than their logs have: "
    "their partitions disagree about it"
)


class _Append(NamedTuple):
    """A Produce to one log."""

    step: int
    records: int


class _Frontier:
    """Steps that a new request on a resource has to wait for: of each mode, the last of each
    connection."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[tuple[Mode, int], int] = {}

    def waits(self, mode: Mode) -> list[int]:
        return [number for (held, _), number in self._held.items() if held in _WAITED_FOR[mode]]

    def answered(self, step: Step, mode: Mode, waited_for: set[int]) -> None:
        """Who waits for this step need not wait for those that it waited for. Only a write speaks
        for steps of every mode: adds do not wait for an add, nor reads for a read."""
        if mode is Mode.READ_NO_BLOCK:
            return
        for key, number in list(self._held.items()):
            if number in waited_for and mode in (Mode.WRITE, key[0]):
                del self._held[key]
        self._held[mode, step.connection] = step.number


def order_steps(plan: ReplayPlan, start_ns: int) -> None:
    """Set `depends_on`, `follows`, `needs_fence`, `is_racing` and `awaits` of a plan's steps.

    start_ns: the time of the first step.
    """
    _Ordering(plan).run(start_ns)
    _mark_groups(plan.steps)
    _mark_transactions(plan.steps)


class _Ordering:
    """hard, soft, follows: by step, the steps that it waits for."""

    def __init__(self, plan: ReplayPlan) -> None:
        self.plan, self.steps = plan, plan.steps
        self.names = CapturedTopics(plan.workload.facts)
        self.active = [step for step in plan.steps if step.skipped is None]
        self.hard: list[set[int]] = [set() for _ in plan.steps]
        self.soft: list[set[int]] = [set() for _ in plan.steps]
        self.follows: list[set[int]] = [set() for _ in plan.steps]
        self.seen_ns: dict[int, int] = {}  # when a client had the response
        # Produce with acks 0 that another request followed in a log: it was done before that one,
        # some time after it was sent
        self.placed: set[tuple[int, Resource]] = set()

    def run(self, start_ns: int) -> None:
        for step in self.active:
            exchange = step.exchange
            if not step.expects_response:
                self.seen_ns[step.number] = step.at_ns + 1  # complete when sent
            elif exchange.response_time_ns >= 0:
                end_ns = max(exchange.response_time_ns, exchange.response_end_time_ns)
                # after the request, however clocks ran
                self.seen_ns[step.number] = max(end_ns - start_ns, step.at_ns + 1)
        logs = self._logs()
        self._keep_log_order(logs)
        self._sweep()
        if self.plan.options.wait_for_data:
            self._wait_for_data(logs)
        self._drop_circles()
        for step in self.active:
            mine = self.hard[step.number] | self.soft[step.number]
            step.depends_on = tuple(sorted(mine))
            step.follows = tuple(sorted(self.follows[step.number] - mine))
            for number in step.depends_on:
                other = self.steps[number]
                if not other.expects_response and other.connection != step.connection:
                    other.needs_fence = True

    # -- what events show -----------------------------------------------------------------------

    def _sweep(self) -> None:
        """Go through all events in their order."""
        # at equal times, a seen response comes before a sent request
        events = [(step.at_ns, True, step.number) for step in self.active]
        events += [(at_ns, False, number) for number, at_ns in self.seen_ns.items()]
        frontiers: dict[Resource, _Frontier] = defaultdict(_Frontier)
        last_seen: dict[int, int] = {}  # connection -> step answered last
        waiting: dict[Resource, set[int]] = defaultdict(set)  # open JoinGroup and SyncGroup
        open_accesses: dict[Resource, dict[int, Mode]] = defaultdict(dict)
        spoken_for: dict[int, set[int]] = {}  # what an open step waits for, also through others
        announced_ns = -_ANNOUNCE_NS  # when topics or partitions were made or deleted last
        for at_ns, is_request, number in sorted(events):
            step = self.steps[number]
            api_key = step.exchange.api_key
            if api_key in _CHANGES_TOPICS or self._makes_topics(step):
                announced_ns = at_ns
            elif api_key in _SHOWS_TOPICS:
                step.is_racing |= at_ns - announced_ns < _ANNOUNCE_NS
            if not is_request:
                waited_for = spoken_for.pop(number)
                for resource, mode in step.accesses:
                    open_accesses[resource].pop(number, None)
                    if (number, resource) not in self.placed:
                        frontiers[resource].answered(step, mode, waited_for)
                    if resource in waiting:
                        waiting[resource].discard(number)
                if step.expects_response:
                    last_seen[step.connection] = number
                continue
            waits = self.hard[number]
            if step.connection in last_seen:
                waits.add(last_seen[step.connection])
            for resource, mode in step.accesses:
                waits.update(frontiers[resource].waits(mode))
                self._note_races(step, mode, open_accesses[resource])
                if resource[0] == "group":
                    self.follows[number] |= waiting.get(resource, set())
                    if api_key in _WAITS_FOR_MEMBERS:
                        waiting[resource].add(number)
            spoken_for[number] = waits | self.soft[number]
            self._thin(waits)

    def _makes_topics(self, step: Step) -> bool:
        """Return whether a Metadata request makes the broker create topics some time after its
        answer, which says that they are not there, or have no leader yet."""
        if step.exchange.api_key != ApiKey.METADATA:
            return False
        request, response = bodies(step.exchange)
        if not request.get("topics") or not request.get("allow_auto_topic_creation", True):
            return False
        facts, told = self.plan.workload.facts.topics, entries(response.get("topics"))
        missing = [each["name"] for each in told if each["error_code"] in NOT_MADE_YET]
        return any(name in facts and facts[name].first_time_ns >= 0 for name in missing)

    def _note_races(self, step: Step, mode: Mode, others: dict[int, Mode]) -> None:
        """A read and a write of one thing that were open at once."""
        for number, other in others.items():
            if (mode in _READS) != (other in _READS):
                (step if mode in _READS else self.steps[number]).is_racing = True
        others[step.number] = mode

    def _thin(self, waits: set[int]) -> None:
        """Of the steps of one connection the last is enough: brokers answer in order."""
        last: dict[int, int] = {}
        for each in sorted(waits):
            if self.steps[each].expects_response:
                if (before := last.get(self.steps[each].connection)) is not None:
                    waits.discard(before)
                last[self.steps[each].connection] = each

    # -- what only responses show ---------------------------------------------------------------

    def _logs(self) -> dict[Resource, list[tuple[int, int]]]:
        """(base offset, step) of each Produce, by log, in the order of offsets.

        No response shows the offsets of a Produce with acks 0. Its records fill the first large
        enough gap between those of others that ends at a request answered later.
        """
        written: dict[Resource, dict[int, _Append]] = defaultdict(dict)
        silent: dict[Resource, list[_Append]] = defaultdict(list)
        for step in self.active:
            if step.exchange.api_key != ApiKey.PRODUCE:
                continue
            request, response = bodies(step.exchange)
            appends: dict[Resource, _Append] = {}
            for log, partition in self.names.logs(request):
                counts = [
                    max(each.record_count, 0) for each in headers(partition["records"] or b"")
                ]
                appends["log", *log] = _Append(step.number, sum(counts))
            if not step.expects_response:
                for resource, append in appends.items():
                    silent[resource].append(append)
            for log, partition in self.names.logs(response):
                if partition["error_code"] == 0 and partition["base_offset"] >= 0:
                    append = appends.get(("log", *log), _Append(step.number, 0))
                    written["log", *log].setdefault(partition["base_offset"], append)
        for resource, appends_of_log in silent.items():
            self._place(written[resource], appends_of_log)
        return {
            log: [(offset, each.step) for offset, each in sorted(appends_of_log.items())]
            for log, appends_of_log in written.items()
        }

    def _place(self, written: dict[int, _Append], silent: list[_Append]) -> None:
        """Put requests that nobody answered into the gaps of a log, in their order."""
        gaps: list[list[int]] = []  # first offset, end, the step that wrote at the end
        at = 0
        for offset, append in sorted(written.items()):
            if offset > at:
                gaps.append([at, offset, append.step])
            at = max(at, offset + append.records)
        for append in silent:
            for gap in gaps:
                start, end, after = gap
                is_early = self.steps[append.step].at_ns < self.seen_ns.get(after, -1)
                if append.records and is_early and end - start >= append.records:
                    written[start] = append
                    gap[0] += append.records
                    break
            else:  # behind all others
                written[at] = append
                at += max(append.records, 1)

    def _keep_log_order(self, logs: dict[Resource, list[tuple[int, int]]]) -> None:
        for log, writers in logs.items():
            for (_, before), (_, after) in pairwise(writers):
                is_silent = not self.steps[before].expects_response
                if is_silent:
                    self.placed.add((before, log))
                if self.steps[before].connection == self.steps[after].connection:
                    continue  # the connection keeps them in order
                if is_silent or self.seen_ns.get(before, -1) > self.steps[after].at_ns:
                    self.soft[after].add(before)

    def _wait_for_data(self, logs: dict[Resource, list[tuple[int, int]]]) -> None:
        for step in self.active:
            if step.exchange.api_key != ApiKey.FETCH:
                continue
            for log, partition in self.names.logs(response_body(step.exchange)):
                batches = headers(partition["records"] or b"")
                last = max((each.last_offset for each in batches), default=-1)
                writers = logs.get(("log", *log), [])
                place = bisect_right(writers, last, key=lambda writer: writer[0])
                for _, writer in writers[max(place - 1, 0) : place]:
                    if self.steps[writer].connection != step.connection:
                        self.soft[step.number].add(writer)

    # -- circles --------------------------------------------------------------------------------

    def _drop_circles(self) -> None:
        """Drop soft orders that would make steps wait for each other in a circle."""
        waits = self._waits() if any(self.soft) else {}
        while True:
            try:
                return TopologicalSorter(waits).prepare()
            except CycleError as error:
                for before, after in pairwise(error.args[1]):
                    self._drop(before, after, waits)

    def _waits(self) -> dict[int, set[int]]:
        """What each event waits for. A step n has two: it is sent (2n), and answered (2n + 1)."""
        waits: dict[int, set[int]] = {}
        last: dict[int, int] = {}  # of each connection
        for step in self.active:
            sent = step.number << 1
            waits[sent] = {
                each << 1 | 1 for each in self.hard[step.number] | self.soft[step.number]
            }
            waits[sent] |= {each << 1 for each in self.follows[step.number]}
            waits[sent] |= {last[step.connection]} if step.connection in last else set()
            waits[sent | 1] = {sent}
            last[step.connection] = sent
        return waits

    def _drop(self, before: int, after: int, waits: dict[int, set[int]]) -> None:
        """Let an event not wait for another, if the order is soft; then either may come first."""
        first, second = before >> 1, after >> 1
        if after & 1 or not before & 1 or first not in self.soft[second] - self.hard[second]:
            return
        waits[after].discard(before)
        self.soft[second].discard(first)
        self.steps[first].is_racing = self.steps[second].is_racing = True
        if _CIRCLE not in self.plan.notes:
            self.plan.notes.append(_CIRCLE)


# -- what ran out of time -------------------------------------------------------------------------


def _mark_groups(steps: Sequence[Step]) -> None:
    timeouts_ns: dict[str, int] = {}  # the longest session of a group's members
    heard_ns: dict[str, int] = {}  # when a member sent something last
    for step in steps:
        api_key = step.exchange.api_key
        if step.skipped is not None or api_key not in _GROUP_APIS:
            continue
        name, member = member_of(step.exchange)
        if api_key == ApiKey.JOIN_GROUP:
            timeout_ns = request_body(step.exchange)["session_timeout_ms"] * _MS_NS
            timeouts_ns[name] = max(timeout_ns, timeouts_ns.get(name, 0))
            heard_ns[name] = step.at_ns + max(step.exchange.latency_ns, 0)
        elif api_key in _MEMBER_APIS and member:
            if name in heard_ns:
                heard_ns[name] = step.at_ns
        else:
            named = timeouts_ns if api_key == ApiKey.LIST_GROUPS else step.named("group")
            step.awaits += tuple(
                (("group", each), timeouts_ns[each] + _GROUP_NS)
                for each in named
                if each in timeouts_ns and step.at_ns - heard_ns[each] > timeouts_ns[each]
            )
            if api_key == ApiKey.CONSUMER_GROUP_HEARTBEAT:
                timeouts_ns.pop(name, None)  # it is no classic group any more
                heard_ns.pop(name, None)


def _mark_transactions(steps: Sequence[Step]) -> None:
    timeouts_ns: dict[str, int] = {}
    begun_ns: dict[str, int] = {}  # of each open transaction
    for step in steps:
        if step.step_class != TRANSACTIONS or step.skipped is not None:
            continue
        request, response = bodies(step.exchange)
        codes = set(error_codes(response))
        for name in step.named("txn"):
            if step.exchange.api_key == ApiKey.INIT_PRODUCER_ID:
                timeouts_ns[name] = request["transaction_timeout_ms"] * _MS_NS
                begun_ns.pop(name, None)
                continue
            if name in timeouts_ns and name in begun_ns and codes & _ABORTED:
                if step.at_ns - begun_ns[name] >= timeouts_ns[name]:
                    step.awaits += ((("txn", name), timeouts_ns[name] + _TRANSACTION_NS),)
            if step.exchange.api_key != ApiKey.END_TXN:
                begun_ns.setdefault(name, step.at_ns)
            elif codes == {0}:
                begun_ns.pop(name, None)
