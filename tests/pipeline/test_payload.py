"""`payload` and `decode_values` decide which record bytes the tables contain."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import kdissect
from kdissect.codec.record_encoder import encode_batch
from kdissect.errors import Error
from kdissect.tables.payload import canonical_json, hashes, schema_ids, texts
from tests.builders.messages import COMMIT, COMMIT_KEY, batch, exchange, fetch, write_capture
from tests.builders.tables import rows
from tests.truth.rows import set_differences

SECRET = b"swordfish"


def digest(value: bytes | None) -> bytes | None:
    return None if value is None else xxhash.xxh3_64_hexdigest(value).encode()


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Good records, internal ones, damaged ones, and frames that do not decode."""
    record = {"offset": 0, "timestamp_ms": 1, "key": b"fish-key", "value": SECRET}
    headers = [{"key": "h", "value": SECRET}, {"key": "n", "value": None}]
    good = encode_batch([record | {"headers": headers}, record | {"key": None, "value": None}])
    bad = bytearray(good)
    bad[20] ^= 1
    commits = batch([(COMMIT_KEY, COMMIT), (COMMIT_KEY, COMMIT[:-1]), (COMMIT_KEY, None)])
    broken = fetch(3, "orders", [good])
    unknown = fetch(4, "orders", [good])
    exchanges = [
        fetch(1, "orders", [good, bytes(bad)]),
        fetch(2, "__consumer_offsets", [commits]),
        (broken[0], broken[1][:-4]),
        (unknown[0][:2] + b"\0\x63" + unknown[0][4:], unknown[1]),
        (unknown[0][:1] + b"\xee" + unknown[0][2:], unknown[1]),
        exchange(5, 3, 1, {"topics": [{"name": "swordfish-topic"}]}, {"brokers": []}),
    ]
    return write_capture(tmp_path / "made.pcap", exchanges)


def test_full_shows_everything(capture: Path) -> None:
    """Values, headers, damaged bytes and internal records are shown."""
    tables = kdissect.read(capture)
    listed = rows(tables, "records")
    assert listed[0]["value"] == SECRET
    assert listed[0]["headers"] == [{"key": "h", "value": SECRET}, {"key": "n", "value": None}]
    assert sum(SECRET in (row["data"] or b"") for row in rows(tables, "anomalies")) >= 4
    assert rows(tables, "internal/OffsetCommit")[0]["value"]["metadata"] == "swordfish"


@pytest.mark.parametrize("payload", ["keys", "hash", "none"])
def test_other_modes_show_it_nowhere(capture: Path, payload: str) -> None:
    """No table has the bytes; rows and columns stay."""
    tables = kdissect.read(capture, payload=payload)
    full = kdissect.read(capture)
    assert tables.manifest["options"]["payload"] == payload
    for name in tables.names:
        assert len(tables[name]) == len(full[name])
        assert tables[name].schema == full[name].schema
        if name not in ("apis/Metadata", "topics", "exchanges"):  # there it is a topic's name
            assert "swordfish" not in repr(rows(tables, name)), name
            assert payload == "keys" or "fish" not in repr(rows(tables, name)), name
    for row, whole in zip(rows(tables, "records"), rows(full, "records"), strict=True):
        shown = whole | {}
        hide = digest if payload == "hash" else lambda _: None
        shown["value"] = hide(whole["value"])
        if payload != "keys":
            shown["key"] = hide(whole["key"])
        shown["headers"] = [
            {"key": entry["key"], "value": hide(entry["value"])} for entry in whole["headers"]
        ]
        assert row == shown
    for row, whole in zip(
        rows(tables, "internal/OffsetCommit"), rows(full, "internal/OffsetCommit"), strict=True
    ):
        key = whole["key"] if payload == "keys" else None
        assert row == whole | {"key": key, "value": None}
    for row, whole in zip(rows(tables, "anomalies"), rows(full, "anomalies"), strict=True):
        # of a Fetch of unknown version the request is shown: it never has records
        is_shown = whole["kind"] == "unknown_version" and whole["direction"] == "request"
        assert row == (whole if is_shown else whole | {"data": None})


def test_bytes_of_messages_without_records_stay(tmp_path: Path) -> None:
    """Bytes of a damaged Metadata response are no record data."""
    one = exchange(1, 3, 1, {"topics": [{"name": "orders"}]}, {"brokers": []})
    path = write_capture(tmp_path / "made.pcap", [(one[0], one[1][:-1])])
    (row,) = rows(kdissect.read(path, payload="none"), "anomalies")
    assert row["data"]


def test_streams_without_frames_show_nothing(tmp_path: Path) -> None:
    """Unframed bytes may be record data, so they are hidden."""
    good = fetch(1, "orders", [batch([(None, SECRET * 100)])])
    path = write_capture(tmp_path / "made.pcap", [good, good, good])
    data = path.read_bytes()
    size = len(good[1]).to_bytes(4, "big")
    at = data.index(size, data.index(size) + 4)
    path.write_bytes(data[:at] + b"\x7f\xff\xff\xff" + data[at + 4 :])
    shown = [row["data"] for row in rows(kdissect.read(path, reveal_secrets=True), "anomalies")]
    assert any(SECRET in (data or b"") for data in shown)
    for payload in ("keys", "hash", "none"):
        hidden = rows(kdissect.read(path, payload=payload), "anomalies")
        assert [row["data"] for row in hidden] == [None] * len(shown)


def test_wrong_values_are_refused(capture: Path) -> None:
    """ValueError lists the modes."""
    with pytest.raises(ValueError, match="payload must be one of full, keys, hash, none"):
        kdissect.read(capture, payload="some")
    with pytest.raises(ValueError, match="decode_values must be one of"):
        kdissect.read(capture, decode_values="avro")
    assert not issubclass(Error, ValueError)


def test_decoded_values_are_columns(tmp_path: Path) -> None:
    """Text, JSON and schema ids are columns after the fixed ones; other bytes are null."""
    values = [b'{"b": 1, "a": [1.50, null]}', "né".encode(), b"\xff\xfe", b"\0\0\0\0\x07data", None]
    data = batch([(b"\0\x01\x02\x03\x04", value) for value in values])
    path = write_capture(tmp_path / "made.pcap", [fetch(1, "orders", [data])])
    fixed = kdissect.read(path).records.schema

    def decoded(kind: str, **options: Any) -> dict[str, Any]:
        table = kdissect.read(path, decode_values=kind, **options).records.to_arrow()
        assert table.schema.names[: len(fixed)] == fixed.names
        return {name: table[name].to_pylist() for name in table.schema.names[len(fixed) :]}

    texts_ = [values[0].decode(), "né", None, "\0\0\0\0\x07data", None]
    assert decoded("string") == {"value_text": texts_}
    assert decoded("json") == {"value_json": ['{"a":[1.5,null],"b":1}', *[None] * 4]}
    ids = {"value_schema_id": [None, None, None, 7, None], "key_schema_id": [0x01020304] * 5}
    assert decoded("schema-registry-id") == ids
    nothing = {"value_schema_id": [None] * 5}
    assert decoded("schema-registry-id", payload="keys") == ids | nothing
    assert decoded("schema-registry-id", payload="hash") == nothing | {"key_schema_id": [None] * 5}
    assert decoded("string", payload="hash") == {"value_text": [None] * 5}


def test_decoded_columns_are_there_without_records(tmp_path: Path) -> None:
    """A capture without records has the columns, written sets too."""
    path = write_capture(tmp_path / "made.pcap", [exchange(1, 3, 1, {}, {})])
    tables = kdissect.read(path, decode_values="json")
    assert tables.records.schema.names[-1] == "value_json"
    written = tables.write(tmp_path / "out")
    assert written.records.schema == tables.records.schema


@pytest.mark.heavy
@pytest.mark.spark
def test_spark_gives_the_rows_of_read(spark: Any, capture: Path, tmp_path: Path) -> None:
    """Payload and decoded columns are equal on Spark."""
    options = {"payload": "hash", "decode_values": "json"}
    here = kdissect.read(capture, **options)
    there = kdissect.dissect(spark, capture, tmp_path / "out", **options)
    assert "internal/OffsetCommit" in there.names
    assert there.manifest["options"]["payload"] == "hash"
    assert set_differences(here, there) == []


@given(st.lists(st.none() | st.binary(max_size=300), max_size=9), st.integers(0, 3))
def test_hashes_are_those_of_the_library(values: list[bytes | None], skip: int) -> None:
    """The kernel's hashes equal those of xxhash, in slices, too."""
    array = pa.array(values, pa.binary()).slice(skip)
    assert hashes(array).to_pylist() == [digest(value) for value in values[skip:]]


HARD_JSON = [
    (b"", None),
    (b"null", "null"),
    (b" [1, 2]\n", "[1,2]"),
    (b"NaN", None),
    (b"-Infinity", None),
    (b"1e400", None),
    (b"1" * 5000, None),
    (b"123456789012345678901234567890", "123456789012345678901234567890"),
    (b"[" * 100_000, None),
    (b"[" * 100_000 + b"]" * 100_000, None),
    (b'"\\ud800"', '"\\ud800"'),
    (b'"\\ud83d\\ude80"', '"\N{ROCKET}"'),
    (b'{"a":1,"a":2}', '{"a":2}'),
    (b"\xef\xbb\xbf1", None),
    (b"1 2", None),
    (b"'a'", None),
    (b'"\xff"', None),
]


@pytest.mark.parametrize(("value", "expected"), HARD_JSON, ids=lambda value: repr(value)[:24])
def test_json_never_fails(value: bytes, expected: str | None) -> None:
    """Any bytes give JSON or null."""
    assert canonical_json(pa.array([value])).to_pylist() == [expected]
    if expected is not None:
        assert json.loads(expected) == json.loads(value)


@given(st.lists(st.none() | st.binary(max_size=8), max_size=6))
def test_any_bytes_have_decoded_columns(values: list[bytes | None]) -> None:
    """Text and schema ids equal Python's own decoding."""
    array = pa.array(values, pa.binary())
    for value, text, number in zip(
        values, texts(array).to_pylist(), schema_ids(array).to_pylist(), strict=True
    ):
        is_framed = value is not None and len(value) >= 5 and value[0] == 0
        assert number == (int.from_bytes(value[1:5], "big", signed=True) if is_framed else None)
        try:
            assert text == (None if value is None else value.decode())
        except UnicodeDecodeError:
            assert text is None
    assert len(canonical_json(array)) == len(values)
