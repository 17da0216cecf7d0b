"""Offsets of the capture and of the target, per partition."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field

_CAPTURED, EARLIEST, RELATIVE = "captured", "earliest", "relative"
MODES = (_CAPTURED, EARLIEST, RELATIVE)

FOREVER_OFFSET = 1 << 63  # beyond any offset
_UNKNOWN_OFFSET = FOREVER_OFFSET - 1  # the high watermark of a Fetch that knows none (KIP-1166)

Log = tuple[str, int]  # the capture's name of a topic, partition


@dataclass(slots=True)
class _LogOffsets:
    captured_start: int = -1  # first log start offset in the capture
    first_fetched: int = -1  # smallest offset that the capture fetched
    target_start: int = -1
    bases: list[int] = field(default_factory=list)  # captured base offsets, ascending
    shifts: dict[int, int] = field(default_factory=dict)  # captured base -> target minus captured
    by_target: list[tuple[int, int]] = field(default_factory=list)  # target base, captured base
    is_fresh: bool = False  # nothing was in it when the replay began to write
    is_unsure: bool = False  # a Produce with acks 0 came since: no answer says what became of it


class OffsetMap:
    """Maps offsets by one of three modes.

    captured: offsets stay as they are.
    earliest: the first offset that the capture fetched from a partition becomes the target's
    earliest.
    relative: an offset keeps its distance to the last batch before it that the replay produced (or
    to the first one). If there is no such batch, it keeps its distance to the start of the log.
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"offsets: {mode!r} is none of {', '.join(MODES)}")
        self.mode = mode
        self._logs: dict[Log, _LogOffsets] = {}

    def _of(self, log: Log) -> _LogOffsets:
        found = self._logs.get(log)
        if found is None:
            found = self._logs[log] = _LogOffsets()
        return found

    def add_captured(self, log: Log, *, start: int = -1, fetched: int = -1) -> None:
        """Add captured offsets, before the run: the first log start and the lowest fetch offset."""
        entry = self._of(log)
        if start >= 0 and entry.captured_start < 0:
            entry.captured_start = start
        if fetched >= 0 and (entry.first_fetched < 0 or fetched < entry.first_fetched):
            entry.first_fetched = fetched

    def target_starts(self, log: Log, start: int) -> None:
        """Set the target's earliest offset of a log, unless an earlier call did."""
        entry = self._of(log)
        if entry.target_start < 0 <= start:
            entry.target_start = start

    def created(self, topic: str) -> None:
        """Note that the replay created this topic, so its logs are empty and begin at offset 0."""
        for log in [log for log in self._logs if log[0] == topic]:
            captured_start = self._logs[log].captured_start
            self._logs[log] = _LogOffsets(
                captured_start, self._logs[log].first_fetched, target_start=0, is_fresh=True
            )

    def produced(self, log: Log, captured: int, target: int) -> None:
        """The same batch has these base offsets in the capture and at the target."""
        if captured < 0 or target < 0:
            return
        entry = self._of(log)
        if captured not in entry.shifts:
            insort(entry.bases, captured)
        entry.shifts[captured] = target - captured
        entry.by_target.clear()
        entry.is_unsure = False

    def written_silently(self, log: Log) -> None:
        """A Produce with acks 0 was sent: the captured broker may have lost it, and the target not.
        The next Produce that both brokers acknowledge tells."""
        self._of(log).is_unsure = True

    def expect(self, log: Log, captured: int) -> int | None:
        """The target's base offset for a batch with this captured base offset; None if unknown."""
        entry = self._logs.get(log)
        if captured < 0 or (entry is not None and entry.is_unsure):
            return None
        if entry is None or not entry.bases:
            if entry is not None and entry.is_fresh and entry.captured_start >= 0:
                return captured - entry.captured_start
            return captured if self.mode == _CAPTURED else None
        place = max(0, bisect_right(entry.bases, captured) - 1)
        return captured + entry.shifts[entry.bases[place]]

    def to_target(self, log: Log, offset: int) -> int:
        """The target's offset of a captured one; negative ones have a meaning of their own."""
        if offset < 0 or offset == _UNKNOWN_OFFSET or self.mode == _CAPTURED:
            return offset
        return max(0, offset + self._shift(log, offset))

    def to_capture(self, log: Log, offset: int) -> int:
        """The captured offset of one of the target's: by the last batch before it there."""
        entry = self._logs.get(log)
        if offset < 0 or entry is None or self.mode == _CAPTURED:
            return offset
        if self.mode == EARLIEST or not entry.bases:
            return max(0, offset - self._shift(log, offset))
        if not entry.by_target:
            entry.by_target = sorted((base + entry.shifts[base], base) for base in entry.bases)
        place = max(0, bisect_right(entry.by_target, (offset, FOREVER_OFFSET)) - 1)
        target_base, captured_base = entry.by_target[place]
        return max(0, captured_base + offset - target_base)

    def _shift(self, log: Log, offset: int) -> int:
        entry = self._logs.get(log)
        if entry is None:
            return 0
        if self.mode == EARLIEST:
            if entry.target_start < 0 or entry.first_fetched < 0:
                return 0
            return entry.target_start - entry.first_fetched
        if entry.bases:
            place = max(0, bisect_right(entry.bases, offset) - 1)
            return entry.shifts[entry.bases[place]]
        if entry.target_start < 0 or entry.captured_start < 0:
            return 0
        return entry.target_start - entry.captured_start
