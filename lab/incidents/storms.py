"""Clients that ask far too often, and clients that a quota slows down."""

import time
from datetime import datetime

from confluent_kafka.admin import AdminClient

from lab.incidents.brokers import ports_of
from lab.incidents.clients import (
    LIBRDKAFKA,
    TOPIC,
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
    with scene.orders(6) as broker, producing(LIBRDKAFKA, broker.address, "shop", 10):
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
    create_topic(nodes[0].address, 1, 3, min_insync_replicas="3")
    create_topic(nodes[0].address, topic="other")
    pause_ms = scene.pick(20, 50)
    nodes[2].stop()
    with (
        scene.recording(*ports_of(nodes)),
        producing(LIBRDKAFKA, nodes[0].address, "steady", 10, topic="other"),
    ):
        time.sleep(3)
        config = {"acks": "all", "retry_backoff_ms": pause_ms, "retry_backoff_max_ms": pause_ms}
        one = producer(nodes[0].address, client_id="shop", message_timeout_ms=60_000, **config)
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
    create_topic(broker.address)
    set_quota(broker.address, "bulk", "producer_byte_rate", float(scene.pick(4000, 6000)))
    with scene.recording(broker.ports[PLAINTEXT]), reading(broker.address, "billing"):
        write_throttled(scene, broker.address, scene.pick(14, 20), scene.pick(900, 1500))


def write_throttled(scene: Scene, address: str, duration_s: float, size: int) -> None:
    """A client writes records against its quota for some time."""
    throttled: list[datetime] = []
    one = producer(address, client_id="bulk", throttle_cb=lambda _: throttled.append(now()))
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        one.produce(TOPIC, b"x" * size)
        one.poll(0.05)
    scene.happened("throttled", client("bulk"), throttled[0])
    one.purge()
    one.flush(5)


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
