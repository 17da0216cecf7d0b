"""TLS to a plaintext port, the reverse, and handshakes that end after the certificate."""

from typing import Any

import pytest

from tests.builders.tables import Row, alarms, at, connection, expect, found


def _short(number: int, **values: Any) -> Row:
    """A connection of 50 ms, one a second."""
    times = {"first_time": at(number), "last_time": at(number + 0.05)}
    tls = {"is_kafka": False, "is_tls": True, "protocol": "tls", "client_ids": []}
    row = connection(number, **times, **tls, close_reason="fin", closed_by="broker")
    segments = {"request_segment_count": 3, "response_segment_count": 3}
    return row | {"request_byte_count": 500} | segments | values


def test_tls_on_a_plaintext_port() -> None:
    """The broker closes without a byte: a loop is bad, one attempt is a warning."""
    (loop,) = found(connections=[_short(n) for n in range(5)])
    expect(loop, "tls_failure", "bad", subject="10.0.0.9:9092", start=0)
    assert "its listener speaks no TLS" in loop["text"]
    (once,) = found(connections=[_short(0)])
    assert once["severity"] == "warn"


def test_kafka_in_the_clear_on_a_tls_port() -> None:
    """The broker answers with a TLS alert, though the connection has no TLS."""
    clear = {"is_kafka": True, "is_tls": False, "protocol": "kafka"}
    alert = {"response_tls_alert": "internal_error", "response_byte_count": 7}
    (loop,) = found(connections=[_short(n, **clear, **alert) for n in range(4)])
    assert (loop["kind"], loop["severity"]) == ("tls_failure", "bad")
    assert "its listener speaks TLS" in loop["text"]


@pytest.mark.parametrize(
    ("column", "alert", "text"),
    [
        ("request_tls_alert", "encrypted", "ended the TLS handshake with an alert: encrypted"),
        ("response_tls_alert", "protocol_version", "alert in the handshake: protocol_version"),
    ],
)
def test_handshakes_that_end_with_an_alert(column: str, alert: str, text: str) -> None:
    """A loop of alerts is bad, one is a warning."""
    hello = {"tls_version": "TLSv1.3", "closed_by": "client", "response_byte_count": 700}
    failed = [_short(number, **hello, **{column: alert}) for number in range(4)]
    (loop,) = found(connections=failed)
    assert (loop["kind"], loop["severity"]) == ("tls_failure", "bad")
    assert text in loop["text"]
    (once,) = found(connections=failed[:1])
    assert once["severity"] == "warn"


def test_short_handshakes_without_an_alert() -> None:
    """Health checks end like failed handshakes; without an alert nothing is established."""
    hello = {"tls_version": "TLSv1.3", "closed_by": "client", "response_byte_count": 700}
    checks = [_short(number, request_segment_count=8, **hello) for number in range(4)]
    assert alarms(connections=checks) == []
