"""Waits until the target shows a change everywhere, with requests of the replay's own.

A controller answers a change of metadata as soon as its quorum has it. Brokers apply it some time
later, and a coordinator ends a transaction some time after its answer. Reads that come in between
show the state before. Each wait here has a time limit (`within`). If the target has not settled by
then, the answer to the next request shows what is missing.

`SettlingWaits` does this around the requests of a run: a step that changes metadata, or ends a
transaction, is complete when the target shows that everywhere. So the reads that the plan sends
after it see it, on every node.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import suppress

from kdissect.codec.internal_records import METADATA_TOPIC
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome, Resource, Step
from kdissect.replay.target.cluster import Target, tries
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.nodes import coordinators_of
from kdissect.replay.workload.messages import EARLIEST, partitions

SETTLE_S = 10.0
WAIT_S, SHORT_WAIT_S = 6.0, 0.5
# Resources that brokers know from the metadata log. Some parts of a broker have metadata of their
# own, beside the image that all others use.
_METADATA = frozenset({"topic", "topics", "config", "acls", "tokens", "quotas", "scram", "cluster"})
_APPLIED_LATER = frozenset({"config", "acls", "tokens"})
_CREATING_APIS = frozenset({ApiKey.CREATE_TOPICS, ApiKey.CREATE_PARTITIONS})
# These make topics some time after their answer (KIP-1071 for the second).
_MAKING_APIS = frozenset({ApiKey.METADATA, ApiKey.STREAMS_GROUP_HEARTBEAT})
_UNKNOWN = 1 << 62  # as far as any
ENDING = frozenset({"PrepareCommit", "PrepareAbort", "PrepareEpochFence"})
# States of groups with members, and of open transactions.
_PASSING = {
    "group": frozenset({"PreparingRebalance", "CompletingRebalance", "Stable"}),
    "transactional-id": ENDING | {"Ongoing"},
}


async def within(limit_s: float, waiting: Awaitable[object]) -> bool:
    """Return whether a wait ends within its time limit, and without a failure of the target."""
    with suppress(ConnectFailed, TimeoutError):
        async with asyncio.timeout(limit_s):
            await waiting
            return True
    return False


async def await_metadata(target: Target, *, all_parts: bool) -> None:
    """Wait until each broker has the metadata log as far as the quorum has it now.

    In a KRaft cluster, the epoch of the finalized features (KIP-584) is the offset of the metadata
    that a broker has. all_parts: wait until all its parts have applied it, such as its authorizer:
    only then it begins with the next batch, and an idle controller writes one every half second.
    Brokers with ZooKeeper do not say how far they are. Raises ConnectFailed.
    """
    end = await _quorum_end(target) - (not all_parts)
    behind = list(target.cluster.nodes) if end > 0 else []
    async for _ in tries():
        behind = [each for each in behind if await _applied_offset(target, each) < end]
        if not behind:
            return


async def _quorum_end(target: Target) -> int:
    """The high watermark of the metadata log; -1 if the target does not say."""
    if target.version(ApiKey.DESCRIBE_QUORUM) is None:
        return -1
    topic = {"topic_name": METADATA_TOPIC, "partitions": [{"partition_index": 0}]}
    body = await target.ask(ApiKey.DESCRIBE_QUORUM, {"topics": [topic]})
    found = [each for _, _, each in partitions(body) if not each["error_code"]]
    return int(found[0]["high_watermark"]) if found and not body["error_code"] else -1


async def _applied_offset(target: Target, node_id: int) -> int:
    """The offset of the metadata that a broker has; that of a broker that is gone does not
    matter."""
    try:
        answer = await target.ask_versions(node_id)
    except ConnectFailed:
        return _UNKNOWN
    offset = int(answer.get("finalized_features_epoch", -1))
    return offset if offset >= 0 else _UNKNOWN


async def await_partitions(target: Target, counts: Mapping[str, int]) -> None:
    """Wait until the leaders of topics serve all partitions.

    Metadata lists new partitions before their leaders accept requests. counts: the least number of
    partitions of each topic. Raises ConnectFailed.
    """
    async for _ in tries():
        await target.learn_metadata()
        listed = target.cluster.topics
        served = Counter(name for name, _ in await target.log_offsets(counts, EARLIEST))
        if all(served[name] >= max(n, listed.get(name, 0)) for name, n in counts.items()):
            return


# -- around the requests of a run -----------------------------------------------------------------


class Patience:
    """How long requests are sent again while the target is not ready.

    A partition that the target does not serve fails in every request to it. After a wait of
    `WAIT_S` for one of them the partition is given up, and answers about it are final. The same
    goes for topics, groups and transactions, and for a target that does not settle. Waits that end
    in vain share `WAIT_S` in a run: after that, whatever else fails is given `SHORT_WAIT_S`.
    """

    def __init__(self) -> None:
        self._given_up: set[Resource] = set()
        self._left_s = WAIT_S

    @property
    def limit_s(self) -> float:
        """How long to wait for whatever begins to fail now."""
        return max(self._left_s, SHORT_WAIT_S)

    def in_vain(self, waited_s: float) -> None:
        """A wait has ended without success."""
        self._left_s -= waited_s

    def lasts(self, unready: Iterable[Resource], waited_s: float) -> bool:
        """Return whether a request is sent again because of what is not ready. waited_s: since its
        first answer."""
        waiting = set(unready) - self._given_up
        is_over = waited_s >= self.limit_s
        if waiting and is_over:
            self._given_up |= waiting
            self.in_vain(waited_s)
        return bool(waiting) and not is_over


class SettlingWaits:
    """The requests of the replay's own around those of the workload."""

    def __init__(self, target: Target, ids: IdMap, patience: Patience) -> None:
        self._target, self._ids, self._patience = target, ids, patience
        self._in_vain: set[Resource] = set()  # awaited before a step

    async def look_up(self, step: Step) -> None:
        """Learn leaders and coordinators anew, as clients do before they send a request again."""
        await within(self._patience.limit_s, self._look_up(step))

    async def _look_up(self, step: Step) -> None:
        await self._target.learn_metadata([self._ids.topic(name) for name in step.named("topic")])
        for key in coordinators_of(self._ids, step):
            await self._target.coordinator(*key, wait_s=0.0)

    async def before(self, step: Step) -> None:
        """Wait until groups are empty and transactions over that had run out of time then. What did
        not come in this time is not awaited again."""
        for resource, limit_ns in step.awaits:
            if resource in self._in_vain:
                continue
            kind, captured = resource
            names, passing = [self._ids.name(kind, captured)], _PASSING[kind]
            over = self._target.states(kind, names, passing, math.inf)
            if not await within(limit_ns / 1e9, over):
                self._in_vain.add(resource)

    async def after(self, outcome: Outcome) -> None:
        """Wait until the target shows everywhere what a request has changed. Waits in vain share
        their time with those for requests that are sent again."""
        began_s = time.monotonic()
        if not await within(self._patience.limit_s, self._settled(outcome)):
            self._patience.in_vain(time.monotonic() - began_s)

    async def _settled(self, outcome: Outcome) -> None:
        step = outcome.step
        if step.exchange.api_key == ApiKey.END_TXN:
            names = [name for _, name in coordinators_of(self._ids, step)]
            await self._target.states("transactional-id", names, ENDING, math.inf)
        changed = {kind for kind, *_ in step.changed}
        if changed & _METADATA:
            await await_metadata(self._target, all_parts=bool(changed & _APPLIED_LATER))
        if "topic" in changed and step.exchange.api_key in _MAKING_APIS | _CREATING_APIS:
            await self._served(step)

    async def _served(self, step: Step) -> None:
        """Wait until the leaders of the topics of a step serve all partitions. A topic that the
        target is making has to be there, if the captured broker made it."""
        topics = self._ids.plan.workload.facts.topics.values()
        shown = {topic.name for topic in topics if topic.first_time_ns >= 0}
        makes = step.exchange.api_key in _MAKING_APIS
        counts = {
            self._ids.topic(resource[1]): int(makes)
            for resource in step.changed
            if resource[0] == "topic" and resource[1] in shown
        }
        await await_partitions(self._target, counts)
