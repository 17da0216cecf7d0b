"""Rows of `anomalies` by columns are those by single rows."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.kafka.assembly import ANOMALY, Anomaly
from kdissect.tables.anomalies import (
    DIRECTIONS,
    STREAM_DETAILS,
    AnomalyRow,
    anomalies_table,
    in_parts,
    severity_of,
    stream_anomalies,
    texts,
    texts_of_kinds,
)
from kdissect.tables.schemas import ANOMALIES

IDS, CAPTURE_IDS = np.array([11, -22, 33]), [101, -202]

anomalies = st.lists(
    st.tuples(
        st.sampled_from(
            [kind for kind in sorted(Anomaly) if kind not in (Anomaly.LIMIT, Anomaly.CARRY_LIMIT)]
        ),
        st.integers(0, 2),
        st.integers(-1, 2),
        st.integers(-1, 1),
        st.integers(-1, 5),
        st.integers(-1, 5),
        st.integers(0, 5000),
        st.sampled_from([0, 7, -7]),
        st.integers(0, 4),
        st.integers(-9, 9),
        st.integers(-9, 9),
    ),
    max_size=12,
)
NAMES = (
    "kind", "direction", "connection", "source", "packet", "pos", "byte_count", "exchange_id",
    "reason", "number", "other",
)  # fmt: skip


def _texts(kind: int) -> tuple[str, ...]:
    """The texts of a kind: one for each reason."""
    return STREAM_DETAILS.get(Anomaly(kind)) or (Anomaly(kind).name.lower().replace("_", " "),)


def row_of(row: np.void, data: bytes | None) -> dict[str, object]:
    kind = Anomaly(int(row["kind"]))
    text = _texts(kind)[int(row["reason"])]
    return {
        "kind": kind.name.lower(),
        "severity": severity_of(kind),
        "connection_id": int(IDS[row["connection"]]) if row["connection"] >= 0 else None,
        "exchange_id": int(row["exchange_id"]) or None,
        "capture_id": CAPTURE_IDS[row["source"]] if row["source"] >= 0 else None,
        "packet": int(row["packet"]) if row["packet"] >= 0 else None,
        "direction": DIRECTIONS[row["direction"]],
        "pos": int(row["pos"]) if row["pos"] >= 0 else None,
        "byte_count": int(row["byte_count"]),
        "detail": text.format(number=row["number"], other=row["other"], n=row["byte_count"]),
        "data": data,
    }


@given(anomalies)
def test_faults_of_streams(given: list[tuple[int, ...]]) -> None:
    """Rows made by the column equal rows made one by one."""
    rows = np.zeros(len(given), ANOMALY)
    for number, name in enumerate(NAMES):
        rows[name] = [row[number] for row in given]
    rows["reason"] %= np.array([len(_texts(row[0])) for row in given], np.uint8)
    data = [None if row[-1] < 0 else bytes(row[-1]) for row in given]
    table = stream_anomalies(rows, IDS, CAPTURE_IDS, pa.array(data, pa.binary()))
    assert table.schema == ANOMALIES
    assert table.to_pylist() == [row_of(*pair) for pair in zip(rows, data, strict=True)]


def test_rows_by_value() -> None:
    """Rows from values have nulls for the others."""
    rows = [AnomalyRow(Anomaly.LIMIT, "one"), AnomalyRow(Anomaly.GAP, "two", packet=7)]
    table = anomalies_table(rows)
    assert table["detail"].to_pylist() == ["one", "two"]
    assert table["direction"].to_pylist() == [None, None]
    assert table["packet"].to_pylist() == [None, 7]
    assert anomalies_table([]).schema == ANOMALIES


def test_texts_put_values_in_places() -> None:
    """A template takes numbers and texts, row by row."""
    values = pa.array(["x", "y"])
    expected = ["1 of x: 1", "-2 of y: -2"]
    assert texts("{a} of {b}: {a}", 2, a=np.array([1, -2]), b=values).to_pylist() == expected
    assert texts("as it is", 3).to_pylist() == ["as it is"] * 3
    assert texts("{a}", 0, a=np.zeros(0, np.int64)).to_pylist() == []


@given(st.lists(st.integers(0, 3), max_size=20))
def test_texts_of_kinds_keep_the_order(codes: list[int]) -> None:
    """Texts by kind return to the rows' order."""
    told = texts_of_kinds(
        np.array(codes, np.uint8), lambda code, rows: pa.array([f"{code} {row}" for row in rows])
    )
    assert told.to_pylist() == [f"{code} {row}" for row, code in enumerate(codes)]


@given(st.lists(st.integers(0, 4096), max_size=50), st.integers(1, 9), st.integers(1, 9000))
def test_parts_cover_all_rows_and_stay_small(sizes: list[int], rows: int, size: int) -> None:
    """Each row is in one part; parts respect both bounds."""
    parts = in_parts(np.array(sizes, np.int64), rows, size)
    assert [row for part in parts for row in range(part.start, part.stop)] == [*range(len(sizes))]
    for part in parts:
        assert 0 < part.stop - part.start <= rows
        assert sum(sizes[part]) <= size + 4096


@pytest.mark.parametrize("count", [0, 1])
def test_no_kinds_give_no_texts(count: int) -> None:
    """One kind or no row needs no ordering."""
    codes = np.zeros(count, np.uint8)
    assert len(texts_of_kinds(codes, lambda _, rows: texts("one", len(rows)))) == count
