"""Finds the names that a plan creates, writes to and deletes, and checks them at the target.

A replay must not write to existing data by accident. Before the first write, the topics, groups and
transactional ids of the plan are looked up at the target. If one has data or members, the run ends,
unless the user gives `--into-existing`. A name that existed before is not deleted, unless the user
gives `--allow delete-existing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kdissect.errors import EnvironmentFailed
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import READ, Mode, ReplayPlan
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.guard import GuardError
from kdissect.replay.target.topics import topics_to_make
from kdissect.replay.workload.messages import DELETING_APIS
from kdissect.text import plural, visible

# resources of `planning.dependencies` -> kind of name
_KIND_OF = {
    "log": "topic", "topic": "topic", "group": "group", "commits": "group", "share": "group",
    "txn": "transactional-id",
}  # fmt: skip
SHOWN_NAMES = 40

Name = tuple[str, str]  # kind, the target's name


@dataclass
class Effects:
    """Names of a plan as (kind, the target's name), in order of first use.

    made: topics only. written: everything else that a request changes, deleted names left out.
    """

    made: dict[Name, None] = field(default_factory=dict)
    written: dict[Name, None] = field(default_factory=dict)
    deleted: dict[Name, None] = field(default_factory=dict)

    def names(self, kind: str) -> list[str]:
        """All of a kind."""
        every = self.made | self.written | self.deleted
        return [name for each, name in every if each == kind]


def effects_of(
    plan: ReplayPlan,
    *,
    makes_topics: bool = False,
    renames: Sequence[tuple[str, str, str]] = (),
) -> Effects:
    """The effects of the steps that will be sent.

    makes_topics: whether `--create-topics` is given.
    renames: (kind, old, new) of each `--rename`.

    Kafka's internal topics are left out, since clients do not write to them by name.
    """
    effects = Effects()
    internal = {topic.name for topic in plan.workload.facts.topics.values() if topic.is_internal}
    new_names = {(kind, old): new for kind, old, new in renames}
    for topic in topics_to_make(plan) if makes_topics else ():
        effects.made["topic", new_names.get(("topic", topic.name), topic.name)] = None
    for step in plan.steps:
        if step.skipped is not None or step.step_class == READ:
            continue
        api_key = step.exchange.api_key
        for resource, mode in step.accesses:
            kind = _KIND_OF.get(resource[0])
            if kind is None or mode not in (Mode.WRITE, Mode.COMMUTING_WRITE):
                continue
            captured: str = resource[1]
            if kind == "topic" and captured in internal:
                continue
            name = kind, new_names.get((kind, captured), captured)
            if api_key == ApiKey.CREATE_TOPICS:
                effects.made[name] = None
            elif api_key in DELETING_APIS:
                effects.deleted[name] = None
            else:
                effects.written[name] = None
    return effects


async def find_existing(target: Target, effects: Effects) -> dict[Name, str]:
    """Names of the plan that are at the target -> what they hold ("500 records", "Stable"), "" for
    an empty topic. Raises EnvironmentFailed if the target does not say."""
    found: dict[Name, str] = {}
    try:
        there = target.topic_names().intersection(effects.names("topic"))
        if there:
            counts = await target.record_counts(there)
            for name in sorted(there):
                count = counts.get(name, 0)
                found["topic", name] = plural(count, "record") if count else ""
        for kind, list_names in (
            ("group", target.list_groups),
            ("transactional-id", target.list_transactions),
        ):
            names = effects.names(kind)
            if names:
                states = await list_names()
                found |= {(kind, name): states[name] for name in names if name in states}
    except ConnectFailed as error:
        raise EnvironmentFailed(f"{target}: {error}") from None
    return found


def check_existing(target: Target, existing: Mapping[Name, str]) -> None:
    """Refuse a target that holds data or members under names of the plan. Raises GuardError."""
    holding = [(kind, name, held) for (kind, name), held in existing.items() if held]
    if not holding:
        return
    shown = [f"{kind} {visible(name)} ({held})" for kind, name, held in holding[:SHOWN_NAMES]]
    if len(holding) > SHOWN_NAMES:
        shown.append(f"{len(holding) - SHOWN_NAMES} more")
    raise GuardError(
        f"{target} has data or members under names that the replay would write to: "
        f"{', '.join(shown)}; if this is meant, say --into-existing"
    )
