"""Columns of a list: which there are, how wide they are, and how they fit a terminal.

A list is wide: client, broker, sizes and the names of topics need some 180 characters. What does
not fit is left out in a fixed order: the date, the broker, the client's address, the sizes. Then
names are cut, and on very narrow terminals more columns go. So all lines have the same columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from kdissect.show.style import Clock
from kdissect.tables.schemas import EXCHANGES
from kdissect.text import no_such, shortened

GAP = "  "
REST_MIN = 14  # of the last column, before others are given up for it


@dataclass(frozen=True, slots=True)
class ShownColumn:
    """name: as in --columns. width: in characters; longer values are cut on a terminal."""

    name: str
    title: str
    width: int
    is_right: bool = False


COMPOSED = {
    column.name: column
    for column in (
        ShownColumn("time", "TIME (UTC)", 26),
        ShownColumn("ends", "CLIENT → BROKER", 45),
        ShownColumn("address", "CLIENT ADDRESS", 21),
        ShownColumn("client", "CLIENT ID", 16),
        ShownColumn("api", "API", 24),
        ShownColumn("sizes", "REQUEST → RESPONSE", 19, True),
        ShownColumn("latency", "LATENCY", 12, True),
        ShownColumn("exchange", "EXCHANGE ID", 19, True),
        ShownColumn("packets", "PACKETS", 15, True),
        ShownColumn("detail", "ERRORS, TOPICS, GROUP", 0),
    )
}
DEFAULT = ("time", "ends", "client", "api", "sizes", "latency", "detail")


def parse_columns(text: str, of_json: bool = False) -> tuple[str, ...]:
    """Names of `time,client,latency_ms`; `+packets` adds to the default. Raises ValueError.

    of_json: columns of `exchanges` only.
    """
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part.startswith("+") and not names:
            names += EXCHANGES.names if of_json else DEFAULT
        name = part.removeprefix("+")
        known = EXCHANGES.names if of_json else [*COMPOSED, *EXCHANGES.names]
        if name not in known:
            raise ValueError(no_such("column", name, known))
        names.append(name)
    if not names:
        raise ValueError(f"no column in {text!r}")
    once = list(dict.fromkeys(names))
    if "detail" in once:  # it has no width of its own
        once.remove("detail")
        once.append("detail")
    return tuple(once)


@dataclass(frozen=True, slots=True)
class LineLayout:
    """columns: in order. width: of a line; None is no limit. The last column takes the rest."""

    columns: tuple[ShownColumn, ...]
    clock: Clock
    width: int | None = None

    @property
    def rest(self) -> int | None:
        """Characters that are left for the last column."""
        if self.width is None:
            return None
        before = sum(column.width + len(GAP) for column in self.columns[:-1])
        return max(0, self.width - before)

    def header(self) -> str:
        """The titles, as wide as the columns."""
        cells = [
            column.title.rjust(column.width)
            if column.is_right
            else column.title.ljust(column.width)
            for column in self.columns
        ]
        header = GAP.join(cells).rstrip()
        return header if self.width is None else shortened(header, self.width)


def fitted(names: Sequence[str], clock: Clock | None, width: int | None) -> LineLayout:
    """The columns that fit into `width`, as wide as their values need.

    clock: None is the time of day with its date, if there is room for it. A list that contains the
    default one loses columns in the order of `_GIVEN_UP`. Any list loses the columns that would
    begin after the line's end.
    """
    order = _GIVEN_UP if set(DEFAULT) <= set(names) else ("date", "long names")
    for count in range(len(order) + 1):
        layout = _layout(names, clock, width, order[:count])
        last = layout.columns[-1]
        if layout.rest is None or layout.rest >= (last.width or REST_MIN):
            return layout
    return _within(layout)


def _within(layout: LineLayout) -> LineLayout:
    """Without the columns that would begin after the line's end; the last of the others is cut."""
    columns: list[ShownColumn] = []
    rest = layout.width or 0
    for column in layout.columns:
        if columns and rest <= 0:
            break
        columns.append(replace(column, width=max(1, min(column.width, rest))))
        rest -= column.width + len(GAP)
    return replace(layout, columns=tuple(columns))


# "date", "broker" and "long names" are parts of columns. Columns outside the default list stay.
_GIVEN_UP = ("date", "broker", "address", "sizes", "long names", "detail", "client", "time")
_CUT_WIDTHS = {"api": 18, "client": 12, "ends": 37, "address": 17}


def _layout(
    names: Sequence[str], clock: Clock | None, width: int | None, given_up: Sequence[str]
) -> LineLayout:
    clock = clock or ("clock" if "date" in given_up else "utc")
    columns = []
    for name in names:
        if name == "ends" and "broker" in given_up:
            name = "address"
        if name in given_up:
            continue
        column = COMPOSED.get(name) or _stored(name)
        if name == "time":
            column = _TIMES[clock]
        if "long names" in given_up:
            column = replace(column, width=_CUT_WIDTHS.get(name, column.width))
        columns.append(column)
    return LineLayout(tuple(columns), clock, width)


_TIMES: dict[Clock, ShownColumn] = {
    "utc": ShownColumn("time", "TIME (UTC)", 26),
    "clock": ShownColumn("time", "TIME (UTC)", 15),
    "relative": ShownColumn("time", "SECONDS", 13, True),
    "delta": ShownColumn("time", "SECONDS LATER", 13, True),
}


def _stored(name: str) -> ShownColumn:
    """A column of `exchanges` as it is."""
    kind = EXCHANGES.field(name).type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    width = 19 if name.endswith("_id") and is_number else 10 if is_number else 16
    if pa.types.is_timestamp(kind):
        width = 27
    return ShownColumn(name, name, max(width, len(name)), is_number)
