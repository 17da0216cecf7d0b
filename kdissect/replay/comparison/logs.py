"""What a run shows of the target's logs, and the answers that contradict it.

A captured response says what another broker answered at another moment. This module compares the
target's answers with each other, those included that were followed by another try:

- A delivered batch has a right checksum. Batches of an answer ascend, and leave out no offset
  unless the topic is compacted.
- A batch that was produced in this run comes back with the same records, and so does one that an
  earlier answer has delivered.
- Log ends and starts never fall. In a log that began in this run, no end is beyond what the run
  can have written.
- A read_committed answer lists each transaction whose records and abort marker it has (KIP-98).

An offset that a node has answered holds for later answers of that node at once, and for other nodes
after LAG_NS. Nothing is said about the offsets of a topic that the run deletes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.batch_headers import BATCH_HEADER_SIZE, headers, is_sealed
from kdissect.replay.comparison import records
from kdissect.replay.comparison.replies import Body, Contradiction, Readers, Reply
from kdissect.replay.comparison.terms import Terms
from kdissect.replay.model import Log
from kdissect.replay.workload.messages import EARLIEST, LATEST, entries, response_of

LAG_NS, _EVERYWHERE = 5_000_000_000, "everywhere"  # until every broker shows a change
_READ_COMMITTED, _ACKS_ALL = 1, -1
MANY = 1 << 40  # messages before magic 2 do not say how many they wrap
_PRODUCED = "responses[].partition_responses[]."
_FETCHED, _LISTED = "responses[].partitions[].", "topics[].partitions[]."
_WATERMARKS = {
    "ends": "high_watermark",
    "stable_ends": "last_stable_offset",
    "starts": "log_start_offset",
}
_POLICY = "cleanup.policy"
# The leader appended the batch, or may have: a timeout, too few replicas after it, a repetition.
_MAYBE_APPENDED = frozenset(
    {
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.DUPLICATE_SEQUENCE_NUMBER,
    }
)


class _Reading(NamedTuple):
    """An offset that an answer shows; the log reaches it, or it is exactly that. place: "" where
    the offset follows from records."""

    offset: int
    reply: Reply
    place: str

    def below(self, log: Log, least: Any, note: str) -> Contradiction:
        return self.reply.wrong(records.in_log(log, self.place, least, self.offset, note))


@dataclass(slots=True)
class Produced:
    """Records that the target acknowledged from an offset on. data: the batch, b"" for several.
    is_aborted: whether its transaction was aborted, None if that is unknown."""

    base: int
    records: int
    data: bytes
    is_aborted: bool | None

    @property
    def end(self) -> int:
        return self.base + self.records


@dataclass(slots=True)
class _Fetched:
    """A partition in the answer to a Fetch or ShareFetch. fetch_offset: -1 unknown."""

    log: Log
    reply: Reply
    body: Body
    batches: list[records.Batch]
    fetch_offset: int
    is_committed: bool

    @property
    def end(self) -> int:
        """The offset after the last delivered record; -1 if there is none."""
        return self.batches[-1].header.last_offset + 1 if self.batches else -1

    def wrong(self, offset: int, c: Any, a: Any, note: str, name: str = "") -> Contradiction:
        """A contradiction in the records from an offset on."""
        return self.reply.wrong(
            records.in_log(self.log, f"{records.PLACE}[]{name}", c, a, note, offset)
        )


@dataclass(slots=True)
class LogFacts:
    """What the run shows of one log. produced: by base offset, in order. unknown: records that may
    be there besides. deleted_to: by DeleteRecords, -1 never. readings: of its "ends",
    "stable_ends" and "starts"."""

    log: Log
    delivered: records.LogRecords
    produced: list[Produced] = field(default_factory=list)
    unknown: int = 0
    deleted_to: int = -1
    is_transactional: bool = False
    fetched: list[_Fetched] = field(default_factory=list)
    readings: dict[str, list[_Reading]] = field(default_factory=lambda: defaultdict(list))

    @property
    def acknowledged(self) -> dict[int, Produced]:
        """By base offset."""
        return {each.base: each for each in self.produced}

    def forget(self) -> None:
        """Forget what was produced: the log is deleted, or nobody knows whether it is."""
        self.produced, self.unknown, self.deleted_to = [], 0, -1

    def reaches(self, end: int, reply: Reply) -> None:
        """Records of an answer end there."""
        self.readings["ends"].append(_Reading(end, reply, ""))

    def shows(self, reply: Reply, place: str, partition: Body, **fields: str) -> None:
        """Note the offsets that a partition shows in an answer. fields: by the name of the
        reading, the field of the partition."""
        for name, of in fields.items():
            if partition.get(of, -1) >= 0:
                self.readings[name].append(_Reading(partition[of], reply, place + of))


class Logs(dict[Log, LogFacts]):
    """The logs of a run by the capture's names. Give it each reply, those that were followed by
    another try included, in the order of their coming."""

    def __init__(self, terms: Terms) -> None:
        super().__init__()
        self._terms = terms
        self._open: dict[str, list[Produced]] = defaultdict(list)  # by transactional id
        self._deleted: set[str] = set()
        self._marker_count = 0
        self.readers: Readers = {
            ApiKey.PRODUCE: self._produce,
            ApiKey.FETCH: self._fetch,
            ApiKey.SHARE_FETCH: self._share_fetch,
            ApiKey.LIST_OFFSETS: self._list_offsets,
            ApiKey.DELETE_RECORDS: self._delete_records,
        }

    def __missing__(self, log: Log) -> LogFacts:
        self[log] = LogFacts(log, records.LogRecords(log))
        return self[log]

    def end_transaction(self, name: str, *, is_aborted: bool | None) -> None:
        """The records that a transaction has produced were aborted, or not. Markers follow them."""
        self._marker_count += 1
        for each in self._open.pop(name, []):
            each.is_aborted = is_aborted

    def forget_topic(self, name: str) -> None:
        """The topic was deleted, or nobody knows whether it was."""
        self._deleted.add(name)
        for log in [log for log in self if log[0] == name]:
            self[log].forget()

    # -- facts ----------------------------------------------------------------------------------

    def _produce(self, reply: Reply) -> None:
        answered = dict(self._terms.logs(reply.answer))
        owner, acks = reply.request.get("transactional_id") or "", reply.request["acks"]
        for log, entry in self._terms.logs(reply.request):
            facts, data = self[log], entry["records"] or b""
            batches = list(headers(data))
            facts.is_transactional |= any(each.is_transactional for each in batches)
            is_old = any(each.magic != 2 for each in batches)
            count = MANY if is_old else sum(max(each.record_count, 0) for each in batches)
            if acks == 0:
                facts.delivered.silent.append(data)
            result = answered.get(log, {})
            code, base = result.get("error_code"), result.get("base_offset", -1)
            if code is None or code in _MAYBE_APPENDED or (code == 0 and (is_old or base < 0)):
                facts.unknown += count
            elif code == 0:
                whole = data if len(batches) == 1 else b""
                made = Produced(base, count, whole, None if owner else False)
                facts.produced.append(made)
                if owner:
                    self._open[owner].append(made)
                if acks == _ACKS_ALL:
                    facts.reaches(made.end, reply)
                facts.shows(reply, _PRODUCED, result, starts="log_start_offset")

    def _fetch(self, reply: Reply) -> None:
        named = dict(self._terms.logs(reply.request))
        is_committed = reply.request.get("isolation_level", 0) == _READ_COMMITTED
        for log, partition in self._terms.logs(reply.taken):
            if partition["error_code"]:
                continue
            offset = named.get(log, {}).get("fetch_offset", -1)
            self._add_fetched(reply, log, partition, offset, is_committed)
            self[log].shows(reply, _FETCHED, partition, **_WATERMARKS)

    def _share_fetch(self, reply: Reply) -> None:
        for log, partition in self._terms.logs(reply.answer):
            self._add_fetched(reply, log, partition)

    def _add_fetched(
        self, reply: Reply, log: Log, partition: Body, offset: int = -1, is_committed: bool = False
    ) -> None:
        batches = records.batches_of(partition["records"] or b"")
        fetched = _Fetched(log, reply, partition, batches, offset, is_committed)
        self[log].fetched.append(fetched)
        for batch in batches:
            self[log].delivered.add(batch)
        if batches:
            self[log].reaches(fetched.end, reply)

    def _list_offsets(self, reply: Reply) -> None:
        asked = dict(self._terms.logs(reply.request))
        is_committed = reply.request.get("isolation_level", 0) == _READ_COMMITTED
        names = {LATEST: "stable_ends" if is_committed else "ends", EARLIEST: "starts"}
        for log, partition in self._terms.logs(reply.answer):
            name = names.get(asked.get(log, {}).get("timestamp", 0))
            if name is not None and not partition["error_code"]:
                self[log].shows(reply, _LISTED, partition, **{name: "offset"})

    def _delete_records(self, reply: Reply) -> None:
        for log, partition in self._terms.logs(reply.answer):
            if not partition["error_code"]:
                self[log].deleted_to = partition["low_watermark"]
                self[log].shows(reply, _LISTED, partition, starts="low_watermark")
        for log, _ in self._terms.logs(reply.request) if reply.answer is None else ():
            self[log].forget()

    # -- contradictions -------------------------------------------------------------------------

    def compare(
        self, expected: Iterable[tuple[int, Log, bytes]], to_target: records.ToTarget
    ) -> Iterator[Contradiction]:
        """Compare captured records with the delivered ones, in whichever answer these came.

        expected: steps whose answers should bring these record sets of a log. to_target: an offset
        of the other side.
        """
        for step, log, captured in expected:
            self[log].delivered.compare(step, captured, to_target)
        for facts in self.values():
            facts.delivered.allow_reordered()
            yield from facts.delivered.found

    def contradictions(self) -> Iterator[Contradiction]:
        for log, facts in self.items():
            is_lasting = bool(log[0]) and log[0] not in self._deleted
            is_dense = is_lasting and self._is_dense(log[0])
            acknowledged = facts.acknowledged
            for fetched in facts.fetched:
                yield from _check_batches(fetched, is_dense)
                yield from _check_content(fetched, acknowledged, facts.delivered)
                if is_lasting and fetched.is_committed:
                    yield from _check_aborted(fetched)
            if is_lasting:
                yield from self._check_ends(facts)
                yield from _check_falling(log, facts.readings["starts"])

    def _is_dense(self, topic: str) -> bool:
        """Return whether a log leaves no offset out. Compacted ones may; the capture shows
        which."""
        known = self._terms.ids.plan.workload.facts.topics.get(topic)
        if known is None or known.is_internal or "compact" in known.configs.get(_POLICY, ""):
            return False
        return topic not in self._sparse

    @cached_property
    def _sparse(self) -> set[str]:
        """Topics whose captured answers leave offsets out."""
        ids, topics = self._terms.ids, set()
        for exchange in ids.plan.workload.exchanges():
            response = response_of(exchange) if exchange.api_key == ApiKey.FETCH else None
            for (topic, _), partition in ids.names.logs(response.body) if response else ():
                found = [each.header for each in records.batches_of(partition["records"] or b"")]
                if any(one.last_offset + 1 < then.base_offset for one, then in pairwise(found)):
                    topics.add(topic)
        return topics

    def _check_ends(self, facts: LogFacts) -> Iterator[Contradiction]:
        """Log ends do not fall, and are not beyond all that can exist."""
        ceiling = -1
        if any(each.base == 0 for each in facts.produced):  # the log began in this run
            known = [each.end for each in facts.produced] + [each.end for each in facts.fetched]
            markers = self._marker_count if facts.is_transactional else 0
            ceiling = max(known) + facts.unknown + markers
        credible = []
        for reading in facts.readings["ends"]:
            if 0 <= ceiling < reading.offset and reading.place:
                note = f"nothing else shows that the log ends after offset {ceiling}"
                yield reading.below(facts.log, ceiling, note)
            else:
                credible.append(reading)
        yield from _check_falling(facts.log, credible)
        yield from _check_falling(facts.log, facts.readings["stable_ends"])


def _check_batches(fetched: _Fetched, is_dense: bool) -> Iterator[Contradiction]:
    """Checksums and order of the batches of one answer."""
    due, is_first = fetched.fetch_offset, True
    for batch in fetched.batches:
        header, base = batch.header, batch.header.base_offset
        if header.magic != 2:
            continue
        if not is_sealed(batch.record_set, header):
            yield fetched.wrong(base, "right", "wrong", "it is damaged", ".crc")
        if header.last_offset < due or (not is_first and base < due):
            here = records.RecordCount(header.record_count, base)
            yield fetched.wrong(base, records.NO_RECORDS, here, "its offsets are here already")
        elif is_dense and 0 <= due < base:
            left_out = records.RecordCount(base - due, due)
            yield fetched.wrong(due, left_out, records.NO_RECORDS, "the answer leaves them out")
        due, is_first = max(due, header.last_offset + 1), False


def _check_content(
    fetched: _Fetched, acknowledged: dict[int, Produced], delivered: records.LogRecords
) -> Iterator[Contradiction]:
    """A batch has the records that were produced at its offset, or delivered from there before."""
    for header, batch in ((each.header, each) for each in fetched.batches):
        if header.magic != 2 or header.is_control:
            continue
        produced = acknowledged.get(header.base_offset)
        for known, note in (
            (b"" if produced is None else produced.data, "not the batch that was produced there"),
            (delivered.batches[header.base_offset].data, "another answer has other records there"),
        ):
            if len(known) >= BATCH_HEADER_SIZE and not records.have_same_content(known, batch.data):
                count = records.RecordCount(header.record_count, header.base_offset)
                yield fetched.wrong(header.base_offset, "the same", count, note)
                break


def _check_falling(log: Log, readings: list[_Reading]) -> Iterator[Contradiction]:
    """Offsets that are below what an earlier answer has shown."""
    events = []  # the time, whether a reading is checked then, and where others count from then on
    for each in readings:
        outcome = each.reply.outcome
        events += [
            (outcome.answered_ns, False, outcome.node_id, each),
            (outcome.answered_ns + LAG_NS, False, _EVERYWHERE, each),
            (outcome.sent_ns, True, outcome.node_id, each),
        ]
    highest: dict[int | str | None, int] = defaultdict(lambda: -1)  # by node
    for _, is_checked, node, reading in sorted(events, key=lambda each: each[:2]):
        if not is_checked:
            highest[node] = max(highest[node], reading.offset)
        elif reading.place and reading.offset < max(highest[node], highest[_EVERYWHERE]):
            least = max(highest[node], highest[_EVERYWHERE])
            yield reading.below(log, least, "an earlier answer showed more")


def _check_aborted(fetched: _Fetched) -> Iterator[Contradiction]:
    """Aborted records of a read_committed answer are listed, by their producer."""
    listed = {each["producer_id"] for each in entries(fetched.body.get("aborted_transactions"))}
    unlisted: set[int] = set()  # producers whose records this answer has
    for batch in fetched.batches:
        producer = batch.header.producer_id
        if not batch.header.is_control:
            unlisted |= {producer} - listed if batch.header.is_transactional else set()
        elif producer in unlisted and batch.is_abort:
            place, note = _FETCHED + "aborted_transactions", "its records were aborted"
            one = records.in_log(fetched.log, place, f"producer {producer}", "not listed", note)
            yield fetched.reply.wrong(one)
        else:
            unlisted.discard(producer)
