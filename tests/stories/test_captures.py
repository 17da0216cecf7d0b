"""The stories of real captures are those of the brokers' request logs.

Every expected number is counted in the log (or in the list of what clients wrote), never in
tables of ours.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.material import needs_material
from tests.truth import request_log
from tests.truth.material import Capture, read

pytestmark = needs_material

NAMES = [
    *("transactions/transactions", "cluster/cluster", "java_latest/java_latest"),
    *("share_streams/share", "share_streams/streams", "other_clients/librdkafka"),
    *("other_clients/kafka_python", "version_sweep/sweep_4_3_1", "tls/tls13"),
]
REPEATED = ["old_clients/java_2_0_1", "other_clients/sarama", "tls/tls12"]
EPOCH_APIS = {68: "consumer", 76: "share", 88: "streams"}


@pytest.fixture(
    params=[*NAMES, *(pytest.param(name, marks=pytest.mark.heavy) for name in REPEATED)],
    scope="module",
)
def capture(request: pytest.FixtureRequest) -> Capture:
    return Capture(request.param)


def bodies(
    capture: Capture, *api_keys: int
) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """(api key, request, response) of the log, without those that a broker forwarded."""
    for entry in request_log.load(capture.request_log_path):
        if entry.key[4] in api_keys and not entry.is_forwarded:
            assert isinstance(entry.request, dict)
            if isinstance(entry.response, dict):  # a Produce with acks=0 has none
                yield entry.key[4], entry.request, entry.response


def events(capture: Capture, *names: str) -> list[dict[str, Any]]:
    return [row for row in capture.rows("group_events") if row["event"] in names]


def test_every_join_and_sync(capture: Capture, say: Callable[[str], None]) -> None:
    """One row for each JoinGroup and SyncGroup, and for each first heartbeat of a member."""
    joins: Counter[Any] = Counter()
    for _, asked, given in bodies(capture, 11):
        member = given["memberId"] or asked["memberId"]
        joins["classic", asked["groupId"], member, given["generationId"]] += 1
    for key, asked, given in bodies(capture, *EPOCH_APIS):
        if asked["memberEpoch"] == 0:
            member = given["memberId"] or asked["memberId"]
            joins[EPOCH_APIS[key], asked["groupId"], member, given["memberEpoch"]] += 1
    syncs: Counter[Any] = Counter()
    for _, asked, _ in bodies(capture, 14):
        syncs["classic", asked["groupId"], asked["memberId"], asked["generationId"]] += 1
    for key, asked, given in bodies(capture, *EPOCH_APIS):
        has_tasks = given.get("activeTasks") is not None
        if not given["errorCode"] and (given.get("assignment") is not None or has_tasks):
            member = given["memberId"] or asked["memberId"]
            syncs[EPOCH_APIS[key], asked["groupId"], member, given["memberEpoch"]] += 1
    for name, expected in (("join", joins), ("sync", syncs)):
        found = Counter(
            (row["group_type"], row["group_id"], row["member_id"], row["generation"])
            for row in events(capture, name)
        )
        assert found == expected
        say(f"{capture}: {expected.total()} {name} rows")


def test_leaves_are_those_of_the_log(capture: Capture) -> None:
    """Leave events have the members and reasons of the logged requests."""
    leaves: Counter[Any] = Counter()
    for _, asked, _ in bodies(capture, 13):
        members = asked.get("members", [asked])
        for member in members:
            reason = member.get("reason") or ""
            leaves[asked["groupId"], member["memberId"], reason] += 1
    for _, asked, _ in bodies(capture, *EPOCH_APIS):
        if asked["memberEpoch"] < 0:
            leaves[asked["groupId"], asked["memberId"], ""] += 1
    found: Counter[Any] = Counter()
    for row in events(capture, "leave"):
        reasons = {reason for group, member, reason in leaves if member == row["member_id"]}
        said = next((reason for reason in reasons if reason and reason in row["detail"]), "")
        found[row["group_id"], row["member_id"], said] += 1
    assert found == leaves


def test_every_refusal(capture: Capture, say: Callable[[str], None]) -> None:
    """Refused heartbeats and commits are events, and other requests are not."""
    heartbeats: Counter[Any] = Counter()
    for key, asked, given in bodies(capture, 12, *EPOCH_APIS):
        if given["errorCode"] and (key == 12 or asked["memberEpoch"] > 0):
            heartbeats[asked["groupId"], asked["memberId"]] += 1
    commits: Counter[Any] = Counter()
    for _, asked, given in bodies(capture, 8, 28):
        partitions = [part for topic in given["topics"] for part in topic["partitions"]]
        if any(part["errorCode"] for part in partitions):
            commits[asked["groupId"], asked.get("memberId", "")] += 1
    for name, expected in (("heartbeat_error", heartbeats), ("commit_error", commits)):
        rows = events(capture, name)
        assert Counter((row["group_id"], row["member_id"] or "") for row in rows) == expected
        say(f"{capture}: {expected.total()} {name} rows")


def test_generations(capture: Capture, say: Callable[[str], None]) -> None:
    """A rebalance for each generation that somebody joined; stable where somebody synced."""
    sizes: dict[Any, int] = {}
    joined: dict[Any, set[str]] = {}
    leaders: dict[Any, str] = {}
    for _, asked, given in bodies(capture, 11):
        if given["errorCode"] == 0:
            key = asked["groupId"], given["generationId"]
            joined.setdefault(key, set()).add(given["memberId"])
            sizes[key] = max(sizes.get(key, 0), len(given["members"]))
            leaders[key] = given["leader"]
    synced = {
        (asked["groupId"], asked["generationId"])
        for _, asked, given in bodies(capture, 14)
        if given["errorCode"] == 0
    }
    rebalances = {
        (row["group_id"], row["generation"]): row
        for row in events(capture, "rebalance")
        if row["group_type"] == "classic"
    }
    assert rebalances.keys() == joined.keys()
    for key, row in rebalances.items():
        assert leaders[key] in row["detail"]
        assert all(member in row["detail"] for member in joined[key])
        size = sizes[key] or len(joined[key])
        assert f"of {size} member" in row["detail"], (key, row)
        assert (row["duration_ms"] or 0) >= 0
    stable = [row for row in events(capture, "stable") if row["group_type"] == "classic"]
    assert {(row["group_id"], row["generation"]) for row in stable} == synced
    assert len(stable) == len(synced)
    say(f"{capture}: {len(joined)} generations, {len(synced)} of them stable")


def test_a_rebalance_lasts_from_the_first_join_to_the_last_sync(capture: Capture) -> None:
    """The times are those of `exchanges` for the logged requests."""
    tables = capture.tables
    times = {
        row["exchange_id"]: (row["request_time_ns"], row["response_time_ns"])
        for row in capture.rows("exchanges")
    }
    span: dict[Any, list[int]] = {}
    good: set[Any] = set()
    for name, first in (("JoinGroup", True), ("SyncGroup", False)):
        if f"apis/{name}" not in tables.names:
            continue
        for row in capture.rows(f"apis/{name}"):
            asked, given = row["request"], row["response"]
            if given is None or given["error_code"] != 0:
                continue
            number = given["generation_id"] if first else asked["generation_id"]
            key = asked["group_id"], number
            begin, end = times[row["exchange_id"]]
            if first:
                span.setdefault(key, [begin, 0])[0] = min(begin, span.get(key, [begin])[0])
            elif key in span:
                good.add(key)
                span[key][1] = max(span[key][1], end)
    for row in events(capture, "rebalance"):
        key = row["group_id"], row["generation"]
        if row["group_type"] == "classic" and key in good:
            begin, end = span[key]
            assert row["duration_ms"] == pytest.approx((end - begin) / 1e6)


def test_transactions_end_as_the_log_says(capture: Capture, say: Callable[[str], None]) -> None:
    """Each EndTxn that a broker accepted is a transaction; what else there is was fenced or
    ended by the coordinator."""
    expected: Counter[Any] = Counter()
    for _, asked, given in bodies(capture, 26):
        if given["errorCode"] == 0:
            outcome = "commit" if asked["committed"] else "abort"
            where = asked["transactionalId"], asked["producerId"], asked["producerEpoch"]
            expected[*where, outcome] += 1
    found: Counter[Any] = Counter()
    for row in capture.rows("transactions"):
        where = row["transactional_id"], row["producer_id"], row["producer_epoch"]
        found[*where, row["outcome"]] += 1
    assert expected <= found
    for (name, *_, outcome), _ in (found - expected).items():
        assert ("fence" in name and outcome == "fenced") or (
            "open" in name and outcome == "abort"
        ), (name, outcome)
    say(f"{capture}: {expected.total()} ended, {(found - expected).total()} others")


@pytest.mark.parametrize("name", ["transactions/transactions", "cluster/cluster"])
def test_fenced_and_timed_out(name: str) -> None:
    """The scenario: one producer is fenced twice by others (once by the admin client), and one
    leaves its transaction open until the coordinator aborts it (its EndTxn gets error 48)."""
    rows = Capture(name).rows("transactions")
    suffix = "-c" if "cluster" in name else ""
    fenced = [row for row in rows if row["transactional_id"] == f"tx-fence{suffix}"]
    assert sorted(row["outcome"] for row in fenced) == ["commit", "fenced", "fenced"]
    (left,) = (row for row in rows if row["transactional_id"] == f"tx-open{suffix}")
    assert left["outcome"] == "abort"
    assert left["duration_ms"] > 1000  # transaction.timeout.ms was 1000


@pytest.mark.parametrize("name", ["transactions/transactions", "cluster/cluster"])
def test_records_of_transactions(name: str, say: Callable[[str], None]) -> None:
    """As many records as the clients' own list says they committed and aborted; it leaves out
    the single records of the fenced and of the open transactions."""
    capture = Capture(name)
    written = Counter(row["how"] for row in request_log.read_lines(capture.produced_path))
    found: Counter[str] = Counter()
    for row in capture.rows("transactions"):
        if "fence" in row["transactional_id"] or "open" in row["transactional_id"]:
            assert row["record_count"] <= 1
            continue
        found["commit" if row["outcome"] == "commit" else "abort"] += row["record_count"]
    for how in ("commit", "abort"):
        assert found[how] == written[how]
    say(f"{capture}: {dict(found)} records")


def test_partitions_of_transactions(capture: Capture) -> None:
    """All partitions that a coordinator's markers name, for the transactions they end."""
    given_ids = {given["producerId"] for _, _, given in bodies(capture, 22)}
    wanted: Counter[Any] = Counter()
    for _, asked, _ in bodies(capture, 27):
        for marker in asked["markers"]:
            if marker["producerId"] not in given_ids:
                continue  # the sweep asks with one that nobody has
            for topic in marker["topics"]:
                for partition in topic.get("partitionIndexes", ()):
                    wanted[marker["producerId"], topic["name"], partition] += 1
    found: Counter[Any] = Counter()
    for row in capture.rows("transactions"):
        if row["partitions"] and row["outcome"] != "open":
            for place in row["partitions"]:
                found[row["producer_id"], place["topic"], place["partition"]] += 1
    assert wanted <= found if "cluster" in str(capture) else wanted == found


def test_no_sequence_is_missing(capture: Capture) -> None:
    """No broker complained of a sequence (errors 45, 46) in these captures, nor do we."""
    codes = Counter(
        part["errorCode"]
        for _, _, given in bodies(capture, 0)
        for topic in given["responses"]
        for part in topic["partitionResponses"]
    )
    assert not codes[45]
    assert not codes[46]
    kinds = Counter(row["kind"] for row in capture.rows("anomalies"))
    assert not kinds["sequence_gap"]
    assert not kinds["sequence_duplicate"]


def test_lost_packets_make_no_false_story() -> None:
    """With 1 % of the packets missing, each event is also one of the whole capture."""
    base = Capture("other_clients/librdkafka")
    damaged = read(base.path.parent.parent / "shapes" / "drop1pct.pcap")

    def told(rows: list[dict[str, Any]]) -> set[Any]:
        return {
            (row["group_id"], row["event"], row["member_id"], row["generation"])
            for row in rows
            if row["event"] in ("leave", "heartbeat_error", "rebalance", "stable")
        }

    assert told(damaged.group_events.to_pylist()) <= told(base.rows("group_events"))


def test_offsets_of_transactions(capture: Capture, say: Callable[[str], None]) -> None:
    """What TxnOffsetCommits of the log committed stands with the transactions they belong to."""
    wanted: dict[Any, dict[Any, int]] = {}
    for _, asked, given in bodies(capture, 28):
        refused = {
            (topic["name"], part["partitionIndex"])
            for topic in given["topics"]
            for part in topic["partitions"]
            if part["errorCode"]
        }
        for topic in asked["topics"]:
            for part in topic["partitions"]:
                place = topic["name"], part["partitionIndex"]
                if place not in refused:
                    where = asked["transactionalId"], asked["producerId"], asked["producerEpoch"]
                    of_producer = wanted.setdefault(where, {})
                    of_producer[(asked["groupId"], *place)] = part["committedOffset"]
    found: dict[Any, dict[Any, int]] = {}
    for row in sorted(capture.rows("transactions"), key=lambda row: str(row["begin_time"])):
        where = row["transactional_id"], row["producer_id"], row["producer_epoch"]
        for one in row["offsets"]:
            place = one["group_id"], one["topic"], one["partition"]
            found.setdefault(where, {})[place] = one["offset"]  # the last one stays
    assert found == wanted
    with_offsets = sum(bool(row["offsets"]) for row in capture.rows("transactions"))
    say(f"{capture}: {with_offsets} transactions with offsets")
