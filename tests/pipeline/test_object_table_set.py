"""Table sets in an object store: whole or not at all, and read from there."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import kdissect
from kdissect.cli import app
from kdissect.errors import CaptureError, EnvironmentFailed, OutputError
from kdissect.pipeline import object_table_set
from kdissect.pipeline.table_set import MANIFEST, check_out, commit, read_manifest, staging
from kdissect.pipeline.table_writer import STAGING, ParquetSink
from tests.builders.tables import set_files, topics_table, write_topics
from tests.conftest import CAPTURES
from tests.objects import object_store


@pytest.fixture(scope="module")
def store():
    with object_store("tables") as found:
        yield found


def files(store, prefix: str) -> list[str]:
    return [name.removeprefix(f"{prefix}/") for name in store.names(prefix)]


def test_a_set_has_the_files_of_its_manifest(store):
    """An attempt that failed, and one that was left by a killed run, are no part of it."""
    out = store.url("a/set")
    with staging(out) as run_id:
        failed = ParquetSink(out, run_id, "t")
        failed("topics", topics_table("twice"))
        failed.close()
        again = ParquetSink(out, run_id, "t")
        again("topics", topics_table("once"))
        commit(out, run_id, again.close(), {"inputs": []})
    assert files(store, "a/set") == set_files(out)
    tables = kdissect.open(out)
    assert tables.topics.to_arrow()["topic"].to_pylist() == ["once"]
    assert tables.exchanges.num_rows == 0


def test_leftovers_of_a_killed_run_disturb_no_run(store):
    """It has no manifest; the next run writes beside it, and then removes it."""
    out = store.url("killed")
    object_table_set.begin(out, "0" * 12)
    sink = ParquetSink(out, "0" * 12, "t")
    sink("topics", topics_table("lost"))
    sink.close()
    with pytest.raises(CaptureError, match="no table set"):
        kdissect.open(out)
    check_out(out, overwrite=False)
    write_topics(out, "a")
    assert files(store, "killed") == set_files(out)


def test_an_attempt_that_comes_too_late_does_not_start(store):
    """A task of an ended run writes nothing."""
    out = store.url("late")
    with staging(out) as run_id:
        pass
    with pytest.raises(EnvironmentFailed, match="is over"):
        ParquetSink(out, run_id, "t")
    assert not store.names("late")


def test_of_two_runs_the_slower_one_fails(store):
    """Its files may be gone when it is about to list them."""
    out = store.url("two")

    def lose() -> None:
        with staging(out) as run_id:
            sink = ParquetSink(out, run_id, "t")
            sink("topics", topics_table("slow"))
            files = sink.close()
            write_topics(out, "quick")
            commit(out, run_id, files, {"inputs": []})

    with pytest.raises(EnvironmentFailed, match="removed by another"):
        lose()
    assert kdissect.open(out).topics.to_arrow()["topic"].to_pylist() == ["quick"]
    assert files(store, "two") == set_files(out)


def test_existing_objects_are_not_overwritten(store):
    """Other objects at the place raise OutputError."""
    store.put("other/notes.txt", b"mine")
    with pytest.raises(OutputError, match="other files"):
        check_out(store.url("other"), overwrite=True)
    with pytest.raises(OutputError, match="is a file"):
        check_out(store.url("other/notes.txt"), overwrite=False)
    store.put("like/topics/part-of-mine.parquet", b"mine")
    with pytest.raises(OutputError, match="other files"):
        check_out(store.url("like"), overwrite=False)
    with pytest.raises(OutputError, match="cannot be written"):
        check_out("s3://no-such-bucket/set", overwrite=False)
    assert STAGING not in "".join(store.names())


def test_manifests_are_checked(store):
    """A broken or newer manifest raises CaptureError."""
    store.put("broken/" + MANIFEST, b"{")
    with pytest.raises(CaptureError, match="not readable"):
        kdissect.open(store.url("broken"))
    store.put("newer/" + MANIFEST, json.dumps({"format_version": 99, "tables": {}}).encode())
    with pytest.raises(CaptureError, match="is a table set of format 99"):
        kdissect.open(store.url("newer"))
    out = store.url("part")
    write_topics(out, "a")
    (gone,) = read_manifest(out)["tables"]["topics"]["files"]
    store.filesystem.delete_file(f"tables/part/{gone}")
    with pytest.raises(CaptureError, match="listed in the manifest, but not there"):
        kdissect.open(out)


@pytest.fixture(scope="module")
def places(store, tmp_path_factory):
    """The same set in a folder and in the store."""
    # a capture with few tables: a verb sends requests for each of them
    read = kdissect.read(CAPTURES / "tls13.pcap.gz", keylog=CAPTURES / "tls13.keylog")
    here, there = str(tmp_path_factory.mktemp("verbs") / "set"), store.url("verbs/")
    read.write(here)
    read.write(there)
    return here, there


@pytest.mark.parametrize(
    "verb",
    [
        ["sql", "{}", "select api_name, count(*) from exchanges group by all order by all"],
        pytest.param(["readiness", "{}", "--target", "4.0", "--json"], marks=pytest.mark.heavy),
        pytest.param(["diff", "{}", "{}", "--json"], marks=pytest.mark.heavy),
    ],
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
