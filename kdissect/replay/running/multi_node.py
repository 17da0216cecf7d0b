"""Connections to several nodes, for requests of which each node gets a part.

A lane sends its other requests over connections of their own. The connections here are not
pipelined: a part is sent when no other request of its connection is in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kdissect.replay.model import Attempt
from kdissect.replay.running.result import LinkRecord
from kdissect.replay.target.cluster import Target, show_address
from kdissect.replay.target.connection import ConnectFailed, Link, connect

_FENCE = b"\0\x12\0\0\0\0\0\0\xff\xff"  # ApiVersions v0, correlation id 0, no client id


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
