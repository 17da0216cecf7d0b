"""Bytes of places in a buffer as a column."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from kdissect.tables.arrow_arrays import binaries, packed, unpacked

BUFFER = bytes(range(40))
places = st.lists(
    st.tuples(st.integers(0, 40), st.integers(-1, 40)).map(
        lambda place: (place[0], min(place[1], 40 - place[0]))
    ),
    max_size=9,
)


@given(places)
def test_each_value_is_its_slice(rows: list[tuple[int, int]]) -> None:
    """A length of -1 is null."""
    start, length = np.array(rows, np.int64).reshape(-1, 2).T
    column = binaries(np.frombuffer(BUFFER, np.uint8), start, length)
    expected = [None if size < 0 else BUFFER[pos : pos + size] for pos, size in rows]
    assert column.to_pylist() == expected


def test_a_packed_table_is_compressed() -> None:
    """Tables between steps, and saved ones, cost a small part of their bytes in memory."""
    table = pa.table({"client_id": ["a client"] * 10_000, "generation": list(range(10_000))})
    data = packed("groups", table)
    assert len(data) < table.nbytes // 5
    assert unpacked(data) == ("groups", table)
    labelled = table.set_column(0, "client_id", table["client_id"].dictionary_encode())
    assert len(packed("groups", labelled)) < len(data) - 10_000
    assert unpacked(packed("groups", labelled)) == ("groups", table)
