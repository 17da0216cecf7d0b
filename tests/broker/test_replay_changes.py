"""Brokers changed on purpose, and brokers in trouble: the matching findings, and no hang."""

import signal
from pathlib import Path

import pytest

from tests.broker.kafka_broker import AS_RECORDED, StartBroker, free_ports
from tests.broker.replaying import EVERYTHING, ROOT, after_plan, finish, replay, start

pytestmark = [pytest.mark.broker, pytest.mark.heavy]
SARAMA = ROOT / "captures" / "sarama.pcap.gz"
FAST = ("--pace", "x4")


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
    start_broker: StartBroker,
    tmp_path: Path,
    change: dict[str, str],
    expected: set[tuple[str, str, str, str]],
) -> None:
    """What follows from the setting is different, under the path where it shows."""
    target = start_broker(settings=AS_RECORDED | change)
    done = replay(SARAMA, target.address, tmp_path / "r.jsonl", *EVERYTHING, *FAST)
    assert done.status == 1
    assert done.causes() == expected, done.explain()


def test_a_topic_is_missing(start_broker: StartBroker, tmp_path: Path) -> None:
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


ABORTED = ("3", "48", "120")  # unknown partition, INVALID_TXN_STATE, TRANSACTION_ABORTABLE


def test_denied_requests_are_the_only_differences(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """If an authorizer denies all writes, the denied requests differ, and what needs their data."""
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
    codes = {answered for _, path, _, answered in done.differences() if path.endswith("error_code")}
    # transactions that a denied request began in vain: verification fails, and so does their end
    assert codes == {"29", *ABORTED}, done.explain()
    denied = [each for each in done.summary["kinds"] if "AUTHORIZATION" in each["answered"]]
    assert denied[0] is done.summary["kinds"][0]
    assert all("does not permit" in each["notes"][0] for each in denied)


def _deny_writing(address: str, principal: str) -> None:
    from confluent_kafka import admin as kafka

    rule = kafka.AclBinding(
        kafka.ResourceType.TOPIC,
        "*",
        kafka.ResourcePatternType.LITERAL,
        principal,
        "*",
        kafka.AclOperation.WRITE,
        kafka.AclPermissionType.DENY,
    )
    admin = kafka.AdminClient({"bootstrap.servers": address})
    for future in admin.create_acls([rule]).values():
        future.result(20)


def test_the_broker_is_killed(start_broker: StartBroker, tmp_path: Path) -> None:
    """A broker that dies ends the run with exit code 3; finished steps have results."""
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


def test_an_interrupt_leaves_the_outputs_of_finished_steps(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """After SIGINT the outputs have the finished steps, and the exit code is 130."""
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


def test_answers_that_stall(start_broker: StartBroker, tmp_path: Path) -> None:
    """A broker that is stopped (SIGSTOP) keeps its connections: time limits end the run."""
    target = start_broker(settings=AS_RECORDED)
    lines = tmp_path / "r.jsonl"
    process = start(SARAMA, target.address, *EVERYTHING, "--json", str(lines), "--timeout", "1s")
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


def test_the_same_cluster(start_broker: StartBroker, tmp_path: Path) -> None:
    """The address that was captured is refused before a byte is sent; by name it is allowed."""
    target = start_broker(port=free_ports(1)[0])
    lines = tmp_path / "r.jsonl"
    done = replay(SARAMA, "127.0.0.1:9092", lines)
    assert done.status == 2
    assert "--allow same-cluster" in done.errors
    done = replay(SARAMA, target.address, lines, "--allow", "same-cluster", "--api", "ApiVersions")
    assert done.status == 0, done.explain()


def test_a_broker_that_holds_data(start_broker: StartBroker, tmp_path: Path) -> None:
    """The second replay of a capture meets what the first one left: it is refused with the list,
    and --into-existing writes to it and deletes none of it."""
    target = start_broker(settings=AS_RECORDED)
    options = (*EVERYTHING, "--pace", "max", "--fail-on", "none")
    first = replay(SARAMA, target.address, tmp_path / "r.jsonl", *options)
    assert first.status == 0, first.errors
    again = replay(SARAMA, target.address, tmp_path / "r.jsonl", *options)
    assert again.status == 2
    assert "records)" in again.errors
    assert "group " in again.errors
    assert "--into-existing" in again.errors
    into = replay(SARAMA, target.address, tmp_path / "r.jsonl", *options, "--into-existing")
    assert into.status == 0, into.errors
    kept = [row for row in into.rows if row["skipped"] == "not_allowed"]
    assert all("delete-existing" in row["reason"] for row in kept)
