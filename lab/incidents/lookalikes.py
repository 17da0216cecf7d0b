"""Healthy sessions that resemble incidents: none of them has one above `info`."""

import time
from contextlib import ExitStack

from confluent_kafka.admin import AdminClient

from lab.incidents.clients import (
    KAFKA_PYTHON,
    LIBRDKAFKA,
    consumer,
    create_topic,
    drain,
    member,
    producer,
    producing,
    reading,
    running,
)
from lab.incidents.java_clients import CONSUME, PRODUCE, java_running
from lab.incidents.scene import PLAINTEXT, Scene, pause, wait_until

_REPLICATED = {"offsets.topic.replication.factor": "3"}


def rolling_restart(scene: Scene) -> None:
    """Healthy: each of three nodes stops in order and starts again, with pauses."""
    nodes = scene.cluster(settings=_REPLICATED)
    create_topic(nodes[0].address, 3, 3)
    addresses = ",".join(node.address for node in nodes)
    with scene.recording(*(node.ports[PLAINTEXT] for node in nodes)), ExitStack() as stack:
        stack.enter_context(java_running(PRODUCE, addresses, "shop", {"pause_ms": 40}))
        stack.enter_context(java_running(CONSUME, addresses, "billing-1", group_id="billing"))
        stack.enter_context(member(addresses, "audit", "audit-1"))
        time.sleep(3)
        for node in nodes:
            node.stop()
            time.sleep(scene.pick(2, 4))
            node.start()
            time.sleep(scene.pick(5, 8))


def group_grows(scene: Scene) -> None:
    """Healthy: a group grows from one member to five within seconds, and shrinks again."""
    with scene.orders(8) as broker, ExitStack() as stack:
        stack.enter_context(producing(KAFKA_PYTHON, broker.address, "shop", 40))
        with ExitStack() as members:
            for number in range(scene.pick(5, 7)):
                one = member(broker.address, "billing", f"billing-{number}")
                is_assigned = members.enter_context(one)
                wait_until(is_assigned.is_set)
                time.sleep(scene.pick(1.5, 0.8))
            time.sleep(4)
        time.sleep(1)


def consumers_idle(scene: Scene) -> None:
    """Healthy: consumers of a topic to which nothing is written for a minute."""
    with scene.orders(2) as broker, ExitStack() as stack:
        stack.enter_context(member(broker.address, "billing", "billing-1"))
        stack.enter_context(java_running(CONSUME, broker.address, "audit-1", group_id="audit"))
        one = producer(broker.address, client_id="shop")
        one.produce("orders", b"first")
        one.flush(30)
        time.sleep(scene.pick(60, 40))
        one.produce("orders", b"last")
        one.flush(30)
        time.sleep(1)


def batch_consumer(scene: Scene) -> None:
    """Healthy: a consumer works on each batch almost as long as max.poll.interval.ms allows."""
    app = {"work_ms": scene.pick(6000, 8000)}
    config = {"group_id": "nightly", "max_poll_interval_ms": 10_000, "max_poll_records": 100}
    with (
        scene.orders(4, {"group.min.session.timeout.ms": "1000"}) as broker,
        producing(LIBRDKAFKA, broker.address, "shop", 20),
        java_running(CONSUME, broker.address, "nightly", app, **config),
    ):
        time.sleep(scene.pick(30, 40))


def topic_awaited(scene: Scene) -> None:
    """Healthy: a producer and a consumer start some seconds before their topic is created."""
    broker = scene.broker({"auto.create.topics.enable": "false"})
    with scene.recording(broker.ports[PLAINTEXT]), ExitStack() as stack:
        stack.enter_context(java_running(PRODUCE, broker.address, "shop", {"pause_ms": 50}))
        stack.enter_context(java_running(CONSUME, broker.address, "billing-1", group_id="billing"))
        time.sleep(scene.pick(3, 6))
        create_topic(broker.address, 4)
        time.sleep(5)


def producer_bursts(scene: Scene) -> None:
    """Healthy: a producer writes thousands of records at once, then pauses for seconds."""
    app = {"burst": scene.pick(800, 1500), "size": 300, "pause_ms": scene.pick(3000, 6000)}
    with (
        scene.orders(6) as broker,
        java_running(PRODUCE, broker.address, "nightly", app, batch_size=65536),
        member(broker.address, "billing", "billing-1"),
    ):
        time.sleep(scene.pick(16, 20))


def client_pauses(scene: Scene) -> None:
    """Healthy: a member stops for some seconds, less than session.timeout.ms (a long GC)."""
    config = {"group_id": "billing", "session_timeout_ms": 15_000}
    with (
        scene.orders(4) as broker,
        producing(LIBRDKAFKA, broker.address, "shop", 30),
        java_running(CONSUME, broker.address, "slow", **config) as slow,
        member(broker.address, "billing", "quick"),
    ):
        time.sleep(5)
        for pause_s in scene.pick((4, 6), (8, 3)):
            pause(slow.process, pause_s)
            time.sleep(3)


def full_speed(scene: Scene) -> None:
    """Healthy: producers and consumers that write and read as fast as they can."""
    app = {"burst": 20, "size": 900, "pause_ms": 20}
    with scene.orders(6) as broker, ExitStack() as stack:
        for number in range(scene.pick(3, 4)):
            stack.enter_context(java_running(PRODUCE, broker.address, f"shop-{number}", app))
        stack.enter_context(java_running(CONSUME, broker.address, "billing", group_id="billing"))
        stack.enter_context(reading(broker.address, "audit"))
        time.sleep(scene.pick(6, 8))


def admin_polls(scene: Scene) -> None:
    """Healthy: a monitor that lists topics and groups each second, and a consumer at the end."""
    broker = scene.broker()
    create_topic(broker.address, 3)
    admin = AdminClient({"bootstrap.servers": broker.address, "client.id": "monitor"})

    def look() -> None:
        admin.list_topics(timeout=30)
        admin.list_consumer_groups().result(30)

    with (
        scene.recording(broker.ports[PLAINTEXT]),
        producing(LIBRDKAFKA, broker.address, "shop", 10),
        running(look, scene.pick(1, 0.5)),
    ):
        one = consumer(broker.address, group_id="billing", client_id="billing")
        one.subscribe(["orders"])
        end = time.monotonic() + scene.pick(20, 30)
        while time.monotonic() < end:
            drain(one, 0.2)
        one.close()
