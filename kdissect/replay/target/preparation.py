"""Makes the topics of the capture at the target, and deletes what a run has made.

`create_topics` is for `--create-topics`, `delete_names` for control runs with names of their own.
Transactional ids stay: no request deletes them, and coordinators forget them after seven days by
default (`transactional.id.expiration.ms`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kdissect.errors import EnvironmentFailed
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode, error_name
from kdissect.replay.model import ReplayPlan, TopicFacts
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.guard import Name, topics_to_make
from kdissect.replay.target.settling import await_partitions
from kdissect.replay.workload.messages import GROUP_KEY
from kdissect.text import visible

_WITH_DEFAULT_COUNTS = 4  # CreateTopics: -1 partitions and replicas, the target's default (KIP-464)
_TOPICS_BY_ID = 6  # DeleteTopics from here on names topics in structs (KIP-516)
_CREATE_TIMEOUT_MS, _DELETE_TIMEOUT_MS = 30_000, 10_000
_ABSENT = frozenset(
    {ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.GROUP_ID_NOT_FOUND}
)


# -- topics ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepared:
    """A topic of the capture at the target. name: the target's. note: what came of it."""

    name: str
    partition_count: int
    is_made: bool
    note: str = ""


async def create_topics(
    plan: ReplayPlan, target: Target, renames: Mapping[tuple[str, str], str]
) -> list[Prepared]:
    """Create the plan's topics at the target, wait for their leaders, and refresh its metadata.

    renames: as in `TranslateOptions`.
    Returns a result for each topic; if the target refuses one, the reason is in its `note`. Raises
    EnvironmentFailed if the target cannot be reached.
    """
    there = target.topics()
    done: list[Prepared] = []
    wanted: dict[str, TopicFacts] = {}
    for topic in topics_to_make(plan):
        name = renames.get(("topic", topic.name), topic.name)
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
            made = {each.name: max(each.partition_count, 1) for each in done if each.is_made}
            await await_partitions(target, made)
        except ConnectFailed as error:
            raise EnvironmentFailed(f"{target}: topics cannot be made: {error}") from None
    return sorted(done, key=lambda each: each.name)


async def _make(target: Target, wanted: Mapping[str, TopicFacts]) -> list[Prepared]:
    answers = await _ask_to_make(target, wanted, with_configs=True)
    again = {
        name: wanted[name]
        for name, (code, _) in answers.items()
        if code == ErrorCode.INVALID_CONFIG and wanted[name].configs
    }
    if again:  # a config that this release does not know must not cost the topic
        plain = await _ask_to_make(target, again, with_configs=False)
        for name, (code, text) in plain.items():
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


async def _ask_to_make(
    target: Target, wanted: Mapping[str, TopicFacts], *, with_configs: bool
) -> dict[str, tuple[int, str]]:
    """CreateTopics, to the controller; error code and text by name. Raises ConnectFailed."""
    version = target.version(ApiKey.CREATE_TOPICS)
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
    answer = await target.ask(
        ApiKey.CREATE_TOPICS,
        version,
        {"topics": topics, "timeout_ms": _CREATE_TIMEOUT_MS},
        target.controller_id,
        _CREATE_TIMEOUT_MS / 1000 + 5,
    )
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


# -- names of a run that is over ------------------------------------------------------------------


async def delete_names(target: Target, names: Iterable[Name]) -> list[str]:
    """Delete topics and groups, and return a line for each that is still there."""
    kept: list[str] = []
    by_kind: dict[str, list[str]] = {"topic": [], "group": []}
    for kind, name in names:
        by_kind.get(kind, []).append(name)
    for kind, delete in (("group", _delete_groups), ("topic", _delete_topics)):
        if not by_kind[kind]:
            continue
        try:
            codes = await delete(target, by_kind[kind])
        except (ConnectFailed, EnvironmentFailed) as error:
            kept.append(f"{len(by_kind[kind])} {kind} names were not deleted: {error}")
            continue
        kept += [
            f"{kind} {visible(name)} was not deleted: {error_name(code)}"
            for name, code in codes.items()
            if code not in _ABSENT
        ]
    return kept


async def _delete_topics(target: Target, names: Collection[str]) -> dict[str, int]:
    """Error codes by topic. Raises ConnectFailed."""
    version = target.version(ApiKey.DELETE_TOPICS)
    body: dict[str, Any] = {"timeout_ms": _DELETE_TIMEOUT_MS}
    if version >= _TOPICS_BY_ID:
        body["topics"] = [{"name": name} for name in names]
    else:
        body["topic_names"] = list(names)
    answer = await target.ask(ApiKey.DELETE_TOPICS, version, body, target.controller_id)
    return {each["name"]: each["error_code"] for each in answer.body["responses"]}


async def _delete_groups(target: Target, names: Collection[str]) -> dict[str, int]:
    """Error codes by group, from the coordinator of each. Raises ConnectFailed."""
    version = target.version(ApiKey.DELETE_GROUPS)
    codes: dict[str, int] = {}
    for name in names:
        node = await target.coordinator(GROUP_KEY, name)
        body = {"groups_names": [name]}
        answer = await target.ask(ApiKey.DELETE_GROUPS, version, body, node)
        codes |= {each["group_id"]: each["error_code"] for each in answer.body["results"]}
    return codes
