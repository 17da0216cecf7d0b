"""What is no Kafka gives no Kafka row, from its start, from the middle and from one side alone.

Several of these protocols frame their messages as Kafka does, with four bytes of size.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders.captures import Packet
from tests.builders.frames import produce, request, response
from tests.builders.talks import conversation
from tests.kafka.other_protocols import PROTOCOLS, Talk, read_packets

MECHANISMS = b"\0\0\0\0\0\1\0\5PLAIN"
every_protocol = pytest.mark.parametrize("talk", PROTOCOLS, ids=lambda talk: talk.__name__)


def cuts(packets: list[Packet], choose: random.Random) -> Iterator[tuple[str, list[Packet]]]:
    """A connection whole, from several places on, each side alone, with losses."""
    yield "whole", packets
    for part in (0.1, 0.5, 0.8):
        yield f"from {part}", packets[3 + int(part * (len(packets) - 3)) :]
    for is_client in (True, False):
        side = [packet for packet in packets if (packet.source == packets[0].source) == is_client]
        yield "one side", side
        yield "one side from the middle", side[len(side) // 2 :]
    yield "losses", [packet for packet in packets if choose.random() > 0.1]


@every_protocol
def test_no_rows_from_others(talk: Any, tmp_path: Path) -> None:
    """Named when seen from the start; no exchange, no message, no record in any case."""
    packets: list[Packet] = []
    names = {}
    for seed in range(3):
        choose = random.Random(seed)
        said, size = talk(choose), choose.choice((1400, 500, 64))
        for name, connection in cuts(conversation(said, segment_size=size), choose):
            port = 40001 + len(names)
            names[port] = name
            packets += [packet.with_port(50000, port) for packet in connection]
    packets.sort(key=lambda packet: packet.time_ns)
    tables = read_packets(packets, tmp_path)
    false = tables.exchanges.to_pylist()
    assert not false, [(names.get(row["client_port"]), row) for row in false[:3]]
    assert tables.record_batches.num_rows == 0
    (capture,) = tables.captures.to_pylist()
    assert capture["packet_count"] == capture["tcp_packet_count"] == len(packets)
    for row in tables.connections.to_pylist():
        assert not row["is_kafka"], names[max(row["client_port"], row["broker_port"])]
        if names.get(row["client_port"]) == "whole":
            assert row["protocol"] == PROTOCOLS[talk], row


@pytest.mark.parametrize("client_id", ["orders\n", "\x1b[1m", "orders\0"])
def test_a_client_id_with_control_characters(client_id: str, tmp_path: Path) -> None:
    """One that comes from a file may end with a line end. Its requests are no SASL tokens."""
    said: Talk = []
    for number in range(1, 6):
        said += [(0, request(number, client_id=client_id)), (1, response(number))]
    said[:2] = [(0, request(1, 17, 1, client_id, b"\0\5PLAIN")), (1, response(1, MECHANISMS))]
    rows = read_packets(conversation(said), tmp_path).exchanges.to_pylist()
    assert [row["api_name"] for row in rows] == ["SaslHandshake", *["Metadata"] * 4]
    assert {row["client_id"] for row in rows} == {client_id}


def test_a_client_id_of_negative_length(tmp_path: Path) -> None:
    """Only -1 stands for none. A longer text that follows -32768 is no client id of that size."""
    said = [(0, request(1, body=b"x" * 0x8000).replace(b"\0\6orders", b"\x80\0orders"))]
    (row,) = read_packets(conversation(said), tmp_path).connections.to_pylist()
    assert row["protocol"] == "other"


def kafka(choose: random.Random) -> Talk:
    talk: Talk = []
    for number in range(100, 130):
        talk += [(0, produce(number, 1)), (1, response(number, bytes(30)))]
        talk += [(0, request(number + 100)), (1, response(number + 100, bytes(50)))]
    return talk


@pytest.mark.parametrize("ports", [(9092, 443), (50000, 80), (1025, 64000), (2181, 5432)])
def test_kafka_on_any_port(ports: tuple[int, int], tmp_path: Path) -> None:
    """Detection finds the client's side on any port, from the start or the middle."""
    packets = conversation(kafka(random.Random(0)), ports)
    for start in (0, 3, 20, 61):
        tables = read_packets(packets[start:], tmp_path)
        (row,) = tables.connections.to_pylist()
        assert (row["protocol"], row["client_port"]) == ("kafka", ports[0]), (start, row)
        assert tables.exchanges.num_rows >= (len(packets) - 5 - start) // 2
