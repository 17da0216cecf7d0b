"""Makes the topics of the capture at the target, and deletes what a run has made.

`create_topics` is for `--create-topics`, `delete_names` for control runs with names of their own.
Transactional ids stay: no request deletes them, and coordinators forget them after seven days by
default (`transactional.id.expiration.ms`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kdissect.errors import EnvironmentFailed
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode, error_name
from kdissect.replay.model import ReplayPlan, TopicFacts
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.guard import Name, topics_to_make
from kdissect.replay.target.settling import await_partitions
from kdissect.replay.translation.translator import limit_in_sync
from kdissect.replay.workload.messages import GROUP_KEY
from kdissect.text import visible

_WITH_DEFAULT_COUNTS = 4  # CreateTopics: -1 partitions and replicas, the target's default (KIP-464)
_TOPICS_BY_ID = 6  # DeleteTopics from here on names topics in structs (KIP-516)
_CREATE_TIMEOUT_MS, _DELETE_TIMEOUT_MS = 30_000, 10_000
_ABSENT = frozenset(
    {ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.GROUP_ID_NOT_FOUND}
)


class Prepared(NamedTuple):
    """A topic of the capture at the target, by its name there. note: what came of it."""

    name: str
    is_made: bool
    note: str


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
        name, count = renames.get(("topic", topic.name), topic.name), topic.partition_count
        if name not in there:
            wanted[name] = topic
        elif count in (0, there[name]):
            done.append(Prepared(name, False, "was there"))
        else:
            note = f"was there with {there[name]} partitions, the capture has {count}"
            done.append(Prepared(name, False, note))
    if wanted:
        try:
            done += await _make(target, wanted)
            made = (each.name for each in done if each.is_made)
            counts = {name: max(wanted[name].partition_count, 1) for name in made}
            await await_partitions(target, counts)
        except ConnectFailed as error:
            raise EnvironmentFailed(f"{target}: topics cannot be made: {error}") from None
    return sorted(done)


async def _make(target: Target, wanted: Mapping[str, TopicFacts]) -> Iterator[Prepared]:
    answers = await _ask_to_make(target, wanted)
    again = {
        name: replace(wanted[name], configs={})
        for name, (code, _) in answers.items()
        if code == ErrorCode.INVALID_CONFIG and wanted[name].configs
    }
    if again:  # a config that this release does not know must not cost the topic
        for name, (code, text) in (await _ask_to_make(target, again)).items():
            said = answers[name][1] or error_name(answers[name][0])
            answers[name] = code, text or f"made without its configs ({said})"
    return (
        Prepared(name, False, f"not made: {error_name(code)}{': ' * bool(text)}{text}")
        if code
        else Prepared(name, True, text or "made")
        for name, (code, text) in answers.items()
    )


async def _ask_to_make(
    target: Target, wanted: Mapping[str, TopicFacts]
) -> dict[str, tuple[int, str]]:
    """CreateTopics, to the controller; error code and text by name. Raises ConnectFailed."""
    version = target.version(ApiKey.CREATE_TOPICS)
    default = -1 if version >= _WITH_DEFAULT_COUNTS else 1
    nodes = max(len(target.nodes), 1)
    topics = []
    for name, topic in wanted.items():
        configs = [{"name": key, "value": text} for key, text in sorted(topic.configs.items())]
        limit_in_sync(configs, nodes)
        topics.append(
            {
                "name": name,
                "num_partitions": topic.partition_count or default,
                "replication_factor": min(topic.replication_factor, nodes) or default,
                "configs": configs,
            }
        )
    body = {"topics": topics, "timeout_ms": _CREATE_TIMEOUT_MS}
    limit_s = _CREATE_TIMEOUT_MS / 1000 + 5
    answer = await target.ask(ApiKey.CREATE_TOPICS, version, body, target.controller_id, limit_s)
    return {
        topic["name"]: (topic["error_code"], topic.get("error_message") or "")
        for topic in answer.body["topics"]
    }


async def delete_names(target: Target, names: Sequence[Name]) -> list[str]:
    """Delete topics and groups, and return a line for each that is still there."""
    kept: list[str] = []
    for kind, delete in (("group", _delete_groups), ("topic", _delete_topics)):
        chosen = [name for each, name in names if each == kind]
        try:
            codes = await delete(target, chosen) if chosen else {}
        except (ConnectFailed, EnvironmentFailed) as error:
            kept.append(f"{len(chosen)} {kind} names were not deleted: {error}")
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
