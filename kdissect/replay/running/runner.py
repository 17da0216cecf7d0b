"""The run: the requests of each captured connection, sent over connections of their own.

Each captured connection is a task (`_play`). It takes its steps in order: a step waits for the
steps that the plan names, for a connection to its node, for its time, for what ran out of time
(`Step.awaits`), and for its turn (`Lane.turn`). Then its request is translated and sent. A second
task (`_finish`) waits for the answer, sends the request again while the target is not ready,
teaches the answer to the translation, and completes the step. So the requests of a connection stay
pipelined as far as the plan allows.

Steps of a connection complete in its order, as brokers answer. While a step is sent again, its
connection sends nothing else.

A failure becomes an outcome with an error and completes the step, so the run goes on. A connection
that ends fails its requests in flight, and is opened again for the next step. If it cannot be
opened, the replay looks up the leaders anew and tries once more. An answer that does not come in
time ends its connection. Only a target of which no node answers any more ends the run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

from kdissect.errors import Error
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.judge import RunFacts
from kdissect.replay.model import Attempt, Outcome, ReplayPlan, SkipCode, Skipped
from kdissect.replay.planning.plan import Pace, schedule
from kdissect.replay.running.members import Members
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import (
    ConnectFailed,
    Connections,
    LinkRecord,
    Links,
    Posted,
    allow_many_files,
)
from kdissect.replay.target.settling import Patience, SettlingWaits, within
from kdissect.replay.translation.nodes import merged, node_of, parts_of
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload.messages import BLOCKING_APIS
from kdissect.text import plural

PAUSES_S = (0.03, 0.06, 0.12, 0.25, 0.5)  # before a request is sent again; the last one for more
CONNECT_AHEAD_NS = 500_000_000  # connections are opened this long before their first step is due
FAILURES_MAX = 3  # in a row, before the rest of a captured connection is given up
_FENCE = b"\0\x12\0\0\0\0\0\0\xff\xff"  # ApiVersions v0, correlation id 0, no client id
NOT_WAITED = "the replay did not wait longer for the answer"
GRACE_S = 1.0


@dataclass
class RunResult:
    """Outcomes and connections of a run, and the state of the target after it.

    outcomes: by step number.
    ended: why the run ended early, else "". is_interrupted: the user ended the run.
    start_time_ns: wall clock at the run's start.
    facts: None if the run never began.
    """

    outcomes: list[Outcome]
    links: list[LinkRecord] = field(default_factory=list)
    start_time_ns: int = 0
    elapsed_ns: int = 0
    ended: str = ""
    is_interrupted: bool = False
    reconnects: int = 0
    facts: RunFacts | None = None


@dataclass(eq=False)
class Lane:
    """A captured connection.

    numbers: of its steps, in order. pos: of the one that it sends next. links: its connections to
    the target. last: the exchange that it has sent last. turn: who may send: while a request is
    sent again, no other. failures: how many connections and answers in a row did not come.
    """

    numbers: list[int]
    pos: int = 0
    links: Links = field(default_factory=dict)
    last: asyncio.Task[None] | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    failures: int = 0

    @property
    def is_over(self) -> bool:
        """Return whether all its requests were sent."""
        return self.pos >= len(self.numbers)


def not_begun(plan: ReplayPlan, reason: str) -> RunResult:
    """The result of a run that never began: every step that would have been sent has an error."""
    result = RunResult(_outcomes(plan), start_time_ns=time.time_ns(), ended=reason)
    for outcome in result.outcomes:
        if outcome.skipped is None:
            outcome.error = f"not sent: {reason}"
    return result


def _outcomes(plan: ReplayPlan) -> list[Outcome]:
    return [Outcome(step, skipped=step.skipped) for step in plan.steps]


class Runner:
    """One run of a plan against one target; `run` once.

    answer_timeout_s: how long to wait for a response. For requests that wait at the broker, the
    captured latency is added. left: the number of steps that are not complete.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        translator: Translator,
        target: Target,
        pace: Pace,
        answer_timeout_s: float = 30.0,
    ) -> None:
        self.plan, self.translator, self.target, self.pace = plan, translator, target, pace
        self.answer_timeout_s = answer_timeout_s
        self.sent_count = self.answered_count = 0
        self.left = len(plan.steps)
        self.result = RunResult(_outcomes(plan))
        # by step: set when it was sent, and when it is complete
        self._sent = [asyncio.Event() for _ in plan.steps]
        self._done = [asyncio.Event() for _ in plan.steps]
        self._due = schedule(plan, pace)
        self._lanes = [Lane(numbers) for numbers in plan.lanes]
        self._connections = Connections(target.address, target.access, self._now)
        self._patience = Patience()
        self._waits = SettlingWaits(target, translator.ids, self._patience)
        self._members = Members(plan, translator, self._lanes, self._ask)
        self._open: dict[asyncio.Task[None], Outcome] = {}
        self._over = asyncio.Event()
        self._began_ns = 0

    def activity(self) -> str:
        """Return the run's work at the moment, for people. Another thread may call it."""
        where = f"replay to {self.target}"
        if not self.left or self._over.is_set():
            return f"{where}: comparing {plural(len(self.plan.steps), 'answer')}"
        text = f"{where}: {self.sent_count} sent, {self.answered_count} answered, {self.left} left"
        waiting = [each for each in tuple(self._open.values()) if each.answer is None]
        if waiting:
            oldest = min(waiting, key=lambda each: each.sent_ns)
            waits_s = (self._now() - oldest.sent_ns) / 1e9
            return f"{text}; {oldest.step.api_name} has waited for {waits_s:.1f} s"
        nexts = [lane.numbers[lane.pos] for lane in self._lanes if not lane.is_over]
        due_ns = min((self._due[number] for number in nexts), default=0) - self._now()
        return f"{text}; the next is due in {due_ns / 1e9:.1f} s" if due_ns > 0 else text

    # -- the whole run ----------------------------------------------------------------------

    async def run(self) -> RunResult:
        """Play the plan; the result has an outcome for every step, however the run ends.

        If it is cancelled, as by SIGINT, it sends no more requests, and returns all the same.
        """
        allow_many_files()
        # times count from the first due step; what has to be open by then is opened before
        lead_ns = 0 if self.pace.is_max else CONNECT_AHEAD_NS
        self._began_ns = time.monotonic_ns() + lead_ns
        self.result.start_time_ns = time.time_ns() + lead_ns
        await self._play_all()
        self.result.elapsed_ns = max(self._now(), 0)
        await self._end()
        self.result.links = [link.record for link in self._connections.opened]
        self.result.reconnects = self._connections.reconnects
        return self.result

    async def _play_all(self) -> None:
        """Until all steps are complete, `_stop` was called, or the run is cancelled."""
        for outcome in self.result.outcomes:
            if outcome.skipped is not None:
                self._complete(outcome)
        tasks = [self._task(self._play(lane)) for lane in self._lanes]
        tasks.append(self._task(self._members.keep(self._now)))
        try:
            if self.left:
                await self._over.wait()
        except asyncio.CancelledError:
            self.result.is_interrupted = True
            self._stop("interrupted")
        for task in tasks:
            task.cancel()

    def _task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self._stop(f"an error of kdissect's own: {task.exception()!r}")

    def _stop(self, reason: str) -> None:
        self.result.ended = self.result.ended or reason
        self._over.set()

    async def _end(self) -> None:
        """Close all connections, and give an outcome to each step that has none."""
        self._over.set()
        if self._open:  # answers that are on their way still count
            await asyncio.wait(list(self._open), timeout=GRACE_S)
        unanswered = f"{self.result.ended or 'the run ended'} before the answer came"
        for link in self._connections.opened:
            link.close(unanswered)
        if self._open:
            await asyncio.wait(list(self._open), timeout=GRACE_S)
        for task in list(self._open):
            task.cancel()
        for outcome in self.result.outcomes:
            if self._done[outcome.step.number].is_set():
                continue
            if outcome.sent is not None:
                outcome.error = unanswered
            elif self.result.is_interrupted:
                reason = "the run was interrupted before"
                outcome.skipped = Skipped(SkipCode.NOT_REACHED, reason)
            else:
                outcome.error = f"not sent: {self.result.ended}"
            self._complete(outcome)
        self.target.close()
        await asyncio.sleep(0)  # transports close in the loop's next round

    def _now(self) -> int:
        """Nanoseconds since the run's start."""
        return time.monotonic_ns() - self._began_ns

    # -- a captured connection ----------------------------------------------------------------

    async def _play(self, lane: Lane) -> None:
        """Send the steps of a captured connection in their order."""
        for number in lane.numbers:
            outcome = self.result.outcomes[number]
            if outcome.step.skipped is None:
                await self._send(lane, outcome)
            lane.pos += 1
        await self._leave(lane)

    async def _send(self, lane: Lane, outcome: Outcome) -> None:
        """Send a request when all that it waits for is there; `_finish` waits for the answer."""
        step, posted = outcome.step, list[Posted]()
        failed: ConnectFailed | None = None
        for other in step.depends_on:
            await self._done[other].wait()
        for other in step.sent_after:
            await self._sent[other].wait()
        due_ns = self._due[step.number]
        await self._until(due_ns - CONNECT_AHEAD_NS)
        ready_ns = self._now()
        if lane.failures >= FAILURES_MAX:
            outcome.error = "not sent: requests before it on this connection failed"
        else:
            try:
                try:
                    posted = await self._send_when_due(lane, outcome)
                except ConnectFailed:
                    await self._waits.look_up(step)
                    posted = await self._send_when_due(lane, outcome)
            except ConnectFailed as error:
                failed = error
        if outcome.sent is not None:
            self.sent_count += 1
            self._sent[step.number].set()
            self._members.sent(outcome)
            if not self.pace.is_max:
                outcome.lag_ns = max(outcome.sent_ns - due_ns, 0)
                outcome.own_lag_ns = max(outcome.sent_ns - max(due_ns, ready_ns), 0)
        lane.last = self._task(self._finish(lane, outcome, posted, failed, lane.last))
        self._open[lane.last] = outcome

    async def _send_when_due(self, lane: Lane, outcome: Outcome) -> list[Posted]:
        """Raises ConnectFailed if a connection cannot be opened."""
        step = outcome.step
        await self._connections.of(lane.links, node_of(self.translator.ids, step))
        await self._until(self._due[step.number])
        if step.awaits:
            await self._waits.before(step)
        async with lane.turn:
            return await self._send_parts(lane, outcome)

    async def _until(self, at_ns: int) -> None:
        wait_ns = at_ns - self._now()
        if wait_ns > 0:
            await asyncio.sleep(wait_ns / 1e9)

    async def _leave(self, lane: Lane) -> None:
        """Close the connections of a lane after the answers to all requests whose responses were
        captured. Other answers have `GRACE_S` more: the client went away, or the capture ended."""
        for number in lane.numbers:
            exchange = self.plan.steps[number].exchange
            if exchange.response_time_ns >= 0 or not exchange.expects_response:
                await self._done[number].wait()
        if lane.last is not None and not lane.last.done():
            await asyncio.wait([lane.last], timeout=GRACE_S)
        for link in lane.links.values():
            link.close(NOT_WAITED)

    # -- a request and its answer ---------------------------------------------------------------

    async def _send_parts(self, lane: Lane, outcome: Outcome) -> list[Posted]:
        """Send what the translation makes of a request by now: to each node its part. Nothing was
        sent if the outcome is skipped then."""
        step = outcome.step
        try:
            frame = self.translator.request(step)
        except Error as error:
            frame = Skipped(SkipCode.NOT_TRANSLATABLE, str(error))
        if isinstance(frame, Skipped):
            outcome.skipped = frame
            return []
        is_held = step.exchange.api_key in BLOCKING_APIS
        latency_s = max(step.exchange.latency_ns, 0) / 1e9 if is_held else 0.0
        limit_s = self.answer_timeout_s + latency_s
        parts = parts_of(self.translator.ids, step, frame)
        # all connections before any part: a request is sent as a whole, or not at all
        links = [await self._connections.of(lane.links, node_id) for node_id, _ in parts]
        posted = []
        for link, (_, part) in zip(links, parts, strict=True):
            if not step.expects_response:
                # brokers take the requests of a connection in order: with the answer to this one
                # the step is done
                link.send(part)
                part = _FENCE
            posted.append(link.post(part, limit_s))
        outcome.sent, outcome.sent_ns = frame, posted[0].attempt.sent_ns
        outcome.node_id = parts[0][0] if len(parts) == 1 else None
        outcome.api_version = self.translator.ids.api_version(step)
        outcome.dropped = self.translator.dropped.get(step.number, ())
        return posted

    async def _answers_to(self, posted: Sequence[Posted]) -> list[Attempt]:
        """Wait for the answers of all parts. Raises ConnectFailed."""
        for each in posted:
            await each.answered
        return [each.attempt for each in posted]

    async def _ask(self, links: Links, node_id: int | None, frame: bytes) -> Attempt:
        """A request of the replay's own and its answer. Raises ConnectFailed.

        It is part of a wait for the target, and so may take no longer than such a wait.
        """
        link = await self._connections.of(links, node_id)
        return (await self._answers_to([link.post(frame, self._patience.limit_s)]))[0]

    async def _finish(
        self,
        lane: Lane,
        outcome: Outcome,
        posted: Sequence[Posted],
        failed: ConnectFailed | None,
        before: asyncio.Task[None] | None,
    ) -> None:
        """From a request that was sent to its complete step. failed: why it could not be sent.
        before: the lane's last exchange."""
        step = outcome.step
        try:
            if failed is not None:
                raise failed
            if posted and step.expects_response:
                await self._await_final(lane, outcome, posted)
            elif posted:
                # a broker that refuses a Produce with acks 0 ends the connection; the captured one
                # may have ended it as well if no request follows
                is_end = step.number == lane.numbers[-1]
                with suppress(ConnectFailed) if is_end else nullcontext():
                    await self._answers_to(posted)
            if outcome.answer is not None:
                await self._waits.after(outcome)
        except ConnectFailed as error:
            outcome.error = str(error)
            if failed is not None or error.kind == "timeout":
                lane.failures += 1
                asked = self.target.ask(ApiKey.API_VERSIONS, {}, last=0, limit_s=0.0)
                if not await within(math.inf, asked):
                    self._stop(f"the target is gone ({error})")
        if outcome.error or outcome.skipped is not None:
            self.translator.failed(step)
        if before is not None and not before.done():
            await asyncio.wait([before])
        self._complete(outcome)

    async def _await_final(self, lane: Lane, outcome: Outcome, posted: Sequence[Posted]) -> None:
        """Wait for the answer, send the request again while it says that the target is not ready,
        and learn from the final one. Raises ConnectFailed."""
        step = outcome.step
        answer = await self._whole_answer(lane, outcome, posted)
        if unready := self.translator.unready(step, answer):
            async with lane.turn:
                began_s = time.monotonic()
                while self._patience.lasts(unready, time.monotonic() - began_s):
                    self._keep_earlier(outcome, answer, min(unready.values()))
                    posted = await self._send_again(lane, outcome)
                    if not posted:
                        return  # it cannot be translated any more
                    answer = await self._whole_answer(lane, outcome, posted)
                    unready = self.translator.unready(step, answer)
        self.answered_count += 1
        outcome.answer = answer
        try:
            self.translator.learn(step, answer)
        except Error as error:
            outcome.error = f"the answer cannot be understood: {error}"

    async def _whole_answer(self, lane: Lane, outcome: Outcome, posted: Sequence[Posted]) -> bytes:
        """The answers of all parts as one. Raises ConnectFailed."""
        attempts = await self._answers_to(posted)
        lane.failures = 0
        outcome.answered_ns = max(attempt.answered_ns for attempt in attempts)
        answers = [attempt.answer for attempt in attempts]
        return merged(self.translator.ids, outcome.step, answers)

    def _keep_earlier(self, outcome: Outcome, answer: bytes, reason: str) -> None:
        """An answer that is not final stays in the outcome."""
        assert outcome.sent is not None
        earlier = Attempt(outcome.sent, outcome.sent_ns, answer, outcome.answered_ns, reason)
        outcome.earlier = [*outcome.earlier, earlier]
        outcome.answered_ns = -1
        self.translator.not_final(outcome.step, answer)

    async def _send_again(self, lane: Lane, outcome: Outcome) -> list[Posted]:
        """After a pause, with what the replay has learnt of leaders and members by then."""
        step = outcome.step
        await asyncio.sleep(PAUSES_S[min(len(outcome.earlier), len(PAUSES_S)) - 1])
        await self._waits.look_up(step)
        await self._members.before_again(step)
        return await self._send_parts(lane, outcome)

    def _complete(self, outcome: Outcome) -> None:
        self._members.done(outcome)
        self.left -= 1
        if not self.left:
            self._over.set()
        self._sent[outcome.step.number].set()
        self._done[outcome.step.number].set()
