"""Columns beside bytes: at any depth, with one type per API, and without secrets."""

import base64
import json
from typing import Any

import pyarrow as pa
import pytest

from kdissect.codec import message_codec
from kdissect.codec.message_columns import body_type
from kdissect.codec.redaction import TEXT, redact_column
from kdissect.protocol import catalog
from kdissect.protocol.model import REQUEST
from kdissect.status import Status
from kdissect.tables.embedded import INNER_MESSAGE, METRICS, SASL_TOKEN_TYPE, add_decoded
from tests.builders.messages import request_frame, response_frame

JOIN_GROUP, SYNC_GROUP, DESCRIBE_GROUPS, SASL, ENVELOPE, PUSH_TELEMETRY = 11, 14, 15, 36, 58, 72
APIS = (JOIN_GROUP, SYNC_GROUP, DESCRIBE_GROUPS, SASL, ENVELOPE, PUSH_TELEMETRY)
INNER_TOKEN = b"hmac-of-a-token"


def bodies(api_key: int, *rows: tuple[Any, Any]) -> tuple[pa.Array, pa.Array]:
    return (
        pa.array([request for request, _ in rows], body_type(api_key, "request")),
        pa.array([response for _, response in rows], body_type(api_key, "response")),
    )


def added(api_key: int, *rows: tuple[Any, Any], reveal: bool = True) -> tuple[Any, Any, Any]:
    request, response, faults = add_decoded(api_key, *bodies(api_key, *rows), reveal)
    request.validate(full=True)
    response.validate(full=True)
    return request, response, faults


def subscription(*topics: str) -> bytes:
    definition = catalog.definition("ConsumerProtocolSubscription")
    return b"\0\0" + message_codec.encode(definition, 0, {"topics": list(topics)})


def assignment(topic: str, *partitions: int) -> bytes:
    definition = catalog.definition("ConsumerProtocolAssignment")
    values = {"assigned_partitions": [{"topic": topic, "partitions": list(partitions)}]}
    return b"\0\0" + message_codec.encode(definition, 0, values)


@pytest.mark.parametrize("api_key", APIS)
def test_the_type_follows_from_the_api_alone(api_key: int) -> None:
    """The type has the decoded protocol, also if a side or every row is absent."""
    none = added(api_key)[:2]
    absent = added(api_key, (None, None), ({}, None), (None, {}))[:2]
    assert [side.type for side in none] == [side.type for side in absent]
    assert "_decoded" in str(none[0].type) + str(none[1].type)


def test_other_apis_are_left_alone() -> None:
    """Produce has no decoded column."""
    request, response = bodies(0, (None, None))
    assert add_decoded(0, request, response, True) == (request, response, [])


def test_a_group_joins_and_syncs() -> None:
    """If an old response lacks the protocol's type, the request has it."""
    member = {"member_id": "m", "metadata": subscription("a", "b")}
    cut = subscription("b")[:5]
    protocols = [{"name": "range", "metadata": subscription("a")}, {"name": "x", "metadata": cut}]
    request, response, faults = added(
        JOIN_GROUP,
        ({"protocol_type": "sr", "protocols": [{"name": "v0", "metadata": b"{}"}]}, None),
        (
            {"protocol_type": "consumer", "protocols": protocols},
            {"members": [member, member], "protocol_name": "range"},
        ),
    )
    rows = request.to_pylist()
    assert rows[0]["protocols"][0]["metadata_decoded"] is None
    first, second = rows[1]["protocols"]
    assert (first["metadata_decoded"]["topics"], second["metadata_decoded"]) == (["a"], None)
    (fault,) = faults
    assert (fault.row, fault.side, fault.status) == (1, REQUEST, Status.TRUNCATED)
    assert fault.detail.startswith("metadata: ConsumerProtocolSubscription > topics")
    found = response.to_pylist()[1]["members"]
    assert [each["metadata_decoded"]["topics"] for each in found] == [["a", "b"]] * 2

    given = [{"member_id": "m", "assignment": assignment("a", 0, 2)}]
    request, response, _ = added(
        SYNC_GROUP, ({"assignments": given}, {"assignment": assignment("a", 1)})
    )
    (found,) = request.to_pylist()[0]["assignments"]
    partitions = found["assignment_decoded"]["assigned_partitions"]
    assert partitions == [{"topic": "a", "partitions": [0, 2]}]
    decoded = response.to_pylist()[0]["assignment_decoded"]
    assert decoded["assigned_partitions"] == [{"topic": "a", "partitions": [1]}]


def test_described_groups_of_several_types() -> None:
    """Each group has its own protocol type; rows in slices keep their places."""
    member = {"member_metadata": subscription("t"), "member_assignment": assignment("t", 0)}
    groups = [
        {"protocol_type": "", "protocol_data": "", "members": []},
        {"protocol_type": "consumer", "protocol_data": "range", "members": [member] * 2},
        {"protocol_type": "sr", "protocol_data": "v0", "members": [member]},
    ]
    request, response = bodies(DESCRIBE_GROUPS, ({}, None), ({}, {"groups": groups}), ({}, {}))
    _, found, faults = add_decoded(DESCRIBE_GROUPS, request.slice(1), response.slice(1), True)
    assert not faults
    none, two, other = found.to_pylist()[0]["groups"]
    assert none["members"] == []
    for each in two["members"]:
        assert each["member_metadata_decoded"]["topics"] == ["t"]
        partitions = each["member_assignment_decoded"]["assigned_partitions"]
        assert partitions == [{"topic": "t", "partitions": [0]}]
    assert other["members"][0]["member_metadata_decoded"] is None


def bearer(claims: dict[str, str]) -> bytes:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"n,,\x01auth=Bearer aGVhZGVy.{payload}.c2lnbmF0dXJl\x01\x01".encode()


def test_tokens_show_users_and_hide_proofs() -> None:
    """User names stay; passwords, proofs and secrets go."""
    claims = {"sub": "alice", "client_secret": "hunter2"}
    tokens = [
        (b"\0alice\0hunter2", b""),
        (b"n,,n=bob,r=abc,tokenauth=true", b"r=abcdef,s=c2FsdA==,i=4096"),
        (b"c=biws,r=abcdef,p=cHJvb2Y=", b"v=c2lnbmF0dXJl"),
        (bearer(claims), b'{"status":"invalid_token"}'),
        (b"\x60\x82\xff\xff", b"\xff"),
    ]
    rows = [({"auth_bytes": asked}, {"auth_bytes": answered}) for asked, answered in tokens]
    hidden = [redact_column(side) for side in added(SASL, *rows)[:2]]
    shown = added(SASL, *rows)
    texts = [
        json.dumps([side.field("auth_bytes_decoded").to_pylist() for side in sides[:2]])
        for sides in (hidden, shown)
    ]
    for secret in ("hunter2", "c2FsdA==", "cHJvb2Y=", "c2lnbmF0dXJl", "aGVhZGVy"):
        assert secret not in texts[0]
        assert secret in texts[1]
    asked = [row["auth_bytes_decoded"] for row in hidden[0].to_pylist()]
    assert [token["mechanism"] for token in asked] == [
        *("PLAIN", "SCRAM", "SCRAM", "OAUTHBEARER", "GSSAPI")
    ]
    assert (asked[0]["authcid"], asked[0]["password"]) == ("alice", TEXT)
    assert asked[1]["extensions"] == [{"name": "tokenauth", "value": "true"}]
    assert asked[3]["claims"][0] == {"name": "sub", "value": "alice"}
    answered = [row["auth_bytes_decoded"] for row in hidden[1].to_pylist()]
    assert (answered[0], answered[4]) == (None, None)
    assert (answered[1]["iterations"], answered[1]["salt"]) == (4096, TEXT)


def test_an_envelopes_inner_messages() -> None:
    """The response is read with the API and version of the inner request; secrets hide."""
    asked = request_frame(39, 2, 5, hmac=INNER_TOKEN, renew_period_ms=1)
    answered = response_frame(39, 2, 5, error_code=0, throttle_time_ms=4)
    principal = b"\0\0" + message_codec.encode(
        catalog.definition("DefaultPrincipalData"), 0, {"type": "User", "name": "alice"}
    )
    rows = [
        ({"request_data": asked, "request_principal": principal}, {"response_data": answered}),
        (None, {"response_data": answered}),
        ({"request_data": asked[:-1]}, None),
    ]
    request, response, faults = added(ENVELOPE, *rows, reveal=False)
    found = request.to_pylist()[0]["request_data_decoded"]
    names = ("api_key", "api_name", "api_version", "correlation_id", "client_id")
    assert [found[name] for name in names] == [39, "RenewDelegationToken", 2, 5, "made"]
    assert json.loads(found["body"]) == {"hmac": TEXT, "renew_period_ms": 1}
    assert request.to_pylist()[0]["request_principal_decoded"]["name"] == "alice"
    body = json.loads(response.to_pylist()[0]["response_data_decoded"]["body"])
    assert body["throttle_time_ms"] == 4
    assert response.to_pylist()[1]["response_data_decoded"] is None
    assert [(fault.row, fault.side) for fault in faults] == [(2, REQUEST)]
    body = added(ENVELOPE, rows[0])[0].to_pylist()[0]["request_data_decoded"]["body"]
    assert base64.b64decode(json.loads(body)["hmac"]) == INNER_TOKEN


def test_an_envelope_in_an_envelope_keeps_its_secrets() -> None:
    """Secrets are redacted at each depth."""
    token = request_frame(39, 2, 5, hmac=INNER_TOKEN, renew_period_ms=1)
    outer = request_frame(ENVELOPE, 0, request_data=token, client_host_address=b"abcd")
    request, *_ = added(ENVELOPE, ({"request_data": outer}, None), reveal=False)
    body = request.to_pylist()[0]["request_data_decoded"]["body"]
    assert base64.b64encode(token).decode() not in body
    assert json.loads(body)["request_data"] == TEXT


def test_record_data_within_is_left_out() -> None:
    """Records appear only in `records`, under the control of --payload."""
    topic = {"name": "t", "partition_data": [{"index": 0, "records": b"private"}]}
    data = request_frame(0, 9, acks=1, topic_data=[topic])
    request, *_ = added(ENVELOPE, ({"request_data": data}, None))
    body = json.loads(request.to_pylist()[0]["request_data_decoded"]["body"])
    assert body["topic_data"][0]["partition_data"][0]["records"] is None


def test_cut_metrics_are_an_anomaly() -> None:
    """A gzip stream of nothing sensible is a fault of decompression."""
    rows = [
        ({"compression_type": 0, "metrics": b"\x0a\x02\x12\x00"}, {}),
        ({"compression_type": 1, "metrics": b"no gzip"}, None),
        ({"compression_type": 0, "metrics": b"\x0a\x09"}, None),
    ]
    request, _, faults = added(PUSH_TELEMETRY, *rows)
    assert [row["metrics_decoded"] for row in request.to_pylist()] == [[], None, None]
    expected = [(1, Status.CORRUPT), (2, Status.TRUNCATED)]
    assert [(fault.row, fault.status) for fault in faults] == expected


def test_types_are_plain() -> None:
    """No unsigned integers, maps or dictionaries: every reader of Parquet has these types."""
    for kind in (SASL_TOKEN_TYPE, INNER_MESSAGE, METRICS):
        for word in ("uint", "map<", "dictionary"):
            assert word not in str(kind)
