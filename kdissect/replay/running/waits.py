"""Waits for the target before a step is sent, with requests of the replay's own.

A step may need metadata of an unknown topic, or leaders of new partitions. Each wait has a time
limit and raises no error at its end: if the target is still not ready, the response to the step
shows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome, Resource, Translation
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.workload.messages import NOT_MADE_YET, decoded, entries

RETRY_PAUSES_S = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 1.0, 1.0)  # for answers that say: not yet
_Place = tuple[tuple[Resource, ...], Any, Any]  # groups and transactions; topic; partition
PATIENCE_NS = int(sum(RETRY_PAUSES_S) * 1e9)
METADATA_PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.4)  # a topic just made takes a moment to be known


class Patience:
    """How long requests are sent again: one wait for each thing that keeps failing.

    A partition that the target does not have fails in every request to it. The first of these
    requests waits for it; the others share this wait, however many they are, until it succeeds.
    """

    def __init__(self) -> None:
        self._failing: dict[_Place, int] = {}  # since when

    def is_over(self, outcome: Outcome, answer: bytes, now: int) -> bool:
        """Return whether an answer is final, since all that fails in it has failed for long."""
        if not self._failing:
            return False
        failed = [place for place, code in _places(outcome, answer) if code]
        return bool(failed) and all(
            now - self._failing.get(place, now) >= PATIENCE_NS for place in failed
        )

    def note(self, outcome: Outcome, answer: bytes, reason: str, now: int) -> None:
        """An answer came. reason: why it is not final, or "" if it is."""
        if not reason and not self._failing:
            return
        for place, code in _places(outcome, answer):
            if not code:
                self._failing.pop(place, None)
            elif reason:
                self._failing.setdefault(place, now)


def _places(outcome: Outcome, answer: bytes) -> Iterator[tuple[_Place, int]]:
    """Each error code of an answer, zero included, with the topic and partition that have it. Codes
    of neither belong to the groups and transactions of the request."""
    exchange = outcome.step.exchange
    message = decoded(answer, "response", exchange.api_key, outcome.api_version)
    if message is None:
        return
    owners = tuple(
        resource for resource, _ in outcome.step.accesses if resource[0] in ("group", "txn")
    )
    pending: list[tuple[_Place, Any]] = [((owners, None, None), message.body)]
    while pending:
        (owner, topic, partition), value = pending.pop()
        if isinstance(value, list):
            pending += [((owner, topic, partition), each) for each in value]
        elif isinstance(value, dict):
            named = value.get("name") or value.get("topic") or value.get("topic_id")
            if named is not None:
                owner, topic = (), named
            for name in ("partition_index", "index", "partition"):
                partition = value.get(name, partition)
            for name, inner in value.items():
                if name == "error_code":
                    yield (owner, topic, partition), inner
                elif isinstance(inner, list | dict):
                    pending.append(((owner, topic, partition), inner))


async def ask_metadata(target: Target, translation: Translation, names: list[str]) -> None:
    """Learn the metadata of topics, with a few retries while the target does not know them."""
    for pause_s in METADATA_PAUSES_S:
        await asyncio.sleep(pause_s)
        try:
            body = await target.learn_metadata(names)
        except ConnectFailed:
            return
        translation.learn_metadata(body)
        if not any(topic["error_code"] for topic in body["topics"]):
            return


async def await_leaders(target: Target, translation: Translation, made: Mapping[str, int]) -> bool:
    """Wait until partitions have a leader, and learn the metadata; return False if they have not.

    The leaders of new partitions serve requests only some time after the response that created
    them. Captured clients found that out by retrying; the capture shows no dependency on it.
    """
    with suppress(ConnectFailed):
        if await target.await_partitions(made):
            translation.learn_metadata(target.metadata)
            return True
    return False


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
