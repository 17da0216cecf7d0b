"""Reads back the state of a target after a run: logs, commits, transactions and configs.

Only names that the run may have changed are read, with requests of the replay's own. Records are
fetched from the start of each log, with those of open and aborted transactions, and counted by the
headers of their batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kdissect.errors import EnvironmentFailed
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import error_name
from kdissect.replay.batch_headers import headers
from kdissect.replay.target.cluster import ASK_TIMEOUT_S, Target
from kdissect.replay.target.connection import ConnectFailed, Link, connect, request
from kdissect.replay.workload.messages import (
    GROUP_KEY,
    TOPIC_CONFIG,
    TOPIC_RESOURCE,
    TRANSACTION_KEY,
)

READ_BYTES_MAX = 1 << 30  # of record data in a log; a longer log has no count
_FETCH_BYTES = 4 << 20
_FETCH_BY_NAME = 12  # later versions name topics by id (KIP-516)
_ONE_GROUP = 7  # later versions of OffsetFetch have a list of groups (KIP-709)
_ALL_TOPICS = 2  # the first version of OffsetFetch with null for all topics
_ENDING = frozenset({"PrepareCommit", "PrepareAbort", "PrepareEpochFence"})
_EARLIEST, _LATEST = -2, -1
_SETTLE_S, _PAUSE_S = 10.0, 0.1

Log = tuple[str, int]  # the target's name of a topic, partition


@dataclass(frozen=True, slots=True)
class LogExtent:
    """A log. start, end: offsets. records: how many data records it has, None if unknown."""

    start: int
    end: int
    records: int | None = None


@dataclass
class EndState:
    """The state of a target by its own names.

    topics: those that exist, with their number of partitions. commits: (group, topic, partition) ->
    offset. configs: of each topic, those that are set on the topic. unread: what could not be read,
    with the reason. features_epoch: of the finalized features, -1 unknown.
    """

    topics: dict[str, int] = field(default_factory=dict)
    logs: dict[Log, LogExtent] = field(default_factory=dict)
    commits: dict[tuple[str, str, int], int] = field(default_factory=dict)
    transactions: dict[str, str] = field(default_factory=dict)
    configs: dict[str, dict[str, str]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    features_epoch: int = -1

    def renamed(self, names: Mapping[tuple[str, str], str]) -> EndState:
        """The same state with other names. names: (kind, name here) -> new name."""

        def topic(name: str) -> str:
            return names.get(("topic", name), name)

        def group(name: str) -> str:
            return names.get(("group", name), name)

        return EndState(
            {topic(name): count for name, count in self.topics.items()},
            {(topic(name), number): log for (name, number), log in self.logs.items()},
            {
                (group(name), topic(each), number): offset
                for (name, each, number), offset in self.commits.items()
            },
            {
                names.get(("transactional-id", name), name): state
                for name, state in self.transactions.items()
            },
            {topic(name): configs for name, configs in self.configs.items()},
            dict(self.unread),
            self.features_epoch,
        )


async def read_end_state(
    target: Target,
    topics: Iterable[str],
    groups: Iterable[str],
    transactional_ids: Iterable[str],
    gone: Iterable[str] = (),
    *,
    counts: bool = True,
) -> EndState:
    """Read the state of these names. gone: topics that were deleted; deletion takes a moment.
    counts: whether to count records, which fetches them.

    Parts that the target does not answer are in `EndState.unread`.
    """
    reader = _Reader(target)
    wanted = set(topics)
    await reader.attempt("features", reader.features())
    await reader.attempt("topics", reader.topics(wanted, set(gone)))
    await reader.attempt("logs", reader.logs(wanted))
    if counts:
        await reader.attempt("records", reader.records())
    await reader.attempt("configs", reader.configs())
    for group in sorted(set(groups)):
        await reader.attempt(f"group {group}", reader.commits(group))
    for name in sorted(set(transactional_ids)):
        await reader.attempt(f"transactional id {name}", reader.transaction(name))
    return reader.state


class _Reader:
    """Reads one target into `state`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.state = EndState()

    async def attempt(self, what: str, reading: Any) -> None:
        """Await a part; a failure is noted, and the other parts are read all the same."""
        try:
            await reading
        except (ConnectFailed, EnvironmentFailed, TimeoutError) as error:
            self.state.unread[what] = str(error) or "no answer"

    @asynccontextmanager
    async def _node(self, node_id: int | None) -> AsyncIterator[Link]:
        host, port = self._target.address(node_id)
        link = await connect(host, port, self._target.access)
        try:
            yield link
        finally:
            link.close()

    async def _ask(
        self, link: Link, api_key: ApiKey, version: int, body: dict[str, Any]
    ) -> dict[str, Any]:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return (await link.ask(request(api_key, version, body))).body

    def _version(self, api_key: ApiKey, last: int | None = None) -> int:
        """The newest version up to `last` that both sides know. Raises ConnectFailed."""
        newest = self._target.newest(api_key)
        version = newest if last is None or newest is None else min(newest, last)
        if version is None or version < self._target.versions[api_key][0]:
            name = catalog.api(api_key).name
            raise ConnectFailed("unreachable", f"the target speaks no {name} that is used here")
        return version

    async def features(self) -> None:
        """The epoch of the finalized features (KIP-584)."""
        answer = await self._target.ask_versions()
        self.state.features_epoch = answer.body.get("finalized_features_epoch", -1)

    async def topics(self, wanted: set[str], gone: set[str]) -> None:
        """Return the topics that exist, after deleted ones have gone."""

        def is_over() -> bool:
            return not gone.intersection(self._target.topic_names())

        await self._until(lambda: self._target.learn_metadata(None), is_over)
        for topic in self._target.metadata["topics"]:
            if topic["error_code"] == 0 and topic["name"] in wanted | gone:
                self.state.topics[topic["name"]] = len(topic["partitions"])

    async def _until(self, ask: Callable[[], Any], is_over: Callable[[], bool]) -> None:
        """Ask until a condition holds, at most for a bounded time."""
        end = asyncio.get_running_loop().time() + _SETTLE_S
        while True:
            await ask()
            if is_over() or asyncio.get_running_loop().time() > end:
                return
            await asyncio.sleep(_PAUSE_S)

    async def logs(self, wanted: set[str]) -> None:
        """Extents of all partitions."""
        starts = await self._target.log_offsets(wanted, _EARLIEST)
        ends = await self._target.log_offsets(wanted, _LATEST)
        for log in sorted(starts.keys() & ends.keys()):
            self.state.logs[log] = LogExtent(starts[log], ends[log])

    async def records(self) -> None:
        """Counts of records in all logs."""
        version = self._version(ApiKey.FETCH, _FETCH_BY_NAME)
        for leader, names in self._target.led().items():
            logs = [(name, each) for name, numbers in names.items() for each in numbers]
            known = [log for log in sorted(logs) if log in self.state.logs]
            if not known:
                continue
            async with self._node(leader) as link:
                for log in known:
                    extent = self.state.logs[log]
                    records = await self._records(link, version, log, extent)
                    self.state.logs[log] = LogExtent(extent.start, extent.end, records)

    async def _records(self, link: Link, version: int, log: Log, extent: LogExtent) -> int | None:
        """Return the number of data records in a log; None if it cannot be read to its end."""
        offset, count, size = extent.start, 0, 0
        while offset < extent.end:
            body = await self._ask(link, ApiKey.FETCH, version, _fetch(log, offset))
            partitions = [each for topic in body["responses"] for each in topic["partitions"]]
            if not partitions:
                self.state.unread[f"{log[0]}-{log[1]}"] = f"no answer at offset {offset}"
                return None
            partition = partitions[0]
            if partition["error_code"]:
                self.state.unread[f"{log[0]}-{log[1]}"] = error_name(partition["error_code"])
                return None
            data, reached = partition["records"] or b"", offset
            for each in headers(data):
                if each.is_partial:
                    break
                reached = max(reached, each.last_offset + 1)
                count += 0 if each.is_control else max(each.record_count, 0)
            size += len(data)
            if reached == offset or size > READ_BYTES_MAX:
                why = "no batch at its offset" if reached == offset else "too many bytes"
                self.state.unread[f"{log[0]}-{log[1]}"] = f"{why}, offset {offset}"
                return None
            offset = reached
        return count

    async def configs(self) -> None:
        """Configs that are set on the topics."""
        names = sorted(self.state.topics)
        if not names:
            return
        version = self._version(ApiKey.DESCRIBE_CONFIGS)
        resources = [
            {"resource_type": TOPIC_RESOURCE, "resource_name": name, "configuration_keys": None}
            for name in names
        ]
        async with self._node(None) as link:
            body = await self._ask(link, ApiKey.DESCRIBE_CONFIGS, version, {"resources": resources})
        for result in body["results"]:
            if result["error_code"] == 0:
                self.state.configs[result["resource_name"]] = {
                    each["name"]: each["value"] or ""
                    for each in result["configs"]
                    if each.get("config_source") == TOPIC_CONFIG
                }

    async def commits(self, group: str) -> None:
        """Committed offsets of a group."""
        version = self._version(ApiKey.OFFSET_FETCH, _ONE_GROUP)
        if version < _ALL_TOPICS:
            raise ConnectFailed("unreachable", "its OffsetFetch cannot list all topics")
        node = (await self._target.find_coordinators([(GROUP_KEY, group)])).get((GROUP_KEY, group))
        async with self._node(node) as link:
            body = await self._ask(
                link, ApiKey.OFFSET_FETCH, version, {"group_id": group, "topics": None}
            )
        if body.get("error_code"):
            self.state.unread[f"group {group}"] = error_name(body["error_code"])
        for topic in body["topics"]:
            for each in topic["partitions"]:
                if each["error_code"] == 0 and each["committed_offset"] >= 0:
                    key = group, topic["name"], each["partition_index"]
                    self.state.commits[key] = each["committed_offset"]

    async def transaction(self, name: str) -> None:
        """The state of a transactional id, after a transaction that is being ended has ended."""
        version = self._version(ApiKey.DESCRIBE_TRANSACTIONS)
        key = TRANSACTION_KEY, name
        node = (await self._target.find_coordinators([key])).get(key)
        async with self._node(node) as link:

            async def ask() -> None:
                body = await self._ask(
                    link, ApiKey.DESCRIBE_TRANSACTIONS, version, {"transactional_ids": [name]}
                )
                for each in body["transaction_states"]:
                    if each["error_code"] == 0:
                        self.state.transactions[name] = each["transaction_state"]

            await self._until(ask, lambda: self.state.transactions.get(name) not in _ENDING)


def _fetch(log: Log, offset: int) -> dict[str, Any]:
    partition = {
        "partition": log[1],
        "fetch_offset": offset,
        "partition_max_bytes": _FETCH_BYTES,
    }
    return {
        "max_wait_ms": 0,
        "min_bytes": 0,
        "max_bytes": _FETCH_BYTES,
        "topics": [{"topic": log[0], "partitions": [partition]}],
    }
