"""Tables as multisets of rows, to compare two runs and list their differences."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

Row = dict[str, Any]
PACKETS = {  # column with a packet number -> column with the id of the capture it is in
    "request_packet": "request_capture_id",
    "response_packet": "response_capture_id",
    "packet": "capture_id",
}
IDS = ("connection_id", "exchange_id", "capture_id", "request_capture_id", "response_capture_id")
SHOWN = 3


def as_rows(table: pa.Table) -> list[Row]:
    """Rows as Python values; a map becomes a dict, as its entries have no order."""
    rows = table.to_pylist()
    for column in table.schema:
        if pa.types.is_map(column.type):
            for row in rows:
                row[column.name] = dict(sorted(row[column.name] or ()))
    return rows


def without(rows: Iterable[Row], columns: Iterable[str]) -> list[Row]:
    drop = set(columns)
    return [{name: value for name, value in row.items() if name not in drop} for row in rows]


def differences(name: str, ours: list[Row], theirs: list[Row]) -> list[str]:
    """Nothing where both are the same multiset of rows; else sentences that show some."""
    left, right = Counter(map(repr, ours)), Counter(map(repr, theirs))
    if left == right:
        return []
    only_left, only_right = left - right, right - left
    return [
        f"{name}: {len(ours)} rows and {len(theirs)}, {only_left.total()} only in the first, "
        f"{only_right.total()} only in the second",
        *(f"{name}, only in the first: {row}" for row in list(only_left)[:SHOWN]),
        *(f"{name}, only in the second: {row}" for row in list(only_right)[:SHOWN]),
    ]


def set_differences(
    ours: Any, theirs: Any, prepare: Callable[[str, list[Row]], list[Row]] | None = None
) -> list[str]:
    """All differences of two table sets: names, schemas and rows.

    `prepare(table name, rows)` may take out or translate what is allowed to differ.
    """
    found = []
    if sorted(ours.names) != sorted(theirs.names):
        found.append(f"tables: {sorted(set(ours.names) ^ set(theirs.names))} only in one")
    for name in sorted(set(ours.names) & set(theirs.names)):
        left, right = ours[name].to_arrow(), theirs[name].to_arrow()
        if left.schema != right.schema:
            found.append(f"{name}: schemas differ: {left.schema} and {right.schema}")
            continue
        left_rows, right_rows = as_rows(left), as_rows(right)
        if prepare is not None:
            left_rows, right_rows = prepare(name, left_rows), prepare(name, right_rows)
        found += differences(name, left_rows, right_rows)
    return found
