"""What is refused, and by which option it would be allowed."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kdissect.cli import app
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay import model
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.target import guard
from kdissect.replay.target.cluster import Target, parse_address
from kdissect.replay.translation.id_map import TargetCluster
from kdissect.replay.workload.source import load_workload
from tests.conftest import CAPTURES
from tests.replay.made import NODE, FakeBroker, answering

FACTS = model.WorkloadFacts(
    cluster_ids=["captured"],
    brokers={1: ("broker-1.example", 9092), 2: ("localhost", 9093)},
    listeners=[("127.0.0.1", 9092), ("2001:db8::1", 9092)],
)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("127.0.0.1", 9092),
        ("localhost", 9092),
        ("LOCALHOST", 9093),
        ("Broker-1.example", 9092),
        ("2001:db8:0::1", 9092),
        ("::ffff:127.0.0.1", 9092),
    ],
)
def test_addresses_of_the_captured_cluster(host: str, port: int) -> None:
    """As spelled in the capture, as another spelling, as a name of it."""
    with pytest.raises(model.OptionError, match="--allow same-cluster"):
        guard.check_address(FACTS, host, port)


def test_other_addresses_are_not_the_captured_cluster() -> None:
    """Another port, and a name without an address, are not the captured cluster."""
    guard.check_address(FACTS, "127.0.0.1", 9094)
    guard.check_address(FACTS, "no-such-name.invalid", 9092)


def test_the_captured_cluster_id_is_refused() -> None:
    """The captured cluster id is refused without --allow same-cluster."""
    target = Target("127.0.0.1", 9094, cluster=TargetCluster("captured"))
    with pytest.raises(model.OptionError, match="captured cluster"):
        guard.check_cluster(FACTS, target)
    for other in ("another", None):
        guard.check_cluster(FACTS, Target("h", 1, cluster=TargetCluster(other)))


def test_classes_are_allowed_by_name() -> None:
    """Case and spaces do not matter; other names raise OptionError."""
    assert guard.parse_allow([]) == frozenset()
    assert guard.parse_allow(["produce, groups", "Admin"]) == {"produce", "groups", "admin"}
    assert guard.parse_allow(["read"]) == frozenset()
    for wrong in ("all", "write", "produce,everything"):
        with pytest.raises(model.OptionError, match="produce, groups, transactions, admin"):
            guard.parse_allow([wrong])


def test_a_target_is_host_and_port() -> None:
    """HOST:PORT, with brackets around IPv6; other text raises OptionError."""
    assert parse_address("broker:9092") == ("broker", 9092)
    assert parse_address("[::1]:9092") == ("::1", 9092)
    for wrong in ("broker", "broker:", ":9092", "::1:9092", "b:0", "b:70000", "b:x"):
        with pytest.raises(model.OptionError):
            parse_address(wrong)


SOURCE = CAPTURES / "librdkafka.pcap"
EVERYTHING = ",".join(model.WRITING_CLASSES)
WRITES = {ApiKey.PRODUCE, ApiKey.CREATE_TOPICS, ApiKey.JOIN_GROUP, ApiKey.INIT_PRODUCER_ID}


class Holding:
    """A broker with the topic rd-events (500 records in partition 0), the topic rd-tx (empty), a
    group with members, and a transactional id."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.deleted: list[str] = []

    def body(self, api_key: int, request: dict[str, Any]) -> dict[str, Any] | None:
        self.asked.append(api_key)
        if api_key == ApiKey.METADATA:
            partition = {"partition_index": 0, "leader_id": 1, "replica_nodes": [1]}
            topics = [{"name": name, "partitions": [partition]} for name in ("rd-events", "rd-tx")]
            return {"brokers": [NODE], "topics": topics}
        if api_key == ApiKey.LIST_OFFSETS:
            for topic in request["topics"]:
                for each in topic["partitions"]:
                    is_end = each.pop("timestamp") == -1 and topic["name"] == "rd-events"
                    each["offset"] = 700 if is_end else 200 * (topic["name"] == "rd-events")
                    each.pop("current_leader_epoch", None)
            return {"topics": request["topics"]}
        if api_key == ApiKey.LIST_GROUPS:
            names = ("rd-classic", "another")
            return {"groups": [{"group_id": name, "group_state": "Stable"} for name in names]}
        if api_key == ApiKey.LIST_TRANSACTIONS:
            state = {"transactional_id": "rd-tx-1", "transaction_state": "Empty"}
            return {"transaction_states": [state]}
        if api_key == ApiKey.DELETE_TOPICS:
            topics = request.get("topics") or [{"name": name} for name in request["topic_names"]]
            self.deleted += [each["name"] for each in topics]
        return None


def run(holding: Holding, *options: str) -> Result:
    with FakeBroker(answering(holding.body)).running() as broker:
        command = ["replay", str(SOURCE), "--to", f"127.0.0.1:{broker.port}", "--quiet"]
        return CliRunner().invoke(app, [*command, "--pace", "max", *options])


def test_data_under_names_of_the_plan_ends_the_run() -> None:
    """The error lists each name with its data, and the option."""
    holding = Holding()
    done = run(holding, "--allow", EVERYTHING)
    assert isinstance(done.exception, model.OptionError)  # a user's mistake: exit code 2
    line = str(done.exception)
    for name in ("topic rd-events (500 records)", "group rd-classic (Stable)",
                 "transactional-id rd-tx-1 (Empty)", "--into-existing"):  # fmt: skip
        assert name in line
    assert "rd-tx (" not in line  # that topic is empty
    assert "another" not in line  # the plan does not name it
    assert not WRITES.intersection(holding.asked)


def test_a_run_that_only_reads_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a write no group is listed."""
    monkeypatch.setattr("kdissect.replay.target.settling.WAIT_S", 0.0)
    holding = Holding()
    done = run(holding, "--api", "Fetch")
    assert not isinstance(done.exception, model.OptionError)
    assert ApiKey.FETCH in holding.asked
    assert ApiKey.LIST_GROUPS not in holding.asked


@pytest.mark.parametrize("is_allowed", [False, True])
def test_existing_data_is_not_deleted(tmp_path: Path, is_allowed: bool) -> None:
    """Only delete-existing deletes topics that the replay did not create."""
    holding = Holding()
    lines = tmp_path / "r.jsonl"
    allow = f"{EVERYTHING},delete-existing" if is_allowed else EVERYTHING
    options = ("--allow", allow, "--into-existing", "--api", "DeleteTopics", "--json", str(lines))
    done = run(holding, *options)
    assert not isinstance(done.exception, model.OptionError)
    rows = [json.loads(line) for line in lines.read_text().splitlines()][1:-1]
    reasons = {row["reason"] for row in rows if row["skipped"] == "not_allowed"}
    if is_allowed:
        assert holding.deleted == ["rd-tx"]
        assert not reasons
    else:
        assert not holding.deleted
        assert any(
            "rd-tx was there before: needs --allow delete-existing" in each for each in reasons
        )


def effects(*allow: str, **options: Any) -> guard.Effects:
    plan = make_plan(load_workload(str(SOURCE)), model.PlanOptions(allow=frozenset(allow)))
    return guard.effects_of(plan, model.TranslateOptions(**options))


def test_effects_of_a_plan() -> None:
    """Topics, groups and transactional ids that a plan creates, writes and deletes."""
    found = effects(*model.WRITING_CLASSES)
    assert list(found.made) == [("topic", "rd-events"), ("topic", "rd-tx")]
    assert set(found.names("group")) >= {"rd-classic", "rd-coop", "rd-new"}
    assert found.names("transactional-id") == ["rd-tx-1"]
    assert {("topic", "rd-events"), ("topic", "rd-tx")} <= set(found.deleted)
    assert "__consumer_offsets" not in found.names("topic")
    renamed = effects(*model.WRITING_CLASSES, renames={("topic", "rd-tx"): "mine"})
    assert ("topic", "mine") in renamed.made
    assert "rd-tx" not in renamed.names("topic")
    assert effects() == guard.Effects()
    assert list(effects(makes_topics=True).made) == [("topic", "rd-events"), ("topic", "rd-tx")]


def test_a_dry_run_lists_them() -> None:
    """The plan's text counts and names them."""
    done = CliRunner().invoke(app, ["replay", str(SOURCE), "--dry-run", "--allow", EVERYTHING])
    assert done.exit_code == 0, done.output
    assert "would make 2 topics: rd-events, rd-tx" in done.stdout
    assert "would write to 1 transactional-id: rd-tx-1" in done.stdout
    assert "would delete 2 topics: rd-events, rd-tx" in done.stdout
