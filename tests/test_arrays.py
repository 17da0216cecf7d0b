"""Rows of structured arrays, and numbers of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.arrays import by_value, in_order_of_time, renumbered, take


@given(st.lists(st.integers(0, 40), min_size=1), st.integers(41, 400))
def test_renumbered_is_unique(numbers: list[int], count: int) -> None:
    """Where few of the numbers are used, and where many are."""
    array = np.array(numbers, np.uint32)
    used, index = renumbered(array, count)
    expected, inverse = np.unique(array, return_inverse=True)
    assert used.tolist() == expected.tolist()
    assert index.tolist() == inverse.tolist()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9))))
def test_order_of_time_is_that_of_ids_too(rows: list[tuple[int, int]]) -> None:
    """Where times are equal."""
    time_ns, ident = np.array(rows, np.int64).reshape(-1, 2).T
    wanted = np.lexsort((ident, time_ns))
    assert in_order_of_time(time_ns, ident).tolist() == wanted.tolist()


@given(st.lists(st.integers(-3, 9)))
def test_by_value_gives_positions_in_order(values: list[int]) -> None:
    """`by_value` gives each value's positions in order."""
    found = {
        value: places.tolist() for value, places in by_value(np.array(values, np.int16)).items()
    }
    wanted: dict[int, list[int]] = {}
    for place, value in enumerate(values):
        wanted.setdefault(value, []).append(place)
    assert found == wanted


@pytest.mark.parametrize("rows", [[], [2, 3, 4], [1, 1, 0], [-1, 0, 1]])
def test_rows_are_taken_as_numpy_takes_them(rows: list[int]) -> None:
    """Rows are copied; negative numbers count from the end."""
    array = np.arange(6, dtype=np.int64).view([("low", "<i4"), ("high", "<i4")])
    index = np.array(rows, np.int64)
    taken = take(array, index)
    assert taken.tolist() == array[index].tolist()
    assert not np.shares_memory(taken, array)


def test_a_row_after_the_end_is_an_error() -> None:
    """Taking a row after the end raises IndexError."""
    with pytest.raises(IndexError):
        take(np.zeros(3, [("low", "<i4")]), np.array([2, 3]))
