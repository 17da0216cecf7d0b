"""Control runs on a real broker: what an unchanged broker does differently is no finding."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broker.kafka_broker import AS_RECORDED, LATEST, Broker, free_ports
from tests.broker.proxy import Proxy
from tests.broker.replaying import EVERYTHING, ROOT, replay

pytestmark = [pytest.mark.broker, pytest.mark.heavy]
SARAMA = ROOT / "captures" / "sarama.pcap.gz"
OPTIONS = (*EVERYTHING, "--create-topics", "--pace", "x4", "--control-runs", "2")


def test_a_broker_is_like_itself(start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    """Three runs into names of their own on one broker: no finding, and nothing of one run is in
    the topics of another."""
    target = start_broker(LATEST, settings=AS_RECORDED)
    options = (*OPTIONS, "--against", target.address)
    done = replay(SARAMA, target.address, tmp_path / "r.jsonl", *options)
    assert done.status == 0, done.explain()
    assert done.verdicts["same"] + done.verdicts["tolerated"] >= 500
    from confluent_kafka.admin import AdminClient

    topics = AdminClient({"bootstrap.servers": target.address}).list_topics(timeout=20).topics
    made = [name for name in topics if not name.startswith("__")]
    assert {name.rpartition("-")[2] for name in made} == {"1", "2", "3"}
    assert len({name.rpartition("-")[0] for name in made}) == len(made) / 3


@pytest.mark.parametrize("is_delayed", [True, False], ids=["slower", "as fast"])
def test_slower_answers_are_found(
    start_broker: Callable[..., Broker], tmp_path: Path, is_delayed: bool
) -> None:
    """100 ms more on each answer is a finding for all APIs together; the broker as its own
    reference is none."""
    broker = start_broker(LATEST, settings=AS_RECORDED)
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}" if is_delayed else broker.address
    with Proxy(port, broker.ports["PLAINTEXT"], delay_s=0.1).running():
        options = (*OPTIONS, "--against", broker.address, "--fail-on", "latency")
        done = replay(SARAMA, address, tmp_path / "r.jsonl", *options)
    slower = {each["subject"] for each in done.summary["findings"]}
    assert done.status == int(is_delayed), (slower, done.run["notes"])
    assert ("all APIs" in slower) is is_delayed
