"""Finds log starts, log ends and epochs that a later answer of the run contradicts.

These numbers only grow while a topic exists, so an answer with a higher number than that of a later
request is different. Nothing counts that was answered after the topic's first deletion was sent.
Brokers lag each other: offsets are compared if the target has one broker, and leader epochs on
several brokers only a bounded time later. The epoch of finalized features is the last offset of the
metadata log that a broker has, so it is below the quorum's high watermark.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import FOREVER_NS, Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import api_name, decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
TargetLog = tuple[str, int]  # the target's name of a topic, partition
Body = dict[str, Any]

_LATEST, _EARLIEST, _READ_COMMITTED = -1, -2, 1
_START, _END, _STABLE, _EPOCH = "log start", "high watermark", "last stable offset", "leader epoch"
_METADATA_END, _METADATA_LOG = "end of the metadata log", "metadata log of a broker"
_PAST_EPOCH = "epoch of records"  # any that the log has had: it may be lower than earlier answers
_CURRENT_EPOCH = "current_leader.leader_epoch"  # KIP-951
_SLACK_NS = 5_000_000_000  # until every broker sees a write
_METADATA_APIS = frozenset({ApiKey.API_VERSIONS, ApiKey.DESCRIBE_QUORUM})


class _PartitionFields(NamedTuple):
    """The arrays of a response, the field with the partition's number, and its bounds by field.
    groups: the array that holds the topics, "" for the response itself."""

    topics: str
    partitions: str
    number: str
    bounds: dict[str, str]
    groups: str = ""


_PARTITION_FIELDS = {
    ApiKey.PRODUCE: _PartitionFields(
        "responses", "partition_responses", "index",
        {"log_start_offset": _START, _CURRENT_EPOCH: _EPOCH},
    ),
    ApiKey.FETCH: _PartitionFields(
        "responses", "partitions", "partition_index",
        {"log_start_offset": _START, "high_watermark": _END, "last_stable_offset": _STABLE,
         _CURRENT_EPOCH: _EPOCH},
    ),
    ApiKey.SHARE_FETCH: _PartitionFields(
        "responses", "partitions", "partition_index", {_CURRENT_EPOCH: _EPOCH}
    ),
    ApiKey.SHARE_ACKNOWLEDGE: _PartitionFields(
        "responses", "partitions", "partition_index", {_CURRENT_EPOCH: _EPOCH}
    ),
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS: _PartitionFields(
        "topics", "partitions", "partition_index", {"leader_epoch": _PAST_EPOCH}, "groups"
    ),
    ApiKey.LIST_OFFSETS: _PartitionFields("topics", "partitions", "partition_index", {}),
    ApiKey.METADATA: _PartitionFields(
        "topics", "partitions", "partition_index", {"leader_epoch": _EPOCH}
    ),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: _PartitionFields(
        "topics", "partitions", "partition_index", {"leader_epoch": _EPOCH}
    ),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: _PartitionFields(
        "topics", "partitions", "partition", {"leader_epoch": _PAST_EPOCH}
    ),
    ApiKey.DELETE_RECORDS: _PartitionFields(
        "topics", "partitions", "partition_index", {"low_watermark": _START}
    ),
}  # fmt: skip


class _Stated(NamedTuple):
    """A number in an answer."""

    sent_ns: int
    answered_ns: int
    api_key: int
    value: int
    outcome: Outcome
    path: str


class LogBounds:
    """Statements of a run about all logs."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._stated: dict[tuple[str, TargetLog], list[_Stated]] = defaultdict(list)
        self._deleted_ns: dict[str, int] = {}  # topic -> when its first deletion was requested
        self._has_one_node = ids.target.has_one_node
        self._is_connected = True  # all the time: the broker was not restarted

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        self._is_connected &= not outcome.error
        if outcome.sent is not None and api_key == ApiKey.DELETE_TOPICS:
            self._delete(outcome)
        if outcome.answer is None or outcome.sent is None:
            return
        if api_key in _PARTITION_FIELDS or api_key in _METADATA_APIS:
            answer = decoded(outcome.answer, "response", api_key, outcome.api_version)
            if answer is not None and api_key in _METADATA_APIS:
                self._add_metadata_ends(outcome, answer)
            elif answer is not None:
                self._add_statements(outcome, answer)

    def _delete(self, outcome: Outcome) -> None:
        request = decoded(outcome.sent, "request", ApiKey.DELETE_TOPICS, outcome.api_version)
        body = {} if request is None else request.body
        named = map(self._ids.target.topic_name, entries(body.get("topics")))
        first_ns = outcome.earlier[0].sent_ns if outcome.earlier else outcome.sent_ns
        for topic in (*entries(body.get("topic_names")), *named):
            self._deleted_ns.setdefault(topic, first_ns)

    def _add_metadata_ends(self, outcome: Outcome, answer: Message) -> None:
        """Add the metadata log's last offset at a broker, or the high watermark of its quorum."""
        key, path, end = _METADATA_END, "finalized_features_epoch", -1
        if answer.api_key == ApiKey.API_VERSIONS:
            end = answer.body.get(path, -1)
            key = _METADATA_LOG
        elif not answer.body["error_code"]:
            path = "topics[].partitions[].high_watermark"
            topics = entries(answer.body["topics"])
            logs = [each for topic in topics for each in entries(topic["partitions"])]
            end = max((each["high_watermark"] for each in logs), default=-1)
        if end >= 0:
            node = -1 if outcome.node_id is None else outcome.node_id  # -1: any broker
            if self._has_one_node:
                node = -1  # some requests of a run name it, some do not
            times = outcome.sent_ns, outcome.answered_ns
            stated = _Stated(*times, answer.api_key, end, outcome, path)
            self._stated[key, ("broker", node)].append(stated)

    def _add_statements(self, outcome: Outcome, answer: Message) -> None:
        place = _PARTITION_FIELDS[ApiKey(answer.api_key)]
        if not place.groups:
            self._add_topics(outcome, answer.body, "")
            return
        for at, group in enumerate(entries(answer.body[place.groups])):
            self._add_topics(outcome, group, f"{place.groups}[{at}].")

    def _add_topics(self, outcome: Outcome, body: Body, start: str) -> None:
        """Add the statements of a response, or of a group in it. start: of their paths."""
        api_key = ApiKey(outcome.step.exchange.api_key)
        place = _PARTITION_FIELDS[api_key]
        timestamps = _asked(outcome) if api_key == ApiKey.LIST_OFFSETS else {}
        for i, topic in enumerate(entries(body[place.topics])):
            name = self._ids.target.topic_name(topic)
            for j, partition in enumerate(entries(topic[place.partitions])):
                if partition["error_code"]:
                    continue
                number = partition[place.number]
                bounds = place.bounds or timestamps.get((name, number), {})
                for field, bound in bounds.items():
                    outer, _, inner = field.rpartition(".")
                    value = (partition.get(outer, {}) if outer else partition).get(inner, -1)
                    path = f"{start}{place.topics}[{i}].{place.partitions}[{j}].{field}"
                    if value >= 0:
                        self._stated[bound, (name, number)].append(
                            _Stated(
                                outcome.sent_ns, outcome.answered_ns, api_key, value, outcome, path
                            )
                        )

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        for (bound, (topic, number)), stated in self._stated.items():
            end_ns = self._deleted_ns.get(topic, FOREVER_NS)
            stated = [each for each in stated if each.answered_ns < end_ns]
            if not topic or "" in self._deleted_ns or not stated:
                continue
            are_epochs = bound in (_EPOCH, _PAST_EPOCH)
            is_own = bound == _METADATA_LOG and number >= 0
            if not (are_epochs or is_own or self._has_one_node):
                continue
            slack_ns = 0 if self._has_one_node or is_own else _SLACK_NS
            evidence = list(stated)
            if bound == _STABLE:  # never above the high watermark
                evidence += self._stated.get((_END, (topic, number)), [])
            if bound == _PAST_EPOCH:
                evidence = self._stated.get((_EPOCH, (topic, number)), [])
            evidence = [each for each in evidence if each.answered_ns < end_ns]
            if are_epochs:
                self._check_epochs((topic, number), stated, add)
            for each, later in _contradicted(stated, evidence, slack_ns):
                _blame(each, later, add)
        self._check_quorum(add)

    def _check_quorum(self, add: Add) -> None:
        """The high watermark of the metadata log is not below the last offset at a broker."""
        stated = [(key[0], each) for key, all_of in self._stated.items() for each in all_of]
        owns = [each for bound, each in stated if bound == _METADATA_LOG]
        for end in (each for bound, each in stated if bound == _METADATA_END):
            known = max((own.value for own in owns if own.answered_ns < end.sent_ns), default=-1)
            if end.value < known:
                note = "a broker had this offset before"
                add(end.outcome, end.path, f"at least {known}", end.value, note)

    def _check_epochs(self, log: TargetLog, stated: list[_Stated], add: Add) -> None:
        """The only broker leads every partition, in the same epoch until it is restarted."""
        epoch = self._ids.target.leaders.get(log, (-1, -1))[1]
        if epoch < 0 or not (self._has_one_node and self._is_connected):
            return
        for each in stated:
            if each.value > epoch:
                note = "the broker has not been elected again"
                add(each.outcome, each.path, f"at most {epoch}", each.value, note)


def _asked(outcome: Outcome) -> dict[TargetLog, dict[str, str]]:
    """The bounds that a ListOffsets request asks for, by log. An isolation level decides whether
    the latest offset is the high watermark."""
    request = decoded(outcome.sent or b"", "request", ApiKey.LIST_OFFSETS, outcome.api_version)
    body = {"topics": ()} if request is None else request.body
    is_committed = body.get("isolation_level", 0) == _READ_COMMITTED
    bounds = {
        _LATEST: {"offset": _STABLE if is_committed else _END, "leader_epoch": _EPOCH},
        _EARLIEST: {"offset": _START, "leader_epoch": _PAST_EPOCH},
    }
    other = {"leader_epoch": _PAST_EPOCH}
    return {
        (topic["name"], partition["partition_index"]): bounds.get(partition["timestamp"], other)
        for topic in entries(body["topics"])
        for partition in entries(topic["partitions"])
    }


def _blame(claim: _Stated, later: _Stated, add: Add) -> None:
    """Report the answer that is more likely to be wrong: DeleteRecords sets its number itself."""
    if claim.api_key == ApiKey.DELETE_RECORDS:
        note = "DeleteRecords has answered this log start"
        add(later.outcome, later.path, f"at least {claim.value}", later.value, note)
    else:
        note = f"a later answer to {api_name(later.api_key)} is lower"
        add(claim.outcome, claim.path, f"at most {later.value}", claim.value, note)


def _contradicted(
    claims: list[_Stated], evidence: list[_Stated], slack_ns: int
) -> Iterator[tuple[_Stated, _Stated]]:
    """Claims that are higher than a later statement, and that one. If several claims contradict
    one statement, that one is more likely to be wrong: it has to be contradicted no more often."""
    evidence = sorted(evidence, key=lambda each: each.sent_ns)
    times = [each.sent_ns for each in evidence]
    least = list(accumulate((each.value for each in reversed(evidence)), min))[::-1]
    for claim in claims:
        place = bisect_left(times, claim.answered_ns + slack_ns)
        if place == len(evidence) or least[place] >= claim.value:
            continue
        lower = [later for later in evidence[place:] if later.value < claim.value]
        for later in (lower[0], lower[-1]):
            higher = sum(
                other.value > later.value and other.answered_ns + slack_ns <= later.sent_ns
                for other in evidence
            )
            if higher <= len(lower):
                yield claim, later
                break
