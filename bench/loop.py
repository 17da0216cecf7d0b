"""The obvious program: a loop over packets with dpkt, messages with kafka-python's classes.

Streams are put together by sequence number, cut at the size prefixes, and each message of an API
and version that kafka-python knows becomes an object. Nothing is written, and record batches stay
the bytes that they are: the least that such a loop can do. It gives up a stream at a gap.
"""

from __future__ import annotations

import argparse
import importlib
import json
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

import dpkt
import kafka.protocol
from kafka.protocol.api_message import ApiMessage

LINKS = {1: dpkt.ethernet.Ethernet, 113: dpkt.sll.SLL, 276: dpkt.sll2.SLL2, 101: None}
WAITING_MAX = 1024  # segments ahead of a hole, before a stream is given up
FRAME_MAX = 100 << 20
Key = tuple[bytes, int, bytes, int]  # source, its port, target, its port


def classes() -> dict[tuple[int, str], type[ApiMessage]]:
    """kafka-python's classes by API key and side."""
    found: dict[tuple[int, str], type[ApiMessage]] = {}
    for package in ("admin", "consumer", "metadata", "producer", "sasl"):
        module = importlib.import_module(f"{kafka.protocol.__name__}.{package}")
        for name in dir(module):
            item: Any = getattr(module, name)
            if isinstance(item, type) and issubclass(item, ApiMessage) and item is not ApiMessage:
                message: Any = item
                found[message.API_KEY, message.type] = message
    return found


class Stream:
    """One direction of a connection: bytes in order, and whole frames of them."""

    def __init__(self, next_seq: int) -> None:
        self.next_seq = next_seq
        self.data = bytearray()
        self.waiting: dict[int, bytes] = {}
        self.is_lost = False

    def add(self, seq: int, payload: bytes) -> None:
        self.waiting[seq] = payload
        while self.waiting:
            payload = self.waiting.pop(self.next_seq, b"")
            if not payload:
                break
            self.data += payload
            self.next_seq = (self.next_seq + len(payload)) % 2**32
        if self.waiting:
            self._drop_old()

    def _drop_old(self) -> None:
        """Retransmissions lie behind; one that reaches further has a new part."""
        for seq, payload in list(self.waiting.items()):
            behind = (self.next_seq - seq) % 2**32
            if 0 < behind < 2**31:
                del self.waiting[seq]
                if behind < len(payload):
                    self.add(self.next_seq, payload[behind:])
        self.is_lost = self.is_lost or len(self.waiting) > WAITING_MAX

    def frames(self) -> Iterator[bytes]:
        pos = 0
        while len(self.data) - pos >= 4:
            (size,) = struct.unpack_from(">i", self.data, pos)
            if not 0 < size <= FRAME_MAX:
                self.is_lost = True
                break
            if len(self.data) - pos - 4 < size:
                break
            yield bytes(self.data[pos + 4 : pos + 4 + size])
            pos += 4 + size
        del self.data[:pos]


def read(file: BinaryIO, ports: frozenset[int]) -> Counter[str]:
    """Decode a capture; counts of packets, messages, and of messages that it does not know."""
    known = classes()
    streams: dict[Key, Stream] = {}
    asked: dict[tuple[Key, int], tuple[int, int]] = {}
    counts: Counter[str] = Counter()
    reader = dpkt.pcap.Reader(file)
    link = LINKS[reader.datalink()]
    for _, packet in reader:
        counts["packets"] += 1
        ip: Any = dpkt.ip.IP(packet) if link is None else link(packet).data
        if not isinstance(ip, dpkt.ip.IP | dpkt.ip6.IP6) or not isinstance(ip.data, dpkt.tcp.TCP):
            continue
        tcp = ip.data
        key = (ip.src, tcp.sport, ip.dst, tcp.dport)
        if tcp.flags & dpkt.tcp.TH_SYN:
            streams[key] = Stream((tcp.seq + 1) % 2**32)
        elif tcp.data:
            stream = streams.get(key)
            if stream is None:
                stream = streams[key] = Stream(tcp.seq)
            if stream.is_lost:
                continue
            stream.add(tcp.seq, bytes(tcp.data))
            for frame in stream.frames():
                _message(frame, key, tcp.dport in ports, asked, known, counts)
    return counts


def _message(
    frame: bytes,
    key: Key,
    is_request: bool,
    asked: dict[tuple[Key, int], tuple[int, int]],
    known: dict[tuple[int, str], type[ApiMessage]],
    counts: Counter[str],
) -> None:
    if is_request:
        if len(frame) < 8:
            counts["unknown"] += 1
            return
        api_key, version, correlation_id = struct.unpack_from(">hhi", frame)
        asked[key, correlation_id] = api_key, version
        message = known.get((api_key, "request"))
    else:
        (correlation_id,) = struct.unpack_from(">i", frame.ljust(4, b"\0"))
        back = (key[2], key[3], key[0], key[1])
        api_key, version = asked.pop((back, correlation_id), (-1, -1))
        message = known.get((api_key, "response"))
    if message is None or not 0 <= version <= message.max_version:
        counts["unknown"] += 1
        return
    try:
        message.decode(frame, version=version, header=True)
        counts["messages"] += 1
    except Exception:  # whatever a library raises at bytes that it cannot read
        counts["failed"] += 1


def main() -> None:
    """Command: loop.py CAPTURE [--ports 9092,9093]; prints the counts as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--ports", default="9092,9093")
    given = parser.parse_args()
    ports = frozenset(int(port) for port in given.ports.split(","))
    with open(given.path, "rb") as file:
        print(json.dumps(read(file, ports)))


if __name__ == "__main__":
    main()
