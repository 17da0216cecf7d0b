"""Rows as text, CSV, JSON and Parquet."""

import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kdissect.sql import Database
from kdissect.sql.formats import TEXT_FORMATS, write_parquet

HOSTILE = "\x1b[31mred\x07\r\n\u202e"


@pytest.fixture(scope="module")
def database():
    with Database({}) as opened:
        yield opened


def formatted(database: Database, form: str, query: str) -> str:
    out = io.StringIO()
    TEXT_FORMATS[form](*database.stream(query), out)
    return out.getvalue()


EVERYTHING = """
select 9007199254740993 big, -5 small, 1.5::double d, 'nan'::double nan, null::int nothing,
  timestamptz '2026-01-02 03:04:05.5+00' t, timestamp '2026-01-02 03:04:05' local,
  date '2026-01-02' as day,
  '\\x00a\\x5C'::blob b, ['x', null] list, {'a': {'b': 12345678901234567}} nested, map{'k': 1} m,
  12345678901234567890::hugeint huge, 1.50::decimal(5, 2) dec, true yes, '' empty,
  interval '1 month 2 days 3.25 seconds' gap, interval '-1.5 s' back,
  12345678901234567890::ubigint wide, uuid '00000000-0000-0000-0000-000000000001' id
"""


AS_JSON = r"""
{"big": "9007199254740993", "small": -5, "d": 1.5, "nan": "nan", "nothing": null,
 "t": "2026-01-02T03:04:05.500000Z", "local": "2026-01-02T03:04:05.000000", "day": "2026-01-02",
 "b": "AGFc", "list": ["x", null], "nested": {"a": {"b": "12345678901234567"}}, "m": {"k": 1},
 "huge": "12345678901234567890", "dec": "1.50", "yes": true, "empty": "", "gap": "P1M2DT3.25S",
 "back": "P0M0DT-1.5S", "wide": "12345678901234567890",
 "id": "00000000-0000-0000-0000-000000000001"}
"""


def test_json_keeps_large_integers_as_text(database: Database) -> None:
    """One document; integers beyond 2^53 are strings, times RFC 3339, bytes base64."""
    document = json.loads(formatted(database, "json", EVERYTHING))
    assert document["format_version"] == 1
    assert document["columns"][0] == {"name": "big", "type": "int64"}
    assert document["rows"] == [json.loads(AS_JSON)]


def test_csv_separates_null_from_empty_text(database: Database) -> None:
    """Null is nothing, the empty text is quoted, nested values are JSON; a CSV reader agrees."""
    text = formatted(database, "csv", EVERYTHING)
    (row,) = csv.DictReader(io.StringIO(text))
    assert row["big"] == "9007199254740993"
    assert row["nothing"] == ""
    assert row["b"] == "\\x00a\\x5C"
    assert json.loads(row["list"]) == ["x", None]
    assert json.loads(row["nested"]) == {"a": {"b": "12345678901234567"}}
    assert row["t"] == "2026-01-02T03:04:05.500000Z"
    assert ',true,"",P1M2DT3.25S' in text
    quoted = formatted(database, "csv", "select 'a,\"b\"' x, 'line\nline' y")
    assert list(csv.reader(io.StringIO(quoted))) == [["x", "y"], ['a,"b"', "line\nline"]]


def test_columns_of_text_are_aligned(database: Database) -> None:
    """Columns are aligned, numbers to the right; nothing is cut off."""
    text = formatted(database, "table", "values ('a', 1), ('bbb', 22), ('東京', 333), (null, null)")
    expected = ["col0  col1", "----  ----", "a        1", "bbb     22", "東京   333", ""]
    assert text.splitlines() == expected


@pytest.mark.parametrize("form", TEXT_FORMATS)
def test_text_of_a_capture_does_not_steer_the_terminal(database: Database, form: str) -> None:
    """Text of a capture does not reach the terminal's controls, and JSON stays JSON."""
    literal = " || ".join(f"chr({ord(each)})" for each in HOSTILE)
    text = formatted(database, form, f"select {literal} as evil")
    if form == "table":
        assert text.splitlines()[2] == "\\x1b[31mred\\x07\\r\\n\\u202e"
    if form == "json":
        assert json.loads(text)["rows"] == [{"evil": HOSTILE}]
        assert text.isascii()
    if form == "csv":
        assert list(csv.reader(io.StringIO(text, newline=""))) == [["evil"], [HOSTILE]]


def test_columns_of_one_name_stay_apart(database: Database) -> None:
    """Columns of one name stay apart."""
    query = "select 1 a, 2 a, 3 a_1"
    assert json.loads(formatted(database, "json", query))["rows"] == [
        {"a": 1, "a_1": 2, "a_1_1": 3}
    ]
    out = io.BytesIO()
    write_parquet(*database.stream(query), out)
    assert pq.read_table(out).to_pylist() == [{"a": 1, "a_1": 2, "a_1_1": 3}]


@pytest.mark.parametrize("form", TEXT_FORMATS)
def test_without_rows_there_is_the_head_alone(database: Database, form: str) -> None:
    """The head alone, where a format has one."""
    text = formatted(database, form, "select 1 a where false")
    if form == "json":
        assert json.loads(text)["rows"] == []
    else:
        assert text.splitlines()[:1] == ([] if form == "ndjson" else ["a"])


def test_rows_of_all_batches_come_in_order(database: Database) -> None:
    """Rows of all batches, in order."""
    query = "select range a, 'x' || range b from range(30000)"
    document = json.loads(formatted(database, "json", query))
    assert [row["a"] for row in document["rows"]] == list(range(30000))
    assert len(formatted(database, "table", query).splitlines()) == 30002
    out = io.BytesIO()
    write_parquet(*database.stream(query), out)
    assert pq.read_table(out)["a"].to_pylist() == list(range(30000))
    assert isinstance(pq.read_schema(out), pa.Schema)
