"""Gate: a fault that is set on a candidate is among the first findings, by its name."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.incidents.clients import create_topic
from lab.replay.record import FOLDER
from lab.replay.runs import cells, findings, run, target
from tests.broker.kafka_broker import BEFORE
from tests.broker.replaying import Replayed

HEAD = ("fault", "capture", "exit", "named", "seconds", "clean", "ratio")
WIDTHS = (28, 24, 4, 6, 7, 7, 5)
FIRST, RATIO_MAX = 2, 3.0
_AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:nobody-here",
    "allow.everyone.if.no.acl.found": "true",
}


@dataclass(frozen=True)
class Fault:
    """A candidate that is set up wrong. words: one of them has to be in the first two findings.

    before: what is done on the candidate first.
    """

    name: str
    settings: Mapping[str, str]
    words: tuple[str, ...]
    before: Callable[[str], None] | None = None
    client: str = "java"


def _deny_writing(address: str) -> None:
    """Nobody may write to the topic payments."""
    from confluent_kafka.admin import (
        AclBinding,
        AclOperation,
        AclPermissionType,
        AdminClient,
        ResourcePatternType,
        ResourceType,
    )

    rule = AclBinding(
        ResourceType.TOPIC, "payments", ResourcePatternType.LITERAL, "User:ANONYMOUS", "*",
        AclOperation.WRITE, AclPermissionType.DENY,
    )  # fmt: skip
    admin = AdminClient({"bootstrap.servers": address})
    for future in admin.create_acls([rule]).values():
        future.result(20)


def _fewer_partitions(address: str) -> None:
    """A topic that a client would make by writing to it is there already, with two partitions."""
    create_topic(address, 2, topic="events")


FAULTS = (
    Fault("compression.type", {"compression.type": "gzip"}, ("compression.type",)),
    Fault(
        "min.insync.replicas",
        {"min.insync.replicas": "2"},
        ("min.insync.replicas", "NOT_ENOUGH_REPLICAS"),
    ),
    Fault(
        "message.max.bytes",
        {"message.max.bytes": "500"},
        ("message.max.bytes", "max.message.bytes", "MESSAGE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"),
    ),
    Fault("fewer partitions by default", {"num.partitions": "2"}, ("partition",)),
    Fault("fewer partitions of a topic", {}, ("partition",), _fewer_partitions),
    Fault(
        "cleanup.policy=compact",
        {"log.cleanup.policy": "compact"},
        ("cleanup.policy", "INVALID_RECORD"),
        client="librdkafka",
    ),
    Fault(
        "auto-creation off",
        {"auto.create.topics.enable": "false"},
        ("auto.create.topics", "UNKNOWN_TOPIC_OR_PARTITION"),
    ),
    Fault(
        "ACL",
        _AUTHORIZER,
        ("TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"),
        _deny_writing,
    ),
    Fault("group.max.size", {"group.max.size": "1"}, ("group.max.size", "GROUP_MAX_SIZE_REACHED")),
    Fault(
        "transaction.max.timeout.ms",
        {"transaction.max.timeout.ms": "1000"},
        ("transaction.max.timeout.ms", "INVALID_TRANSACTION_TIMEOUT"),
    ),
    Fault(
        "LogAppendTime",
        {"log.message.timestamp.type": "LogAppendTime"},
        ("message.timestamp.type", "LogAppendTime", "log_append_time"),
    ),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="FAULT", help="parts of names; without: all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="recordings of `record`")
    parser.add_argument("--client", help="begin of a recording's name, instead of the fault's own")
    parser.add_argument("--to", default=BEFORE, metavar="RELEASE")
    parser.add_argument("--pace", default="max")
    parser.add_argument("--lines", type=int, default=3, help="of findings to print")


def main(given: argparse.Namespace) -> int:
    """Return the count of faults that are not named, not failed, or slow."""
    print(cells(HEAD, WIDTHS), flush=True)
    failed = 0
    clean: dict[Path, float] = {}
    for fault in FAULTS:
        if given.names and not any(each in fault.name for each in given.names):
            continue
        path = next(given.folder.glob(f"{given.client or fault.client}*.pcap"))
        if path not in clean:
            clean[path] = _run(path, None, given).seconds
        done = _run(path, fault, given)
        found = findings(done)
        is_named = any(word in line for line in found[:FIRST] for word in fault.words)
        ratio = done.seconds / clean[path]
        failed += not is_named or done.status != 1 or ratio > RATIO_MAX
        row = (
            fault.name, path.stem, done.status, "yes" if is_named else "NO",
            f"{done.seconds:.1f}", f"{clean[path]:.1f}", f"{ratio:.1f}",
        )  # fmt: skip
        print(cells(row, WIDTHS), flush=True)
        for line in found[: given.lines] or done.errors.splitlines()[-2:]:
            print(f"    {line[:300]}", flush=True)
    print(f"{failed} faults are not as wanted")
    return failed


def _run(path: Path, fault: Fault | None, given: argparse.Namespace) -> Replayed:
    settings = dict(json.loads(path.with_suffix(".json").read_text())["settings"])
    if fault is not None:
        settings |= fault.settings
    with target(given.to, settings=settings) as (broker,):
        if fault is not None and fault.before is not None:
            fault.before(broker.address)
        return run(path, broker.address, "--pace", given.pace)
