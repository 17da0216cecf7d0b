"""Which steps of a run are settled, in which order, and what each of the others waits for.

A step is *settled* when nothing more will happen to it: answered, failed, timed out or skipped.
Steps of a connection are settled in its order, as brokers answer: who waits for the last of those
that it needs waits for all before. A step that is done behind one that is not (which is asked
again, or is under way over another link) is held until then.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from kdissect.replay.model import Outcome, ReplayPlan
from kdissect.replay.running.lane import Script


class Settling:
    """Of one run. free: called with the script of a step that waits for nothing any more; done:
    with each outcome as it is settled.

    outcomes: by step number, None before anything happened. is_settled: 1 where it is. waits: for
    how many steps each waits. left: how many are not settled.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        scripts: list[Script],
        free: Callable[[Script], None],
        done: Callable[[Outcome], None],
    ) -> None:
        count = len(plan.steps)
        self.outcomes: list[Outcome | None] = [None] * count
        self.left = count
        self.is_settled = bytearray(count)
        self.waits = array("i", [0]) * count
        self._plan, self._scripts, self._free, self._done = plan, scripts, free, done
        self._on_settled: dict[int, list[int]] = {}
        self._on_sent: dict[int, list[int]] = {}
        for step in plan.steps:
            for other in step.depends_on:
                self._on_settled.setdefault(other, []).append(step.number)
            for other in step.follows:
                self._on_sent.setdefault(other, []).append(step.number)
            self.waits[step.number] = len(step.depends_on) + len(step.follows)

    def sent(self, number: int) -> None:
        """A step has gone out: those that follow it may."""
        waiting = self._on_sent.pop(number, None)
        if waiting is not None:
            self._count_down(waiting)

    def settle(self, number: int, outcome: Outcome) -> None:
        """A step is done: settled, with those that were held behind it, or held itself."""
        script, is_settled = self._scripts[outcome.step.connection], self.is_settled
        numbers, pos = script.numbers, script.settled_pos
        while numbers[pos] != number and is_settled[numbers[pos]]:
            pos += 1
        script.settled_pos = pos
        if numbers[pos] != number:
            script.held[number] = outcome
            return
        self.settle_now(number, outcome)
        while script.held and (pos := pos + 1) < len(numbers):
            held = script.held.pop(numbers[pos], None)
            if held is not None:
                self.settle_now(numbers[pos], held)
            elif not is_settled[numbers[pos]]:
                return

    def settle_now(self, number: int, outcome: Outcome) -> None:
        """Whatever is before it on its connection."""
        if self.is_settled[number]:
            return
        self.outcomes[number] = outcome
        self.is_settled[number] = 1
        self.left -= 1
        self._done(outcome)
        self.sent(number)
        waiting = self._on_settled.pop(number, None)
        if waiting is not None:
            self._count_down(waiting)

    def is_done(self, number: int) -> bool:
        """Whether a step is settled, or held until those before it are."""
        script = self._scripts[self._plan.steps[number].connection]
        return bool(self.is_settled[number]) or number in script.held

    def release(self, script: Script) -> None:
        """Nothing will come before what is held."""
        for number, outcome in sorted(script.held.items()):
            self.settle_now(number, outcome)
        script.held.clear()

    def _count_down(self, numbers: Iterable[int]) -> None:
        waits, steps = self.waits, self._plan.steps
        for number in numbers:
            waits[number] -= 1
            if not waits[number]:
                self._free(self._scripts[steps[number].connection])
