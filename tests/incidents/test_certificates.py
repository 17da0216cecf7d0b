"""Certificates that were not valid, or expire soon, as incidents and in the summary."""

import io
from typing import Any

import pytest
from rich.console import Console

from kdissect.summary import print_summary, summarise
from tests.builders.tables import Row, at, connection, found, tables

DAY_S = 86_400


def _tls(number: int = 1, *, begins_s: float = -DAY_S, ends_s: float, **values: Any) -> Row:
    """A TLS connection whose broker has a certificate with this validity."""
    certificate = {
        "tls_certificate_subject": "CN=broker-1",
        "tls_certificate_issuer": "CN=Shop CA",
        "tls_certificate_not_before": at(begins_s),
        "tls_certificate_not_after": at(ends_s),
    }
    tls = {"is_tls": True, "is_kafka": False, "protocol": "tls", "tls_version": "TLSv1.2"}
    return connection(number, **tls, **certificate) | values


@pytest.mark.parametrize(
    ("begins_s", "ends_s", "severity"),
    [
        (-DAY_S, 31 * DAY_S, None),
        (-DAY_S, 29 * DAY_S, "info"),
        (-DAY_S, -1, "warn"),
        (1, 90 * DAY_S, "warn"),
    ],
)
def test_a_certificate_of_working_connections(
    begins_s: float, ends_s: float, severity: str | None
) -> None:
    """One incident for all connections with it: 30 days before its end, or outside its validity."""
    rows = [_tls(number, begins_s=begins_s, ends_s=ends_s) for number in range(3)]
    incidents = [row for row in found(connections=rows) if row["kind"] == "tls_failure"]
    assert [row["severity"] for row in incidents] == ([severity] if severity else [])
    for row in incidents:
        assert (row["kind"], row["subject"]) == ("tls_failure", "10.0.0.9:9092")
        assert row["text"].startswith("3 connections with the broker's certificate CN=broker-1.")
        assert sorted(row["evidence"]["connection_ids"]) == [0, 1, 2]


def test_a_client_certificate_that_ends_soon() -> None:
    """The subject is the client's host."""
    client = {
        "tls_client_subject": "CN=alice",
        "tls_client_not_before": at(-DAY_S),
        "tls_client_not_after": at(DAY_S),
    }
    unread, row = found(connections=[_tls(ends_s=90 * DAY_S, **client)])
    assert (row["kind"], row["severity"], row["subject"]) == ("tls_failure", "info", "10.0.0.1")
    assert "the client's certificate CN=alice" in row["text"]
    assert unread["kind"] == "capture_unread"  # whose reason is no certificate


def test_a_failed_handshake_names_the_certificate_that_had_ended() -> None:
    """One incident has the alert and the dates."""
    alert = {"request_tls_alert": "certificate_unknown", "close_reason": "fin"}
    rows = [_tls(number, ends_s=-3 * DAY_S, begins_s=-9 * DAY_S, **alert) for number in range(3)]
    (row,) = found(connections=rows)
    assert row["severity"] == "bad"
    assert "an alert: certificate_unknown" in row["text"]
    assert "The broker's certificate CN=broker-1 is valid from" in row["text"]


def test_a_failed_handshake_with_a_valid_certificate() -> None:
    """Nothing is said of the certificate, because its dates explain nothing."""
    alert = {"request_tls_alert": "unknown_ca", "close_reason": "fin"}
    (row,) = found(connections=[_tls(ends_s=90 * DAY_S, **alert)])
    assert "is valid from" not in row["text"]


def test_the_summary_has_a_line_for_certificates() -> None:
    """The first one to expire is named, others are counted; without any there is no line."""
    rows = [_tls(1, ends_s=DAY_S), _tls(2, ends_s=-DAY_S, broker_port=9093)]
    manifest = {
        "totals": dict.fromkeys(
            ("captures", "packets", "bytes", "connections", "exchanges", "records",
             "record_batches", "anomalies"), 0),
        "timings": {},
    }  # fmt: skip
    document = summarise(tables(manifest, connections=rows))
    expected = ["expired", "expires soon"]
    assert [row["state"] for row in document["expiring_certificates"]] == expected
    shown = io.StringIO()
    print_summary(document, Console(file=shown, width=200))
    assert "Certificate of 10.0.0.9:9093 CN=broker-1 expired (2026-" in shown.getvalue()
    assert "1 more in kdissect report" in shown.getvalue()
    shown = io.StringIO()
    print_summary(summarise(tables(manifest, connections=[connection()])), Console(file=shown))
    assert "Certificate" not in shown.getvalue()
