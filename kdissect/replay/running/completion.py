"""Tracks complete steps of a run, their order, and the steps for which others wait.

A step is *complete* when it was answered, failed, timed out or was skipped. Dependent steps then
proceed. Steps of a connection complete in its order, as brokers answer. So a step that waits for
the last one of a connection waits for all of them. If an earlier step of the connection is sent
again, or is in flight to another node, the outcome of a later one is held until then.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from kdissect.replay.model import Outcome, ReplayPlan
from kdissect.replay.running.lanes import Lane


class StepCompletion:
    """The state of a run's steps.

    free: called with the lane of a step that may proceed. done: called with each complete outcome.

    outcomes: by step number, None for incomplete steps. is_complete: 1 for complete steps. waits:
    the number of steps that each step still waits for. left: the number of incomplete steps.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        lanes: list[Lane],
        free: Callable[[Lane], None],
        done: Callable[[Outcome], None],
    ) -> None:
        count = len(plan.steps)
        self.outcomes: list[Outcome | None] = [None] * count
        self.left = count
        self.is_complete = bytearray(count)
        self.waits = array("i", [0]) * count
        self._plan, self._lanes, self._free, self._done = plan, lanes, free, done
        self._on_complete: dict[int, list[int]] = {}
        self._on_sent: dict[int, list[int]] = {}
        for step in plan.steps:
            for other in step.depends_on:
                self._on_complete.setdefault(other, []).append(step.number)
            for other in step.follows:
                self._on_sent.setdefault(other, []).append(step.number)
            self.waits[step.number] = len(step.depends_on) + len(step.follows)

    def sent(self, number: int) -> None:
        """Note that a step was sent; steps that only wait for that may go now."""
        waiting = self._on_sent.pop(number, None)
        if waiting is not None:
            self._count_down(waiting)

    def complete(self, number: int, outcome: Outcome) -> None:
        """Complete a step, or hold it until the earlier steps of its connection are complete.

        A completed step releases the held steps that come directly after it.
        """
        lane, is_complete = self._lanes[outcome.step.connection], self.is_complete
        numbers, pos = lane.numbers, lane.complete_pos
        while numbers[pos] != number and is_complete[numbers[pos]]:
            pos += 1
        lane.complete_pos = pos
        if numbers[pos] != number:
            lane.held[number] = outcome
            return
        self.complete_now(number, outcome)
        while lane.held and (pos := pos + 1) < len(numbers):
            held = lane.held.pop(numbers[pos], None)
            if held is not None:
                self.complete_now(numbers[pos], held)
            elif not is_complete[numbers[pos]]:
                return

    def complete_now(self, number: int, outcome: Outcome) -> None:
        """Complete a step, whatever is before it on its connection."""
        if self.is_complete[number]:
            return
        self.outcomes[number] = outcome
        self.is_complete[number] = 1
        self.left -= 1
        self._done(outcome)
        self.sent(number)
        waiting = self._on_complete.pop(number, None)
        if waiting is not None:
            self._count_down(waiting)

    def is_done(self, number: int) -> bool:
        """Return whether a step is complete, or held until those before it are."""
        lane = self._lanes[self._plan.steps[number].connection]
        return bool(self.is_complete[number]) or number in lane.held

    def release(self, lane: Lane) -> None:
        """Complete the steps that a lane holds, although earlier steps of the lane are open.

        Called at the end of the run, after which no response to the earlier steps can come.
        """
        for number, outcome in sorted(lane.held.items()):
            self.complete_now(number, outcome)
        lane.held.clear()

    def _count_down(self, numbers: Iterable[int]) -> None:
        waits, steps = self.waits, self._plan.steps
        for number in numbers:
            waits[number] -= 1
            if not waits[number]:
                self._free(self._lanes[steps[number].connection])
