"""Connections that could not be made, and neighbours that are no outage."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import kdissect
from tests.builders.captures import read_packets, write_packets
from tests.builders.tables import Row, at, connection, exchange, expect, found
from tests.conftest import CAPTURES
from tests.incidents.metadata import Leader, leaders_named
from tests.incidents.recorded import findings, truths


def _attempt(number: int, second: float, **values: Any) -> Row:
    """A connection attempt that the broker's host refused."""
    times = {"first_time": at(second), "last_time": at(second + 0.0001)}
    row = connection(number, syn_count=1, unanswered_syn_count=0, refused=True, is_kafka=False,
                     client_ids=[], close_reason="rst", closed_by="broker", **times)  # fmt: skip
    return row | values


def _worked(number: int, start: float, end: float, **values: Any) -> Row:
    times = {"first_time": at(start), "last_time": at(end)}
    row = connection(number, syn_count=1, unanswered_syn_count=0, refused=False, **times)
    return row | values


def _traffic(number: int, start: float, end: float) -> list[Row]:
    return [
        exchange(number * 100 + n, connection_id=number, second=start + n)
        for n in range(int(end - start))
    ]


KILLED = [
    _worked(1, 0, 10.01, close_reason="fin", closed_by="broker"),
    *[_attempt(10 + n, 10.5 + n) for n in range(5)],
]


def test_a_broker_that_was_killed_and_came_back() -> None:
    """The incident has the outage and the lost request, with which it begins."""
    connections = [*KILLED, _worked(2, 16, 60)]
    (outage,) = found(exchanges=[*_traffic(1, 0, 9), LOST], connections=connections)
    expect(outage, "broker_unreachable", "bad", subject="10.0.0.9:9092", start=9.99, end=16)
    assert outage["request_count"] == 1
    assert outage["evidence"]["exchange_ids"] == [503]


def _produce(number: int, second: float, **values: Any) -> Row:
    return exchange(number, second=second, api_name="Produce", topics=["orders"], **values)


# The node answers a producer, and refuses its partition before it dies.
BEFORE = _produce(500, 5)
REFUSED = _produce(501, 8.5, error_code=6, error_codes=[6])  # NOT_LEADER_OR_FOLLOWER
LOST = _produce(503, 9.99, latency_us=None, status="connection_closed", request_pos=2000)
ELSEWHERE = _produce(502, 12, connection_id=3)
BROKERS = [
    {"node_id": node, "host": "10.0.0.9", "ip": "10.0.0.9", "port": port}
    for node, port in ((1, 9092), (2, 9094))
]
MOVED: list[Leader] = [(1, 1, 0), (9, 2, 1)]  # from node 1 to node 2 before it dies


def _outage(
    *exchanges: Row, leaders: Sequence[Leader] = (), connections: Sequence[Row] = KILLED
) -> Row:
    """The outage of node 1, if Metadata names these leaders."""
    asked, metadata = leaders_named(leaders)
    rows = found(
        exchanges=[*_traffic(1, 0, 9), *asked, *exchanges],
        connections=connections,
        brokers=BROKERS,
        apis__Metadata=metadata,
    )
    (outage,) = (row for row in rows if row["kind"] == "broker_unreachable")
    return outage


OTHER = _worked(3, 0, 60, broker_port=9094)


def test_clients_that_went_on_elsewhere_lost_nothing() -> None:
    """The node had given its partition away, and another one served its clients meanwhile."""
    outage = _outage(BEFORE, REFUSED, ELSEWHERE, leaders=MOVED, connections=[*KILLED, OTHER])
    assert outage["severity"] == "info"
    assert "Metadata named other leaders for its partitions before" in outage["text"]
    assert "Other brokers served its clients meanwhile" in outage["text"]


@pytest.mark.parametrize(
    "leaders",
    [
        pytest.param((), id="no Metadata"),
        pytest.param([(1, 1, 0)], id="its partition stayed"),
        pytest.param([(1, 1, 0), (20, 2, 1)], id="its partition moved after it died"),
    ],
)
def test_a_refusal_is_no_evidence_that_partitions_moved(leaders: list[Leader]) -> None:
    """Other nodes serve its clients, but nothing shows that its partition had a new leader."""
    outage = _outage(BEFORE, REFUSED, ELSEWHERE, leaders=leaders, connections=[*KILLED, OTHER])
    assert outage["severity"] == "bad"
    assert "partitions" not in outage["text"]


def test_the_only_broker_dies() -> None:
    """It said NOT_LEADER_OR_FOLLOWER when a topic was made: clients lost all of it."""
    outage = _outage(BEFORE, REFUSED, leaders=[(1, 1, 0)])
    assert outage["severity"] == "bad"
    assert "shutdown" not in outage["text"]


def test_lost_requests_are_no_information() -> None:
    """The partition had moved and its client went on there; another one's requests were lost."""
    connections = [*KILLED, OTHER]
    outage = _outage(BEFORE, REFUSED, LOST, ELSEWHERE, leaders=MOVED, connections=connections)
    assert outage["severity"] == "bad"


def test_a_node_with_two_listeners_is_one_incident_of_its_clients_listener() -> None:
    """The length is that of the clients' listener; the text has the other's own length."""
    internal = {"broker_port": 9093}
    connections = [
        *KILLED,
        _worked(2, 16, 60),
        *[_attempt(20 + n, 10.1 + n, **internal) for n in range(9)],
        _worked(3, 20, 60, **internal),
    ]
    (outage,) = found(exchanges=_traffic(1, 0, 9), connections=connections)
    expect(outage, "broker_unreachable", subject="10.0.0.9:9092", end=16, time_lost_ms=5990)
    assert "It was back after 5.99 s. 10.0.0.9:9093 of the same machine was" in outage["text"]
    assert "reached after 9.99 s." in outage["text"]


def test_a_node_is_one_incident_if_another_machine_stops_meanwhile() -> None:
    """The other machine stops after the node's first listener and before its second one."""
    connections = [
        *KILLED,
        *[_attempt(20 + n, 10.1 + n, broker_port=9093) for n in range(9)],
        *[_attempt(30 + n, 10.05 + n, broker_ip="10.0.0.8") for n in range(9)],
        _worked(3, 20, 60, broker_port=9093),
        _worked(4, 20, 60, broker_ip="10.0.0.8"),
    ]
    outages = found(exchanges=_traffic(1, 0, 9), connections=connections)
    assert [row["subject"] for row in outages] == ["10.0.0.9:9092", "10.0.0.8:9092"]


def test_a_client_that_starts_before_its_broker() -> None:
    """Refused attempts before the first success are for information."""
    connections = [*[_attempt(10 + n, n) for n in range(5)], _worked(1, 6, 60)]
    (early,) = found(exchanges=_traffic(1, 6, 20), connections=connections)
    assert early["severity"] == "info"
    assert (
        "(no Kafka connection to it was captured before). It was reached after 6" in early["text"]
    )


def test_a_set_of_a_part_of_the_time() -> None:
    """Whether the broker came back after that time is unknown, and the text says so."""
    path = CAPTURES / "incidents" / "broker_killed.pcap.gz"
    incidents = kdissect.read(path, until="2026-11-22T21:11:13Z").incidents().to_pylist()
    assert incidents[0]["text"].endswith(
        "It was not reached again. kdissect saw only these exchanges: "
        "to 2026-11-22T21:11:13.000000000Z."
    )


ATTEMPTS = [_attempt(10 + n, 10.5 + n) for n in range(5)]
IDLE = _worked(3, 12, 13, syn_count=0)  # its only request is sent while the broker is away
OLDER = _worked(1, 0, 10.01, syn_count=0, close_reason="fin", closed_by="broker")


@pytest.mark.parametrize(
    ("connections", "ending"),
    [
        pytest.param([OLDER, *ATTEMPTS, _worked(2, 16, 60)], "back after 6.01 s", id="back"),
        pytest.param([OLDER, *ATTEMPTS], "not reached again", id="away"),
        pytest.param([OLDER, IDLE, *ATTEMPTS], "not reached again", id="another one sends"),
        pytest.param([IDLE, *ATTEMPTS], "not reached again", id="no response"),
    ],
)
def test_connections_that_are_older_than_the_capture(connections: list[Row], ending: str) -> None:
    """They show that the broker was up: clients lost it, whether it came back or not."""
    ignored = exchange(600, connection_id=3, second=12, latency_us=None)
    sent = {1: [*_traffic(1, 0, 9), LOST], 3: [ignored]}
    rows = [row for one in connections for row in sent.get(one["connection_id"], [])]
    outage = found(exchanges=rows, connections=connections, brokers=BROKERS)[0]
    assert (outage["kind"], outage["severity"]) == ("broker_unreachable", "bad")
    assert outage["text"].endswith(f"It was {ending}.")
    assert outage["request_count"] == (OLDER in connections)


@pytest.mark.parametrize("name", ["node_killed", "network_silent"])
def test_a_recording_that_begins_shortly_before_the_outage(name: str, tmp_path: Path) -> None:
    """It is told as in the whole recording."""
    whole = CAPTURES / "incidents" / f"{name}.pcap.gz"
    start = datetime.fromisoformat(truths(whole.parent)[name][0].start_time).timestamp()
    kept = [one for one in read_packets(whole) if one.time_ns / 1e9 >= start - 2]
    part = write_packets(tmp_path / "part.pcap", kept)
    assert findings(part)[0] == findings(whole)[0]
    assert findings(part)[0].severity == "bad"


HELD = LOST | {"api_name": "Fetch", "api_key": 1}


@pytest.mark.parametrize("held", [[], [HELD]])
def test_one_refused_attempt_is_no_outage(held: list[Row]) -> None:
    """A single refusal between working connections is no incident, whatever the broker held."""
    connections = [KILLED[0], _attempt(10, 10.1), _worked(2, 10.4, 60)]
    assert found(exchanges=[*_traffic(1, 0, 9), *held], connections=connections) == []


UNANSWERED = {"refused": False, "unanswered_syn_count": 1}


@pytest.mark.parametrize(
    ("last", "attempts"),
    [
        ({}, "5 refused connection attempts"),
        (UNANSWERED, "4 refused and 1 unanswered connection attempts"),
    ],
)
def test_refused_and_unanswered_attempts(last: Row, attempts: str) -> None:
    """The text counts them apart: silence points to a firewall, RST to the broker's process."""
    (outage,) = found(exchanges=_traffic(1, 0, 9), connections=[*KILLED[:-1], KILLED[-1] | last])
    assert f"had {attempts}. It closed" in outage["text"]


@pytest.mark.parametrize("ip", [None, "10.0.0.9"])
def test_a_listener_of_clients_and_brokers_with_a_host_name(ip: str | None) -> None:
    """The name may be that of the listener: it is no controller's, and clients lost requests."""
    follower = {"client_id": "broker-2-fetcher-0", "connection_id": 2}
    exchanges = [*_traffic(1, 0, 9), LOST, exchange(600, second=5, api_name="Fetch", **follower)]
    brokers = [{"node_id": n, "host": f"kafka{n}", "ip": ip, "port": 9092} for n in (1, 2)]
    connections = [*KILLED, _worked(2, 0, 10.01, client_ids=["broker-2-fetcher-0"])]
    outage, *_ = found(exchanges=exchanges, connections=connections, brokers=brokers)
    expect(outage, "broker_unreachable", "bad", subject="10.0.0.9:9092")


@pytest.mark.parametrize("syn_count", [0, 1])
def test_a_broker_whose_requests_tls_hides(syn_count: int) -> None:
    """It was up, but nothing shows who used it."""
    hidden = {"is_kafka": False, "is_tls": True, "client_ids": [], "response_byte_count": 9000}
    tls = KILLED[0] | hidden | {"syn_count": syn_count}
    outage, *_ = found(connections=[tls, *KILLED[1:]])
    expect(outage, "broker_unreachable", "warn", start=10.01)
    assert outage["text"].endswith("It was not reached again.")


def test_an_advertised_address_that_never_worked() -> None:
    """The incident names the address that Metadata advertises."""
    wrong = {"broker_port": 9999, "refused": False, "unanswered_syn_count": 3, "syn_count": 3}
    connections = [_worked(1, 0, 60), *[_attempt(10 + n, 1 + n, **wrong) for n in range(4)]]
    broker = {"node_id": 1, "host": "10.0.0.9", "port": 9999, "ip": "10.0.0.9"}
    (address,) = found(exchanges=_traffic(1, 0, 2), connections=connections, brokers=[broker])
    expect(address, "advertised_address_unreachable", "bad", subject="10.0.0.9:9999")


def _metadata(rows: list[Row], topics: list[dict[str, str]]) -> list[Row]:
    return [{"exchange_id": row["exchange_id"], "request": {"topics": topics}} for row in rows]


def test_an_advertised_name_that_no_client_can_resolve() -> None:
    """A client that only repeats Metadata of its topic cannot resolve the advertised name, even if
    the bootstrap address has the same port; a client that goes on can."""
    broker = {"node_id": 1, "host": "kafka.internal", "port": 9092, "ip": "10.0.0.9"}
    rows = _traffic(1, 0, 20)
    rest = {"connections": [_worked(1, 0, 60)], "brokers": [broker]}
    asked = _metadata(rows, [{"name": "orders"}])
    (address,) = found(exchanges=rows, apis__Metadata=asked, **rest)
    expect(address, "advertised_address_unreachable", subject="kafka.internal:9092")
    assert found(exchanges=rows, apis__Metadata=_metadata(rows, []), **rest) == []  # a monitor
    rows.append(exchange(900, at_us=21_000_000, api_name="Produce", client_id="shop"))
    for ip in (None, "10.0.0.9"):  # without its address, the name may be where another client is
        rest["brokers"] = [broker | {"ip": ip}]
        assert found(exchanges=rows, apis__Metadata=asked, **rest) == []
