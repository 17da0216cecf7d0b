"""Offsets of the capture and of the target, per partition."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
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
    batches: list[tuple[int, int]] = field(default_factory=list)  # captured, target base, ascending
    by_target: list[tuple[int, int]] = field(default_factory=list)  # target, captured base
    is_fresh: bool = False  # nothing was in it when the replay began to write
    is_unsure: bool = False  # a Produce with acks 0 came since: no answer says what became of it

    def distance(self, mode: str) -> int:
        """Target's offsets minus captured ones, by the start of the log; 0 if it is unknown."""
        start = self.first_fetched if mode == EARLIEST else self.captured_start
        return 0 if self.target_start < 0 or start < 0 else self.target_start - start


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
        self._logs: defaultdict[Log, _LogOffsets] = defaultdict(_LogOffsets)

    def add_captured(self, log: Log, *, start: int = -1, fetched: int = -1) -> None:
        """Add captured offsets, before the run: the first log start and the lowest fetch offset."""
        entry = self._logs[log]
        if entry.captured_start < 0:
            entry.captured_start = start
        if fetched >= 0 and (entry.first_fetched < 0 or fetched < entry.first_fetched):
            entry.first_fetched = fetched

    def target_starts(self, log: Log, start: int) -> None:
        """Set the target's earliest offset of a log, unless an earlier call did."""
        entry = self._logs[log]
        if entry.target_start < 0:
            entry.target_start = start

    def created(self, topic: str) -> None:
        """Note that the replay created this topic, so its logs are empty and begin at offset 0."""
        for log, entry in self._logs.items():
            if log[0] == topic:
                self._logs[log] = _LogOffsets(
                    entry.captured_start, entry.first_fetched, target_start=0, is_fresh=True
                )

    def produced(self, log: Log, captured: int, target: int) -> None:
        """The same batch has these base offsets in the capture and at the target."""
        if captured < 0 or target < 0:
            return
        entry = self._logs[log]
        place = bisect_left(entry.batches, (captured,))
        known = entry.batches[place : place + 1]
        is_known = bool(known) and known[0][0] == captured
        entry.batches[place : place + is_known] = [(captured, target)]
        entry.by_target.clear()
        entry.is_unsure = False

    def written_silently(self, log: Log) -> None:
        """A Produce with acks 0 was sent: the captured broker may have lost it, and the target not.
        The next Produce that both brokers acknowledge tells."""
        self._logs[log].is_unsure = True

    def expect(self, log: Log, captured: int) -> int | None:
        """The target's base offset for a batch with this captured base offset; None if unknown."""
        entry = self._logs[log]
        if captured < 0 or entry.is_unsure:
            return None
        if entry.batches:
            return _moved(entry.batches, captured)
        if entry.is_fresh and entry.captured_start >= 0:
            return captured - entry.captured_start
        return captured if self.mode == _CAPTURED else None

    def to_target(self, log: Log, offset: int) -> int:
        """The target's offset of a captured one; negative ones have a meaning of their own."""
        if offset < 0 or offset == _UNKNOWN_OFFSET or self.mode == _CAPTURED:
            return offset
        entry = self._logs[log]
        if entry.batches and self.mode == RELATIVE:
            return max(0, _moved(entry.batches, offset))
        return max(0, offset + entry.distance(self.mode))

    def to_capture(self, log: Log, offset: int) -> int:
        """The captured offset of one of the target's: by the last batch before it there."""
        if offset < 0 or self.mode == _CAPTURED:
            return offset
        entry = self._logs[log]
        if self.mode == EARLIEST or not entry.batches:
            return max(0, offset - entry.distance(self.mode))
        if not entry.by_target:
            entry.by_target = sorted((target, captured) for captured, target in entry.batches)
        return max(0, _moved(entry.by_target, offset))


def _moved(bases: list[tuple[int, int]], offset: int) -> int:
    """The offset on the other side. bases: base offsets of batches, on this side and the other."""
    here, there = bases[max(0, bisect_right(bases, (offset, FOREVER_OFFSET)) - 1)]
    return there + offset - here
