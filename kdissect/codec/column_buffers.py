"""Buffers that the column kernel fills, reused between calls.

A page fault on fresh memory costs about as much as decoding into the page. So builders return to a
pool, and results are copied out of them.
"""

from __future__ import annotations

import ctypes
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdissect.arrays import address_of
from kdissect.codec.column_kernel import (
    FULL_MARKS,
    FULL_TAGS,
    INDICES,
    MARK,
    OPEN,
    STATE,
    UNKNOWN_TAG,
    Columns,
)
from kdissect.protocol.column_plan import ColumnPlan

FIRST_ROOM = 256  # rows
POOLED_BYTES = 256 << 20  # bytes of all pooled builders; beyond it the oldest are freed


def writable(buf: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same bytes as kernels take them: writable, or they are compiled twice; never empty."""
    if not len(buf):
        return np.zeros(1, np.uint8)
    if buf.flags.writeable:
        return buf
    memory: Any = (ctypes.c_uint8 * len(buf)).from_address(address_of(buf))
    memory.owner = buf  # an alias lives as long as its bytes
    return np.frombuffer(memory, np.uint8)


class Builders:
    """The buffers of a plan: `data` (uint8[rows * width]) and `valid` (uint8[rows]) per column."""

    def __init__(self, plan: ColumnPlan) -> None:
        if any(path.count("[]") > INDICES for path in plan.paths):
            raise ValueError(f"a plan with arrays more than {INDICES} deep in one another")
        self.plan = plan
        self.byte_count = 0
        levels = len(plan.level_first) - 1
        columns = len(plan.column_width)
        self.data: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)] * columns
        self.valid: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)] * columns
        self.data_at = np.zeros(columns, np.int64)
        self.valid_at = np.zeros(columns, np.int64)
        self.room = np.zeros(levels, np.int64)
        self.count = np.zeros(levels, np.int64)
        saved = np.zeros(levels, np.int64)
        self.columns = Columns(
            self.data_at, self.valid_at, plan.level_first, self.room, self.count, saved
        )
        self.stack = np.zeros(plan.depth + 1, OPEN)
        self.state = np.zeros(1, STATE)
        self.marks: NDArray[np.void] = np.empty(0, MARK)
        self.unknown: NDArray[np.void] = np.empty(0, UNKNOWN_TAG)
        self._grow_marks(FIRST_ROOM)
        self._grow_unknown(16)
        for level in range(levels):
            self._grow_level(level, FIRST_ROOM)

    def prepare(self, rows: int) -> None:
        """Make room for `rows` messages."""
        if rows > self.room[0]:
            self._grow_level(0, max(rows, int(self.room[0]) * 2))
        self.state["header_count"][0] = self.plan.header_count

    def grow(self) -> None:
        """Make the room that the kernel requested, at least twice the current one."""
        full, needed = int(self.state["full"][0]), int(self.state["needed"][0])
        if full == FULL_MARKS:
            self._grow_marks(max(needed, 2 * len(self.marks)))
        elif full == FULL_TAGS:
            self._grow_unknown(max(needed, 2 * len(self.unknown)))
        else:
            self._grow_level(full, max(needed, 2 * int(self.room[full])))

    def _grow_level(self, level: int, rows: int) -> None:
        used = int(self.count[level])
        for column in range(self.plan.level_first[level], self.plan.level_first[level + 1]):
            width = int(self.plan.column_width[column])
            data = np.empty(rows * width, np.uint8)
            data[: used * width] = self.data[column][: used * width]
            valid = np.zeros(rows, np.uint8)
            valid[:used] = self.valid[column][:used]
            self.data[column], self.valid[column] = data, valid
            self.data_at[column], self.valid_at[column] = address_of(data), address_of(valid)
        self.room[level] = rows

    def _grow_marks(self, number: int) -> None:
        grown = np.zeros(number, MARK)
        used = int(self.state["marks"][0])
        grown[:used] = self.marks[:used]
        self.marks = grown
        self.state["marks_room"][0], self.state["marks_at"][0] = number, address_of(grown)

    def _grow_unknown(self, number: int) -> None:
        grown = np.zeros(number, UNKNOWN_TAG)
        used = int(self.state["tags"][0])
        grown[:used] = self.unknown[:used]
        self.unknown = grown
        self.state["tags_room"][0], self.state["tags_at"][0] = number, address_of(grown)

    def clear(self) -> None:
        """Remove all rows, zero their validity bytes, and measure the buffers."""
        for level, used in enumerate(self.count.tolist()):
            if used:
                first, last = self.plan.level_first[level : level + 2].tolist()
                for column in range(first, last):
                    self.valid[column][:used] = 0
        self.count[:] = 0
        self.state["marks"][0] = self.state["tags"][0] = 0
        columns = sum(one.nbytes for one in (*self.data, *self.valid))
        self.byte_count = columns + self.marks.nbytes + self.unknown.nbytes


# Idle builders of all plans, most recently used last.
_IDLE: list[Builders] = []
_LOCK = Lock()


def take_builders(plan: ColumnPlan) -> Builders:
    """Idle builders of the plan, or new ones."""
    with _LOCK:
        for at in range(len(_IDLE) - 1, -1, -1):
            if _IDLE[at].plan is plan:
                return _IDLE.pop(at)
    return Builders(plan)


def give_back(builders: Builders) -> None:
    """Clear builders and keep them; the oldest are freed beyond POOLED_BYTES."""
    builders.clear()
    with _LOCK:
        _IDLE.append(builders)
        size = sum(one.byte_count for one in _IDLE)
        while size > POOLED_BYTES:
            size -= _IDLE.pop(0).byte_count
