"""What a request of a run waits for: other requests, and a target that is not ready yet.

A step that changes metadata, or ends a transaction, is complete when the target shows that
everywhere. So the reads that the plan sends after it see it, on every node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Mode, Outcome, Step
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.settling import (
    await_empty_group,
    await_metadata,
    await_partitions,
    await_transaction,
)
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.nodes import coordinators_of, topics_of
from kdissect.replay.translation.unready import Place
from kdissect.replay.workload.messages import NOT_MADE_YET, decoded, entries

PAUSES_S = (0.03, 0.06, 0.12, 0.25, 0.5)  # before a request is sent again; the last one for more
WAIT_S, SHORT_WAIT_S = 8.0, 0.5
# parts of a broker that have metadata of their own, beside the image that all others use
_APPLIED_LATER = frozenset({"config", "acls", "tokens"})


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


class Settled:
    """The requests of the replay's own around those of the workload."""

    def __init__(self, target: Target, ids: IdMap, patience: Patience) -> None:
        self._target, self._ids, self._patience = target, ids, patience
        self._asked: set[str] = set()  # topics that Metadata was requested for

    async def learn_topics(self, step: Step) -> None:
        """Learn leaders and ids of topics that a request needs and nothing is known of."""
        names = {name for name in topics_of(self._ids, step) if not self._ids.target.is_known(name)}
        if not self._asked.issuperset(names):
            self._asked |= names
            await self._learn_metadata(sorted(names))

    async def look_up(self, step: Step) -> None:
        """Learn leaders and coordinators anew, as clients do before they send a request again."""
        if names := topics_of(self._ids, step):
            await self._learn_metadata(names)
        for key in coordinators_of(self._ids, step):
            with suppress(ConnectFailed):
                if (node_id := await self._target.coordinator(*key, wait_s=0.0)) is not None:
                    self._ids.target.coordinators[key] = node_id

    async def _learn_metadata(self, names: list[str]) -> None:
        with suppress(ConnectFailed):
            self._ids.target.learn_metadata(await self._target.learn_metadata(names))

    async def before(self, step: Step) -> None:
        """Wait until groups are empty and transactions over that had run out of time then."""
        for (kind, captured), limit_ns in step.awaits:
            limit_s, name = limit_ns / 1e9, self._ids.name(kind, captured)
            if kind == "group":
                await await_empty_group(self._target, name, limit_s)
            else:
                await await_transaction(self._target, name, limit_s, is_ending=False)

    async def after(self, outcome: Outcome) -> None:
        """Wait until the target shows everywhere what a request has changed."""
        step = outcome.step
        if step.exchange.api_key == ApiKey.END_TXN:
            for _, name in coordinators_of(self._ids, step):
                await self._within(partial(await_transaction, self._target, name, is_ending=True))
        if step.creates:
            if made := made_partitions(outcome):
                await self._within(partial(await_partitions, self._target, made))
                self._ids.target.learn_metadata(self._target.metadata)
        elif step.changes_metadata:
            changed = {resource[0] for resource, mode in step.accesses if mode is Mode.WRITE}
            all_parts = bool(changed & _APPLIED_LATER)
            await self._within(partial(await_metadata, self._target, all_parts=all_parts))

    async def _within(self, wait: Callable[..., Awaitable[bool]]) -> None:
        """Waits in vain share their time with those for requests that are sent again."""
        began_s = time.monotonic()
        if not await wait(limit_s=self._patience.limit_s):
            self._patience.in_vain(time.monotonic() - began_s)


def made_partitions(outcome: Outcome) -> dict[str, int]:
    """The number of partitions of each topic that a request created: a CreateTopics, a
    CreatePartitions, or a Metadata request for a topic that was not there."""
    api_key, version = outcome.step.exchange.api_key, outcome.api_version
    request = decoded(outcome.sent or b"", "request", api_key, version)
    answer = decoded(outcome.answer or b"", "response", api_key, version)
    if request is None or answer is None or request.body.get("validate_only"):
        return {}
    if api_key == ApiKey.METADATA and not request.body.get("allow_auto_topic_creation", True):
        return {}
    results = entries(answer.body.get("topics")) or entries(answer.body.get("results"))
    taken_codes = NOT_MADE_YET if api_key == ApiKey.METADATA else {0}
    taken = {each["name"] for each in results if each["error_code"] in taken_codes}
    return {
        each["name"]: max(each.get("count", 1), each.get("num_partitions", 1))
        for each in entries(request.body["topics"])
        if each["name"] in taken
    }
