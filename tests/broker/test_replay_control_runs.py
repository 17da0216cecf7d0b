"""Control runs on a real broker excuse differences of an unchanged broker."""

import asyncio
from pathlib import Path

import pytest

from kdissect.replay.model import TranslateOptions
from kdissect.replay.target.cluster import Target, parse_address
from kdissect.replay.target.state import State, read_state
from kdissect.replay.workload.saved_file import save
from kdissect.replay.workload.source import load_workload
from tests.broker.kafka_broker import AS_RECORDED, LATEST, StartBroker, free_ports
from tests.broker.proxy import Proxy
from tests.broker.replaying import EVERYTHING, ROOT, replay
from tests.broker.sessions import read_back
from tests.builders.workloads import time_of_first_records

pytestmark = [pytest.mark.broker, pytest.mark.heavy]
SARAMA = ROOT / "captures" / "sarama.pcap.gz"
OPTIONS = (*EVERYTHING, "--create-topics", "--pace", "x4", "--control-runs", "2")


def test_a_broker_is_like_itself(start_broker: StartBroker, tmp_path: Path) -> None:
    """Three runs into names of their own on one broker: no finding, and the replay deletes what
    they have made."""
    target = start_broker(LATEST, settings=AS_RECORDED)
    options = (*OPTIONS, "--against", target.address)
    done = replay(SARAMA, target.address, tmp_path / "r.jsonl", *options)
    assert done.status == 0, done.explain()
    assert done.verdicts["same"] + done.verdicts["tolerated"] >= 500
    from confluent_kafka.admin import AdminClient

    topics = AdminClient({"bootstrap.servers": target.address}).list_topics(timeout=20).topics
    assert not [name for name in topics if not name.startswith("__")]


@pytest.mark.parametrize("is_delayed", [True, False], ids=["slower", "as fast"])
def test_slower_answers_are_found(
    start_broker: StartBroker, tmp_path: Path, is_delayed: bool
) -> None:
    """100 ms more on each answer is a finding for all APIs together; the broker as its own
    reference is none."""
    broker = start_broker(LATEST, settings=AS_RECORDED)
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}" if is_delayed else broker.address
    with Proxy(port, broker.ports["PLAINTEXT"], delay_s=0.1).running():
        options = (*OPTIONS, "--control-runs", "4", "--against", broker.address)
        options = (*options, "--fail-on", "latency")
        done = replay(SARAMA, address, tmp_path / "r.jsonl", *options)
    slower = {each["subject"] for each in done.summary["findings"]}
    assert done.status == int(is_delayed), (slower, done.run["notes"])
    assert ("all APIs" in slower) is is_delayed


def test_the_state_after_a_run_is_read_back(start_broker: StartBroker, tmp_path: Path) -> None:
    """Records and committed offsets as an independent client reads them, and no finding."""
    from confluent_kafka import ConsumerGroupTopicPartitions
    from confluent_kafka.admin import AdminClient

    broker = start_broker(LATEST, settings=AS_RECORDED)
    options = (*EVERYTHING, "--create-topics", "--pace", "x4")
    done = replay(SARAMA, broker.address, tmp_path / "r.jsonl", *options)
    assert done.status == 0, done.explain()
    assert done.summary["findings"] == []
    admin = AdminClient({"bootstrap.servers": broker.address})
    topics = [name for name in admin.list_topics(timeout=20).topics if not name.startswith("__")]
    groups = [each.group_id for each in admin.list_consumer_groups().result().valid]

    async def run() -> State:
        host, port = parse_address(broker.address)
        target = Target(host, port)
        await target.probe()
        commits = {("commit", group): () for group in groups}
        state = await read_state(target, topics, commits, TranslateOptions())
        target.close()
        return state

    state = asyncio.run(run())
    assert not state.unread
    counts = {log: len(records) for log, records in read_back(broker.address, topics).items()}
    assert {log: extent.records for log, extent in state.logs.items()} == counts
    assert sum(counts.values()) > 50
    for group in groups:
        wanted = [ConsumerGroupTopicPartitions(group)]
        listed = admin.list_consumer_group_offsets(wanted)[group].result().topic_partitions
        assert {("commit", group, each.topic, each.partition): each.offset for each in listed} == {
            subject: offset
            for subject, offset in state.facts.items()
            if subject[:2] == ("commit", group)
        }


def test_missing_state_of_an_empty_broker_is_listed_first(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """The end of a capture began with topics and records: on the broker that has the whole capture
    nothing is missing, under another name everything is."""
    broker = start_broker(LATEST, settings=AS_RECORDED)
    whole = replay(SARAMA, broker.address, tmp_path / "r.jsonl", *EVERYTHING, "--pace", "x4")
    assert whole.status == 0, whole.explain()
    path = tmp_path / "part.replay"
    begin_ns = time_of_first_records(load_workload([str(SARAMA)]))
    save(load_workload([str(SARAMA)], from_ns=begin_ns), str(path))
    options = ("--pace", "x4", "--fail-on", "none")
    done = replay(path, broker.address, tmp_path / "r.jsonl", *options)
    assert not [note for note in done.run["notes"] if "answers will differ" in note]
    rename = ("--rename", "topic:sarama-2.1.0=absent")
    done = replay(path, broker.address, tmp_path / "r.jsonl", *options, *rename)
    assert (
        "answers will differ: the target lacks topic absent with 4 partitions" in done.run["notes"]
    )
    assert "of absent-0" in done.errors
