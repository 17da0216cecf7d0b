"""Replay logs in to a real broker by TLS and SASL, and reports each failure clearly."""

import asyncio
import base64
import json
import time
from pathlib import Path

import pytest

from kdissect.errors import EnvironmentFailed
from kdissect.replay.target.auth import Sasl, TlsOptions
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import Access, connect
from kdissect.replay.translation.id_map import TargetCluster
from tests.broker.certificates import Authority
from tests.broker.kafka_broker import Broker, StartBroker
from tests.broker.replaying import ROOT, replay

pytestmark = [pytest.mark.broker, pytest.mark.heavy]
SARAMA = ROOT / "captures" / "sarama.pcap.gz"
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
BEARER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
VALIDATOR = (
    "org.apache.kafka.common.security.oauthbearer.internals.unsecured."
    "OAuthBearerUnsecuredValidatorCallbackHandler"
)


def token() -> str:
    """An unsecured JSON web token, as a test broker takes it."""
    now = time.time()
    parts = ({"alg": "none"}, {"sub": "alice", "iat": now - 1, "exp": now + 600})
    coded = (
        base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts
    )
    return ".".join(coded) + "."


def settings(authority: Authority) -> dict[str, str]:
    prefix = "listener.name.sasl.{}.sasl.jaas.config"
    store = authority.issue("broker", "127.0.0.1").store
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(store),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.cert),
        "listener.name.mutual.ssl.client.auth": "required",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        prefix.format("plain"): f'{PLAIN} required user_alice="right";',
        prefix.format("scram-sha-256"): f"{SCRAM} required;",
        prefix.format("scram-sha-512"): f"{SCRAM} required;",
        prefix.format("oauthbearer"): f'{BEARER} required unsecuredLoginStringClaim_sub="a";',
        "listener.name.sasl.oauthbearer.sasl.server.callback.handler.class": VALIDATOR,
        "connections.max.reauth.ms": "1500",
    }


def probe(broker: Broker, listener: str, access: Access) -> TargetCluster:
    target = Target("127.0.0.1", broker.ports[listener], access)

    async def ask() -> None:
        await target.probe()
        target.close()

    asyncio.run(asyncio.wait_for(ask(), 30))
    return target.cluster


def test_each_mechanism_logs_in_or_says_why_not(start_broker: StartBroker, tmp_path: Path) -> None:
    """One broker with every kind of listener: each mechanism, TLS, and each way to fail."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "stranger")
    broker = start_broker(
        listeners={"SECURE": "SSL", "MUTUAL": "SSL", "SASL": "SASL_SSL"},
        scram={"alice": "right"},
        settings=settings(authority),
    )
    trusted = TlsOptions(ca=str(authority.cert))
    client = authority.issue("client")
    assert probe(broker, "SECURE", Access(trusted)).cluster_id == broker.cluster_id
    assert probe(broker, "SECURE", Access(TlsOptions(verify=False))).nodes
    both = tmp_path / "client_with_key.pem"
    both.write_bytes(client.cert.read_bytes() + client.key.read_bytes())
    mutual = TlsOptions(ca=str(authority.cert), cert=str(both))
    assert probe(broker, "MUTUAL", Access(mutual)).nodes
    for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        assert probe(broker, "SASL", Access(trusted, Sasl(mechanism, "alice", "right"))).nodes
    assert probe(broker, "SASL", Access(trusted, Sasl("OAUTHBEARER", secret=token()))).nodes

    def refused(listener: str, access: Access) -> str:
        with pytest.raises(EnvironmentFailed) as failed:
            probe(broker, listener, access)
        return str(failed.value)

    for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        said = refused("SASL", Access(trusted, Sasl(mechanism, "alice", "wrong")))
        assert f"SASL {mechanism} was refused" in said
        assert "wrong" not in said.replace("was refused", "")
    assert "refused" in refused("SASL", Access(trusted, Sasl("OAUTHBEARER", secret="a.b.c")))
    assert "cannot be trusted" in refused("SECURE", Access(TlsOptions(ca=str(other.cert))))
    assert "is TLS spoken" in refused("PLAINTEXT", Access(trusted))
    assert "want --tls or --sasl" in refused("SECURE", Access(connect_timeout=2.0))
    assert "client's certificate" in refused("MUTUAL", Access(trusted))
    assert "want --sasl?" in refused("SASL", Access(trusted, connect_timeout=2.0))
    assert "is not offered" in refused("PLAINTEXT", Access(None, Sasl("PLAIN", "alice", "right")))
    # and from the command line, the password from the environment
    login = ("--tls-ca", str(authority.cert), "--sasl", "SCRAM-SHA-256", "--sasl-user", "alice")
    for password, status in (("right", 0), ("wrong", 3)):
        variable = {"KDISSECT_SASL_PASSWORD": password}
        options = (tmp_path / "r.jsonl", *login, "--api", "ApiVersions")
        done = replay(SARAMA, broker.address_of("SASL"), *options, env=variable)
        assert done.status == status, done.errors
    broker.stop()
    assert "connection refused" in refused("PLAINTEXT", Access())


def test_a_session_that_ends_is_renewed(start_broker: StartBroker, tmp_path: Path) -> None:
    """connections.max.reauth.ms: the link knows when it has to log in again, and can."""
    authority = Authority(tmp_path)
    broker = start_broker(
        listeners={"SASL": "SASL_SSL"}, scram={"alice": "right"}, settings=settings(authority)
    )
    access = Access(TlsOptions(ca=str(authority.cert)), Sasl("SCRAM-SHA-256", "alice", "right"))

    async def stay() -> None:
        link = await connect("127.0.0.1", broker.ports["SASL"], access)
        for _ in range(2):
            assert not link.is_login_due
            while not link.is_login_due:
                await asyncio.sleep(0.05)
            assert link.lost is None
            assert access.sasl is not None
            await link.log_in(access.sasl)
        link.close()

    asyncio.run(asyncio.wait_for(stay(), 30))
