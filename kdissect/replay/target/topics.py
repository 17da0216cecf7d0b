"""--create-topics: the topics that a capture shows, made at the target before the replay.

Left alone are internal topics, topics that are there, and topics that a CreateTopics among the
requests to be sent makes itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kdissect.codec.message import decode_message
from kdissect.errors import DecodeError, EnvironmentFailed
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode, error_name
from kdissect.replay.model import ADMIN, Exchange, ReplayPlan, TopicFacts
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.settling import await_partitions
from kdissect.replay.workload.messages import NOT_MADE_YET

_WITH_DEFAULT_COUNTS = 4  # -1 partitions and replicas: the target's own default (KIP-464)
CREATE_TIMEOUT_MS = 30_000


@dataclass(frozen=True, slots=True)
class Prepared:
    """A topic of the capture at the target. name: the target's. note: what came of it."""

    name: str
    partition_count: int
    is_made: bool
    note: str = ""


def topics_to_make(plan: ReplayPlan) -> list[TopicFacts]:
    """Topics that the capture shows and no step of the plan makes, by CreateTopics or by asking
    for one that is not there."""
    created: set[str] = set()
    by_metadata: set[str] = set()
    for step in plan.steps:
        if step.skipped is None and step.exchange.api_key == ApiKey.CREATE_TOPICS:
            created |= _created(step.exchange)
        elif step.skipped is None and step.exchange.api_key == ApiKey.METADATA:
            by_metadata |= _made_by_metadata(step.exchange)
    if ADMIN not in plan.options.allow:
        by_metadata.clear()  # then Metadata makes nothing
    return [
        topic
        for name, topic in sorted(plan.workload.facts.topics.items())
        if not topic.is_internal
        and topic.first_time_ns >= 0
        and not (topic.is_created and name in created)
        and name not in by_metadata
    ]


def _created(exchange: Exchange) -> set[str]:
    try:
        body = decode_message(exchange.request or b"", side="request").body
    except DecodeError:
        return set()
    return {topic["name"] for topic in body["topics"]}


def _made_by_metadata(exchange: Exchange) -> set[str]:
    """Topics that were not there, or not ready, in an answer to a request that makes them."""
    try:
        asked = decode_message(exchange.request or b"", side="request").body
        if not asked.get("allow_auto_topic_creation", True) or not asked["topics"]:
            return set()
        answer = decode_message(
            exchange.response or b"",
            side="response",
            api_key=exchange.api_key,
            api_version=exchange.api_version,
        ).body
    except DecodeError:
        return set()
    return {each["name"] for each in answer["topics"] if each["error_code"] in NOT_MADE_YET}


async def create_topics(
    plan: ReplayPlan, target: Target, renames: Mapping[str, str] | None = None
) -> list[Prepared]:
    """Create the plan's topics at the target, wait for their leaders, and refresh its metadata.

    renames: name in the capture -> name at the target.
    Returns a result for each topic; if the target refuses one, the reason is in its `note`. Raises
    EnvironmentFailed if the target cannot be reached.
    """
    renames = renames or {}
    there = {
        topic["name"]: len(topic["partitions"])
        for topic in target.metadata.get("topics", [])
        if topic["error_code"] == 0
    }
    done: list[Prepared] = []
    wanted: dict[str, TopicFacts] = {}
    for topic in topics_to_make(plan):
        name = renames.get(topic.name, topic.name)
        if name not in there:
            wanted[name] = topic
            continue
        count = there[name]
        note = "was there"
        if topic.partition_count and count != topic.partition_count:
            note = f"was there with {count} partitions, the capture has {topic.partition_count}"
        done.append(Prepared(name, count, False, note))
    if wanted:
        try:
            done += await _make(target, wanted)
            await await_partitions(
                target, {each.name: max(each.partition_count, 1) for each in done if each.is_made}
            )
        except ConnectFailed as error:
            raise EnvironmentFailed(f"{target}: topics cannot be made: {error}") from None
    return sorted(done, key=lambda each: each.name)


async def _make(target: Target, wanted: Mapping[str, TopicFacts]) -> list[Prepared]:
    answers = await _ask(target, wanted, with_configs=True)
    again = {
        name: wanted[name]
        for name, (code, _) in answers.items()
        if code == ErrorCode.INVALID_CONFIG and wanted[name].configs
    }
    if again:  # a config that this release does not know must not cost the topic
        for name, (code, text) in (await _ask(target, again, with_configs=False)).items():
            said = answers[name][1] or error_name(answers[name][0])
            answers[name] = code, text or f"made without its configs ({said})"
    done = []
    for name, (code, text) in answers.items():
        count = wanted[name].partition_count
        if code == 0:
            done.append(Prepared(name, count, True, text or "made"))
        else:
            note = f"not made: {error_name(code)}{': ' + text if text else ''}"
            done.append(Prepared(name, count, False, note))
    return done


async def _ask(
    target: Target, wanted: Mapping[str, TopicFacts], *, with_configs: bool
) -> dict[str, tuple[int, str]]:
    """CreateTopics, to the controller; error code and text by name."""
    version = target.newest(ApiKey.CREATE_TOPICS)
    if version is None:
        raise ConnectFailed("unreachable", "the target does not offer CreateTopics")
    default = -1 if version >= _WITH_DEFAULT_COUNTS else 1
    nodes = max(len(target.nodes), 1)
    topics = [
        {
            "name": name,
            "num_partitions": topic.partition_count or default,
            "replication_factor": min(topic.replication_factor, nodes) or default,
            "configs": _configs(topic, nodes) if with_configs else [],
        }
        for name, topic in wanted.items()
    ]
    body: dict[str, Any] = {"topics": topics, "timeout_ms": CREATE_TIMEOUT_MS}
    limit_s = CREATE_TIMEOUT_MS / 1000 + 5
    node = target.controller_id
    answer = await target.ask(ApiKey.CREATE_TOPICS, version, body, node, limit_s)
    return {
        topic["name"]: (topic["error_code"], topic.get("error_message") or "")
        for topic in answer.body["topics"]
    }


def _configs(topic: TopicFacts, nodes: int) -> list[dict[str, str]]:
    """Those seen; fewer replicas in sync where there are fewer nodes."""
    configs = dict(topic.configs)
    in_sync = configs.get("min.insync.replicas", "")
    if in_sync.isdigit() and int(in_sync) > nodes:
        configs["min.insync.replicas"] = str(nodes)
    return [{"name": name, "value": value} for name, value in sorted(configs.items())]
