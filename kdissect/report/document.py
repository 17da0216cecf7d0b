"""The document of a report, as JSON has it, and the blocks that a section of the page shows of it.

Blocks are paragraphs, charts, tables and stories, in their order. `tables.toml` declares the
tables.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

import pyarrow as pa

from kdissect.charts import Chart
from kdissect.sql import Database
from kdissect.tables.schemas import DERIVED_TABLES, FIXED_TABLES, INCIDENTS, Row, meaning_of

LISTED_MAX = 1000  # rows of a list in the JSON document; its `total` says how many there are
PAGE_ROWS = 60  # rows of a table on the page; the CSV file has all
ANSWERS_MIN = 20  # fewer say little of a percentile

Document = Row


@dataclass(frozen=True, slots=True)
class Options:
    """What a user asks of a report.

    target: a release of Kafka that clients have to work with. since_us: a time in microseconds
    since 1970; clients are compared before and after. totals: of the table set's manifest.
    selection: the conditions on the exchanges; "" if all are here. incidents: the set's. `build`
    takes these three from the set.
    """

    target: str
    since_us: int | None
    totals: Mapping[str, int] = field(default_factory=dict)
    selection: str = ""
    incidents: pa.Table = field(default_factory=INCIDENTS.empty_table)


# Lists with a CSV file -> their rows. The document has the first of them, in the same order.
LISTS = {
    "captures": "SELECT * EXCLUDE (ignored_reasons, capture_id) FROM captures "
    "ORDER BY first_time, path",
    "connections": "FROM connection_health ORDER BY first_time, connection_id",
    "latency_apis": "FROM latency_apis ORDER BY exchanges DESC, api",
    # the slowest first, but those of whom little is known last
    "latency_clients": f"FROM latency_clients ORDER BY answers < {ANSWERS_MIN}, "
    "p95 DESC NULLS LAST, client_id, client_ip",
    "latency_brokers": "FROM latency_brokers ORDER BY exchanges DESC, broker",
    "errors": "SELECT * EXCLUDE (client) FROM errors ORDER BY time, exchange_id, path",
    "clients": "FROM clients_all ORDER BY role DESC, exchanges DESC, client_id, client_ip",
    "certificates": "FROM certificates ORDER BY not_after, side, address, subject",
    "logins": "FROM logins ORDER BY refused DESC, connections DESC, principal, client_ip",
    "topics": "FROM topics_all ORDER BY is_internal, write_bytes + read_bytes DESC, topic",
    "topic_clients": "SELECT * EXCLUDE (client), client FROM topic_clients "
    "ORDER BY starts_with(topic, '__'), topic, direction DESC, bytes DESC, client",
    "topic_batches": "FROM topic_batches ORDER BY bytes DESC, topic, direction, codec",
    "groups": "FROM groups_all ORDER BY rebalances DESC, rebalance_ms DESC NULLS LAST, group_id",
    "group_events": "FROM group_events ORDER BY time, group_id",
    "rebalances": "FROM rebalances ORDER BY duration_ms DESC NULLS LAST, group_id, begin_time",
    "lag": "FROM lag ORDER BY lag_at_end DESC NULLS LAST, lag_max DESC, group_id, topic, partition",
    "transactions": "FROM transactions_all ORDER BY outcome = 'commit', "
    "duration_ms DESC NULLS LAST, transactional_id, begin_time",
    "transaction_producers": "FROM transaction_producers "
    "ORDER BY aborts + fenced + open DESC, transactions DESC, transactional_id",
    "throttling": "FROM throttling ORDER BY throttle_ms DESC, client_id, api",
    "anomalies": "SELECT * EXCLUDE (number) FROM anomalies_all ORDER BY capture_id, packet, pos",
}


def listed(database: Database, query: str) -> Document:
    """{"total": n, "rows": the first LISTED_MAX} of a query with an order, such as one of LISTS."""
    return {
        "total": database.value(f"SELECT count(*) FROM ({query})"),
        "rows": database.rows(f"{query} LIMIT {LISTED_MAX}"),
    }


# -- the tables of the page

TIMES = frozenset(("time", "day"))
_NUMBERS = frozenset(("count", "bytes", "ms", "decimal", "duration", "share", "ratio"))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    key: of the row. kind: how values are written. meaning: a sentence for the heading's tooltip.
    bar: each value also as a share of the largest.
    """

    key: str
    label: str
    kind: str
    meaning: str
    bar: bool = False

    @property
    def is_number(self) -> bool:
        return self.kind in _NUMBERS


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of the page. csv: the name of the table whose CSV file has all rows."""

    caption: str
    columns: tuple[Column, ...]
    csv: str
    note: str


def _sentence(meaning: str) -> str:
    """The meaning of a page's column, or of the stored column that it names, as a sentence."""
    if re.fullmatch(r"\w+\.\w+", meaning):
        table, name = meaning.split(".")
        meaning = meaning_of((FIXED_TABLES | DERIVED_TABLES)[table].field(name)).replace("`", "")
    return f"{meaning[0].upper()}{meaning[1:]}."


def _columns(declared: Row) -> tuple[Column, ...]:
    columns = []
    for word in declared["columns"].split():
        key = word.rstrip("*")
        label, kind, meaning = declared.get(key) or _SHARED[key]
        columns.append(Column(key, label, kind, _sentence(meaning), bar=word.endswith("*")))
    return tuple(columns)


_DECLARED = tomllib.loads(files(__package__).joinpath("tables.toml").read_text("utf-8"))
_SHARED = _DECLARED.pop("shared")
TABLES = {
    name: PageTable(
        declared["caption"], _columns(declared), declared.get("csv", ""), declared.get("note", "")
    )
    for name, declared in _DECLARED.items()
}


# -- what a section shows


@dataclass(frozen=True, slots=True)
class Listing:
    """A table of the page.

    name: of its declaration in `tables.toml`. rows: a list, or `rows` with their `total`
    (`listed`). number: tells tables of one declaration apart. limit: rows on the page.
    """

    name: str
    rows: Sequence[Row] | Document
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
