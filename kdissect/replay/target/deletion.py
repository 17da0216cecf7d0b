"""Deletes topics and groups that a run created under names of its own.

Transactional ids stay: no request deletes them, and coordinators forget them after seven days by
default (`transactional.id.expiration.ms`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from kdissect.errors import EnvironmentFailed
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode, error_name
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.effects import Name
from kdissect.replay.workload.messages import GROUP_KEY
from kdissect.text import visible

_TOPICS_BY_ID = 6  # DeleteTopics from here on names topics in structs (KIP-516)
_TIMEOUT_MS = 10_000
_ABSENT = frozenset(
    {ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.GROUP_ID_NOT_FOUND}
)


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
    version = target.newest(ApiKey.DELETE_TOPICS)
    if version is None:
        raise ConnectFailed("unreachable", "the target does not offer DeleteTopics")
    body: dict[str, Any] = {"timeout_ms": _TIMEOUT_MS}
    if version >= _TOPICS_BY_ID:
        body["topics"] = [{"name": name} for name in names]
    else:
        body["topic_names"] = list(names)
    answer = await target.ask(ApiKey.DELETE_TOPICS, version, body, target.controller_id)
    return {each["name"]: each["error_code"] for each in answer.body["responses"]}


async def _delete_groups(target: Target, names: Collection[str]) -> dict[str, int]:
    """Error codes by group, from the coordinator of each. Raises ConnectFailed."""
    version = target.newest(ApiKey.DELETE_GROUPS)
    if version is None:
        raise ConnectFailed("unreachable", "the target does not offer DeleteGroups")
    codes: dict[str, int] = {}
    coordinators = await target.find_coordinators([(GROUP_KEY, name) for name in names])
    for name in names:
        node = coordinators.get((GROUP_KEY, name))
        body = {"groups_names": [name]}
        answer = await target.ask(ApiKey.DELETE_GROUPS, version, body, node)
        codes |= {each["group_id"]: each["error_code"] for each in answer.body["results"]}
    return codes
