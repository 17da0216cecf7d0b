"""Arrow columns of strings, bytes and uuids, copied from their places in memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.arrays import Bools, Bytes, Indices, Ints, address_of
from kdissect.jit import copy_bytes, kernel

_BASE64 = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", np.uint8
)
_UUID_SIZE, _UUID_TEXT_SIZE = 16, 22


def gathered(address: Ints, length: Ints) -> pa.BinaryArray:
    """A column of the bytes at n addresses; null where the length is -1."""
    count = len(length)
    data = pa.allocate_buffer(int(np.maximum(length, 0).sum()))
    offsets = np.empty(count + 1, np.int32)
    validity = np.zeros((count + 7) // 8, np.uint8)
    address, length = np.ascontiguousarray(address), np.ascontiguousarray(length)
    null_count = _gather(address, length, offsets, validity, data.address)
    buffers = [pa.py_buffer(validity) if null_count else None, pa.py_buffer(offsets), data]
    return pa.Array.from_buffers(pa.binary(), count, buffers, null_count)


@kernel
def _gather(address: Ints, length: Ints, offsets: Ints, validity: Bytes, data_address: int) -> int:
    """Copy byte strings into Arrow's buffers, concatenated; returns the number of nulls.

    address, length: int64 (-1: null). offsets: int32[n + 1]. validity: uint8, a bit each, zero
    on entry. data_address: destination, with room for the sum of the lengths.
    """
    place = 0
    null_count = 0
    offsets[0] = 0
    for i in range(length.size):
        size = length[i]
        if size >= 0:
            validity[i >> 3] |= np.uint8(1 << (i & 7))
            copy_bytes(data_address + place, address[i], size)
            place += size
        else:
            null_count += 1
        offsets[i + 1] = place
    return null_count


def as_text(data: pa.BinaryArray) -> tuple[pa.StringArray, Indices]:
    """(the column as strings, rows that are no UTF-8).

    U+FFFD replaces each maximal part of a wrong sequence, as in Python's ``replace``.
    """
    text = data.view(pa.string())
    try:
        text.validate(full=True)
        return text, np.zeros(0, np.int64)
    except pa.ArrowInvalid:
        pass
    values = data.to_pylist()
    wrong = [row for row, value in enumerate(values) if value is not None and not _is_utf8(value)]
    for row in wrong:
        values[row] = values[row].decode("utf-8", "replace").encode()
    return pa.array(values, pa.binary()).view(pa.string()), np.array(wrong, np.int64)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def uuids(buf: Bytes, start: npt.NDArray[np.int64], is_valid: Bools) -> pa.StringArray:
    """Kafka's text of the uuids at n places (-1: the zero uuid): 22 characters of base64."""
    data = np.zeros((len(start), _UUID_SIZE + 2), np.uint8)
    rows = np.flatnonzero(is_valid & (start >= 0))
    data[rows, :_UUID_SIZE] = buf[start[rows, None] + np.arange(_UUID_SIZE)]
    # base64 writes each three bytes as four characters of six bits
    triples = data.reshape(-1, 6, 3).astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    sextets = (triples[..., None] >> np.array([18, 12, 6, 0])) & 63
    texts = np.ascontiguousarray(_BASE64[sextets.reshape(-1, 24)[:, :_UUID_TEXT_SIZE]])
    address = address_of(texts) + _UUID_TEXT_SIZE * np.arange(len(start))
    return gathered(address, np.where(is_valid, _UUID_TEXT_SIZE, -1)).view(pa.string())
