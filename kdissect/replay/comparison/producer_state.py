"""Finds answers of DescribeProducers that contradict the batches and markers of the run.

A partition's leader describes each producer by its last batch or marker there (KIP-664): its time,
the coordinator's epoch in the marker, and the start of an open transaction. The run knows the
batches that it sent, and the markers that Fetch responses brought.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import BATCH_HEADER_SIZE, BatchHeader, headers, max_timestamp
from kdissect.replay.comparison.end_state import MAYBE_APPENDED
from kdissect.replay.comparison.records import coordinator_epoch
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_Key = tuple[str, int, int]  # the target's name of a topic, partition, producer id

_LOG_APPEND_TIME = 8  # a bit of the attributes
_ATTRIBUTES_AT = 22
_APIS = frozenset({ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.DESCRIBE_PRODUCERS})


@dataclass(slots=True)
class _ActiveProducer:
    """A producer in a log. starts: offsets of its batches. times: of its batches and markers.
    epochs: of coordinators, by its markers. has_unknown: batches of other offsets or times."""

    starts: set[int] = field(default_factory=set)
    times: set[int] = field(default_factory=set)
    epochs: set[int] = field(default_factory=set)
    has_unknown: bool = False

    def add(self, header: BatchHeader, batch: bytes, base_offset: int) -> None:
        self.times.add(max_timestamp(batch))
        if header.is_control:
            self.epochs.add(coordinator_epoch(batch))
        else:
            self.starts.add(base_offset)


class ProducerState:
    """Facts of a run about all producers, if it has a DescribeProducers request."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._producers: dict[_Key, _ActiveProducer] = defaultdict(_ActiveProducer)
        self._described: list[tuple[Outcome, Body]] = []
        self._outcomes: list[Outcome] = []
        self._is_described = False

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if outcome.sent is not None and api_key in _APIS:
            self._outcomes.append(outcome)
            self._is_described |= api_key == ApiKey.DESCRIBE_PRODUCERS

    def _add_facts(self, outcome: Outcome) -> None:
        api_key, answer = outcome.step.exchange.api_key, None
        if outcome.answer is not None:
            answer = decoded(outcome.answer, "response", api_key, outcome.api_version)
        if api_key == ApiKey.PRODUCE:
            request = decoded(outcome.sent or b"", "request", api_key, outcome.api_version)
            if request is not None:
                self._produce(request, answer)
        elif api_key == ApiKey.FETCH and answer is not None:
            for topic in entries(answer.body["responses"]):
                name = self._ids.target.topic_name(topic)
                for partition in entries(topic["partitions"]):
                    self._add(name, partition["partition_index"], partition["records"] or b"")
        elif answer is not None:
            self._described.append((outcome, answer.body))

    def _produce(self, request: Message, answer: Message | None) -> None:
        results = {
            (self._ids.target.topic_name(topic), partition["index"]): partition
            for topic in entries(None if answer is None else answer.body["responses"])
            for partition in entries(topic["partition_responses"])
        }
        for topic in entries(request.body["topic_data"]):
            name = self._ids.target.topic_name(topic)
            for partition in entries(topic["partition_data"]):
                number, data = partition["index"], partition["records"] or b""
                result = results.get((name, number), {"error_code": -1, "base_offset": -1})
                is_timed = result.get("log_append_time_ms", -1) >= 0  # the broker sets times
                if result["error_code"] <= 0 or result["error_code"] in MAYBE_APPENDED:
                    self._add(name, number, data, -1 if is_timed else result["base_offset"])

    def _add(self, topic: str, number: int, data: bytes, base: int | None = None) -> None:
        """Add the batches of a log. base: the offset of the first one, if not its own."""
        for batch in headers(data):
            if batch.magic != 2 or batch.is_partial or batch.producer_id < 0:
                continue
            producer = self._producers[topic, number, batch.producer_id]
            content = data[batch.pos : batch.pos + batch.size]
            if len(content) < BATCH_HEADER_SIZE or content[_ATTRIBUTES_AT] & _LOG_APPEND_TIME:
                producer.has_unknown = True
            elif base is None or base >= 0:
                producer.add(batch, content, batch.base_offset if base is None else base)
            else:
                producer.has_unknown = True

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        for outcome in self._outcomes if self._is_described else ():
            self._add_facts(outcome)
        for outcome, answer in self._described:
            for i, topic in enumerate(entries(answer["topics"])):
                for j, partition in enumerate(entries(topic["partitions"])):
                    for k, each in enumerate(entries(partition["active_producers"])):
                        key = topic["name"], partition["partition_index"], each["producer_id"]
                        path = f"topics[{i}].partitions[{j}].active_producers[{k}]."
                        if key in self._producers:
                            _check(outcome, path, each, self._producers[key], add)


def _check(
    outcome: Outcome, path: str, described: Body, producer: _ActiveProducer, add: Add
) -> None:
    start, epoch = described["current_txn_start_offset"], described["coordinator_epoch"]
    if producer.has_unknown:
        return
    if start >= 0 and start not in producer.starts:
        note = "no batch of this producer begins there"
        wanted = "-1 or the first offset of a batch"
        add(outcome, f"{path}current_txn_start_offset", wanted, start, note)
    if producer.epochs and epoch not in producer.epochs | {-1}:
        note = "its markers have another one"
        wanted = " or ".join(map(str, sorted(producer.epochs)))
        add(outcome, f"{path}coordinator_epoch", wanted, epoch, note)
    time = described["last_timestamp"]
    # The time of a marker that no answer brought is a later one.
    may_be_marker = start < 0 <= epoch and time > max(producer.times)
    if time not in producer.times and not may_be_marker:
        note = "no batch or marker of this producer has it"
        add(outcome, f"{path}last_timestamp", "the time of a batch", time, note)
