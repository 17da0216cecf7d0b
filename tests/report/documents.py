"""Documents of reports, and databases with what their sections ask."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kdissect.api import Tables
from kdissect.report import Options, collect
from kdissect.sql import Database
from kdissect.sql.requests import make_requests

OPTIONS = Options("4.0", None, {"packets": 0, "bytes": 0})


@contextmanager
def prepared(tables: Tables) -> Iterator[Database]:
    """A database of a table set with the base tables of `sql.requests`."""
    with tables.database() as database:
        make_requests(database)
        yield database


def document_of(tables: Tables) -> dict[str, Any]:
    """The document of a table set's report."""
    with tables.database() as database:
        return collect(database, replace(OPTIONS, incidents=tables.incidents().to_arrow()))
