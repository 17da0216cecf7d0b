"""Buffers that the column kernel fills: the rows of each level of a plan, and marks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdissect.arrays import address_of
from kdissect.codec.column_kernel import FULL_MARKS, INDICES, LEVEL, MARK, OPEN, STATE
from kdissect.protocol.column_plan import ColumnPlan

FIRST_ROOM = 256  # rows


class Builders:
    """rows: uint8[room, bytes of a row] of each level. marks: MARK. levels, stack, state: of the
    kernel."""

    def __init__(self, plan: ColumnPlan, messages: int) -> None:
        if any(path.count("[]") > INDICES for path in plan.paths):
            raise ValueError(f"a plan with arrays more than {INDICES} deep in one another")
        self.plan = plan
        self.rows = [np.empty((0, size), np.uint8) for size in plan.row_size.tolist()]
        self.marks: NDArray[np.void] = np.empty(0, MARK)
        self.levels = np.zeros(len(self.rows), LEVEL)
        self.levels["row_size"] = plan.row_size
        self.levels["template"] = np.cumsum(plan.row_size) - plan.row_size
        self.stack = np.zeros(plan.depth + 1, OPEN)
        self.state = np.zeros(1, STATE)
        self.state["first_version"] = plan.first_version
        self.state["templates_at"] = address_of(plan.templates)
        self.state["template_size"] = plan.row_size.sum()
        self.state["header_size"] = plan.header_size
        for level in range(len(self.rows)):
            self._make_room(level, FIRST_ROOM if level else messages)
        self._make_room(FULL_MARKS, FIRST_ROOM)

    def grow(self) -> None:
        """Make the room that the kernel requested, at least twice the current one."""
        full, needed = int(self.state["full"][0]), int(self.state["needed"][0])
        room = len(self.marks) if full == FULL_MARKS else len(self.rows[full])
        self._make_room(full, max(needed, 2 * room))

    def _make_room(self, full: int, room: int) -> None:
        if full == FULL_MARKS:
            self.marks = _enlarged(self.marks, int(self.state["marks"][0]), room)
            self.state["marks_room"], self.state["marks_at"] = room, address_of(self.marks)
        else:
            level = self.levels[full]
            self.rows[full] = _enlarged(self.rows[full], int(level["used"]), room)
            level["room"], level["address"] = room, address_of(self.rows[full])


def _enlarged(array: NDArray[Any], used: int, room: int) -> NDArray[Any]:
    grown = np.empty((room, *array.shape[1:]), array.dtype)
    grown[:used] = array[:used]
    return grown
