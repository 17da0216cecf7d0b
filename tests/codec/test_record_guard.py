"""Kernels read no byte before or after a record set: guard pages surround it."""

from __future__ import annotations

import random
import sys

import numpy as np
import numpy.typing as npt
import pytest

from kdissect.codec.compression import CODEC_NAMES
from kdissect.codec.record_batches import iter_record_chunks
from kdissect.codec.record_codec import encode_batch, encode_messages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="guard pages are set with mprotect")


def test_cut_and_damaged_sets_stay_inside(guarded: npt.NDArray[np.uint8]) -> None:
    """A read outside would end the process."""
    rows = [
        {
            "offset": 5 + i,
            "timestamp_ms": 1_700_000_000_000 - i,
            "key": b"k" * i,
            "value": b"v" * 30 if i % 2 else None,
            "headers": [{"key": "name", "value": b"x" * i}] * (i % 3),
        }
        for i in range(4)
    ]
    sets = [encode_batch(rows, codec=codec, is_control=True) for codec in CODEC_NAMES]
    sets += [encode_messages(rows, magic, codec=c) for magic in (0, 1) for c in CODEC_NAMES[:3]]
    rng = random.Random(3)
    cases = [data[:size] for data in sets for size in range(0, len(data), 23)]
    for data in sets:
        for _ in range(15):
            damaged = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(8, len(data))] = rng.choice([0, 1, 127, 128, 255])
            if rng.random() < 0.5:  # a length that fits what is there
                damaged[8:12] = (len(data) - 12).to_bytes(4, "big")
            cases.append(bytes(damaged))
    rows_seen = 0
    for data in cases:
        for place in (0, guarded.size - len(data)):
            guarded[place : place + len(data)] = np.frombuffer(data, np.uint8)
            where = np.array([place]), np.array([len(data)])
            for chunk in iter_record_chunks(guarded, *where):
                rows_seen += chunk.records.num_rows
    print(f"{2 * len(cases)} sets, {rows_seen} records")
