"""One workload recorded many times, from real brokers: recordings that are alike.

Each recording has a broker of its own, which a first run of the same workload has warmed up. They
lie under ``out/recordings``, a table set each with the machine's load beside it in ``NN.json``.
Recording them needs what `tests.broker` needs.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

import kdissect
from tests.broker.kafka_broker import Broker
from tests.broker.record import recording

PRODUCERS, CONSUMERS, ADMINS = 12, 6, 4
WARM_S, RECORD_S = 2.0, 6.0
COUNT = 30
FOLDER = Path(__file__).resolve().parents[2] / "out" / "recordings"
TOPIC, PARTITIONS = "orders", 6


def record(out: Path, seconds: float = RECORD_S) -> None:
    """One recording of the workload with a broker of its own, as a table set."""
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder, "broker")) as broker:
        _make_topic(broker.address)
        run_clients(broker.address, WARM_S)
        capture = Path(folder, "workload.pcap")
        assert broker.process is not None
        with (
            _measured(out.with_suffix(".json"), broker.process.pid),
            recording(capture, [broker.ports["PLAINTEXT"]]),
        ):
            run_clients(broker.address, seconds)
        kdissect.read(capture).write(out)


@contextmanager
def _measured(path: Path, broker_pid: int) -> Iterator[None]:
    """Write the load average, and the cores that other programs used meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic(), _other_seconds(broker_pid)
    yield
    seconds = time.monotonic() - began[0]
    others = (_other_seconds(broker_pid) - began[1]) / seconds
    path.write_text(json.dumps({"load": os.getloadavg()[0], "other_cores": others}) + "\n")


def _other_seconds(broker_pid: int) -> float:
    """CPU seconds since the machine's start of all programs except the broker and this one."""
    machine = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    idle = machine[3] + machine[4]
    broker = Path(f"/proc/{broker_pid}/stat").read_text().rpartition(")")[2].split()
    ticks = sum(machine) - idle - int(broker[11]) - int(broker[12])
    own = os.times()
    return ticks / os.sysconf("SC_CLK_TCK") - own.user - own.system


def load_of(path: Path) -> dict[str, float]:
    """The machine's `load` and `other_cores` during a recording."""
    return dict(json.loads(path.with_suffix(".json").read_text()))


def run_clients(address: str, seconds: float) -> None:
    """Producers, members of a group and administrators, each a client of its own."""
    end = time.monotonic() + seconds
    clients: list[tuple[Callable[[str, str, float], None], str]] = [
        *((_produce, f"producer-{number}") for number in range(PRODUCERS)),
        *((_consume, f"consumer-{number}") for number in range(CONSUMERS)),
        *((_administer, f"admin-{number}") for number in range(ADMINS)),
    ]
    threads = [threading.Thread(target=run, args=(address, name, end)) for run, name in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _make_topic(address: str) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(20)


def _produce(address: str, name: str, end: float) -> None:
    producer = Producer({"bootstrap.servers": address, "client.id": name, "linger.ms": 0})
    number = 0
    while time.monotonic() < end:
        producer.produce(TOPIC, value=f"{name} {number} ".encode() * (1 + number % 7))
        producer.poll(0)
        time.sleep(0.03)
        number += 1
    producer.flush(20)


def _consume(address: str, name: str, end: float) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "client.id": name,
            "group.id": "billing",
            "heartbeat.interval.ms": 300,
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
        }
    )
    consumer.subscribe([TOPIC])
    count = 0
    while time.monotonic() < end:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            count += 1
            if count % 10 == 0:
                consumer.commit(asynchronous=True)
    consumer.close()


def _administer(address: str, name: str, end: float) -> None:
    admin = AdminClient({"bootstrap.servers": address, "client.id": name})
    while time.monotonic() < end:
        admin.list_topics(timeout=20)
        admin.list_consumer_groups(request_timeout=20).result(20)
        time.sleep(0.1)


def made(count: int = COUNT) -> list[Path]:
    """The table sets of `count` recordings; those that are not there yet are recorded."""
    paths = [FOLDER / f"{number:02d}" for number in range(count)]
    for path in paths:
        if not path.exists():
            record(path)
    return paths
