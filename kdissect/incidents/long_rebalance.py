"""`long_rebalance`: a group stood still while it rebalanced.

With group.initial.rebalance.delay.ms (3 s) each new group does so once.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import BROKERS, IDS, Evidence
from kdissect.incidents.incident import INFO, Incident, Kind
from kdissect.text import duration, plural

KIND = Kind("long_rebalance", "group", "a group stood still while it rebalanced", "groups")
LONG_MS = 3000


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the groups with a long rebalance."""
    rows = evidence.rows(
        f"""
        SELECT g.group_id, min(g.time) AS start,
          max(g.time + to_milliseconds(g.duration_ms::BIGINT)) AS stop, count(*) AS rebalances,
          max(g.duration_ms) AS longest_ms, sum(g.duration_ms) AS lost_ms,
          {BROKERS}, {IDS}
        FROM group_events g LEFT JOIN (
          SELECT exchange_id, connection_id, broker FROM requests) USING (exchange_id)
        WHERE g.event = 'rebalance' AND g.duration_ms >= {LONG_MS}
        GROUP BY g.group_id ORDER BY start, g.group_id
        """
    )
    for row in rows:
        yield evidence.incident(
            row,
            KIND,
            INFO,
            row["group_id"],
            f"{plural(row['rebalances'], 'rebalance')} took {duration(LONG_MS)} or more, the "
            f"longest {duration(row['longest_ms'])}: no member reads meanwhile.",
            next_command=evidence.command("show", "--group", row["group_id"]),
        )
