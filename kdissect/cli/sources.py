"""Opens what a verb reads: table sets, and captures that are dissected in this process."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from kdissect.cli.output import say, say_no_kafka, some_of
from kdissect.errors import CaptureError

if TYPE_CHECKING:
    from kdissect.api import Tables
    from kdissect.cli.options import SelectionOptions, SourceOptions

_UNPACKED = 4  # estimated size of a compressed capture, as a multiple, when decompressed
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?")
_SIZE_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def open_selected(
    paths: Sequence[str], options: SourceOptions, selected: SelectionOptions
) -> Tables:
    """Return the tables of `open_source` with the selected exchanges only; warns if there are
    none."""
    from kdissect import api

    selection = selected.selection()
    tables = open_source(paths, options)
    if selection.is_empty:
        return tables
    chosen = api.selected(tables, selection)
    if not chosen.exchanges.num_rows:
        count = tables.exchanges.num_rows
        say(f"warning: 0 of {count:,} exchanges pass the filters")
    return chosen


def open_source(paths: Sequence[str], options: SourceOptions) -> Tables:
    """Return the tables of table sets and of captures (files, folders, globs) as one set.

    Captures are dissected here. Warns of damaged captures, and if captures have no Kafka traffic.
    Raises CaptureError if captures are larger than `--in-process-max`, BadParameter for options of
    captures without a capture.
    """
    from kdissect import api
    from kdissect.pipeline.table_set import NoTableSetError

    sets, captures = [], []
    missing = None
    for path in paths:
        try:
            sets.append(api.open_tables(path))
        except NoTableSetError as error:
            captures.append(path)
            missing = missing or error
    if missing is not None:
        sets.append(_read_captures(captures, options, missing))
    elif options.flags_given:
        raise typer.BadParameter(
            f"{paths[0]} is a table set; this is for captures", param_hint=options.flags_given[0]
        )
    for tables in sets:
        _warn_of_damage(tables)
    return sets[0] if len(sets) == 1 else api.joined_sets(sets)


def _read_captures(paths: Sequence[str], options: SourceOptions, missing: CaptureError) -> Tables:
    """Return the tables of captures, dissected here.

    missing: why the first of them is no table set.
    """
    from kdissect import api
    from kdissect.capture.inputs import find_captures

    try:
        inputs = find_captures(paths)
    except CaptureError:
        if len(paths) > 1 or not os.path.isdir(paths[0]):
            raise
        raise CaptureError(f"{missing}, and no capture in it") from None
    names = shlex.join(paths[:3]) + (" ..." if len(paths) > 3 else "")
    advice = f"kdissect dissect {names} --out DIR makes a table set, which this command accepts"
    for item in inputs:
        if item.format == "stream":
            raise CaptureError(f"{item.path}: a stream of unknown length; {advice}")
    size = sum(item.size * (1 if item.compression == "none" else _UNPACKED) for item in inputs)
    if size > options.in_process_max:
        from kdissect.text import byte_size

        raise CaptureError(
            f"{some_of(paths)}: {byte_size(size)} are more than --in-process-max "
            f"{byte_size(options.in_process_max)}; {advice}"
        )
    tables = api.read(paths, **options.read_arguments())
    if not any(tables.connections.to_arrow(["is_kafka"])["is_kafka"].to_pylist()):
        say_no_kafka(tables, paths)
    return tables


def _warn_of_damage(tables: Tables) -> None:
    for row in tables.captures.to_arrow(["path", "format", "error"]).to_pylist():
        if row["error"] is not None and row["format"] != "unknown":
            say(f"warning: {row['path']}: {row['error']}")


def parse_size(text: str) -> int:
    """Return the bytes of "256MB", "1.5GiB" or a bare number; raises ValueError for other text."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size: give 256MB, 1GiB or a number of bytes")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _SIZE_UNITS[match[2]])
