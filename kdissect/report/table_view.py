"""A table of the page: which columns fit into which window, and how values are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdissect import text as f
from kdissect.report.document import Listing
from kdissect.report.page_tables import TIMES, Column
from kdissect.text import visible

WORD_MAX = 28  # characters; longer words may be broken
_LONG_TEXT = 100  # longer texts open with a click

_TEXT_MAX = 1000
_HEAD_TEXT = 64

Row = Mapping[str, Any]

_FORMATS: dict[str, Callable[[Any], str]] = {
    "count": f.count,
    "bytes": f.byte_size,
    "ms": f.decimal,
    "decimal": f.decimal,
    "duration": f.duration,
    "share": f.share,
    "ratio": f.ratio,
    "time": f.moment,
    "day": f.day,
}


@dataclass(frozen=True, slots=True)
class Cell:
    """The content of a table cell. `sort` orders the column; `bar` is a percentage."""

    kind: str
    text: str
    sort: str | float | None = None
    bar: float | None = None
    rest: str = ""  # what a long text goes on with
    note: str = ""

    @property
    def word_length(self) -> int:
        """Characters of the longest word."""
        return max(map(len, f"{self.text} {self.rest} {self.note}".split()), default=0)

    @property
    def is_long(self) -> bool:
        """It has a word that is broken where the column ends."""
        return self.kind != "packet" and self.word_length > WORD_MAX


@dataclass(frozen=True, slots=True)
class View:
    """A table of the page.

    levels: per column, the narrowest window that shows it: 1 any, 2 from 700 pixels, 3 from 1400;
    columns of level 4 are only in a row's details.
    """

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    levels: tuple[int, ...]
    total: int
    csv: str | None = None
    note: str = ""

    @property
    def cut_levels(self) -> list[int]:
        """Levels of windows that do not show all columns."""
        return [level for level in (1, 2, 3) if max(self.levels) > level]


def view(
    listing: Listing, captures: Mapping[Any, str], csv: str | None, *, dated: bool
) -> View | None:
    """The first rows of a listing as the page has them; None without rows.

    captures: path by capture id. csv: the name of the file with all rows. dated: times have their
    date. Columns without anything but zeros are left out.
    """
    every, count = listing.rows, None
    if isinstance(every, dict):
        every, count = every["rows"], every["total"]
    shown = every[: listing.limit]
    if not shown:
        return None
    table = listing.table
    kept = [column for column in table.columns if any(_has(row.get(column.key)) for row in shown)]
    tops = {
        column.key: max(row.get(column.key) or 0 for row in shown) or 1
        for column in kept
        if column.bar
    }
    cells = tuple(
        tuple(_cell(row, column, tops.get(column.key), captures, dated) for column in kept)
        for row in shown
    )
    return View(
        listing.id,
        listing.caption or table.caption,
        tuple(kept),
        cells,
        _levels(kept, cells),
        len(every) if count is None else count,
        csv,
        table.note,
    )


# Per level: pixels of a table in the narrowest window, those that a text column takes at most, and
# estimates of a character's and of a cell's padding. Texts wrap where they are wider.
_ROOMS = ((375, 120, 7.0, 14), (640, 180, 7.5, 20), (1140, 260, 7.5, 20))
_BUTTON = 24


def _levels(columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]) -> tuple[int, ...]:
    """Columns in the order of importance get the room that there is; the first has always some."""
    levels = [len(_ROOMS) + 1] * len(columns)
    for level, (room, *sizes) in enumerate(_ROOMS, 1):
        widths = [
            _width(column, [row[place] for row in rows], *sizes)
            for place, column in enumerate(columns)
        ]
        left = room - _BUTTON - sum(w for w, of in zip(widths, levels, strict=True) if of < level)
        for place, width in enumerate(widths):
            if levels[place] > level and (width <= left or place == 0):
                levels[place] = level
                left -= width
    return tuple(levels)


def _width(
    column: Column, cells: list[Cell], text_max: float, character: float, padding: float
) -> float:
    """Pixels that a column needs: its longest heading word and its values."""
    value = max(len(cell.text) + len(cell.note) + bool(cell.note) for cell in cells) * character
    if column.kind == "packet":
        value += padding
    elif not column.is_number and column.kind not in TIMES:
        words = max(min(cell.word_length, WORD_MAX) for cell in cells) * character
        value = max(min(value, text_max), words)
    heading = max(map(len, column.label.split())) * (character + 1)
    return max(value, heading) + padding


def _has(value: Any) -> bool:
    return value is not None and value not in ([], "", 0)


def _cell(
    row: Row, column: Column, top: float | None, captures: Mapping[Any, str], dated: bool
) -> Cell:
    value = row.get(column.key)
    kind = column.kind
    if kind == "packet":
        return _packet(row, value, captures)
    if kind == "client":
        name = visible(row.get("client_id"), 300) or "(none)"
        return _text_cell("text", name, visible(row.get("client_ip")))
    if kind in _FORMATS:
        if kind in TIMES:
            said = f.dated if dated and kind == "time" else _FORMATS[kind]
            return Cell("time", said(value), value or "")
        bar = None if top is None or not value else round(100 * value / top, 1)
        return Cell("number", _FORMATS[kind](value), value, bar)
    if kind == "list":
        value = ", ".join(str(item) for item in value or [] if item is not None)
    if kind == "flag":
        return Cell("text", column.label if value else "", 1 if value else 0)
    text = visible(None if value is None else str(value), _TEXT_MAX)
    if kind == "level":
        return Cell("level", text, text)
    return _text_cell("code" if kind == "code" else "text", text)


def _text_cell(kind: str, text: str, note: str = "") -> Cell:
    if len(text) > _LONG_TEXT:
        return Cell(kind, text[:_HEAD_TEXT], text[:80], rest=text[_HEAD_TEXT:], note=note)
    return Cell(kind, text or f.NONE, text, note=note)


def _packet(row: Row, value: Any, captures: Mapping[Any, str]) -> Cell:
    """Wireshark's display filter for a packet, and the file when there are several."""
    if value is None:
        return Cell("text", f.NONE)
    path = captures.get(row.get("capture_id"), "")
    note = visible(path.replace("\\", "/").rpartition("/")[2], 300) if len(captures) > 1 else ""
    return Cell("packet", f"frame.number == {value}", value, note=note)
