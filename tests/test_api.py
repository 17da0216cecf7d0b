"""The handles of the Python API: arguments, messages, other processes."""

import gzip
import hashlib
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kdissect


@pytest.fixture(scope="module")
def tables(captures: Path) -> kdissect.Tables:
    return kdissect.read(captures / "sarama.pcap.gz", ports=9092, hosts="127.0.0.1")


def test_one_port_and_one_host(captures: Path, tables: kdissect.Tables) -> None:
    """A single value means the same as a list of one."""
    several = kdissect.read(captures / "sarama.pcap.gz", ports=[9092], hosts=["127.0.0.1"])
    assert tables.exchanges.to_arrow() == several.exchanges.to_arrow()
    assert len(tables.exchanges)


@pytest.mark.parametrize("ports", ["9092", ["9092"], 1.5, None, 0, [70000]])
def test_a_wrong_port_is_refused(captures: Path, ports: Any) -> None:
    """ValueError names the argument."""
    with pytest.raises(ValueError, match=r"ports: .* no "):
        kdissect.read(captures / "sarama.pcap.gz", ports=ports)


def test_tables_iterates_over_names(tables: kdissect.Tables) -> None:
    """Each name is one that `tables[name]` takes."""
    assert list(tables) == tables.names
    assert all(tables[name].schema for name in tables)


def test_table_sets_travel(tmp_path: Path, tables: kdissect.Tables) -> None:
    """Rows in memory with them; of files the names, which are good in any folder."""
    written = tables.write(tmp_path / "out")
    for one in (tables, written):
        there = pickle.loads(pickle.dumps(one))
        assert there.names == one.names
        assert there.manifest == one.manifest
        assert there.exchanges.to_arrow() == one.exchanges.to_arrow()
        assert there.anomalies.schema == one.anomalies.schema
        assert there.sql("select count(*) n from exchanges").to_pylist() == [
            {"n": len(tables.exchanges)}
        ]
    assert len(pickle.dumps(written)) < 300_000


def test_table_sets_travel_to_other_folders(
    tmp_path: Path, tables: kdissect.Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickled set has absolute paths."""
    tables.write(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(kdissect.open("out"))
    monkeypatch.chdir("/")
    assert pickle.loads(pickled).exchanges.to_arrow() == tables.exchanges.to_arrow()


def test_every_stage_logs_its_counts(tables: kdissect.Tables) -> None:
    """The manifest has seconds and bytes of each stage."""
    timings = tables.manifest["timings"]
    assert timings["session_start_s"] >= 0 < timings["total_s"]
    for stage in ("scan", "assemble", "decode"):
        assert timings[f"{stage}_s"] > 0
        assert timings[f"{stage}_bytes"] > 0
    payload = sum(
        sum(tables.connections.to_arrow()[f"{side}_byte_count"].to_pylist())
        for side in ("request", "response")
    )
    assert payload <= timings["assemble_bytes"] < timings["scan_bytes"]


@pytest.mark.parametrize("out", ["", " "])
def test_an_empty_name_of_a_folder(tables: kdissect.Tables, out: str) -> None:
    """OutputError says that the name is empty."""
    with pytest.raises(kdissect.OutputError, match=r"^out is empty"):
        tables.write(out)


def test_no_set_is_named() -> None:
    """The error is that of a wrong path."""
    with pytest.raises(kdissect.CaptureError, match="no path was given"):
        kdissect.open([])


def test_one_column_is_one_name(tables: kdissect.Tables) -> None:
    """A text is no list of letters; a field of a struct is a column too."""
    expected = tables.exchanges.to_arrow(["api_name"])
    assert tables.exchanges.to_arrow("api_name") == expected
    assert pa.Table.from_batches(tables.exchanges.to_batches("api_name")) == expected
    assert tables.api("Fetch").to_arrow(["request.max_wait_ms"]).column_names == ["max_wait_ms"]


@pytest.mark.parametrize("read", ["to_arrow", "to_pandas", "to_batches"])
@pytest.mark.parametrize("columns", [["api_nam"], "api_nam"])
def test_a_column_that_there_is_not(tables: kdissect.Tables, read: str, columns: Any) -> None:
    """The error has similar names."""
    with pytest.raises(KeyError) as raised:
        getattr(tables.exchanges, read)(columns)
    assert raised.value.args == ("exchanges: no column 'api_nam'; did you mean api_name?",)


def test_columns_of_one_name(tables: kdissect.Tables) -> None:
    """A query's table can be read."""
    rows = tables.sql("select 1 a, 2 a")
    assert rows.columns == ["a", "a_1"]
    assert rows.to_pandas().to_dict("list") == {"a": [1], "a_1": [2]}


def test_notebooks_complete_names(tables: kdissect.Tables) -> None:
    """Tables as attributes beside the methods, and all names as keys."""
    assert {"exchanges", "incidents", "plot"} <= set(dir(tables))
    assert tables._ipython_key_completions_() == tables.names


def test_an_attribute_that_there_is_not(tables: kdissect.Tables) -> None:
    """The error has similar names; a method is no table."""
    for name, near in (
        ("exchange", "exchanges"),
        ("incident", "incidents"),
        ("fetch", "apis/Fetch"),
    ):
        with pytest.raises(AttributeError) as raised:
            getattr(tables, name)
        assert raised.value.args == (f"no table or method {name!r}; did you mean {near}?",)
    with pytest.raises(KeyError, match=r"no table 'incidents'; incidents\(\) is a method"):
        tables["incidents"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("apis/Prodcue", ["apis/Produce"]),
        ("apis/fetch", ["apis/Fetch"]),
        ("Fetch", ["apis/Fetch"]),
        ("exchange", ["exchanges"]),
    ],
)
def test_a_table_that_there_is_not(tables: kdissect.Tables, name: str, near: list[str]) -> None:
    """The error has similar names, or all names."""
    with pytest.raises(KeyError) as raised:
        tables[name]
    assert raised.value.args == (f"no table {name!r}; did you mean {' or '.join(near)}?",)
    with pytest.raises(KeyError, match="did you mean apis/Produce"):
        tables.api("Prodcue")
    with pytest.raises(KeyError, match=r"no table 'zzz'; there are captures, .*, apis/Fetch"):
        tables["zzz"]


def test_inputs_have_the_hashes_of_the_named_files(captures: Path, tmp_path: Path) -> None:
    """Of a compressed file the hash is that of its own bytes; other files have one, too."""
    data = (captures / "java_2_0_1.pcap").read_bytes()
    contents = {"a.pcap": data, "b.pcap.gz": gzip.compress(data), "notes.txt": b"no capture"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    inputs = kdissect.read(tmp_path, split_bytes=50_000).manifest["inputs"]
    expected = {
        str(tmp_path / name): (len(content), hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
    assert {item["path"]: (item["size"], item["sha256"]) for item in inputs} == expected
    assert [item["is_capture"] for item in inputs] == [True, True, False]
