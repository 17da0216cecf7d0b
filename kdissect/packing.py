"""Packs arrays of rows into small values for a shuffle: each array is one lz4 block."""

from __future__ import annotations

from collections.abc import Sequence

import cramjam
import numpy as np
import numpy.typing as npt

from kdissect.arrays import Array


def pack(arrays: Sequence[Array]) -> bytes:
    """Return the arrays as one small value for `unpack`, which needs their dtypes."""
    raw = [np.ascontiguousarray(array).view(np.uint8).reshape(-1) for array in arrays]
    blocks = [bytes(cramjam.lz4.compress_block(data.data, store_size=False)) for data in raw]
    lengths = [(len(data), len(block)) for data, block in zip(raw, blocks, strict=True)]
    return b"".join([np.array(lengths, "<i8").tobytes(), *blocks])


def unpack(data: bytes, dtypes: Sequence[npt.DTypeLike]) -> list[Array]:
    """Return the arrays given to `pack`, as new arrays."""
    lengths = np.frombuffer(data, "<i8", 2 * len(dtypes)).reshape(-1, 2)
    view = memoryview(data)
    pos = lengths.nbytes
    arrays = []
    for dtype, (size, block_size) in zip(dtypes, lengths.tolist(), strict=True):
        array: Array = np.empty(size, np.uint8)
        if size:
            cramjam.lz4.decompress_block_into(view[pos : pos + block_size], array.data)
        arrays.append(array.view(dtype))
        pos += block_size
    return arrays
