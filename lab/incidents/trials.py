"""Incidents with other clients, loads and durations than the shipped captures.

No threshold was chosen by these scenes: they test the kinds as captures of others do. Some have
two incidents, others a healthy client beside the one in trouble.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from typing import Any

from kafka.errors import KafkaError as PythonClientError

from lab.incidents.brokers import advertising, cluster_with_topic, ports_of
from lab.incidents.clients import (
    KAFKA_PYTHON,
    LIBRDKAFKA,
    TOPIC,
    create_topic,
    member,
    producer,
    producing,
    python_producer,
    reading,
)
from lab.incidents.connections import attempt, sasl, secure_broker
from lab.incidents.derived import lose_packets, step_clock
from lab.incidents.groups import flap, ledger
from lab.incidents.java_clients import CONSUME, PRODUCE, java_client, java_running
from lab.incidents.scene import PLAINTEXT, Scene, client, logged_times, now, pause, wait_until
from lab.incidents.storms import set_quota, write_throttled
from tests.broker.certificates import Authority
from tests.broker.kafka_broker import Broker, free_ports

_REPLICATED = {"offsets.topic.replication.factor": "3"}


@contextmanager
def _java_traffic(address: str, topic: str = TOPIC) -> Iterator[None]:
    """A Java producer and a consumer that run while the block runs."""
    app = {"pause_ms": 30}
    with (
        java_running(PRODUCE, address, "shop", app, topic, linger_ms=0),
        java_running(CONSUME, address, "billing-1", {}, topic, group_id="billing"),
    ):
        yield


def paused_twice(scene: Scene) -> None:
    """A broker at another address stops twice; Java clients write and read."""
    broker = Broker(scene.folder / "broker")
    ports = broker.ports
    broker.settings["listeners"] = (
        f"PLAINTEXT://127.0.0.9:{ports[PLAINTEXT]},CONTROLLER://127.0.0.1:{ports['CONTROLLER']}"
    )
    scene.stack.callback(broker.stop)
    broker.start()
    address = f"127.0.0.9:{ports[PLAINTEXT]}"
    create_topic(address, 3)
    with scene.recording(ports[PLAINTEXT]), _java_traffic(address):
        time.sleep(4)
        for pause_s in scene.pick((2, 6), (8, 1.6)):
            with scene.incident("broker_stall", address):
                pause(broker.process, pause_s)
            time.sleep(5)


def _goes_away(
    scene: Scene, end: Callable[[Broker], None], away_s: float, before: Callable[[Broker], None]
) -> None:
    """A single broker with Java clients ends, and starts again after some seconds.

    before: what happens between the start of the clients and the end of the broker.
    """
    settings = {"auto.create.topics.enable": "true"}
    with scene.orders(3, settings) as broker, _java_traffic(broker.address):
        before(broker)
        with scene.incident("broker_unreachable", broker.address):
            end(broker)
            time.sleep(away_s)
            broker.start()
        time.sleep(5)


def killed_with_java(scene: Scene) -> None:
    """SIGKILL to a single broker with Java clients; it starts again after some seconds."""
    _goes_away(scene, Broker.kill, scene.pick(8, 5), lambda _: time.sleep(scene.pick(6, 3)))


def stopped_in_order(scene: Scene) -> None:
    """A single broker stops in order and starts again: its clients have no other broker."""
    _goes_away(scene, Broker.stop, scene.pick(6, 9), lambda _: time.sleep(scene.pick(4, 6)))


def killed_after_topics(scene: Scene) -> None:
    """SIGKILL to a single broker seconds after topics were made, whose first writes it refused."""

    def make_topics(broker: Broker) -> None:
        one = producer(broker.address, client_id="importer")
        time.sleep(2)
        for number in range(60):
            one.produce(f"import-{number}", b"first")
            one.flush(5)
        time.sleep(scene.pick(1, 7))

    _goes_away(scene, Broker.kill, scene.pick(8, 12), make_topics)


def node_killed_and_back(scene: Scene) -> None:
    """SIGKILL to the leader among three nodes, which comes back; Java clients."""
    nodes = cluster_with_topic(scene)
    victim, *others = nodes
    addresses = ",".join(node.address for node in others)
    with scene.recording(*ports_of(nodes)), _java_traffic(addresses):
        time.sleep(4)
        with scene.incident("broker_unreachable", victim.address):
            victim.kill()
            time.sleep(scene.pick(14, 18))
            victim.start()
        time.sleep(5)


def polls_too_late(scene: Scene) -> None:
    """A Java consumer works on its records longer than max.poll.interval.ms; classic protocol."""
    _polls_too_late(scene, "classic", ("slow-", "left group"))


def polls_too_late_new(scene: Scene) -> None:
    """A Java consumer of the new protocol (KIP-848) works longer than max.poll.interval.ms."""
    _polls_too_late(scene, "consumer", ("left the consumer group",))


def _polls_too_late(scene: Scene, protocol: str, logged: tuple[str, ...]) -> None:
    interval_ms = scene.pick(5000, 7000)
    app = {"work_ms": interval_ms + scene.pick(4000, 2500)}
    group = {"group_id": "billing", "group_protocol": protocol, "max_poll_interval_ms": interval_ms}
    with (
        scene.orders(4, {"group.min.session.timeout.ms": "1000"}) as broker,
        producing(KAFKA_PYTHON, broker.address, "shop", 20),
        java_running(CONSUME, broker.address, "slow", app, **group),
    ):
        wait_until(lambda: logged_times(broker, *logged))
        time.sleep(scene.pick(20, 12))
    scene.happened("member_too_slow", "billing", logged_times(broker, *logged)[0])


def seeks_back(scene: Scene) -> None:
    """A Java application fails on one record and seeks back to it for ever."""
    app = {"stuck_at": scene.pick(150, 300), "retry_ms": scene.pick(400, 150)}
    with (
        scene.orders() as broker,
        producing(LIBRDKAFKA, broker.address, "shop", 30),
        reading(broker.address, "audit"),
        java_running(CONSUME, broker.address, "billing-1", app, group_id="billing") as stuck,
    ):
        began = stuck.time_of("stuck")
        time.sleep(scene.pick(12, 20))
    scene.happened("consumer_stuck", "orders-0", began)


def java_flaps(scene: Scene) -> None:
    """A Java consumer starts and ends again and again beside two steady members."""
    with scene.orders(6) as broker, ExitStack() as stack:
        for number in range(2):
            one = member(broker.address, "billing", f"steady-{number}")
            wait_until(stack.enter_context(one).is_set)
        time.sleep(4)
        for _ in range(scene.pick(6, 5)):
            with java_running(CONSUME, broker.address, "flapping", group_id="billing") as flapping:
                flapping.time_of("assigned")
                time.sleep(1)
    scene.happened("rebalance_loop", "billing", logged_times(broker, "flapping-")[0])


def crash_loop(scene: Scene) -> None:
    """A Java consumer is killed and started again; the group waits for its session's end."""
    with (
        scene.orders(4, {"group.min.session.timeout.ms": "1000"}) as broker,
        member(broker.address, "billing", "steady", session_timeout_ms=6000) as ready,
    ):
        wait_until(ready.is_set)
        time.sleep(3)
        for _ in range(scene.pick(6, 5)):
            crashing = java_client(
                CONSUME,
                broker.address,
                "crashing",
                group_id="billing",
                session_timeout_ms=scene.pick(3000, 2000),
                heartbeat_interval_ms=500,
            )
            crashing.time_of("assigned")
            time.sleep(1.5)
            crashing.process.kill()
            time.sleep(scene.pick(1, 4))
    scene.happened("rebalance_loop", "billing", logged_times(broker, "crashing-")[0])


def fetch_quota(scene: Scene) -> None:
    """A quota of bytes read slows one consumer down; another one reads on."""
    broker = scene.broker()
    create_topic(broker.address)
    set_quota(broker.address, "bulk", "consumer_byte_rate", float(scene.pick(20_000, 9_000)))
    throttled: list[datetime] = []
    with (
        scene.recording(broker.ports[PLAINTEXT]),
        producing(KAFKA_PYTHON, broker.address, "shop", 40, 2000),
        reading(broker.address, "audit"),
        reading(broker.address, "bulk", throttle_cb=lambda _: throttled.append(now())),
    ):
        time.sleep(scene.pick(15, 22))
        ended = now()
    scene.happened("throttled", client("bulk"), throttled[0], ended)


def transaction_expires(scene: Scene) -> None:
    """A transaction over two partitions hangs until its timeout; another producer commits."""
    settings = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}
    group = {"group_id": "billing", "isolation_level": "read_committed"}
    with scene.orders(2, settings) as broker:
        hanging = ledger(broker.address, "ledger-7", scene.pick(9000, 14_000))
        with (
            producing(KAFKA_PYTHON, broker.address, "shop", 20),
            java_running(CONSUME, broker.address, "billing", **group),
        ):
            time.sleep(5)
            hanging.begin_transaction()
            began = now()
            for partition in (0, 1):
                hanging.produce("orders", b"pending", partition=partition)
            hanging.flush(30)
            time.sleep(scene.pick(16, 22))
    scene.happened("transaction_open", "ledger-7", began)


def missing_topic(scene: Scene) -> None:
    """A kafka-python producer asks for a topic that does not exist, beside a healthy one."""
    broker = scene.broker({"auto.create.topics.enable": "false"})
    create_topic(broker.address)
    block_ms = scene.pick(9000, 15_000)
    one = python_producer(broker.address, "typo", max_block_ms=block_ms, retry_backoff_ms=50)
    with (
        scene.recording(broker.ports[PLAINTEXT]),
        producing(LIBRDKAFKA, broker.address, "shop", 20),
    ):
        time.sleep(3)
        with scene.incident("metadata_storm", client("typo")), suppress(PythonClientError):
            one.send("ordres", b"x")
        time.sleep(2)
    one.close(timeout=1)


def one_wrong_password(scene: Scene) -> None:
    """A client with a wrong password beside one with the right one, at the same listener."""
    broker, _ = secure_broker(scene)
    create_topic(broker.address)
    address = broker.address_of("SASL")
    right = sasl("SCRAM-SHA-512", "right")
    with (
        scene.recording(broker.ports["SASL"]),
        producing(LIBRDKAFKA, address, "steady", 20, **right),
    ):
        time.sleep(4)
        with scene.incident("login_failures", client("shop")):
            attempt(address, scene.pick(12, 7), sasl("PLAIN", "wrong"))
        time.sleep(3)


def one_wrong_authority(scene: Scene) -> None:
    """A client that distrusts the broker beside one that trusts it."""
    broker, authority = secure_broker(scene)
    create_topic(broker.address)
    address = broker.address_of("SECURE")
    stranger = Authority(scene.folder, "stranger")
    right: dict[str, Any] = {"security_protocol": "ssl", "ssl_ca_location": str(authority.cert)}
    with (
        scene.recording(broker.ports["SECURE"]),
        producing(LIBRDKAFKA, address, "steady", 20, **right),
    ):
        time.sleep(3)
        with scene.incident("tls_failure", address):
            _try_python(address, str(stranger.cert), scene.pick(8, 12))
        time.sleep(2)


def _try_python(address: str, authority: str, duration_s: float) -> None:
    """A kafka-python program that starts again after each failure."""
    tls = {"security_protocol": "SSL", "ssl_cafile": authority, "ssl_check_hostname": False}
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        with suppress(PythonClientError):
            python_producer(address, "shop", bootstrap_timeout_ms=1500, **tls).close()
        time.sleep(0.3)


def java_to_wrong_address(scene: Scene) -> None:
    """A broker advertises a port without a listener; Java clients."""
    wrong = free_ports(1)[0]
    with advertising(scene, wrong) as address:
        one = java_client(PRODUCE, address, "shop", max_block_ms=60_000)
        began = one.time_of("started")
        time.sleep(scene.pick(8, 14))
        one.process.kill()
    scene.happened("advertised_address_unreachable", f"127.0.0.1:{wrong}", began)


def upload_beside_others(scene: Scene) -> None:
    """Large batches of one producer arrive slowly; others write to the same broker quickly."""
    rate = scene.pick(20_000, 12_000)
    with (
        scene.relayed_orders(receive_buffer=4096, bytes_per_second=rate) as relay,
        producing(LIBRDKAFKA, relay.address, "steady", scene.pick(10, 5)),
    ):
        time.sleep(1)
        times = {"request_timeout_ms": 60_000, "bootstrap_timeout_ms": 8000}
        one = python_producer(relay.address, "images", max_request_size=1_000_000, **times)
        one.partitions_for("orders")
        time.sleep(scene.pick(1, 3))
        with scene.incident("slow_upload", client("images")):
            for _ in range(scene.pick(3, 2)):
                one.send("orders", bytes(range(251)) * scene.pick(240, 160)).get(60)
        one.close()


def producer_per_record(scene: Scene) -> None:
    """A Java application makes a producer for each record."""
    with scene.orders() as broker, member(broker.address, "billing", "billing-1"):
        time.sleep(4)
        app = {"renew": 1, "pause_ms": scene.pick(100, 30)}
        with java_running(PRODUCE, broker.address, "web", app) as one:
            began = one.time_of("started")
            time.sleep(scene.pick(12, 9))
        ended = now()
        time.sleep(2)
    scene.happened("connection_storm", client("web"), began, ended)


def java_retries(scene: Scene) -> None:
    """Writes of a Java producer fail with NOT_ENOUGH_REPLICAS; it repeats them each 40 ms."""
    nodes = scene.cluster(settings=_REPLICATED)
    create_topic(nodes[0].address, 1, 3, min_insync_replicas="3")
    nodes[1].stop()
    pause_ms = scene.pick(40, 80)
    with scene.recording(*ports_of(nodes)):
        config = {"acks": "all", "retry_backoff_ms": pause_ms, "retry_backoff_max_ms": pause_ms}
        app = {"pause_ms": 2000}
        with java_running(PRODUCE, nodes[0].address, "shop", app, **config) as one:
            one.time_of("started")
            time.sleep(scene.pick(8, 14))
            ended = now()
            one.process.kill()
    refused = min(
        time for node in nodes for time in logged_times(node, "Error processing append operation")
    )
    scene.happened("retry_storm", client("shop"), refused, ended)


def quota_and_pause(scene: Scene) -> None:
    """Two incidents: a quota slows one client down; later the broker stops for 4 s."""
    broker = scene.broker()
    create_topic(broker.address)
    create_topic(broker.address, 3, topic="events")
    set_quota(broker.address, "bulk", "producer_byte_rate", 5000.0)
    with scene.recording(broker.ports[PLAINTEXT]), _java_traffic(broker.address, "events"):
        write_throttled(scene, broker.address, scene.pick(10, 14), 1200)
        time.sleep(3)
        with scene.incident("broker_stall", broker.address):
            pause(broker.process, scene.pick(4, 2.5))
        time.sleep(3)


def flap_and_login(scene: Scene) -> None:
    """Two incidents: a member flaps at one listener, and a login fails at another one."""
    broker, _ = secure_broker(scene)
    create_topic(broker.address, 4)
    with (
        scene.recording(broker.ports[PLAINTEXT], broker.ports["SASL"]),
        producing(KAFKA_PYTHON, broker.address, "shop", 20),
        member(broker.address, "billing", "steady"),
    ):
        time.sleep(5)
        with scene.incident("rebalance_loop", "billing"):
            flap(broker.address, scene.pick(5, 7))
        with scene.incident("login_failures", client("shop")):
            attempt(broker.address_of("SASL"), scene.pick(7, 10), sasl("PLAIN", "old"))
        time.sleep(2)


def duplicates_of_python(scene: Scene) -> None:
    """A response is lost; a kafka-python producer without idempotence sends the batch again."""
    config = {"linger_ms": 10, "retry_backoff_ms": 20, "retries": 5, "enable_idempotence": False}
    with scene.relayed_orders() as relay:
        one = python_producer(relay.address, "shop", acks="all", **config)

        def write(number: int) -> None:
            for line in range(scene.pick(8, 25)):
                one.send("orders", f"order {number}-{line}".encode(), str(line).encode())

        for number in range(4):
            write(number)
            one.flush()
        relay.is_swallowing = True
        write(4)
        time.sleep(0.5)
        relay.is_swallowing = False
        with scene.incident("duplicate_records", "orders-0"):
            relay.reset_all()
            one.flush()
        write(5)
        one.flush()
        one.close()


def clock_forward(scene: Scene) -> None:
    """The clock of the capturing host steps forward between two busy seconds."""
    with scene.orders(2) as broker, _java_traffic(broker.address):
        time.sleep(8)
    step_clock(scene, scene.pick(3_000_000, 700_000))


def loss_in_traffic(scene: Scene) -> None:
    """Packets of a busy second are missing in a capture of Java clients."""
    with scene.orders(2) as broker, _java_traffic(broker.address):
        time.sleep(10)
    lose_packets(scene, scene.pick(700_000, 300_000), scene.pick(2, 4))
