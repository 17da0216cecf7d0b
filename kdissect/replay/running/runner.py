"""The run: each captured connection sends its steps over its own connections, in one loop.

Theory of operation. A `Lane` is a captured connection with its list of steps and the next one. The
runner *advances* a lane after an event that may let its next step go: the clock, an answer, a new
connection, room in a buffer. `_advance` sends as many steps as may go and returns at the first that
may not; the event that this one waits for puts the lane back into `_ready`. So no lane waits for a
long poll of another one, and a step costs no task.

A step may go if all of these hold:

- the steps that it depends on are complete: `ReplayPlan` names them, `StepCompletion` counts them
- its time has come
- a connection to its node is open
- the buffer of that connection and the run's bytes in flight are below their limits

Kafka answers in order on a connection: an answer belongs to the connection's first pending step,
and must have its correlation id.

A failure becomes an outcome with an error and completes the step, so the run goes on. A connection
that ends fails its steps in flight, and is opened again for the next step. An answer that does not
come in time ends its connection. Only a target that is gone, or that answers nothing any more, ends
the run.
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from kdissect.errors import Error
from kdissect.replay.model import (
    Attempt,
    Comparison,
    EarlierAnswer,
    Outcome,
    ReplayPlan,
    SkipCode,
    Skipped,
    Step,
    Translation,
)
from kdissect.replay.planning.schedule import schedule
from kdissect.replay.running.completion import StepCompletion
from kdissect.replay.running.group_members import GroupMembers
from kdissect.replay.running.lanes import Lane, LaneConnection, LaneConnections, NodeConnections
from kdissect.replay.running.result import LinkRecord, RunOptions, RunResult
from kdissect.replay.running.waits import (
    RETRY_PAUSES_S,
    Patience,
    ask_metadata,
    await_leaders,
    made_partitions,
)
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed, allow_many_files
from kdissect.text import plural

CONNECT_AHEAD_NS = 500_000_000  # connections are opened this long before their first step is due
PARTS_PAUSE_S = 0.002
GONE_TIMEOUTS = 4  # answers missing in a row, with none between, before the run is given up
SCRIPT_TIMEOUTS = 3  # the same for one connection
_FENCE, _FENCE_END = b"\0\x12\0\0", b"\xff\xff"  # ApiVersions v0: key, version; no client id
STALLED = "the target stopped answering"
NOT_WAITED = "the connection was ended without the answer, as the client did"
SWEEP_S, GRACE_S = 0.1, 1.0
PUMP_SLICE = 200  # lanes advanced before the loop may look at its sockets again


class Runner:
    """One run of a plan against one target; `run` once."""

    def __init__(
        self,
        plan: ReplayPlan,
        translation: Translation,
        comparison: Comparison | None,
        target: Target,
        options: RunOptions,
    ) -> None:
        self.plan, self.translation = plan, translation
        self.target, self.options = target, options
        self._is_max = options.pace.is_max
        count = len(plan.steps)
        self.sent_count = self.answered_count = 0
        self.due, self.ends = schedule(plan, options.pace)
        self._own_lag = array("q", [-1]) * count
        self._link_of = array("i", [-1]) * count
        self._links: list[LinkRecord] = []
        self._lanes = [Lane(n, numbers) for n, numbers in enumerate(plan.lanes)]
        self._ready: deque[Lane] = deque()
        self._throttled: deque[Lane] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._comparison = comparison
        self._completed_order: list[Outcome] = []
        self._completion = StepCompletion(plan, self._lanes, self._queue, self._completed)
        self.outcomes = self._completion.outcomes
        self._is_pumping = self._is_pump_due = False
        self._in_flight_bytes = 0
        self._asked: set[str] = set()
        self._patience = Patience()
        self._unserved: set[str] = set()  # topics that were awaited in vain
        self._timeouts = 0
        self._timer_count = 0
        self._retried: list[Attempt] = []
        self._ended, self._is_interrupted, self._is_stopping = "", False, False
        self._began_ns = 0
        self._idle_since = 0
        self._connections = LaneConnections(target, self._links, self._now)
        self._nodes = NodeConnections(target, self._links, self._now)
        self._members = GroupMembers(translation, self._nodes, self._has_ended, self._retried)

    @property
    def left(self) -> int:
        """The number of steps that are not complete."""
        return self._completion.left

    def activity(self) -> str:
        """Return the run's work at the moment, for people. Another thread may call it."""
        where = f"replay to {self.target}"
        if not self.left or self._done.is_set():
            return f"{where}: comparing {plural(len(self.outcomes), 'answer')}"
        text = f"{where}: {self.sent_count} sent, {self.answered_count} answered, {self.left} left"
        now = self._now()
        oldest = [link.pending[0] for link in tuple(self._connections.live) if link.pending]
        if oldest:
            number, _, sent_ns, _ = min(oldest, key=lambda each: each[2])
            api = self.plan.steps[number if number >= 0 else ~number].api_name
            return f"{text}; {api} has waited for {(now - sent_ns) / 1e9:.1f} s"
        nexts = [lane.numbers[lane.pos] for lane in self._lanes if lane.pos < len(lane.numbers)]
        due_ns = min((self.due[number] for number in nexts), default=now) - now
        return f"{text}; the next is due in {due_ns / 1e9:.1f} s" if due_ns > 0 else text

    # -- the whole run ----------------------------------------------------------------------

    async def run(self) -> RunResult:
        """Play the plan; the result has an outcome for every step, however the run ends."""
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        allow_many_files()
        # times count from the first due step; what has to be open by then is opened before
        lead_ns = 0 if self._is_max else CONNECT_AHEAD_NS
        gc.collect()
        gc.freeze()  # the plan is large and stays: no pause to look through it
        gc.disable()
        try:
            start_time_ns, send_cpu_ns = time.time_ns() + lead_ns, time.process_time_ns()
            self._begin(lead_ns)
            watchers = [
                self._loop.create_task(each)
                for each in (self._sweep(), self._members.keep(self._now))
            ]
            await self._done.wait()
            for watcher in watchers:
                watcher.cancel()
            self._members.cancel()
            elapsed_ns = max(self._now(), 0)
            send_cpu_ns = time.process_time_ns() - send_cpu_ns
            await self._end()
        finally:
            gc.enable()
            gc.unfreeze()
        judge_cpu_ns = time.process_time_ns()
        self._judge()
        outcomes = [outcome for outcome in self.outcomes if outcome is not None]
        for outcome in outcomes:
            if outcome.sent is not None:
                outcome.dropped = self.translation.dropped_fields(outcome.step)
        return RunResult(
            outcomes,
            self._own_lag,
            self._link_of,
            self._links,
            start_time_ns,
            elapsed_ns,
            self._ended,
            self._is_interrupted,
            self._connections.reconnects,
            self._retried,
            send_cpu_ns,
            time.process_time_ns() - judge_cpu_ns,
        )

    def interrupt(self) -> None:
        """End the run because the user wants to: send no more requests, keep all outcomes."""
        self._is_interrupted = True
        self._stop("interrupted")

    def _begin(self, lead_ns: int) -> None:
        self._began_ns = time.monotonic_ns() + lead_ns
        self._began_s = self._loop.time() + lead_ns / 1e9
        for step in self.plan.steps:
            if step.skipped is not None:
                self._completion.complete_now(step.number, Outcome(step, skipped=step.skipped))
        for lane in self._lanes:
            self._queue(lane)
        self._pump()

    def _stop(self, reason: str) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._ended = reason
            self._done.set()

    async def _end(self) -> None:
        """Close all connections, and give an outcome to each step that has none."""
        for task in list(self._tasks):
            task.cancel()
        if self._is_stopping and self._connections.has_pending:
            end = self._loop.time() + GRACE_S  # answers that are on their way still count
            while self._loop.time() < end and self._connections.has_pending:
                await asyncio.sleep(0.02)
        self._is_stopping = True
        for lane in self._lanes:
            lane.cancel()
            self._completion.release(lane)
        for link in list(self._connections.live):
            self._lose_pending(link, f"{self._ended or 'the run ended'} before the answer came")
            self._connections.close(link)
        for step in self.plan.steps:
            if self._completion.is_complete[step.number]:
                continue
            if self._is_interrupted:
                self._skip(step, Skipped(SkipCode.NOT_REACHED, "the run was interrupted before"))
            else:
                self._fail(step.number, f"not sent: {self._ended}")
        self.target.close()
        self._nodes.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GRACE_S)
        await asyncio.sleep(0)  # transports close in the loop's next round

    def _now(self) -> int:
        return time.monotonic_ns() - self._began_ns

    # -- advancing lanes ------------------------------------------------------------------

    def _queue(self, lane: Lane) -> None:
        if not lane.is_queued:
            lane.is_queued = True
            self._ready.append(lane)

    def _pump_soon(self) -> None:
        """Advance ready lanes in the event loop's next round, after it has read its sockets.

        Reading all answers first and sending afterwards makes better use of the CPU's caches.
        """
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Advance up to PUMP_SLICE ready lanes, so that the event loop can serve its sockets."""
        self._is_pump_due = False
        if self._is_pumping:
            return
        self._is_pumping = True
        for _ in range(PUMP_SLICE):
            if not self._ready:
                break
            lane = self._ready.popleft()
            lane.is_queued = False
            self._advance(lane)
        self._is_pumping = False
        if self._ready and not self._is_stopping:
            self._pump_soon()
        if self._completion.left == 0:
            self._done.set()

    def _advance(self, lane: Lane) -> None:
        numbers, steps = lane.numbers, self.plan.steps
        while lane.pos < len(numbers):
            number = numbers[lane.pos]
            if self._completion.is_complete[number]:
                lane.go_on()
                continue
            if self._completion.waits[number] or lane.busy or self._is_stopping:
                return
            step, now = steps[number], self._now()
            due = self._due_ns(step) if step.pauses else self.due[number]
            if due - CONNECT_AHEAD_NS > now:
                self._wake(lane, due - CONNECT_AHEAD_NS)
                return
            if lane.ready_ns < 0:
                lane.ready_ns = now
            names = self.translation.wants_metadata(step)
            if names and not self._asked.issuperset(names):
                self._work(lane, self._ask_metadata(names))
                return
            if self.translation.is_split(step):
                if due > now:
                    self._wake(lane, due)
                    return
                if self._throttle(lane):
                    return
                lane.go_on()
                size = len(step.exchange.request or b"")
                self._work(lane, self._play_parts(lane, step), size)
                return
            node_id = self.translation.target_node(step)
            link = lane.links.get(node_id)
            if link is None:
                self._work(lane, self._open(lane, node_id, number))
                return
            if due > now:
                self._wake(lane, due)
                return
            if link.is_full:
                return
            if self._throttle(lane):
                return
            if link.relogin_at_ns and now >= link.relogin_at_ns:
                if not link.pending:
                    self._work(lane, self._connections.log_in_again(link))
                return
            self._send(lane, link, step)
            lane.go_on()
        self._finish(lane)

    def _due_ns(self, step: Step) -> int:
        """When a step is due: by the schedule, and after its pauses."""
        for number, wait_ns in step.pauses:
            last = self.outcomes[number]
            if last is not None and last.answered_ns >= 0:
                self.due[step.number] = max(self.due[step.number], last.answered_ns + wait_ns)
        return self.due[step.number]

    def _send(self, lane: Lane, link: LaneConnection, step: Step) -> None:
        """The first time; `_send_again` the next ones."""
        number = step.number
        frame = self._frame(link, step)
        if frame is None:
            return
        now = self._now()
        outcome = Outcome(step, frame, None, now, node_id=link.node_id)
        outcome.api_version = self.translation.api_version(step)
        self.outcomes[number] = outcome
        self._link_of[number] = link.record
        self.sent_count += 1
        if not self._is_max:
            due = self.due[number]
            outcome.lag_ns = max(now - due, 0)
            self._own_lag[number] = max(now - max(due, lane.ready_ns), 0)
        self._completion.sent(number)
        self._members.sent(step, now)
        if step.expects_response:
            self._expect(link, number, len(frame), now)
        elif step.needs_fence:
            self._fence(link, number, now)
        else:
            self._completion.complete(number, outcome)

    def _fence(self, link: LaneConnection, number: int, now: int) -> None:
        """Send a request of the replay's own after a step that expects no response.

        The broker handles requests of a connection in order, so the answer to this one means that
        the step is done. It is pending under the inverted step number (`~number`).
        """
        link.correlation_id = (link.correlation_id + 1) & 0x7FFFFFFF
        link.send(_FENCE + link.correlation_id.to_bytes(4, "big") + _FENCE_END)
        link.pending.append((~number, link.correlation_id, now, 0))

    def _frame(self, link: LaneConnection, step: Step) -> bytes | None:
        """Translate and send; None where the step cannot be translated, and is complete then."""
        link.correlation_id = (link.correlation_id + 1) & 0x7FFFFFFF
        try:
            frame = self.translation.request(step, link.correlation_id)
        except Error as error:
            frame = Skipped(SkipCode.NOT_TRANSLATABLE, str(error))
        if isinstance(frame, Skipped):
            self.translation.failed(step)
            self._skip(step, frame)
            return None
        link.send(frame)
        return frame

    def _expect(self, link: LaneConnection, number: int, size: int, now: int) -> None:
        link.pending.append((number, link.correlation_id, now, size))
        self._in_flight_bytes += size

    def _take_pending(self, link: LaneConnection) -> int:
        """The step at the head of a link's queue; its bytes are no longer in flight."""
        number, _, _, size = link.pending.popleft()
        self._make_room(size)
        return number

    def _lose_pending(self, link: LaneConnection, reason: str) -> None:
        """No answer comes for any step in a link's queue."""
        while link.pending:
            self._unanswered(self._take_pending(link), reason)

    def _throttle(self, lane: Lane) -> bool:
        """Let a lane wait while the bytes in flight are at their limit; whether it has to."""
        is_full = self._in_flight_bytes >= self.options.in_flight_bytes
        if is_full:
            self._throttled.append(lane)
        return is_full

    def _make_room(self, size: int) -> None:
        """Bytes are no longer in flight; below the limit all throttled lanes are queued."""
        self._in_flight_bytes -= size
        while self._throttled and self._in_flight_bytes < self.options.in_flight_bytes:
            self._queue(self._throttled.popleft())

    async def _send_again(self, lane: Lane, outcome: Outcome) -> None:
        """After a pause, what the translation makes of the request by then."""
        step = outcome.step
        await asyncio.sleep(RETRY_PAUSES_S[outcome.attempts - 1])
        outcome.attempts += 1
        await self._members.before_again(step)
        node_id = self.translation.target_node(step)
        if node_id not in lane.links:
            await self._open(lane, node_id, step.number)
        link = lane.links.get(node_id)
        if link is None:
            self._fail(step.number, "the connection ended before it could be sent again")
            return
        frame = self._frame(link, step)
        if frame is None:
            return
        outcome.sent, outcome.sent_ns, outcome.node_id = frame, self._now(), node_id
        self._link_of[step.number] = link.record
        self._expect(link, step.number, len(frame), outcome.sent_ns)

    def _finish(self, lane: Lane) -> None:
        """After the last step: links close when their answers are in, or were not captured."""
        if lane.busy:
            return  # a request that is sent again needs its connection
        self._nodes.close(lane.number)
        pending = [entry for link in lane.links.values() for entry in link.pending]
        if not pending:
            for link in list(lane.links.values()):
                self._connections.close(link)
            lane.links.clear()
        elif lane.close_timer is None and not any(
            self._is_answer_captured(number) for number, *_ in pending
        ):
            # the client went away with requests open: so do we, at its time
            wait_s = max((self.ends[lane.number] - self._now()) / 1e9, GRACE_S)
            lane.close_timer = self._loop.call_later(wait_s, self._leave, lane)
            self._timer_count += 1

    def _is_answer_captured(self, number: int) -> bool:
        if number < 0:
            return True
        exchange = self.plan.steps[number].exchange
        return exchange.response is not None or exchange.response_time_ns >= 0

    def _leave(self, lane: Lane) -> None:
        lane.close_timer = None
        self._timer_count -= 1
        for link in list(lane.links.values()):
            self._lose_pending(link, NOT_WAITED)
            self._connections.close(link)
        lane.links.clear()
        self._pump()

    def _has_ended(self, connection: int) -> bool:
        """Return whether all requests of a connection were sent."""
        lane = self._lanes[connection]
        return lane.pos >= len(lane.numbers)

    # -- completion ---------------------------------------------------------------------------

    def _completed(self, outcome: Outcome) -> None:
        self._members.done(outcome)
        self._completed_order.append(outcome)

    def _judge(self) -> None:
        """Compare all answers, in the order in which they came: verdicts depend on it."""
        if self._comparison is None:
            return
        for outcome in self._completed_order:
            outcome.judgement = self._comparison.judge(outcome)
        for number, judgement in self._comparison.finish().items():
            changed = self.outcomes[number]
            assert changed is not None
            changed.judgement = judgement

    def _skip(self, step: Step, skipped: Skipped) -> None:
        self._completion.complete(step.number, Outcome(step, skipped=skipped))

    def _fail(self, number: int, reason: str) -> None:
        """No answer, and why; a step that is done keeps its outcome."""
        if self._completion.is_done(number):
            return
        step = self.plan.steps[number]
        outcome = self.outcomes[number] or Outcome(step)
        outcome.error = reason
        self.translation.failed(step)
        self._completion.complete(number, outcome)

    def _unanswered(self, number: int, reason: str) -> None:
        """Something pending will not be answered; a fence has done what it can either way."""
        if number < 0:
            outcome = self.outcomes[~number]
            assert outcome is not None
            self._completion.complete(~number, outcome)
        else:
            self._fail(number, reason)

    # -- answers ----------------------------------------------------------------------------

    def _on_answer(self, lane: Lane, link: LaneConnection, frame: bytes) -> None:
        now = self._now()
        if not link.pending:
            link.fail("an answer came that nothing had asked for")
            return
        correlation_id = link.pending[0][1]
        found = int.from_bytes(frame[:4], "big")
        if found != correlation_id:
            link.fail(f"an answer has correlation id {found} where {correlation_id} was due")
            return
        number = self._take_pending(link)
        if number < 0:
            self._unanswered(number, "")
            self._pump_soon()
            return
        outcome = self.outcomes[number]
        assert outcome is not None
        assert outcome.sent is not None
        self._timeouts = lane.timeouts = 0
        self.answered_count += 1
        reason = self._retry_reason(outcome, frame, now)
        if reason:
            attempt = Attempt(link.record, outcome.sent, outcome.sent_ns, frame, now)
            self._retried.append(attempt)
            _keep_answer(outcome, frame, reason, now)
            self._work(lane, self._send_again(lane, outcome))
        else:
            self._accept(lane, outcome, frame, now)
        if lane.pos >= len(lane.numbers) or link.relogin_at_ns:
            self._queue(lane)
        self._pump_soon()

    def _accept(self, lane: Lane, outcome: Outcome, frame: bytes, now: int) -> None:
        """An answer is final."""
        outcome.answer, outcome.answered_ns = frame, now
        try:
            self.translation.learn(outcome.step, frame)
        except Error as error:
            outcome.error = f"the answer cannot be understood: {error}"
        if outcome.step.creates:
            self._work(lane, self._await_leaders(outcome))
        else:
            self._completion.complete(outcome.step.number, outcome)

    async def _play_parts(self, lane: Lane, step: Step) -> None:
        """A request for several nodes: when nothing else of its connection is under way, each is
        asked for its part, again while they are not ready, and the answers are taken as one."""
        while any(link.pending for link in lane.links.values()):
            await asyncio.sleep(PARTS_PAUSE_S)
        outcome, due = Outcome(step), self.due[step.number]
        outcome.api_version = self.translation.api_version(step)
        for pause_s in (*RETRY_PAUSES_S, 0.0):
            frame = self.translation.request(step, 0)
            if isinstance(frame, Skipped):
                self._skip(step, frame)
                return
            now = self._now()
            if outcome.sent is None:
                self.sent_count += 1
                outcome.lag_ns = 0 if self.options.pace.is_max else max(now - due, 0)
            outcome.sent, outcome.sent_ns, self.outcomes[step.number] = frame, now, outcome
            self._completion.sent(step.number)
            parts = self.translation.parts(step, frame)
            limit_s = self._limit_s(step.number)
            try:
                async with asyncio.timeout(limit_s):
                    asked = await self._nodes.ask(lane.number, parts, step.expects_response)
            except ConnectFailed as error:
                self._fail(step.number, str(error))
                return
            except TimeoutError:
                self._timeouts += 1
                self._fail(step.number, f"no answer within {limit_s:g} s")
                if self._timeouts >= GONE_TIMEOUTS:
                    self._stop(f"{STALLED} ({self._timeouts} answers in a row did not come)")
                return
            self._timeouts = lane.timeouts = 0
            self._retried += asked
            if not step.expects_response:
                self._completion.complete(step.number, outcome)
                return
            answer = self.translation.merged(step, [each.answer for each in asked])
            reason = self._retry_reason(outcome, answer, self._now())
            if reason:
                _keep_answer(outcome, answer, reason, self._now())
                outcome.attempts += 1
                await asyncio.sleep(pause_s)
                continue
            self.answered_count += 1
            self._accept(lane, outcome, answer, self._now())
            return

    def _retry_reason(self, outcome: Outcome, frame: bytes, now: int) -> str:
        """Why a request is sent again; "" if its answer is final."""
        step = outcome.step
        if outcome.attempts > len(RETRY_PAUSES_S):
            return ""
        if self._patience.is_over(outcome, frame, now):
            return ""
        try:
            reason = self.translation.retry(step, frame)
        except Error:
            return ""
        self._patience.note(outcome, frame, reason, now)
        return reason

    def _on_lost(self, lane: Lane, link: LaneConnection, reason: str) -> None:
        self._connections.drop(lane, link)
        self._lose_pending(link, reason)
        self._queue(lane)
        self._pump()

    async def _sweep(self) -> None:
        """Look for answers that are overdue, and for a run that cannot go on."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._now()
            for link in list(self._connections.live):
                if not link.pending:
                    continue
                number, _, sent_ns, _ = link.pending[0]
                limit_s = self._limit_s(number)
                if now - sent_ns > limit_s * 1e9:
                    self._give_up(link, number, limit_s)
            is_idle = not (self._tasks or self._timer_count or self._ready or self._is_stopping)
            if is_idle and not self._connections.has_pending:
                self._idle_since = self._idle_since or now
                if now - self._idle_since > GRACE_S * 1e9:
                    self._stop(f"{self._completion.left} steps wait for each other")
            else:
                self._idle_since = 0

    def _limit_s(self, number: int) -> float:
        step = self.plan.steps[max(number, ~number)]
        latency_s = max(step.exchange.latency_ns, 0) / 1e9
        return self.options.answer_timeout_s + (latency_s if step.blocks else 0)

    def _give_up(self, link: LaneConnection, number: int, limit_s: float) -> None:
        lane = self._lanes[self.plan.steps[max(number, ~number)].connection]
        self._timeouts += 1
        lane.timeouts += 1
        self._unanswered(self._take_pending(link), f"no answer within {limit_s:g} s")
        link.fail("the connection was given up: an earlier answer did not come")
        if self._timeouts >= GONE_TIMEOUTS:
            self._stop(f"{STALLED} ({self._timeouts} answers in a row did not come)")
        elif lane.timeouts >= SCRIPT_TIMEOUTS:
            for later in lane.numbers[lane.pos :]:
                self._fail(later, "not sent: answers before on this connection did not come")
        self._pump()

    # -- links ------------------------------------------------------------------------------

    def _work(self, lane: Lane, work: Coroutine[Any, Any, None], size: int = 0) -> None:
        """Do something that takes time for a lane, which waits for it; `size` bytes are in flight
        meanwhile."""
        lane.busy += 1
        self._in_flight_bytes += size

        async def guarded() -> None:
            try:
                await work
            finally:
                lane.busy -= 1
                self._make_room(size)

        task = self._loop.create_task(guarded())
        self._tasks.add(task)

        def done(finished: asyncio.Task[None]) -> None:
            self._tasks.discard(finished)
            if finished.cancelled():
                return
            if finished.exception() is not None:
                self._stop(f"an error of kdissect's own: {finished.exception()!r}")
                return
            self._queue(lane)
            self._pump()

        task.add_done_callback(done)

    async def _open(self, lane: Lane, node_id: int | None, number: int) -> None:
        """A link to a node; without one the step at hand has failed."""
        try:
            link = await self._connections.open(node_id)
        except ConnectFailed as error:
            self._fail(number, str(error))
            if not self._connections.live:
                self._stop(f"the target is gone ({error})")
            return
        if self._is_stopping:
            link.close()
            return
        self._connections.adopt(lane, link, node_id)
        link.on_frame = _bind(self._on_answer, lane, link)
        link.on_lost = _bind(self._on_lost, lane, link)
        link.on_writable = lambda: self._on_writable(lane)

    def _on_writable(self, lane: Lane) -> None:
        self._queue(lane)
        self._pump()

    async def _ask_metadata(self, names: list[str]) -> None:
        await ask_metadata(self.target, self.translation, names)
        self._asked.update(names)

    async def _await_leaders(self, outcome: Outcome) -> None:
        """The step is complete when the partitions that it created are served."""
        made = made_partitions(outcome)
        if not self._unserved.issuperset(made):
            if not await await_leaders(self.target, self.translation, made):
                self._unserved.update(made)
        self._completion.complete(outcome.step.number, outcome)

    # -- time -------------------------------------------------------------------------------

    def _wake(self, lane: Lane, at_ns: int) -> None:
        if lane.timer is None:
            lane.timer = self._loop.call_at(self._began_s + at_ns / 1e9, self._awake, lane)
            self._timer_count += 1

    def _awake(self, lane: Lane) -> None:
        lane.timer = None
        self._timer_count -= 1
        self._queue(lane)
        self._pump()


def _keep_answer(outcome: Outcome, frame: bytes, reason: str, now: int) -> None:
    """An answer that is not final stays in the outcome."""
    earlier = EarlierAnswer(outcome.sent or b"", frame, reason, outcome.sent_ns, now)
    outcome.earlier = [*outcome.earlier, earlier]


def _bind(
    call: Callable[[Lane, LaneConnection, Any], None], lane: Lane, link: LaneConnection
) -> Callable[[Any], None]:
    def bound(value: Any) -> None:
        call(lane, link, value)

    return bound
