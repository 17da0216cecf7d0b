"""Captures with packets taken out, as where a busy machine did not write them all, or cut."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

_FILE_HEADER, _PACKET_HEADER = 24, 16


def lose_packets(capture: bytes, path: Path, share: float, seed: int = 1) -> None:
    """Write a little-endian pcap without a random share of its packets."""
    dice = random.Random(seed)
    kept = [packet for packet in _packets(capture) if dice.random() >= share]
    path.write_bytes(capture[:_FILE_HEADER] + b"".join(kept))


def cut_capture(capture: bytes, path: Path, share: float) -> None:
    """Write the first packets of a little-endian pcap, a share of all."""
    packets = list(_packets(capture))
    kept = packets[: int(len(packets) * share)]
    path.write_bytes(capture[:_FILE_HEADER] + b"".join(kept))


def _packets(capture: bytes) -> Iterator[bytes]:
    pos = _FILE_HEADER
    while pos + _PACKET_HEADER <= len(capture):
        (size,) = struct.unpack_from("<I", capture, pos + 8)
        end = pos + _PACKET_HEADER + size
        yield capture[pos:end]
        pos = end
