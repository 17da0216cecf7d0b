"""Compares the records of Fetch responses one by one, in whichever answer a record comes.

A Fetch returns the records that the log has at that moment. An answer of the target may have fewer
or more records than the captured response. So records are compared by their offset in the log. At
the end of the run, `finish` searches all answers for captured records that their own answer lacks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kdissect.codec.compression import CODEC_NAMES
from kdissect.codec.record_codec import decode_record_set, record_section
from kdissect.replay.batch_headers import BATCH_HEADER_SIZE, BatchHeader, headers
from kdissect.replay.model import Difference
from kdissect.replay.translation.offsets import Log
from kdissect.text import plural

PLACE = "responses[].partitions[].records"
_ATTRIBUTES_AT, _TIMES_AT, _PRODUCER_AT, _COUNT_AT = 21, 27, 43, 57
_CODEC_MASK, _APPEND_TIME = 7, 8
_REORDERED = "unacknowledged-order"  # the rule for records of Produce requests with acks 0

Row = dict[str, Any]
Ranges = list[tuple[int, int]]


class RecordCount(NamedTuple):
    """A number of records of a log, from an offset on."""

    records: int
    first: int

    def __str__(self) -> str:
        if not self.records:
            return "no records"
        return f"{plural(self.records, 'record')} from offset {self.first}"


# -- batches --------------------------------------------------------------------------------------


def whole_batches(data: bytes) -> list[BatchHeader]:
    return [each for each in headers(data) if not each.is_partial]


def rows_of(data: bytes, batches: Iterable[BatchHeader]) -> list[Row]:
    """The decoded records of some batches of a record set, with the producer of each."""
    rows: list[Row] = []
    for batch in batches:
        producer = batch.producer_id, batch.producer_epoch
        decoded = decode_record_set(data[batch.pos : batch.pos + batch.size])
        own = {"is_control": batch.is_control, "producer": producer}
        rows += [{**row, **own} for row in decoded.records]
    return rows


def digest_of(row: Row) -> int:
    """A hash of a record's key, value and headers (markers: of their type); valid in this process.

    Offset, timestamp and producer do not change it.
    """
    if row["is_control"]:
        return hash(("control", row["control_type"]))
    pairs = tuple((one["key"], one["value"]) for one in row["headers"])
    return hash((row["key"], row["value"], pairs))


def have_same_content(one: bytes, other: bytes) -> bool:
    """Return whether two batches of magic 2 hold the same keys, values and headers, in the same
    order; they may be compressed differently."""
    if one[_COUNT_AT:] == other[_COUNT_AT:] or record_section(one) == record_section(other):
        return True
    return [digest_of(row) for row in rows_of(one, whole_batches(one))] == [
        digest_of(row) for row in rows_of(other, whole_batches(other))
    ]


def content_digest(batch: bytes) -> int:
    """A hash of the records of a batch of magic 2, uncompressed; valid in this process."""
    return hash(record_section(batch))


def codec_of(batch: bytes) -> str:
    """The name of the compression of a batch of magic 2."""
    number = batch[_ATTRIBUTES_AT + 1] & _CODEC_MASK
    return CODEC_NAMES[number] if number < len(CODEC_NAMES) else str(number)


def has_append_time(batch: bytes) -> bool:
    """Return whether the broker set the times of a batch (magic 2)."""
    return bool(batch[_ATTRIBUTES_AT + 1] & _APPEND_TIME)


def marker_type(data: bytes, batch: BatchHeader) -> str:
    """``commit`` or ``abort`` of a control batch; other words for other control records."""
    return next((str(row["control_type"]) for row in rows_of(data, [batch])), "")


def merged_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges (first, last) in order, those that meet as one."""
    merged: Ranges = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def is_inside(ranges: Ranges, offset: int) -> bool:
    place = bisect_right(ranges, (offset, 1 << 63)) - 1
    return place >= 0 and ranges[place][0] <= offset <= ranges[place][1]


def _offset_ranges(data: bytes, batch: BatchHeader) -> Ranges:
    """(first, last) of the offsets that a batch has records of: a compacted one leaves some out."""
    if batch.record_count == batch.last_offset - batch.base_offset + 1:
        return [(batch.base_offset, batch.last_offset)]
    return merged_ranges((row["offset"], row["offset"]) for row in rows_of(data, [batch]))


# -- the ledger -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Missing:
    """Records that one answer did not bring: {target offset: digest of the captured record}."""

    step: int
    keys: tuple[str, ...]
    log: Log
    digests: dict[int, int]


@dataclass(slots=True)
class RecordLedger:
    """The records of all answers, by log and offset there. to_target: an offset of the other side;
    producer: its producer ids. by_step: differences of records that both sides have."""

    to_target: Callable[[Log, int], int]
    producer: Callable[[int, int], tuple[int, int] | None]
    by_step: dict[int, list[Difference]] = field(default_factory=lambda: defaultdict(list))
    _seen: dict[Log, Ranges] = field(default_factory=lambda: defaultdict(list))
    _extra: dict[tuple[Log, int], int] = field(default_factory=dict)
    _missing: list[_Missing] = field(default_factory=list)
    # by log and target offset: digests of the captured and of another record there
    _replaced: dict[Log, dict[int, tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def compare(self, step: int, log: Log, captured: bytes, answered: bytes) -> None:
        """Compare the records of a partition in the answer to a step."""
        batches = whole_batches(answered)
        for batch in batches:
            self._seen[log] += _offset_ranges(answered, batch)
        by_offset = {batch.base_offset: batch for batch in batches if batch.magic == 2}
        captured_left, used = [], set()
        for batch in whole_batches(captured):
            other = None
            if batch.magic == 2:
                other = by_offset.get(self.to_target(log, batch.base_offset))
            if other is not None and self._is_same_batch(
                step, log, captured[batch.pos : batch.pos + batch.size], batch,
                answered[other.pos : other.pos + other.size], other,
            ):  # fmt: skip
                used.add(other.pos)
            else:
                captured_left.append(batch)
        answered_left = [batch for batch in batches if batch.pos not in used]
        if captured_left or answered_left:
            self._by_record(step, log, rows_of(captured, captured_left),
                            rows_of(answered, answered_left))  # fmt: skip

    def _add(self, step: int, log: Log, offset: int, name: str, c: Any, a: Any) -> None:
        keys = (log[0], str(log[1]), f"offset {offset}")
        self.by_step[step].append(Difference(f"{PLACE}[].{name}", keys, c, a))

    def _is_same_batch(
        self, step: int, log: Log, captured: bytes, c: BatchHeader, answered: bytes, a: BatchHeader
    ) -> bool:
        """Return whether two batches hold the same records byte for byte; notes what else
        differs."""
        is_own = c.is_control and a.is_control  # markers have the time of their own transaction
        if is_own:
            ours = captured[_COUNT_AT:BATCH_HEADER_SIZE] == answered[_COUNT_AT:BATCH_HEADER_SIZE]
            kinds = (marker_type(each, next(headers(each))) for each in (captured, answered))
            return ours and len(set(kinds)) == 1
        self._compare_form(step, log, c.base_offset, captured, answered)
        if captured[_COUNT_AT:] != answered[_COUNT_AT:] or c.is_control != a.is_control:
            return False
        if not (has_append_time(captured) or has_append_time(answered)):
            if captured[_TIMES_AT:_PRODUCER_AT] != answered[_TIMES_AT:_PRODUCER_AT]:
                return False
        known = self.producer(c.producer_id, c.producer_epoch)
        if known is not None and known != (a.producer_id, a.producer_epoch):
            self._add(
                step, log, c.base_offset, "producer", known, (a.producer_id, a.producer_epoch)
            )
        return True

    def _compare_form(
        self, step: int, log: Log, offset: int, captured: bytes, answered: bytes
    ) -> None:
        """Compare how two batches at one place are written: compression, and who sets the times."""
        codecs = codec_of(captured), codec_of(answered)
        if codecs[0] != codecs[1]:
            self._add(step, log, offset, "compression", *codecs)
        if has_append_time(captured) != has_append_time(answered):
            words = ("LogAppendTime" if has_append_time(each) else "CreateTime"
                     for each in (captured, answered))  # fmt: skip
            self._add(step, log, offset, "timestamp_type", *words)

    def _by_record(self, step: int, log: Log, captured: list[Row], answered: list[Row]) -> None:
        captured_records = {self.to_target(log, row["offset"]): row for row in captured}
        answered_records = {row["offset"]: row for row in answered}
        for offset, row in captured_records.items():
            other = answered_records.get(offset)
            if other is None or row["is_control"] != other["is_control"]:
                continue
            if row["is_control"] and self._are_of_two_producers(row, other):
                continue
            self._compare_rows(step, log, row, other)
            digests = digest_of(row), digest_of(other)
            if digests[0] != digests[1]:
                self._replaced[log][offset] = digests
        # Markers come some time after their transactions: where exactly is no matter.
        missing = {
            offset: digest_of(row)
            for offset, row in captured_records.items()
            if not row["is_control"]
            and (offset not in answered_records or answered_records[offset]["is_control"])
        }
        for offset, row in answered_records.items():
            known = captured_records.get(offset)
            if not row["is_control"] and (known is None or known["is_control"]):
                self._extra[log, offset] = digest_of(row)
        if missing:
            self._missing.append(_Missing(step, (log[0], str(log[1])), log, missing))

    def _are_of_two_producers(self, captured: Row, answered: Row) -> bool:
        """Return whether two markers end transactions of two producers: their order may change."""
        known = self.producer(*captured["producer"])
        return known is not None and known[0] != answered["producer"][0]

    def _compare_rows(self, step: int, log: Log, captured: Row, answered: Row) -> None:
        names = ["control_type"] if captured["is_control"] else ["key", "value", "headers"]
        if captured["timestamp_type"] == answered["timestamp_type"] == "CreateTime":
            names += [] if captured["is_control"] else ["timestamp_ms"]
        for name in names:
            if captured[name] != answered[name]:
                self._add(step, log, captured["offset"], name, captured[name], answered[name])

    def finish(self, unacknowledged: Callable[[Log], set[int]]) -> dict[int, list[Difference]]:
        """All differences by step. unacknowledged: digests of what Produce requests with acks 0
        wrote to a log: those in flight at the same time have no order."""
        merged = {log: merged_ranges(ranges) for log, ranges in self._seen.items()}
        for gap in self._missing:
            ranges = merged.get(gap.log, [])
            lost = [offset for offset in gap.digests if not is_inside(ranges, offset)]
            changed = {
                offset: (digest, self._extra.get((gap.log, offset), digest))
                for offset, digest in gap.digests.items()
                if self._extra.get((gap.log, offset), digest) != digest
            }
            self._replaced[gap.log].update(changed)
            if lost:
                count = RecordCount(len(lost), min(lost))
                note = "no answer brings them"
            elif changed:
                count = RecordCount(len(changed), min(changed))
                note = "other records are at their offsets"
            else:
                continue
            self.by_step[gap.step].append(
                Difference(PLACE, gap.keys, count, RecordCount(0, -1), note=note)
            )
        self._allow_reordered(unacknowledged)
        return self.by_step

    def _allow_reordered(self, unacknowledged: Callable[[Log], set[int]]) -> None:
        """Allow records that only changed their places, where no response says where they are."""
        logs = set()
        for log, replaced in self._replaced.items():
            captured, answered = zip(*replaced.values(), strict=True) if replaced else ((), ())
            if Counter(captured) == Counter(answered) and set(captured) <= unacknowledged(log):
                logs.add((log[0], str(log[1])))
        for step, differences in self.by_step.items():
            self.by_step[step] = [
                replace(each, rule=_REORDERED) if self._is_moved(each, logs) else each
                for each in differences
            ]

    @staticmethod
    def _is_moved(one: Difference, logs: set[tuple[str, str]]) -> bool:
        is_lost = one.note.startswith("no answer")
        return one.keys[:2] in logs and not is_lost and not one.place.endswith("producer")
