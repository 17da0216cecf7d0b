"""Finds answers of DescribeProducers that contradict the batches and markers of the run.

A partition's leader describes each producer once, by its last batch or marker there (KIP-664): its
time, the producer's epoch, the last sequence number, the coordinator's epoch in the marker, and the
start of an open transaction. The run knows the batches that it sent, and the markers that Fetch
responses brought. A log that the run began has no other producers than those of its requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import (
    BATCH_HEADER_SIZE,
    BatchHeader,
    has_append_time,
    headers,
    max_timestamp,
)
from kdissect.replay.comparison.end_state import MAYBE_APPENDED
from kdissect.replay.comparison.records import coordinator_epoch
from kdissect.replay.model import FOREVER_NS, Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_Log = tuple[str, int]
_Key = tuple[str, int, int]  # the target's name of a topic, partition, producer id

_SEQUENCES = 1 << 31  # they wrap to 0
_NAMING = frozenset(
    {
        ApiKey.INIT_PRODUCER_ID, ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN,
        ApiKey.TXN_OFFSET_COMMIT, ApiKey.END_TXN,
    }
)  # fmt: skip
_APIS = _NAMING | {ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.DESCRIBE_PRODUCERS}


@dataclass(slots=True)
class _BatchEnd:
    """offset: where a batch begins. done_ns: from when on the log is sure to have it."""

    offset: int
    done_ns: int
    epoch: int
    sequence: int


@dataclass(slots=True)
class _ActiveProducer:
    """A producer in a log. starts: offsets of its batches. times: of its batches and markers.
    ends: last sequence numbers of its batches. marked: producer epochs of its
    markers. epochs: of coordinators, by its markers. has_unknown: batches of other offsets or
    times."""

    starts: set[int] = field(default_factory=set)
    times: set[int] = field(default_factory=set)
    ends: list[_BatchEnd] = field(default_factory=list)
    marked: set[int] = field(default_factory=set)
    epochs: set[int] = field(default_factory=set)
    has_unknown: bool = False

    def add(self, header: BatchHeader, batch: bytes, base_offset: int, done_ns: int) -> None:
        self.times.add(max_timestamp(batch))
        if header.is_control:
            self.epochs.add(coordinator_epoch(batch))
            self.marked.add(header.producer_epoch)
        else:
            self.starts.add(base_offset)
            span = header.last_offset - header.base_offset
            sequence = (header.base_sequence + span) % _SEQUENCES
            self.ends.append(_BatchEnd(base_offset, done_ns, header.producer_epoch, sequence))

    def ends_after(self, at_ns: int) -> set[tuple[int, int]]:
        """(producer epoch, sequence number) of the batches that may be the last one after a moment:
        none before a batch that the log had then."""
        least = max((each.offset for each in self.ends if each.done_ns <= at_ns), default=-1)
        return {(each.epoch, each.sequence) for each in self.ends if each.offset >= least}


class ProducerState:
    """Facts of a run about all producers, if it has a DescribeProducers request."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._producers: dict[_Key, _ActiveProducer] = defaultdict(_ActiveProducer)
        self._described: list[tuple[Outcome, Body]] = []
        self._outcomes: list[Outcome] = []
        self._is_described = False
        self._has_one_node = ids.target.has_one_node
        self._deleted_ns = FOREVER_NS  # when the first deletion of a topic was requested
        self._named: set[int] = set()  # producer ids in requests and answers
        self._begun: set[tuple[str, int]] = set()  # logs whose first record is of the run

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if outcome.sent is not None and api_key == ApiKey.DELETE_TOPICS:
            first_ns = outcome.earlier[0].sent_ns if outcome.earlier else outcome.sent_ns
            self._deleted_ns = min(self._deleted_ns, first_ns)
        elif outcome.sent is not None and api_key in _APIS:
            self._outcomes.append(outcome)
            self._is_described |= api_key == ApiKey.DESCRIBE_PRODUCERS

    def _add_facts(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        request = decoded(outcome.sent or b"", "request", api_key, outcome.api_version)
        answer = decoded(outcome.answer or b"", "response", api_key, outcome.api_version)
        if api_key in _NAMING:
            for message in (request, answer):
                self._name({} if message is None else message.body)
        elif api_key == ApiKey.PRODUCE:
            if request is not None:
                self._produce(outcome, request, answer)
        elif api_key == ApiKey.FETCH and answer is not None:
            for topic in entries(answer.body["responses"]):
                name = self._ids.target.topic_name(topic)
                for partition in entries(topic["partitions"]):
                    log = name, partition["partition_index"]
                    self._add(log, partition["records"] or b"", outcome.answered_ns)
        elif answer is not None:
            self._described.append((outcome, answer.body))

    def _name(self, body: Body) -> None:
        for each in [body, *entries(body.get("transactions"))]:
            self._named.add(each.get("producer_id", each.get("v3_and_below_producer_id", -1)))

    def _produce(self, outcome: Outcome, request: Message, answer: Message | None) -> None:
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
                self._named.update(each.producer_id for each in headers(data))
                if result["base_offset"] == 0 and not result["error_code"]:
                    self._begun.add((name, number))
                if result["error_code"] <= 0 or result["error_code"] in MAYBE_APPENDED:
                    base = -1 if is_timed else result["base_offset"]
                    self._add((name, number), data, outcome.answered_ns, base)

    def _add(self, log: _Log, data: bytes, done_ns: int, base: int | None = None) -> None:
        """Add the batches that a log has from a moment on. base: the offset of the first one, if
        not its own."""
        for batch in headers(data):
            if batch.magic != 2 or batch.is_partial or batch.producer_id < 0:
                continue
            producer = self._producers[*log, batch.producer_id]
            content = data[batch.pos : batch.pos + batch.size]
            if len(content) < BATCH_HEADER_SIZE or has_append_time(content):
                producer.has_unknown = True
            elif base is None or base >= 0:
                offset = batch.base_offset if base is None else base
                producer.add(batch, content, offset, done_ns)
            else:
                producer.has_unknown = True

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        for outcome in self._outcomes if self._is_described else ():
            self._add_facts(outcome)
        for outcome, answer in self._described:
            for i, topic in enumerate(entries(answer["topics"])):
                for j, partition in enumerate(entries(topic["partitions"])):
                    log = topic["name"], partition["partition_index"]
                    path = f"topics[{i}].partitions[{j}].active_producers"
                    self._check(outcome, path, log, entries(partition["active_producers"]), add)

    def _check(
        self, outcome: Outcome, path: str, log: tuple[str, int], described: list[Body], add: Add
    ) -> None:
        """Check the producers of a log."""
        listed: set[int] = set()
        for at, producer in enumerate(described):
            number, here = producer["producer_id"], f"{path}[{at}]."
            if number in listed:
                add(outcome, f"{here}producer_id", "each once", number, "it is listed twice")
            elif log in self._begun and number not in self._named:
                note = "no request of the run has it"
                add(outcome, f"{here}producer_id", "a producer of the run", number, note)
            listed.add(number)
            known = self._producers.get((*log, number))
            if known is not None and not known.has_unknown:
                _check(outcome, here, producer, known, add)
                if self._has_one_node and outcome.answered_ns < self._deleted_ns:
                    _check_last(outcome, here, producer, known, add)


def _check(
    outcome: Outcome, path: str, described: Body, producer: _ActiveProducer, add: Add
) -> None:
    start, epoch = described["current_txn_start_offset"], described["coordinator_epoch"]
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
    if not may_be_marker:
        _check_sequence(outcome, path, described, producer, add)


def _check_sequence(
    outcome: Outcome, path: str, described: Body, producer: _ActiveProducer, add: Add
) -> None:
    """The last sequence number is of a batch in the same epoch. A marker of a new epoch, which no
    batch has yet, leaves none (KIP-890)."""
    epoch, sequence = described["producer_epoch"], described["last_sequence"]
    ends = producer.ends_after(-1)
    if epoch not in {each for each, _ in ends} | producer.marked:
        note = "no batch or marker of this producer has it"
        add(outcome, f"{path}producer_epoch", "the epoch of a batch", epoch, note)
    elif (epoch, sequence) not in ends and not (sequence == -1 and epoch in producer.marked):
        note = "no batch of this producer ends there"
        add(outcome, f"{path}last_sequence", "the last one of a batch", sequence, note)


def _check_last(
    outcome: Outcome, path: str, described: Body, producer: _ActiveProducer, add: Add
) -> None:
    """The only broker describes no batch before one that it had acknowledged, or shown, before the
    request. A topic that was deleted begins anew, so only the time before any deletion counts."""
    last = described["producer_epoch"], described["last_sequence"]
    ends = producer.ends_after(outcome.sent_ns)
    if last in producer.ends_after(-1) - ends:
        note = "the producer had a later batch"
        wanted = " or ".join(str(sequence) for _, sequence in sorted(ends))
        add(outcome, f"{path}last_sequence", wanted, last[1], note)
