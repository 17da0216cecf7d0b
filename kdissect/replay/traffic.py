"""The run's own traffic as a capture: raw IP packets with what was sent and what came back.

Written from outcomes after the run, so the hot loop pays nothing for it. Payload is what Kafka's
side of TLS saw; logins are not in it. Checksums are 0, as with offloading network cards. Dissected
by the same pipeline as any capture, it is the table set of the replay.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import BinaryIO

from kdissect.replay.run import LinkRecord, RunResult

SEGMENT_MAX = 60_000  # of payload; a packet's length has 16 bits
_MAGIC_NS, _LINKTYPE_RAW, _TCP = 0xA1B23C4D, 101, 6
_SYN, _FIN, _ACK, _PUSH = 2, 1, 16, 8
_WINDOW = 0xFFFF


class _Flow:
    """One connection: addresses packed, the next sequence number of each side."""

    def __init__(self, record: LinkRecord) -> None:
        ours, theirs = (
            ip_address(host.partition("%")[0]) for host, _ in (record.ours, record.theirs)
        )
        self.is_ipv4 = ours.version == 4
        self.ends = (ours.packed, record.ours[1]), (theirs.packed, record.theirs[1])
        self.next_seq = [1000, 5000]

    def packet(self, side: int, flags: int, payload: bytes = b"") -> bytes:
        """An IP packet from side 0 (ours) or 1; sequence numbers move on."""
        (source, source_port), (to, to_port) = self.ends[side], self.ends[1 - side]
        acknowledged = 0 if flags == _SYN else self.next_seq[1 - side]
        tcp = struct.pack(
            ">HHIIBBHHH", source_port, to_port, self.next_seq[side], acknowledged, 0x50, flags,
            _WINDOW, 0, 0,
        )  # fmt: skip
        consumed = len(payload) + bool(flags & (_SYN | _FIN))
        self.next_seq[side] = (self.next_seq[side] + consumed) & 0xFFFFFFFF
        size = len(tcp) + len(payload)
        if self.is_ipv4:
            head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + size, 0, 0x4000, 64, _TCP, 0)
        else:
            head = struct.pack(">IHBB", 0x60000000, size, _TCP, 64)
        return head + source + to + tcp + payload


def write_capture(result: RunResult, path: Path) -> int:
    """Write a pcap file (nanoseconds); the number of packets."""
    flows = [_Flow(record) for record in result.links]
    count = 0
    with open(path, "wb") as file:
        file.write(struct.pack("<IHHiIII", _MAGIC_NS, 2, 4, 0, 0, 1 << 18, _LINKTYPE_RAW))
        for at_ns, link, kind, payload in sorted(_events(result), key=lambda each: each[0]):
            flow, time_ns = flows[link], result.start_time_ns + at_ns
            if kind == "open":
                packets = [
                    flow.packet(0, _SYN),
                    flow.packet(1, _SYN | _ACK),
                    flow.packet(0, _ACK),
                ]
            elif kind == "close":
                packets = [
                    flow.packet(0, _FIN | _ACK),
                    flow.packet(1, _FIN | _ACK),
                    flow.packet(0, _ACK),
                ]
            else:
                side = 0 if kind == "sent" else 1
                data = len(payload).to_bytes(4, "big") + payload
                packets = [
                    flow.packet(side, _ACK | _PUSH, data[pos : pos + SEGMENT_MAX])
                    for pos in range(0, len(data), SEGMENT_MAX)
                ]
            for packet in packets:
                _write(file, time_ns, packet)
            count += len(packets)
    return count


def _events(result: RunResult) -> Iterator[tuple[int, int, str, bytes]]:
    """What happened on links: (ns since start, link, kind, frame), each link's in order."""
    for number, record in enumerate(result.links):
        yield record.opened_ns, number, "open", b""
    for outcome in result.outcomes:
        link = result.link_of[outcome.step.number]
        if outcome.sent is not None and link >= 0:
            yield outcome.sent_ns, link, "sent", outcome.sent
            if outcome.answer is not None:
                yield outcome.answered_ns, link, "answer", outcome.answer
    for attempt in result.retried:
        yield attempt.sent_ns, attempt.link, "sent", attempt.sent
        yield attempt.answered_ns, attempt.link, "answer", attempt.answer
    for number, record in enumerate(result.links):
        if record.closed_ns >= 0:
            yield record.closed_ns, number, "close", b""


def _write(file: BinaryIO, time_ns: int, packet: bytes) -> None:
    seconds, rest = divmod(time_ns, 10**9)
    file.write(struct.pack("<IIII", seconds, rest, len(packet), len(packet)) + packet)
