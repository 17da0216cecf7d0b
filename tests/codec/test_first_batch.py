"""Batch boundaries in pieces of a snapshot."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.codec import record_batches
from kdissect.codec.record_batches import first_batch
from kdissect.codec.record_encoder import encode_batch

BATCH = encode_batch(
    [{"offset": n, "timestamp_ms": 5, "key": b"key", "value": bytes([2]) * n} for n in range(40)]
)


def found(data: bytes) -> int:
    return first_batch(np.frombuffer(data, np.uint8))


@given(st.binary(max_size=90), st.integers(0, len(BATCH)))
def test_the_first_whole_batch_is_found(lead: bytes, cut: int) -> None:
    """After any bytes, even the end of another batch, the search finds the first whole batch."""
    assert found(lead + BATCH + BATCH[:cut]) == len(lead)
    tail = BATCH[cut:] if cut else b""
    assert found(tail + BATCH) == len(tail)


@given(st.binary(max_size=400))
def test_other_bytes_hold_none(data: bytes) -> None:
    """Random bytes have no boundary."""
    assert found(data) == len(data)


def test_a_damaged_or_cut_batch_is_no_boundary() -> None:
    """Only a whole batch with a right checksum is a boundary."""
    damaged = bytearray(BATCH)
    damaged[-1] ^= 1
    assert found(bytes(damaged) + BATCH) == len(BATCH)
    assert found(BATCH[:-1]) == len(BATCH) - 1
    assert found(b"") == 0


def test_batches_in_different_windows() -> None:
    """A batch after many other bytes is found."""
    assert found(bytes(200_000) + BATCH) == 200_000


def test_what_looks_like_many_batches_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers every 61 bytes, each announcing all that follows, with wrong CRCs."""
    count = 100_000
    size = 61 * count
    headers = np.zeros((count, 61), np.uint8)
    lengths = (size - 61 * np.arange(count) - 12).astype(">i4")
    headers[:, 8:12] = lengths.view(np.uint8).reshape(-1, 4)
    headers[:, 16] = 2
    checked: list[int] = []

    def crc32c(data: np.ndarray) -> int:
        checked.append(len(data))
        return 1

    monkeypatch.setattr(record_batches, "crc32c", SimpleNamespace(crc32c=crc32c))
    assert found(headers.tobytes()) == size
    assert size < sum(checked) < 10 * size
