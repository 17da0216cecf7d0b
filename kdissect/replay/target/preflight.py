"""Compares a target with the state that the capture began with, before the first request.

Each line says what the target lacks, so that answers will differ from the captured ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from kdissect.replay.model import ReplayPlan, Resource, StartingState
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.end_state import EndState, read_end_state
from kdissect.text import plural, visible

Names = Mapping[tuple[str, str], str]  # (kind, captured name) -> the target's name


def used_state(plan: ReplayPlan, starting: StartingState) -> StartingState:
    """The part of a starting state that requests of the plan use."""
    used: set[Resource] = set()
    for accesses in {step.accesses for step in plan.steps if step.skipped is None}:
        used.update(resource for resource, _ in accesses)
    topics = {each[1] for each in used if each[0] in ("topic", "log")}
    if ("topics",) in used:  # a Metadata request for all
        topics |= starting.topics.keys()
    groups = {each[1] for each in used if each[0] in ("group", "commits")}
    return StartingState(
        {name: count for name, count in starting.topics.items() if name in topics},
        {log: extent for log, extent in starting.logs.items() if ("log", *log) in used},
        {commit: offset for commit, offset in starting.commits.items() if commit[0] in groups},
    )


def described(starting: StartingState) -> list[str]:
    """A line for each topic, log and group that the capture began with."""
    lines = [
        f"topic {name}" + (f" with {plural(count, 'partition')}" if count else "")
        for name, count in starting.topics.items()
    ]
    lines += [
        f"records of {topic}-{partition} from offset {first} to {end - 1}"
        for (topic, partition), (first, end) in starting.logs.items()
    ]
    lines += [
        f"offset {offset} committed by {group} in {topic}-{partition}"
        for (group, topic, partition), offset in starting.commits.items()
    ]
    return [visible(line) for line in lines]


async def find_missing(
    target: Target, starting: StartingState, names: Names, *, makes_topics: bool
) -> list[str]:
    """List the gaps of the target's starting state, a line for each. makes_topics: whether missing
    topics will be created."""
    if starting == StartingState():
        return []
    topics = {name: names.get(("topic", name), name) for name in _topics(starting)}
    groups = {each[0]: names.get(("group", each[0]), each[0]) for each in starting.commits}
    state = await read_end_state(target, topics.values(), groups.values(), (), with_records=False)
    lines = [f"{part} could not be read: {why}" for part, why in state.unread.items()]
    if "topics" in state.unread:
        return [visible(line) for line in lines]
    for name, count in starting.topics.items():
        found = state.topics.get(topics[name])
        if found is None and not makes_topics:
            lines.append(f"topic {topics[name]} is not there")
        elif found is not None and count and found != count:
            lines.append(f"topic {topics[name]} has {plural(found, 'partition')}, not {count}")
    return [visible(line) for line in [*lines, *_data_lines(starting, state, topics, groups)]]


def _topics(starting: StartingState) -> set[str]:
    logs = {topic for topic, _ in starting.logs}
    return {*starting.topics, *logs, *(topic for _, topic, _ in starting.commits)}


def _data_lines(
    starting: StartingState, state: EndState, topics: Mapping[str, str], groups: Mapping[str, str]
) -> list[str]:
    """Lines about missing records and committed offsets."""
    lines = []
    for (topic, partition), (first, end) in starting.logs.items():
        name = topics[topic]
        extent = state.logs.get((name, partition))
        count = 0 if extent is None else extent.end - extent.start
        if count < end - first and "logs" not in state.unread:
            lines.append(
                f"{name}-{partition} has {plural(count, 'offset')}; answers of the capture bring "
                f"{end - first} from before its own records"
            )
    for (group, topic, partition), offset in starting.commits.items():
        name = groups[group]
        if f"group {name}" in state.unread:
            continue
        if (name, topics[topic], partition) not in state.commits:
            lines.append(
                f"group {name} has no committed offset in {topics[topic]}-{partition}, {offset} in "
                "the capture"
            )
    return lines
