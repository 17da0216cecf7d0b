"""The document of a report, as JSON has it, and the blocks that a section of the page shows of it.

Blocks are paragraphs, charts, tables and stories, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdissect.charts import Chart
from kdissect.report.page_tables import TABLES, PageTable
from kdissect.sql import Database

LISTED_MAX = 1000  # rows of a list in the JSON document; its `total` says how many there are
PAGE_ROWS = 60  # rows of a table on the page; the CSV file has all

Document = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """What a user asks of a report.

    target: a release of Kafka that clients have to work with. since_us: a time in microseconds
    since 1970; clients are compared before and after. totals: of the table set's manifest.
    """

    target: str
    since_us: int | None
    totals: Mapping[str, int]


def listed(database: Database, table: str, order: str, limit: int = LISTED_MAX) -> dict[str, Any]:
    """{"total": n, "rows": the first `limit`} of a table (with a condition), in an order."""
    return {
        "total": database.value(f"SELECT count(*) FROM {table}"),
        "rows": database.rows(f"FROM {table} ORDER BY {order} LIMIT {limit}"),
    }


@dataclass(frozen=True, slots=True)
class Listing:
    """A table of the page.

    name: of its declaration in `tables.toml`. rows: a list, or `rows` with their `total`
    (`listed`). number: tells tables of one declaration apart. limit: rows on the page.
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
