"""What is no Kafka gives no Kafka row, from its start, from the middle and from one side alone.

Several of these protocols frame their messages as Kafka does, with four bytes of size.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kdissect
from tests.builders.captures import Packet, pcap_bytes
from tests.builders.frames import produce, request, response
from tests.builders.talks import conversation
from tests.kafka.other_protocols import PROTOCOLS, Talk

every_protocol = pytest.mark.parametrize("talk", PROTOCOLS, ids=lambda talk: talk.__name__)


def read(packets: list[Packet], folder: Path) -> Any:
    path = folder / "made.pcap"
    path.write_bytes(pcap_bytes(packets))
    return kdissect.read(path)


def connections_of(talk: Any, seed: int) -> Iterator[tuple[str, list[Packet]]]:
    """Connections of one protocol: whole, from several places on, each side alone, cut up."""
    choose = random.Random(seed)
    packets = conversation(talk(choose), segment_size=choose.choice((1400, 500, 64)))
    yield "whole", packets
    for part in (0.1, 0.5, 0.8):
        yield f"from {part}", packets[3 + int(part * (len(packets) - 3)) :]
    port = packets[0].source[1]
    for is_client in (True, False):
        side = [packet for packet in packets if (packet.source[1] == port) == is_client]
        yield "one side", side
        yield "one side from the middle", side[len(side) // 2 :]
    yield "losses", [packet for packet in packets if choose.random() > 0.1]


def on_ports(packets: list[Packet], ports: tuple[int, int]) -> list[Packet]:
    first = conversation([])[0].source[1]
    told = {first: ports[0]}
    moved = []
    for packet in packets:
        at = packet.tcp_pos
        source, target = packet.source[1], packet.target[1]
        new = struct.pack(">HH", told.get(source, ports[1]), told.get(target, ports[1]))
        moved.append(packet.put(at, new))
    return moved


@every_protocol
def test_no_rows_from_others(talk: Any, tmp_path: Path) -> None:
    """Named when seen from the start; no exchange, no message, no record in any case."""
    packets: list[Packet] = []
    names = {}
    port = 40000
    for seed in range(3):
        for name, connection in connections_of(talk, seed):
            if connection:
                port += 1
                names[port] = name
                packets += on_ports(connection, (port, 9092))
    packets.sort(key=lambda packet: packet.time_ns)
    tables = read(packets, tmp_path)
    false = tables.exchanges.to_arrow().to_pylist()
    assert not false, [(names.get(row["client_port"]), row) for row in false[:3]]
    assert tables.record_batches.num_rows == 0
    (capture,) = tables.captures.to_arrow().to_pylist()
    assert capture["packet_count"] == capture["tcp_packet_count"] == len(packets)
    for row in tables.connections.to_arrow().to_pylist():
        assert not row["is_kafka"], names[max(row["client_port"], row["broker_port"])]
        if names.get(row["client_port"]) == "whole":
            assert row["protocol"] == PROTOCOLS[talk], row


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
        tables = read(packets[start:], tmp_path)
        (row,) = tables.connections.to_arrow().to_pylist()
        assert (row["protocol"], row["client_port"]) == ("kafka", ports[0]), (start, row)
        assert tables.exchanges.num_rows >= (len(packets) - 5 - start) // 2
