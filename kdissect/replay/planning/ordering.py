"""Finds the steps that wait for each other.

Theory of operation
-------------------
The capture orders events: a client sends a request, and sees its response. A step waits for another
step if the capture shows that the client had seen the other's response before it sent this request,
and if the two have one of these in common:

- their connection: a client's next request may follow from the last response that it saw. Requests
  that it pipelined stay pipelined.
- a resource of the broker (see `dependencies`): a read waits for earlier writes, and a write waits
  for earlier writes and reads.

All these dependencies go from an earlier event to a later one, so they cannot form a cycle.

If writes wait for each other, waiting for the last of them is enough. So a resource remembers only
its *frontier*: the last answered write of each connection that no other of these waited for.

Two orders are visible only in the content of responses, and may contradict the times of the events.
They are *soft*: the plan drops them if they would close a cycle.

- Two Produce requests in flight at once on one partition were written in the order of their base
  offsets (`PlanOptions.keep_log_order`).
- A Fetch that waited at the broker returned records that were produced meanwhile (`wait_for_data`).

A JoinGroup or SyncGroup waits at the broker until other members act, so it has no response when
they send their requests. Such requests wait until it was *sent* (`Step.follows`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import headers
from kdissect.replay.model import Mode, ReplayPlan, Resource, Step
from kdissect.replay.planning.dependencies import BLOCKING_GROUP_APIS, ResourceAccesses
from kdissect.replay.workload.messages import NOT_MADE_YET, entries, request_of, response_of

# brokers announce new and deleted topics some time after they answered that it is done
_ANNOUNCE_NS = 2_000_000_000
_CHANGES_TOPICS = frozenset({ApiKey.CREATE_TOPICS, ApiKey.DELETE_TOPICS, ApiKey.CREATE_PARTITIONS})
_SHOWS_TOPICS = frozenset({ApiKey.METADATA, ApiKey.DESCRIBE_TOPIC_PARTITIONS})
_ANSWER, _REQUEST = 0, 1  # at equal times, a seen response comes before a sent request


def _place_silent(
    written: dict[int, tuple[int, int]],
    silent: list[tuple[int, int]],
    can_precede: Callable[[int, int], bool],
) -> None:
    """Put (step, record count) that no answer places into the gaps of a log, in their order.

    can_precede: whether one step was sent before another one was answered.
    """
    gaps: list[list[int]] = []  # first offset, end, the step that wrote after it
    at = 0
    for offset in sorted(written):
        if offset > at and (written or at):
            gaps.append([at, offset, written[offset][0]])
        at = max(at, offset + written[offset][1])
    gaps.append([at, at + sum(count for _, count in silent), -1])
    for number, count in silent:
        for gap in gaps:
            is_possible = gap[2] < 0 or can_precede(number, gap[2])
            if count and is_possible and gap[1] - gap[0] >= count:
                written.setdefault(gap[0], (number, count))
                gap[0] += count
                break


class _Frontier:
    """Steps that a new request on a resource has to wait for: the last of each connection."""

    __slots__ = ("adds", "reads", "writes")

    def __init__(self) -> None:
        self.writes: dict[int, int] = {}
        self.adds: dict[int, int] = {}
        self.reads: dict[int, int] = {}

    def waits(self, mode: Mode) -> list[int]:
        found = list(self.writes.values())
        if mode is not Mode.COMMUTING_WRITE:
            found += self.adds.values()
        if mode in (Mode.WRITE, Mode.COMMUTING_WRITE):
            found += self.reads.values()
        return found

    def answered(self, step: Step, mode: Mode, waited_for: set[int]) -> None:
        if mode is Mode.READ_NO_BLOCK:
            return
        last_accesses = {
            Mode.READ: self.reads,
            Mode.COMMUTING_WRITE: self.adds,
            Mode.WRITE: self.writes,
        }[mode]
        if mode is not Mode.READ:
            # who waits for this one need not wait for those that it waited for; other adds do not
            # wait for an add, so it speaks only for adds
            spoken_for = (
                (self.adds,)
                if mode is Mode.COMMUTING_WRITE
                else (self.writes, self.adds, self.reads)
            )
            for held in spoken_for:
                for connection, number in list(held.items()):
                    if number in waited_for:
                        del held[connection]
        last_accesses[step.connection] = step.number


class Ordering:
    """Fills `depends_on` and `follows` of a plan's steps."""

    def __init__(
        self,
        plan: ReplayPlan,
        accesses: ResourceAccesses,
        start_ns: int,
    ) -> None:
        self.plan = plan
        self.steps = plan.steps
        self.accesses = accesses
        self.start_ns = start_ns
        self.frontiers: dict[Resource, _Frontier] = defaultdict(_Frontier)
        self.hard: list[set[int]] = [set() for _ in plan.steps]
        self.soft: list[set[int]] = [set() for _ in plan.steps]
        self.follows: list[set[int]] = [set() for _ in plan.steps]
        self.answered_ns: dict[int, int] = {}
        self.logs: dict[Resource, tuple[list[int], list[int]]] = {}  # base offsets, steps
        self.placed: set[tuple[int, Resource]] = set()  # acks 0 with a known place and a successor

    def run(self) -> None:
        active = [step for step in self.steps if step.skipped is None]
        events: list[tuple[int, int, int]] = []
        for step in active:
            events.append((step.at_ns, _REQUEST, step.number))
            seen_ns = self._seen_ns(step)
            if seen_ns is not None:
                self.answered_ns[step.number] = seen_ns
                events.append((seen_ns, _ANSWER, step.number))
        events.sort()
        if self.plan.options.keep_log_order or self.plan.options.wait_for_data:
            self._read_logs(active)
        if self.plan.options.keep_log_order:
            self._keep_log_order()
        self._sweep(events)
        if self.plan.options.wait_for_data:
            self._wait_for_data(active)
        self._drop_circles(active)
        for step in active:
            mine = self.hard[step.number] | self.soft[step.number]
            step.depends_on = tuple(sorted(mine))
            step.follows = tuple(sorted(self.follows[step.number] - mine))
            for number in step.depends_on:
                other = self.steps[number]
                if not other.expects_response and other.connection != step.connection:
                    other.needs_fence = True

    def _seen_ns(self, step: Step) -> int | None:
        """When the response was there, after the request however clocks ran; None: it never was."""
        exchange = step.exchange
        if not step.expects_response:
            return step.at_ns + 1  # complete when sent
        if exchange.response_time_ns < 0:
            return None
        seen_ns = max(exchange.response_time_ns, exchange.response_end_time_ns) - self.start_ns
        return max(seen_ns, step.at_ns + 1)

    def _sweep(self, events: list[tuple[int, int, int]]) -> None:
        last_seen: dict[int, int] = {}  # connection -> step answered last
        blocking: dict[Resource, dict[int, int]] = defaultdict(dict)
        spoken_for: dict[int, set[int]] = {}  # what a step waits for, also through others
        under_way: dict[Resource, dict[int, Mode]] = defaultdict(dict)
        announced_ns = -_ANNOUNCE_NS  # when topics or partitions were made or deleted last
        for event_ns, kind, number in events:
            step = self.steps[number]
            is_blocking = step.exchange.api_key in BLOCKING_GROUP_APIS
            if step.exchange.api_key in _CHANGES_TOPICS or self._makes_topics(step):
                announced_ns = event_ns
            elif step.exchange.api_key in _SHOWS_TOPICS:
                step.is_racing |= event_ns - announced_ns < _ANNOUNCE_NS
            if kind == _REQUEST:
                waits = self.hard[number]
                if step.connection in last_seen:
                    waits.add(last_seen[step.connection])
                for resource, mode in step.accesses:
                    waits.update(self.frontiers[resource].waits(mode))
                    self._note_races(step, mode, under_way[resource])
                    if resource[0] == "group":
                        self.follows[number].update(blocking[resource].values())
                        if is_blocking:
                            blocking[resource][number] = number
                spoken_for[number] = waits | self.soft[number]
                self._thin(waits)
            else:
                waited_for = spoken_for.pop(number)
                for resource, mode in step.accesses:
                    under_way[resource].pop(number, None)
                    if (number, resource) in self.placed:
                        continue  # done some time after it was sent: its place says when
                    self.frontiers[resource].answered(step, mode, waited_for)
                    if is_blocking:
                        blocking[resource].pop(number, None)
                if step.expects_response:
                    last_seen[step.connection] = number

    def _makes_topics(self, step: Step) -> bool:
        """Return whether a Metadata request makes the broker create topics some time after its
        answer, which says that they are not there, or have no leader yet."""
        request, response = request_of(step.exchange), response_of(step.exchange)
        if step.exchange.api_key != ApiKey.METADATA or request is None or response is None:
            return False
        if not request.body.get("allow_auto_topic_creation", True) or not request.body["topics"]:
            return False
        facts = self.plan.workload.facts.topics
        return any(
            topic["error_code"] in NOT_MADE_YET
            and topic["name"] in facts
            and facts[topic["name"]].first_time_ns >= 0
            for topic in entries(response.body["topics"])
        )

    def _note_races(self, step: Step, mode: Mode, others: dict[int, Mode]) -> None:
        """A read and a write of one thing that were open at once."""
        is_read = mode in (Mode.READ, Mode.READ_NO_BLOCK)
        for number, other in others.items():
            if is_read != (other in (Mode.READ, Mode.READ_NO_BLOCK)):
                (step if is_read else self.steps[number]).is_racing = True
        others[step.number] = mode

    def _thin(self, waits: set[int]) -> None:
        """Of the steps of one connection the last is enough: brokers answer in order."""
        last: dict[int, int] = {}
        unordered = []
        for each in waits:
            step = self.steps[each]
            if not step.expects_response:
                unordered.append(each)
            elif last.get(step.connection, -1) < each:
                last[step.connection] = each
        waits.clear()
        waits.update(last.values(), unordered)

    # -- orders that only responses show --------------------------------------------------------

    def _read_logs(self, active: Iterable[Step]) -> None:
        """Find the steps that wrote each partition, in the order of their offsets.

        No answer shows where the records of a Produce with acks 0 are. They fill a large enough gap
        between those of others, before a request that was answered later.
        """
        written: dict[Resource, dict[int, tuple[int, int]]] = defaultdict(dict)
        silent: dict[Resource, list[tuple[int, int]]] = defaultdict(list)
        for step in active:
            if step.exchange.api_key != ApiKey.PRODUCE:
                continue
            counts = self._record_counts(step)
            if not step.expects_response:
                for log, count in counts.items():
                    silent[log].append((step.number, count))
                continue
            response = response_of(step.exchange)
            for topic in entries(response.body["responses"]) if response is not None else []:
                name = self.accesses.topic_name(topic.get("name") or "", topic.get("topic_id"))
                for partition in entries(topic["partition_responses"]):
                    if partition["error_code"] == 0 and partition["base_offset"] >= 0:
                        log = ("log", name, partition["index"])
                        entry = (step.number, counts.get(log, 0))
                        written[log].setdefault(partition["base_offset"], entry)
        for log in {*written, *silent}:
            by_offset = written.get(log, {})
            _place_silent(by_offset, silent.get(log, []), self._can_precede)
            offsets = sorted(by_offset)
            self.logs[log] = (offsets, [by_offset[offset][0] for offset in offsets])

    def _can_precede(self, number: int, other: int) -> bool:
        return self.steps[number].at_ns < self.answered_ns.get(other, -1)

    def _record_counts(self, step: Step) -> dict[Resource, int]:
        request = request_of(step.exchange)
        record_counts: dict[Resource, int] = {}
        for topic in entries(request.body["topic_data"]) if request is not None else []:
            name = self.accesses.topic_name(topic.get("name") or "", topic.get("topic_id"))
            for partition in entries(topic["partition_data"]):
                data = partition["records"] or b""
                record_counts["log", name, partition["index"]] = sum(
                    max(each.record_count, 0) for each in headers(data)
                )
        return record_counts

    def _keep_log_order(self) -> None:
        for log, (_, writers) in self.logs.items():
            for before, after in pairwise(writers):
                if not self.steps[before].expects_response:
                    self.placed.add((before, log))
                    if self.steps[before].connection != self.steps[after].connection:
                        self.soft[after].add(before)
                    continue
                if self.steps[before].connection == self.steps[after].connection:
                    continue  # the connection keeps them in order
                if self.answered_ns.get(before, -1) > self.steps[after].at_ns:
                    self.soft[after].add(before)

    def _wait_for_data(self, active: Iterable[Step]) -> None:
        for step in active:
            if step.exchange.api_key != ApiKey.FETCH:
                continue
            response = response_of(step.exchange)
            if response is None:
                continue
            for name, partition, data in self.accesses.fetched_sets(response):
                offsets, writers = self.logs.get(("log", name, partition), ([], []))
                last = max((each.last_offset for each in headers(data)), default=-1)
                place = bisect_right(offsets, last) - 1
                if place < 0:
                    continue
                writer = writers[place]
                is_known = writer in self.hard[step.number]
                if not is_known and self.steps[writer].connection != step.connection:
                    self.soft[step.number].add(writer)

    # -- circles --------------------------------------------------------------------------------

    def _drop_circles(self, active: list[Step]) -> None:
        """Drop soft orders that would make steps wait for each other in a circle.

        A step n has two nodes: it is sent (2n), and answered (2n + 1). Nodes that wait for nothing
        are removed until none can be removed. The remaining nodes are part of a circle, or wait for
        one.
        """
        if not any(self.soft):
            return
        while True:
            left = self._left(active)
            if not left:
                return
            dropped = False
            for node in left:
                number = node >> 1
                circling = {each for each in self.soft[number] if (each << 1 | 1) in left}
                if circling and not node & 1:
                    self.soft[number] -= circling
                    for each in (number, *circling):  # in whichever order they come now
                        self.steps[each].is_racing = True
                    dropped = True
            assert dropped, "hard orders follow time and cannot circle"
            self.plan.notes.append(
                "some requests that were in flight at once are sent in another order than their "
                "logs have: their partitions disagree about it"
            )

    def _left(self, active: list[Step]) -> set[int]:
        after: dict[int, list[int]] = defaultdict(list)
        waits: dict[int, int] = {}
        joins: dict[Resource, list[Step]] = defaultdict(list)
        last: dict[int, int] = {}
        for step in active:
            number = step.number
            before = {each << 1 | 1 for each in self.hard[number] | self.soft[number]}
            before |= {each << 1 for each in self.follows[number]}
            if step.connection in last:
                before.add(last[step.connection] << 1)
            last[step.connection] = number
            for node in before:
                after[node].append(number << 1)
            waits[number << 1] = len(before)
            waits[number << 1 | 1] = 1
            after[number << 1].append(number << 1 | 1)
            if step.exchange.api_key in BLOCKING_GROUP_APIS:
                for resource, _ in step.accesses:
                    if resource[0] == "group":
                        joins[resource].append(step)
        for members in joins.values():
            self._wait_at_broker(members, after, waits)
        ready = [node for node, count in waits.items() if count == 0]
        while ready:
            node = ready.pop()
            del waits[node]
            for other in after[node]:
                waits[other] -= 1
                if waits[other] == 0:
                    ready.append(other)
        return set(waits)

    def _wait_at_broker(
        self, members: list[Step], after: dict[int, list[int]], waits: dict[int, int]
    ) -> None:
        """The answer of a join or sync may need the joins and syncs sent while it waited."""
        open_steps: list[Step] = []
        for step in members:
            open_steps = [
                each
                for each in open_steps
                if self.answered_ns.get(each.number, step.at_ns) > step.at_ns
            ]
            for each in open_steps:
                after[step.number << 1].append(each.number << 1 | 1)
                waits[each.number << 1 | 1] += 1
            open_steps.append(step)
