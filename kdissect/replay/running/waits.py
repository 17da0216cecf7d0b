"""Waits for the target before a step is sent, with requests of the replay's own.

A step may need metadata of an unknown topic, or leaders of new partitions. Each wait has a time
limit and raises no error at its end: if the target is still not ready, the response to the step
shows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome, Translation
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.workload.messages import NOT_MADE_YET, decoded, entries

METADATA_PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.4)  # a topic just made takes a moment to be known


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
