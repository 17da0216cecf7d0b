"""A table of the page: its columns and rows, and how values are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kdissect import text as f
from kdissect.report.document import TIMES, Column, Listing
from kdissect.tables.schemas import Row
from kdissect.text import visible

WORD_MAX = 28  # characters; longer words may be broken
_LONG_TEXT = 100  # longer texts open with a click
_COLUMNS_MAX = 6  # of a table that is one without scripts too

_TEXT_MAX = 1000
_HEAD_TEXT = 64


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
    def is_long(self) -> bool:
        """It has a word that is broken where the column ends."""
        words = f"{self.text} {self.rest} {self.note}".split()
        return self.kind != "packet" and any(len(word) > WORD_MAX for word in words)


@dataclass(frozen=True, slots=True)
class View:
    """A table of the page, its columns in the order of importance.

    The page's script hides those that a window has no room for.
    """

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    total: int
    csv: str | None = None
    note: str = ""

    @property
    def is_wide(self) -> bool:
        """Without scripts its rows are cards."""
        return len(self.columns) > _COLUMNS_MAX


def view(
    listing: Listing, captures: Mapping[object, str], csv: str | None, *, dated: bool
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
        len(every) if count is None else count,
        csv,
        table.note,
    )


def _has(value: object) -> bool:
    return value is not None and value not in ([], "", 0)


def _cell(
    row: Row, column: Column, top: float | None, captures: Mapping[object, str], dated: bool
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


def _packet(row: Row, value: str | float | None, captures: Mapping[object, str]) -> Cell:
    """Wireshark's display filter for a packet, and the file when there are several."""
    if value is None:
        return Cell("text", f.NONE)
    path = captures.get(row.get("capture_id"), "")
    note = visible(path.replace("\\", "/").rpartition("/")[2], 300) if len(captures) > 1 else ""
    return Cell("packet", f"frame.number == {value}", value, note=note)
