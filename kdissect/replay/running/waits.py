"""What a request of a run waits for: other requests, and a target that is not ready yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kdissect.replay.translation.unready import Place

PAUSES_S = (0.03, 0.06, 0.12, 0.25, 0.5)  # before a request is sent again; the last one for more
WAIT_S, SHORT_WAIT_S = 8.0, 0.5


class StepStates:
    """Which steps of a plan were sent, and which are complete. left: how many are not complete.

    A step is *complete* when it was answered, failed, timed out or was skipped.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self.is_complete = bytearray(count)
        self._is_sent = bytearray(count)
        self._on_complete: dict[int, asyncio.Future[None]] = {}
        self._on_sent: dict[int, asyncio.Future[None]] = {}

    async def until_complete(self, number: int) -> None:
        if not self.is_complete[number]:
            await _future(self._on_complete, number)

    async def until_sent(self, number: int) -> None:
        """A complete step counts as sent."""
        if not self._is_sent[number]:
            await _future(self._on_sent, number)

    def sent(self, number: int) -> None:
        self._is_sent[number] = 1
        _resolve(self._on_sent, number)

    def complete(self, number: int) -> None:
        self.left -= not self.is_complete[number]
        self.is_complete[number] = 1
        self.sent(number)
        _resolve(self._on_complete, number)


async def _future(waited: dict[int, asyncio.Future[None]], number: int) -> None:
    future = waited.get(number)
    if future is None:
        future = waited[number] = asyncio.get_running_loop().create_future()
    await future  # cancelled with all that wait for it, at the end of the run


def _resolve(waited: dict[int, asyncio.Future[None]], number: int) -> None:
    future = waited.pop(number, None)
    if future is not None and not future.done():
        future.set_result(None)


class Patience:
    """How long requests are sent again while the target is not ready.

    A partition that the target does not serve fails in every request to it. All of them share one
    wait of `WAIT_S`; after it the partition is given up, and answers about it are final. The same
    goes for topics, groups and transactions, and for a target that does not settle. Waits that end
    in vain share `WAIT_S` in a run: after that, whatever else fails is given `SHORT_WAIT_S`.
    """

    def __init__(self) -> None:
        self._since: dict[Place, float] = {}
        self._given_up: set[Place] = set()
        self._left_s = WAIT_S

    @property
    def limit_s(self) -> float:
        """How long to wait for whatever begins to fail now."""
        return max(self._left_s, SHORT_WAIT_S)

    def in_vain(self, waited_s: float) -> None:
        """A wait has ended without success."""
        self._left_s -= waited_s

    def lasts(self, places: Iterable[Place], now_s: float) -> bool:
        """Return whether a request is sent again because of these places, which are not ready."""
        is_waiting = False
        for place in places:
            if place in self._given_up:
                continue
            waited_s = now_s - self._since.setdefault(place, now_s)
            if waited_s < self.limit_s:
                is_waiting = True
            else:
                self._given_up.add(place)
                self.in_vain(waited_s)
        return is_waiting

    def ready(self, places: Iterable[Place]) -> None:
        """A request to these places was answered after they had not been ready."""
        for place in places:
            self._since.pop(place, None)
