"""The partitions of a Fetch are those of the sessions in request logs (KIP-227)."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

import kdissect
from tests.material import needs_material
from tests.truth import request_log
from tests.truth.material import Capture

pytestmark = needs_material
Ask = tuple[str, int]


def _places(topics: list[dict[str, Any]], names: dict[str, str]) -> set[Ask]:
    found = set()
    for topic in topics:
        name = topic.get("topic") or names.get(topic.get("topicId"), topic.get("topicId"))
        for partition in topic["partitions"]:
            found.add((name, partition if isinstance(partition, int) else partition["partition"]))
    return found


def logged_sessions(
    capture: Capture, names: dict[str, str]
) -> dict[tuple[int, int], dict[int, set[Ask]]]:
    """(broker port, session ID) -> epoch -> partitions, from the log."""
    steps: dict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
    for entry in request_log.load(capture.request_log_path):
        if entry.key[4] != 1:
            continue
        asked, given = entry.request, entry.response
        assert isinstance(asked, dict)
        if not isinstance(given, dict) or given.get("errorCode", 0) or "sessionId" not in asked:
            continue
        epoch = asked["sessionEpoch"]
        session = given["sessionId"] if epoch == 0 else asked["sessionId"]
        if session and epoch >= 0:
            steps[entry.key[2], session][epoch] = asked
    found: dict[tuple[int, int], dict[int, set[Ask]]] = {}
    for key, by_epoch in steps.items():
        if 0 not in by_epoch:
            continue
        state: set[Ask] = set()
        found[key] = {}
        for epoch in sorted(by_epoch):
            asked = by_epoch[epoch]
            state = state - _places(asked["forgottenTopicsData"], names)
            state = state | _places(asked["topics"], names)
            found[key][epoch] = state
    return found


@pytest.mark.parametrize(
    "name", ["java_latest/java_latest", "cluster/cluster", "old_clients/java_2_0_1"]
)
def test_fetches_ask_for_the_partitions_of_the_log(name: str, say: Callable[[str], None]) -> None:
    """Each logged Fetch asks for the partitions that its session's rows name."""
    capture = Capture(name)
    names = {row["topic_id"]: row["topic"] for row in capture.rows("topics")}
    stays: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in capture.rows("fetch_sessions"):
        assert row["state"] == "known"
        stays[row["broker_port"], row["session_id"]].append(row)
    fetches = 0
    for key, by_epoch in logged_sessions(capture, names).items():
        for epoch, expected in by_epoch.items():
            found = {
                (row["topic"], row["partition"])
                for row in stays[key]
                if row["first_epoch"] <= epoch <= row["last_epoch"]
            }
            assert found == expected, (key, epoch)
            fetches += 1
    assert fetches
    say(f"{capture}: {fetches} fetches of {len(stays)} sessions ask for what the log says")


def test_a_session_whose_start_is_missing_is_unknown() -> None:
    """The second half of a capture: no partition of an earlier session is said to be known."""
    path = Capture("cluster/cluster").path.parent.parent / "shapes" / "midstream.pcap"
    rows = kdissect.read(str(path)).fetch_sessions.to_pylist()
    assert all(row["state"] == "unknown" or row["first_epoch"] == 0 for row in rows)
