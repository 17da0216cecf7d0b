"""A prompt for SQL over a table set, with history and completion; a semicolon ends a query."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import pyarrow as pa

from kdissect.errors import EnvironmentFailed, QueryError
from kdissect.sql.database import Database
from kdissect.sql.formats import write_table

FIRST, NEXT = "kdissect> ", "     ...> "
ROWS_MAX = 100  # rows shown of one query
HISTORY_MAX = 1000
KEYWORDS = (
    *("select", "from", "where", "group by all", "order by", "limit", "count(*)", "distinct"),
    *("join", "using", "having", "describe", "summarize", "show tables", "unnest", "median"),
)
HELP = f"""A query ends with a semicolon; it may take several lines. Tab completes names.
  show tables;            the views, one for each table
  describe exchanges;     the columns of one
  .quit                   or Ctrl-D
The first {ROWS_MAX} rows are shown; kdissect sql SOURCE QUERY --out FILE writes all."""


class Prompt:
    """Reads queries and writes their rows; an error is one line, and the prompt continues."""

    def __init__(self, database: Database, read_line: Callable[[str], str], out: TextIO) -> None:
        """read_line: shows its argument and returns a line; an EOFError ends the prompt."""
        self._database, self._read_line, self._out = database, read_line, out

    def run(self) -> None:
        self._say(".help says what there is; .quit ends")
        while True:
            try:
                query = self._query()
                if query in (".quit", ".exit"):
                    return
                if query == ".help":
                    self._say(HELP)
                elif query:
                    self._answer(query)
            except EOFError:
                self._say("")
                return
            except KeyboardInterrupt:
                self._say("")  # drops the query that was being typed or running
            except (QueryError, EnvironmentFailed, pa.ArrowException, OverflowError) as error:
                self._say(str(error))

    def _query(self) -> str:
        """Read lines up to a semicolon; a command is one line."""
        lines = [self._read_line(FIRST).strip()]
        if lines[0].startswith(".") or not lines[0]:
            return lines[0]
        while not lines[-1].endswith(";"):
            lines.append(self._read_line(NEXT).strip())
        return "\n".join(lines)

    def _answer(self, query: str) -> None:
        schema, batches = self._database.stream(query)
        rest = ROWS_MAX

        def first() -> Iterator[pa.RecordBatch]:
            nonlocal rest
            for batch in batches:
                yield batch.slice(0, rest)
                rest -= batch.num_rows
                if rest < 0:
                    return

        write_table(schema, first(), self._out)
        if rest < 0:
            self._say(f"... the first {ROWS_MAX} rows")
        self._out.flush()

    def _say(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()


def completions(text: str, views: Mapping[str, Sequence[str]]) -> list[str]:
    """Return keywords, views and columns with this beginning; after a view's name, its columns."""
    view, dot, begun = text.rpartition(".")
    if dot and view in views:
        return [f"{view}.{name}" for name in views[view] if name.startswith(begun)]
    names = itertools.chain(KEYWORDS, views, *views.values())
    folded = text.casefold()
    return sorted({name for name in names if name.startswith(folded)})


@contextmanager
def line_editing(views: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Give `input` completion and a history file, if Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    matches: list[str] = []

    def complete(text: str, number: int) -> str | None:
        if number == 0:
            matches[:] = completions(text, views)
        return matches[number] if number < len(matches) else None

    readline.set_completer_delims(" \t\n(),;=<>")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    history = history_path()
    with suppress(OSError):
        readline.read_history_file(history)
    try:
        yield
    finally:
        readline.set_history_length(HISTORY_MAX)
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(0o600)  # queries may contain private names
            readline.write_history_file(history)


def history_path() -> Path:
    """Return the history file, in the user's folder for state (XDG Base Directory
    Specification)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "kdissect", "sql_history")
