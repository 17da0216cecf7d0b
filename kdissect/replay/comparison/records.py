"""Batches and records of answers, and their comparison with captured ones.

A Fetch returns the records that the log has at that moment. An answer of the target may have fewer
or more records than the captured response. So a captured record is looked up by its offset in all
that answers have delivered of the log.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from kdissect.codec.compression import CODEC_NAMES, Codec, DecompressionLimits, decompressed
from kdissect.codec.record_batches import decode_record_set
from kdissect.replay.batch_headers import BATCH_HEADER_SIZE, BatchHeader, headers
from kdissect.replay.comparison.replies import Contradiction
from kdissect.replay.model import Difference, Log
from kdissect.status import Status
from kdissect.text import plural

PLACE = "responses[].partitions[].records"
_ATTRIBUTES_AT, _TIMES_AT, _PRODUCER_AT, _COUNT_AT = 21, 27, 43, 57
_MARKER_AT = 68  # its type: brokers write one record without deltas, after its version
_CODEC_MASK, _APPEND_TIME = 7, 8
_OF_ROWS = ("key", "value", "headers", "timestamp_ms")
_TIMESTAMP_TYPES = ["CreateTime", "LogAppendTime"]
_LIMITS = DecompressionLimits()
_REORDERED = "unacknowledged-order"  # the rule for records of Produce requests with acks 0

Row = dict[str, Any]
ToTarget = Callable[[Log, int], int]  # an offset of the other side


class RecordCount(NamedTuple):
    """A number of records of a log, from an offset on."""

    records: int
    first: int

    def __str__(self) -> str:
        if not self.records:
            return "no records"
        return f"{plural(self.records, 'record')} from offset {self.first}"


NO_RECORDS = RecordCount(0, -1)


def in_log(
    log: Log, place: str, c: Any, a: Any, note: str = "", offset: int | None = None
) -> Difference:
    """A difference in a partition, or of the records at an offset of it."""
    keys = (log[0], str(log[1]), *(() if offset is None else (f"offset {offset}",)))
    return Difference(place, keys, c, a, note=note)


# -- batches --------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """A whole batch in a record set, or a message of magic 0 or 1."""

    record_set: bytes
    header: BatchHeader

    @property
    def data(self) -> bytes:
        return self.record_set[self.header.pos : self.header.pos + self.header.size]

    def rows(self) -> dict[int, Row]:
        """The decoded records by their offsets."""
        return _rows_of(self.record_set).get(self.header.pos, {})

    @property
    def is_abort(self) -> bool:
        """Return whether it is the marker of an aborted transaction."""
        return self.header.is_control and self.data[_MARKER_AT : _MARKER_AT + 2] == b"\0\0"


@lru_cache(maxsize=4)  # those of a captured and a delivered batch are read in turn
def _rows_of(record_set: bytes) -> dict[int, dict[int, Row]]:
    """The records of each batch, by its position."""
    found = decode_record_set(record_set)
    positions = [batch["pos"] for batch in found.batches]
    rows: dict[int, dict[int, Row]] = defaultdict(dict)
    for row in found.records:
        rows[positions[row["batch_index"]]][row["offset"]] = row
    return rows


def batches_of(data: bytes) -> list[Batch]:
    """The whole batches of a record set."""
    return [Batch(data, each) for each in headers(data) if not each.is_partial]


def digest_of(row: Row) -> int:
    """A hash of a record's key, value and headers; valid in this process.

    Offset, timestamp and producer do not change it.
    """
    pairs = tuple((one["key"], one["value"]) for one in row["headers"])
    return hash((row["key"], row["value"], pairs))


def have_same_content(one: bytes, other: bytes) -> bool:
    """Return whether two batches of magic 2 hold the same records; they may be compressed
    differently."""
    return one[_COUNT_AT:] == other[_COUNT_AT:] or _section(one) == _section(other)


def _section(batch: bytes) -> bytes | None:
    """The records of a whole batch of magic 2, uncompressed; None if they cannot be read."""
    codec, data = batch[_ATTRIBUTES_AT + 1] & _CODEC_MASK, batch[BATCH_HEADER_SIZE:]
    if codec == Codec.NONE:
        return data
    status, section = decompressed(codec, data, _LIMITS.batch_allowance(len(data)))
    return section if status == Status.OK else None


def content_digest(batch: bytes) -> int:
    """A hash of the records of a batch of magic 2, uncompressed; valid in this process."""
    return hash(_section(batch))


def has_append_time(batch: bytes) -> bool:
    """Return whether the broker set the times of a batch (magic 2)."""
    return bool(batch[_ATTRIBUTES_AT + 1] & _APPEND_TIME)


def _codec_of(batch: bytes) -> str:
    """The name of the compression of a batch of magic 2."""
    number = batch[_ATTRIBUTES_AT + 1] & _CODEC_MASK
    return CODEC_NAMES[number] if number < len(CODEC_NAMES) else str(number)


@dataclass(slots=True)
class LogRecords:
    """The records that answers have brought of one log, and their comparison with captured ones.

    batches: those of magic 2 by base offset, each as it came first. silent: record sets of Produce
    requests with acks 0. found: differences by step.
    """

    log: Log
    batches: dict[int, Batch] = field(default_factory=dict)
    silent: list[bytes] = field(default_factory=list)
    found: list[Contradiction] = field(default_factory=list)
    _bases: list[int] = field(default_factory=list)  # base offsets of the batches, ascending
    _old: dict[int, Row] = field(default_factory=dict)  # before magic 2
    # by the target's offset: digests of the captured and of another record there
    _replaced: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, batch: Batch) -> None:
        base = batch.header.base_offset
        if batch.header.magic != 2:
            self._old |= batch.rows()
        elif base not in self.batches:
            self.batches[base] = batch
            insort(self._bases, base)

    def _row(self, offset: int) -> Row | None:
        """The record at an offset, decoded; None if no answer has it."""
        place = bisect_right(self._bases, offset) - 1
        rows = self._old if place < 0 else self.batches[self._bases[place]].rows()
        return rows.get(offset, self._old.get(offset))

    # -- the comparison -------------------------------------------------------------------------

    def compare(self, step: int, captured: bytes, to_target: ToTarget) -> None:
        """Compare the records that the answer to a step should have brought. to_target: an offset
        of the other side."""
        lost: list[int] = []
        for batch in batches_of(captured):
            if batch.header.is_control:
                continue  # a marker comes some time after its transaction: where is no matter
            other = self.batches.get(to_target(self.log, batch.header.base_offset))
            if other is None or batch.header.magic != 2 or not self._is_same(step, batch, other):
                lost += self._compare_rows(step, batch, to_target)
        if lost:
            count = RecordCount(len(lost), min(lost))
            one = in_log(self.log, PLACE, count, NO_RECORDS, "no answer brings them")
            self.found.append((step, one))

    def _add(self, step: int, offset: int, name: str, c: Any, a: Any) -> None:
        if c != a:
            self.found.append((step, in_log(self.log, f"{PLACE}[].{name}", c, a, offset=offset)))

    def _is_same(self, step: int, captured: Batch, answered: Batch) -> bool:
        """Return whether two batches hold the same records byte for byte; notes what else
        differs: compression, who sets the times."""
        c, a, offset = captured.data, answered.data, captured.header.base_offset
        if answered.header.is_control:
            return False
        types = [_TIMESTAMP_TYPES[has_append_time(each)] for each in (c, a)]
        self._add(step, offset, "compression", _codec_of(c), _codec_of(a))
        self._add(step, offset, "timestamp_type", *types)
        have_times = types == _TIMESTAMP_TYPES[:1] * 2
        are_equal = c[_TIMES_AT:_PRODUCER_AT] == a[_TIMES_AT:_PRODUCER_AT] or not have_times
        return are_equal and c[_COUNT_AT:] == a[_COUNT_AT:]

    def _compare_rows(self, step: int, captured: Batch, to_target: ToTarget) -> Iterator[int]:
        """Compare record by record. Yields the offsets of those that no answer brings."""
        for row in captured.rows().values():
            offset = to_target(self.log, row["offset"])
            other = self._row(offset)
            if other is None:
                yield row["offset"]
            elif other["control_type"] is None:
                have_times = row["timestamp_type"] == other["timestamp_type"] == "CreateTime"
                for name in _OF_ROWS if have_times else _OF_ROWS[:-1]:
                    self._add(step, row["offset"], name, row[name], other[name])
                digests = digest_of(row), digest_of(other)
                if digests[0] != digests[1]:
                    self._replaced[offset] = digests

    def allow_reordered(self) -> None:
        """Allow records that only changed their places, if Produce requests with acks 0 wrote them:
        those in flight at the same time have no order."""
        pairs = self._replaced.values()
        captured, answered = Counter(c for c, _ in pairs), Counter(a for _, a in pairs)
        if not captured or captured != answered:
            return
        rows = (
            row
            for data in self.silent
            for batch in batches_of(data)
            for row in batch.rows().values()
        )
        if captured.keys() <= set(map(digest_of, rows)):
            self.found = [
                (step, replace(one, rule=_REORDERED) if one.place.endswith(_OF_ROWS) else one)
                for step, one in self.found
            ]
