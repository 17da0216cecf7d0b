"""Keeps a run in step with its target: what it has to know before a request, and to wait for after.

A step that changes metadata, or ends a transaction, is complete when the target shows that
everywhere. So the reads that the plan sends after it see it, on every node.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Mode, Outcome, Step
from kdissect.replay.running.waits import Patience
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
from kdissect.replay.workload.messages import NOT_MADE_YET, decoded, entries

# parts of a broker that have metadata of their own, beside the image that all others use
_APPLIED_LATER = frozenset({"config", "acls", "tokens"})


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
