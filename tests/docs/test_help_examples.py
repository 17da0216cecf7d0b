"""The examples of every verb's --help: each runs, on captures that ship with the project.

Names that examples make up stand for what the captures have: `STANDS_FOR` says which. An example
runs in a folder of its own with the files that it names, in this process where it needs no shell.
Those of `dissect` get the in-process pipeline in Spark's place, and Spark itself among the heavy
tests. Those of `replay` plan only: there is no broker.
"""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kdissect as package
from kdissect.cli import app
from tests import console
from tests.cases import cases
from tests.conftest import CAPTURES

EXAMPLES = [
    (command.name or "", line.strip())
    for command in app.registered_commands
    for line in str(getattr(command.cls, "examples_text", "")).splitlines()
    if re.search(r"\bkdissect ", line)
]
OF_DISSECT = [line for verb, line in EXAMPLES if verb == "dissect"]
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
SHELL = re.compile(r" [|<>] ")
WRITES = re.compile(r"^kdissect [^|<>'\"]* > [\w.]+$")  # a command and the file of its output
SILENT = ("sql", "readiness", "diff")  # these verbs write results only
# Their options and sources are also those of other examples, of docs/, or of the verb's tests.
REPEATED = {
    "kdissect check tables/ --json",
    "kdissect diff before/ after/",
    "kdissect diff before/ after/ --fail-on errors,latency",
    "kdissect diff before/ after/ --json > changes.json",
    "kdissect dissect trace.pcap --out tables/",
    "kdissect dissect day1/ day2/ --out tables/ --port 19092 --master 'local[8]'",
    "kdissect incidents tables/ --fail-on broker_stall,login_failures",
    "kdissect incidents tables/ --json",
    "kdissect incidents trace.pcap",
    "kdissect readiness 'trace-*.pcap' --target 4.0",
    "kdissect report before/ after/ --inventory clients.csv --since 2026-11-21T07:30:00Z",
    "kdissect report tables/",
    "kdissect report tables/ --out monday.html --no-csv",
    "kdissect report tables/ --target 4.3 --json",
    'kdissect sql trace.pcap "from exchanges where error_code != 0"',
}

CLIENT = "127.0.0.1:44632"  # rd-c0 in librdkafka.pcap
STANDS_FOR = {
    "10.0.0.7:51234": CLIENT,
    "10.0.0.7": "127.0.0.1",
    "2026-11-21T07:30:00Z": "2026-11-21T02:15:32Z",
    "'/data/dump-": "'data/dump-",
    "--topic orders": "--topic sarama-2.8.0",
    "--client orders-7 --topic payments": "--client sarama-2.8.0 --topic sarama-2.8.0",
    "billing": "rd-classic",
    "app-%": "rd-%",
    "> 1e6": "> 1e3",
    "localhost:9092": "localhost:1",
    "candidate:9092": "localhost:1 --dry-run",
    "new:9092": "localhost:1 --dry-run",
    "old:9092": "localhost:2",
}


def on_captures(line: str) -> str:
    """The example with names that the captures have."""
    for made_up, real in STANDS_FOR.items():
        line = line.replace(made_up, real)
    return line.replace("local[8]", "local[1]")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, librdkafka: package.Tables) -> Path:
    """The files that examples name."""
    shelf = tmp_path_factory.mktemp("examples")
    for name, capture in (
        ("trace.pcap", "librdkafka.pcap"),
        ("trace-1.pcap", "librdkafka.pcap"),
        ("before.pcap", "java_2_0_1.pcap"),
        ("after.pcap", "librdkafka.pcap"),
        ("keys.log", "tls13.keylog"),
        ("orders.pcapng", "librdkafka.pcap"),
        ("trace.pcap.gz", "sarama.pcap.gz"),
        ("data/dump-1.pcap.gz", "sarama.pcap.gz"),
        ("data/dump-2.pcap", "librdkafka.pcap"),
        ("day1/a.pcap", "java_0_10_2_2.pcap"),
        ("day2/b.pcap", "java_2_0_1.pcap"),
    ):
        (shelf / name).parent.mkdir(exist_ok=True)
        (shelf / name).symlink_to(CAPTURES / capture)
    librdkafka.write(shelf / "tables")
    package.read(shelf / "day1").write(shelf / "before")
    package.read(shelf / "day2").write(shelf / "after")
    (shelf / "slow.sql").write_text("from exchanges order by latency_ms desc limit 3")
    row = next(row for row in librdkafka.exchanges.to_pylist() if row["api_key"] is not None)
    (shelf / "exchange_id").write_text(str(row["exchange_id"]))
    logged = {"client": [row["client_ip"], row["client_port"]], "total_time_ms": row["latency_ms"]}
    logged |= {name: row[name] for name in ("correlation_id", "api_key")}
    (shelf / "kafka-request.log").write_text(json.dumps(logged))
    result = CliRunner().invoke(
        app, ["replay", str(shelf / "orders.pcapng"), "--save", str(shelf / "orders.replay")]
    )
    assert result.exit_code == 0, result.output
    (shelf / "bin").mkdir()
    (shelf / "bin" / "tcpdump").write_text(f'#!/bin/sh\ncat "{shelf}/trace.pcap"\n')
    (shelf / "bin" / "tcpdump").chmod(0o755)
    return shelf


@pytest.fixture
def folder(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with these files, where the example may write."""
    for entry in shelf.iterdir():
        if entry.name == "tables":
            shutil.copytree(entry, tmp_path / entry.name)  # of its own: dissect replaces it
        else:
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@cases(
    ("verb", "line"), EXAMPLES, heavy=[(verb, line) for verb, line in EXAMPLES if line in REPEATED]
)
@pytest.mark.usefixtures("without_spark")
def test_an_example_of_help_succeeds(verb: str, line: str, folder: Path) -> None:
    """It ends well, and says or writes something."""
    if verb == "dissect" and not re.search("--overwrite|--append", line):
        shutil.rmtree(folder / "tables")
    if "--save" in line:
        (folder / "orders.replay").unlink()
    before = {path.name for path in folder.iterdir()}
    command = on_captures(line).replace("4611686018427387905", (folder / "exchange_id").read_text())
    command, _, target = command.partition(" > ") if WRITES.search(command) else (command, "", "")
    if SHELL.search(QUOTED.sub("", command)):
        output = console.run(f"set -o pipefail; {command}; echo ended with $?", folder)
        assert output.endswith("ended with 0\n"), output
        output = output.removesuffix("ended with 0\n")
    else:
        program, *arguments = shlex.split(command)
        assert program == "kdissect"
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        output = result.stdout
        assert not result.stderr or verb not in SILENT
        if target:
            (folder / target).write_text(output)
    written = [path for path in folder.iterdir() if path.name not in before]
    assert output.strip() or written
    named = re.findall(r"(?:--(?:out|save|junit|html)|>) ([\w.-]+)", QUOTED.sub("", line))
    if "--dry-run" not in command:
        assert all((folder / name).exists() for name in named)
    assert all(path.stat().st_size for path in written)


@pytest.mark.heavy
@pytest.mark.spark
@pytest.mark.parametrize("line", OF_DISSECT)
def test_an_example_of_dissect(line: str, folder: Path) -> None:
    """The same with Spark, as a process."""
    if not re.search("--overwrite|--append", line):
        shutil.rmtree(folder / "tables")
    output = console.run(f"{on_captures(line)}; echo ended with $?", folder)
    assert output.endswith("ended with 0\n"), output
    assert package.open(folder / "tables").exchanges.num_rows


def test_every_verb_has_examples() -> None:
    """Each of them is a command of that verb, and some run by default."""
    verbs = {command.name for command in app.registered_commands}
    assert {verb for verb, line in EXAMPLES if line not in REPEATED} == verbs
    assert {line for _, line in EXAMPLES} > REPEATED
    assert all(f"kdissect {verb}" in line for verb, line in EXAMPLES)
