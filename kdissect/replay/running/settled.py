"""Keeps a run in step with its target: what it has to know before a request, and to wait for after.

A step that changes metadata, or ends a transaction, is complete when the target shows that
everywhere. So the reads that the plan sends after it see it, on every node.
"""

from __future__ import annotations

from contextlib import suppress

from kdissect.errors import EnvironmentFailed
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome, Step
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.settling import await_metadata, await_partitions, await_transaction
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload.messages import NOT_MADE_YET, decoded, entries


class Settled:
    """The requests of the replay's own around those of the workload."""

    def __init__(self, target: Target, translator: Translator) -> None:
        self._target, self._translator = target, translator
        self._asked: set[str] = set()  # topics that Metadata was requested for
        self._unserved: set[str] = set()  # topics that were awaited in vain

    async def learn_topics(self, names: list[str]) -> None:
        """Learn leaders and ids of topics that a request needs and nothing is known of."""
        if not self._asked.issuperset(names):
            self._asked.update(names)
            await self._learn_metadata(names)

    async def look_up(self, step: Step) -> None:
        """Learn leaders and coordinators anew, as clients do before they send a request again."""
        if names := self._translator.topics(step):
            await self._learn_metadata(names)
        if len(self._target.nodes) > 1 and (keys := self._translator.coordinators(step)):
            with suppress(EnvironmentFailed):
                found = await self._target.find_coordinators(keys, wait_s=0.0)
                for key, node_id in found.items():
                    self._translator.learn_coordinator(*key, node_id)

    async def _learn_metadata(self, names: list[str] | None) -> None:
        with suppress(ConnectFailed):
            self._translator.learn_metadata(await self._target.learn_metadata(names))

    async def after(self, outcome: Outcome) -> None:
        """Wait until the target shows everywhere what a request has changed."""
        step = outcome.step
        if step.exchange.api_key == ApiKey.END_TXN:
            for _, name in self._translator.coordinators(step):
                await await_transaction(self._target, name, outcome.node_id)
        if step.changes_metadata and not step.creates:
            await await_metadata(self._target)
        if step.creates:
            made = made_partitions(outcome)
            if not self._unserved.issuperset(made):
                if await await_partitions(self._target, made):
                    self._translator.learn_metadata(self._target.metadata)
                else:
                    self._unserved.update(made)


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
