"""Groups that rebalance too often, and members that poll too late."""

from itertools import count
from typing import Any

from tests.builders.tables import Row, at, connection, exchange, expect, found

GROUP = "billing"


def _events(*steps: tuple[float, str, str]) -> dict[str, Any]:
    """Events of a group at a second: (second, event, client id); each has an exchange."""
    exchanges: list[Row] = []
    events: list[Row] = []
    for number, (second, event, client) in enumerate(steps):
        exchanges.append(exchange(number, second=second, client_id=client))
        events.append({
            "group_id": GROUP, "group_type": "classic", "time": at(second), "event": event,
            "client_id": None if event == "rebalance" else client, "exchange_id": number,
            "duration_ms": 50.0, "detail": "",
        })  # fmt: skip
    return {"exchanges": exchanges, "group_events": events, "connections": [connection()]}


def _with_timeout(rows: dict[str, Any], timeout_ms: int) -> dict[str, Any]:
    joins = [
        {
            "exchange_id": row["exchange_id"],
            "request": {"group_id": GROUP, "rebalance_timeout_ms": timeout_ms},
        }
        for row in rows["group_events"]
        if row["event"] == "join"
    ]
    return rows | {"apis__JoinGroup": joins}


def test_a_member_that_flaps_makes_a_rebalance_loop() -> None:
    """A member that joins and leaves four times makes a rebalance loop."""
    steps: list[tuple[float, str, str]] = [(1, "join", "steady"), (1, "rebalance", "steady")]
    for start in (10, 13, 16, 19):
        steps += [(start, "join", "flapping"), (start, "rebalance", "flapping")]
        steps += [(start + 1, "leave", "flapping"), (start + 1.2, "rebalance", "steady")]
    (loop,) = found(**_events(*steps))
    expect(loop, "rebalance_loop", "bad", subject=GROUP, start=10)
    assert "flapping @ 10.0.0.1 ended and joined again 3 times" in loop["text"]


def test_a_member_that_crashes_again_and_again() -> None:
    """It sends no LeaveGroup, but its connections are closed before the next one joins."""
    rows = _events(
        *[(2.0 + number, "rebalance", "steady") for number in range(6)],
        *[(10.0 * number, "join", "crashing") for number in range(1, 6)],
    )
    joins = [row for row in rows["group_events"] if row["event"] == "join"]
    rows["connections"] = [connection(0)]
    for number, join in enumerate(joins, start=1):
        join["member_id"] = f"crashing-{number}"
        rows["exchanges"][join["exchange_id"]]["connection_id"] = number
        end = {"last_time": at(10 * number + 4), "closed_by": "client"}
        rows["connections"].append(connection(number, close_reason="rst", **end))
    (loop,) = found(**rows)
    expect(loop, "rebalance_loop", start=10)
    assert "crashing @ 10.0.0.1 ended and joined again 4 times" in loop["text"]
    for one in rows["connections"]:
        one["closed_by"] = "broker"  # a broker that restarts makes its members join again
    assert "crashing" not in str([row["text"] for row in found(**rows)])


def test_members_that_start_and_end_once_make_no_loop() -> None:
    """Six members that start and end once each make no rebalance loop."""
    steps = []
    for number in range(6):
        client = f"member-{number}"
        steps += [(number, "join", client), (number, "rebalance", client),
                  (30 + number, "leave", client), (30.5 + number, "rebalance", client)]  # fmt: skip
    assert found(**_events(*sorted(steps))) == []


def _restarts(members: int, rounds: int) -> dict[str, Any]:
    """Members with one client id start; then each of them ends and starts again, in rounds."""
    steps = []
    ends = [10.0 + 4 * number for number in range(members * rounds)]
    for second in (*map(float, range(members)), *(end + 2 for end in ends)):
        steps += [(second, "join", "rdkafka"), (second, "rebalance", "rdkafka")]
    rows = _events(*sorted(steps + [(end, "leave", "rdkafka") for end in ends]))
    rows["connections"] = []
    opened, closed = count(), iter(ends)
    for event in rows["group_events"]:
        if event["event"] == "join":
            number = next(opened)
            last = {"last_time": at(end)} if (end := next(closed, None)) else {}
            rows["connections"].append(connection(number, closed_by="client", **last))
            rows["exchanges"][event["exchange_id"]]["connection_id"] = number
            event["member_id"] = f"rdkafka-{number}"
    return rows


def test_members_with_one_client_id_that_are_restarted_once() -> None:
    """A deployment restarts each of four members once; a loop restarts one of them on and on."""
    assert found(**_restarts(4, 1)) == []
    (loop,) = found(**_restarts(1, 5))
    assert loop["kind"] == "rebalance_loop"


def test_a_member_that_leaves_after_its_poll_interval() -> None:
    """Its connection stays open, and it joins again when its application polls."""
    rows = _with_timeout(
        _events((1, "join", "slow"), (6, "leave", "slow"), (9, "join", "slow")), 4000
    )
    (slow,) = found(**rows)
    expect(slow, "member_too_slow", subject=GROUP, start=6, end=9)
    assert "did not poll within 4.00 s" in slow["text"]


def test_a_member_that_leaves_earlier_or_closes_its_connection() -> None:
    """A leave before the poll timeout, or with its connection, is no slow member."""
    early = _events((1, "join", "app"), (3, "leave", "app"), (9, "join", "app"))
    assert found(**_with_timeout(early, 4000)) == []
    closing = _events((1, "join", "app"), (6, "leave", "app"))
    closing["connections"] = [connection(last_time=at(6.01), close_reason="fin")]
    assert found(**_with_timeout(closing, 4000)) == []
