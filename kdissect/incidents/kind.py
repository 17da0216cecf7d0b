"""A kind of incident: a query with a row for each incident, and a function that writes its text."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain

from kdissect.incidents.incident import SEVERITIES, Incident
from kdissect.sql import Database
from kdissect.tables.schemas import Row
from kdissect.text import shell_word

Text = Callable[[Row], str]
Arguments = Mapping[str, Sequence[str]]  # of commands that read the tables, by verb


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a kind of incident; `kind` explains its fields."""

    kind: str
    severity: str
    subject: str
    signs: str
    query: str
    tables: Mapping[str, str]
    command: str
    text: Text

    def find(
        self, database: Database, made: dict[str, bool], paths: Sequence[str], arguments: Arguments
    ) -> Iterator[Incident]:
        """Yield the incidents that the evidence establishes.

        made: the tables so far (`make_table`). paths: of the captures. arguments: as for
        `find_incidents`.
        """
        if not _has(database, self.signs) or not all(
            make_table(database, made, name, query) for name, query in self.tables.items()
        ):
            return
        severity = f"'{self.severity}'" if self.severity in SEVERITIES else self.severity
        more = f" and {len(paths) - 1:,} more" if paths[1:] else ""
        for row in database.rows(
            f"SELECT *, {severity} AS its_severity, {self.subject} AS its_subject "
            f"FROM ({self.query})"
        ):
            connection_ids, lost_ms = row.get("connection_ids") or (), row.get("lost_ms")
            command = self.command
            if connection_ids and not command:
                is_shown = _has(database, f"requests WHERE connection_id = {connection_ids[0]}")
                command = _FOLLOW if is_shown else _LOOK
            yield Incident(
                self.kind,
                row["its_severity"],
                row["start"],
                row["stop"],
                f"{paths[0]}{more}"
                if row["its_subject"] is None
                else row["its_subject"] or "(none)",
                self.text(row),
                request_count=row.get("requests", 0),
                # a sum's last digits depend on the order of its terms
                time_lost_ms=None if lost_ms is None else round(lost_ms, 6),
                exchange_ids=list(dict.fromkeys(row.get("exchange_ids") or ())),
                connection_ids=list(dict.fromkeys(connection_ids)),
                next_command=_command(command, arguments, row),
                brokers=_parties(row, "broker"),
                clients=_parties(row, "client"),
            )


KINDS: dict[str, str] = {}  # each kind, and the section of the report's page with its details
QUERIES: list[Query] = []
CAPTURES = "NULL"  # the subject of incidents of all captures
# show the first connection, so that the command stays short; `show` has lines of exchanges only
_FOLLOW = "kdissect show {source} --connection {connection_ids[0]}"
_LOOK = 'kdissect sql {source} "from connections where connection_id = {connection_ids[0]}"'


def kind(
    section: str,
    severity: str,
    subject: str,
    signs: str,
    query: str,
    *,
    tables: Mapping[str, str] | None = None,
    command: str = "",
    name: str = "",
) -> Callable[[Text], Text]:
    """Return a decorator that registers a query of the kind of incident with a function's name.

    The function returns the text of the incident of a row. docs/incidents.md explains each kind.

    section: of the report's page. severity: one of `SEVERITIES`, or SQL over the query's columns.
    subject: SQL over these. signs: SQL of rows, as it follows FROM. If there are none, there is no
    such incident; to see that takes less than a tenth of the time that a query takes to plan.
    query: selects `start`, `stop` and any of `requests`, `lost_ms`, `exchange_ids`,
    `connection_ids`, `broker` or `brokers`, and `client` or `clients`. tables: name -> query of
    each table that the query asks; they are made in this order (`make_table`), and if one is empty,
    there is no such incident. command: has columns of the query in braces, and the word `{source}`;
    without one, it shows the first connection. name: of the kind, if it has several queries.
    """

    def register(text: Text) -> Text:
        found = name or text.__name__
        KINDS[found] = section
        QUERIES.append(Query(found, severity, subject, signs, query, tables or {}, command, text))
        return text

    return register


def make_table(database: Database, made: dict[str, bool], name: str, query: str) -> bool:
    """Create a table, unless another kind has; return whether it has rows.

    made: the tables so far, and whether they have rows.
    """
    if name not in made:
        database.run(f"CREATE TEMP TABLE {name} AS {query}")
        made[name] = _has(database, name)
    return made[name]


def lasted_ms(row: Row) -> float:
    """Return the time from `start` to `stop`."""
    length: timedelta = row["stop"] - row["start"]
    return length.total_seconds() * 1000


def _has(database: Database, rows: str) -> bool:
    return bool(database.rows(f"SELECT 1 FROM {rows} LIMIT 1"))


def _command(template: str, arguments: Arguments, row: Row) -> str:
    """Return a command, quoted for a shell. template: as `kind` describes it."""
    values = {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in row.items()
    }
    split = shlex.split(template)
    words = (
        arguments[split[1]] if word == "{source}" else [word.format_map(values)] for word in split
    )
    return " ".join(map(shell_word, chain.from_iterable(words)))


def _parties(row: Row, party: str) -> frozenset[str]:
    return frozenset(row.get(f"{party}s") or filter(None, [row.get(party)]))
