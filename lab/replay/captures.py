"""Captures of real clients, with the settings of their brokers that responses show."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.broker.kafka_broker import AS_RECORDED, BEFORE, LATEST
from tests.broker.replaying import ROOT
from tests.material import CAPTURES as MATERIAL

# of a broker's settings, those that decide what it answers; the others say where it was
_SHOWN = (
    "authorizer.class.name", "background.threads", "delegation.token.secret.key", "group.",
    "log.cleaner.", "log.segment.bytes", "message.max.bytes", "num.", "socket.request.max.bytes",
    "super.users", "telemetry.max.bytes", "transaction.abort.",
)  # fmt: skip
_OWN = ("controller.quorum.", "listener.security.", "listeners", "log.dirs")
# transactions that ran out of time are ended at once, not up to ten seconds later
_SOON = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}
# of the brokers of the shipped captures of old clients
_OLDER = {
    "num.partitions": "3",
    "num.io.threads": "4",
    "num.network.threads": "2",
    "background.threads": "2",
    "log.cleaner.threads": "1",
    "log.segment.bytes": "67108864",
    "socket.request.max.bytes": "104857600",
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "log.initial.task.delay.ms": "",  # answers show it
}
_SASL = "SASL_PLAINTEXT"  # listener and protocol
_LOGIN = {
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
        'org.apache.kafka.common.security.plain.PlainLoginModule required user_admin="of-tests";'
    ),
    "log.initial.task.delay.ms": "",  # answers show it
}


@dataclass(frozen=True)
class Recorded:
    """A capture and its broker. clients: for people. listener: `_SASL` where its requests need a
    connection that is logged in. shipped: what is set where no manifest is beside the capture;
    more: what is set beside that."""

    path: Path
    clients: str
    kafka_version: str = LATEST
    listener: str = "PLAINTEXT"
    shipped: Mapping[str, str] = field(default_factory=lambda: AS_RECORDED)
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name.split(".", 1)[0]

    def broker(self) -> dict[str, Any]:
        """Options of a `Broker` that stands in for the captured one: its settings as the capture's
        manifest tells them; shipped captures have none."""
        manifest = self.path.with_suffix(".json")
        if not manifest.exists():
            return {"settings": {**self.shipped, **self.more}}
        brokers = json.loads(manifest.read_text())["brokers"]
        captured: dict[str, str] = brokers[0]["config"]
        shown = {key: value for key, value in captured.items() if key.startswith(_SHOWN)}
        shown |= self.more
        if self.listener == "PLAINTEXT":
            return {"settings": shown}
        shown = {key: value for key, value in captured.items() if not key.startswith(_OWN)}
        plugins = [captured["metric.reporters"]] if "metric.reporters" in captured else []
        return {
            "settings": shown | _LOGIN, "listeners": {_SASL: _SASL}, "plugins": plugins,
            "request_log": "trace",
        }  # fmt: skip

    def options(self) -> list[str]:
        """Of the replay: what makes the capture readable, the target's topics, a login."""
        found = ["--create-topics", "--max-gap", "2s"]
        keylog = self.path.with_suffix(".keylog")
        if keylog.exists():
            found += ["--keylog", str(keylog)]
        if self.listener != "PLAINTEXT":
            found += ["--sasl", "PLAIN", "--sasl-user", "admin"]
        return found

    def login(self) -> dict[str, str]:
        """What the replay finds in its environment."""
        return {} if self.listener == "PLAINTEXT" else {"KDISSECT_SASL_PASSWORD": "of-tests"}


CAPTURES = ROOT / "captures"
RECORDED = (
    Recorded(CAPTURES / "sarama.pcap.gz", "sarama"),
    Recorded(CAPTURES / "librdkafka.pcap", "librdkafka"),
    Recorded(CAPTURES / "kafkajs.pcap.gz", "KafkaJS 2.2.4"),
    Recorded(MATERIAL / "other_clients" / "kafka_python.pcap", "kafka-python"),
    Recorded(MATERIAL / "version_sweep" / "sweep_4_3_1.pcap", "franz-go, as of every release"),
    Recorded(MATERIAL / "java_latest" / "java_latest.pcap", "Java 4.3.1"),
    Recorded(MATERIAL / "transactions" / "transactions.pcap", "Java 4.3.1, transactions"),
    Recorded(MATERIAL / "share_streams" / "share.pcap", "Java 4.3.1, share groups"),
    Recorded(MATERIAL / "share_streams" / "streams.pcap", "Kafka Streams 4.3.1", more=_SOON),
    Recorded(MATERIAL / "admin" / "admin.pcap", "Java 4.3.1, admin calls", listener=_SASL),
    Recorded(MATERIAL / "sasl" / "sasl.pcap", "Java 4.3.1 and aiokafka, SASL"),
    Recorded(MATERIAL / "tls" / "tls12.pcap", "Java 4.3.1 and aiokafka, TLS 1.2"),
    Recorded(MATERIAL / "tls" / "tls13.pcap", "aiokafka, TLS 1.3"),
    Recorded(MATERIAL / "shapes" / "any_sll2.pcap", "librdkafka, all of a host's interfaces"),
    Recorded(MATERIAL / "shapes" / "ipv6.pcap", "librdkafka, IPv6"),
    Recorded(MATERIAL / "odd" / "odd_conversations.pcap", "hand-made conversations"),
    Recorded(MATERIAL / "perf" / "perf_small.pcap", "Java 4.3.1, many small requests in groups"),
    Recorded(MATERIAL / "cluster" / "cluster.pcap", "Java 4.3.1, cluster of three brokers"),
    Recorded(CAPTURES / "java_2_0_1.pcap", "Java 2.0.1", BEFORE, shipped=_OLDER),
    Recorded(CAPTURES / "java_0_10_2_2.pcap", "Java 0.10.2.2", BEFORE, shipped=_OLDER),
    Recorded(MATERIAL / "old_clients" / "java_0_8_2_2.pcap", "Java 0.8.2.2", BEFORE),
    Recorded(MATERIAL / "perf" / "perf_tshark.pcap", "Java 2.0.1, large batches", BEFORE),
    Recorded(
        MATERIAL / "zookeeper" / "zk_3_9_1_ibp_2_4.pcap",
        "Java 3.9.1, brokers with ZooKeeper",
        BEFORE,
    ),
    Recorded(
        MATERIAL / "sasl" / "sasl_handshake_v0.pcap", "Java 0.10.2.2, SaslHandshake v0", BEFORE
    ),
)
