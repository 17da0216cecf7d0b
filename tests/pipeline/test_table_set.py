"""A table set becomes visible whole or not at all."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import kdissect
from kdissect import api
from kdissect.cli import app
from kdissect.errors import CaptureError, OutputError
from kdissect.pipeline import table_set
from kdissect.pipeline.set_folder import STAGING, SetFolder, write_lock
from kdissect.pipeline.table_set import MANIFEST, check_out, commit, read_manifest, staging, writing
from kdissect.pipeline.table_writer import ParquetSink
from kdissect.tables.schemas import FIXED_TABLES
from tests.builders.tables import NO_INPUTS, set_files, topics_in, topics_table, write_topics
from tests.cases import cases
from tests.conftest import CAPTURES
from tests.objects import Store, files_in


@pytest.fixture(params=["folder", "store"])
def place(request, store: Store, tmp_path: Path) -> tuple[str, Callable[[], list[str]]]:
    """A place for a set, and a function that lists the files there."""
    if request.param == "store":
        return store.url(tmp_path.name), lambda: store.names(tmp_path.name)
    out = tmp_path / "set"
    return str(out), lambda: files_in(out)


def test_a_set_has_every_fixed_table_and_no_staging(tmp_path: Path) -> None:
    """Empty tables are files with their schema, so that readers find it."""
    out = tmp_path / "set"
    write_topics(str(out), "a", "b")
    document = read_manifest(str(out))
    assert document["tables"]["topics"]["rows"] == 2
    assert not (out / STAGING).exists()
    for name, schema in FIXED_TABLES.items():
        for file in document["tables"][name]["files"]:
            assert pq.read_schema(out / file).names == schema.names


def test_rows_lie_in_the_order_of_their_times(tmp_path: Path) -> None:
    """Connections come bucket by bucket; in a file they are sorted, for readers that skip."""
    out = tmp_path / "set"
    schema = FIXED_TABLES["connections"]
    with staging(str(out)) as run_id:
        sink = ParquetSink(str(out), run_id, "t")
        for second in (3, 1, 2):
            rows = [{"first_time": second * 10**6, "client_ids": ["a", "b"]}]
            sink("connections", pa.Table.from_pylist(rows, schema=schema))
        commit(str(out), run_id, sink.close(), NO_INPUTS)
    (file,) = read_manifest(str(out))["tables"]["connections"]["files"]
    times = pq.read_table(out / file)["first_time"].to_pylist()
    assert [time.second for time in times] == [1, 2, 3]


def test_a_failing_run_leaves_the_old_set(place) -> None:
    """An exception before the commit removes only what the run staged."""
    out, files = place
    write_topics(out, "a")
    before = files()

    def fail() -> None:
        with staging(out) as run_id:
            sink = ParquetSink(out, run_id, "t")
            sink("topics", topics_table("b"))
            sink.close()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert files() == before
    assert topics_in(out) == ["a"]


def test_overwriting_replaces_the_set(place) -> None:
    """A set needs --overwrite; after a commit only the new set's files are there."""
    out, files = place
    write_topics(out, "a")
    with pytest.raises(OutputError, match="overwrite replaces it"):
        check_out(out, overwrite=False)
    check_out(out, overwrite=True)
    write_topics(out, "b", "c")
    assert files() == set_files(out)
    assert topics_in(out) == ["b", "c"]


def test_a_failed_first_run_leaves_nothing(tmp_path: Path) -> None:
    """A folder that the run made goes with it."""
    out = str(tmp_path / "set")
    with pytest.raises(RuntimeError), writing(out, overwrite=False), staging(out):
        raise RuntimeError
    assert not (tmp_path / "set").exists()


def test_an_interrupt_as_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays, also of a run that has only just made its folder."""
    begin = SetFolder.begin

    def cut(place: SetFolder, run_id: str) -> None:
        begin(place, run_id)
        raise KeyboardInterrupt

    monkeypatch.setattr(SetFolder, "begin", cut)
    out = tmp_path / "set"
    with pytest.raises(KeyboardInterrupt), writing(str(out), overwrite=False), staging(str(out)):
        pass
    assert not out.exists()


@pytest.mark.parametrize("name", ["notes.txt", "topics/part-of-mine.parquet"])
def test_existing_files_are_not_overwritten(place, name: str) -> None:
    """--out with other files is refused, with nothing staged."""
    out, files = place
    SetFolder(out).write(name, b"mine")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="other files"):
            check_out(out, overwrite=overwrite)
    with pytest.raises(OutputError, match="is a file"):
        check_out(f"{out}/{name}", overwrite=False)
    assert files() == [name]


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (None, "no table set"),
        ("{", "is no manifest of a table set"),
        ("[]", "is no manifest of a table set"),
        ("{}", "is no manifest of a table set"),
        (
            '{"format_version": 99, "tables": {}}',
            "of format 99, .* reads format 1; dissect the captures",
        ),
    ],
    ids=["missing", "cut", "a list", "empty", "newer"],
)
def test_manifests_are_checked(place, manifest: str | None, message: str) -> None:
    """A missing manifest, a broken one and a newer one have different errors."""
    out, _ = place
    SetFolder(out).write(MANIFEST if manifest else "notes.txt", (manifest or "").encode())
    with pytest.raises(CaptureError, match=message):
        kdissect.open(out)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("tables", None), ("tables", []), ("tables.topics", None), ("tables.topics.files", "x"),
        ("tables.topics.rows", "1"), ("inputs", {}), ("inputs[0]", "x"), ("inputs[0].path", None),
        ("totals.bytes", None), ("totals.records", []), ("options.ports", 9092), ("timings", None),
        ("state", 5), ("state.missing", {}), ("state.final", None),
    ],
)  # fmt: skip
def test_a_damaged_manifest(tmp_path: Path, place: str, wrong: object) -> None:
    """The error names the place of what is missing (None) or of another type."""
    out = tmp_path / "set"
    write_topics(str(out), "a")
    document = json.loads((out / MANIFEST).read_text())
    document["inputs"] = [{"path": "a.pcap", "size": 1, "sha256": None, "is_capture": True}]
    around, known = document, {"_state/known": {"rows": 1, "files": ["x"]}}
    document["state"] = {"tables": known, "final": {}}
    if place == "state.missing":
        document["state"] = {}
    *above, last = place.replace("[0]", ".0").split(".")
    for key in above:
        around = around[0 if key == "0" else key]
    if wrong is None:
        del around[last]
    else:
        around[0 if last == "0" else last] = wrong
    (out / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(CaptureError, match=re.escape(f"is damaged at {place};")):
        read_manifest(str(out))


def test_a_manifest_is_no_table_set(tmp_path: Path) -> None:
    """Its path is not that of the set."""
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(CaptureError, match="is a file; a table set is a folder"):
        read_manifest(str(tmp_path / MANIFEST))


def test_a_listed_file_that_is_damaged_or_gone(place) -> None:
    """The error names it."""
    out, _ = place
    write_topics(out, "a")
    (gone,) = read_manifest(out)["tables"]["topics"]["files"]
    SetFolder(out).write(gone, b"PAR1")
    with pytest.raises(CaptureError, match=re.escape(gone)):
        kdissect.open(out)
    SetFolder(out).remove([gone])
    with pytest.raises(CaptureError, match="listed in the manifest, but not there"):
        kdissect.open(out)


def test_an_attempt_that_failed_is_no_part_of_a_set(place) -> None:
    """Its files are removed with the run."""
    out, files = place
    with staging(out) as run_id:
        for name in ("twice", "once"):
            sink = ParquetSink(out, run_id, "t")
            sink("topics", topics_table(name))
            staged = sink.close()
        commit(out, run_id, staged, NO_INPUTS)
    assert files() == set_files(out)
    assert topics_in(out) == ["once"]
    assert kdissect.open(out).exchanges.num_rows == 0


def test_the_quicker_of_two_runs_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --overwrite a run does not replace a set that appeared before its lock."""
    out = tmp_path / "set"

    def late(target: str) -> Any:
        write_topics(str(out), "the other's")
        return write_lock(target)

    monkeypatch.setattr(table_set, "write_lock", late)
    with pytest.raises(OutputError, match="holds a table set already"):
        api.Tables({}, {}).write(out)
    assert read_manifest(str(out))["tables"]["topics"]["rows"] == 1


@pytest.fixture(scope="module")
def places(store, tmp_path_factory):
    """The same set in a folder and in the store."""
    # a capture with few tables: a verb sends requests for each of them
    read = kdissect.read(CAPTURES / "tls13.pcap.gz", keylog=CAPTURES / "tls13.keylog")
    here = str(tmp_path_factory.mktemp("verbs") / "set")
    read.write(here)
    there = store.url("verbs/")
    read.write(there)
    return here, there


@cases(
    "verb",
    [["sql", "{}", "select api_name, count(*) from exchanges group by all order by all"]],
    heavy=[["readiness", "{}", "--target", "4.0", "--json"], ["diff", "{}", "{}", "--json"]],
    ids=lambda verb: verb[0],
)
def test_verbs_print_the_same_for_a_set_in_a_store(places, verb):
    """The output is that of the set in a folder."""
    here, there = places
    assert kdissect.open(there).names == kdissect.open(here).names
    results = [
        CliRunner().invoke(app, [word.format(place) for word in verb]) for place in (here, there)
    ]
    assert results[0].exit_code == results[1].exit_code
    assert results[0].output.replace(here, there) == results[1].output


@pytest.mark.heavy
def test_a_set_in_a_store_has_a_report(places, tmp_path):
    """The page names the capture."""
    html = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", places[1], "--out", str(html), "--quiet"])
    assert result.exit_code == 0, result.output
    assert "tls13" in html.read_text()
