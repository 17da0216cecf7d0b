"""Brokers that die, stop, refuse, move their leaders, or advertise a wrong address."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient

from lab.incidents.clients import (
    KAFKA_PYTHON,
    LIBRDKAFKA,
    TOPIC,
    call,
    create_topic,
    producer,
    producing,
    reading,
    running,
)
from lab.incidents.network import drop_segments
from lab.incidents.scene import PLAINTEXT, Scene, logged_times, pause
from tests.broker.kafka_broker import Broker, free_ports

_LEADS = "Leader orders-0 with topic id"
_METADATA, _ELECT_LEADERS = 3, 43


@contextmanager
def _traffic(scene: Scene, address: str) -> Iterator[None]:
    """A producer and a reader at a steady rate, while the block runs."""
    library = scene.pick(LIBRDKAFKA, KAFKA_PYTHON)
    with producing(library, address, "shop", scene.pick(40, 25)), reading(address, "billing"):
        yield


@contextmanager
def _recorded_traffic(
    scene: Scene, address: str, before_s: float, after_s: float
) -> Iterator[None]:
    """Record traffic of the topic before, during and after the block."""
    create_topic(address)
    with scene.recording(int(address.split(":")[1])), _traffic(scene, address):
        time.sleep(before_s)
        yield
        time.sleep(after_s)


def broker_killed(scene: Scene) -> None:
    """SIGKILL to a single broker, which starts again some seconds later."""
    broker = scene.broker()
    with (
        _recorded_traffic(scene, broker.address, 2, 3),
        scene.incident("broker_unreachable", broker.address),
    ):
        broker.kill()
        time.sleep(scene.pick(3, 7))
        broker.start()


def broker_paused(scene: Scene) -> None:
    """SIGSTOP to a broker for 3 s, then SIGCONT."""
    broker = scene.broker()
    with (
        _recorded_traffic(scene, broker.address, 3, 3),
        scene.incident("broker_stall", broker.address),
    ):
        pause(broker.process, scene.pick(3, 5))


def responses_delayed(scene: Scene) -> None:
    """A relay keeps all responses of a broker for some seconds, then sends them at once."""
    relay = scene.relay()
    with (
        _recorded_traffic(scene, relay.address, 3, 3),
        scene.incident("broker_stall", relay.address),
    ):
        relay.is_holding = True
        time.sleep(scene.pick(4, 3))
        relay.is_holding = False


def port_refuses(scene: Scene) -> None:
    """A relay resets its connections and refuses new ones for some seconds."""
    relay = scene.relay()
    with (
        _recorded_traffic(scene, relay.address, 2, 4),
        scene.incident("broker_unreachable", relay.address),
    ):
        relay.refuse()
        time.sleep(scene.pick(4, 6))
        relay.open()


def network_silent(scene: Scene) -> None:
    """A relay drops all segments of its connections and all SYNs: neither ACK nor RST."""
    relay = scene.relay()
    create_topic(relay.address)
    timeouts = {"socket_timeout_ms": 3000, "socket_connection_setup_timeout_ms": 2000}
    # the clients end after the recording, when the relay works again
    with ExitStack() as stack, scene.recording(relay.port):
        one = producer(relay.address, client_id="shop", request_timeout_ms=3000, **timeouts)
        stack.callback(one.purge)
        stack.enter_context(running(lambda: _send(one), 0.03))
        stack.enter_context(reading(relay.address, "billing", **timeouts))
        stack.callback(relay.open)
        stack.callback(relay.refuse)
        time.sleep(3)
        with scene.incident("broker_unreachable", relay.address):
            relay.drop_connects()
            relay.drop_all()
            time.sleep(scene.pick(12, 17))


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


@contextmanager
def advertising(scene: Scene, wrong: int) -> Iterator[str]:
    """Record a broker that advertises a port; yields its own address."""
    broker = scene.broker({"advertised.listeners": f"PLAINTEXT://127.0.0.1:{wrong}"})
    topics = {"topics": [{"name": TOPIC}], "allow_auto_topic_creation": True}
    call(broker.address, _METADATA, 8, topics)  # a client would wait for the new topic
    time.sleep(1)
    with scene.recording(broker.ports[PLAINTEXT], wrong):
        yield broker.address


def _advertised(scene: Scene, wrong: int) -> None:
    """A producer gives up without a delivery, because its broker advertises a port."""
    with (
        advertising(scene, wrong) as address,
        scene.incident("advertised_address_unreachable", f"127.0.0.1:{wrong}"),
        producing(scene.pick(LIBRDKAFKA, KAFKA_PYTHON), address, "shop", 5),
    ):
        time.sleep(scene.pick(6, 9))


def cluster_with_topic(scene: Scene) -> list[Broker]:
    """Three nodes with a topic of one partition; its leader is the first of them."""
    nodes = scene.cluster(settings={"offsets.topic.replication.factor": "3"})
    create_topic(nodes[0].address, 1, 3)
    admin = AdminClient({"bootstrap.servers": nodes[0].address})
    leader = admin.list_topics("orders", timeout=20).topics["orders"].partitions[0].leader
    return sorted(nodes, key=lambda node: node.node_id != leader)


def ports_of(nodes: list[Broker]) -> list[int]:
    """The ports of nodes for clients."""
    return [node.ports[PLAINTEXT] for node in nodes]


def node_killed(scene: Scene) -> None:
    """SIGKILL to one of three nodes, the leader of the partition; it stays away."""
    nodes = cluster_with_topic(scene)
    leader, follower, _ = nodes
    with scene.recording(*ports_of(nodes)), _traffic(scene, follower.address):
        time.sleep(3)
        with scene.incident("broker_unreachable", leader.address):
            leader.kill()
            time.sleep(scene.pick(12, 16))


def leader_moved(scene: Scene) -> None:
    """A partition is reassigned to another leader while clients write and read it."""
    nodes = cluster_with_topic(scene)
    leader, new, other = nodes
    replicas = [new.node_id, other.node_id, leader.node_id]
    with scene.recording(*ports_of(nodes)), _traffic(scene, leader.address):
        time.sleep(3)
        admin = KafkaAdminClient(bootstrap_servers=leader.address, client_id="operator")
        admin.alter_partition_reassignments({TopicPartition("orders", 0): replicas})
        _elect_preferred_leader(leader.address)
        time.sleep(3)
        admin.close()
    scene.happened("leader_change", "orders-0", logged_times(new, _LEADS)[-1])


def _elect_preferred_leader(address: str) -> None:
    body = {
        "election_type": 0,
        "topic_partitions": [{"topic": "orders", "partitions": [0]}],
        "timeout_ms": 10_000,
    }
    call(address, _ELECT_LEADERS, 2, body)


def controlled_shutdown(scene: Scene) -> None:
    """A node stops in order (SIGTERM), and another one leads its partition from then on."""
    nodes = cluster_with_topic(scene)
    leader, *followers = nodes
    with scene.recording(*ports_of(nodes)), _traffic(scene, followers[0].address):
        time.sleep(3)
        leader.stop()
        time.sleep(scene.pick(2, 3))
    moved = min(time for node in followers for time in logged_times(node, _LEADS))
    scene.happened("leader_change", "orders-0", moved)
