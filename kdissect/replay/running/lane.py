"""A captured connection during the run: its steps, the next one, and its connections."""

from __future__ import annotations

import asyncio
from collections import deque

from kdissect.replay.model import Outcome
from kdissect.replay.target.connection import Link


class LaneConnection(Link):
    """A connection of a lane. pending: requests that are not answered, in order (step number,
    correlation id, time, bytes that count as in flight)."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: deque[tuple[int, int, int, int]] = deque()
        self.correlation_id = 0
        self.record = -1
        self.relogin_at_ns = 0  # 0: never
        self.node_id: int | None = None


class Lane:
    """Steps of a captured connection, in order. pos: of the next one to send.

    links: connections to the target by node id (None: the bootstrap address). timeouts: how many
    requests timed out in a row.
    """

    __slots__ = (
        "busy",
        "close_timer",
        "complete_pos",
        "held",
        "is_queued",
        "links",
        "number",
        "numbers",
        "pos",
        "ready_ns",
        "timeouts",
        "timer",
    )  # fmt: skip

    def __init__(self, number: int, numbers: list[int]) -> None:
        self.number, self.numbers, self.pos = number, numbers, 0
        self.links: dict[int | None, LaneConnection] = {}
        self.is_queued = False  # in the runner's queue of lanes that can go on
        self.complete_pos = 0  # steps before it are complete
        self.held: dict[int, Outcome] = {}  # done, but an earlier step is not
        self.busy = 0  # tasks that it waits for
        self.timer: asyncio.TimerHandle | None = None
        self.close_timer: asyncio.TimerHandle | None = None
        self.ready_ns = -1  # when the next step had everything but its time and its turn
        self.timeouts = 0

    def go_on(self) -> None:
        """Turn to the next step, which is not ready yet."""
        self.pos += 1
        self.ready_ns = -1

    def cancel(self) -> None:
        """Cancel both timers."""
        for timer in (self.timer, self.close_timer):
            if timer is not None:
                timer.cancel()
