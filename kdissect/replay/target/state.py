"""The state of a target before and after a run: topics, records, commits, transactions, configs.

Before a run, `find_missing` compares it with the state that captured answers depend on: a replay
brings only what its requests write. After a run, `read_state` reads the names that it may have
changed, with requests of the replay's own. Each log is fetched from its start, first up to its last
stable offset as read_committed, then to its end. Of each batch a digest of its records stays.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kdissect.errors import EnvironmentFailed
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import error_name
from kdissect.replay.batches import (
    Batch,
    BatchHeader,
    batches_of,
    content_digest,
    has_append_time,
    headers,
)
from kdissect.replay.model import Log, ReplayPlan
from kdissect.replay.target.cluster import Target, tries
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.guard import topics_to_make
from kdissect.replay.target.settling import ENDING, SETTLE_S, TXN
from kdissect.replay.workload import messages
from kdissect.replay.workload.messages import Body
from kdissect.text import plural, visible

READ_BYTES_MAX = 1 << 30  # of record data in a log; a longer one is not read
_FETCH_BYTES = 4 << 20
_FETCH_BY_NAME = 12  # later versions name topics by id (KIP-516)
_ONE_GROUP = 7  # later versions of OffsetFetch have a list of groups (KIP-709)
_ALL_TOPICS = 2  # the first version of OffsetFetch with null for all topics
_BROKER_RESOURCE, _DEFAULT_CONFIG = 4, 5
_COMMIT_APIS = frozenset({ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT})


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
    """The state of a target, by the capture's names.

    topics: those that exist, with their number of partitions, 0 unknown. commits: (group, topic,
    partition) -> offset. groups: those that exist. configs: of each topic, those that are set on
    the topic. settings: by resource of the target (``topic orders``, ``broker 1``), configs that
    are not Kafka's default.
    unread: what could not be read, with the reason.
    """

    topics: dict[str, int] = field(default_factory=dict)
    logs: dict[Log, LogContent] = field(default_factory=dict)
    commits: dict[tuple[str, str, int], int] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)
    transactions: dict[str, str] = field(default_factory=dict)
    configs: dict[str, dict[str, str]] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)


async def read_state(
    target: Target,
    topics: Iterable[str],
    groups: Iterable[str],
    transactional_ids: Iterable[str],
    gone: Iterable[str] = (),
    *,
    renames: Mapping[tuple[str, str], str] | None = None,
    with_records: bool = True,
) -> State:
    """Read the state of these names of the capture. gone: topics that were deleted; deletion takes
    a moment. renames: as in `TranslateOptions`.

    Parts that the target does not answer are in `State.unread`.
    """
    reader = _Reader(target, renames or {})
    await reader.attempt("topics", reader.topics(topics, gone))
    await reader.attempt("logs", reader.logs())
    if with_records:
        await reader.attempt("records", reader.records())
        await reader.attempt("groups", reader.groups())
        await reader.attempt("configs", reader.configs())
    for group in sorted(set(groups)):
        await reader.attempt(f"group {group}", reader.commits(group))
    if names := set(transactional_ids):
        await reader.attempt("transactional ids", reader.transactions(names))
    return reader.state


async def read_settings(target: Target) -> dict[str, dict[str, str]]:
    """The settings of the target's topics and brokers that are not Kafka's default, as far as it
    tells them."""
    reader = _Reader(target, {})
    await reader.attempt("topics", reader.topics(target.cluster.topics, ()))
    await reader.attempt("configs", reader.configs())
    return reader.state.settings


class _Reader:
    """Reads one target into `state`."""

    def __init__(self, target: Target, renames: Mapping[tuple[str, str], str]) -> None:
        self._target = target
        self._new = renames
        self._old = {(kind, new): old for (kind, old), new in renames.items()}
        self._topics: list[str] = []  # those that exist, by the target's names
        self.state = State()

    def _captured(self, kind: str, name: str) -> str:
        return self._old.get((kind, name), name)

    async def attempt(self, what: str, reading: Awaitable[None]) -> None:
        """Await a part; a failure is noted, and the other parts are read all the same."""
        try:
            await reading
        except (ConnectFailed, EnvironmentFailed, TimeoutError) as error:
            self.state.unread[what] = str(error) or "no answer"

    async def topics(self, wanted: Iterable[str], gone: Iterable[str]) -> None:
        """Read the topics that exist, after deleted ones have gone."""
        names, deleted = (
            {self._new.get(("topic", name), name) for name in each} for each in (wanted, gone)
        )
        async for _ in tries(SETTLE_S):
            await self._target.learn_metadata()
            if not deleted.intersection(self._target.cluster.topics):
                break
        there = self._target.cluster.topics
        self._topics = sorted(there.keys() & (names | deleted))
        self.state.topics = {self._captured("topic", name): there[name] for name in self._topics}

    async def groups(self) -> None:
        names = await self._target.states("group")
        self.state.groups = {self._captured("group", name) for name in names}

    async def logs(self) -> None:
        """Read the first and last offsets of all partitions."""
        for (name, number), extent in (await self._target.extents(self._topics)).items():
            self.state.logs[self._captured("topic", name), number] = LogContent(*extent)

    async def records(self) -> None:
        """Read the records of all logs."""
        for (topic, number), extent in self.state.logs.items():
            log = self._new.get(("topic", topic), topic), number
            self.state.logs[topic, number] = await self._content(log, extent)

    async def _content(self, log: Log, extent: LogContent) -> LogContent:
        """The log with its batches; without them if it cannot be read to its end."""
        leader, _ = self._target.cluster.leaders[log]
        aborted = _AbortedTransactions()
        offset, size = extent.start, 0
        batches: list[StoredBatch] = []
        is_committed = 1
        while offset < extent.end:
            asked = _fetch(log, offset, is_committed)
            body = await self._target.ask(ApiKey.FETCH, asked, leader, last=_FETCH_BY_NAME)
            _, _, partition = next(messages.partitions(body), (None, 0, {"error_code": None}))
            why = "no answer" if partition["error_code"] is None else ""
            if partition["error_code"]:
                why = error_name(partition["error_code"])
            data, reached = partition.get("records") or b"", offset
            aborted.listed += messages.entries(partition.get("aborted_transactions"))
            for batch in batches_of(data):
                reached = max(reached, batch.header.last_offset + 1)
                if not aborted.ends(batch) and batch.header.last_offset >= offset:
                    batches.append(_stored(batch, aborted.has(batch.header)))
            size += len(data)
            if reached == offset and is_committed and not why:
                is_committed = 0  # the rest is of open transactions
                continue
            if reached == offset or size > READ_BYTES_MAX:
                why = why or ("no batch" if reached == offset else "too many bytes")
                self.state.unread[f"{log[0]}-{log[1]}"] = f"{why} at offset {offset}"
                return extent
            offset = reached
        return LogContent(extent.start, extent.end, tuple(batches))

    async def configs(self) -> None:
        """Read what is set on the topics, and what else is no default of topics and brokers."""
        resources = [(messages.TOPIC_RESOURCE, name) for name in self._topics]
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

    def _add_configs(self, result: Body) -> None:
        name, is_topic = result["resource_name"], result["resource_type"] == messages.TOPIC_RESOURCE
        found: dict[int | None, dict[str, str]] = {}  # by their source
        for each in result["configs"]:
            found.setdefault(each.get("config_source"), {})[each["name"]] = each["value"] or ""
        if is_topic:
            self.state.configs[self._captured("topic", name)] = found.get(messages.TOPIC_CONFIG, {})
        found.pop(_DEFAULT_CONFIG, None)
        settings = self.state.settings.setdefault(f"{'topic' if is_topic else 'broker'} {name}", {})
        for configs in found.values():
            settings |= configs

    async def commits(self, group: str) -> None:
        """Read the committed offsets of a group."""
        if (self._target.version(ApiKey.OFFSET_FETCH, _ONE_GROUP) or 0) < _ALL_TOPICS:
            raise ConnectFailed("unreachable", "its OffsetFetch cannot list all topics")
        name = self._new.get(("group", group), group)
        node = await self._target.coordinator(messages.GROUP_KEY, name)
        asked = {"group_id": name, "topics": None}
        body = await self._target.ask(ApiKey.OFFSET_FETCH, asked, node, last=_ONE_GROUP)
        if body.get("error_code"):
            self.state.unread[f"group {group}"] = error_name(body["error_code"])
        for topic, number, each in messages.partitions(body):
            if each["error_code"] == 0 and each["committed_offset"] >= 0:
                key = group, self._captured("topic", topic["name"]), number
                self.state.commits[key] = each["committed_offset"]

    async def transactions(self, names: Iterable[str]) -> None:
        """Read the states of transactional ids, after transactions that are being ended."""
        if self._target.version(ApiKey.LIST_TRANSACTIONS) is None:
            raise ConnectFailed("unreachable", "the target cannot list transactions")
        async for _ in tries(SETTLE_S):
            states = await self._target.states(TXN)
            there = {name: states.get(self._new.get((TXN, name), name)) for name in names}
            if not ENDING.intersection(there.values()):
                break
        self.state.transactions = {name: each for name, each in there.items() if each is not None}


class _AbortedTransactions:
    """Which batches a read_committed consumer skips (KIP-98). listed: by the answers so far."""

    def __init__(self) -> None:
        self.listed: list[Body] = []
        self._open: set[int] = set()

    def ends(self, batch: Batch) -> bool:
        """Note a control batch; return whether it is one."""
        header = batch.header
        for each in [one for one in self.listed if one["first_offset"] <= header.last_offset]:
            self.listed.remove(each)
            self._open.add(each["producer_id"])
        if batch.is_abort:
            self._open.discard(header.producer_id)
        return header.is_control

    def has(self, batch: BatchHeader) -> bool:
        return batch.is_transactional and batch.producer_id in self._open


def _stored(batch: Batch, is_aborted: bool) -> StoredBatch:
    header, is_new = batch.header, batch.header.magic == 2
    digest = content_digest(batch.data) if is_new else 0
    has_time, records = is_new and has_append_time(batch.data), max(header.record_count, 0)
    return StoredBatch(header.base_offset, records, digest, is_aborted, has_time)


def _fetch(log: Log, offset: int, isolation_level: int) -> Body:
    asked = {"partition": log[1], "fetch_offset": offset, "partition_max_bytes": _FETCH_BYTES}
    return {
        "max_wait_ms": 0,
        "min_bytes": 0,
        "max_bytes": _FETCH_BYTES,
        "isolation_level": isolation_level,
        "topics": [{"topic": log[0], "partitions": [asked]}],
    }


# -- before a run ---------------------------------------------------------------------------------


def starting_state(plan: ReplayPlan) -> State:
    """The state that the answers to the requests of a plan depend on, beside what these write:
    topics, logs with their first and last offsets, commits."""
    state, names = State(), messages.CapturedTopics(plan.workload.facts)
    steps = [step for step in plan.steps if step.skipped is None]
    used = {resource for step in steps for resource, _ in step.accesses}
    for topic in topics_to_make(plan):
        if ("topic", topic.name) in used or ("topics",) in used:
            state.topics[topic.name] = topic.partition_count
    written: dict[Log, float] = {}  # first offsets that requests write
    for step in steps:
        if step.exchange.api_key == ApiKey.PRODUCE:
            request, response = messages.bodies(step.exchange)
            results = dict(names.logs(response))
            for log, _ in names.logs(request):
                offset = _written_offset(results.get(log))
                written[log] = min(offset, written.get(log, math.inf))
    internal = {name for name, topic in plan.workload.facts.topics.items() if topic.is_internal}
    committed: set[tuple[str, str, int]] = set()  # by requests of the plan
    for step in steps:
        request, response = messages.bodies(step.exchange)
        if step.exchange.api_key == ApiKey.FETCH:
            for log, partition in names.logs(response):
                if log[0] not in internal:
                    _add_earlier(state, log, partition, written.get(log, math.inf))
        elif step.exchange.api_key in _COMMIT_APIS:
            committed.update((request["group_id"], *log) for log, _ in names.logs(request))
        elif step.exchange.api_key == ApiKey.OFFSET_FETCH:
            groups = response.get("groups") or [{"group_id": request.get("group_id"), **response}]
            for group in groups:
                for log, each in names.logs(group):
                    commit, offset = (group["group_id"], *log), each["committed_offset"]
                    if offset >= 0 and each["error_code"] == 0 and commit not in committed:
                        state.commits.setdefault(commit, offset)
    return state


def _written_offset(result: Body | None) -> float:
    """The first offset of a Produce to a log; 0 if its answer has none, so that any may be its."""
    if result is None:
        return 0
    return math.inf if result["error_code"] else max(result["base_offset"], 0)


def _add_earlier(state: State, log: Log, partition: Body, written: float) -> None:
    """Add the fetched records of a log before the first that a request writes."""
    for each in headers(partition["records"] or b""):
        if each.base_offset < written and not each.is_control and not each.is_partial:
            known = state.logs.get(log, LogContent(each.base_offset, 0))
            start = min(known.start, each.base_offset)
            state.logs[log] = LogContent(start, max(known.end, each.last_offset + 1))


async def find_missing(
    target: Target, starting: State, renames: Mapping[tuple[str, str], str], *, makes_topics: bool
) -> list[str]:
    """What the target lacks of a starting state, a line for each topic, log and commit.

    renames: as in `TranslateOptions`. makes_topics: whether missing topics will be created.
    """
    if starting == State():
        return []
    topics = {*starting.topics, *(topic for topic, _ in starting.logs)}
    topics |= {topic for _, topic, _ in starting.commits}
    groups = {group for group, _, _ in starting.commits}
    found = await read_state(target, topics, groups, (), renames=renames, with_records=False)
    lacking: list[str] = []
    for name, count in starting.topics.items():
        if found.topics.get(name, math.inf if makes_topics else -1) < count:
            parts = f" with {plural(count, 'partition')}" if count else ""
            lacking.append(f"topic {renames.get(('topic', name), name)}{parts}")
    for (name, number), content in sorted(starting.logs.items()):
        extent = found.logs.get((name, number), LogContent(0, 0))
        wanted = content.end - content.start
        if extent.end - extent.start < wanted and "logs" not in found.unread:
            log = f"{renames.get(('topic', name), name)}-{number}"
            lacking.append(f"{plural(wanted, 'record')} of {log}")
    for (group, name, number), offset in starting.commits.items():
        is_read = f"group {group}" not in found.unread
        if is_read and (group, name, number) not in found.commits:
            log = f"{renames.get(('topic', name), name)}-{number}"
            owner = renames.get(("group", group), group)
            lacking.append(f"offset {offset} of group {owner} in {log}")
    lines = [f"{part} could not be read: {why}" for part, why in found.unread.items()]
    if "topics" not in found.unread:
        lines += [f"the target lacks {each}" for each in lacking]
    return [visible(line) for line in lines]
