"""What a run shows of the target's logs, and the answers that contradict it.

A Fetch returns the records that the log has at that moment, so an answer of the target may have
fewer or more of them than the captured response. A captured record is looked up by its offset in
all that answers have delivered of the log.

A captured response says what another broker answered at another moment. So the target's answers
are also compared with each other, those included that were followed by another try:

- A delivered batch has a right checksum. Batches of an answer ascend, and leave out no batch that
  was produced or that another answer has, unless the topic is compacted.
- A batch that was produced in this run comes back with the same records, and so does one that an
  earlier answer has delivered.
- Log ends and starts never fall. In a log that began in this run, no end is beyond what the run
  can have written.
- A read_committed answer lists each transaction whose records and abort marker it has (KIP-98).

An offset that a node has answered holds for later answers of that node at once, and for other nodes
after LAG_NS.

Topics of one name that the run deletes and makes again have logs of their own. A request is about
the one that was there when it was sent. Nothing is said about the offsets of later ones: a broker
may still show the one before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay import batches
from kdissect.replay.batches import Batch, batches_of
from kdissect.replay.model import FOREVER_NS, Contradiction, Difference, Log, Reply
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import EARLIEST, LATEST, Body, codes, entries
from kdissect.tables.schemas import Row
from kdissect.text import plural

LAG_NS, _EVERYWHERE = 5_000_000_000, "everywhere"  # until every broker shows a change
_READ_COMMITTED, _ACKS_ALL = 1, -1
MANY = 1 << 40  # messages before magic 2 do not say how many they wrap
_ANY_BATCH = 1 << 40  # bytes of room of an answer without records, whatever its limits
_PRODUCED = "responses[].partition_responses[]."
_FETCHED, _LISTED = "responses[].partitions[].", "topics[].partitions[]."
RECORDS = f"{_FETCHED}records"
_WATERMARKS = {
    "ends": "high_watermark",
    "stable_ends": "last_stable_offset",
    "starts": "log_start_offset",
}
_POLICY = "cleanup.policy"
_OF_ROWS = ("key", "value", "headers", "timestamp_ms")
_REORDERED = "unacknowledged-order"  # the rule for records of Produce requests with acks 0
# The leader appended the batch, or may have: a timeout, too few replicas after it, a repetition.
_MAYBE_APPENDED = codes(
    "REQUEST_TIMED_OUT NOT_ENOUGH_REPLICAS_AFTER_APPEND DUPLICATE_SEQUENCE_NUMBER"
)
_NO_RECORDS = "no records"

ToTarget = Callable[[int, int], int]  # takes a step, and an offset of the other side
Readers = Mapping[int, Callable[[Reply], None]]  # by API


def count_text(records: int, first: int) -> str:
    """A number of records of a log, from an offset on."""
    return f"{plural(records, 'record')} from offset {first}"


def _in_log(
    log: Log, place: str, c: Any, a: Any, note: str = "", offset: int | None = None
) -> Difference:
    """A difference in a partition, or of the records at an offset of it."""
    keys = (log[0], str(log[1]), *(() if offset is None else (f"offset {offset}",)))
    return Difference(place, keys, c, a, note=note)


class _Reading(NamedTuple):
    """An offset that an answer shows; the log reaches it, or it is exactly that. place: "" where
    the offset follows from records."""

    offset: int
    reply: Reply
    place: str

    def below(self, log: Log, least: Any, note: str) -> Contradiction:
        return self.reply.wrong(_in_log(log, self.place, least, self.offset, note))


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
    """A partition in the answer to a Fetch or ShareFetch. fetch_offset: -1 unknown. room: bytes for
    which the answer has room, if it shows more records than it has, `_ANY_BATCH` if it has none at
    all; -1 otherwise. aborted: the producers that a read_committed answer lists, with the first
    offsets of their transactions, else None."""

    log: Log
    reply: Reply
    batches: list[Batch]
    fetch_offset: int = -1
    room: int = -1
    aborted: Sequence[tuple[int, int]] | None = None

    @property
    def end(self) -> int:
        """The offset after the last delivered record; -1 if there is none."""
        return self.batches[-1].header.last_offset + 1 if self.batches else -1

    def wrong(self, offset: int, c: Any, a: Any, note: str, name: str = "") -> Contradiction:
        """A contradiction in the records from an offset on."""
        return self.reply.wrong(_in_log(self.log, f"{RECORDS}[]{name}", c, a, note, offset))


@dataclass(slots=True, eq=False)
class LogFacts:
    """What the run shows of one log.

    life: how many topics of its name the run has deleted before.
    produced: by base offset. unknown: records that may be there besides. silent: record sets of
    Produce requests with acks 0. deleted_to: by DeleteRecords, -1 never. marker_count: at most.
    fetched: in the order of the answers. delivered: their batches by base offset, each as it came
    first. old: their records before magic 2, by offset. readings: of its "ends", "stable_ends" and
    "starts".
    """

    log: Log
    life: int
    produced: dict[int, Produced] = field(default_factory=dict)
    unknown: int = 0
    silent: list[bytes] = field(default_factory=list)
    deleted_to: int = -1
    marker_count: int = 0
    fetched: list[_Fetched] = field(default_factory=list)
    delivered: dict[int, Batch] = field(default_factory=dict)
    old: dict[int, Row] = field(default_factory=dict)
    readings: dict[str, list[_Reading]] = field(default_factory=lambda: defaultdict(list))

    def add(self, fetched: _Fetched) -> None:
        self.fetched.append(fetched)
        for batch in fetched.batches:
            if batch.header.magic == 2:
                self.delivered.setdefault(batch.header.base_offset, batch)
            else:
                self.old |= batch.rows()
        if fetched.batches:
            self.readings["ends"].append(_Reading(fetched.end, fetched.reply, ""))

    def shows(self, reply: Reply, place: str, partition: Body, **fields: str) -> None:
        """Note the offsets that a partition shows in an answer. fields: by the name of the
        reading, the field of the partition."""
        for name, of in fields.items():
            if partition.get(of, -1) >= 0:
                self.readings[name].append(_Reading(partition[of], reply, place + of))


class Logs(dict[tuple[Log, int], LogFacts]):
    """The logs of a run by the capture's names and the lives of their topics. Give it each reply,
    those that were followed by another try included, in the order of their coming."""

    def __init__(self, ids: IdMap) -> None:
        super().__init__()
        self._ids, self._topics = ids, ids.target_topics
        self._open: dict[str, list[Produced]] = defaultdict(list)  # by transactional id
        self._deleted: dict[str, list[int]] = defaultdict(list)  # when, by topic
        self.readers: Readers = {
            ApiKey.PRODUCE: self._produce,
            ApiKey.FETCH: self._fetch,
            ApiKey.SHARE_FETCH: self._share_fetch,
            ApiKey.LIST_OFFSETS: self._list_offsets,
            ApiKey.DELETE_RECORDS: self._delete_records,
        }

    def __missing__(self, key: tuple[Log, int]) -> LogFacts:
        self[key] = LogFacts(*key)
        return self[key]

    def of(self, log: Log, sent_ns: int = FOREVER_NS) -> LogFacts:
        """The log that a request is about which was sent then; without a time, the last one."""
        return self[log, bisect_left(self._deleted[log[0]], sent_ns)]

    def end_transaction(self, reply: Reply, *, is_aborted: bool | None) -> None:
        """The records that a transaction has produced were aborted, or not. Each log that it has
        named gets a marker."""
        for (kind, *log), _ in reply.step.accesses:
            if kind == "log":
                self.of((log[0], log[1]), reply.sent_ns).marker_count += 1
        for each in self._open.pop(reply.request["transactional_id"], []):
            each.is_aborted = is_aborted

    def topic_deleted(self, name: str, reply: Reply) -> None:
        """A request has deleted the topic, or nobody knows whether it has."""
        self._deleted[name].append(max(reply.sent_ns, reply.answered_ns))

    # -- facts ----------------------------------------------------------------------------------

    def _produce(self, reply: Reply) -> None:
        answered = dict(self._topics.logs(reply.body))
        owner, acks = reply.request.get("transactional_id") or "", reply.request["acks"]
        for log, entry in self._topics.logs(reply.request):
            facts, data = self.of(log, reply.sent_ns), entry["records"] or b""
            found = [*batches.headers(data)]
            is_old = any(each.magic != 2 for each in found)
            count = MANY if is_old else sum(max(each.record_count, 0) for each in found)
            if acks == 0:
                facts.silent.append(data)
            result = answered.get(log, {})
            code, base = result.get("error_code"), result.get("base_offset", -1)
            if code is None or code in _MAYBE_APPENDED or (code == 0 and (is_old or base < 0)):
                facts.unknown += count
            elif code == 0:
                whole = data if len(found) == 1 else b""
                made = Produced(base, count, whole, None if owner else False)
                facts.produced[base] = made
                if owner:
                    self._open[owner].append(made)
                if acks == _ACKS_ALL:
                    facts.readings["ends"].append(_Reading(made.end, reply, ""))
                facts.shows(reply, _PRODUCED, result, starts="log_start_offset")

    def _fetch(self, reply: Reply) -> None:
        named = dict(self._topics.logs(reply.request))
        is_committed = reply.request.get("isolation_level", 0) == _READ_COMMITTED
        end = "last_stable_offset" if is_committed else "high_watermark"
        taken = [*self._topics.logs(reply.taken)]
        size = sum(len(each["records"] or b"") for _, each in taken)
        left = reply.request.get("max_bytes", MANY) - size
        for log, partition in taken:
            if not partition["error_code"]:
                asked = named.get(log, {})
                offset = asked.get("fetch_offset", -1)
                listed = entries(partition.get("aborted_transactions"))
                aborted = [(each["producer_id"], each["first_offset"]) for each in listed]
                # An answer has a batch, whatever its size (KIP-74), but none for a client that
                # exceeds its quota (KIP-219), or that has to ask another replica (KIP-392).
                is_due = 0 <= offset < partition.get(end, -1) and not (
                    partition["records"]
                    or reply.taken.get("throttle_time_ms", 0) > 0
                    or partition.get("preferred_read_replica", -1) >= 0
                )
                room = min(asked.get("partition_max_bytes", 0), left) if size else _ANY_BATCH
                found = batches_of(partition["records"] or b"")
                fetched = _Fetched(log, reply, found, offset, room if is_due else -1)
                fetched.aborted = aborted if is_committed else None
                facts = self.of(log, reply.sent_ns)
                facts.add(fetched)
                facts.shows(reply, _FETCHED, partition, **_WATERMARKS)

    def _share_fetch(self, reply: Reply) -> None:
        for log, partition in self._topics.logs(reply.body):
            fetched = _Fetched(log, reply, batches_of(partition["records"] or b""))
            self.of(log, reply.sent_ns).add(fetched)

    def _list_offsets(self, reply: Reply) -> None:
        asked = dict(self._topics.logs(reply.request))
        is_committed = reply.request.get("isolation_level", 0) == _READ_COMMITTED
        names = {LATEST: "stable_ends" if is_committed else "ends", EARLIEST: "starts"}
        for log, partition in self._topics.logs(reply.body):
            name = names.get(asked.get(log, {}).get("timestamp", 0))
            if name is not None and not partition["error_code"]:
                self.of(log, reply.sent_ns).shows(reply, _LISTED, partition, **{name: "offset"})

    def _delete_records(self, reply: Reply) -> None:
        for log, partition in self._topics.logs(reply.body):
            if not partition["error_code"]:
                facts = self.of(log, reply.sent_ns)
                facts.deleted_to = partition["low_watermark"]
                facts.shows(reply, _LISTED, partition, starts="low_watermark")
        for log, _ in self._topics.logs(reply.request) if reply.answer is None else ():
            facts = self.of(log, reply.sent_ns)  # nobody knows which records are still there
            facts.produced, facts.unknown, facts.deleted_to = {}, MANY, -1

    # -- contradictions -------------------------------------------------------------------------

    def contradictions(self) -> Iterator[Contradiction]:
        for facts in self.values():
            topic = self._ids.plan.workload.facts.topics.get(facts.log[0])
            is_lasting = bool(facts.log[0]) and not facts.life
            kept = set[int]()  # all batches, unless the log is compacted
            if is_lasting and topic is not None and not topic.is_internal:
                if "compact" not in topic.configs.get(_POLICY, ""):
                    kept = {*facts.produced, *facts.delivered}
            for fetched in facts.fetched:
                yield from _check_batches(fetched, facts, kept)
                if is_lasting and fetched.aborted is not None:
                    yield from _check_aborted(fetched, fetched.aborted)
            if is_lasting:
                yield from self._check_ends(facts)
                yield from _check_falling(facts.log, facts.readings["starts"])

    def _check_ends(self, facts: LogFacts) -> Iterator[Contradiction]:
        """Log ends do not fall, and are not beyond all that can exist."""
        ceiling = -1
        if 0 in facts.produced:  # the log began in this run
            known = [each.end for each in facts.produced.values()]
            known += [each.end for each in facts.fetched]
            ceiling = max(known) + facts.unknown + facts.marker_count
        credible = []
        for reading in facts.readings["ends"]:
            if 0 <= ceiling < reading.offset and reading.place:
                note = f"nothing else shows that the log ends after offset {ceiling}"
                yield reading.below(facts.log, ceiling, note)
            else:
                credible.append(reading)
        yield from _check_falling(facts.log, credible)
        yield from _check_falling(facts.log, facts.readings["stable_ends"])


# -- captured records -----------------------------------------------------------------------------


def compare_records(
    facts: LogFacts, expected: Sequence[tuple[int, bytes]], to_target: ToTarget, end: int
) -> Iterator[Contradiction]:
    """Compare captured records of a log with the delivered ones, in whichever answer these came.

    expected: steps whose answers should bring these record sets. end: where the records end on the
    other side that have to come; `MANY` if all have.

    Records that only changed their places are allowed if Produce requests with acks 0 wrote them:
    those in flight at the same time have no order.
    """
    bases = sorted(facts.delivered)
    found: list[Contradiction] = []
    replaced: list[tuple[str, str]] = []
    for step, record_set in expected:
        lost: list[int] = []
        for batch in batches_of(record_set):
            if batch.header.is_control:
                continue  # a marker comes some time after its transaction: where is no matter
            for offset, c, a in _compare_batch(facts, bases, batch, partial(to_target, step)):
                if a is None:
                    lost += [offset] if offset < end else []
                    continue
                apart = [name for name in c if c[name] != a[name]]
                for name in apart:
                    place = f"{RECORDS}[].{name}"
                    found.append((step, _in_log(facts.log, place, c[name], a[name], offset=offset)))
                if {*apart} & {*_OF_ROWS[:-1]}:
                    replaced.append((_content(c), _content(a)))
        if lost:
            count = count_text(len(lost), min(lost))
            one = _in_log(facts.log, RECORDS, count, _NO_RECORDS, "no answer brings them")
            found.append((step, one))
    is_reordered = _are_reordered(facts, replaced)
    for step, one in found:
        is_allowed = is_reordered and one.place.endswith(_OF_ROWS)
        yield step, replace(one, rule=_REORDERED) if is_allowed else one


def _compare_batch(
    facts: LogFacts, bases: Sequence[int], batch: Batch, to_target: Callable[[int], int]
) -> Iterator[tuple[int, Row, Row | None]]:
    """Yield (offset, captured fields, answered ones) of a batch, and of its records if these differ
    at all; None for a record that no answer brings. bases: of the delivered batches, ascending."""
    header = batch.header
    other = facts.delivered.get(to_target(header.base_offset))
    if other is not None and header.magic == 2 and not other.header.is_control:
        read = {"compression": batches.codec_of, "timestamp_type": batches.timestamp_type}
        c, a = ({name: of(each.data) for name, of in read.items()} for each in (batch, other))
        yield header.base_offset, c, a
        if batches.are_equal(batch.data, other.data):
            return
    for offset, row in batch.rows().items():
        there = to_target(offset)
        place = bisect_right(bases, there) - 1
        rows = facts.old if place < 0 else facts.delivered[bases[place]].rows()
        brought = rows.get(there, facts.old.get(there))
        if brought is None or brought["control_type"] is not None:  # clients drop control records
            yield offset, row, None
        else:
            have_times = row["timestamp_type"] == brought["timestamp_type"] == "CreateTime"
            names = _OF_ROWS if have_times else _OF_ROWS[:-1]
            c, a = ({name: each[name] for name in names} for each in (row, brought))
            yield offset, c, a


def _content(row: Row) -> str:
    """Key, value and headers of a record as text; not its offset, time and producer."""
    return repr([row[name] for name in _OF_ROWS[:-1]])


def _are_reordered(facts: LogFacts, replaced: Sequence[tuple[str, str]]) -> bool:
    """Return whether the (captured, answered) contents at some offsets are the same records in
    another order, all written with acks 0."""
    captured, answered = Counter(c for c, _ in replaced), Counter(a for _, a in replaced)
    if not captured or captured != answered:
        return False
    sent = (each for data in facts.silent for each in batches_of(data))
    return captured.keys() <= {_content(row) for each in sent for row in each.rows().values()}


# -- answers beside each other --------------------------------------------------------------------


def _check_batches(
    fetched: _Fetched, facts: LogFacts, kept: Collection[int]
) -> Iterator[Contradiction]:
    """Checksums, order and content of the batches of one answer. kept: offsets at which the log has
    a batch for certain."""
    due, is_first = fetched.fetch_offset, True
    known = (facts.delivered.get(due) or facts.produced[due]).data if due in kept else b""
    if fetched.room == _ANY_BATCH or (known and len(known) <= fetched.room):
        note = "the answer itself shows that the log has records there"
        yield fetched.wrong(due, f"records from offset {due}", _NO_RECORDS, note)
    for batch in fetched.batches:
        header, base = batch.header, batch.header.base_offset
        if header.magic != 2:
            continue
        here = count_text(header.record_count, base)
        if not batches.is_sealed(batch.record_set, header):
            yield fetched.wrong(base, "right", "wrong", "it is damaged", ".crc")
        if header.last_offset < due or (not is_first and base < due):
            yield fetched.wrong(base, _NO_RECORDS, here, "its offsets are here already")
        elif 0 <= due < base and any(due <= each < base for each in kept):
            left_out = count_text(base - due, due)
            yield fetched.wrong(due, left_out, _NO_RECORDS, "the answer leaves them out")
        due, is_first = max(due, header.last_offset + 1), False
        if not header.is_control and (note := _other_content(batch, facts)):
            yield fetched.wrong(base, "the same", here, note)


def _other_content(batch: Batch, facts: LogFacts) -> str:
    """How a batch differs from what was produced at its offset, or delivered from there before."""
    base = batch.header.base_offset
    if base in facts.produced and _differs(batch, facts.produced[base].data):
        return "not the batch that was produced there"
    is_other = _differs(batch, facts.delivered[base].data)
    return "another answer has other records there" if is_other else ""


def _differs(batch: Batch, known: bytes) -> bool:
    is_whole = len(known) >= batches.BATCH_HEADER_SIZE
    return is_whole and not batches.have_same_content(known, batch.data)


def _check_falling(log: Log, readings: list[_Reading]) -> Iterator[Contradiction]:
    """Offsets that are below what an earlier answer has shown."""
    events = []  # the time, whether a reading is checked then, and where others count from then on
    for each in readings:
        reply = each.reply
        events += [
            (reply.answered_ns, False, reply.node_id, each),
            (reply.answered_ns + LAG_NS, False, _EVERYWHERE, each),
            (reply.sent_ns, True, reply.node_id, each),
        ]
    highest: dict[int | str | None, int] = defaultdict(lambda: -1)  # by node
    for _, is_checked, node, reading in sorted(events, key=lambda each: each[:2]):
        if not is_checked:
            highest[node] = max(highest[node], reading.offset)
        elif reading.place and reading.offset < (least := max(highest[node], highest[_EVERYWHERE])):
            yield reading.below(log, least, "an earlier answer showed more")


def _check_aborted(fetched: _Fetched, listed: Sequence[tuple[int, int]]) -> Iterator[Contradiction]:
    """Aborted records of a read_committed answer are listed, by their producer; committed ones are
    not, since clients would drop them."""
    place, headers = _FETCHED + "aborted_transactions", [each.header for each in fetched.batches]
    aborted = {each.producer_id for each in batches.aborted(headers)}
    for producer in sorted(aborted - {producer for producer, _ in listed}):
        told = f"producer {producer}", "not listed", "its records were aborted"
        yield fetched.reply.wrong(_in_log(fetched.log, place, *told))
    for producer, first in listed:
        of_it = (each for each in headers if each.is_control and each.producer_id == producer)
        end = next((each for each in of_it if each.base_offset >= first), None)
        if end is not None and not end.is_abort:
            told = "not listed", f"producer {producer}", "its records were committed"
            yield fetched.reply.wrong(_in_log(fetched.log, place, *told))
