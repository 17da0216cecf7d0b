"""Brokers that die, stop, refuse, move their leaders, or advertise a wrong address."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import ExitStack
from datetime import datetime

from confluent_kafka import Producer
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient

from tests.broker.kafka_broker import Broker, free_ports
from tools.incidents.clients import (
    KAFKA_PYTHON,
    LIBRDKAFKA,
    call,
    create_topic,
    producer,
    producing,
    reading,
    running,
)
from tools.incidents.network import drop_segments
from tools.incidents.scene import PLAINTEXT, Scene, logged_times, now

_LEADS = "Leader orders-0 with topic id"
_METADATA, _ELECT_LEADERS = 3, 43


def _traffic(scene: Scene, stack: ExitStack, address: str, topic: str = "orders") -> None:
    """A producer and a reader at a steady rate, until the stack closes."""
    library = scene.pick(LIBRDKAFKA, KAFKA_PYTHON)
    stack.enter_context(producing(library, address, topic, "shop", scene.pick(40, 25)))
    stack.enter_context(reading(address, topic, "billing"))


def broker_killed(scene: Scene) -> None:
    """SIGKILL to a single broker, which starts again some seconds later."""
    broker = scene.broker()
    create_topic(broker.address, "orders")
    with scene.recording(broker.ports[PLAINTEXT]), ExitStack() as stack:
        _traffic(scene, stack, broker.address)
        time.sleep(2)
        killed = now()
        broker.kill()
        time.sleep(scene.pick(3, 7))
        broker.start()
        back = now()
        time.sleep(3)
    scene.happened("broker_unreachable", broker.address, killed, back)


def node_killed(scene: Scene) -> None:
    """SIGKILL to one of three nodes, the leader of the partition; it stays away."""
    nodes = scene.cluster(settings={"offsets.topic.replication.factor": "3"})
    create_topic(nodes[0].address, "orders", 1, 3)
    victim = next(node for node in nodes if node.node_id == _leader(nodes[0], "orders"))
    alive = next(node for node in nodes if node is not victim)
    with scene.recording(*(node.ports[PLAINTEXT] for node in nodes)), ExitStack() as stack:
        _traffic(scene, stack, alive.address)
        time.sleep(3)
        killed = now()
        victim.kill()
        time.sleep(scene.pick(12, 16))
    scene.happened("broker_unreachable", victim.address, killed)


def _leader(node: Broker, topic: str) -> int:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": node.address})
    leader: int = admin.list_topics(topic, timeout=20).topics[topic].partitions[0].leader
    return leader


def broker_paused(scene: Scene) -> None:
    """SIGSTOP to a broker for 3 s, then SIGCONT."""
    broker = scene.broker()
    create_topic(broker.address, "orders")
    assert broker.process is not None
    with scene.recording(broker.ports[PLAINTEXT]), ExitStack() as stack:
        _traffic(scene, stack, broker.address)
        time.sleep(3)
        stopped = now()
        broker.process.send_signal(signal.SIGSTOP)
        time.sleep(scene.pick(3, 5))
        broker.process.send_signal(signal.SIGCONT)
        continued = now()
        time.sleep(3)
    scene.happened("broker_stall", broker.address, stopped, continued)


def responses_delayed(scene: Scene) -> None:
    """A relay keeps all responses of a broker for some seconds, then sends them at once."""
    broker, relay = scene.broker_with_relay()
    create_topic(broker.address, "orders")
    with scene.recording(relay.port), ExitStack() as stack:
        _traffic(scene, stack, f"127.0.0.1:{relay.port}")
        time.sleep(3)
        held = now()
        relay.is_holding = True
        time.sleep(scene.pick(4, 3))
        relay.is_holding = False
        released = now()
        time.sleep(3)
    scene.happened("broker_stall", f"127.0.0.1:{relay.port}", held, released)


def port_refuses(scene: Scene) -> None:
    """A relay resets its connections and refuses new ones for some seconds."""
    broker, relay = scene.broker_with_relay()
    create_topic(broker.address, "orders")
    with scene.recording(relay.port), ExitStack() as stack:
        _traffic(scene, stack, f"127.0.0.1:{relay.port}")
        time.sleep(2)
        refused = now()
        relay.refuse()
        time.sleep(scene.pick(4, 6))
        relay.open()
        opened = now()
        time.sleep(4)
    scene.happened("broker_unreachable", f"127.0.0.1:{relay.port}", refused, opened)


def network_silent(scene: Scene) -> None:
    """A relay drops all segments of its connections and all SYNs: neither ACK nor RST."""
    broker, relay = scene.broker_with_relay()
    create_topic(broker.address, "orders")
    address = f"127.0.0.1:{relay.port}"
    timeouts = {"socket_timeout_ms": 3000, "socket_connection_setup_timeout_ms": 2000}
    # the clients end after the recording, when the relay works again
    with ExitStack() as stack, scene.recording(relay.port):
        one = producer(address, client_id="shop", request_timeout_ms=3000, **timeouts)
        stack.callback(one.purge)
        stack.enter_context(running(lambda: _send(one), 0.03))
        stack.enter_context(reading(address, "orders", "billing", **timeouts))
        stack.callback(relay.open)
        stack.callback(relay.refuse)
        time.sleep(3)
        silent = now()
        relay.drop_connects()
        relay.drop_all()
        time.sleep(scene.pick(12, 17))
        ended = now()
    scene.happened("broker_unreachable", address, silent, ended)


def _send(one: Producer) -> None:
    one.produce("orders", b"x" * 60)
    one.poll(0)


def advertised_wrong(scene: Scene) -> None:
    """A broker advertises a port without a listener."""
    wrong = free_ports(1)[0]
    _advertised(scene, wrong)


def advertised_silent(scene: Scene) -> None:
    """A broker advertises a port whose SYNs nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        drop_segments(listener)
        _advertised(scene, listener.getsockname()[1])


def _advertised(scene: Scene, wrong: int) -> None:
    advertised = f"PLAINTEXT://127.0.0.1:{wrong}"
    broker = scene.broker({"advertised.listeners": advertised})
    topics = {"topics": [{"name": "orders"}], "allow_auto_topic_creation": True}
    call(broker.address, _METADATA, 8, topics)  # a client would wait for the new topic
    time.sleep(1)
    with scene.recording(broker.ports[PLAINTEXT], wrong):
        began = now()
        with producing(scene.pick(LIBRDKAFKA, KAFKA_PYTHON), broker.address, "orders", "shop", 5):
            time.sleep(scene.pick(6, 9))
        # the producer gives up: nothing was delivered
    scene.happened("advertised_address_unreachable", f"127.0.0.1:{wrong}", began)


def leader_moved(scene: Scene) -> None:
    """A partition is reassigned to another leader while clients write and read it."""
    nodes = scene.cluster(settings={"offsets.topic.replication.factor": "3"})
    create_topic(nodes[0].address, "orders", 1, 3)
    leader = _leader(nodes[0], "orders")
    others = [node.node_id for node in nodes if node.node_id != leader]
    with scene.recording(*(node.ports[PLAINTEXT] for node in nodes)), ExitStack() as stack:
        _traffic(scene, stack, nodes[0].address)
        time.sleep(3)
        admin = KafkaAdminClient(bootstrap_servers=nodes[0].address, client_id="operator")
        admin.alter_partition_reassignments({TopicPartition("orders", 0): [*others, leader]})
        _prefer(nodes)
        time.sleep(3)
        admin.close()
    new = next(node for node in nodes if node.node_id == others[0])
    scene.happened("leader_change", "orders-0", _leads_since(new))


def _leads_since(node: Broker) -> datetime:
    """The time at which a node became the leader of the partition, from its log."""
    return logged_times(node, _LEADS)[-1]


def _prefer(nodes: list[Broker]) -> None:
    """Elect the preferred leader."""
    body = {
        "election_type": 0,
        "topic_partitions": [{"topic": "orders", "partitions": [0]}],
        "timeout_ms": 10_000,
    }
    call(nodes[0].address, _ELECT_LEADERS, 2, body)


def controlled_shutdown(scene: Scene) -> None:
    """A node stops in order (SIGTERM), and another one leads its partition from then on."""
    nodes = scene.cluster(settings={"offsets.topic.replication.factor": "3"})
    create_topic(nodes[0].address, "orders", 1, 3)
    leader = _leader(nodes[0], "orders")
    stopped = next(node for node in nodes if node.node_id == leader)
    others = [node for node in nodes if node is not stopped]
    with scene.recording(*(node.ports[PLAINTEXT] for node in nodes)), ExitStack() as stack:
        _traffic(scene, stack, others[0].address)
        time.sleep(3)
        stopped.stop()
        time.sleep(scene.pick(2, 3))
    moved = min(time for node in others for time in logged_times(node, _LEADS))
    scene.happened("leader_change", "orders-0", moved)
