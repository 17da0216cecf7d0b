"""Clients of the scenes: librdkafka, kafka-python, and single requests."""

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, Thread
from typing import Any

import kafka
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kafka.errors import KafkaError as PythonClientError

from kdissect.codec.message import Message, decode_message, encode_message

TOPIC = "orders"  # of all scenes; few have another one, too
WAIT_S = 30
LIBRDKAFKA, KAFKA_PYTHON = "librdkafka", "kafka-python"


def quiet(*_: Any) -> None:
    """Ignore what librdkafka reports: it reports every failure that a scene makes."""


def create_topic(
    address: str, partitions: int = 1, replication: int = 1, topic: str = TOPIC, **config: str
) -> None:
    """Create a topic and wait until every partition has a leader."""
    admin = AdminClient({"bootstrap.servers": address, "client.id": "setup"})
    named = {name.replace("_", "."): value for name, value in config.items()}
    new = NewTopic(topic, partitions, replication, config=named)
    for future in admin.create_topics([new]).values():
        future.result(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = admin.list_topics(topic, timeout=WAIT_S).topics[topic].partitions
        if len(found) == partitions and all(one.leader >= 0 for one in found.values()):
            return
        time.sleep(0.05)
    raise TimeoutError(f"topic {topic} has no leaders")


@contextmanager
def running(step: Callable[[], object], pause_s: float) -> Iterator[None]:
    """Repeat a step in a thread of its own until the block ends."""
    is_over = Event()

    def loop() -> None:
        while not is_over.is_set():
            step()
            is_over.wait(pause_s)

    thread = Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(WAIT_S)


def producer(address: str, **config: Any) -> Producer:
    """A librdkafka producer that sends each record at once."""
    defaults = {"bootstrap.servers": address, "linger.ms": 0, "error_cb": quiet}
    return Producer(defaults | _settings(config), logger=_silent())


def python_producer(address: str, client_id: str, **config: Any) -> kafka.KafkaProducer:
    """A kafka-python producer."""
    return kafka.KafkaProducer(bootstrap_servers=address, client_id=client_id, **config)


def consumer(address: str, **config: Any) -> Consumer:
    """A librdkafka consumer that reads from the beginning."""
    defaults = {
        "bootstrap.servers": address,
        "auto.offset.reset": "earliest",
        "group.id": "readers",
        "error_cb": quiet,
    }
    return Consumer(defaults | _settings(config), logger=_silent())


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of librdkafka by their Python names; callbacks have no dots."""
    return {
        name if name.endswith("_cb") else name.replace("_", "."): value
        for name, value in config.items()
    }


def _silent() -> Any:
    import logging

    logger = logging.getLogger("lab.incidents.librdkafka")
    logger.disabled = True
    return logger


@contextmanager
def producing(
    library: str,
    address: str,
    client_id: str,
    rate: float = 50,
    size: int = 60,
    topic: str = TOPIC,
    **config: Any,
) -> Iterator[None]:
    """Write records to a topic at a steady rate while the block runs.

    config: further settings of librdkafka.
    """
    value = b"x" * size
    if library == LIBRDKAFKA:
        one = producer(address, client_id=client_id, **config)

        def send() -> None:
            with suppress(BufferError):
                one.produce(topic, value)
            one.poll(0)

        with running(send, 1 / rate):
            yield
        one.flush(2)
        one.purge()
        return
    other = python_producer(address, client_id, linger_ms=0)

    def send_other() -> None:
        with suppress(PythonClientError):
            other.send(topic, value)

    with running(send_other, 1 / rate):
        yield
    other.close(timeout=2)


@contextmanager
def reading(address: str, client_id: str, **config: Any) -> Iterator[None]:
    """Read the first partition of the topic without a group while the block runs."""
    one = consumer(address, client_id=client_id, enable_auto_commit=False, **config)
    one.assign([TopicPartition(TOPIC, 0, 0)])
    with running(lambda: drain(one, 0.05), 0):
        yield
    one.close()


def drain(one: Consumer, timeout_s: float) -> int:
    """Poll once; returns the count of records."""
    return sum(message.error() is None for message in one.consume(100, timeout_s))


@contextmanager
def member(address: str, group: str, client_id: str, **config: Any) -> Iterator[Event]:
    """A member of a group that polls and commits while the block runs.

    Yields an event that is set as soon as the member has partitions: a consumer serves one thread.
    """
    one, is_assigned = consumer(address, group_id=group, client_id=client_id, **config), Event()
    one.subscribe([TOPIC], on_assign=lambda *_: is_assigned.set())
    with running(lambda: _poll_and_commit(one), 0):
        yield is_assigned
    one.close()


def _poll_and_commit(one: Consumer) -> None:
    if drain(one, 0.1):
        with suppress(KafkaException):  # a rebalance, or no new offset
            one.commit(asynchronous=False)


def call(address: str, api_key: int, version: int, body: dict[str, Any]) -> dict[str, Any]:
    """Send one request on a connection of its own; returns the body of the response."""
    host, port = address.split(":")
    header = {"correlation_id": 1, "client_id": "setup"}
    frame = encode_message(Message(api_key, version, "request", header, body))
    with socket.create_connection((host, int(port)), WAIT_S) as sock, ExitStack() as stack:
        sock.sendall(len(frame).to_bytes(4, "big") + frame)
        stream = stack.enter_context(sock.makefile("rb"))
        size = int.from_bytes(stream.read(4), "big")
        response = stream.read(size)
    return decode_message(response, side="response", api_key=api_key, api_version=version).body
