"""The blocks of a section of the page, in their order: paragraphs, charts, tables, stories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kdissect.charts import Chart
from kdissect.report.page_tables import TABLES, PageTable

PAGE_ROWS = 60  # rows of a table on the page; the CSV file has all
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Listing:
    """A table of the page.

    name: of its declaration in `tables.toml`. rows: a list, or `rows` with their `total`
    (`document.listed`). number: tells tables of one declaration apart. limit: rows on the page.
    """

    name: str
    rows: Any
    number: str = ""
    caption: str = ""
    limit: int = PAGE_ROWS

    @property
    def table(self) -> PageTable:
        return TABLES[self.name]

    @property
    def id(self) -> str:
        return f"t-{self.name.replace('_', '-')}{self.number}"


@dataclass(frozen=True, slots=True)
class Story:
    """A rebalance, which opens to its events. result: how it ended."""

    title: str
    why: str
    listing: Listing
    result: str | None


# A paragraph (text in backticks is code), a table, a chart, or charts beside each other. None is
# left out, such as a chart without data.
Block = str | Listing | Story | Chart | None | Sequence[Chart | None]


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page. badge: a number beside its name. nothing: its text without blocks."""

    id: str
    title: str
    blocks: Sequence[Block]
    nothing: str = ""
    name: str = ""  # in the navigation, if not the title
    badge: int | None = None
