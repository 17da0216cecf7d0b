"""A DuckDB database with the tables of a set as views, for `sql` and for reports."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import duckdb
import pyarrow.dataset as pads

from kdissect.interrupts import interrupts
from kdissect.protocol.model import snake_case

_PREFIXES = {"apis/": "api_", "internal/": "internal_"}


def view_name(table: str) -> str:
    """Return the view of a table: ``exchanges``, ``api_fetch`` for ``apis/Fetch``,
    ``internal_...``."""
    for prefix, short in _PREFIXES.items():
        if table.startswith(prefix):
            return short + snake_case(table.removeprefix(prefix))
    return table


@interrupts()
def connect(place: str, spill: str, memory_limit: str, **settings: Any) -> Any:
    """Open a database at `place` that loads no extensions; data beyond `memory_limit` go to
    `spill`."""
    connection = duckdb.connect(
        place,
        config={
            "temp_directory": spill,
            "memory_limit": memory_limit,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            **settings,
        },
    )
    connection.execute("set TimeZone = 'UTC'")
    # The progress bar would appear on stdout among the rows, after two seconds. In a notebook
    # without ipywidgets it is off, and DuckDB refuses to set it at all.
    if connection.execute("select current_setting('enable_progress_bar')").fetchall()[0][0]:
        connection.execute("set enable_progress_bar = false")
    return connection


@interrupts()
def make_views(connection: Any, tables: Mapping[str, pads.Dataset]) -> list[str]:
    """Create the views; return the files that they read.

    DuckDB reads Parquet files of this machine itself, other datasets through pyarrow.
    """
    files: list[str] = []
    for name, dataset in tables.items():
        view = view_name(name)
        paths = _parquet_files(dataset)
        if paths:
            patterns = [_glob_escaped(path) for path in paths]
            files += {*paths, *patterns}  # DuckDB checks both
            listed = ", ".join(map(literal, patterns))
            connection.execute(f'create view "{view}" as select * from read_parquet([{listed}])')
        else:
            connection.register(view, dataset)
    return files


def _parquet_files(dataset: pads.Dataset) -> list[str]:
    files = getattr(dataset, "files", None)
    if dataset._scan_options:
        return []  # a filter: the files have more rows
    if files is None or getattr(dataset.format, "default_extname", "") != "parquet":
        return []
    if dataset.filesystem.type_name != "local":
        return []  # in an object store, which pyarrow reads
    return [os.path.abspath(path) for path in files]


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _glob_escaped(path: str) -> str:
    """Return a pattern that matches only this path."""
    return re.sub(r"([*?\[])", r"[\1]", path)
