"""Finds answers that contradict what the target itself has acknowledged or delivered of its logs.

A captured response says what another broker answered at another moment. This module compares the
target's answers with each other, those included that were followed by another try:

- A delivered batch has a right checksum. Batches of an answer ascend, and leave out no offset
  unless the topic is compacted.
- A batch that was produced in this run comes back with the same records, and so does one that an
  earlier answer has delivered.
- Produce responses give each offset once.
- Log ends and starts never fall, and no end is beyond what was acknowledged. Delivered records are
  before the log end.
- A read_committed answer lists each aborted transaction that it has records of (KIP-98).

An offset that a node has answered holds for later answers of that node at once, and for other nodes
after LAG_NS. Nothing is said about the offsets of a topic that the run deletes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import BATCH_HEADER_SIZE, BatchHeader, headers, is_sealed
from kdissect.replay.comparison.records import (
    PLACE,
    RecordCount,
    have_same_content,
    marker_type,
    merged_ranges,
    whole_batches,
)
from kdissect.replay.model import Difference, Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.offsets import Log
from kdissect.replay.translation.sessions import FINAL_EPOCH, INITIAL_EPOCH
from kdissect.replay.workload.messages import decoded, entries, response_of

LAG_NS = 5_000_000_000  # until every broker shows a change
_UNANSWERED_NS = 5_000_000_000  # a request without an answer may take effect that late
_LATEST, _EARLIEST, _READ_COMMITTED, _ACKS_ALL = -1, -2, 1, -1
_MANY = 1 << 40  # messages before magic 2 do not say how many they wrap
_FETCHED, _ABORT, _POLICY = "responses[].partitions[].", "ABORT", "cleanup.policy"

Body = dict[str, Any]
Contradiction = tuple[int, Difference]  # the step whose answer is wrong


class _Reading(NamedTuple):
    """An offset that an answer shows; the log reaches it, or it is exactly that. place: "" where
    the offset follows from records."""

    offset: int
    outcome: Outcome
    place: str


@dataclass(slots=True)
class _Fetched:
    """A partition in the answer to a Fetch or ShareFetch. fetch_offset: -1 unknown."""

    outcome: Outcome
    body: Body
    data: bytes
    batches: list[BatchHeader]
    fetch_offset: int
    is_committed: bool

    @property
    def end(self) -> int:
        """The offset after the last delivered record; -1 if there is none."""
        return self.batches[-1].last_offset + 1 if self.batches else -1

    def bytes_of(self, batch: BatchHeader) -> bytes:
        return self.data[batch.pos : batch.pos + batch.size]


@dataclass(slots=True)
class _LogFacts:
    """What the run shows of one log. acknowledged: base offset -> the batch, b"" for several.
    appends: (sent_ns, answered_ns, record count). unknown: records that may be there besides.
    batches: base offset -> a delivered batch."""

    acknowledged: dict[int, bytes] = field(default_factory=dict)
    claims: list[tuple[int, int, Outcome]] = field(default_factory=list)  # first, last offset
    appends: list[tuple[int, int, int]] = field(default_factory=list)
    unknown: int = 0
    is_transactional: bool = False
    fetched: list[_Fetched] = field(default_factory=list)
    batches: dict[int, tuple[BatchHeader, bytes]] = field(default_factory=dict)
    ends: list[_Reading] = field(default_factory=list)
    stable_ends: list[_Reading] = field(default_factory=list)
    starts: list[_Reading] = field(default_factory=list)


class LogEvidence:
    """The evidence of a run. Give it each outcome, in the order of sending; then ask once for the
    contradictions."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._logs: dict[Log, _LogFacts] = defaultdict(_LogFacts)
        self._sessions: dict[tuple[int | None, int], dict[Log, Body]] = {}
        self._deleted: set[str] = set()
        self._marker_count = 0
        self._sparse: set[str] | None = None
        self._readers: dict[int, Callable[[Outcome, Body, Body | None], None]] = {
            ApiKey.PRODUCE: self._produce,
            ApiKey.FETCH: self._fetch,
            ApiKey.SHARE_FETCH: self._share_fetch,
            ApiKey.LIST_OFFSETS: self._list_offsets,
            ApiKey.DELETE_RECORDS: self._delete_records,
            ApiKey.DELETE_TOPICS: self._delete_topics,
            ApiKey.END_TXN: self._end_txn,
            ApiKey.INIT_PRODUCER_ID: self._end_txn,
        }

    # -- facts ----------------------------------------------------------------------------------

    def add(self, outcome: Outcome) -> None:
        """Add the facts of a request and of all answers to it."""
        api_key = outcome.step.exchange.api_key
        reader = self._readers.get(api_key)
        if reader is None or outcome.sent is None:
            return
        for each in outcome.tries():
            request = decoded(each.sent or b"", "request", api_key, each.api_version)
            answer = decoded(each.answer or b"", "response", api_key, each.api_version)
            if request is not None:
                reader(each, request.body, None if answer is None else answer.body)

    def _topic(self, topic: Body) -> str:
        """The capture's name of a topic in a message of the target."""
        name = self._ids.target.topic_name(topic)
        return self._ids.captured_topic_name(name) or str(topic.get("topic_id", ""))

    def _partitions(
        self, body: Body | None, topics: str, partitions: str
    ) -> Iterator[tuple[Log, Body]]:
        for topic in entries(None if body is None else body.get(topics)):
            name = self._topic(topic)
            for each in entries(topic[partitions]):
                number = each.get("index", each.get("partition_index", each.get("partition", -1)))
                yield (name, number), each

    def _produce(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        answered = dict(self._partitions(answer, "responses", "partition_responses"))
        for log, entry in self._partitions(request, "topic_data", "partition_data"):
            facts, data = self._logs[log], entry["records"] or b""
            batches = list(headers(data))
            count = sum(max(each.record_count, 0) for each in batches)
            facts.is_transactional |= any(each.is_transactional for each in batches)
            is_old = any(each.magic != 2 for each in batches)
            result = answered.get(log)
            end_ns = outcome.answered_ns if outcome.answered_ns >= 0 else (
                outcome.sent_ns + _UNANSWERED_NS
            )  # fmt: skip
            facts.appends.append((outcome.sent_ns, end_ns, _MANY if is_old else count))
            if result is None or result["error_code"] or result["base_offset"] < 0 or is_old:
                facts.unknown += _MANY if is_old else count
                continue
            base = result["base_offset"]
            facts.acknowledged[base] = data if len(batches) == 1 else b""
            facts.claims.append((base, base + count - 1, outcome))
            if request["acks"] == _ACKS_ALL:
                facts.ends.append(_Reading(base + count, outcome, ""))
            if result.get("log_start_offset", -1) >= 0:
                place = "responses[].partition_responses[].log_start_offset"
                facts.starts.append(_Reading(result["log_start_offset"], outcome, place))

    def _fetch(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        named = dict(self._partitions(request, "topics", "partitions"))
        session_id, epoch = request.get("session_id", 0), request.get("session_epoch", FINAL_EPOCH)
        if epoch not in (FINAL_EPOCH, INITIAL_EPOCH):  # the session has the others (KIP-227)
            named = self._sessions.setdefault((outcome.node_id, session_id), {}) | named
            self._sessions[outcome.node_id, session_id] = named
        if answer is None or answer.get("error_code", 0):
            return
        if epoch == INITIAL_EPOCH and answer.get("session_id", 0):
            self._sessions[outcome.node_id, answer["session_id"]] = named
        is_committed = request.get("isolation_level", 0) == _READ_COMMITTED
        for log, partition in self._partitions(answer, "responses", "partitions"):
            if partition["error_code"]:
                continue
            offset = named.get(log, {}).get("fetch_offset", -1)
            facts = self._add_fetched(outcome, log, partition, offset, is_committed)
            for readings, name in (
                (facts.ends, "high_watermark"), (facts.stable_ends, "last_stable_offset"),
                (facts.starts, "log_start_offset"),
            ):  # fmt: skip
                if partition.get(name, -1) >= 0:
                    readings.append(_Reading(partition[name], outcome, _FETCHED + name))

    def _share_fetch(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        for log, partition in self._partitions(answer, "responses", "partitions"):
            self._add_fetched(outcome, log, partition, -1, False)

    def _add_fetched(
        self, outcome: Outcome, log: Log, partition: Body, offset: int, is_committed: bool
    ) -> _LogFacts:
        facts, data = self._logs[log], partition["records"] or b""
        fetched = _Fetched(outcome, partition, data, whole_batches(data), offset, is_committed)
        facts.fetched.append(fetched)
        for batch in fetched.batches:
            facts.batches.setdefault(batch.base_offset, (batch, fetched.bytes_of(batch)))
        if fetched.batches:
            facts.ends.append(_Reading(fetched.end, outcome, ""))
        return facts

    def _list_offsets(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        asked = dict(self._partitions(request, "topics", "partitions"))
        is_committed = request.get("isolation_level", 0) == _READ_COMMITTED
        for log, partition in self._partitions(answer, "topics", "partitions"):
            offset, facts = partition.get("offset", -1), self._logs[log]
            if partition["error_code"] or offset < 0:
                continue
            reading = _Reading(offset, outcome, "topics[].partitions[].offset")
            timestamp = asked.get(log, {}).get("timestamp")
            if timestamp == _LATEST:
                (facts.stable_ends if is_committed else facts.ends).append(reading)
            elif timestamp == _EARLIEST:
                facts.starts.append(reading)

    def _delete_records(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        for log, partition in self._partitions(answer, "topics", "partitions"):
            if not partition["error_code"]:
                place = "topics[].partitions[].low_watermark"
                reading = _Reading(partition["low_watermark"], outcome, place)
                self._logs[log].starts.append(reading)

    def _delete_topics(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        names = [*entries(request.get("topic_names")),
                 *map(self._ids.target.topic_name, entries(request.get("topics")))]  # fmt: skip
        self._deleted.update(map(self._ids.captured_topic_name, names))

    def _end_txn(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        self._marker_count += 1

    # -- contradictions -------------------------------------------------------------------------

    def contradictions(self) -> Iterator[Contradiction]:
        for log, facts in self._logs.items():
            is_lasting = bool(log[0]) and log[0] not in self._deleted
            is_dense = is_lasting and self._is_dense(log[0])
            for fetched in facts.fetched:
                yield from _check_batches(log, facts, fetched, is_dense)
            if is_lasting:
                yield from _check_claims(log, facts)
                yield from self._check_ends(log, facts)
                yield from _check_falling(log, facts.starts)
                yield from _check_aborted(log, facts)

    def _is_dense(self, topic: str) -> bool:
        """Return whether a log leaves no offset out. Compacted ones may; the capture shows
        which."""
        known = self._ids.plan.workload.facts.topics.get(topic)
        if known is None or known.is_internal or "compact" in known.configs.get(_POLICY, ""):
            return False
        if self._sparse is None:
            self._sparse = _sparse_topics(self._ids)
        return topic not in self._sparse

    def _check_ends(self, log: Log, facts: _LogFacts) -> Iterator[Contradiction]:
        """Log ends do not fall, and are not beyond all that can exist."""
        ceiling = -1
        if 0 in facts.acknowledged:  # the log began in this run
            known = [last + 1 for _, last, _ in facts.claims]
            known += [each.end for each in facts.fetched]
            markers = self._marker_count if facts.is_transactional else 0
            ceiling = max(known) + facts.unknown + markers
        credible = []
        for reading in facts.ends:
            if 0 <= ceiling < reading.offset and reading.place:
                note = f"nothing else shows that the log ends after offset {ceiling}"
                yield _against(log, reading, ceiling, note)
            else:
                credible.append(reading)
        yield from _check_falling(log, credible)
        yield from _check_falling(log, facts.stable_ends)
        for fetched in facts.fetched:
            yield from _check_watermarks(log, facts, fetched)


def _keys(log: Log) -> tuple[str, ...]:
    return log[0], str(log[1])


def _against(log: Log, reading: _Reading, expected: Any, note: str) -> Contradiction:
    difference = Difference(reading.place, _keys(log), expected, reading.offset, note=note)
    return reading.outcome.step.number, difference


def _in_records(
    log: Log, fetched: _Fetched, offset: int, name: str, c: Any, a: Any, note: str
) -> Contradiction:
    place = f"{PLACE}[]{name}"
    keys = (*_keys(log), f"offset {offset}")
    return fetched.outcome.step.number, Difference(place, keys, c, a, note=note)


def _sparse_topics(ids: IdMap) -> set[str]:
    """Topics whose captured answers leave offsets out."""
    topics = set()
    for exchange in ids.plan.workload.exchanges():
        response = response_of(exchange) if exchange.api_key == ApiKey.FETCH else None
        for topic in entries(None if response is None else response.body["responses"]):
            for partition in entries(topic["partitions"]):
                batches = whole_batches(partition["records"] or b"")
                if any(mine.last_offset + 1 < next_.base_offset
                       for mine, next_ in pairwise(batches)):  # fmt: skip
                    topics.add(ids.topic_name(topic.get("topic") or "", topic.get("topic_id")))
    return topics


def _check_batches(
    log: Log, facts: _LogFacts, fetched: _Fetched, is_dense: bool
) -> Iterator[Contradiction]:
    """Checksums, order and content of the batches of one answer."""
    due, is_first = fetched.fetch_offset, True
    for batch in fetched.batches:
        base = batch.base_offset
        if batch.magic != 2:
            continue
        data = fetched.bytes_of(batch)
        if not is_sealed(fetched.data, batch):
            yield _in_records(log, fetched, base, ".crc", "right", "wrong", "it is damaged")
        if batch.last_offset < due or (not is_first and base < due):
            here = RecordCount(batch.record_count, base)
            note = "its offsets are here already"
            yield _in_records(log, fetched, base, "", RecordCount(0, -1), here, note)
        elif is_dense and 0 <= due < base:
            counts = RecordCount(base - due, due), RecordCount(0, -1)
            yield _in_records(log, fetched, due, "", *counts, "the answer leaves them out")
        yield from _check_content(log, facts, fetched, batch, data)
        due, is_first = max(due, batch.last_offset + 1), False


def _check_content(
    log: Log, facts: _LogFacts, fetched: _Fetched, batch: BatchHeader, data: bytes
) -> Iterator[Contradiction]:
    """A batch has the records that were produced at its offset, or delivered from there before."""
    if batch.is_control:
        return
    base = batch.base_offset
    for known, note in (
        (facts.acknowledged.get(base, b""), "not the batch that was produced there"),
        (facts.batches[base][1], "another answer has other records there"),
    ):
        if len(known) >= BATCH_HEADER_SIZE and not have_same_content(known, data):
            count = RecordCount(batch.record_count, base)
            yield _in_records(log, fetched, base, "", "the same", count, note)
            return


def _check_claims(log: Log, facts: _LogFacts) -> Iterator[Contradiction]:
    """Produce responses give each offset once; a repeated batch gets its offset again."""
    end = -1
    for base, last, outcome in sorted(facts.claims, key=lambda claim: claim[:2]):
        if base <= end and facts.acknowledged[base]:
            place = "responses[].partition_responses[].base_offset"
            note = "another batch has this offset"
            yield outcome.step.number, Difference(place, _keys(log), end + 1, base, note=note)
        end = max(end, last)


def _check_falling(log: Log, readings: list[_Reading]) -> Iterator[Contradiction]:
    """Offsets that are below what an earlier answer has shown."""
    by_answer = sorted(readings, key=lambda each: each.outcome.answered_ns)
    highest: dict[int | None, int] = {}  # by node
    shown = 0
    late = 0  # of `by_answer`: those that every node shows by now
    everywhere = -1
    for reading in sorted(readings, key=lambda each: each.outcome.sent_ns):
        sent_ns = reading.outcome.sent_ns
        while shown < len(by_answer) and by_answer[shown].outcome.answered_ns <= sent_ns:
            each = by_answer[shown]
            node = each.outcome.node_id
            highest[node] = max(highest.get(node, -1), each.offset)
            shown += 1
        while late < shown and by_answer[late].outcome.answered_ns + LAG_NS <= sent_ns:
            everywhere = max(everywhere, by_answer[late].offset)
            late += 1
        least = max(everywhere, highest.get(reading.outcome.node_id, -1))
        if reading.place and reading.offset < least:
            yield _against(log, reading, least, "an earlier answer showed more")


def _check_watermarks(log: Log, facts: _LogFacts, fetched: _Fetched) -> Iterator[Contradiction]:
    """Delivered records are before the log end of their answer, and what is stable is, too. A
    broker reads the watermarks first, and records may be appended before it reads them."""
    outcome, body = fetched.outcome, fetched.body
    end, stable = body.get("high_watermark", -1), body.get("last_stable_offset", -1)
    if end < 0 or max(fetched.end, stable) <= end:
        return
    meanwhile = sum(
        count
        for sent_ns, answered_ns, count in facts.appends
        if sent_ns <= outcome.answered_ns and outcome.sent_ns <= answered_ns
    )
    if fetched.end > end + meanwhile:
        reading = _Reading(end, outcome, _FETCHED + "high_watermark")
        yield _against(log, reading, fetched.end, "records after it are here")
    if stable > end + meanwhile:
        reading = _Reading(stable, outcome, _FETCHED + "last_stable_offset")
        yield _against(log, reading, end, "it is above the high watermark")


def _check_aborted(log: Log, facts: _LogFacts) -> Iterator[Contradiction]:
    """Records of aborted transactions in read_committed answers are listed, by their producer."""
    aborted = _aborted_batches(facts)
    for fetched in facts.fetched:
        if not fetched.is_committed:
            continue
        listed = {each["producer_id"] for each in entries(fetched.body.get("aborted_transactions"))}
        for batch in fetched.batches:
            if batch.base_offset in aborted and batch.producer_id not in listed:
                place, text = _FETCHED + "aborted_transactions", f"producer {batch.producer_id}"
                difference = Difference(
                    place, _keys(log), text, "not listed", note="its records were aborted"
                )
                yield fetched.outcome.step.number, difference


def _aborted_batches(facts: _LogFacts) -> set[int]:
    """Base offsets of batches of aborted transactions that were delivered up to their marker."""
    ranges = merged_ranges(
        (batch.base_offset, batch.last_offset) for batch, _ in facts.batches.values()
    )
    bases_of: dict[int, list[int]] = defaultdict(list)  # of open transactions, by producer
    aborted: set[int] = set()
    for base in sorted(facts.batches):
        batch, data = facts.batches[base]
        if batch.is_transactional and not batch.is_control:
            bases_of[batch.producer_id].append(base)
        elif batch.is_transactional:
            bases = bases_of.pop(batch.producer_id, [])
            is_whole = any(bases and first <= bases[0] and base <= last for first, last in ranges)
            if is_whole and marker_type(data, next(headers(data))) == _ABORT:
                aborted.update(bases)
    return aborted
