"""Captures with packets taken out, as where a busy machine did not write them all."""

from __future__ import annotations

import random
import struct
from pathlib import Path

_FILE_HEADER, _PACKET_HEADER = 24, 16


def lose_packets(capture: bytes, path: Path, share: float, seed: int = 1) -> None:
    """Write a little-endian pcap without a random share of its packets."""
    dice = random.Random(seed)
    kept, pos = [capture[:_FILE_HEADER]], _FILE_HEADER
    while pos + _PACKET_HEADER <= len(capture):
        (size,) = struct.unpack_from("<I", capture, pos + 8)
        end = pos + _PACKET_HEADER + size
        if dice.random() >= share:
            kept.append(capture[pos:end])
        pos = end
    path.write_bytes(b"".join(kept))
