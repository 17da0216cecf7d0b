"""Arrow columns of strings, bytes and uuids, copied from their places in memory."""

from __future__ import annotations

from base64 import urlsafe_b64encode

import numpy as np
import pyarrow as pa

from kdissect.arrays import Bools, Bytes, Indices, Ints, Positions, address_of
from kdissect.jit import copy_bytes, kernel


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
    texts = [None if value is None else value.decode("utf-8", "replace") for value in values]
    wrong = [
        row for row, text in enumerate(texts) if text is not None and text.encode() != values[row]
    ]
    return pa.array(texts, pa.string()), np.array(wrong, np.int64)


def uuids(buf: Bytes, start: Positions, is_valid: Bools) -> pa.DictionaryArray:
    """Kafka's text of the uuids at n places (-1: the zero uuid): 22 characters of base64."""
    size = np.where(start >= 0, 16, 0)
    raw = gathered(address_of(buf) + start, np.where(is_valid, size, -1)).dictionary_encode()
    different = [data or bytes(16) for data in raw.dictionary.to_pylist()]
    texts = [urlsafe_b64encode(data)[:22].decode() for data in different]
    return pa.DictionaryArray.from_arrays(raw.indices, pa.array(texts, pa.string()))
