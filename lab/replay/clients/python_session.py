"""A session of kafka-python: producers, a group with rebalances, transactions, admin calls."""

import time
from collections.abc import Callable
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import (
    ConfigResource,
    ConfigResourceType,
    KafkaAdminClient,
    NewPartitions,
    NewTopic,
)
from kafka.structs import OffsetAndMetadata

WAIT_S = 20


def session(address: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=address, client_id="admin")
    admin.create_topics(
        [
            NewTopic("orders", 3, 1, topic_configs={"retention.ms": "7200000000"}),
            NewTopic("payments", 2, 1),
            NewTopic("short-lived", 1, 1),
        ]
    )
    orders = ConfigResource(ConfigResourceType.TOPIC, "orders")
    admin.describe_configs([orders], config_filter="all")
    admin.create_partitions({"payments": NewPartitions(3)})
    admin.delete_topics(["short-lived"])
    _produce(address, "orders", 120, "shop", acks="all")
    _produce(address, "payments", 60, "pay", acks=1, enable_idempotence=False)
    _produce(address, "events", 30, "auto", acks="all", compression_type="gzip")
    _group(address)
    _transactions(address)
    admin.list_groups()
    admin.describe_groups(["billing"])
    admin.list_group_offsets(["billing"])
    admin.describe_topics(["orders", "events"])
    admin.delete_records({TopicPartition("orders", 0): 3})
    admin.describe_cluster()
    admin.close()


def _produce(address: str, topic: str, count: int, client_id: str, **config: Any) -> None:
    producer = KafkaProducer(bootstrap_servers=address, client_id=client_id, linger_ms=5, **config)
    for number in range(count):
        producer.send(
            topic,
            key=f"key-{number % 17}".encode(),
            value=f"{topic} {number} ".encode() * (1 + number % 7),
            headers=[("number", str(number).encode())],
        )
        if number % 25 == 24:
            producer.flush(WAIT_S)
    producer.flush(WAIT_S)
    producer.close()


def _member(address: str, name: str) -> KafkaConsumer:
    return KafkaConsumer(
        "orders",
        "payments",
        bootstrap_servers=address,
        client_id=name,
        group_id="billing",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        session_timeout_ms=10_000,
        heartbeat_interval_ms=500,
        fetch_max_wait_ms=100,
    )


def _group(address: str) -> None:
    one, seen = _member(address, "member-1"), [0]

    def poll(*members: KafkaConsumer) -> None:
        for each in members:
            found = each.poll(timeout_ms=50)
            seen[0] += sum(map(len, found.values()))

    _until(lambda: seen[0] >= 20 and len(one.assignment()) == 6, lambda: poll(one))
    one.commit()
    two = _member(address, "member-2")
    both = lambda: bool(two.assignment()) and len(one.assignment()) < 6  # noqa: E731
    _until(both, lambda: poll(one, two))
    one.commit()
    one.close()
    _until(lambda: len(two.assignment()) == 6, lambda: poll(two))
    poll(two)
    two.commit()
    two.close()


def _transactions(address: str) -> None:
    producer = KafkaProducer(
        bootstrap_servers=address, client_id="ledger", transactional_id="ledger-1"
    )
    producer.init_transactions()
    for round_ in range(3):
        producer.begin_transaction()
        for number in range(15):
            producer.send("payments", key=b"tx", value=f"tx {round_} {number}".encode())
        producer.flush(WAIT_S)
        if round_ == 0:
            offsets = {TopicPartition("orders", 0): OffsetAndMetadata(5, "copied", -1)}
            producer.send_offsets_to_transaction(offsets, "copiers")
        if round_ == 1:
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    producer.close()


def _until(is_done: Callable[[], bool], step: Callable[[], None]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < end, "the session did not get as far as it should"
        step()
