"""`member_too_slow`: a member left its group because its application did not poll in time.

A consumer that is not polled within max.poll.interval.ms leaves its group (KIP-62). The wire has
that time as the rebalance timeout of its JoinGroup or ConsumerGroupHeartbeat requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import BROKERS, IDS, Evidence, Row, runs
from kdissect.incidents.incident import BAD, Incident, Kind
from kdissect.text import duration, plural

KIND = Kind(
    "member_too_slow", "group", "a member left its group because it polled too late", "groups"
)

# Text of Java's LeaveGroup requests since Kafka 3.0 (KIP-800).
REASON = "poll timeout"
# A consumer that is closed leaves and closes its connection at once; a late one keeps it.
STAYS_MS = 1000
PAUSE_MS = 600_000  # twice the default of max.poll.interval.ms


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the groups whose members polled too late.

    Without a reason in the request there is other evidence: the member leaves no sooner than the
    interval after it joined, and its connection stays open.
    """
    timeouts = [
        f"SELECT request.group_id, client, request.rebalance_timeout_ms AS timeout_ms "
        f"FROM {view} JOIN requests USING (exchange_id) WHERE request.rebalance_timeout_ms > 0"
        for view in ("api_join_group", "api_consumer_group_heartbeat")
        if evidence.has_field(view, "request", "rebalance_timeout_ms")
    ]
    if not timeouts:
        return
    evidence.run(
        """
        CREATE TEMP TABLE members AS
        SELECT g.group_id, g.time, g.event, g.member_id, g.detail, g.exchange_id, r.client,
          r.broker, r.connection_id
        FROM group_events g JOIN requests r USING (exchange_id)
        WHERE g.event IN ('join', 'leave') AND g.client_id IS NOT NULL
        """
    )
    late = f"""(
        SELECT l.*, t.timeout_ms, coalesce(l.detail LIKE '%{REASON}%', false) AS is_said,
          (SELECT max(j.time) FROM members j WHERE j.event = 'join' AND j.group_id = l.group_id
            AND j.client = l.client AND j.time < l.time) AS joined,
          (SELECT min(j.time) FROM members j WHERE j.event = 'join' AND j.group_id = l.group_id
            AND j.client = l.client AND j.time > l.time) AS joins_again
        FROM members l JOIN (
          SELECT group_id, client, min(timeout_ms) AS timeout_ms
          FROM ({" UNION ALL ".join(timeouts)}) GROUP BY ALL) t USING (group_id, client)
        JOIN sessions s USING (connection_id)
        WHERE l.event = 'leave' AND (is_said
          OR s.last_time - l.time >= INTERVAL {STAYS_MS} MILLISECONDS
            AND l.time - joined >= to_milliseconds(timeout_ms))
    )"""
    rows = evidence.rows(
        f"""
        SELECT group_id, min(time) AS start, max(coalesce(joins_again, time)) AS stop,
          count(*) AS leaves, list(DISTINCT client ORDER BY client) AS clients,
          any_value(timeout_ms) AS timeout_ms,
          max(epoch_us(joins_again - time)) / 1e3 AS late_ms,
          sum(epoch_us(joins_again - time)) / 1e3 AS lost_ms, bool_and(is_said) AS is_said,
          {BROKERS},
          {IDS}
        FROM ({runs(late, "group_id", PAUSE_MS)}) GROUP BY group_id, run ORDER BY start, group_id
        """
    )
    for row in rows:
        yield evidence.incident(
            row,
            KIND,
            BAD,
            row["group_id"],
            _text(row),
            request_count=row["leaves"],
            next_command=evidence.command("show", "--group", row["group_id"]),
        )


def _text(row: Row) -> str:
    said = "as its request says" if row["is_said"] else "and kept its connection"
    late = (
        f" It joined again {duration(row['late_ms'])} later at most: its poll was that late."
        if row["late_ms"] is not None
        else " It did not join again."
    )
    return (
        f"{', '.join(row['clients'])} left the group {plural(row['leaves'], 'time')}, {said}: its "
        f"application did not poll within {duration(row['timeout_ms'])} (max.poll.interval.ms)."
        f"{late} Lower max.poll.records, or do the work in another thread."
    )
