"""The hand-made capture: whole conversations whose record sets hold what was put in."""

from __future__ import annotations

import struct
from collections import defaultdict
from pathlib import Path

from scapy.all import IP, TCP, rdpcap

from bench.synthesise import BATCH_RECORDS, PARTITIONS, synthesise
from kdissect.wire.records_reference import decode_record_set


def _frames(data: bytes) -> list[bytes]:
    frames, pos = [], 0
    while pos < len(data):
        size = struct.unpack_from(">i", data, pos)[0]
        frames.append(data[pos + 4 : pos + 4 + size])
        pos += 4 + size
    return frames


def test_the_synthetic_capture_holds_every_codec(tmp_path: Path) -> None:
    """Segments follow each other, checksums are right, each codec's records come back twice."""
    path = tmp_path / "codecs.pcap"
    synthesise(path, record_count=BATCH_RECORDS * PARTITIONS)
    streams: dict[tuple[int, int], bytearray] = defaultdict(bytearray)
    start: dict[tuple[int, int], int] = {}
    for number, packet in enumerate(rdpcap(str(path))):
        tcp = packet[TCP]
        direction = tcp.sport, tcp.dport
        if "S" in tcp.flags:
            start[direction] = tcp.seq + 1
        elif len(tcp.payload):
            assert tcp.seq == start[direction] + len(streams[direction])
        streams[direction] += bytes(tcp.payload)
        if number % 50 == 0:
            again = packet.copy()
            del again[TCP].chksum, again[IP].chksum
            assert bytes(again) == bytes(packet)
    codecs = set()
    for (source, _), data in streams.items():
        frames = _frames(bytes(data))
        assert len(frames) == 2
        # the record sets are what starts with a batch: its magic lies 16 bytes on
        sets = [frame for frame in frames if len(frame) > 1000]
        assert len(sets) == 1
        frame, pos, found = sets[0], 0, 0
        while (pos := frame.find(b"bench-", pos + 1)) >= 0 and found < PARTITIONS:
            topic_end = frame.index(b"\0", pos)
            at = topic_end + 4
            for _ in range(PARTITIONS):
                at += 4 if source != 9092 else 34
                size = struct.unpack_from(">i", frame, at)[0]
                result = decode_record_set(frame[at + 4 : at + 4 + size])
                assert not result.faults
                assert len(result.records) == BATCH_RECORDS
                assert all(200 <= len(record["value"]) <= 600 for record in result.records)
                codecs.add((source == 9092, result.batches[0]["codec"]))
                at += 4 + size
                found += 1
        assert found == PARTITIONS
    assert len(codecs) == 10
