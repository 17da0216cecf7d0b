"""Captured connections and steps during the run, and the connections to the target.

A `Lane` is a captured connection: its steps, and one connection to each node of the target that
its requests go to. `Connections` opens them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed, Link, connect

CONNECTS_AT_ONCE = 40  # Kafka's default backlog is 50; a SYN that is dropped costs a second
RECONNECT_PAUSES_S = (0.05, 0.1, 0.25, 0.5, 1.0, 1.0)


@dataclass(eq=False)
class Lane:
    """A captured connection, or the connections of a group's member beside it.

    numbers: of its steps, in order. pos: of the one that it sends next. links: by node of the
    target (None: the bootstrap address). last: the exchange that it has sent last. again: how many
    of its requests are being sent again. timeouts: how many answers in a row did not come.
    """

    numbers: list[int]
    pos: int = 0
    links: dict[int | None, Link] = field(default_factory=dict)
    last: asyncio.Task[None] | None = None
    again: int = 0
    timeouts: int = 0

    @property
    def is_over(self) -> bool:
        """Return whether all its requests were sent."""
        return self.pos >= len(self.numbers)


class Connections:
    """The connections of a run to its target.

    opened: all of them, in order of their numbers. live: those that are open. reconnects:
    connections that ended although their lane had more to send.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._slots = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self.opened: list[Link] = []
        self.reconnects = 0

    @property
    def live(self) -> list[Link]:
        return [link for link in self.opened if link.lost is None]

    async def of(self, lane: Lane, node_id: int | None) -> Link:
        """The lane's connection to a node, opened or logged in again if it has to be.

        Raises ConnectFailed.
        """
        link = lane.links.get(node_id)
        if link is None or link.lost is not None:
            self.reconnects += link is not None
            link = lane.links[node_id] = await self._open(node_id)
            link.number = len(self.opened)
            self.opened.append(link)
        elif link.is_login_due:
            await self._log_in_again(link)
        await link.writable()
        return link

    async def _open(self, node_id: int | None) -> Link:
        """Try for a while."""
        host, port = self._target.address(node_id)
        pauses = list(RECONNECT_PAUSES_S)
        while True:
            try:
                async with self._slots:
                    return await connect(host, port, self._target.access)
            except ConnectFailed as error:
                if error.kind in ("tls", "login") or not pauses:
                    reason = f"no connection to {host}:{port}: {error}"
                    raise ConnectFailed(error.kind, reason) from None
                await asyncio.sleep(pauses.pop(0))

    async def _log_in_again(self, link: Link) -> None:
        """KIP-368: a session's time is up; a new login over the same connection."""
        sasl = self._target.access.sasl
        assert sasl is not None
        while link.pending:
            await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(self._target.access.connect_timeout):
                await link.log_in(sasl)
        except (ConnectFailed, TimeoutError) as error:
            link.fail(f"the new login failed: {error}")


class StepStates:
    """Which steps of a plan were sent, and which are complete. left: how many are not complete.

    A step is *complete* when it was answered, failed, timed out or was skipped.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self.is_complete = bytearray(count)
        self._is_sent = bytearray(count)
        self._on_complete: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._on_sent: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def until_complete(self, number: int) -> None:
        if not self.is_complete[number]:
            await self._on_complete[number].wait()

    async def until_sent(self, number: int) -> None:
        """A complete step counts as sent."""
        if not self._is_sent[number]:
            await self._on_sent[number].wait()

    def sent(self, number: int) -> None:
        self._is_sent[number] = 1
        if number in self._on_sent:
            self._on_sent.pop(number).set()

    def complete(self, number: int) -> None:
        self.left -= not self.is_complete[number]
        self.is_complete[number] = 1
        self.sent(number)
        if number in self._on_complete:
            self._on_complete.pop(number).set()
