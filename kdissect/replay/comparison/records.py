"""Compares the records of Fetch responses one by one, in whichever answer a record comes.

A Fetch returns the records that the log has at that moment. An answer of the target may have fewer
or more records than the captured response. So records are compared by their offset in the log. At
the end of the run, `finish` searches all answers for captured records that their own answer lacks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kdissect.replay.batch_headers import BATCH_HEADER_SIZE, BatchHeader, headers, is_sealed
from kdissect.replay.translation.offsets import Log

_ATTRIBUTES_AT, _TIMES_AT, _PRODUCER_AT, _COUNT_AT = 21, 27, 43, 57
_LOG_APPEND_TIME = 8
_SHOWN = 60

Found = tuple[str, str, str, str]  # path after "records", captured, answered, note
Row = dict[str, Any]


@dataclass(slots=True)
class _Missing:
    """Records that one answer did not bring: {target offset: digest of the captured record}."""

    number: int
    path: str
    log: Log
    digests: dict[int, int]


@dataclass(slots=True)
class RecordLedger:
    """The records of all answers, by log and target offset."""

    to_target: Callable[[Log, int], int]
    producer: Callable[[int, int], tuple[int, int] | None]
    _seen: dict[Log, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    _extra: dict[tuple[Log, int], int] = field(default_factory=dict)
    _missing: list[_Missing] = field(default_factory=list)
    # by log and target offset: digests of the captured and of another record there, and where
    _replaced: dict[Log, dict[int, tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _replaced_at: dict[tuple[int, str], Log] = field(default_factory=dict)

    def compare(
        self, number: int, path: str, log: Log, captured: bytes, answered: bytes
    ) -> tuple[list[Found], bool]:
        """Differences of the records that both have, and whether one brings more or fewer."""
        differences: list[Found] = []
        captured_batches = [batch for batch in headers(captured) if not batch.is_partial]
        answered_batches = [batch for batch in headers(answered) if not batch.is_partial]
        for batch in answered_batches:
            self._seen[log] += _offset_ranges(answered, batch)
        by_offset = {batch.base_offset: batch for batch in answered_batches if batch.magic == 2}
        captured_left, used = [], set()
        for batch in captured_batches:
            other = None
            if batch.magic == 2:
                other = by_offset.get(self.to_target(log, batch.base_offset))
            if other is not None and self._same_batch(
                batch, captured, other, answered, differences
            ):
                used.add(other.pos)
            else:
                captured_left.append(batch)
        answered_left = [batch for batch in answered_batches if batch.pos not in used]
        if not captured_left and not answered_left:
            return differences, False
        return differences, self._by_record(
            number, path, log, (captured, captured_left), (answered, answered_left), differences
        )

    def _same_batch(
        self,
        c: BatchHeader,
        captured: bytes,
        a: BatchHeader,
        answered: bytes,
        differences: list[Found],
    ) -> bool:
        """Return whether two batches hold the same records byte for byte; notes what else
        differs."""
        captured_batch = captured[c.pos : c.pos + c.size]
        answered_batch = answered[a.pos : a.pos + a.size]
        is_own = c.is_control and a.is_control  # markers have the time of their own transaction
        if captured_batch[_COUNT_AT:] != answered_batch[_COUNT_AT:]:
            if not is_own:
                return False
            if (
                captured_batch[:BATCH_HEADER_SIZE][_COUNT_AT:]
                != answered_batch[:BATCH_HEADER_SIZE][_COUNT_AT:]
            ):
                return False
            if _control_type(captured_batch) != _control_type(answered_batch):
                return False
        attributes = (
            captured_batch[_ATTRIBUTES_AT:_TIMES_AT],
            answered_batch[_ATTRIBUTES_AT:_TIMES_AT],
        )
        if attributes[0] != attributes[1]:
            return False
        is_append_time = bool(captured_batch[_ATTRIBUTES_AT + 1] & _LOG_APPEND_TIME)
        if not is_own and not is_append_time:
            if captured_batch[_TIMES_AT:_PRODUCER_AT] != answered_batch[_TIMES_AT:_PRODUCER_AT]:
                return False
        where = f"[offset {c.base_offset}]"
        if is_sealed(captured, c) and not is_sealed(answered, a):
            differences.append((f"{where}.crc", "right", "wrong", "the batch is damaged"))
        known = None if is_own else self.producer(c.producer_id, c.producer_epoch)
        if known is not None and known != (a.producer_id, a.producer_epoch):
            said = f"{a.producer_id} epoch {a.producer_epoch}"
            meant = f"{c.producer_id} epoch {c.producer_epoch}"
            note = f"the target calls it {known[0]} epoch {known[1]}"
            differences.append((f"{where}.producer_id", meant, said, note))
        return True

    def _by_record(
        self,
        number: int,
        path: str,
        log: Log,
        captured: tuple[bytes, list[BatchHeader]],
        answered: tuple[bytes, list[BatchHeader]],
        differences: list[Found],
    ) -> bool:
        captured_records = {
            self.to_target(log, record["offset"]): record for record in _records(*captured, None)
        }
        answered_records = {record["offset"]: record for record in _records(*answered, differences)}
        for offset, record in captured_records.items():
            other = answered_records.get(offset)
            if other is None or self._are_of_two_producers(record, other):
                continue
            if record["is_control"] == other["is_control"]:
                differences += _record_differences(record, other)
                digests = _digest(record), _digest(other)
                if digests[0] != digests[1]:
                    self._replaced[log][offset] = digests
                    self._replaced_at[number, f"{path}[offset {record['offset']}]"] = log
        # Markers come some time after their transactions: where exactly is no matter.
        missing = {
            offset: _digest(record)
            for offset, record in captured_records.items()
            if not record["is_control"]
            and (offset not in answered_records or answered_records[offset]["is_control"])
        }
        extra = [
            offset
            for offset, record in answered_records.items()
            if not record["is_control"]
            and (offset not in captured_records or captured_records[offset]["is_control"])
        ]
        for offset in extra:
            self._extra[log, offset] = _digest(answered_records[offset])
        if missing:
            self._missing.append(_Missing(number, path, log, missing))
        return bool(missing or extra)

    def _are_of_two_producers(self, captured: Row, answered: Row) -> bool:
        """Return whether two markers end transactions of two producers: their order may change."""
        known = self.producer(*captured["producer"]) if captured["is_control"] else None
        return known is not None and known[0] != answered["producer"][0]

    def forget_missing(self) -> None:
        """Before the records of some answers are compared once more."""
        self._missing.clear()

    def reordered(self, unacknowledged: Callable[[Log], set[int]]) -> set[tuple[int, str]]:
        """(step number, path of a record) of records that only changed their places. Call it after
        `finish`. unacknowledged: digests of what Produce requests with acks 0 wrote to a log; those
        in flight at the same time have no order."""
        logs = set()
        for log, replaced in self._replaced.items():
            captured, answered = zip(*replaced.values(), strict=True)
            if Counter(captured) == Counter(answered) and set(captured) <= unacknowledged(log):
                logs.add(log)
        return {where for where, log in self._replaced_at.items() if log in logs}

    def finish(self) -> dict[int, list[tuple[str, int, int, bool]]]:
        """By step number: (path, records that no answer brought, first of them, are some other
        records than the captured ones) of those that had fewer records."""
        merged = {log: merged_ranges(ranges) for log, ranges in self._seen.items()}
        result: dict[int, list[tuple[str, int, int, bool]]] = defaultdict(list)
        for gap in self._missing:
            ranges = merged.get(gap.log, [])
            lost = [offset for offset in gap.digests if not _inside(ranges, offset)]
            changed = [
                offset
                for offset, digest in gap.digests.items()
                if self._extra.get((gap.log, offset), digest) != digest
            ]
            for offset in changed:
                self._replaced[gap.log][offset] = (
                    gap.digests[offset], self._extra[gap.log, offset]
                )  # fmt: skip
            if changed and not lost:
                self._replaced_at[gap.number, gap.path] = gap.log
            bad = lost or changed
            result[gap.number].append(
                (gap.path, len(bad), min(bad, default=-1), bool(changed and not lost))
            )
        return result


def _offset_ranges(data: bytes, batch: BatchHeader) -> list[tuple[int, int]]:
    """(first, last) of the offsets that a batch has records of: a compacted one leaves some out."""
    if batch.record_count == batch.last_offset - batch.base_offset + 1:
        return [(batch.base_offset, batch.last_offset)]
    return merged_ranges((row["offset"], row["offset"]) for row in _records(data, [batch], None))


def merged_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges (first, last) in order, those that meet as one."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _inside(ranges: list[tuple[int, int]], offset: int) -> bool:
    place = bisect_right(ranges, (offset, 1 << 63)) - 1
    return place >= 0 and ranges[place][0] <= offset <= ranges[place][1]


def _control_type(batch: bytes) -> bytes:
    """The key of the first record of a control batch: it names the marker."""
    return _marker(batch)[0]


def _marker(batch: bytes) -> tuple[bytes, bytes]:
    """Key and value of the first record of a control batch."""
    for row in _records(batch, list(headers(batch)), None):
        return bytes(row["key"] or b""), bytes(row["value"] or b"")
    return b"", b""


def coordinator_epoch(batch: bytes) -> int:
    """The coordinator's epoch in a transaction marker (EndTxnMarker: version, epoch); -1 if the
    marker has none."""
    value = _marker(batch)[1][2:6]
    return int.from_bytes(value, "big", signed=True) if len(value) == 4 else -1


def is_abort_marker(batch: bytes) -> bool:
    """Return whether a control batch ends an aborted transaction (its key is version, type: 0
    abort)."""
    return _control_type(batch)[2:4] == b"\0\0"


def _records(data: bytes, batches: list[BatchHeader], faults: list[Found] | None) -> list[Row]:
    """The records of some batches; what cannot be read is a difference if `faults` is given."""
    from kdissect.codec.record_codec import decode_record_set

    rows: list[Row] = []
    for batch in batches:
        decoded = decode_record_set(data[batch.pos : batch.pos + batch.size])
        own = {
            "is_control": batch.is_control,
            "producer": (batch.producer_id, batch.producer_epoch),
        }
        rows += [{**row, **own} for row in decoded.records]
        if decoded.faults and faults is not None:
            status = decoded.faults[0][1]
            note = "the batch cannot be read" if not decoded.records else "the batch is damaged"
            faults.append((f"[offset {batch.base_offset}]", "right", status.name.lower(), note))
    return rows


def _record_differences(captured: Row, answered: Row) -> list[Found]:
    where = f"[offset {captured['offset']}]"
    names = ["control_type"] if captured["is_control"] else ["key", "value", "headers"]
    if captured["timestamp_type"] == answered["timestamp_type"] == "CreateTime":
        names += [] if captured["is_control"] else ["timestamp_ms"]
    elif not captured["is_control"]:
        names.append("timestamp_type")
    return [
        (f"{where}.{name}", _shown(captured[name]), _shown(answered[name]), "")
        for name in names
        if captured[name] != answered[name]
    ]


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        text = repr(value[:_SHOWN])[1:]
        return text if len(value) <= _SHOWN else f"{text} and {len(value) - _SHOWN} bytes more"
    if isinstance(value, list):
        pairs = (f"{one['key']}={_shown(one['value'])}" for one in value)
        return "[" + ", ".join(pairs) + "]"
    return "null" if value is None else str(value)


def digests_of(data: bytes) -> set[int]:
    """One for each record of a record set (in this process)."""
    return {_digest(row) for row in _records(data, list(headers(data)), None)}


def _digest(record: Row) -> int:
    """A hash of a record's key, value and headers (markers: of their type); valid in this process.

    Offset, timestamp and producer do not change it.
    """
    if record["is_control"]:
        return hash(("control", record["control_type"]))
    pairs = tuple((one["key"], one["value"]) for one in record["headers"])
    return hash((record["key"], record["value"], pairs))
