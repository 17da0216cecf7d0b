"""What messages carry inside, against the brokers' logs; and that no secret leaves unasked."""

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import kdissect
from tests.builders.captures import file_bytes, split_capture
from tests.cases import cases
from tests.material import needs_material
from tests.truth import request_log
from tests.truth.definitions import snake_case
from tests.truth.hidden import secrets_of, table_bytes, token_rows
from tests.truth.material import LOGGED, REPEATED, Capture

ADMIN = Capture("admin/admin")
STREAMS = Capture("share_streams/streams")
WITH_SECRETS = [Capture(f"sasl/{name}") for name in ("sasl", "sasl_handshake_v0")] + [ADMIN]
GROUPS = {STREAMS.name, "other_clients/kafka_python"}  # most of their requests are of groups
WITH_GROUPS = [c for c in LOGGED if not c.name.startswith("perf/")]
some_and_all = pytest.mark.parametrize(
    "captures",
    [
        pytest.param([c for c in WITH_GROUPS if c.name not in REPEATED - GROUPS], id="some"),
        pytest.param(WITH_GROUPS, id="all", marks=pytest.mark.heavy),
    ],
)


def differences(log: Any, ours: Any, path: str) -> Iterator[str]:
    """Where a body of the log is not in our JSON; the log leaves out tagged fields at default."""
    if isinstance(log, dict) and isinstance(ours, dict):
        for name, value in log.items():
            column = snake_case(name)
            if column in ours:
                yield from differences(value, ours[column], f"{path}.{name}")
            else:
                yield f"{path}.{name}: not here"
    elif isinstance(log, list) and isinstance(ours, list) and len(log) == len(ours):
        for at, (one, other) in enumerate(zip(log, ours, strict=True)):
            yield from differences(one, other, f"{path}[{at}]")
    elif log != ours and (not isinstance(log, str) or log.rstrip("=") != str(ours).rstrip("=")):
        yield f"{path}: {ours!r}, log {log!r}"


@needs_material
@some_and_all
def test_inner_requests_are_those_that_the_controller_logged(
    captures: list[Capture], say: Callable[[str], None]
) -> None:
    """An Envelope's inner request and response, by client id, correlation id and API."""
    compared = 0
    for capture in captures:
        logged = defaultdict(list)
        for entry in request_log.load(capture.request_log_path):
            if entry.is_forwarded:
                *_, correlation_id, api_key, api_version = entry.key
                logged[entry.client_id, correlation_id, api_key, api_version].append(entry)
        rows = capture.rows("apis/Envelope")
        if not capture.check.get("stream_problems", {}).get("count"):
            assert len(rows) == sum(map(len, logged.values())), capture
        for row in rows:
            asked = row["request"]["request_data_decoded"]
            key = (
                asked["client_id"] or "",
                *(asked["correlation_id"], asked["api_key"], asked["api_version"]),
            )
            request = json.loads(asked["body"])
            entries = logged[key]
            found = [e for e in entries if not any(differences(e.request, request, ""))]
            assert found, (str(capture), key, [*differences(entries[0].request, request, "")])
            principal = row["request"]["request_principal_decoded"]
            assert found[0].principal == f"{principal['type']}:{principal['name']}"
            if row["response"] is not None:
                body = row["response"]["response_data_decoded"]["body"]
                answers = [[*differences(e.response, json.loads(body), "")] for e in found]
                assert [] in answers, (str(capture), key, answers)
            compared += 1
    assert compared > 60
    say(f"{compared} inner requests of envelopes and their answers are those of the logs")


@needs_material
@some_and_all
def test_members_have_each_subscribed_partition_once(
    captures: list[Capture], say: Callable[[str], None]
) -> None:
    """Every consumer's metadata decodes; assigned topics are subscribed, each partition once."""
    counts = defaultdict(int)
    for capture in captures:
        subscribed: dict[str, set[str]] = defaultdict(set)
        for row in capture.rows("apis/JoinGroup"):
            request = row["request"] or {"protocols": []}
            for protocol in request["protocols"] or []:
                found = protocol["metadata_decoded"]
                assert (found is not None) == (request["protocol_type"] == "consumer")
                if found is not None:
                    subscribed[request["group_id"]].update(found["topics"])
                    streams = protocol["name"] == "stream"
                    assert (found["user_data_decoded"] is not None) == streams
                    counts["subscriptions"] += 1
        for row in capture.rows("apis/SyncGroup"):
            given = []
            for each in (row["request"] or {}).get("assignments") or []:
                found = each["assignment_decoded"]
                if found is not None:
                    for topic in found["assigned_partitions"]:
                        given += [(topic["topic"], part) for part in topic["partitions"]]
                    counts["assignments"] += 1
            assert len(given) == len(set(given)), capture
            group = (row["request"] or {}).get("group_id")
            assert {topic for topic, _ in given} <= subscribed[group] or not subscribed[group]
            answer = row["response"]
            if answer and answer["assignment"]:
                assert answer["assignment_decoded"] is not None
                counts["answers"] += 1
    assert min(counts.values()) > 50
    say(", ".join(f"{number} {what}" for what, number in counts.items()) + " of groups decoded")


def test_streams_tasks_are_the_partitions_assigned() -> None:
    """A member's active tasks name the partitions that its assignment lists, in that order."""
    seen = 0
    for row in STREAMS.rows("apis/SyncGroup"):
        answer = (row["response"] or {}).get("assignment_decoded")
        if answer is None:
            continue
        tasks = answer["user_data_decoded"]["active_tasks"]
        partitions = [p for each in answer["assigned_partitions"] for p in each["partitions"]]
        assert sorted(task["partition"] for task in tasks) == sorted(partitions)
        assert answer["user_data_decoded"]["version"] == 11
        seen += len(tasks)
    assert seen


def test_pushed_metrics_are_those_that_were_asked_for(say: Callable[[str], None]) -> None:
    """Names have the prefixes of a subscription; points are no older than the process."""
    wanted = {
        prefix
        for row in ADMIN.rows("apis/GetTelemetrySubscriptions")
        for prefix in row["response"]["requested_metrics"]
    }
    points = 0
    for row in ADMIN.rows("apis/PushTelemetry"):
        metrics = row["request"]["metrics_decoded"]
        assert metrics
        for metric in metrics:
            assert metric["name"].startswith(tuple(wanted))
            assert metric["type"] in ("gauge", "sum")
            for point in metric["data_points"]:
                assert point["value"] is not None
                age = row["request_time"] - point["time"]
                assert timedelta(0) <= age < timedelta(minutes=1)
                points += 1
    assert points > 1000
    say(f"{points} data points of pushed metrics")


def test_every_token_is_read(say: Callable[[str], None]) -> None:
    """Four mechanisms; no token of the captures is left undecoded, and each names its user."""
    steps: dict[tuple[str, str], int] = defaultdict(int)
    users = set()
    for capture in WITH_SECRETS:
        for row in token_rows(capture):
            for side in (row["request"], row["response"]):
                if side is None or not side["auth_bytes"]:
                    continue
                token = side["auth_bytes_decoded"]
                steps[token["mechanism"], token["step"]] += 1
                users.add(token["authcid"])
                users.update(p["value"] for p in token["claims"] or [] if p["name"] == "sub")
    assert {mechanism for mechanism, _ in steps} == {"PLAIN", "SCRAM", "OAUTHBEARER"}
    assert {"admin", "alice", "scott"} <= users
    say(f"SASL tokens read: {dict(steps)}")


@pytest.mark.parametrize("capture", WITH_SECRETS, ids=str)
@cases("loss", [None, 0.6], heavy=[0.2])
def test_damaged_captures_show_no_secret(
    capture: Capture, loss: float | None, tmp_path: Path
) -> None:
    """Packets with passwords stay, others around them are lost (None: all of them)."""
    secrets = {secret for secret in secrets_of(capture) if secret.endswith(b"-pw")}
    chance = random.Random(1)
    head, packets = split_capture(file_bytes(capture.path))
    secret_packets = {one for one in packets if any(secret in one for secret in secrets)}
    assert secret_packets
    kept = [
        one
        for one in packets
        if one in secret_packets or (loss is not None and chance.random() > loss)
    ]
    (tmp_path / "cut.pcap").write_bytes(head + b"".join(kept))
    tables = kdissect.read(str(tmp_path / "cut.pcap"))
    for name in tables.names:
        data = table_bytes(tables[name].to_arrow())
        assert not [secret for secret in secrets if secret in data], name
