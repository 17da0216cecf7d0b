"""The synthesised capture has whole conversations, with the records that were written."""

from __future__ import annotations

import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import IP, TCP
from scapy.utils import rdpcap

from bench.synthesise import PARTITIONS, Recipe, synthesise
from kdissect.codec.compression import CODEC_NAMES
from kdissect.codec.message import decode_message
from kdissect.codec.record_codec import decode_record_set


def _frames(data: bytes) -> list[bytes]:
    frames, pos = [], 0
    while pos < len(data):
        size = struct.unpack_from(">i", data, pos)[0]
        frames.append(data[pos + 4 : pos + 4 + size])
        pos += 4 + size
    return frames


@pytest.mark.parametrize("magic", [0, 1, 2])
def test_the_synthetic_capture_holds_every_codec(tmp_path: Path, magic: int) -> None:
    """Segments follow each other, checksums are right, each codec's records come back twice."""
    path = tmp_path / "codecs.pcap"
    names = CODEC_NAMES if magic == 2 else CODEC_NAMES[:4]
    synthesise(path, [Recipe(codec, magic, 50 * PARTITIONS, 50) for codec in names])
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
    asked: dict[tuple[int, int], tuple[int, int]] = {}  # per client's port and correlation id
    for (source, target), data in sorted(streams.items(), key=lambda item: item[0][0] == 9092):
        frames = _frames(bytes(data))
        assert len(frames) == 2
        for frame in frames:
            if source != 9092:
                message = decode_message(frame, side="request")
                asked[source, message.header["correlation_id"]] = (
                    message.api_key,
                    message.api_version,
                )
            else:
                (number,) = struct.unpack_from(">i", frame)
                key, version = asked[target, number]
                message = decode_message(frame, side="response", api_key=key, api_version=version)
            assert not message.surplus
            for data in _record_sets(message.body):
                result = decode_record_set(data)
                assert not result.faults
                assert len(result.records) == 50
                assert all(200 <= len(record["value"]) <= 600 for record in result.records)
                assert {batch["magic"] for batch in result.batches} == {magic}
                codecs.add((source == 9092, result.batches[0]["codec"]))
    assert len(codecs) == 2 * len(names)


def _record_sets(value: Any) -> list[bytes]:
    if isinstance(value, dict):
        return [
            found
            for name, item in value.items()
            for found in ([item] if name == "records" else _record_sets(item))
        ]
    return (
        [found for item in value for found in _record_sets(item)] if isinstance(value, list) else []
    )
