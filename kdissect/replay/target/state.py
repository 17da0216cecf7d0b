"""The state of a target before and after a run: topics, records, commits, transactions, configs.

A *fact* is what a target has of a *subject*, by the capture's names:

    ("topic", name)                             its number of partitions, 0 unknown
    ("group", name)                             its state
    ("commit", group, topic, partition)         its committed offset
    ("transactional-id", name)                  the state of its last transaction
    ("config", topic, name)                     the value that is set on the topic

Before a run, `find_missing` looks for the facts that captured answers depend on: a replay brings
only what its requests write. After a run, `read_state` reads the names that it may have changed,
with requests of the replay's own. Each log is fetched from its start to its end. Of each batch a
digest of its records stays.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kdissect.errors import EnvironmentFailed
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import error_name
from kdissect.replay import batches
from kdissect.replay.model import Log, ReplayPlan, TranslateOptions
from kdissect.replay.target.cluster import LISTING_APIS, Target, tries
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.guard import topics_to_make
from kdissect.replay.target.settling import ENDING, SETTLE_S
from kdissect.replay.workload import messages
from kdissect.replay.workload.messages import Body
from kdissect.text import plural, visible

READ_BYTES_MAX = 1 << 30  # of record data in a log; a longer one is not read
_FETCH_BYTES = 4 << 20
_FETCH_BY_NAME = 12  # later versions name topics by id (KIP-516)
_ONE_GROUP = 7  # later versions of OffsetFetch have a list of groups (KIP-709)
_ALL_TOPICS = 2  # the first version of OffsetFetch with null for all topics
_BROKER_RESOURCE, _DEFAULT_CONFIG = 4, 5
# of a Fetch below the log's end, which brings nothing
_LOST = messages.codes("NONE CORRUPT_MESSAGE KAFKA_STORAGE_ERROR")
_COMMIT_APIS = frozenset({ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT})

Subject = tuple[Any, ...]
Value = str | int
GONE = "none"  # the value where there should be no fact


class StoredBatch(NamedTuple):
    """A batch in a log. digest: of its records, valid in this process, 0 for a message before
    magic 2. is_aborted: a read_committed consumer skips it."""

    base_offset: int
    records: int
    digest: int
    is_aborted: bool
    has_append_time: bool


@dataclass(frozen=True, slots=True)
class LogContent:
    """A log. start, end: offsets. batches: those with data; None if they were not read."""

    start: int
    end: int
    batches: tuple[StoredBatch, ...] | None = None

    @property
    def records(self) -> int | None:
        if self.batches is None:
            return None
        return sum(each.records for each in self.batches)


@dataclass
class State:
    """The state of a target. settings: by resource of the target (``topic orders``, ``broker 1``),
    configs that are not Kafka's default. unread: what could not be read, with the reason."""

    facts: dict[Subject, Value] = field(default_factory=dict)
    logs: dict[Log, LogContent] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)


async def read_state(
    target: Target,
    topics: Iterable[str],
    expected: Mapping[Subject, Sequence[Value | None]],
    options: TranslateOptions,
    *,
    with_records: bool = True,
) -> State:
    """Read the state of topics of the capture, and of expected groups and transactional ids.

    Waits a moment for the deletion of topics that are expected to be `GONE`.

    Parts that the target does not answer are in `State.unread`.
    """
    reader = _Reader(target, options)
    gone = [each[1] for each, values in expected.items() if each[0] == "topic" and GONE in values]
    await reader.attempt("topics", reader.topics(topics, gone))
    await reader.attempt("logs", reader.logs())
    if with_records:
        await reader.attempt("records", reader.records())
        await reader.attempt("configs", reader.configs())
    names = {
        kind: sorted({each[1] for each in expected if each[0] == kind})
        for kind in ("group", "commit", "transactional-id")
    }
    for group in names.pop("commit"):
        await reader.attempt(f"commits of {group}", reader.commits(group))
    for kind, found in names.items():
        if found:
            await reader.attempt(f"{kind}s", reader.states(kind, found))
    return reader.state


class _Reader:
    """Reads one target into `state`."""

    def __init__(self, target: Target, options: TranslateOptions) -> None:
        self._target = target
        self._name, self._captured = options.name, options.captured_name
        self._topics: list[str] = []  # those that exist, by the target's names
        self.state = State()

    async def attempt(self, what: str, reading: Awaitable[None]) -> None:
        """Await a part; a failure is noted, and the other parts are read all the same."""
        try:
            await reading
        except (ConnectFailed, EnvironmentFailed, TimeoutError) as error:
            self.state.unread[what] = str(error) or "no answer"

    async def topics(self, wanted: Iterable[str], gone: Iterable[str]) -> None:
        """Read the topics that exist, after deleted ones have gone."""
        names, deleted = ({self._name("topic", name) for name in each} for each in (wanted, gone))
        async for _ in tries(SETTLE_S):
            await self._target.learn_metadata()
            if not deleted.intersection(self._target.cluster.topics):
                break
        there = self._target.cluster.topics
        self._topics = sorted(there.keys() & (names | deleted))
        for name in self._topics:
            self.state.facts["topic", self._captured("topic", name)] = there[name]

    async def logs(self) -> None:
        """Read the first and last offsets of all partitions."""
        for (name, number), extent in (await self._target.extents(self._topics)).items():
            self.state.logs[self._captured("topic", name), number] = LogContent(*extent)

    async def records(self) -> None:
        """Read the records of all logs."""
        for (topic, number), extent in self.state.logs.items():
            log = self._name("topic", topic), number
            self.state.logs[topic, number] = await self._content(log, extent)

    async def _content(self, log: Log, extent: LogContent) -> LogContent:
        """The log with its batches, up to where it has no more to give; without them if nobody
        knows."""
        leader, _ = self._target.cluster.leaders[log]
        offset, size = extent.start, 0
        seen, stored = list[batches.BatchHeader](), list[StoredBatch]()
        while offset < extent.end:
            asked = _fetch(log, offset)
            body = await self._target.ask(ApiKey.FETCH, asked, leader, last=_FETCH_BY_NAME)
            _, _, partition = next(messages.partitions(body), (None, 0, {}))
            data, reached = partition.get("records") or b"", offset
            for batch in batches.batches_of(data):
                if batch.header.last_offset >= offset:
                    reached = batch.header.last_offset + 1
                    seen.append(batch.header)
                    stored += [] if batch.header.is_control else [_stored(batch)]
            size += len(data)
            code = partition.get("error_code")
            if reached == offset and code in _LOST and not body.get("throttle_time_ms"):
                break  # the log has an end beyond, and cannot give what is before it
            if reached == offset or size > READ_BYTES_MAX:
                why = "no batch" if reached == offset else "too many bytes"
                if code:
                    why = error_name(code)
                self.state.unread[f"{log[0]}-{log[1]}"] = f"{why} at offset {offset}"
                return extent
            offset = reached
        hidden = {each.base_offset for each in batches.aborted(seen)}
        found = (each._replace(is_aborted=each.base_offset in hidden) for each in stored)
        return LogContent(extent.start, extent.end, tuple(found))

    async def configs(self) -> None:
        """Read what is set on the topics, and what else is no default of any topic or broker."""
        resources = [(messages.TOPIC_RESOURCE, name) for name in self._target.cluster.topics]
        for node_id in sorted(self._target.cluster.nodes):
            resources.append((_BROKER_RESOURCE, str(node_id)))
            asked = [
                {"resource_type": kind, "resource_name": name, "configuration_keys": None}
                for kind, name in resources
            ]
            resources = []  # each broker tells its own
            answer = await self._target.ask(ApiKey.DESCRIBE_CONFIGS, {"resources": asked}, node_id)
            for result in answer["results"]:
                if result["error_code"] == 0:
                    self._add_configs(result)
                elif result["resource_name"] in self._topics:
                    self.state.unread["configs"] = error_name(result["error_code"])

    def _add_configs(self, result: Body) -> None:
        name, is_topic = result["resource_name"], result["resource_type"] == messages.TOPIC_RESOURCE
        settings = self.state.settings.setdefault(f"{'topic' if is_topic else 'broker'} {name}", {})
        for each in result["configs"]:
            source, value = each.get("config_source"), each["value"] or ""
            if source != _DEFAULT_CONFIG:
                settings[each["name"]] = value
            if source == messages.TOPIC_CONFIG and name in self._topics:
                self.state.facts["config", self._captured("topic", name), each["name"]] = value

    async def commits(self, group: str) -> None:
        """Read the committed offsets of a group."""
        if (self._target.version(ApiKey.OFFSET_FETCH, _ONE_GROUP) or 0) < _ALL_TOPICS:
            raise ConnectFailed("unreachable", "its OffsetFetch cannot list all topics")
        name = self._name("group", group)
        node = await self._target.coordinator(messages.GROUP_KEY, name)
        asked = {"group_id": name, "topics": None}
        body = await self._target.ask(ApiKey.OFFSET_FETCH, asked, node, last=_ONE_GROUP)
        if body.get("error_code"):
            self.state.unread[f"commits of {group}"] = error_name(body["error_code"])
        for topic, number, each in messages.partitions(body):
            if each["error_code"] == 0 and each["committed_offset"] >= 0:
                commit = "commit", group, self._captured("topic", topic["name"]), number
                self.state.facts[commit] = each["committed_offset"]

    async def states(self, kind: str, names: Iterable[str]) -> None:
        """Read the states of groups, or of transactional ids after transactions that are being
        ended."""
        if self._target.version(LISTING_APIS[kind]) is None:
            raise ConnectFailed("unreachable", f"the target cannot list {kind}s")
        by_name = {self._name(kind, name): name for name in names}
        states = await self._target.states(kind, by_name, ENDING)
        found = {(kind, by_name[each]): states[each] for each in by_name.keys() & states.keys()}
        self.state.facts.update(found)


def _stored(batch: batches.Batch) -> StoredBatch:
    header, is_new = batch.header, batch.header.magic == 2
    digest = batches.content_digest(batch.data) if is_new else 0
    has_time = is_new and batches.has_append_time(batch.data)
    return StoredBatch(header.base_offset, max(header.record_count, 0), digest, False, has_time)


def _fetch(log: Log, offset: int) -> Body:
    asked = {"partition": log[1], "fetch_offset": offset, "partition_max_bytes": _FETCH_BYTES}
    topics = [{"topic": log[0], "partitions": [asked]}]
    return {"max_wait_ms": 0, "min_bytes": 0, "max_bytes": _FETCH_BYTES, "topics": topics}


# -- before a run ---------------------------------------------------------------------------------


def starting_facts(plan: ReplayPlan) -> dict[Subject, int]:
    """The facts that the answers to the requests of a plan depend on, beside what these write:
    topics, commits, and ``("log", topic, partition)``, the number of records in it."""
    topics, names = dict[Subject, int](), messages.captured_topics(plan.workload.facts)
    steps = [step for step in plan.steps if step.skipped is None]
    used = {resource for step in steps for resource, _ in step.accesses}
    for topic in topics_to_make(plan):
        if ("topic", topic.name) in used or ("topics",) in used:
            topics["topic", topic.name] = topic.partition_count
    written: dict[Log, float] = {}  # first offsets that requests write
    for step in steps:
        if step.exchange.api_key == ApiKey.PRODUCE:
            request, response = messages.bodies(step.exchange)
            results = dict(names.logs(response))
            for log, _ in names.logs(request):
                offset = _written_offset(results.get(log))
                written[log] = min(offset, written.get(log, math.inf))
    internal = {name for name, topic in plan.workload.facts.topics.items() if topic.is_internal}
    earlier: dict[Log, list[int]] = {}  # first and last offsets of fetched records before those
    committed: set[Subject] = set()  # by requests of the plan
    commits: dict[Subject, int] = {}  # before those
    for step in steps:
        request, response = messages.bodies(step.exchange)
        if step.exchange.api_key == ApiKey.FETCH:
            for log, partition in names.logs(response):
                found = batches.headers(partition["records"] or b"")
                for each in found if log[0] not in internal else ():
                    is_whole = not each.is_control and not each.is_partial
                    if is_whole and each.base_offset < written.get(log, math.inf):
                        earlier.setdefault(log, []).extend((each.base_offset, each.last_offset))
        elif step.exchange.api_key in _COMMIT_APIS:
            committed.update(
                ("commit", request["group_id"], *log) for log, _ in names.logs(request)
            )
        elif step.exchange.api_key == ApiKey.OFFSET_FETCH:
            groups = response.get("groups") or [{"group_id": request.get("group_id"), **response}]
            for group in groups:
                for log, entry in names.logs(group):
                    commit, offset = ("commit", group["group_id"], *log), entry["committed_offset"]
                    if offset >= 0 and entry["error_code"] == 0 and commit not in committed:
                        commits.setdefault(commit, offset)
    records = {("log", *log): max(at) + 1 - min(at) for log, at in sorted(earlier.items())}
    return topics | records | commits


def _written_offset(result: Body | None) -> float:
    """The first offset of a Produce to a log; 0 if its answer has none, so that any may be its."""
    if result is None:
        return 0
    return math.inf if result["error_code"] else max(result["base_offset"], 0)


async def find_missing(
    target: Target, needed: Mapping[Subject, int], options: TranslateOptions
) -> list[str]:
    """What the target lacks of the facts that a replay needs, a line for each."""
    if not needed:
        return []
    topics = {each[2 if each[0] == "commit" else 1] for each in needed}
    subjects = dict.fromkeys(needed, ())
    found = await read_state(target, topics, subjects, options, with_records=False)
    sizes = {("log", *log): content.end - content.start for log, content in found.logs.items()}
    there = {**found.facts, **sizes}
    lines = [f"{part} could not be read: {why}" for part, why in found.unread.items()]
    for (kind, *names), wanted in needed.items() if "topics" not in found.unread else ():
        has, name = int(there.get((kind, *names), -1)), names[1 if kind == "commit" else 0]
        where = options.name("topic", name)
        if kind == "topic":
            is_there = has >= wanted if has >= 0 else options.makes_topics
            text = f"topic {where}" + (f" with {plural(wanted, 'partition')}" if wanted else "")
        elif kind == "log":
            is_there = has >= wanted or "logs" in found.unread
            text = f"{plural(wanted, 'record')} of {where}-{names[1]}"
        else:
            is_there = has >= 0 or f"commits of {names[0]}" in found.unread
            group = options.name("group", names[0])
            text = f"offset {wanted} of group {group} in {where}-{names[2]}"
        lines += [] if is_there else [f"the target lacks {text}"]
    return [visible(line) for line in lines]
