"""The clients of the recorded sessions, and an independent reader of the topics."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka import admin as kafka

Records = dict[tuple[str, int], list[tuple[bytes | None, bytes | None, tuple[Any, ...]]]]
Session = tuple[Path, Records]  # a capture, and the records of the topics after it
WAIT_S = 20
TOPICS = ("orders", "payments", "audit")


def admin_calls(address: str) -> None:
    """Topics made, described, changed; one deleted again."""
    admin = kafka.AdminClient({"bootstrap.servers": address, "client.id": "admin"})
    topics = [
        kafka.NewTopic("orders", 3, 1, config={"retention.ms": "7200000"}),
        kafka.NewTopic("payments", 2, 1),
        kafka.NewTopic("audit", 1, 1, config={"cleanup.policy": "compact"}),
        kafka.NewTopic("short-lived", 1, 1),
    ]
    _all(admin.create_topics(topics))
    _all(admin.create_partitions([kafka.NewPartitions("audit", 2)]))
    orders = kafka.ConfigResource(kafka.ResourceType.TOPIC, "orders")
    _all(admin.describe_configs([orders]))
    change = kafka.ConfigResource(kafka.ResourceType.TOPIC, "orders")
    change.add_incremental_config(
        kafka.ConfigEntry(
            "max.message.bytes", "200000", incremental_operation=kafka.AlterConfigOpType.SET
        )
    )
    _all(admin.incremental_alter_configs([change]))
    _all(admin.delete_topics(["short-lived"]))
    admin.list_topics(timeout=WAIT_S)
    admin.describe_cluster().result(WAIT_S)


def group_questions(address: str) -> None:
    """An operator's requests about groups and offsets."""
    admin = kafka.AdminClient({"bootstrap.servers": address, "client.id": "operator"})
    admin.list_consumer_groups(request_timeout=WAIT_S).result(WAIT_S)
    _all(admin.describe_consumer_groups(["billing"]))


def _all(futures: dict[Any, Any]) -> None:
    for future in futures.values():
        future.result(WAIT_S)


def produce(address: str, topic: str, count: int, **config: Any) -> None:
    """Records with keys, values and headers."""
    producer = Producer({"bootstrap.servers": address, "linger.ms": 20, **config})
    for number in range(count):
        producer.produce(
            topic,
            key=f"key-{number % 17}".encode(),
            value=f"{topic} {number} ".encode() * (1 + number % 7),
            headers={"number": str(number).encode(), "trace": b"\x00\xff"},
        )
        if number % 25 == 24:
            producer.flush(WAIT_S)
    assert producer.flush(WAIT_S) == 0


def transactions(address: str) -> None:
    """One committed, one aborted, over two topics."""
    producer = Producer(
        {"bootstrap.servers": address, "client.id": "ledger", "transactional.id": "ledger-1"}
    )
    producer.init_transactions(WAIT_S)
    for number, ends in enumerate((producer.commit_transaction, producer.abort_transaction)):
        producer.begin_transaction()
        for line in range(20):
            producer.produce("orders", key=b"tx", value=f"{number} {line}".encode())
            producer.produce("payments", key=b"tx", value=f"{number} {line}".encode())
        producer.flush(WAIT_S)
        ends(WAIT_S)


class Member:
    """A consumer of a group that is polled by hand."""

    def __init__(self, address: str, name: str, group: str = "billing") -> None:
        self.assigned: list[TopicPartition] = []
        self.seen = 0
        self._consumer = Consumer(
            {
                "bootstrap.servers": address,
                "client.id": name,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 10_000,
                "heartbeat.interval.ms": 500,
                "fetch.wait.max.ms": 100,
            }
        )
        self._consumer.subscribe(["orders", "payments"], on_assign=self._assign)

    def _assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.assigned = partitions

    def poll(self) -> None:
        message = self._consumer.poll(0.05)
        if message is not None and message.error() is None:
            self.seen += 1

    def commit(self) -> None:
        try:
            self._consumer.commit(asynchronous=False)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._NO_OFFSET:  # nothing read since a rebalance
                raise

    def close(self) -> None:
        self._consumer.close()


def group(address: str) -> None:
    """A member, a second one that joins, the first one leaves: two rebalances and commits."""
    one = Member(address, "member-1")
    _poll([one], lambda: len(one.assigned) == 5 and one.seen >= 20)
    one.commit()
    two = Member(address, "member-2")
    _poll([one, two], lambda: bool(two.assigned) and len(one.assigned) < 5)
    one.commit()
    one.close()
    _poll([two], lambda: len(two.assigned) == 5 and two.seen >= 20)
    two.commit()
    two.close()


def _poll(members: list[Member], is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < end, "the group did not get as far as it should"
        for member in members:
            member.poll()


def whole_session(address: str) -> None:
    """Admin calls, producers, a group with rebalances, transactions."""
    admin_calls(address)
    produce(address, "orders", 150, acks="all", **{"client.id": "shop"})
    produce(address, "payments", 60, acks=1, **{"compression.type": "lz4", "client.id": "pay"})
    produce(address, "audit", 40, **{"enable.idempotence": True, "client.id": "audit"})
    produce(address, "audit", 10, acks=0, **{"client.id": "careless"})
    transactions(address)
    group(address)
    group_questions(address)


def read_back(address: str, topics: Iterable[str] = TOPICS) -> Records:
    """Everything that topics hold, aborted records too, in order, per partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "read-back",
            "enable.auto.commit": False,
            "isolation.level": "read_uncommitted",
            "enable.partition.eof": True,
        }
    )
    known = consumer.list_topics(timeout=WAIT_S).topics
    places = [
        TopicPartition(topic, number, OFFSET_BEGINNING)
        for topic in topics
        for number in (known[topic].partitions if topic in known else ())
    ]
    found: Records = {(place.topic, place.partition): [] for place in places}
    left = set(found)
    consumer.assign(places)
    end = time.monotonic() + WAIT_S
    while left and time.monotonic() < end:
        message = consumer.poll(0.5)
        if message is None:
            continue
        place = message.topic(), message.partition()
        if message.error() is not None:
            assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
            left.discard(place)
            continue
        found[place].append((message.key(), message.value(), tuple(message.headers() or ())))
    consumer.close()
    assert not left, f"not read to the end: {left}"
    return found
