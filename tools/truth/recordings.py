"""One workload recorded many times, from real brokers: recordings that are alike.

Each recording has a broker of its own, which a first run of the same workload has warmed up. A
machine's load changes from minute to minute, and latencies with it. So the recordings of a run are
made at the same time: they had the same machine. They lie under ``out/recordings``, a table set
each, with the load average of each run. Recording them needs what `tests.broker` needs.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

import kdissect
from tests.broker.kafka_broker import Broker
from tests.broker.record import recording

PRODUCERS, CONSUMERS, ADMINS = 12, 6, 4
WARM_S, RECORD_S = 2.0, 6.0
RUNS, TOGETHER = 10, "abc"  # recordings of a run: 00a, 00b, 00c
START_S = 120
FOLDER = Path(__file__).resolve().parents[2] / "out" / "recordings"
TOPIC, PARTITIONS = "orders", 6


def record(out: Path, together: threading.Barrier) -> None:
    """One recording of the workload with a broker of its own, as a table set.

    together: the recordings that begin at the same time.
    """
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder, "broker")) as broker:
        _make_topic(broker.address)
        run_clients(broker.address, WARM_S)
        capture = Path(folder, "workload.pcap")
        with recording(capture, [broker.ports["PLAINTEXT"]]):
            together.wait(START_S)
            run_clients(broker.address, RECORD_S)
        kdissect.read(capture).write(out)


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


def made(count: int = RUNS) -> list[list[Path]]:
    """The table sets of `count` runs; a run that is not there yet is recorded."""
    runs = [[FOLDER / f"{number:02d}{name}" for name in TOGETHER] for number in range(count)]
    for number, paths in enumerate(runs):
        if not all(path.exists() for path in paths):
            together = threading.Barrier(len(paths))
            with ThreadPoolExecutor(len(paths)) as pool:
                list(pool.map(lambda path, start=together: record(path, start), paths))
            (FOLDER / f"{number:02d}.load").write_text(f"{os.getloadavg()[0]}\n")
    return runs


def loads(count: int = RUNS) -> list[float]:
    """The load average of the machine after each run."""
    return [float((FOLDER / f"{number:02d}.load").read_text()) for number in range(count)]
