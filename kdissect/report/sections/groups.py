"""Groups: the story of each rebalance, as rows and as a timeline."""

from __future__ import annotations

from typing import Any

from kdissect.report.database import ReportDatabase, Row, listed

_SHOWN_GROUPS = 6
SHOWN_EVENTS = 250  # of a group on its timeline; the CSV file has all
_STORIES = 20  # rebalances of a group that the page shows event by event


def collect(database: ReportDatabase) -> dict[str, Any]:
    """Tables `groups_all`, `rebalances`, and the timelines of the groups that moved most."""
    database.run(
        """
        CREATE TABLE rebalances AS
        SELECT g.group_id, g.group_type, g.generation, g.time AS begin_time,
          g.time + to_microseconds((coalesce(g.duration_ms, 0) * 1000)::BIGINT) AS end_time,
          g.duration_ms, g.detail, g.exchange_id, x.packet, x.capture_id
        FROM group_events g LEFT JOIN x USING (exchange_id) WHERE g.event = 'rebalance'
        """
    )
    database.run(
        """
        CREATE TABLE groups_all AS
        WITH counted AS (
          SELECT group_id, group_type, count(DISTINCT member_id) AS members,
            count(DISTINCT client_id) AS clients,
            count(*) FILTER (event = 'rebalance') AS rebalances,
            sum(duration_ms) FILTER (event = 'rebalance') AS rebalance_ms,
            max(duration_ms) FILTER (event = 'rebalance') AS rebalance_ms_max,
            count(*) FILTER (event = 'join') AS joins, count(*) FILTER (event = 'leave') AS leaves,
            count(*) FILTER (event = 'heartbeat_error') AS heartbeat_errors,
            count(*) FILTER (event = 'commit_error') AS commit_errors,
            count(*) AS events, min(time) AS first_time, max(time) AS last_time
          FROM group_events GROUP BY group_id, group_type
        ) SELECT * FROM counted
        """
    )
    groups = listed(
        database, "groups_all", "rebalances DESC, rebalance_ms DESC NULLS LAST, group_id"
    )
    shown = groups["rows"][:_SHOWN_GROUPS]
    return {
        "groups": groups,
        "rebalances": listed(
            database, "rebalances", "duration_ms DESC NULLS LAST, group_id, begin_time"
        ),
        "timelines": [_timeline(database, row) for row in shown],
    }


def _timeline(database: ReportDatabase, group: Row) -> dict[str, Any]:
    key = [group["group_id"], group["group_type"]]
    same = "g.group_id IS NOT DISTINCT FROM ? AND g.group_type IS NOT DISTINCT FROM ?"
    events = database.rows(
        f"""
        SELECT g.time, epoch_us(g.time) / 1000.0 AS t,
          epoch_us(g.time) / 1000.0 + coalesce(g.duration_ms, 0) AS t_end,
          g.event, g.member_id, g.client_id, g.generation, g.duration_ms, g.detail,
          x.packet, x.capture_id
        FROM group_events g LEFT JOIN x USING (exchange_id) WHERE {same}
        ORDER BY g.time, g.event LIMIT {SHOWN_EVENTS}
        """,
        key,
    )
    for event in events:
        event["lane"] = _lane(event)
    return {
        "group_id": group["group_id"],
        "group_type": group["group_type"],
        "total": group["events"],
        "events": events,
        "stories": _stories(events)[:_STORIES],
    }


def _lane(event: Row) -> str:
    """The row of the timeline that shows an event: "group", or a member's client and member id.

    The member id is cut to its first few characters, enough for members of one client to differ.
    """
    if event["event"] in ("rebalance", "stable"):
        return "group"
    client, member = event["client_id"], event["member_id"]
    if client and member and member.startswith(client):
        return f"{client}-{member[len(client) :].lstrip('-')[:6]}"
    return " ".join(part for part in (client, (member or "")[:8]) if part) or "?"


def _stories(events: list[Row]) -> list[Row]:
    """Rebalances in order of time, each with its events from its cause to its end."""
    stories = []
    rest = [event for event in events if event["event"] not in ("rebalance", "stable")]
    ends = {event["generation"]: event for event in events if event["event"] == "stable"}
    last_end = float("-inf")
    for rebalance in (event for event in events if event["event"] == "rebalance"):
        end = rebalance["t_end"]
        inside = [event for event in rest if last_end <= event["t"] <= end]
        last_end = max(last_end, end)
        stable = ends.get(rebalance["generation"])
        stories.append(
            {
                **{
                    name: rebalance[name]
                    for name in ("time", "generation", "duration_ms", "detail")
                },
                "packet": rebalance["packet"],
                "capture_id": rebalance["capture_id"],
                "events": inside,
                "result": stable["detail"] if stable else None,
            }
        )
    return stories
