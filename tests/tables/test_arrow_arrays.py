"""Bytes of places in a buffer as a column: the kernel against its definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kdissect.tables.arrow_arrays import binaries
from kdissect.tables.values_reference import copy_places

BUFFER = bytes(range(40))
places = st.lists(
    st.tuples(st.integers(0, 40), st.integers(-1, 40)).map(
        lambda place: (place[0], min(place[1], 40 - place[0]))
    ),
    max_size=9,
)


@settings(max_examples=200, deadline=None)
@given(places)
def test_kernel_and_definition_agree(rows: list[tuple[int, int]]) -> None:
    start = [pos for pos, _ in rows]
    length = [size for _, size in rows]
    column = binaries(np.frombuffer(BUFFER, np.uint8), np.array(start), np.array(length))
    assert b"".join(value or b"" for value in column.to_pylist()) == copy_places(
        BUFFER, start, length
    )
    assert [value is None for value in column.to_pylist()] == [size < 0 for size in length]
    assert [len(value or b"") for value in column.to_pylist()] == [max(0, n) for n in length]
