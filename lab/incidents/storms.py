"""Clients that ask far too often, and clients that a quota slows down."""

from __future__ import annotations

import time
from datetime import datetime

from confluent_kafka.admin import AdminClient

from lab.incidents.clients import (
    LIBRDKAFKA,
    call,
    create_topic,
    producer,
    producing,
    reading,
    running,
)
from lab.incidents.scene import PLAINTEXT, Scene, client, now

_ALTER_CLIENT_QUOTAS = 49


def metadata_stormed(scene: Scene) -> None:
    """An application asks for the metadata of all topics in a loop."""
    broker = scene.broker()
    create_topic(broker.address, "orders", 6)
    with (
        scene.recording(broker.ports[PLAINTEXT]),
        producing(LIBRDKAFKA, broker.address, "orders", "shop", 10),
    ):
        time.sleep(4)
        admin = AdminClient({"bootstrap.servers": broker.address, "client.id": "monitor"})
        with (
            scene.incident("metadata_storm", client("monitor")),
            running(lambda: admin.list_topics(timeout=30), scene.pick(0.01, 0.02)),
        ):
            time.sleep(scene.pick(8, 12))
        time.sleep(3)


def retries_stormed(scene: Scene) -> None:
    """Writes fail with NOT_ENOUGH_REPLICAS, and the producer sends them again every 20 ms."""
    nodes = scene.cluster(settings={"offsets.topic.replication.factor": "3"})
    create_topic(nodes[0].address, "orders", 1, 3, min_insync_replicas="3")
    create_topic(nodes[0].address, "other")
    pause_ms = scene.pick(20, 50)
    nodes[2].stop()
    with (
        scene.recording(*(node.ports[PLAINTEXT] for node in nodes)),
        producing(LIBRDKAFKA, nodes[0].address, "other", "steady", 10),
    ):
        time.sleep(3)
        one = producer(
            nodes[0].address, client_id="shop", acks="all", message_timeout_ms=60_000,
            retry_backoff_ms=pause_ms, retry_backoff_max_ms=pause_ms,
        )  # fmt: skip
        one.list_topics("orders", timeout=30)
        end = time.monotonic() + scene.pick(6, 10)
        with scene.incident("retry_storm", client("shop")):
            one.produce("orders", b"x" * 200)
            while time.monotonic() < end:
                one.poll(0.1)
        one.purge()
        one.flush(5)


def quota_exceeded(scene: Scene) -> None:
    """A quota of bytes per second slows one client down."""
    broker = scene.broker()
    create_topic(broker.address, "orders")
    set_quota(broker.address, "bulk", "producer_byte_rate", float(scene.pick(4000, 6000)))
    throttled: list[datetime] = []
    with scene.recording(broker.ports[PLAINTEXT]), reading(broker.address, "orders", "billing"):
        one = producer(
            broker.address, client_id="bulk", throttle_cb=lambda _: throttled.append(now())
        )
        end = time.monotonic() + scene.pick(14, 20)
        while time.monotonic() < end:
            one.produce("orders", b"x" * scene.pick(900, 1500))
            one.poll(0.05)
        ended = now()
        one.purge()
        one.flush(5)
    scene.happened("throttled", client("bulk"), throttled[0], ended)


def set_quota(address: str, client_id: str, key: str, bytes_per_second: float) -> None:
    """Set a quota of a client id; key: such as ``producer_byte_rate``."""
    entry = {
        "entity": [{"entity_type": "client-id", "entity_name": client_id}],
        "ops": [{"key": key, "value": bytes_per_second, "remove": False}],
    }
    body = {"entries": [entry], "validate_only": False}
    done = call(address, _ALTER_CLIENT_QUOTAS, 1, body)
    assert all(one["error_code"] == 0 for one in done["entries"])
    time.sleep(1)
