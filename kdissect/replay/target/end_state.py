"""Reads back the state of a target after a run: records, commits, transactions and configs.

Only names that the run may have changed are read, with requests of the replay's own. Each log is
fetched from its start, first up to its last stable offset as read_committed, then to its end. Of
each batch a digest of its records stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kdissect.errors import EnvironmentFailed
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import error_name
from kdissect.replay.batch_headers import BatchHeader
from kdissect.replay.comparison.records import (
    Batch,
    batches_of,
    content_digest,
    has_append_time,
)
from kdissect.replay.target.cluster import Target, tries
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.settling import ENDING, SETTLE_S, transaction_states
from kdissect.replay.translation.offsets import Log
from kdissect.replay.workload.messages import (
    GROUP_KEY,
    TOPIC_CONFIG,
    TOPIC_RESOURCE,
    entries,
    partitions,
)

READ_BYTES_MAX = 1 << 30  # of record data in a log; a longer one is not read
_FETCH_BYTES = 4 << 20
_FETCH_BY_NAME = 12  # later versions name topics by id (KIP-516)
_ONE_GROUP = 7  # later versions of OffsetFetch have a list of groups (KIP-709)
_ALL_TOPICS = 2  # the first version of OffsetFetch with null for all topics
_BROKER_RESOURCE, _DEFAULT_CONFIG = 4, 5


class StoredBatch(NamedTuple):
    """A batch in a log. digest: of its records, valid in this process, 0 for a message before
    magic 2. is_aborted: a read_committed consumer skips it."""

    base_offset: int
    last_offset: int
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
class EndState:
    """The state of a target, by the capture's names.

    topics: those that exist, with their number of partitions. commits: (group, topic, partition) ->
    offset. groups: those that exist. configs: of each topic, those that are set on the topic.
    settings: by resource of the target (``topic orders``, ``broker 1``), configs that are not
    Kafka's default.
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


async def read_end_state(
    target: Target,
    topics: Iterable[str],
    groups: Iterable[str],
    transactional_ids: Iterable[str],
    gone: Iterable[str] = (),
    *,
    renames: Mapping[tuple[str, str], str] | None = None,
    with_records: bool = True,
) -> EndState:
    """Read the state of these names of the capture. gone: topics that were deleted; deletion takes
    a moment. renames: as in `TranslateOptions`.

    Parts that the target does not answer are in `EndState.unread`.
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
    for name in sorted(set(transactional_ids)):
        await reader.attempt(f"transactional id {name}", reader.transaction(name))
    return reader.state


async def read_settings(target: Target) -> dict[str, dict[str, str]]:
    """The settings of the target's topics and brokers that are not Kafka's default, as far as it
    tells them."""
    reader = _Reader(target, {})
    await reader.attempt("topics", reader.topics(target.topics(), ()))
    await reader.attempt("configs", reader.configs())
    return reader.state.settings


class _Reader:
    """Reads one target into `state`."""

    def __init__(self, target: Target, renames: Mapping[tuple[str, str], str]) -> None:
        self._target = target
        self._new = renames
        self._old = {(kind, new): old for (kind, old), new in renames.items()}
        self._topics: list[str] = []  # those that exist, by the target's names
        self.state = EndState()

    def _captured(self, kind: str, name: str) -> str:
        return self._old.get((kind, name), name)

    async def attempt(self, what: str, reading: Any) -> None:
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
            await self._target.learn_metadata(None)
            if not deleted.intersection(self._target.topics()):
                break
        there = self._target.topics()
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
        for leader, names in self._target.led().items():
            for name, numbers in sorted(names.items()):
                for number in sorted(numbers):
                    log = self._captured("topic", name), number
                    if (extent := self.state.logs.get(log)) is not None:
                        content = await self._content(leader, (name, number), extent)
                        self.state.logs[log] = content

    async def _content(self, leader: int, log: Log, extent: LogContent) -> LogContent:
        """The log with its batches; without them if it cannot be read to its end."""
        version = self._target.version(ApiKey.FETCH, _FETCH_BY_NAME)
        aborted = _AbortedTransactions()
        offset, size = extent.start, 0
        batches: list[StoredBatch] = []
        is_committed = 1
        while offset < extent.end:
            asked = _fetch(log, offset, is_committed)
            body = (await self._target.ask(ApiKey.FETCH, version, asked, leader)).body
            _, _, partition = next(partitions(body), (None, 0, {"error_code": None}))
            why = "no answer" if partition["error_code"] is None else ""
            if partition["error_code"]:
                why = error_name(partition["error_code"])
            data, reached = partition.get("records") or b"", offset
            aborted.listed += entries(partition.get("aborted_transactions"))
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
        version = self._target.version(ApiKey.DESCRIBE_CONFIGS)
        resources = [(TOPIC_RESOURCE, name) for name in self._topics]
        for node_id in sorted(self._target.nodes):
            mine = [(_BROKER_RESOURCE, str(node_id)), *resources]
            resources = []
            asked = [
                {"resource_type": kind, "resource_name": name, "configuration_keys": None}
                for kind, name in mine
            ]
            answer = await self._target.ask(
                ApiKey.DESCRIBE_CONFIGS, version, {"resources": asked}, node_id
            )
            for result in answer.body["results"]:
                if result["error_code"] == 0:
                    self._add_configs(result)

    def _add_configs(self, result: dict[str, Any]) -> None:
        name, is_topic = result["resource_name"], result["resource_type"] == TOPIC_RESOURCE
        found = [
            (each["name"], each["value"] or "", each.get("config_source"))
            for each in result["configs"]
        ]
        self.state.settings[f"{'topic' if is_topic else 'broker'} {name}"] = {
            config: value for config, value, source in found if source != _DEFAULT_CONFIG
        }
        if is_topic:
            self.state.configs[self._captured("topic", name)] = {
                config: value for config, value, source in found if source == TOPIC_CONFIG
            }

    async def commits(self, group: str) -> None:
        """Read the committed offsets of a group."""
        version = self._target.version(ApiKey.OFFSET_FETCH, _ONE_GROUP)
        if version < _ALL_TOPICS:
            raise ConnectFailed("unreachable", "its OffsetFetch cannot list all topics")
        name = self._new.get(("group", group), group)
        node = await self._target.coordinator(GROUP_KEY, name)
        asked = {"group_id": name, "topics": None}
        body = (await self._target.ask(ApiKey.OFFSET_FETCH, version, asked, node)).body
        if body.get("error_code"):
            self.state.unread[f"group {group}"] = error_name(body["error_code"])
        for topic, number, each in partitions(body):
            if each["error_code"] == 0 and each["committed_offset"] >= 0:
                key = group, self._captured("topic", topic["name"]), number
                self.state.commits[key] = each["committed_offset"]

    async def transaction(self, name: str) -> None:
        """Read the state of a transactional id, after a transaction that is being ended has
        ended."""
        self._target.version(ApiKey.DESCRIBE_TRANSACTIONS)
        state, named = "", self._new.get(("transactional-id", name), name)
        async for state in transaction_states(self._target, named, SETTLE_S):
            if state not in ENDING:
                break
        if state:
            self.state.transactions[name] = state


class _AbortedTransactions:
    """Which batches a read_committed consumer skips (KIP-98). listed: by the answers so far."""

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self._open: set[int] = set()

    def ends(self, batch: Batch) -> bool:
        """Note a control batch; return whether it is one."""
        header = batch.header
        for each in [one for one in self.listed if one["first_offset"] <= header.last_offset]:
            self.listed.remove(each)
            self._open.add(each["producer_id"])
        if header.is_control and batch.marker_type == "ABORT":
            self._open.discard(header.producer_id)
        return header.is_control

    def has(self, batch: BatchHeader) -> bool:
        return batch.is_transactional and batch.producer_id in self._open


def _stored(batch: Batch, is_aborted: bool) -> StoredBatch:
    header, data = batch.header, batch.data
    is_new = header.magic == 2
    return StoredBatch(
        header.base_offset, header.last_offset, max(header.record_count, 0),
        content_digest(data) if is_new else 0, is_aborted, is_new and has_append_time(data),
    )  # fmt: skip


def _fetch(log: Log, offset: int, isolation_level: int) -> dict[str, Any]:
    asked = {"partition": log[1], "fetch_offset": offset, "partition_max_bytes": _FETCH_BYTES}
    return {
        "max_wait_ms": 0,
        "min_bytes": 0,
        "max_bytes": _FETCH_BYTES,
        "isolation_level": isolation_level,
        "topics": [{"topic": log[0], "partitions": [asked]}],
    }
