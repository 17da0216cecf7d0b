"""Every verb that reads a table set takes captures too."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import kdissect
from kdissect.accounts import check
from kdissect.api import joined_sets
from kdissect.cli import app
from kdissect.cli.options import SourceOptions
from kdissect.cli.sources import open_source, parse_size
from kdissect.errors import CaptureError
from tests.cases import cases
from tests.conftest import CAPTURES
from tests.pipeline.appending import rotated

VERBS: dict[str, Callable[[str, Path], list[str]]] = {
    "summary": lambda source, _: [source, "--json"],
    "readiness": lambda source, _: [source, "--target", "4.0", "--json"],
    "sql": lambda source, _: [source, "select distinct api_name from exchanges order by all"],
    "diff": lambda source, _: [source, source, "--json"],
    "report": lambda source, out: [source, "--json", "--no-csv", "--out", str(out / "x.html")],
}
NAMES = ("java_*.pcap", "java_0_10_2_2.pcap")
OWN = {"out", "timings", "source", "totals"}  # of a set on disk, or of the run that made it


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory, captures: Path) -> Path:
    """A folder with a capture and another file."""
    folder = tmp_path_factory.mktemp("sources") / "folder"
    folder.mkdir()
    shutil.copy(captures / "java_0_10_2_2.pcap", folder)
    (folder / "notes.txt").write_text("not a capture")
    return folder


@pytest.fixture(scope="module")
def table_set(capture: Path) -> Path:
    """The same, dissected."""
    out = capture.parent / "tables"
    kdissect.read(capture).write(out)
    return out


def printed(verb: str, source: object, out: Path) -> Any:
    done = CliRunner().invoke(app, [verb, *VERBS[verb](os.fspath(source), out)])
    assert done.exit_code == (1 if verb == "readiness" else 0), done.output
    if verb == "sql":
        return done.stdout
    # DuckDB adds floats in the order of its threads
    document = json.loads(done.stdout, parse_float=lambda text: round(float(text), 6))
    return {name: value for name, value in document.items() if name not in OWN}


# all verbs find captures by the same function: a glob and a file for one of them
@cases(
    ("verb", "name"),
    [*((verb, ".") for verb in VERBS), *(("summary", name) for name in NAMES)],
    heavy=[(verb, name) for verb in VERBS if verb != "summary" for name in NAMES],
)
def test_captures_and_table_sets_give_the_same(
    verb: str, name: str, capture: Path, table_set: Path, tmp_path: Path
) -> None:
    """A folder, a glob or a file gives the output of the table set."""
    expected = printed(verb, table_set, tmp_path)
    assert expected
    found = printed(verb, capture / name, tmp_path)
    if verb in ("summary", "report") and name != ".":
        expected["skipped"] = found["skipped"] = []
        expected["overview"] = found["overview"] = {}
    assert found == expected


def test_the_same_packets_in_other_files_are_refused(
    tmp_path: Path, librdkafka: kdissect.Tables
) -> None:
    """A set of rotated files and the file that they were cut from have the same connections."""
    parts = rotated(CAPTURES / "librdkafka.pcap", 3, tmp_path / "parts")
    with pytest.raises(CaptureError, match="38 connections"):
        joined_sets([kdissect.read(parts), librdkafka])


def test_the_choices_of_several_sets(librdkafka: kdissect.Tables) -> None:
    """A conclusion over all sets knows what one of them lacks, in any order."""
    times = librdkafka.exchanges.to_arrow(["request_time"])["request_time"].sort().to_pylist()
    part = kdissect.read(CAPTURES / "librdkafka.pcap", until=times[len(times) // 2])
    other = kdissect.read(CAPTURES / "incidents" / "broker_killed.pcap.gz")
    for sets in ([part, other], [other, part]):
        tables = joined_sets(sets)
        assert check(tables)["faults"] == []
        texts = tables.incidents().to_arrow()["text"].to_pylist()
        assert texts
        assert all("kdissect saw only these exchanges: " in text for text in texts)
        assert all("all connections" in text for text in texts)


def test_a_summary_is_the_output_of_dissect(capture: Path, table_set: Path) -> None:
    """Text for people by default."""
    done = CliRunner().invoke(app, ["summary", str(table_set)])
    assert "166 exchanges" in " ".join(done.stdout.split())
    assert f"Skipped {capture / 'notes.txt'}" in done.stdout.replace("\n", "")


def test_options_of_captures_are_refused_for_a_table_set(table_set: Path) -> None:
    """They would do nothing."""
    for options in (SourceOptions(keylog=["k.log"]), SourceOptions(reveal_secrets=True)):
        with pytest.raises(typer.BadParameter, match="is a table set") as error:
            open_source([str(table_set)], options)
        assert error.value.param_hint == options.flags_given[0]


def test_options_reach_the_captures(captures: Path) -> None:
    """A key log opens TLS."""
    path = [str(captures / "tls13.pcap.gz")]
    with_keys = open_source(path, SourceOptions(keylog=[str(captures / "tls13.keylog")]))
    assert with_keys.exchanges.num_rows > open_source(path, SourceOptions()).exchanges.num_rows


@pytest.mark.parametrize(
    ("text", "size"),
    [("256MB", 256_000_000), ("1.5GiB", 3 << 29), ("10 k", 10_000), ("77", 77), ("1tb", 10**12)],
)
def test_sizes_have_units(text: str, size: int) -> None:
    """Sizes have decimal and binary units; other text is refused."""
    assert parse_size(text) == size
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text + "x")
