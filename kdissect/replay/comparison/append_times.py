"""Finds lookups by time that miss a record whose time the broker has set (LogAppendTime).

A Produce response has the time at which the broker appended the batch. A later ListOffsets for that
time, or an earlier one, finds this batch or one before it. This is true of a target with one broker
and of topics from which nothing is deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
_TargetLog = tuple[str, int]
_APIS = frozenset(
    {ApiKey.PRODUCE, ApiKey.LIST_OFFSETS, ApiKey.DELETE_RECORDS, ApiKey.DELETE_TOPICS}
)
_POLICY, _RETENTION = "cleanup.policy", "retention."


class _AppendedBatch(NamedTuple):
    offset: int
    time: int
    answered_ns: int


class _Lookup(NamedTuple):
    """due: the requested time. offset: the answered one, -1 for none."""

    outcome: Outcome
    path: str
    due: int
    offset: int


class AppendTimes:
    """Times of batches that a run appended, and its lookups, by log."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._batches: dict[_TargetLog, list[_AppendedBatch]] = defaultdict(list)
        self._lookups: dict[_TargetLog, list[_Lookup]] = defaultdict(list)
        self._is_usable = ids.target.has_one_node  # and nothing is deleted

    def collect(self, outcome: Outcome) -> None:
        api_key, version = outcome.step.exchange.api_key, outcome.api_version
        if api_key not in _APIS or outcome.sent is None:
            return
        if api_key in (ApiKey.DELETE_RECORDS, ApiKey.DELETE_TOPICS):
            self._is_usable = False
            return
        request = decoded(outcome.sent, "request", api_key, version)
        answer = decoded(outcome.answer or b"", "response", api_key, version)
        if request is not None and answer is not None:
            read = self._produce if api_key == ApiKey.PRODUCE else self._list_offsets
            read(outcome, request, answer)

    def _produce(self, outcome: Outcome, request: Message, answer: Message) -> None:
        for topic in entries(answer.body["responses"]):
            for partition in entries(topic["partition_responses"]):
                time, offset = partition.get("log_append_time_ms", -1), partition["base_offset"]
                if time < 0 or offset < 0 or partition["error_code"]:
                    continue
                log = self._ids.target.topic_name(topic), partition["index"]
                self._batches[log].append(_AppendedBatch(offset, time, outcome.answered_ns))
                self._is_usable &= partition.get("log_start_offset", 0) <= 0

    def _list_offsets(self, outcome: Outcome, request: Message, answer: Message) -> None:
        if request.body.get("isolation_level", 0):
            return  # what open transactions hide is not found
        wanted = {
            (topic["name"], partition["partition_index"]): partition["timestamp"]
            for topic in entries(request.body["topics"])
            for partition in entries(topic["partitions"])
        }
        for i, topic in enumerate(entries(answer.body["topics"])):
            for j, partition in enumerate(entries(topic["partitions"])):
                log = topic["name"], partition["partition_index"]
                due, offset = wanted.get(log, -1), partition.get("offset")
                if due >= 0 and offset is not None and not partition["error_code"]:
                    path = f"topics[{i}].partitions[{j}].offset"
                    self._lookups[log].append(_Lookup(outcome, path, due, offset))

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        for log, lookups in self._lookups.items() if self._is_usable else ():
            name = self._ids.captured_topic_name(log[0])
            topic = self._ids.plan.workload.facts.topics.get(name)
            if topic is None or "compact" in topic.configs.get(_POLICY, ""):
                continue
            if any(each.startswith(_RETENTION) for each in topic.configs):
                continue
            for lookup in lookups:
                due = [
                    batch.offset
                    for batch in self._batches[log]
                    if batch.time >= lookup.due and batch.answered_ns < lookup.outcome.sent_ns
                ]
                if due and (lookup.offset < 0 or lookup.offset > min(due)):
                    note = "a batch of the run with that time, or a later one"
                    add(lookup.outcome, lookup.path, f"at most {min(due)}", lookup.offset, note)
