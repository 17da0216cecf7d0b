"""What is mutated: some whole connections of a real capture, or a conversation of vectors."""

import atexit
import os
import random
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import kdissect
from kdissect.accounts import check
from tests.builders.captures import Key, Packet, pcap_bytes, read_packets
from tests.builders.frames import framed
from tests.builders.talks import conversation
from tests.codec.vectors import message_vectors

ROOT = Path(__file__).resolve().parents[2]
MORE = os.environ.get("KDISSECT_FUZZ_CAPTURES")  # a folder with those of OTHERS
PACKETS_MAX = 250  # of a base, so that a case takes a fraction of a second
BYTES_MAX = 200_000

OWN = (
    "java_0_10_2_2.pcap", "java_2_0_1.pcap", "kafkajs.pcap.gz", "librdkafka.pcap", "sarama.pcap.gz",
    "tls13.pcap.gz",
)  # fmt: skip
OTHERS = (
    "admin/admin.pcap", "java_latest/java_latest.pcap", "odd/odd_conversations.pcap",
    "old_clients/java_0_10_2_2.pcap", "old_clients/java_0_8_2_2.pcap",
    "other_clients/kafka_python.pcap", "sasl/sasl.pcap", "sasl/sasl_handshake_v0.pcap",
    "share_streams/share.pcap", "share_streams/streams.pcap", "tls/tls13.pcap",
    "transactions/transactions.pcap", "zookeeper/zk_1_1_1.pcap", "zookeeper/zk_3_9_1_ibp_2_4.pcap",
)  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """A frame of the unchanged capture: where its size prefix stands in its direction."""

    exchange_id: int
    side: int
    pos: int
    size: int
    body: int  # bytes of header in front of the body, without the size prefix


@dataclass(frozen=True)
class Base:
    name: str
    packets: list[Packet]
    positions: list[int]  # of each packet's first payload byte in its direction
    tables: Any
    frames: dict[tuple[tuple[bytes, int], Key], list[Frame]]  # by who sent them and connection
    faults: frozenset[str]  # accounts that the made-up values of vectors break


def sources() -> list[Path]:
    """The captures of the project, and those of a named folder: all of them, or reading fails."""
    own = [ROOT / "captures" / name for name in OWN]
    return own + ([Path(MORE, name) for name in OTHERS] if MORE else [])


@cache
def _connections(path: Path) -> list[list[Packet]]:
    by_key: dict[Key, list[Packet]] = defaultdict(list)
    for packet in read_packets(path):
        if packet.is_tcp:
            by_key[packet.key].append(packet)
    return list(by_key.values())


def captured(path: Path, choose: random.Random) -> list[Packet]:
    """Some whole connections; of a long one the first packets."""
    connections = _connections(path)
    packets: list[Packet] = []
    for number in choose.sample(range(len(connections)), len(connections)):
        room = min(PACKETS_MAX - len(packets), 150)
        room_bytes = BYTES_MAX - sum(len(packet.data) for packet in packets)
        if room < 10 or room_bytes <= 0:
            break
        for packet in connections[number][:room]:
            room_bytes -= len(packet.data)
            if room_bytes < 0:
                break
            packets.append(packet)
    return sorted(packets, key=lambda packet: packet.time_ns)


def composed(choose: random.Random) -> list[Packet]:
    """Connections of Kafka's vectors: requests, each with its response."""
    pairs: dict[tuple[int, int], dict[str, bytes]] = defaultdict(dict)
    for (api_key, side), vectors in message_vectors().items():
        for vector in vectors:
            pairs[api_key, vector["api_version"]][side] = framed(vector["frame"])
    packets: list[Packet] = []
    for connection in range(4):
        sent: list[tuple[int, bytes]] = []
        for key in choose.sample(sorted(pairs), 12):
            if key != (17, 0):  # bare tokens would follow
                sent += [(0, pairs[key]["request"]), (1, pairs[key]["response"])]
        ports = (50000 + connection, choose.choice((9092, 9094, 1234)))
        packets += conversation(sent, ports, segment_size=choose.choice((100, 1400, 9000)))
    return sorted(packets, key=lambda packet: packet.time_ns)


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="kdissect-fuzz-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def read_bytes(data: bytes, **options: Any) -> Any:
    """kdissect.read of a capture in memory."""
    path = _folder() / "case.pcap"  # one name: the capture's id comes from it
    path.write_bytes(data)
    return kdissect.read(path, **options)


def _positions(packets: list[Packet]) -> list[int]:
    first: dict[Any, int] = {}
    for packet in packets:
        at = (packet.source, packet.key)
        if packet.flags & 2:
            first[at] = packet.seq + 1
        elif at not in first:
            first[at] = packet.seq
    return [
        (packet.seq + (packet.flags >> 1 & 1) - first[packet.source, packet.key]) % 2**32
        for packet in packets
    ]


def _frames(tables: Any) -> dict[Any, list[Frame]]:
    found: dict[Any, list[Frame]] = defaultdict(list)
    for row in tables.exchanges.to_pylist():
        ends = [
            (bytes(int(part) for part in row[f"{end}_ip"].split(".")), row[f"{end}_port"])
            for end in ("client", "broker")
        ]
        for side, name in enumerate(("request", "response")):
            if row[f"{name}_size"] is not None:
                client = row["client_id"] or ""
                body = 10 + len(client.encode()) if side == 0 else 4
                frame = Frame(
                    row["exchange_id"], side, row[f"{name}_pos"], row[f"{name}_size"], body
                )
                found[ends[side], frozenset(ends)].append(frame)
    return found


@cache
def base(number: int, source: int) -> Base:
    """The base of that number from a source; the last source is the vectors."""
    choose = random.Random(f"base {number} {source}")
    paths = sources()
    if source < len(paths):
        name, packets = paths[source].stem, captured(paths[source], choose)
    else:
        name, packets = "vectors", composed(choose)
    tables = read_bytes(pcap_bytes(packets))
    faults = frozenset(fault["account"] for fault in check(tables)["faults"])
    return Base(f"{name} {number}", packets, _positions(packets), tables, _frames(tables), faults)
