"""A recorded session of clients, replayed on an empty broker: same answers, same records."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import kdissect
from tests.broker.kafka_broker import BEFORE, StartBroker
from tests.broker.replaying import EVERYTHING, replay
from tests.broker.sessions import Session, read_back

pytestmark = pytest.mark.broker


def test_the_same_release(session: Session, start_broker: StartBroker, tmp_path: Path) -> None:
    """Producers, a group with two rebalances, transactions and admin calls, all allowed: no
    difference, the topics hold the same records in the same order, and every output says so."""
    path, held = session
    assert sum(map(len, held.values())) == 340
    target = start_broker()
    outputs = ["--junit", "r.xml", "--html", "r.html", "--out", "tables"]
    options = [each if each.startswith("-") else str(tmp_path / each) for each in outputs]
    done = replay(path, target.address, tmp_path / "r.jsonl", *EVERYTHING, *options)
    assert done.status == 0, done.explain()
    assert set(done.verdicts) == {"same", "tolerated", "skipped"}, done.explain()
    assert {row["skipped"] for row in done.rows} <= {None, "internal", "not_ready"}
    assert read_back(target.address) == held

    suites = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert suites.get("failures") == suites.get("errors") == "0"
    assert int(suites.get("tests", 0)) == len(done.rows) + 1
    assert {"Produce", "JoinGroup", "EndTxn"} <= {suite.get("name") for suite in suites}
    page = (tmp_path / "r.html").read_text()
    assert "<script" not in page
    assert "Latency then and now" in page
    tables = kdissect.open(tmp_path / "tables")
    sent = sum(row["sent_time"] is not None for row in done.rows)
    counts = tables.exchanges.to_pandas().api_name.value_counts()
    assert counts.sum() >= sent
    assert counts["Produce"] >= 34
    assert not len(tables.anomalies.to_pandas().query("severity == 'error'"))


@pytest.mark.heavy
@pytest.mark.parametrize("pace", ["x4", "max"])
def test_a_faster_pace_leaves_the_same_records(
    session: Session, start_broker: StartBroker, tmp_path: Path, pace: str
) -> None:
    """The same at other paces: order and dependencies do it, not the clock."""
    path, held = session
    target = start_broker()
    done = replay(path, target.address, tmp_path / "r.jsonl", *EVERYTHING, "--pace", pace)
    assert done.status == 0, done.explain()
    assert read_back(target.address) == held


@pytest.mark.heavy
def test_without_allow_nothing_is_written(
    session: Session, start_broker: StartBroker, tmp_path: Path
) -> None:
    """Without --allow nothing is written: no topic, no group, no record."""
    path, _ = session
    target = start_broker()
    done = replay(path, target.address, tmp_path / "r.jsonl", "--fail-on", "none")
    assert done.status == 0, done.explain()
    assert done.verdicts["skipped"] > 50
    assert "not_allowed" in {row["skipped"] for row in done.rows}
    assert not any(row["class"] != "read" and row["sent_time"] for row in done.rows)
    from confluent_kafka.admin import AdminClient

    topics = AdminClient({"bootstrap.servers": target.address}).list_topics(timeout=20).topics
    assert not [name for name in topics if not name.startswith("__")]


@pytest.mark.heavy
def test_the_release_before(session: Session, start_broker: StartBroker, tmp_path: Path) -> None:
    """On 3.9.1 the differences are those of the release, and the records are the same."""
    path, held = session
    target = start_broker(BEFORE)
    done = replay(path, target.address, tmp_path / "r.jsonl", *EVERYTHING)
    assert done.status == 1
    assert {api for api, *_ in done.differences()} <= {
        "CreateTopics",  # configs of each release
        "DescribeConfigs",
        "ConsumerGroupDescribe",  # not the default there
        "Metadata",
    }, done.explain()
    assert done.verdicts["error"] == 0
    assert read_back(target.address) == held


@pytest.mark.heavy
def test_saved_replays(session: Session, start_broker: StartBroker, tmp_path: Path) -> None:
    """A saved replay is sent as the capture is; a run is a baseline for others, and two brokers can
    be compared with each other."""
    path, held = session
    saved = tmp_path / "session.replay"
    first = start_broker()
    done = replay(path, first.address, tmp_path / "first.jsonl", *EVERYTHING, "--save", str(saved))
    assert done.status == 0, done.explain()
    assert saved.stat().st_size < path.stat().st_size
    target = start_broker()
    baseline = ("--baseline", str(tmp_path / "first.jsonl"))
    done = replay(saved, target.address, tmp_path / "again.jsonl", *EVERYTHING, *baseline)
    assert done.status == 0, done.explain()
    assert read_back(target.address) == held
    target.stop()
    one, other = start_broker(), start_broker()
    done = replay(saved, one.address, tmp_path / "a.jsonl", *EVERYTHING, "--against", other.address)
    assert done.status == 0, done.explain()
    assert done.run["compared_with"] == "the answers of another target"
    assert read_back(one.address) == read_back(other.address) == held


@pytest.mark.heavy
def test_topics_groups_and_transactional_ids_are_renamed(
    session: Session, start_broker: StartBroker, tmp_path: Path
) -> None:
    """Topics, groups and transactional ids have other names at the target."""
    path, held = session
    target = start_broker()
    renames = ("topic:orders=staging-orders", "group:billing=b2", "transactional-id:ledger-1=l")
    done = replay(
        path,
        target.address,
        tmp_path / "r.jsonl",
        *EVERYTHING,
        *(part for name in renames for part in ("--rename", name)),
    )
    assert done.status == 0, done.explain()
    got = read_back(target.address, ("staging-orders", "payments", "audit"))
    wanted = {
        ("staging-orders" if topic == "orders" else topic, number): records
        for (topic, number), records in held.items()
    }
    assert got == wanted
