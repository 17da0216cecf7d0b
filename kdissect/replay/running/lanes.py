"""Captured connections during the run: their steps, and their connections to the target.

A `Lane` is a captured connection. It has one connection to each node of the target that its
requests go to (`LaneConnections`). A request of which several nodes get a part goes over
connections of its own (`NodeConnections`), which are not pipelined.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from kdissect.replay.model import Attempt, Outcome
from kdissect.replay.running.result import LinkRecord
from kdissect.replay.target.cluster import Target, show_address
from kdissect.replay.target.connection import ConnectFailed, Link, connect, connect_as

CONNECTS_AT_ONCE = 40  # Kafka's default backlog is 50; a SYN that is dropped costs a second
RECONNECT_PAUSES_S = (0.05, 0.1, 0.25, 0.5, 1.0, 1.0)
_FENCE = b"\0\x12\0\0\0\0\0\0\xff\xff"  # ApiVersions v0, correlation id 0, no client id


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


class LaneConnections:
    """The connections of all lanes.

    records: each connection of the run is noted there. now: nanoseconds since the run's start.
    live: those that are open. reconnects: connections that ended before their lane did.
    """

    def __init__(self, target: Target, records: list[LinkRecord], now: Callable[[], int]) -> None:
        self._target, self._records, self._now = target, records, now
        self._slots = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self.live: set[LaneConnection] = set()
        self.reconnects = 0

    @property
    def has_pending(self) -> bool:
        """Return whether a request on any connection waits for its answer."""
        return any(link.pending for link in self.live)

    async def open(self, node_id: int | None) -> LaneConnection:
        """Open a connection to a node, tried for a while. Raises ConnectFailed."""
        host, port = self._target.address(node_id)
        pauses = list(RECONNECT_PAUSES_S)
        while True:
            try:
                async with self._slots:
                    return await connect_as(LaneConnection, host, port, self._target.access)
            except ConnectFailed as error:
                if error.kind in ("tls", "login") or not pauses:
                    reason = f"no connection to {host}:{port}: {error}"
                    raise ConnectFailed(error.kind, reason) from None
                await asyncio.sleep(pauses.pop(0))

    def adopt(self, lane: Lane, link: LaneConnection, node_id: int | None) -> None:
        """Make an open connection the lane's one to that node."""
        now = self._now()
        link.node_id = node_id
        link.record = len(self._records)
        self._records.append(LinkRecord(*link.addresses(), opened_ns=now))
        if link.relogin_s is not None:
            link.relogin_at_ns = now + int(link.relogin_s * 1e9)
        lane.links[node_id] = link
        self.live.add(link)

    def drop(self, lane: Lane, link: LaneConnection) -> None:
        """Forget a connection that the target ended."""
        if link in self.live:
            self.live.discard(link)
            self._records[link.record].closed_ns = self._now()
            self.reconnects += lane.pos < len(lane.numbers)
        for node_id, each in list(lane.links.items()):
            if each is link:
                del lane.links[node_id]

    def close(self, link: LaneConnection) -> None:
        self.live.discard(link)
        if self._records[link.record].closed_ns < 0:
            self._records[link.record].closed_ns = self._now()
        link.close()

    async def log_in_again(self, link: LaneConnection) -> None:
        """KIP-368: a session's time is up; a new login over the same connection."""
        sasl = self._target.access.sasl
        assert sasl is not None
        try:
            async with asyncio.timeout(self._target.access.connect_timeout):
                await link.log_in(sasl)
        except (ConnectFailed, TimeoutError) as error:
            link.fail(f"the new login failed: {error}")
            return
        seconds = link.relogin_s
        link.relogin_at_ns = 0 if seconds is None else self._now() + int(seconds * 1e9)


class NodeConnections:
    """records: where each connection is noted; now: nanoseconds since the run's start."""

    def __init__(self, target: Target, records: list[LinkRecord], now: Callable[[], int]) -> None:
        self._target, self._records, self._now = target, records, now
        self._links: dict[tuple[int, int | None], tuple[Link, int]] = {}  # (lane, node)

    async def ask(
        self, lane: int, frames: Sequence[tuple[int | None, bytes]], expects_response: bool
    ) -> list[Attempt]:
        """Send each node its frame, wait for all answers. Without responses, until an ApiVersions
        behind each frame is answered. Raises ConnectFailed; links are closed then."""
        try:
            return await asyncio.gather(
                *(self._ask(lane, node, frame, expects_response) for node, frame in frames)
            )
        except BaseException:
            self.close(lane)  # answers that still come would be taken for others'
            raise

    async def _ask(
        self, lane: int, node: int | None, frame: bytes, expects_response: bool
    ) -> Attempt:
        link, record = await self._open(lane, node)
        sent_ns = self._now()
        try:
            if expects_response:
                answer = await link.ask_frame(frame)
            else:
                link.send(frame)
                await link.ask_frame(_FENCE)
                answer = b""
        except ConnectFailed as error:
            where = show_address(*self._target.address(node))
            raise ConnectFailed(error.kind, f"{where}: {error}") from None
        if answer and answer[:4] != frame[4:8]:
            found = int.from_bytes(answer[:4], "big")
            raise ConnectFailed("unreachable", f"an answer has correlation id {found}")
        return Attempt(record, frame, sent_ns, answer, self._now())

    async def _open(self, lane: int, node: int | None) -> tuple[Link, int]:
        known = self._links.get((lane, node))
        if known is not None and known[0].lost is None:
            return known
        host, port = self._target.address(node)
        link = await connect(host, port, self._target.access)
        self._records.append(LinkRecord(*link.addresses(), opened_ns=self._now()))
        self._links[lane, node] = link, len(self._records) - 1
        return self._links[lane, node]

    def close(self, lane: int | None = None) -> None:
        """Those of one lane, or all."""
        for key in [key for key in self._links if lane is None or key[0] == lane]:
            link, record = self._links.pop(key)
            self._records[record].closed_ns = self._now()
            link.close()
