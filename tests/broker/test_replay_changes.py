"""Brokers changed on purpose, and brokers in trouble: the matching findings, and no hang."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kdissect.wire.message import Message
from tests.broker.certificates import Authority
from tests.broker.kafka_broker import AS_RECORDED, BEFORE, LATEST, Broker, free_ports
from tests.broker.proxy import Proxy
from tests.broker.replaying import EVERYTHING, MATERIAL, ROOT, after_plan, finish, replay, start

pytestmark = [pytest.mark.broker, pytest.mark.heavy]
SARAMA = ROOT / "captures" / "sarama.pcap.gz"
LIBRDKAFKA = ROOT / "captures" / "librdkafka.pcap"
FAST = ("--pace", "x4")


TIMED_OUT = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}
ONE_PARTITION = AS_RECORDED | {"num.partitions": "1"}
AUTHORIZED = AS_RECORDED | {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}
# name of the capture, and what its broker had set that answers show
OF_CLIENTS: list[tuple[Path, dict[str, str]]] = [
    (SARAMA, AS_RECORDED),
    (LIBRDKAFKA, AS_RECORDED),
    (ROOT / "captures" / "kafkajs.pcap.gz", AS_RECORDED),
    (MATERIAL / "other_clients" / "kafka_python.pcap", AS_RECORDED),
    (MATERIAL / "version_sweep" / "sweep_4_3_1.pcap", AUTHORIZED),  # franz-go
    (
        MATERIAL / "java_latest" / "java_latest.pcap",
        AS_RECORDED | {"message.max.bytes": "1048588"},
    ),
    (MATERIAL / "transactions" / "transactions.pcap", ONE_PARTITION | TIMED_OUT),
    (MATERIAL / "share_streams" / "share.pcap", AS_RECORDED),
    (MATERIAL / "share_streams" / "streams.pcap", AS_RECORDED | TIMED_OUT),
    (MATERIAL / "sasl" / "sasl.pcap", AS_RECORDED),
    (MATERIAL / "tls" / "tls12.pcap", AS_RECORDED),
    (MATERIAL / "tls" / "tls13.pcap", AS_RECORDED),
]


@pytest.mark.parametrize(
    ("capture", "settings"), OF_CLIENTS, ids=[path.stem for path, _ in OF_CLIENTS]
)
def test_captures_of_clients(
    start_broker: Callable[..., Broker], tmp_path: Path, capture: Path, settings: dict[str, str]
) -> None:
    """Captures of all clients, on a broker as they were recorded with: no difference."""
    if not capture.exists():
        pytest.skip(f"{capture.name} is not here: it is not shipped with the project")
    target = start_broker(settings=settings)
    options = ["--create-topics", "--max-gap", "2s"]
    if (keylog := capture.with_suffix(".keylog")).exists():
        options += ["--keylog", str(keylog)]
    done = replay(capture, target.address, tmp_path / "r.jsonl", *EVERYTHING, *options)
    assert done.status == 0, done.explain()
    assert done.verdicts["same"] + done.verdicts["tolerated"] > 100


@pytest.mark.parametrize(
    ("capture", "kafka_version"),
    [
        (LIBRDKAFKA, BEFORE),
        (ROOT / "captures" / "kafkajs.pcap.gz", BEFORE),
        (ROOT / "captures" / "java_2_0_1.pcap", LATEST),
        (ROOT / "captures" / "java_0_10_2_2.pcap", LATEST),
        (MATERIAL / "java_latest" / "java_latest.pcap", BEFORE),
        (MATERIAL / "share_streams" / "share.pcap", BEFORE),
    ],
    ids=["librdkafka", "kafkajs", "java 2.0.1", "java 0.10.2.2", "java 4.3.1", "share groups"],
)
def test_another_release(
    start_broker: Callable[..., Broker], tmp_path: Path, capture: Path, kafka_version: str
) -> None:
    """On the release after or before, each difference says what it comes from."""
    if not capture.exists():
        pytest.skip(f"{capture.name} is not here: it is not shipped with the project")
    recorded = LATEST if kafka_version == BEFORE else BEFORE
    settings = AS_RECORDED if kafka_version == LATEST else {}
    target = start_broker(kafka_version, settings=settings)
    options = ("--create-topics", "--max-gap", "2s")
    done = replay(capture, target.address, tmp_path / "r.jsonl", *EVERYTHING, *options)
    assert done.status == 1
    names = [f"Kafka {each.rpartition('.')[0]}" for each in (recorded, kafka_version)]
    assert any(all(name in note for name in names) for note in done.run["notes"])
    unexplained = [
        (row["step"], row["api_name"], each)
        for row in done.rows
        for each in row["differences"]
        if not each["rule"] and not each["note"]
    ]
    assert not unexplained, unexplained[:10]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"log.segment.bytes": "33554432"},
            {
                ("CreateTopics", "topics[].configs[].value", "67108864", "33554432"),
                ("DescribeConfigs", "results[].configs[].value", "67108864", "33554432"),
            },
        ),
        (
            {"message.max.bytes": "500"},
            {
                ("Produce", "responses[].partition_responses[].error_code", "0", "10"),
                ("CreateTopics", "topics[].configs[].value", "1048588", "500"),
                ("CreateTopics", "topics[].configs[].config_source", "5", "4"),
                ("DescribeConfigs", "results[].configs[].value", "1048588", "500"),
                ("DescribeConfigs", "results[].configs[].config_source", "5", "4"),
            },
        ),
    ],
    ids=["another default", "smaller messages"],
)
def test_a_changed_setting(
    start_broker: Callable[..., Broker],
    tmp_path: Path,
    change: dict[str, str],
    expected: set[tuple[str, str, str, str]],
) -> None:
    """What follows from the setting is different, under the path where it shows."""
    target = start_broker(settings=AS_RECORDED | change)
    done = replay(SARAMA, target.address, tmp_path / "r.jsonl", *EVERYTHING, *FAST)
    assert done.status == 1
    assert done.causes() == expected, done.explain()


def test_a_topic_is_missing(start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    """Reads of a topic that the target has not: errors of that topic only."""
    target = start_broker(settings=AS_RECORDED | {"auto.create.topics.enable": "false"})
    done = replay(
        SARAMA, target.address, tmp_path / "r.jsonl", "--pace", "max", "--api", "ListOffsets"
    )
    assert done.status == 1
    assert {api for api, *_ in done.differences()} == {"ListOffsets"}
    codes = {
        (captured, answered)
        for _, path, captured, answered in done.differences()
        if path.endswith("error_code")
    }
    assert codes == {("0", "3")}, done.explain()


def test_an_acl(start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    """An authorizer that lets nobody write: exactly the denied requests differ."""
    target = start_broker(
        settings=AS_RECORDED
        | {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:nobody-here",
            "allow.everyone.if.no.acl.found": "true",
        }
    )
    _deny_writing(target.address, "User:ANONYMOUS")
    done = replay(SARAMA, target.address, tmp_path / "r.jsonl", *EVERYTHING, *FAST)
    assert done.status == 1
    # one ACL on all topics also ends that everything is allowed where there is none
    assert {answered for *_, answered in done.causes()} == {"29"}, done.explain()
    assert all("does not permit" in each["note"] for row in done.rows
               for each in row["differences"] if each["answered"] == "29")  # fmt: skip


def _deny_writing(address: str, principal: str) -> None:
    from confluent_kafka.admin import (
        AclBinding,
        AclOperation,
        AclPermissionType,
        AdminClient,
        ResourcePatternType,
        ResourceType,
    )

    admin = AdminClient({"bootstrap.servers": address})
    rule = AclBinding(
        ResourceType.TOPIC,
        "*",
        ResourcePatternType.LITERAL,
        principal,
        "*",
        AclOperation.WRITE,
        AclPermissionType.DENY,
    )
    for future in admin.create_acls([rule]).values():
        future.result(20)


def test_a_flipped_field(start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    """A proxy changes one field of one response: one difference, at that path."""
    port = free_ports(1)[0]
    target = start_broker(
        settings=AS_RECORDED | {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}"}
    )
    seen: list[int] = []

    def flip(message: Message) -> bool:
        if message.api_name != "OffsetCommit" or seen:
            return False
        seen.append(1)
        message.body["topics"][0]["partitions"][0]["error_code"] = 12
        return True

    with Proxy(port, target.ports["PLAINTEXT"], flip).running() as proxy:
        address = f"127.0.0.1:{port}"
        done = replay(SARAMA, address, tmp_path / "r.jsonl", *EVERYTHING, *FAST)
        assert proxy.altered == 1
    assert done.status == 1
    assert done.differences() == {
        ("OffsetCommit", "topics[].partitions[].error_code", "0", "12")
    }, done.explain()
    assert done.verdicts["different"] == 1


def test_the_broker_is_killed(start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    """In the middle: what was done is kept, the rest says why it is not, exit code 3."""
    target = start_broker(settings=AS_RECORDED)
    lines = tmp_path / "r.jsonl"
    process = start(SARAMA, target.address, *EVERYTHING, "--json", str(lines),
                    "--junit", str(tmp_path / "r.xml"))  # fmt: skip
    after_plan(process, 5)
    target.kill()
    done = finish(process, lines, 60)
    assert done.status == 3
    assert "the target is gone" in done.errors
    assert done.summary["ended"]
    assert done.verdicts["same"] > 5
    assert done.verdicts["error"] > 20
    assert len(done.rows) == done.run["steps"]
    assert "the target is gone" in (tmp_path / "r.xml").read_text()


def test_interrupted(start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    """SIGINT: outputs are written with what was done, exit code 130."""
    target = start_broker(settings=AS_RECORDED)
    lines = tmp_path / "r.jsonl"
    process = start(SARAMA, target.address, *EVERYTHING, "--json", str(lines))
    after_plan(process, 5)
    process.send_signal(signal.SIGINT)
    done = finish(process, lines, 30)
    assert done.status == 130
    assert done.verdicts["same"] > 5
    assert {"not_reached"} <= {row["skipped"] for row in done.rows}
    assert "nothing was written" not in done.errors


def test_no_way_in(start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    """A closed port, TLS where none is spoken, a wrong password: one line, exit code 3."""
    authority = Authority(tmp_path)
    target = start_broker(
        listeners={"SASL": "SASL_PLAINTEXT"},
        settings={
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl.plain.sasl.jaas.config": "org.apache.kafka.common.security.plain."
            'PlainLoginModule required user_alice="right";',
        },
    )
    login = ("--sasl", "PLAIN", "--sasl-user", "alice")
    wrong = {"KDISSECT_SASL_PASSWORD": "wrong"}
    right = {"KDISSECT_SASL_PASSWORD": "right"}
    lines = tmp_path / "r.jsonl"
    cases: list[tuple[str, tuple[str, ...], dict[str, str], str]] = [
        (f"127.0.0.1:{free_ports(1)[0]}", (), {}, "connection refused"),
        (target.address, ("--tls", "--tls-ca", str(authority.cert)), {}, "is TLS spoken"),
        (target.address_of("SASL"), login, wrong, "SASL PLAIN was refused"),
        (target.address_of("SASL"), ("--connect-timeout", "2s"), {}, "want"),
    ]
    for address, options, env, said in cases:
        began = time.monotonic()
        done = replay(SARAMA, address, lines, *options, env=env)
        assert (done.status, time.monotonic() - began < 60) == (3, True), done.errors
        assert said in done.errors.splitlines()[-1], done.errors
        assert "wrong" not in done.errors
    done = replay(
        SARAMA, target.address_of("SASL"), lines, *login, "--api", "ApiVersions", env=right
    )
    assert done.status == 0, done.explain()


def test_answers_that_stall(start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    """A broker that is stopped (SIGSTOP) keeps its connections: time limits end the run."""
    target = start_broker(settings=AS_RECORDED)
    lines = tmp_path / "r.jsonl"
    process = start(SARAMA, target.address, *EVERYTHING, "--json", str(lines),
                    "--timeout", "1s", "--connect-timeout", "1s")  # fmt: skip
    after_plan(process, 5)
    assert target.process is not None
    target.process.send_signal(signal.SIGSTOP)
    try:
        done = finish(process, lines, 90)
    finally:
        target.process.send_signal(signal.SIGCONT)
    assert done.status == 3
    assert "stopped answering" in done.errors or "is gone" in done.errors
    assert any("no answer within" in (row["error"] or "") for row in done.rows)


def test_the_same_cluster(start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    """The address that was captured is refused before a byte is sent; by name it is allowed."""
    target = start_broker(port=free_ports(1)[0])
    lines = tmp_path / "r.jsonl"
    done = replay(SARAMA, "127.0.0.1:9092", lines)
    assert done.status == 2
    assert "--same-cluster" in done.errors
    done = replay(SARAMA, target.address, lines, "--same-cluster", "--api", "ApiVersions")
    assert done.status == 0, done.explain()
