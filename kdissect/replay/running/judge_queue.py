"""Answers are judged beside the run: while nothing else is to do, or when it is over.

Verdicts depend on the order in which answers came, so outcomes are judged in the order in which
they were completed. At recorded pace that happens in short slices with room between them; at pace
max, where the loop is never without work, after the run.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from kdissect.replay.model import Comparison, Outcome

SLICE_NS, ROOM_NS = 2_000_000, 20_000_000


class JudgeQueue:
    """The outcomes of a run that have no judgement yet."""

    def __init__(self, comparison: Comparison | None) -> None:
        self._comparison = comparison
        self._waiting: deque[Outcome] = deque()
        self._is_busy = self._is_over = False

    def add(self, outcome: Outcome) -> None:
        """A step is complete."""
        self._waiting.append(outcome)

    def wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """There may be time for some of them."""
        if self._waiting and not self._is_busy:
            self._is_busy = True
            loop.call_soon(self._some, loop)

    def _some(self, loop: asyncio.AbstractEventLoop) -> None:
        end = time.monotonic_ns() + SLICE_NS
        while self._waiting and time.monotonic_ns() < end:
            self._judge(self._waiting.popleft())
        if self._waiting and not self._is_over:
            loop.call_later(ROOM_NS / 1e9, self._some, loop)
        else:
            self._is_busy = False

    def _judge(self, outcome: Outcome) -> None:
        if self._comparison is not None:
            outcome.judgement = self._comparison.judge(outcome)

    def finish(self, outcomes: Sequence[Outcome | None]) -> None:
        """After the run: all that are left, and what all answers together have changed."""
        self._is_over = True
        while self._waiting:
            self._judge(self._waiting.popleft())
        if self._comparison is None:
            return
        for number, judgement in self._comparison.finish().items():
            outcome = outcomes[number]
            assert outcome is not None
            outcome.judgement = judgement
