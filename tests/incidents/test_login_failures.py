"""Refused SASL logins: a loop, and a user who mistypes a password."""

from tests.builders.tables import Row, alarms, connection, exchange, expect, found


def _refused(count: int) -> dict[str, list[Row]]:
    user = {"principal": "User:alice", "sasl_mechanism": "PLAIN"}
    refusal = {"api_name": "SaslAuthenticate", "error_code": 58, "error_codes": [58]}
    refusal["error_name"] = "SASL_AUTHENTICATION_FAILED"
    return {
        "connections": [connection(n, **user) for n in range(count)],
        "exchanges": [exchange(n, connection_id=n, second=n, **refusal) for n in range(count)],
    }


def test_a_loop_of_refused_logins_is_bad() -> None:
    """Six refused logins in five seconds are one incident of the client."""
    (loop,) = found(**_refused(6))
    expect(loop, "login_failures", "bad", subject="app @ 10.0.0.1", request_count=6)
    assert "10.0.0.9:9092 refused 6 logins in 5 s of User:alice by PLAIN" in loop["text"]


def test_a_refused_login_begins_with_its_handshake() -> None:
    """The exchanges of SCRAM before the refused one belong to the login."""
    rows = _refused(3)
    handshakes = [
        exchange(n, connection_id=0, at_us=n * 200_000, api_name="SaslHandshake") for n in (-2, -1)
    ]
    rows["exchanges"] = handshakes + rows["exchanges"]
    (loop,) = found(**rows)
    expect(loop, "login_failures", start=-0.2, request_count=3)


def test_one_refused_login_is_only_information() -> None:
    """A mistyped password is not an alarm."""
    (one,) = found(**_refused(1))
    assert one["severity"] == "info"


def test_logins_that_succeed_are_no_incident() -> None:
    """The same exchanges without an error code give no incident."""
    rows = _refused(6)
    for row in rows["exchanges"]:
        row.update(error_code=0, error_name="NONE", error_codes=[])
    assert found(**rows) == []


def test_tokens_that_the_broker_answers_with_a_close() -> None:
    """Before KIP-152 a refused token has no response, and the broker closes the connection."""
    rows = _refused(4)
    for row, one in zip(rows["exchanges"], rows["connections"], strict=True):
        row.update(api_name="SaslToken", client_id=None, status="connection_closed")
        row.update(response_time=None, error_code=None, error_name=None, error_codes=[])
        one.update(closed_by="broker", close_reason="fin")
    (loop,) = found(**rows)
    assert (loop["kind"], loop["subject"]) == ("login_failures", "app @ 10.0.0.1")
    assert "it closed the connection" in loop["text"]
    for one in rows["connections"]:
        one["closed_by"] = "client"
    assert alarms(**rows) == []
