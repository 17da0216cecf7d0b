"""Connections with responses only: their APIs come from the bytes, without guesses."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kdissect
from kdissect.codec.message import Message, encode_message
from kdissect.codec.response_detection import every_response, weight
from kdissect.kafka import response_bodies
from tests.builders.captures import Packet, pcap_bytes
from tests.builders.frames import framed, response
from tests.builders.talks import conversation
from tests.kafka.other_protocols import PROTOCOLS, sized

BROKER = {"node_id": 1, "host": "broker-1", "port": 9092}
ANSWERS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "produce v0": (0, 0, {"responses": [{"name": "orders.by-region", "partition_responses": [
        {"index": 3, "error_code": 0, "base_offset": 81}]}]}),
    "metadata v0": (3, 0, {"brokers": [BROKER], "topics": []}),
    "metadata v1, no topics": (3, 1, {"brokers": [BROKER], "controller_id": 1, "topics": []}),
    "metadata v13": (3, 13, {"brokers": [BROKER], "cluster_id": "4L6g3nShT-eMCtK--X86sw",
                             "controller_id": 1, "topics": []}),
    "offset commit v2": (8, 2, {"topics": [{"name": "orders", "partitions": [
        {"partition_index": 0, "error_code": 0}, {"partition_index": 1, "error_code": 0}]}]}),
}  # fmt: skip


def answer(name: str, correlation_id: int) -> bytes:
    key, version, body = ANSWERS[name]
    header = {"correlation_id": correlation_id}
    return framed(encode_message(Message(key, version, "response", header, body)))


def read(packets: list[Packet], folder: Path) -> Any:
    path = folder / "made.pcap"
    path.write_bytes(pcap_bytes(packets))
    return kdissect.read(path)


def of_broker(packets: list[Packet], port: int = 9092) -> list[Packet]:
    return [packet for packet in packets if packet.source[1] == port]


WAYS = [(True, 1400), (False, 11), (True, 11), (False, 1400)]  # with a SYN, bytes of a segment


@pytest.mark.parametrize(
    ("name", "begins", "segment_size"),
    [
        # each response in one way by default: SYN and segments do not depend on the API
        pytest.param(name, *way, marks=[] if way == WAYS[number] else pytest.mark.heavy)
        for number, name in enumerate(name for name in ANSWERS if name != "metadata v0")
        for way in WAYS
    ],
)
def test_an_answer_alone(name: str, begins: bool, segment_size: int, tmp_path: Path) -> None:
    """With its SYN or without, whatever its place; client and broker are the right ones."""
    data = answer(name, 7)
    packets = of_broker(conversation([(1, data)], (50000, 9092), segment_size=segment_size))
    tables = read(packets if begins else packets[1:], tmp_path)
    (row,) = tables.exchanges.to_arrow().to_pylist()
    assert (row["correlation_id"], row["response_size"]) == (7, len(data) - 4)
    assert (row["client_port"], row["broker_port"], row["request_size"]) == (50000, 9092, None)
    (connection,) = tables.connections.to_arrow().to_pylist()
    assert connection["response_unframed_byte_count"] == 0


def test_a_tiny_response_beside_a_certain_one_is_found(tmp_path: Path) -> None:
    """A tiny response is found beside one that is certain."""
    tiny = response(8, bytes(6))
    told = answer("metadata v1, no topics", 9)
    talk = [(1, tiny), (1, told), (1, response(10, bytes(2)))]
    tables = read(of_broker(conversation(talk))[1:], tmp_path)
    ids = [row["correlation_id"] for row in tables.exchanges.to_arrow().to_pylist()]
    assert ids == [8, 9, 10]
    assert not read(of_broker(conversation([(1, tiny)]))[1:], tmp_path).exchanges.num_rows


def test_the_request_lost(tmp_path: Path) -> None:
    """Of a request nothing is there, or only its end; but not if something else was said first."""
    data = answer("produce v0", 7)
    for ask, lost, count in ((bytes(300), 3, 1), (b"\1" * 300, 1, 1), (b"\1" * 300, 0, 0)):
        packets = conversation([(0, ask), (1, data)], (50000, 9092), segment_size=100)
        asked = [packet for packet in packets if packet.source[1] == 50000 and packet.payload]
        tables = read([one for one in packets if one not in asked[:lost]], tmp_path)
        assert tables.exchanges.num_rows == count, lost


def test_a_wrong_length_id_name_or_port_is_no_response(tmp_path: Path) -> None:
    """A wrong length, ID, name or port makes a response unrecognised."""
    good = answer("metadata v1, no topics", 7)
    port = struct.pack(">i", 9092)
    bad = {
        "longer": framed(good[4:] + b"\0"),
        "shorter": framed(good[4:-1]),
        "cut": good[:-1],
        "not at its start": b"\0" + good,
        "text": framed(b"user" + good[8:]),
        "name": good.replace(b"broker-1", b"broker\x011"),
        "port": good.replace(port, struct.pack(">i", 1 << 20)),
    }
    assert port in good
    for what, data in bad.items():
        packets = of_broker(conversation([(1, data)], (50000, 9092)))
        assert not read(packets, tmp_path).exchanges.num_rows, what


def _zookeeper_answers(choose: random.Random) -> list[bytes]:
    """Every kind of reply, alone: small and large zxids, with children, data, lists, errors."""
    found = []
    for xid in (-2, -1, 0, 1, 2, 7, 300):
        for epoch, counter in ((0, 1), (0, 2), (0, 77), (1, 1), (5, 40000)):
            head = struct.pack(">iii", xid, epoch, counter)
            stat = struct.pack(">8q", 1, 2, 3, 4, 0, 0, 5, 6)[:68]
            names = [f"node{n}".encode() for n in range(choose.randint(0, 4))]
            children = struct.pack(">i", len(names)) + b"".join(map(sized, names))
            acl = struct.pack(">ii", 1, 31) + sized(b"world") + sized(b"anyone")
            event = struct.pack(">ii", 3, 3) + sized(b"/brokers/topics")
            for error in (0, -101):
                code = struct.pack(">i", error)
                for body in (
                    b"", stat, children, children + stat, sized(b"/a/b"), sized(b'{"v":1}') + stat,
                    sized(b"") + stat, acl + stat, event,
                ):  # fmt: skip
                    found.append(sized(head + code + body))
    return found


@pytest.mark.parametrize("talk", PROTOCOLS, ids=lambda talk: talk.__name__)
def test_no_answers_of_others(talk: Callable[..., Any], tmp_path: Path) -> None:
    """Whatever any side of another protocol says, alone in a connection, is no answer of Kafka."""
    choose = random.Random(1)
    said = {data for seed in range(3) for _, data in talk(random.Random(seed))}
    if talk.__name__ == "zookeeper":
        said |= set(_zookeeper_answers(choose))
    packets: list[Packet] = []
    for number, data in enumerate(sorted(said)):
        # As it is; with a size, a small number or both before it, as others would frame it.
        kinds = [data, sized(data), sized(struct.pack(">i", number % 9) + data)]
        for way, one in enumerate(kinds):
            made = conversation([(1, one)], (50000, 9092))
            made = of_broker(made)[choose.randint(0, 1) :]
            packets += on_ports_of(made, (20000 + 3 * number + way, 9092))
    assert not read(packets, tmp_path).exchanges.num_rows


def on_ports_of(packets: list[Packet], ports: tuple[int, int]) -> list[Packet]:
    """Packets of the broker with another client's port."""
    moved = []
    for packet in packets:
        moved.append(packet.put(packet.tcp_pos, struct.pack(">HH", ports[1], ports[0])))
    return moved


@given(st.binary(max_size=80), st.integers(0, 1 << 24))
def test_random_bytes_are_no_response(body: bytes, correlation_id: int) -> None:
    """Random bytes after a correlation ID never reach the weight of a response."""
    frame = struct.pack(">i", correlation_id) + body
    assert max(weight(key, version, frame) for key, version in SOME) < response_bodies.WEIGHT_MIN


SOME = random.Random(0).sample(sorted(every_response()), 40)


def test_equal_answers_are_weighed_once() -> None:
    """Responses equal but for their IDs are weighed once; others try the known API first."""
    tried = response_bodies._Tried()
    first = answer("metadata v1, no topics", 1)[4:]
    assert tried.try_out([first, answer("metadata v1, no topics", 2)[4:], bytes(30)]) == [
        True, True, False,
    ]  # fmt: skip
    assert (tried.count, len(tried.results)) == (2, 2)
    tried.count = response_bodies.TRIED_MAX
    other = first.replace(b"broker-1", b"broker-2")
    assert tried.try_out([other, answer("produce v0", 3)[4:]]) == [True, False]
    assert (3, 1) in tried.successful
