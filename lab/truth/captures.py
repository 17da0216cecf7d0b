"""Captures with logs, whole and with packets removed, as by a machine that did not keep up."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import kdissect
from kdissect import Tables

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


def log_of(capture: Path) -> Path:
    """Return the path of a capture's request log, which may not exist."""
    return capture.with_suffix(".requests.jsonl.gz")


def read_capture(capture: Path, original: Path | None = None) -> Tables:
    """The tables of a capture, decrypted if a key log lies beside it, or beside its original."""
    key_log = (original or capture).with_suffix(".keylog")
    return kdissect.read(capture, keylog=key_log if key_log.is_file() else ())
