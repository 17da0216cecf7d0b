"""Names that a user gives: exact ones, or patterns in which * and ? fit anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def bools(mask: Any) -> npt.NDArray[np.bool_]:
    """A mask of Arrow as array; null is False."""
    return np.asarray(pc.fill_null(mask, False), np.bool_)


def has_wildcard(pattern: str) -> bool:
    return "*" in pattern or "?" in pattern


def fits(name: str | None, patterns: Iterable[str]) -> bool:
    """Whether a name is one of the patterns or matches one; None never does."""
    return name is not None and any(
        name == pattern or (has_wildcard(pattern) and fnmatchcase(name, pattern))
        for pattern in patterns
    )


def like(column: pa.ChunkedArray, patterns: Sequence[str]) -> Any:
    """bool[n]: text that one of the patterns fits; each distinct text is looked at once."""
    encoded = column.combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], pa.string())
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    found = [fits(name, patterns) for name in encoded.dictionary.to_pylist()]
    return pa.array(found, pa.bool_()).take(encoded.indices).fill_null(False)


def any_like(column: pa.ChunkedArray, patterns: Sequence[str]) -> Any:
    """bool[n]: lists with a text that one of the patterns fits."""
    lists = column.combine_chunks()
    flat = lists.flatten()
    parents = pc.list_parent_indices(lists).to_numpy()
    found = np.zeros(len(lists), np.bool_)
    if len(flat):
        found[parents[bools(like(pa.chunked_array([flat]), patterns))]] = True
    return pa.array(found)
