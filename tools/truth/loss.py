"""Captures with packets removed, as where the capturing machine did not keep up."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

LOST = 0.02  # the share that the truth page removes
_FILE_HEADER, _PACKET_HEADER = 24, 16


@contextmanager
def without_packets(capture: Path, share: float, seed: int = 1) -> Iterator[Path]:
    """A little-endian pcap file less a share of its packets, drawn by chance."""
    data = capture.read_bytes()
    rng = np.random.default_rng(seed)
    kept = [data[:_FILE_HEADER]]
    pos = _FILE_HEADER
    while pos < len(data):
        (size,) = struct.unpack_from("<I", data, pos + 8)
        end = pos + _PACKET_HEADER + size
        if rng.random() >= share:
            kept.append(data[pos:end])
        pos = end
    with TemporaryDirectory() as folder:
        path = Path(folder, capture.name)
        path.write_bytes(b"".join(kept))
        yield path
