"""Groups: members that poll too late, that flap, and consumers that do not advance."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, Producer

from lab.incidents.clients import (
    LIBRDKAFKA,
    consumer,
    create_topic,
    drain,
    member,
    producer,
    producing,
)
from lab.incidents.network import Relay
from lab.incidents.scene import PLAINTEXT, Scene, logged_times, now, wait_until

_ACKS_ALL: dict[str, Any] = {
    "client_id": "shop",
    "acks": "all",
    "linger_ms": 20,
    "retry_backoff_ms": 10,
    "reconnect_backoff_ms": 10,
}


def member_slow(scene: Scene) -> None:
    """A member works on its records for longer than max.poll.interval.ms, twice."""
    interval_s = scene.pick(4, 6)
    config = {
        "max_poll_interval_ms": interval_s * 1000,
        "session_timeout_ms": interval_s * 1000,
        "heartbeat_interval_ms": 500,
    }
    with (
        scene.orders(4, {"group.min.session.timeout.ms": "1000"}) as broker,
        producing(LIBRDKAFKA, broker.address, "shop", 10),
        member(broker.address, "billing", "quick", **config),
    ):
        slow = consumer(broker.address, group_id="billing", client_id="slow", **config)
        slow.subscribe(["orders"])
        for _ in range(2):
            wait_until(lambda: drain(slow, 0.2) and slow.assignment())
            _poll_for(slow, 2)
            time.sleep(interval_s + scene.pick(3, 4))
        wait_until(lambda: drain(slow, 0.2) and slow.assignment())
        ended = now()
        slow.close()
    # librdkafka looks at the interval twice a second: the broker's log has the time of its leave
    left = logged_times(broker, "slow-", "left group")
    scene.happened("member_too_slow", "billing", left[0], ended)


def _poll_for(one: Consumer, duration_s: float) -> None:
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        drain(one, 0.1)


def member_flaps(scene: Scene) -> None:
    """One member joins and leaves every two seconds; the other rebalances each time."""
    config = {"heartbeat_interval_ms": 300}
    with (
        scene.orders(4) as broker,
        producing(LIBRDKAFKA, broker.address, "shop", 10),
        member(broker.address, "billing", "steady", **config),
    ):
        time.sleep(6)
        with scene.incident("rebalance_loop", "billing"):
            flap(broker.address, scene.pick(6, 8), **config)
        time.sleep(2)


def flap(address: str, times: int, **config: Any) -> None:
    """A member joins the group and leaves it again, every two seconds."""
    for _ in range(times):
        with member(address, "billing", "flapping", **config) as is_assigned:
            wait_until(is_assigned.is_set)
            time.sleep(0.5)
        time.sleep(1)


def transaction_hangs(scene: Scene) -> None:
    """A producer writes in a transaction and does not end it; a read_committed reader waits."""
    with scene.orders() as broker:
        hanging = ledger(broker.address, "ledger-1", 120_000)
        with (
            member(broker.address, "billing", "billing", isolation_level="read_committed"),
            producing(LIBRDKAFKA, broker.address, "shop", 10),
        ):
            time.sleep(4)
            began = now()
            hanging.begin_transaction()
            hanging.produce("orders", b"pending")
            hanging.flush(30)
            time.sleep(scene.pick(15, 25))
        if scene.variant:  # the capture sees the end
            hanging.abort_transaction(30)
    scene.happened("transaction_open", "ledger-1", began)


def ledger(address: str, transactional_id: str, timeout_ms: int) -> Producer:
    """A transactional producer that may begin. timeout_ms: of its transactions."""
    names = {"client_id": "ledger", "transactional_id": transactional_id}
    one = producer(address, transaction_timeout_ms=timeout_ms, **names)
    one.init_transactions(30)
    return one


def batch_too_large(scene: Scene) -> None:
    """A consumer accepts smaller responses than one batch needs, and asks again for ever."""
    size = scene.pick(30_000, 60_000)
    with scene.orders(settings={"message.max.bytes": "2000000"}) as broker:
        one = producer(broker.address, client_id="shop")
        _write(one, [b"x" * 20] * 20)
        _write(one, [bytes(range(250)) * (size // 250)])
        _write(one, [b"x" * 20] * 20)
        names = ("fetch_max_bytes", "message_max_bytes", "fetch_message_max_bytes")
        stuck = consumer(
            broker.address,
            client_id="billing",
            group_id="billing",
            receive_message_max_bytes=2000,
            reconnect_backoff_max_ms=500,
            **dict.fromkeys(names, 1000),
        )
        stuck.subscribe(["orders"])
        seen, reached = 0, None
        end = time.monotonic() + scene.pick(14, 18)
        while time.monotonic() < end:
            seen += drain(stuck, 0.1)
            if seen >= 20 and reached is None:
                reached = now()
        stuck.close()
    assert reached is not None
    assert seen == 20
    scene.happened("consumer_stuck", "orders-0", reached)


def _write(one: Producer, values: list[bytes]) -> None:
    for value in values:
        one.produce("orders", value)
    if one.flush(30):
        raise TimeoutError("records were not delivered")


def retries_duplicate(scene: Scene) -> None:
    """The response to a Produce is lost; the application writes the batch with a new producer."""
    relay = scene.relay()
    config = _ACKS_ALL | {"enable_idempotence": True}
    with _response_lost(scene, relay, config) as first:
        first.purge()
        first.flush(1)
        second = producer(relay.address, **config)
        relay.is_swallowing = False
        _write(second, _orders(4))
        with scene.incident("duplicate_records", "orders-0"):
            _write(second, _orders(3))
        _write(second, _orders(5))


def retries_duplicate_plain(scene: Scene) -> None:
    """The response to a Produce is lost; the producer without idempotence sends it again."""
    relay = scene.relay()
    with _response_lost(scene, relay, _ACKS_ALL | {"enable_idempotence": False}) as one:
        relay.is_swallowing = False
        with scene.incident("duplicate_records", "orders-0"):
            relay.reset_all()
            one.flush(30)
        _write(one, _orders(5))


@contextmanager
def _response_lost(scene: Scene, relay: Relay, config: Mapping[str, Any]) -> Iterator[Producer]:
    """Record a producer whose fourth batch has no response, as the relay swallows responses."""
    create_topic(relay.address)
    with scene.recording(relay.port):
        one = producer(relay.address, **config)
        for number in range(3):
            _write(one, _orders(number))
        relay.is_swallowing = True
        for value in _orders(3):
            one.produce("orders", value)
        one.flush(1)
        yield one


def _orders(number: int) -> list[bytes]:
    return [f"order {number}-{line} of customer {line * 7919}".encode() for line in range(10)]


def group_sessions(scene: Scene) -> None:
    """Healthy: members that come and go, commits, a topic that is created."""
    broker = scene.broker()
    with scene.recording(broker.ports[PLAINTEXT]):
        create_topic(broker.address, 4)
        with (
            producing(LIBRDKAFKA, broker.address, "shop", 20),
            member(broker.address, "billing", "billing-1"),
        ):
            time.sleep(5)
            with member(broker.address, "billing", "billing-2"):
                time.sleep(8)
            time.sleep(4)


def transactions_committed(scene: Scene) -> None:
    """Healthy: transactions that commit and abort, and a read_committed reader."""
    with scene.orders() as broker:
        one = ledger(broker.address, "ledger-1", 60_000)
        with member(broker.address, "billing", "billing", isolation_level="read_committed"):
            for number in range(12):
                one.begin_transaction()
                for value in _orders(number):
                    one.produce("orders", value)
                one.flush(30)
                time.sleep(0.5)
                end = one.abort_transaction if number % 4 == 3 else one.commit_transaction
                end(30)
            time.sleep(2)
