"""`rebalance_loop`: a group rebalanced again and again."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import BROKERS, CONNECTION_IDS, Evidence, lasted_ms, runs
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, Incident, Kind
from kdissect.text import decimal, duration, plural

KIND = Kind("rebalance_loop", "group", "a group rebalanced again and again", "groups")

# A member that restarts leaves and joins once; a deployment gone wrong does it twice. Programs with
# one name have one count: a deployment restarts each of them once, so there must be more.
FLAPS_MIN = 3
# Each start and each end of a member takes one rebalance, with the cooperative protocol two.
REBALANCES_MIN, REBALANCES_PER_MEMBER = 6, 4
# A stable group has no rebalance for minutes.
PAUSE_MS = 60_000
_CAUSE_MAX = 160  # characters


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the groups with a member that left and joined again several times.

    Without such a member, many more rebalances than the members' starts and ends explain count.
    """
    events = "(SELECT * FROM group_events WHERE event IN ('join', 'leave', 'rebalance'))"
    rows = evidence.rows(
        f"""
        WITH events AS (
          SELECT g.*, r.client, r.broker, r.connection_id
          FROM ({runs(events, "group_id", PAUSE_MS)}) g LEFT JOIN requests r USING (exchange_id)
        ), ends AS (
          -- a program that crashed sends no LeaveGroup, but its connection is closed
          SELECT DISTINCT e.group_id, e.run, e.client, e.member_id, e.connection_id, 'end' AS event,
            s.last_time AS time
          FROM events e JOIN sessions s USING (connection_id)
          WHERE e.event = 'join' AND s.closed_by = 'client'
        ), lives AS (
          SELECT e.group_id, e.run, e.client, e.connection_id, min(e.time) AS joined,
            any_value(s.last_time) AS ended
          FROM events e JOIN sessions s USING (connection_id) WHERE e.event = 'join' GROUP BY ALL
        ), members AS (
          -- programs with one name: as many as have a connection at the same time
          SELECT group_id, run, client, max(alive) AS members FROM (
            SELECT group_id, run, client, sum(step) OVER (
              PARTITION BY group_id, run, client ORDER BY time, step) AS alive
            FROM (SELECT *, joined AS time, 1 AS step FROM lives
              UNION ALL SELECT *, ended, -1 FROM lives))
          GROUP BY ALL
        ), changes AS (
          SELECT group_id, run, client, time, lag(connection_id) OVER own AS connection_id,
            event = 'join' AND (lag(event) OVER own = 'leave' OR lag(event) OVER own = 'end'
              AND member_id != lag(member_id) OVER own) AS is_flap
          FROM (
            SELECT group_id, run, client, member_id, connection_id, event, time FROM events
            WHERE event IN ('join', 'leave') AND client IS NOT NULL
            UNION ALL BY NAME FROM ends
          ) WINDOW own AS (PARTITION BY group_id, run, client ORDER BY time)
        ), flapping AS (
          -- the loop begins with the member that is the first to end and join again
          SELECT c.group_id, c.run, c.client, count(*) AS flaps,
            min(coalesce(l.joined, c.time)) AS since
          FROM changes c LEFT JOIN lives l USING (group_id, run, client, connection_id)
          JOIN members m USING (group_id, run, client)
          WHERE c.is_flap
          GROUP BY ALL HAVING flaps >= {FLAPS_MIN} AND flaps > any_value(m.members)
        ), worst AS (
          SELECT group_id, run, max_by(client, flaps) AS client, max(flaps) AS flaps,
            max_by(since, flaps) AS since
          FROM flapping GROUP BY ALL
        ), loops AS (
          SELECT group_id, run, min(time) FILTER (event = 'rebalance') AS start,
            max(time + to_milliseconds(coalesce(duration_ms, 0)::BIGINT)) AS stop,
            count(*) FILTER (event = 'rebalance') AS rebalances,
            sum(duration_ms) FILTER (event = 'rebalance') AS lost_ms,
            count(DISTINCT exchange_id) AS requests,
            {BROKERS},
            arg_max(detail, time) FILTER (event = 'rebalance') AS detail,
            list(exchange_id ORDER BY time)
              FILTER (event = 'rebalance')[:{EVIDENCE_MAX}] AS exchange_ids,
            {CONNECTION_IDS}
          FROM events GROUP BY ALL
        )
        SELECT l.* REPLACE (coalesce(w.since, l.start) AS start), w.client, w.flaps, m.members
        FROM loops l LEFT JOIN worst w USING (group_id, run) LEFT JOIN (
          SELECT group_id, run, sum(members)::BIGINT AS members FROM members GROUP BY ALL
          ) m USING (group_id, run)
        WHERE rebalances >= {REBALANCES_MIN}
          AND (w.flaps IS NOT NULL OR rebalances > {REBALANCES_PER_MEMBER} * coalesce(m.members, 1))
        ORDER BY start, group_id
        """
    )
    for row in rows:
        length_ms = lasted_ms(row)
        cause = (row["detail"] or "").partition("why: ")[2][:_CAUSE_MAX]
        who = (
            f"{row['client']} ended and joined again {plural(row['flaps'], 'time')}."
            if row["client"]
            else f"The last cause: {cause or 'unknown'}."
        )
        yield evidence.incident(
            row,
            KIND,
            BAD,
            row["group_id"],
            f"{plural(row['rebalances'], 'rebalance')} of {plural(row['members'] or 0, 'member')} "
            f"in {duration(length_ms)}, one each "
            f"{decimal(length_ms / 1000 / row['rebalances'])} s. "
            f"{who}",
            next_command=evidence.command("show", "--group", row["group_id"]),
        )
