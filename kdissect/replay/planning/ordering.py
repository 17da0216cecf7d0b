"""Finds the steps that wait for each other.

Theory of operation
-------------------
The capture orders events: a client sends a request, and sees its response. A step waits for another
step if the capture shows that the client had seen the other's response before it sent this request,
and if the two have one of these in common:

- their connection: a client's next request may follow from the last response that it saw. Requests
  that it pipelined stay pipelined.
- a resource of the broker (see `resources`): a read waits for earlier writes, and a write waits for
  earlier writes and reads. It does not wait for a `Mode.PEEK`: a Fetch may wait at the broker for
  that write.

All these dependencies go from an earlier event to a later one, so they cannot form a cycle.

If writes wait for each other, waiting for the last of them is enough. So a resource remembers only
the last answered step of each connection and `Mode` that no later write has waited for.

Two orders are visible only in the content of responses, and may contradict the times of the events.
They are *soft*: the plan drops them if they would close a cycle.

- Two Produce requests in flight at once on one partition were written in the order of their base
  offsets. Those of Produce with acks 0 follow from the gaps between the others.
- A Fetch that waited at the broker returned records that were produced meanwhile (`wait_for_data`).

A JoinGroup or SyncGroup waits at the broker until other members act, so it has no response when
they send their requests. Such requests wait until it was *sent* (`Step.sent_after`).

Time runs out on a broker, too: a classic group removes a member that sends nothing for its session
timeout. Static members go in this way instead of leaving (KIP-345). A coordinator aborts a
transaction that is open longer than its producer asked for, and refuses what the producer sends for
it then. At the target these times run anew. Before a request that needs them to be over, the run
asks the target until they are (`Step.awaits`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batches import headers
from kdissect.replay.model import TRANSACTIONS, WRITES, Mode, ReplayPlan, Resource, Step
from kdissect.replay.workload import messages
from kdissect.replay.workload.messages import codes, response_body

# Brokers announce new and deleted topics some time after they answered that it is done. The run
# waits until the target has announced new ones.
_ANNOUNCE_NS = 2_000_000_000
_SHOWS_TOPICS = messages.apis("Metadata DescribeTopicPartitions")
_WAITS_FOR_MEMBERS = messages.apis("JoinGroup SyncGroup")
_READS = frozenset({Mode.READ, Mode.PEEK})
# Mode of a request -> modes of earlier ones that it waits for.
_WAITED_FOR = {
    Mode.READ: WRITES,
    Mode.PEEK: WRITES,
    Mode.WRITE: WRITES | {Mode.READ},
    Mode.COMMUTING_WRITE: frozenset({Mode.WRITE, Mode.READ}),
}
_MS_NS = 1_000_000
_GROUP_NS = 5_000_000_000  # until the coordinator has removed a member
# transaction.abort.timed.out.transaction.cleanup.interval.ms is 10 s by default.
_TRANSACTION_NS = 15_000_000_000
_MEMBER_APIS = messages.apis("SyncGroup Heartbeat OffsetCommit")
_GROUP_APIS = _MEMBER_APIS | messages.apis(
    "JoinGroup ListGroups DescribeGroups DeleteGroups OffsetDelete TxnOffsetCommit "
    "ConsumerGroupHeartbeat"
)
# The transaction is over, or the coordinator aborts it (the last one).
_ABORTED = codes("INVALID_PRODUCER_EPOCH INVALID_TXN_STATE PRODUCER_FENCED CONCURRENT_TRANSACTIONS")
_CIRCLE = (
    "some requests that were in flight at once are sent in another order than their logs have: "
    "their partitions disagree about it"
)


def order_steps(plan: ReplayPlan, start_ns: int) -> None:
    """Set `depends_on`, `sent_after`, `is_racing`, `is_early` and `awaits` of a plan's steps.

    start_ns: the time of the first step.
    """
    _Ordering(plan, start_ns).run()
    _mark_groups(plan.steps)
    _mark_transactions(plan.steps)


class _Ordering:
    """waits: the events that an event waits for. A step n has two: it is sent (2n), and answered
    (2n + 1). soft: pairs of events whose order is dropped where it closes a cycle. seen_ns: when a
    client had the response; of a request without one, just after it was sent."""

    def __init__(self, plan: ReplayPlan, start_ns: int) -> None:
        self.plan, self.steps = plan, plan.steps
        self.names = messages.captured_topics(plan.workload.facts)
        self.active = [step for step in plan.steps if step.skipped is None]
        self.waits: dict[int, set[int]] = {}
        self.soft: set[tuple[int, int]] = set()  # what has to be answered, what is sent after it
        self.seen_ns: dict[int, int] = {}
        for step in self.active:
            self.waits |= {2 * step.number: set(), 2 * step.number + 1: {2 * step.number}}
            exchange = step.exchange
            if exchange.response_time_ns >= 0 or not step.expects_response:
                end_ns = max(exchange.response_time_ns, exchange.response_end_time_ns)
                # after the request, however clocks ran
                self.seen_ns[step.number] = max(end_ns - start_ns, step.at_ns + 1)
        # Produce with acks 0 that another request followed in a log: it was done before that one,
        # some time after it was sent
        self.placed: set[tuple[int, Resource]] = set()
        # of a resource, at one moment of the capture: steps without a response yet; and by mode, of
        # each connection the last step with one
        self._open: defaultdict[Resource, dict[int, Mode]] = defaultdict(dict)
        self._seen: defaultdict[tuple[Resource, Mode], dict[int, int]] = defaultdict(dict)
        # connection -> its step that was sent last, and that was answered last
        self._last_sent: dict[int, int] = {}
        self._last_seen: dict[int, int] = {}

    def run(self) -> None:
        logs = self._logs()
        self._keep_log_order(logs)
        self._sweep()
        if self.plan.options.wait_for_data:
            self._wait_for_data(logs)
        if self.soft:
            self._add_soft()
        for step in self.active:
            events = sorted(self.waits[2 * step.number])
            step.depends_on = tuple(each // 2 for each in events if each % 2)
            sent = [each // 2 for each in events if not each % 2]
            others = [each for each in sent if self.steps[each].connection != step.connection]
            step.sent_after = tuple(each for each in others if each not in step.depends_on)

    # -- what events show -----------------------------------------------------------------------

    def _sweep(self) -> None:
        """Go through all events in their order."""
        # at equal times, a seen response comes before a sent request
        events = [(step.at_ns, True, step.number) for step in self.active]
        events += [(at_ns, False, number) for number, at_ns in self.seen_ns.items()]
        # when topics or partitions were made last, and when topics were deleted last
        made_ns = deleted_ns = -_ANNOUNCE_NS
        for at_ns, is_request, number in sorted(events):
            step = self.steps[number]
            if is_request and step.exchange.api_key in _SHOWS_TOPICS:
                step.is_racing |= at_ns - deleted_ns < _ANNOUNCE_NS
                step.is_early = at_ns - made_ns < _ANNOUNCE_NS
            if step.exchange.api_key == ApiKey.DELETE_TOPICS:
                deleted_ns = at_ns
            elif (("topics",), Mode.COMMUTING_WRITE) in step.accesses:
                made_ns = at_ns
            if is_request:
                self._sent(step)
            else:
                self._answered(step)

    def _sent(self, step: Step) -> None:
        waits, events = set[int](), self.waits[2 * step.number]
        for resource, mode in step.accesses:
            for other in _WAITED_FOR[mode]:
                seen = self._seen[resource, other].items()
                waits.update(number for connection, number in seen if connection != step.connection)
            for number, other in self._open[resource].items():
                one = self.steps[number]
                if (mode in _READS) != (other in _READS):
                    reader = step if mode in _READS else one
                    # of a group, its answer shows nothing but commits
                    is_apart = reader.exchange.api_key == ApiKey.OFFSET_FETCH
                    reader.is_racing |= resource[0] != "group" or not is_apart
                if resource[0] == "group" and one.exchange.api_key in _WAITS_FOR_MEMBERS:
                    events.add(2 * number)
            self._open[resource][step.number] = mode
        if step.connection in self._last_sent:
            events.add(2 * self._last_sent[step.connection])
        if step.connection in self._last_seen:
            waits.add(self._last_seen[step.connection])
        self._last_sent[step.connection] = step.number
        # of the steps of one connection the last is enough: brokers answer in order
        last = {self.steps[number].connection: number for number in sorted(waits)}
        events.update(2 * number + 1 for number in last.values())

    def _answered(self, step: Step) -> None:
        for resource, mode in step.accesses:
            self._open[resource].pop(step.number, None)
            if (step.number, resource) in self.placed:
                continue
            if mode is Mode.WRITE:  # it has waited for all that were answered before it was sent
                for seen in (self._seen[resource, other] for other in Mode):
                    for connection, number in list(seen.items()):
                        if self.seen_ns[number] <= step.at_ns:
                            del seen[connection]
            if mode is not Mode.PEEK:
                self._seen[resource, mode][step.connection] = step.number
        if step.expects_response:
            self._last_seen[step.connection] = step.number

    # -- what only responses show ---------------------------------------------------------------

    def _logs(self) -> dict[Resource, list[tuple[int, int]]]:
        """(base offset, step) of each Produce, by log, in the order of offsets."""
        known: defaultdict[Resource, list[tuple[int, int, int]]] = defaultdict(list)
        silent: defaultdict[Resource, deque[tuple[int, int]]] = defaultdict(deque)
        for step in self.active:
            if step.exchange.api_key != ApiKey.PRODUCE:
                continue
            request, response = messages.bodies(step.exchange)
            results = dict(self.names.logs(response))
            for log, partition in self.names.logs(request):
                records = sum(each.record_count for each in headers(partition["records"] or b""))
                result = results.get(log)
                if not step.expects_response:
                    silent["log", *log].append((step.number, records))
                elif result is not None and not result["error_code"] and result["base_offset"] >= 0:
                    known["log", *log].append((result["base_offset"], step.number, records))
        return {
            log: list(self._in_order(known[log], silent[log]))
            for log in known.keys() | silent.keys()
        }

    def _in_order(
        self, known: list[tuple[int, int, int]], silent: deque[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """No response shows the offset of a Produce with acks 0. It fills the first gap before the
        records of others that is large enough, and ends at a request answered later."""
        at = 0
        for offset, number, records in sorted(known):
            while silent and at + silent[0][1] <= offset:
                if self.steps[silent[0][0]].at_ns >= self.seen_ns[number]:
                    break
                one, count = silent.popleft()
                yield at, one
                at += count
            yield offset, number
            at = max(at, offset + records)
        for one, count in silent:
            yield at, one
            at += count

    def _keep_log_order(self, logs: dict[Resource, list[tuple[int, int]]]) -> None:
        for log, writers in logs.items():
            for (_, before), (_, after) in pairwise(writers):
                is_silent = not self.steps[before].expects_response
                if is_silent:
                    self.placed.add((before, log))
                if self.steps[before].connection == self.steps[after].connection:
                    continue  # the connection keeps them in order
                if is_silent or self.seen_ns[before] > self.steps[after].at_ns:
                    self.soft.add((2 * before + 1, 2 * after))

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
                        self.soft.add((2 * writer + 1, 2 * step.number))

    # -- cycles ---------------------------------------------------------------------------------

    def _add_soft(self) -> None:
        """Add the soft orders, but for those that would make steps wait for each other in a cycle;
        of these either step may come first."""
        soft = {(before, after) for before, after in self.soft if before not in self.waits[after]}
        for before, after in soft:
            self.waits[after].add(before)
        while True:
            try:
                return TopologicalSorter(self.waits).prepare()
            except CycleError as error:
                cycle = soft.intersection(pairwise(error.args[1]))
            for before, after in cycle:
                self.waits[after].discard(before)
                self.steps[before // 2].is_racing = self.steps[after // 2].is_racing = True
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
        name, member = messages.member_of(step.exchange)
        if api_key == ApiKey.JOIN_GROUP:
            timeout_ns = messages.request_body(step.exchange)["session_timeout_ms"] * _MS_NS
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
        request, response = messages.bodies(step.exchange)
        found = set(messages.error_codes(response))
        for name in step.named("transactional-id"):
            if step.exchange.api_key == ApiKey.INIT_PRODUCER_ID:
                timeouts_ns[name] = request["transaction_timeout_ms"] * _MS_NS
                begun_ns.pop(name, None)
                continue
            if name in timeouts_ns and name in begun_ns and found & _ABORTED:
                if step.at_ns - begun_ns[name] >= timeouts_ns[name]:
                    limit_ns = timeouts_ns[name] + _TRANSACTION_NS
                    step.awaits += ((("transactional-id", name), limit_ns),)
            if step.exchange.api_key != ApiKey.END_TXN:
                begun_ns.setdefault(name, step.at_ns)
            elif found == {0}:
                begun_ns.pop(name, None)
