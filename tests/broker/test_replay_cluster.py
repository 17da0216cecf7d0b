"""Captures of clusters on one broker, and of one broker on a cluster of three."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kdissect
from tests.broker.kafka_broker import AS_RECORDED, Broker, StartBroker, Unavailable, start_cluster
from tests.broker.replaying import EVERYTHING, replay
from tests.broker.sessions import Session, read_back
from tests.material import CAPTURES as MATERIAL
from tests.material import needed
from tests.truth import produced

pytestmark = [pytest.mark.broker, pytest.mark.heavy]
CLUSTER = MATERIAL / "cluster" / "cluster.pcap"
DELETED = "rf2"  # by its client, at the end


@pytest.fixture
def start_three(tmp_path: Path) -> Iterator[Callable[..., list[Broker]]]:
    """Starts a cluster of three nodes; they are stopped at the end."""
    started: list[Broker] = []

    def start(**options: Any) -> list[Broker]:
        try:
            nodes = start_cluster(tmp_path / f"cluster-{len(started)}", **options)
        except Unavailable as error:
            pytest.skip(f"no cluster: {error}")
        started.extend(nodes)
        return nodes

    yield start
    for broker in started:
        broker.stop()


def test_a_cluster_on_one_broker(start_broker: StartBroker, tmp_path: Path) -> None:
    """Three brokers, one killed and one stopped meanwhile, share groups, transactions: no
    difference on one broker, and another client reads what the captured ones wrote."""
    cluster = needed(CLUSTER)
    target = start_broker(settings=AS_RECORDED | {"share.coordinator.state.topic.min.isr": "1"})
    options = ("--create-topics", "--max-gap", "2s")
    done = replay(cluster, target.address, tmp_path / "r.jsonl", *EVERYTHING, *options)
    assert done.status == 0, done.explain()
    # the only one left out of those that a client had sent and the captured broker had done
    left_out = [row for row in done.rows if row["skipped"] == "not_translatable"]
    assert [row["api_name"] for row in left_out] == ["UnregisterBroker"]

    written: dict[Any, dict[Any, Any]] = defaultdict(dict)
    for one in produced.load(CLUSTER.with_name("cluster.produced.jsonl.gz")):
        record = one.key, one.value, one.headers or ()
        written[one.topic, one.partition][one.offset] = record
    held = read_back(target.address, sorted({topic for topic, _ in written}))
    unlisted = 0
    for place, log in written.items():
        records = [log[offset] for offset in sorted(log)]
        if place[0] != DELETED:
            listed = set(records)
            assert [each for each in held[place] if each in listed] == records, place
            unlisted += len(held[place]) - len(records)
    assert unlisted == 3  # of transactions that were fenced or ran out of time


def test_one_broker_on_a_cluster(
    session: Session, start_three: Callable[..., list[Broker]], tmp_path: Path
) -> None:
    """What one broker led is spread over three: requests are split among the leaders, their
    answers are put together, and nothing differs; the records are the same."""
    path, held = session
    nodes = start_three()
    tables = tmp_path / "tables"
    done = replay(path, nodes[0].address, tmp_path / "r.jsonl", *EVERYTHING, "--out", str(tables))
    assert done.status == 0, done.explain()
    assert read_back(nodes[1].address) == held
    sent = kdissect.open(tables).exchanges.to_pandas()
    captured = [row for row in done.rows if row["sent_time"] and row["api_name"] == "Fetch"]
    assert (sent.api_name == "Fetch").sum() > len(captured)
    assert {row["node_id"] for row in done.rows} >= {1, 2, 3}
