"""Connections that are cut, slow, refused by TLS or SASL, or opened far too often."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from confluent_kafka import Producer
from kafka.errors import KafkaError as PythonClientError

from lab.incidents.clients import (
    KAFKA_PYTHON,
    LIBRDKAFKA,
    consumer,
    create_topic,
    producer,
    producing,
    python_producer,
)
from lab.incidents.scene import PLAINTEXT, Scene, client
from tests.broker.certificates import Authority
from tests.broker.kafka_broker import Broker

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


def idle_cut(scene: Scene) -> None:
    """A producer idles; a relay drops its connection silently just before it writes again."""
    timeout_ms = scene.pick(4000, 6000)
    with scene.relayed_orders() as relay:
        one = producer(
            relay.address,
            client_id="shop",
            socket_timeout_ms=timeout_ms,
            request_timeout_ms=timeout_ms,
        )
        _write(one, 5)
        time.sleep(scene.pick(65, 125))
        relay.drop_all()
        with scene.incident("idle_connection_cut", client("shop")):
            _write(one, 5)
        _write(one, 5)


def idle_reset(scene: Scene) -> None:
    """A producer idles; a relay answers its next request with RST."""
    idle_s = scene.pick(62, 91)
    with scene.relayed_orders(reset_idle_s=idle_s - 2) as relay:
        one = producer(relay.address, client_id="shop")
        _write(one, 5)
        time.sleep(idle_s)
        with scene.incident("idle_connection_cut", client("shop")):
            _write(one, 5)


def _write(one: Producer, count: int) -> None:
    """Write records; each is delivered before the next one."""
    for _ in range(count):
        one.produce("orders", b"x" * 60)
        if one.flush(30):
            raise TimeoutError("a record was not delivered")


def upload_slow(scene: Scene) -> None:
    """A relay with a small receive buffer reads requests slowly: windows of zero bytes."""
    rate = scene.pick(15_000, 8_000)
    with scene.relayed_orders(receive_buffer=2048, bytes_per_second=rate) as relay:
        one = producer(relay.address, client_id="shop", batch_num_messages=1)
        one.list_topics("orders", timeout=30)
        with scene.incident("slow_upload", client("shop")):
            for _ in range(scene.pick(4, 3)):
                one.produce("orders", bytes(range(251)) * scene.pick(160, 120))
                one.flush(60)


def secure_broker(
    scene: Scene, *, days_left: int = 90, more: Mapping[str, str] | None = None
) -> tuple[Broker, Authority]:
    """A broker with a TLS and a SASL listener, and the authority of its certificate.

    days_left: until the certificate ends. more: further settings.
    """
    authority = Authority(scene.folder)
    ends = datetime.now(UTC) + timedelta(days=days_left)
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
        **(more or {}),
    }
    listeners = {"SECURE": "SSL", "SASL": "SASL_PLAINTEXT"}
    return scene.broker(settings, listeners=listeners, scram={"alice": "right"}), authority


def certificate_expired(scene: Scene) -> None:
    """The broker's certificate ended three days ago; a client verifies it and tries again."""
    broker, authority = secure_broker(scene, days_left=-3)
    settings = {
        "security_protocol": "ssl",
        "ssl_ca_location": str(authority.cert),
        "ssl_cipher_suites": "ECDHE-ECDSA-AES128-GCM-SHA256",
    }
    _fail_tls(scene, broker, "SECURE", settings)


def certificate_expires(scene: Scene) -> None:
    """The broker's certificate ends in some days; clients work over TLS 1.2."""
    broker, authority = secure_broker(
        scene, days_left=scene.pick(9, 2), more={"ssl.enabled.protocols": "TLSv1.2"}
    )
    create_topic(broker.address)
    address = broker.address_of("SECURE")
    tls = {"security_protocol": "ssl", "ssl_ca_location": str(authority.cert)}
    with scene.recording(broker.ports["SECURE"]), scene.incident("tls_failure", address):
        for _ in range(scene.pick(3, 5)):
            _write(producer(address, client_id="shop", **tls), 10)
            time.sleep(1)


def authority_unknown(scene: Scene) -> None:
    """A client trusts another authority than the one that signed the broker's certificate."""
    broker, _ = secure_broker(scene)
    stranger = Authority(scene.folder, "stranger")
    settings = {"security_protocol": "ssl", "ssl_ca_location": str(stranger.cert)}
    _fail_tls(scene, broker, "SECURE", settings)


def tls_to_plaintext(scene: Scene) -> None:
    """A TLS client connects to a plaintext listener again and again."""
    _fail_tls(scene, scene.broker(), PLAINTEXT, {"security_protocol": "ssl"})


def plaintext_to_tls(scene: Scene) -> None:
    """A plaintext client connects to a TLS listener again and again."""
    broker, _ = secure_broker(scene)
    _fail_tls(scene, broker, "SECURE", {})


def _fail_tls(scene: Scene, broker: Broker, listener: str, settings: Mapping[str, str]) -> None:
    """Record a client whose TLS handshakes fail."""
    address = broker.address_of(listener)
    with scene.recording(broker.ports[listener]), scene.incident("tls_failure", address):
        attempt(address, scene.pick(6, 9), settings)


def password_wrong(scene: Scene) -> None:
    """A client logs in with a wrong password again and again: SASL PLAIN."""
    _login(scene, "PLAIN")


def password_wrong_scram(scene: Scene) -> None:
    """A client logs in with a wrong password again and again: SCRAM."""
    _login(scene, scene.pick("SCRAM-SHA-256", "SCRAM-SHA-512"))


def _login(scene: Scene, mechanism: str) -> None:
    """Record a client that logs in with a wrong password."""
    broker, _ = secure_broker(scene)
    settings = sasl(mechanism, "wrong")
    with scene.recording(broker.ports["SASL"]), scene.incident("login_failures", client("shop")):
        attempt(broker.address_of("SASL"), scene.pick(8, 12), settings)


def sasl(mechanism: str, password: str) -> dict[str, Any]:
    """The settings of a client that logs in as alice."""
    return {
        "security_protocol": "sasl_plaintext",
        "sasl_mechanism": mechanism,
        "sasl_username": "alice",
        "sasl_password": password,
    }


def attempt(address: str, duration_s: float, settings: Mapping[str, str]) -> None:
    """Run a producer that never gets as far as a record."""
    one = producer(address, client_id="shop", reconnect_backoff_max_ms=1000, **settings)
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        one.poll(0.1)


def connections_stormed(scene: Scene) -> None:
    """An application opens a new producer for each record."""
    with scene.orders() as broker, producing(LIBRDKAFKA, broker.address, "steady", 10):
        time.sleep(3)
        end = time.monotonic() + scene.pick(6, 9)
        with scene.incident("connection_storm", client("per-record")):
            while time.monotonic() < end:
                _one_record(broker.address, scene.pick(LIBRDKAFKA, KAFKA_PYTHON))
                time.sleep(0.1)
        time.sleep(2)


def _one_record(address: str, library: str) -> None:
    if library == LIBRDKAFKA:
        one = producer(address, client_id="per-record")
        one.produce("orders", b"x" * 60)
        one.flush(30)
        return
    other = python_producer(address, "per-record")
    try:
        other.send("orders", b"x" * 60).get(30)
    except PythonClientError as error:
        raise TimeoutError("a record was not delivered") from error
    other.close()


def secure_sessions(scene: Scene) -> None:
    """Healthy: TLS and SASL clients that log in, write and read."""
    broker, authority = secure_broker(scene)
    create_topic(broker.address)
    with scene.recording(broker.ports["SECURE"], broker.ports["SASL"]):
        for mechanism in ("PLAIN", "SCRAM-SHA-256"):
            login = sasl(mechanism, "right")
            _write(producer(broker.address_of("SASL"), client_id="shop", **login), 20)
            time.sleep(1)
        tls = {"security_protocol": "ssl", "ssl_ca_location": str(authority.cert)}
        address = broker.address_of("SECURE")
        _write(producer(address, client_id="shop", **tls), 20)
        reader = consumer(address, client_id="billing", **tls)
        reader.subscribe(["orders"])
        if len(reader.consume(60, timeout=60)) < 60:
            raise TimeoutError("records were not delivered")
        reader.close()
