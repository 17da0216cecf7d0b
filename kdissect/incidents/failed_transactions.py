"""`failed_transactions`: transactions of a producer that did not commit."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import IDS, Evidence
from kdissect.incidents.incident import INFO, Incident, Kind
from kdissect.text import plural

KIND = Kind(
    "failed_transactions", "transactional ID", "transactions did not commit", "transactions"
)
_WORDS = {"abort": "aborted", "fenced": "fenced", "open": "without an end in the capture"}


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield one incident of all producers, which names the one with most such transactions."""
    counts = ", ".join(f"count(*) FILTER (outcome = '{name}') AS {name}" for name in _WORDS)
    for row in evidence.rows(
        f"""
        SELECT count(*) AS failed, min(time) AS start, max(until) AS stop, {counts},
          (SELECT count(*) FROM transactions) AS transactions,
          mode(transactional_id) AS subject, count(DISTINCT transactional_id) AS producers, {IDS}
        FROM (
          SELECT transactional_id, outcome, exchange_ids[1] AS exchange_id,
            coalesce(begin_time, end_time) AS time, coalesce(end_time, begin_time) AS until
          FROM transactions WHERE outcome <> 'commit')
        LEFT JOIN (SELECT exchange_id, connection_id FROM requests) USING (exchange_id)
        HAVING start IS NOT NULL
        """
    ):
        said = ", ".join(f"{row[name]:,} {word}" for name, word in _WORDS.items() if row[name])
        more = f" and {row['producers'] - 1:,} more" if row["producers"] > 1 else ""
        yield evidence.incident(
            row,
            KIND,
            INFO,
            f"{row['subject'] or '(none)'}{more}",
            f"{row['failed']:,} of {plural(row['transactions'], 'transaction')} did not commit: "
            f"{said}.",
            next_command=evidence.command("sql", "from transactions where outcome <> 'commit'"),
        )
