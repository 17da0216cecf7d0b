"""The state that a capture began with, as its answers show it, and whether the target has it.

A replay brings only what the capture's requests wrote. If answers depend on earlier topics, records
or committed offsets, a target without them answers differently.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import headers
from kdissect.replay.model import ReplayPlan, Resource, Workload
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.end_state import EndState, read_end_state
from kdissect.replay.translation.offsets import Log
from kdissect.replay.workload.messages import (
    NOT_MADE_YET,
    Body,
    CapturedTopics,
    bodies,
    entries,
)
from kdissect.text import plural, visible

_COMMIT_APIS = (ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT)
_READ_APIS = {
    ApiKey.METADATA, ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.OFFSET_FETCH, *_COMMIT_APIS,
}  # fmt: skip


@dataclass(slots=True)
class StartingState:
    """topics: existing ones -> partition count, 0 unknown. logs: (topic, partition) -> first offset
    and end of records that answers bring and no captured request wrote. commits: (group, topic,
    partition) -> committed offset.
    """

    topics: dict[str, int] = field(default_factory=dict)
    logs: dict[Log, tuple[int, int]] = field(default_factory=dict)
    commits: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """A line for each topic, log and group."""
        lines = [
            f"topic {name}" + (f" with {plural(count, 'partition')}" if count else "")
            for name, count in self.topics.items()
        ]
        lines += [
            f"records of {topic}-{partition} from offset {first} to {end - 1}"
            for (topic, partition), (first, end) in self.logs.items()
        ]
        lines += [
            f"offset {offset} committed by {group} in {topic}-{partition}"
            for (group, topic, partition), offset in self.commits.items()
        ]
        return [visible(line) for line in lines]


def used_state(plan: ReplayPlan) -> StartingState:
    """The part of the starting state that requests of the plan use."""
    starting = starting_state(plan.workload)
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


def starting_state(workload: Workload) -> StartingState:
    """The state before the workload's first request."""
    state, names = StartingState(), CapturedTopics(workload.facts)
    made: set[str] = set()  # topics that were not there at first
    committed: set[tuple[str, str, int]] = set()  # by requests of the capture
    logs: defaultdict[Log, _CapturedLog] = defaultdict(_CapturedLog)
    exchanges = [each for each in workload.exchanges() if not each.internal_reason]
    for exchange in sorted(exchanges, key=lambda each: each.request_time_ns):
        api_key = exchange.api_key
        if api_key not in _READ_APIS:
            continue
        request, response = bodies(exchange)
        if api_key == ApiKey.METADATA:
            made.update(
                topic["name"]
                for topic in entries(response.get("topics"))
                if topic["error_code"] in NOT_MADE_YET and topic.get("name")
            )
        elif api_key == ApiKey.PRODUCE:
            results = dict(names.logs(response))
            for log, partition in names.logs(request):
                logs[log].produce(partition, results.get(log))
        elif api_key == ApiKey.FETCH:
            for log, partition in names.logs(response):
                logs[log].fetch(partition)
        elif api_key in _COMMIT_APIS:
            committed.update((request["group_id"], *log) for log, _ in names.logs(request))
        else:
            groups = response.get("groups") or [{"group_id": request.get("group_id"), **response}]
            for group in groups:
                for log, each in names.logs(group):
                    commit, offset = (group["group_id"], *log), each["committed_offset"]
                    if offset >= 0 and each["error_code"] == 0 and commit not in committed:
                        state.commits.setdefault(commit, offset)
    topics = sorted(workload.facts.topics.items())
    for name, topic in topics:
        is_early = topic.first_time_ns >= 0 and not topic.is_created and name not in made
        if is_early and not topic.is_internal:
            state.topics[name] = topic.partition_count
    internal = {name for name, topic in topics if topic.is_internal}
    for log, captured in sorted(logs.items()):
        earlier = captured.uncovered()
        if earlier and log[0] not in internal:
            state.logs[log] = min(earlier)[0], max(end for _, end in earlier)
    return state


@dataclass(slots=True)
class _CapturedLog:
    """Batches that answers bring and requests write, as offset ranges. is_open: a request wrote
    records without an offset in its answer, so later batches may be these."""

    fetched: list[tuple[int, int]] = field(default_factory=list)
    produced: list[tuple[int, int]] = field(default_factory=list)
    is_open: bool = False

    def produce(self, partition: Body, result: Body | None) -> None:
        if result is None or (result["error_code"] == 0 and result["base_offset"] < 0):
            self.is_open = True
        elif result["error_code"] == 0:
            batches = headers(partition["records"] or b"")
            count = sum(max(each.record_count, 0) for each in batches)
            self.produced.append((result["base_offset"], result["base_offset"] + count))

    def fetch(self, partition: Body) -> None:
        if not self.is_open:
            self.fetched += [
                (each.base_offset, each.last_offset + 1)
                for each in headers(partition["records"] or b"")
                if not each.is_control and not each.is_partial
            ]

    def uncovered(self) -> list[tuple[int, int]]:
        """Fetched ranges that no captured request produced, before or while they were fetched."""
        return [
            (start, end)
            for start, end in self.fetched
            if not any(first <= start < last for first, last in self.produced)
        ]


async def find_missing(
    target: Target,
    starting: StartingState,
    renames: Mapping[tuple[str, str], str],
    *,
    makes_topics: bool,
) -> list[str]:
    """List the gaps of the target's starting state, a line for each.

    renames: as in `TranslateOptions`. makes_topics: whether missing topics will be created.
    """
    if starting == StartingState():
        return []
    topics = {*starting.topics, *(topic for topic, _ in starting.logs)}
    topics |= {topic for _, topic, _ in starting.commits}
    groups = {group for group, _, _ in starting.commits}
    state = await read_end_state(target, topics, groups, (), renames=renames, with_records=False)
    lines = [f"{part} could not be read: {why}" for part, why in state.unread.items()]
    if "topics" not in state.unread:
        lines += _missing(starting, state, renames, makes_topics=makes_topics)
    return [visible(line) for line in lines]


def _missing(
    starting: StartingState,
    state: EndState,
    renames: Mapping[tuple[str, str], str],
    *,
    makes_topics: bool,
) -> Iterator[str]:
    def new(kind: str, name: str) -> str:
        return renames.get((kind, name), name)

    for name, count in starting.topics.items():
        found = state.topics.get(name)
        if found is None and not makes_topics:
            yield f"topic {new('topic', name)} is not there"
        elif found is not None and count and found != count:
            yield f"topic {new('topic', name)} has {plural(found, 'partition')}, not {count}"
    for log, (first, end) in starting.logs.items():
        extent = state.logs.get(log)
        count = 0 if extent is None else extent.end - extent.start
        if count < end - first and "logs" not in state.unread:
            yield (
                f"{new('topic', log[0])}-{log[1]} has {plural(count, 'offset')}; answers of the "
                f"capture bring {end - first} from before its own records"
            )
    for (group, topic, partition), offset in starting.commits.items():
        is_there = (group, topic, partition) in state.commits
        if not is_there and f"group {group}" not in state.unread:
            yield (
                f"group {new('group', group)} has no committed offset in "
                f"{new('topic', topic)}-{partition}, {offset} in the capture"
            )
