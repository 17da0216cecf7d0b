"""Connections that are cut, slow, refused by TLS or SASL, or opened far too often."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import kafka
from kafka.errors import KafkaError as PythonClientError

from tests.broker.certificates import Authority
from tests.broker.kafka_broker import Broker
from tools.incidents.clients import (
    KAFKA_PYTHON,
    LIBRDKAFKA,
    consumer,
    create_topic,
    drain,
    producer,
    producing,
)
from tools.incidents.scene import PLAINTEXT, Scene, client, now, wait_until

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


def idle_cut(scene: Scene) -> None:
    """A producer idles; a relay drops its connection silently just before it writes again."""
    _, relay = scene.broker_with_relay()
    address = f"127.0.0.1:{relay.port}"
    create_topic(address, "orders")
    with scene.recording(relay.port):
        one = producer(address, client_id="shop", socket_timeout_ms=scene.pick(4000, 6000),
                       request_timeout_ms=scene.pick(4000, 6000))  # fmt: skip
        _write(one, 5)
        time.sleep(scene.pick(65, 125))
        relay.drop_all()
        cut = now()
        _write(one, 5)
        noticed = now()
        _write(one, 5)
    scene.happened("idle_connection_cut", client("shop"), cut, noticed)


def idle_reset(scene: Scene) -> None:
    """A producer idles; a relay answers its next request with RST."""
    idle_s = scene.pick(62, 91)
    _, relay = scene.broker_with_relay(reset_idle_s=idle_s - 2)
    address = f"127.0.0.1:{relay.port}"
    create_topic(address, "orders")
    with scene.recording(relay.port):
        one = producer(address, client_id="shop")
        _write(one, 5)
        time.sleep(idle_s)
        cut = now()
        _write(one, 5)
    scene.happened("idle_connection_cut", client("shop"), cut)


def _write(one: object, count: int) -> None:
    from confluent_kafka import Producer

    assert isinstance(one, Producer)
    for _ in range(count):
        one.produce("orders", b"x" * 60)
        if one.flush(30):
            raise TimeoutError("a record was not delivered")


def upload_slow(scene: Scene) -> None:
    """A relay with a small receive buffer reads requests slowly: windows of zero bytes."""
    rate = scene.pick(15_000, 8_000)
    broker, relay = scene.broker_with_relay(receive_buffer=2048, bytes_per_second=rate)
    create_topic(broker.address, "orders")
    address = f"127.0.0.1:{relay.port}"
    with scene.recording(relay.port):
        one = producer(address, client_id="shop", batch_num_messages=1)
        one.list_topics("orders", timeout=30)
        began = now()
        for _ in range(scene.pick(4, 3)):
            one.produce("orders", bytes(range(251)) * scene.pick(160, 120))
            one.flush(60)
        ended = now()
    scene.happened("slow_upload", client("shop"), began, ended)


@contextmanager
def _secure(scene: Scene, *, expired: bool = False) -> Iterator[tuple[Broker, Authority]]:
    authority = Authority(scene.folder)
    ends = datetime.now(UTC) + timedelta(days=-3 if expired else 90)
    prefix = "listener.name.sasl.{}.sasl.jaas.config"
    settings = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(authority.issue("broker", "127.0.0.1", ends).store),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.cert),
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        prefix.format("plain"): f'{_PLAIN} required user_alice="right";',
        prefix.format("scram-sha-256"): f"{_SCRAM} required;",
        prefix.format("scram-sha-512"): f"{_SCRAM} required;",
    }
    listeners = {"SECURE": "SSL", "SASL": "SASL_PLAINTEXT"}
    broker = scene.broker(settings, listeners=listeners, scram={"alice": "right"})
    yield broker, authority


def certificate_expired(scene: Scene) -> None:
    """The broker's certificate ended three days ago; a client verifies it and tries again."""
    with _secure(scene, expired=True) as (broker, authority):
        with scene.recording(broker.ports["SECURE"]):
            began = now()
            _try(
                broker.address_of("SECURE"),
                scene.pick(6, 9),
                security_protocol="ssl",
                ssl_ca_location=str(authority.cert),
                ssl_cipher_suites="ECDHE-ECDSA-AES128-GCM-SHA256",
            )
        scene.happened("tls_failure", broker.address_of("SECURE"), began)


def authority_unknown(scene: Scene) -> None:
    """A client trusts another authority than the one that signed the broker's certificate."""
    with _secure(scene) as (broker, _):
        stranger = Authority(scene.folder, "stranger")
        with scene.recording(broker.ports["SECURE"]):
            began = now()
            _try(
                broker.address_of("SECURE"),
                scene.pick(6, 9),
                security_protocol="ssl",
                ssl_ca_location=str(stranger.cert),
            )
        scene.happened("tls_failure", broker.address_of("SECURE"), began)


def tls_to_plaintext(scene: Scene) -> None:
    """A TLS client connects to a plaintext listener again and again."""
    broker = scene.broker()
    with scene.recording(broker.ports[PLAINTEXT]):
        began = now()
        _try(broker.address, scene.pick(6, 9), security_protocol="ssl")
    scene.happened("tls_failure", broker.address, began)


def plaintext_to_tls(scene: Scene) -> None:
    """A plaintext client connects to a TLS listener again and again."""
    with _secure(scene) as (broker, _):
        with scene.recording(broker.ports["SECURE"]):
            began = now()
            _try(broker.address_of("SECURE"), scene.pick(6, 9))
        scene.happened("tls_failure", broker.address_of("SECURE"), began)


def password_wrong(scene: Scene) -> None:
    """A client logs in with a wrong password again and again: SASL PLAIN."""
    _login(scene, "PLAIN")


def password_wrong_scram(scene: Scene) -> None:
    """A client logs in with a wrong password again and again: SCRAM."""
    _login(scene, scene.pick("SCRAM-SHA-256", "SCRAM-SHA-512"))


def _login(scene: Scene, mechanism: str) -> None:
    with _secure(scene) as (broker, _):
        with scene.recording(broker.ports["SASL"]):
            began = now()
            _try(
                broker.address_of("SASL"),
                scene.pick(8, 12),
                security_protocol="sasl_plaintext",
                sasl_mechanism=mechanism,
                sasl_username="alice",
                sasl_password="wrong",
            )
        scene.happened("login_failures", client("shop"), began)


def _try(address: str, duration_s: float, **config: str) -> None:
    """A producer that never gets as far as a record."""
    one = producer(address, client_id="shop", reconnect_backoff_max_ms=1000, **config)
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        one.poll(0.1)


def connections_stormed(scene: Scene) -> None:
    """An application opens a new producer for each record."""
    broker = scene.broker()
    create_topic(broker.address, "orders")
    with (
        scene.recording(broker.ports[PLAINTEXT]),
        producing(LIBRDKAFKA, broker.address, "orders", "steady", 10),
    ):
        time.sleep(3)
        began = now()
        end = time.monotonic() + scene.pick(6, 9)
        while time.monotonic() < end:
            _one_record(broker.address, scene.pick(LIBRDKAFKA, KAFKA_PYTHON))
            time.sleep(0.1)
        ended = now()
        time.sleep(2)
    scene.happened("connection_storm", client("per-record"), began, ended)


def _one_record(address: str, library: str) -> None:
    if library == LIBRDKAFKA:
        one = producer(address, client_id="per-record")
        one.produce("orders", b"x" * 60)
        one.flush(30)
        return
    other = kafka.KafkaProducer(bootstrap_servers=address, client_id="per-record")
    try:
        other.send("orders", b"x" * 60).get(30)
    except PythonClientError as error:
        raise TimeoutError("a record was not delivered") from error
    other.close()


def secure_sessions(scene: Scene) -> None:
    """Healthy: TLS and SASL clients that log in, write and read."""
    with _secure(scene) as (broker, authority):
        create_topic(broker.address, "orders")
        with scene.recording(broker.ports["SECURE"], broker.ports["SASL"]):
            for mechanism in ("PLAIN", "SCRAM-SHA-256"):
                one = producer(
                    broker.address_of("SASL"), client_id="shop",
                    security_protocol="sasl_plaintext", sasl_mechanism=mechanism,
                    sasl_username="alice", sasl_password="right",
                )  # fmt: skip
                _write(one, 20)
                time.sleep(1)
            tls = {"security_protocol": "ssl", "ssl_ca_location": str(authority.cert)}
            address = broker.address_of("SECURE")
            _write(producer(address, client_id="shop", **tls), 20)
            reader = consumer(address, client_id="billing", **tls)
            reader.subscribe(["orders"])
            seen = 0

            def read() -> bool:
                nonlocal seen
                seen += drain(reader, 0.2)
                return seen >= 60

            wait_until(read)
            reader.close()
