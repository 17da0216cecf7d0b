"""Groups that rebalance too often or too long, and members that poll too late."""

from __future__ import annotations

from kdissect.incidents.evidence import CONNECTION_IDS, IDS, PARTIES, runs
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, INFO
from kdissect.incidents.kind import kind, lasted_ms
from kdissect.tables.schemas import Row
from kdissect.text import decimal, duration, plural

# A member that restarts leaves and joins once; a deployment gone wrong does it twice. Programs with
# one name have one count: a deployment restarts each of them once, so there must be more.
FLAPS_MIN = 3
# Each start and each end of a member takes one rebalance, with the cooperative protocol two.
REBALANCES_MIN, REBALANCES_PER_MEMBER = 6, 4
# A stable group has no rebalance for minutes.
LOOP_PAUSE_MS = 60_000
_CAUSE_MAX = 160  # characters
_SHOW = "kdissect show {source} --group {group_id}"
_EVENTS = "(SELECT * FROM group_events WHERE event IN ('join', 'leave', 'rebalance'))"
# A row for each group with a member that left and joined again several times. Without such a
# member, many more rebalances than the members' starts and ends explain count.
_LOOPS = f"""
    WITH events AS (
      SELECT g.*, r.client, r.broker, r.connection_id
      FROM ({runs(_EVENTS, "group_id", LOOP_PAUSE_MS)}) g
      LEFT JOIN requests r USING (exchange_id)
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
        sum(duration_ms) FILTER (event = 'rebalance' AND group_type = 'classic') AS lost_ms,
        count(DISTINCT exchange_id) AS requests,
        {PARTIES},
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


@kind("groups", BAD, "group_id", "group_events WHERE event = 'rebalance'", _LOOPS, command=_SHOW)
def rebalance_loop(row: Row) -> str:
    """Return the text of the rebalances of a group."""
    length_ms = lasted_ms(row)
    cause = (row["detail"] or "").partition("why: ")[2][:_CAUSE_MAX]
    who = f"The last cause: {cause or 'unknown'}."
    if row["client"]:
        who = f"{row['client']} ended and joined again {plural(row['flaps'], 'time')}."
    return (
        f"{plural(row['rebalances'], 'rebalance')} of {plural(row['members'] or 0, 'member')} "
        f"in {duration(length_ms)}, one each "
        f"{decimal(length_ms / 1000 / row['rebalances'])} s. {who}"
    )


# Text of Java's LeaveGroup requests since Kafka 3.0 (KIP-800).
REASON = "poll timeout"
# A consumer that is closed leaves and closes its connection at once; a late one keeps it.
STAYS_MS = 1000
LATE_PAUSE_MS = 600_000  # twice the default of max.poll.interval.ms
_LATE = f"""(
    WITH members AS (
      SELECT g.group_id, g.time, g.event, g.member_id, g.detail, g.exchange_id, r.client,
        r.broker, r.connection_id
      FROM group_events g JOIN requests r USING (exchange_id)
      WHERE g.event IN ('join', 'leave') AND g.client_id IS NOT NULL
    )
    SELECT l.*, t.timeout_ms, coalesce(l.detail LIKE '%{REASON}%', false) AS is_said,
      (SELECT max(j.time) FROM members j WHERE j.event = 'join' AND j.group_id = l.group_id
        AND j.client = l.client AND j.time < l.time) AS joined,
      (SELECT min(j.time) FROM members j WHERE j.event = 'join' AND j.group_id = l.group_id
        AND j.client = l.client AND j.time > l.time) AS joins_again
    FROM members l JOIN (
      SELECT group_id, client, min(timeout_ms) AS timeout_ms
      FROM (
        SELECT exchange_id, request.group_id, request.rebalance_timeout_ms AS timeout_ms
        FROM api_join_group UNION ALL
        SELECT exchange_id, request.group_id, request.rebalance_timeout_ms
        FROM api_consumer_group_heartbeat
      ) JOIN (SELECT exchange_id, client FROM requests) USING (exchange_id)
      WHERE timeout_ms > 0 GROUP BY ALL) t USING (group_id, client)
    JOIN sessions s USING (connection_id)
    WHERE l.event = 'leave' AND (is_said
      OR s.last_time - l.time >= INTERVAL {STAYS_MS} MILLISECONDS
        AND l.time - joined >= to_milliseconds(timeout_ms))
)"""
# A row for each run of members that polled too late. A consumer that is not polled within
# max.poll.interval.ms leaves its group (KIP-62). The wire has that time as the rebalance timeout of
# its JoinGroup or ConsumerGroupHeartbeat requests. Without a reason in the request there is other
# evidence: the member leaves no sooner than the interval after it joined, and its connection stays
# open.
_LATE_POLLS = f"""
    SELECT group_id, min(time) AS start, max(coalesce(joins_again, time)) AS stop,
      count(*) AS requests, any_value(timeout_ms) AS timeout_ms,
      max(epoch_us(joins_again - time)) / 1e3 AS late_ms,
      sum(epoch_us(joins_again - time)) / 1e3 AS lost_ms, bool_and(is_said) AS is_said,
      {PARTIES}, {IDS}
    FROM ({runs(_LATE, "group_id", LATE_PAUSE_MS)})
    GROUP BY group_id, run ORDER BY start, group_id
"""


@kind("groups", BAD, "group_id", "group_events WHERE event = 'leave'", _LATE_POLLS, command=_SHOW)
def member_too_slow(row: Row) -> str:
    """Return the text of the members of a group that polled too late."""
    said = "as its request says" if row["is_said"] else "and kept its connection"
    late = "It did not join again."
    if row["late_ms"] is not None:
        late = f"It joined again {duration(row['late_ms'])} later at most: its poll was that late."
    return (
        f"{', '.join(row['clients'])} left the group {plural(row['requests'], 'time')}, {said}: "
        f"its application did not poll within {duration(row['timeout_ms'])} "
        f"(max.poll.interval.ms). {late} Lower max.poll.records, or do the work in another thread."
    )


LONG_REBALANCE_MS = 3000
# Members of other groups go on while a new epoch reaches them with their heartbeats (KIP-848).
_LONG = f"""group_events WHERE event = 'rebalance' AND group_type = 'classic'
  AND duration_ms >= {LONG_REBALANCE_MS}"""
# A row for each group with a long rebalance. With group.initial.rebalance.delay.ms (3 s) each new
# group has one.
_LONG_REBALANCES = f"""
    SELECT g.group_id, min(g.time) AS start,
      max(g.time + to_milliseconds(g.duration_ms::BIGINT)) AS stop, count(*) AS rebalances,
      max(g.duration_ms) AS longest_ms, sum(g.duration_ms) AS lost_ms,
      {PARTIES}, {IDS}
    FROM (FROM {_LONG}) g LEFT JOIN (
      SELECT exchange_id, connection_id, broker, client FROM requests) USING (exchange_id)
    GROUP BY g.group_id ORDER BY start, g.group_id
"""


@kind("groups", INFO, "group_id", _LONG, _LONG_REBALANCES, command=_SHOW)
def long_rebalance(row: Row) -> str:
    """Return the text of the long rebalances of a group."""
    return (
        f"{plural(row['rebalances'], 'rebalance')} took {duration(LONG_REBALANCE_MS)} or more, "
        f"the longest {duration(row['longest_ms'])}. No member reads meanwhile, unless the "
        "assignor is cooperative."
    )
