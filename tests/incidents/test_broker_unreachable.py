"""Brokers that clients lost, addresses that they never reached, connections that died idle."""

from __future__ import annotations

from typing import Any

from tests.incidents.made import SECOND_US, Row, at, connection, found
from tests.report.made import exchange


def _attempt(number: int, seconds: float, **values: Any) -> Row:
    """A connection whose SYN was refused."""
    row = connection(
        number,
        first_time=at(seconds),
        last_time=at(seconds),
        handshake_seen=False,
        close_reason="rst",
        is_kafka=False,
        protocol="none",
        client_ids=[],
        syn_count=1,
        unanswered_syn_count=0,
        refused=True,
    )
    return row | values


def _open(number: int, seconds: float = 0, **values: Any) -> Row:
    """A connection that the broker accepted, with its last response a second later."""
    row = connection(
        number,
        first_time=at(seconds),
        syn_count=1,
        unanswered_syn_count=0,
        refused=False,
        response_byte_count=100,
        response_last_time=at(seconds + 1),
    )
    return row | values


def _answered(number: int, seconds: float, connection_id: int = 1) -> Row:
    return exchange(number, connection_id=connection_id, at_us=round(seconds * SECOND_US))


def _waiting(number: int, seconds: float, **values: Any) -> Row:
    at_us = round(seconds * SECOND_US)
    return exchange(number, at_us=at_us, latency_us=None, api_name="Produce", **values)


def test_a_broker_that_refuses_connections() -> None:
    """The outage begins with the request without response, and ends with the next connection."""
    (lost,) = found(
        connections=[
            _open(1, close_reason="fin", closed_by="broker", last_time=at(10.1)),
            *(_attempt(n, 10.2 + n) for n in (2, 3, 4)),
            _open(9, 20),
        ],
        exchanges=[
            _answered(0, 5),
            _waiting(1, 10, status="connection_closed"),
            _answered(2, 20, 9),
        ],
    )
    assert (lost["kind"], lost["severity"]) == ("broker_unreachable", "bad")
    assert lost["subject"] == "10.0.0.9:9092"
    assert lost["start_time"].timestamp() * SECOND_US == at(10)
    assert lost["end_time"].timestamp() * SECOND_US == at(20)
    assert "3 connection attempts of 1 host refused (RST)" in lost["text"]


def test_a_broker_whose_network_is_silent() -> None:
    """SYNs without any answer, sent again, are an outage until the capture's end."""
    silent = {"refused": False, "unanswered_syn_count": 2, "syn_count": 2}
    (lost,) = found(
        connections=[_open(1), _attempt(2, 10, **silent), _attempt(3, 13, **silent)],
        exchanges=[_answered(0, 5)],
    )
    assert lost["kind"] == "broker_unreachable"
    assert "no SYN-ACK" in lost["text"]
    assert "until the capture's end" in lost["text"]


def test_an_attempt_before_the_broker_started_is_no_outage() -> None:
    """Refused attempts before the first response, and a single one later, are no incident."""
    early = [_attempt(2, 1), _attempt(3, 2), _open(1, 4)]
    assert found(connections=early, exchanges=[_answered(0, 5)]) == []
    late = [_open(1), _attempt(2, 10), _open(4, 11)]
    assert found(connections=late, exchanges=[_answered(0, 5)]) == []


def test_an_advertised_address_that_refuses() -> None:
    """Metadata names a port that no client reached."""
    broker = {"node_id": 3, "host": "10.0.0.8", "port": 9093, "ip": "10.0.0.8", "roles": []}
    wrong = {"broker_ip": "10.0.0.8", "broker_port": 9093}
    (lost,) = found(
        connections=[_open(1), *(_attempt(n, n, **wrong) for n in (2, 3))],
        exchanges=[_answered(0, 1)],
        brokers=[broker],
    )
    assert (lost["kind"], lost["subject"]) == ("advertised_address_unreachable", "10.0.0.8:9093")
    assert lost["start_time"].timestamp() * SECOND_US == at(2)
    assert "for node 3" in lost["text"]
    reached = [_open(1), _attempt(2, 2, **wrong), _open(3, 3, **wrong)]
    assert found(connections=reached, exchanges=[_answered(0, 1)], brokers=[broker]) == []


def test_an_idle_connection_that_was_cut() -> None:
    """After a minute of silence a request has no response, while another connection works."""
    rows = {
        "connections": [_open(1, last_time=at(58)), _open(2, 56)],
        "exchanges": [_answered(0, 1), _waiting(1, 55), _answered(2, 57, 2)],
    }
    (cut,) = found(**rows)
    assert (cut["kind"], cut["severity"]) == ("idle_connection_cut", "bad")
    assert cut["subject"] == "app @ 10.0.0.1"
    assert cut["start_time"].timestamp() * SECOND_US == at(55)
    assert "died while idle for 54" in cut["text"]
    rows["exchanges"] = rows["exchanges"][:2]  # the broker answers nobody: no cut connection
    assert found(**rows) == []


def test_an_idle_connection_that_its_client_closes_is_no_cut() -> None:
    """A request that a closing client leaves behind is no incident."""
    closing = _open(1, last_time=at(55.1), close_reason="fin", closed_by="client")
    rows = [_answered(0, 1), _waiting(1, 55), _answered(2, 57, 2)]
    assert found(connections=[closing, _open(2, 56)], exchanges=rows) == []
