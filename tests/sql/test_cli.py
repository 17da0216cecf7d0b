"""`kdissect sql` as a user meets it."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from bench.measure import cpu_seconds
from kdissect.cli import app
from kdissect.errors import Error, QueryError
from tests.cases import cases
from tests.conftest import CAPTURES, ROOT
from tests.processes import KDISSECT, Done, Run, run

BEGUN_CPU_SECONDS = 3.0  # more than it takes until a query runs


def piped(tail: str, table_set: Path, *args: str) -> Done:
    command = shlex.join([*KDISSECT, "sql", str(table_set), *args])
    return run("bash", "-c", f"set -o pipefail; {command} | {tail}")


def test_a_query_from_stdin_to_a_file(table_set: Path, tmp_path: Path) -> None:
    """`-`, or no query at all, reads stdin; --out appears whole, or not at all."""
    out = tmp_path / "o.parquet"
    arguments = ["sql", str(table_set), "--format", "parquet", "-", "--out", str(out)]
    result = CliRunner().invoke(app, arguments, input="from exchanges")
    assert result.exit_code == 0, result.stderr
    failed = CliRunner().invoke(app, arguments, input="select error('late') from range(10)")
    assert isinstance(failed.exception, Error)
    assert "late" in str(failed.exception)
    assert pq.read_table(out).num_rows == 319
    assert os.listdir(tmp_path) == ["o.parquet"]


def test_the_name_of_a_file_chooses_its_format(
    kdissect: Run, table_set: Path, tmp_path: Path
) -> None:
    """Unless --format does."""
    query = "select topic from topics order by topic limit 1"
    for name, content in (
        ("a.csv", "topic\n__consumer_offsets\n"),
        ("a.CSV", "topic\n__consumer_offsets\n"),
        ("a.txt", "topic\n------------------\n__consumer_offsets\n"),
        ("a.ndjson", '{"topic": "__consumer_offsets"}\n'),
        ("a.jsonl", '{"topic": "__consumer_offsets"}\n'),
    ):
        assert not kdissect("sql", str(table_set), query, "--out", str(tmp_path / name)).stderr
        assert (tmp_path / name).read_text() == content
    out = tmp_path / "a.parquet"
    kdissect("sql", str(table_set), query, "--out", str(out))
    assert pq.read_table(out).to_pylist() == [{"topic": "__consumer_offsets"}]
    arrow = tmp_path / "a.arrow"
    kdissect("sql", str(table_set), query, "--out", str(arrow))
    with pa.ipc.open_file(arrow) as reader:
        assert reader.read_all().to_pylist() == [{"topic": "__consumer_offsets"}]
    kdissect("sql", str(table_set), query, "--format", "json", "--out", str(out))
    assert json.loads(out.read_text())["rows"] == [{"topic": "__consumer_offsets"}]


@cases("form", ["table", "parquet"], heavy=["csv", "json"])
def test_a_closed_pipe_is_quiet(table_set: Path, form: str) -> None:
    """Who reads has enough: no error, no traceback."""
    result = piped("head -c 20 >/dev/null", table_set, "from range(5000000)", "--format", form)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("query", "name"),
    [("select interval '1 s' x", "o.parquet"), ("select 'infinity'::date x", "o.csv")],
)
def test_a_value_that_a_format_cannot_hold(
    table_set: Path, tmp_path: Path, query: str, name: str
) -> None:
    """It is told, and there is no file."""
    out = tmp_path / name
    failed = CliRunner().invoke(app, ["sql", str(table_set), query, "--out", str(out)])
    assert isinstance(failed.exception, QueryError)
    assert "cannot be written" in str(failed.exception)
    assert not out.exists()


def test_a_result_does_not_replace_what_is_read(tmp_path: Path) -> None:
    """Neither a query's file nor a report may take the place of the capture."""
    capture = shutil.copy(CAPTURES / "java_0_10_2_2.pcap", tmp_path / "a.csv")
    before = capture.read_bytes()
    for name, option in (("report", "--out"), ("show", "--out"), ("report", "--inventory")):
        done = CliRunner().invoke(app, [name, str(capture), option, str(capture)])
        assert done.exit_code == 2
        assert f"Invalid value for {option}" in done.stderr
        assert capture.read_bytes() == before


def test_places_that_are_no_files(kdissect: Run, table_set: Path, tmp_path: Path) -> None:
    """A device is written to and stays one; a link keeps leading to its file."""
    command = ["sql", str(table_set), "select 7 a", "--out"]
    link, file, pipe = (tmp_path / name for name in ("link", "file", "pipe"))
    file.write_text("before")
    link.symlink_to(file)
    os.mkfifo(pipe)
    assert kdissect(*command, "/dev/null").returncode == 0
    assert Path("/dev/null").is_char_device()
    assert kdissect(*command, str(link)).returncode == 0
    assert link.is_symlink()
    assert file.read_text().split() == ["a", "-", "7"]
    with ThreadPoolExecutor(1) as reader:
        text = reader.submit(pipe.read_text)
        assert kdissect(*command, str(pipe)).returncode == 0
        assert text.result().split() == ["a", "-", "7"]
    assert pipe.is_fifo()


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
@cases("form", ["csv"], heavy=["parquet"])
def test_a_full_disk(table_set: Path, form: str) -> None:
    """One line and exit 3."""
    command = shlex.join([*KDISSECT, "sql", str(table_set), "from exchanges", "--format", form])
    done = run("sh", "-c", f"{command} > /dev/full")
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert "No space left" in done.stderr


def test_a_query_in_a_locale_without_its_letters(table_set: Path) -> None:
    """What the locale cannot read reaches Python as surrogates."""
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run(*KDISSECT, "sql", table_set, "select length('\u00e9') as n", **settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1" in done.stdout


def test_an_interrupt_ends_a_long_query(table_set: Path) -> None:
    """At once, also while DuckDB is busy with the first row; exit 130 and one line."""
    query = (
        "select count(*) from range(10_000_000) a, range(10_000_000) b "
        "where (a.range * b.range) % 7 = 3"
    )
    command = [*KDISSECT, "sql", str(table_set), query]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        while process.poll() is None and cpu_seconds(process.pid) < BEGUN_CPU_SECONDS:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert (process.returncode, error) == (130, "kdissect: interrupted\n")
