"""The state that a capture began with, as far as its answers show it.

A replay brings only what the capture's requests wrote. If answers depend on earlier topics, records
or committed offsets, a target without them answers differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import headers
from kdissect.replay.model import Exchange, StartingState, Workload
from kdissect.replay.workload.messages import (
    NOT_MADE_YET,
    TopicNames,
    entries,
    request_of,
    response_of,
)

Log = tuple[str, int]
Body = Mapping[str, Any]


def starting_state(workload: Workload) -> StartingState:
    """The state before the workload's first request."""
    return _Collector(workload).collect()


@dataclass(slots=True)
class _CapturedLog:
    """Batches that answers bring and requests write, as offset ranges. is_open: a request wrote
    records without an offset in its answer, so later batches may be these."""

    fetched: list[tuple[int, int]] = field(default_factory=list)
    produced: list[tuple[int, int]] = field(default_factory=list)
    is_open: bool = False


class _Collector:
    """Collects the starting state from the exchanges of a workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._names = TopicNames(workload.facts)
        self._logs: dict[Log, _CapturedLog] = {}
        self._made: set[str] = set()  # topics that were not there at first
        self._committed: set[tuple[str, str, int]] = set()  # by requests of the capture
        self._state = StartingState()

    def collect(self) -> StartingState:
        """Read all exchanges in the order of their requests."""
        readers = {
            ApiKey.METADATA: self._metadata,
            ApiKey.PRODUCE: self._produce,
            ApiKey.FETCH: self._fetch,
            ApiKey.OFFSET_COMMIT: self._commit,
            ApiKey.TXN_OFFSET_COMMIT: self._commit,
            ApiKey.OFFSET_FETCH: self._offset_fetch,
        }
        exchanges = [each for each in self._workload.exchanges() if not each.internal_reason]
        for exchange in sorted(exchanges, key=lambda each: each.request_time_ns):
            if exchange.api_key in readers:
                request, response = request_of(exchange), response_of(exchange)
                if request is not None:
                    body = {} if response is None else response.body
                    readers[ApiKey(exchange.api_key)](exchange, request.body, body)
        internal = {each.name for each in self._workload.facts.topics.values() if each.is_internal}
        for name, topic in sorted(self._workload.facts.topics.items()):
            is_there = topic.first_time_ns >= 0 and not topic.is_created
            if is_there and name not in self._made | internal:
                self._state.topics[name] = topic.partition_count
        for log, entry in sorted(self._logs.items()):
            earlier = sorted(_uncovered(entry))
            if earlier and log[0] not in internal:
                self._state.logs[log] = earlier[0][0], max(end for _, end in earlier)
        return self._state

    def _metadata(self, exchange: Exchange, request: Body, response: Body) -> None:
        for topic in entries(response.get("topics")):
            if topic["error_code"] in NOT_MADE_YET and topic.get("name"):
                self._made.add(topic["name"])

    def _produce(self, exchange: Exchange, request: Body, response: Body) -> None:
        results = dict(self._names.logs(response))
        for name, partition in self._names.logs(request):
            log, result = self._logs.setdefault(name, _CapturedLog()), results.get(name)
            if result is None or (result["error_code"] == 0 and result["base_offset"] < 0):
                log.is_open = True
            elif result["error_code"] == 0:
                batches = headers(partition["records"] or b"")
                count = sum(max(each.record_count, 0) for each in batches)
                log.produced.append((result["base_offset"], result["base_offset"] + count))

    def _fetch(self, exchange: Exchange, request: Body, response: Body) -> None:
        for name, partition in self._names.logs(response):
            log = self._logs.setdefault(name, _CapturedLog())
            if log.is_open:
                continue
            log.fetched += [
                (each.base_offset, each.last_offset + 1)
                for each in headers(partition["records"] or b"")
                if not each.is_control and not each.is_partial
            ]

    def _commit(self, exchange: Exchange, request: Body, response: Body) -> None:
        logs = self._names.logs(request)
        self._committed.update((request["group_id"], *log) for log, _ in logs)

    def _offset_fetch(self, exchange: Exchange, request: Body, response: Body) -> None:
        groups = response.get("groups") or [{"group_id": request.get("group_id"), **response}]
        for group in groups:
            for log, each in self._names.logs(group):
                commit, offset = (group["group_id"], *log), each["committed_offset"]
                if offset >= 0 and each["error_code"] == 0 and commit not in self._committed:
                    self._state.commits.setdefault(commit, offset)


def _uncovered(log: _CapturedLog) -> Iterator[tuple[int, int]]:
    """Fetched ranges that no captured request produced, before or while they were fetched."""
    for start, end in log.fetched:
        if not any(first <= start < last for first, last in log.produced):
            yield start, end
