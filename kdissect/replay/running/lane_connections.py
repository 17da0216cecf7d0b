"""Opens, records and closes the connections of lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kdissect.replay.running.lane import Lane, LaneConnection
from kdissect.replay.running.result import LinkRecord
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed, connect_as

CONNECTS_AT_ONCE = 40  # Kafka's default backlog is 50; a SYN that is dropped costs a second
RECONNECT_PAUSES_S = (0.05, 0.1, 0.25, 0.5, 1.0, 1.0)


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
