"""Recordings with the broker's own log: the times of each request, and the rebalances of groups.

Members join and leave while producers pause, so that polls wait for data and for other members.
They run before other processes of the machine: otherwise the times of the capture and of the log
differ by more than a poll's limit. They lie under ``out/recordings``, a capture with
``server.log``; recording them needs what `tests.broker` needs, and root.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from pathlib import Path

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker.kafka_broker import Broker
from tests.broker.record import recording
from tools.truth.recordings import FOLDER, scheduled

COUNT = 3
SECONDS = 12.0
MEMBERS = 4
GROUPS = {"billing": "range", "audit": "cooperative-sticky"}
TOPIC, PARTITIONS = "orders", 6


def record(out: Path, seed: int) -> None:
    """One recording as ``capture.pcap`` with ``server.log``."""
    with tempfile.TemporaryDirectory() as folder:
        with scheduled(), Broker(Path(folder, "broker"), logs_requests=True) as broker:
            admin = AdminClient({"bootstrap.servers": broker.address})
            admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(20)
            capture = Path(folder, "capture.pcap")
            with recording(capture, [broker.ports["PLAINTEXT"]]):
                _run(broker.address, random.Random(seed))
        out.mkdir(parents=True)
        shutil.copy(capture, out)
        shutil.copy(Path(folder, "broker", "server.log"), out)


def _run(address: str, dice: random.Random) -> None:
    end = time.monotonic() + SECONDS
    threads = [threading.Thread(target=_produce, args=(address, end, dice.random()))]
    for group in GROUPS:
        for number in range(MEMBERS):
            joins = 0.0 if number == 0 else dice.uniform(0.5, SECONDS / 2)
            leaves = SECONDS if number < 2 else dice.uniform(SECONDS / 2, SECONDS)
            threads.append(
                threading.Thread(target=_consume, args=(address, group, number, joins, leaves))
            )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _produce(address: str, end: float, pause: float) -> None:
    producer = Producer({"bootstrap.servers": address, "client.id": "producer", "linger.ms": 0})
    number = 0
    while time.monotonic() < end:
        producer.produce(TOPIC, value=b"x" * (1 + number % 900))
        producer.flush(20)
        time.sleep(pause * (number % 5) / 5)
        number += 1


def _consume(address: str, group: str, number: int, joins: float, leaves: float) -> None:
    time.sleep(joins)
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "client.id": f"{group}-{number}",
            "group.id": group,
            "partition.assignment.strategy": GROUPS[group],
            "heartbeat.interval.ms": 300,
            "session.timeout.ms": 6000,
            "fetch.wait.max.ms": 200 + 100 * number,
        }
    )
    consumer.subscribe([TOPIC])
    end = time.monotonic() + leaves - joins
    while time.monotonic() < end:
        consumer.poll(0.1)
    consumer.close()


def made(count: int = COUNT) -> list[Path]:
    """The folders of `count` recordings; those that are not there yet are recorded."""
    paths = [FOLDER / f"logged-{number}" for number in range(count)]
    for number, path in enumerate(paths):
        if not path.exists():
            record(path, number)
    return paths
