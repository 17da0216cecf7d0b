"""Connections with one response only, of Kafka or of another protocol, are `other`."""

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders.captures import Packet
from tests.builders.frames import framed, request, response
from tests.builders.messages import response_frame
from tests.builders.talks import Gap, Playbook, conversation
from tests.kafka.other_protocols import PROTOCOLS, read_packets, sized

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
    return framed(response_frame(key, version, correlation_id, **body))


def of_broker(packets: list[Packet]) -> list[Packet]:
    return [packet for packet in packets if packet.source[1] == 9092]


def test_an_answer_alone_is_no_proof(tmp_path: Path) -> None:
    """One response without its request proves no Kafka, however well it decodes."""
    for name in ANSWERS:
        packets = of_broker(conversation([(1, answer(name, 7))], (50000, 9092)))
        tables = read_packets(packets, tmp_path)
        assert not tables.exchanges.num_rows, name
        assert tables.connections.to_arrow()["protocol"].to_pylist() == ["other"], name


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
            packets += [packet.with_port(50000, 20000 + 3 * number + way) for packet in made]
    assert not read_packets(packets, tmp_path).exchanges.num_rows


def test_bytes_that_resemble_a_response_again_and_again() -> None:
    """Each place behind a gap claims to be the response, up to the end: few are decoded, and then
    one is kept."""
    count = 300
    claims = [struct.pack(">iiB", 9 * (count - at) - 4, 2001, 0) for at in range(count)]
    data = b"".join(claims)
    book = Playbook().syn() >> request(1000) << response(1000) >> request(2001) << Gap(50)
    for at in range(0, len(data), 1400):
        book = book << data[at : at + 1400]
    assert book.exchanges() == [(1000, "paired"), (2001, "paired")]
