"""The tables of the page, as `tables.toml` declares them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files

from kdissect.tables.schemas import FIXED_TABLES, Row, meaning_of

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
        meaning = meaning_of(FIXED_TABLES[table].field(name)).replace("`", "")
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
