"""What a replay may do to its target, and what it makes and deletes there beside its requests.

Only reading is allowed, unless the user allows other classes by name. A target that may be the
captured cluster needs the user's consent. A replay must not write to existing data by accident
either: before the first write, the topics, groups and transactional ids of the plan are looked up
at the target. If a topic has records, or one of the others exists, the run ends, unless the user
gives `--into-existing`. A name that existed before is not deleted, unless the user gives `--allow
delete-existing`.

`create_topics` is for `--create-topics`, `delete_names` for control runs with names of their own.
Transactional ids stay: no request deletes them, and coordinators forget them after seven days by
default (`transactional.id.expiration.ms`).
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kdissect.errors import EnvironmentFailed
from kdissect.pipeline.filters import host_bytes
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode, error_name
from kdissect.replay import model
from kdissect.replay.target.cluster import Target, show_address
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.settling import SETTLE_S, await_partitions, within
from kdissect.replay.translation.id_map import IN_SYNC, limited
from kdissect.replay.workload.messages import DELETING_APIS, GROUP_KEY, codes, error_codes
from kdissect.tables.arrow_arrays import ip_text
from kdissect.text import plural, visible

Address = tuple[str, int]
Name = tuple[str, str]  # kind, the target's name
SAME_CLUSTER = "same-cluster"  # allowed beside classes: the captured cluster is the target
_BESIDE = (model.DELETE_EXISTING, SAME_CLUSTER)
# resources of `planning.resources` -> kind of name
_KIND_OF = {
    **dict.fromkeys(("log", "topic"), "topic"),
    **dict.fromkeys(("group", "commits", "share"), "group"),
    "transactional-id": "transactional-id",
}
SHOWN_NAMES = 40
_WITH_DEFAULT_COUNTS = 4  # CreateTopics: -1 partitions and replicas, the target's default (KIP-464)
_CREATE_TIMEOUT_MS, _DELETE_TIMEOUT_MS = 30_000, 10_000
_NOT_SAID = int(ErrorCode.UNKNOWN_SERVER_ERROR)
_ABSENT = codes("NONE UNKNOWN_TOPIC_OR_PARTITION GROUP_ID_NOT_FOUND")


def parse_allow(values: Iterable[str]) -> frozenset[str]:
    """Writing classes, `DELETE_EXISTING` and `SAME_CLUSTER` of ``produce,groups`` and the like, as
    often as given. Raises OptionError."""
    names = {name.strip().lower() for value in values for name in value.split(",")} - {""}
    for name in sorted(names):
        if name not in (*model.CLASSES, *_BESIDE):
            known = ", ".join((*model.WRITING_CLASSES, *_BESIDE))
            raise model.OptionError(f"--allow {name}: classes are {known}")
    return frozenset(names) & {*model.WRITING_CLASSES, *_BESIDE}


def check_address(facts: model.WorkloadFacts, host: str, port: int) -> None:
    """Refuse an address that the capture shows, before anything is sent. Raises OptionError."""
    captured: set[Address] = set(facts.listeners) | set(facts.brokers.values())
    ours = {(host.lower(), port)} | {(each, port) for each in _resolve(host)}
    known = {(name.lower(), number) for name, number in captured}
    known |= {(_plain(name), number) for name, number in known}
    if found := sorted(ours & known):
        raise model.OptionError(
            f"{show_address(host, port)} is an address of the captured cluster "
            f"({show_address(*found[0])}); if this is meant, say --allow same-cluster"
        )


def check_cluster(facts: model.WorkloadFacts, target: Target) -> None:
    """Refuse the captured cluster's id, before the first replayed request. Raises OptionError."""
    cluster_id = target.cluster.cluster_id
    if cluster_id in facts.cluster_ids:
        raise model.OptionError(
            f"{target} belongs to the captured cluster (id {cluster_id}); if this is meant, say "
            "--allow same-cluster"
        )


def _resolve(host: str) -> set[str]:
    """Addresses of a name; empty if it has none (connecting will say so)."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {_plain(str(each[4][0])) for each in found}


def _plain(host: str) -> str:
    """An address in its one spelling; IPv4 inside IPv6 as IPv4. Names stay as they are."""
    try:
        return ip_text(host_bytes(host))
    except ValueError:
        return host


@dataclass
class Effects:
    """Names of a plan as (kind, the target's name), in order of first use.

    made: topics only. written: everything else that a request changes, deleted names left out.
    """

    made: dict[Name, None] = field(default_factory=dict)
    written: dict[Name, None] = field(default_factory=dict)
    deleted: dict[Name, None] = field(default_factory=dict)

    def all(self) -> list[Name]:
        return list(self.made | self.written | self.deleted)

    def names(self, kind: str) -> list[str]:
        """All of a kind."""
        return [name for each, name in self.all() if each == kind]


def effects_of(plan: model.ReplayPlan, options: model.TranslateOptions) -> Effects:
    """The effects of the steps that will be sent, and of topics that are made before.

    Kafka's internal topics are left out, since clients do not write to them by name.
    """
    effects = Effects()
    internal = {topic.name for topic in plan.workload.facts.topics.values() if topic.is_internal}
    for topic in topics_to_make(plan) if options.makes_topics else ():
        effects.made["topic", options.name("topic", topic.name)] = None
    for step in plan.steps:
        if step.skipped is not None or step.step_class == model.READ:
            continue
        names = effects.written
        if step.exchange.api_key == ApiKey.CREATE_TOPICS:
            names = effects.made
        elif step.exchange.api_key in DELETING_APIS:
            names = effects.deleted
        for resource in step.changed:
            kind = _KIND_OF.get(resource[0])
            if kind is not None and (kind != "topic" or resource[1] not in internal):
                names[kind, options.name(kind, resource[1])] = None
    return effects


def topics_to_make(plan: model.ReplayPlan) -> list[model.TopicFacts]:
    """Topics that the capture shows and no step of the plan makes, by CreateTopics or by asking
    for one that is not there. Internal topics are left out."""
    made: dict[int, set[str]] = {ApiKey.CREATE_TOPICS: set(), ApiKey.METADATA: set()}
    for step in plan.steps:
        if step.skipped is None and step.exchange.api_key in made:
            made[step.exchange.api_key] |= {each[1] for each in step.changed if each[0] == "topic"}
    if model.ADMIN not in plan.options.allow:
        made[ApiKey.METADATA].clear()  # then Metadata makes nothing
    return [
        topic
        for name, topic in sorted(plan.workload.facts.topics.items())
        if not topic.is_internal
        and topic.first_time_ns >= 0
        and not (topic.is_created and name in made[ApiKey.CREATE_TOPICS])
        and name not in made[ApiKey.METADATA]
    ]


async def find_existing(target: Target, effects: Effects) -> dict[Name, str]:
    """Names of the plan that are at the target -> what they hold ("500 records", "Stable"), "" for
    an empty topic. Raises EnvironmentFailed if the target does not say."""
    found: dict[Name, str] = {}
    try:
        there = target.cluster.topics.keys() & set(effects.names("topic"))
        counts = Counter[str]()
        for (name, _), (start, end) in (await target.extents(there)).items():
            counts[name] += end - start
        for name in sorted(there):
            found["topic", name] = plural(counts[name], "record") if counts[name] else ""
        for kind in ("group", "transactional-id"):
            if names := effects.names(kind):
                states = await target.states(kind)
                found |= {(kind, name): states[name] for name in names if name in states}
    except ConnectFailed as error:
        raise EnvironmentFailed(f"{target}: {error}") from None
    return found


def check_existing(target: Target, existing: Mapping[Name, str]) -> None:
    """Refuse a target that holds data or members under names of the plan. Raises OptionError."""
    holding = [
        f"{kind} {visible(name)} ({held})" for (kind, name), held in existing.items() if held
    ]
    if len(holding) > SHOWN_NAMES:
        holding[SHOWN_NAMES:] = [f"{len(holding) - SHOWN_NAMES} more"]
    if holding:
        raise model.OptionError(
            f"{target} has data or members under names that the replay would write to: "
            f"{', '.join(holding)}; if this is meant, say --into-existing"
        )


# -- topics that are made before a run, names that are deleted after it ---------------------------


async def create_topics(
    plan: model.ReplayPlan, target: Target, options: model.TranslateOptions
) -> list[str]:
    """Create the plan's topics that the target has not, wait for their leaders, and refresh its
    metadata.

    Returns a line for each topic that the target refuses, or makes otherwise. Raises
    EnvironmentFailed if the target cannot be reached.
    """
    topics = {options.name("topic", each.name): each for each in topics_to_make(plan)}
    wanted = {name: topic for name, topic in topics.items() if name not in target.cluster.topics}
    if not wanted:
        return []
    try:
        answers = await _ask_to_make(target, wanted)
        refused = {
            name: replace(wanted[name], configs={})
            for name, (code, _) in answers.items()
            if code == ErrorCode.INVALID_CONFIG and wanted[name].configs
        }
        if refused:  # a config that this release does not know must not cost the topic
            for name, (code, text) in (await _ask_to_make(target, refused)).items():
                said = answers[name][1] or error_name(answers[name][0])
                answers[name] = code, text if code else f"made without its configs ({said})"
        made = [name for name, (code, _) in answers.items() if not code]
        counts = {name: max(wanted[name].partition_count, 1) for name in made}
        await within(SETTLE_S, await_partitions(target, counts))
    except ConnectFailed as error:
        raise EnvironmentFailed(f"{target}: topics cannot be made: {error}") from None
    notes = []
    for name, (code, text) in sorted(answers.items()):
        if code:
            notes.append(f"topic {name} was not made: {error_name(code)}{': ' * bool(text)}{text}")
        elif text:
            notes.append(f"topic {name} was {text}")
    return notes


async def _ask_to_make(
    target: Target, wanted: Mapping[str, model.TopicFacts]
) -> dict[str, tuple[int, str]]:
    """CreateTopics, to the controller; error code and text by name. Raises ConnectFailed."""
    version = target.version(ApiKey.CREATE_TOPICS)
    default = -1 if version is not None and version >= _WITH_DEFAULT_COUNTS else 1
    nodes = max(len(target.cluster.nodes), 1)
    topics = []
    for name, topic in wanted.items():
        configs = [
            {"name": key, "value": limited(text, nodes) if key == IN_SYNC else text}
            for key, text in sorted(topic.configs.items())
        ]
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
    controller = target.cluster.controller_id
    answer = await target.ask(ApiKey.CREATE_TOPICS, body, controller, limit_s=limit_s)
    return {
        topic["name"]: (topic["error_code"], topic.get("error_message") or "")
        for topic in answer["topics"]
    }


async def delete_names(target: Target, names: Sequence[Name]) -> list[str]:
    """Delete topics and groups, and return a line for each that is still there."""
    kept: list[str] = []
    for kind, name in sorted(names):  # groups, which may have offsets of the topics, before these
        if kind not in ("group", "topic"):
            continue
        try:
            if kind == "group":
                node = await target.coordinator(GROUP_KEY, name)
                body = await target.ask(ApiKey.DELETE_GROUPS, {"groups_names": [name]}, node)
            else:
                asked = {"topic_names": [name], "topics": [{"name": name}]}  # since KIP-516
                asked |= {"timeout_ms": _DELETE_TIMEOUT_MS}
                body = await target.ask(ApiKey.DELETE_TOPICS, asked, target.cluster.controller_id)
            [code, *_] = error_codes(body) or [_NOT_SAID]
            why = "" if code in _ABSENT else error_name(code)
        except ConnectFailed as error:
            why = str(error)
        if why:
            kept.append(f"{kind} {visible(name)} was not deleted: {why}")
    return kept
