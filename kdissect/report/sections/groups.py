"""Groups: the story of each rebalance, as rows and as a timeline."""

from __future__ import annotations

from kdissect import text as f
from kdissect.charts import Chart, group_events
from kdissect.report.document import (
    LISTS,
    Block,
    Document,
    Listing,
    Options,
    Section,
    Story,
    listed,
)
from kdissect.sql import Database
from kdissect.tables.schemas import Row
from kdissect.text import visible

_SHOWN_GROUPS = 6
SHOWN_EVENTS = 250  # of a group on its timeline; the CSV file has all
_STORY_ROWS = 15  # events of a rebalance on the page
_TOLD = ("time", "generation", "duration_ms", "detail", "packet", "capture_id")
_STORIES = 20  # rebalances of a group that the page shows event by event


def collect(database: Database, _: Options) -> Document:
    """Tables `groups_all`, `rebalances`, and the timelines of the groups that moved most."""
    database.run(
        """
        CREATE TEMP TABLE rebalances AS
        SELECT g.group_id, g.group_type, g.generation, g.time AS begin_time,
          g.time + to_microseconds((coalesce(g.duration_ms, 0) * 1000)::BIGINT) AS end_time,
          g.duration_ms, g.detail, g.exchange_id, x.packet, x.capture_id
        FROM group_events g LEFT JOIN requests x USING (exchange_id) WHERE g.event = 'rebalance'
        """
    )
    database.run(
        """
        CREATE TEMP TABLE groups_all AS
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
        """
    )
    groups = listed(database, LISTS["groups"])
    shown = groups["rows"][:_SHOWN_GROUPS]
    return {
        "groups": groups,
        "rebalances": listed(database, LISTS["rebalances"]),
        "timelines": [_timeline(database, row) for row in shown],
    }


def _timeline(database: Database, group: Row) -> Row:
    key = [group["group_id"], group["group_type"]]
    same = "g.group_id IS NOT DISTINCT FROM ? AND g.group_type IS NOT DISTINCT FROM ?"
    events = database.rows(
        f"""
        SELECT g.time, epoch_us(g.time) / 1000.0 AS t,
          epoch_us(g.time) / 1000.0 + coalesce(g.duration_ms, 0) AS t_end,
          g.event, g.member_id, g.client_id, g.generation, g.duration_ms, g.detail,
          x.packet, x.capture_id
        FROM group_events g LEFT JOIN requests x USING (exchange_id) WHERE {same}
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
                **{name: rebalance[name] for name in _TOLD},
                "events": inside,
                "result": stable["detail"] if stable else None,
            }
        )
    return stories


def section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["groups"]
    rebalances = {**d["rebalances"], "rows": [_with_reason(row) for row in d["rebalances"]["rows"]]}
    blocks = [
        Listing("groups", d["groups"]),
        *(
            block
            for number, timeline in enumerate(d["timelines"])
            for block in _timeline_blocks(timeline, number)
        ),
        Listing("rebalances", rebalances),
    ]
    return Section(
        "groups",
        "Groups",
        blocks if d["groups"]["total"] else [],
        "No group joined, left or rebalanced in this capture.",
        badge=d["groups"]["total"],
    )


def _with_reason(rebalance: Row) -> Row:
    """Return a rebalance with its reason in a column of its own, apart from its members."""
    members, _, why = (rebalance["detail"] or "").rpartition("why: ")
    return {**rebalance, "detail": members.rstrip("; "), "why": why}


def _timeline_blocks(timeline: Row, number: int) -> list[Block]:
    blocks: list[Block] = [_chart(timeline, number)]
    shown = len(timeline["events"])
    if timeline["total"] > shown:
        blocks.append(f"The first {f.count(shown)} of {f.count(timeline['total'])} events.")
    for index, story in enumerate(timeline["stories"]):
        generation = f"generation {f.count(story['generation'])}"
        explained = _with_reason(story)
        caption = f"Events up to {generation}"
        listing = Listing("story", story["events"], f"-{number}-{index}", caption, _STORY_ROWS)
        title = f"{f.dated(story['time'])}, {generation}, {f.duration(story['duration_ms'])}"
        why = visible(explained["why"] or explained["detail"], 240)
        blocks.append(Story(title, why, listing, visible(story["result"], 600)))
    return blocks


def _chart(timeline: Row, number: int) -> Chart:
    """A lane for the group and for each member, with its events and their durations."""
    rows = sorted(timeline["events"], key=lambda event: event["lane"] != "group")
    members = len({event["lane"] for event in rows} - {"group"})
    rebalances = sum(event["event"] == "rebalance" for event in rows)
    return group_events(
        f"group-{number}",
        f"Timeline of {visible(timeline['group_id'], 300)}",
        f"{f.plural(members, 'member')}, {f.plural(rebalances, 'rebalance')}.",
        rows,
    )
