"""The command line as a user meets it: exit codes, one clear line, removed files."""

import importlib
import inspect
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kdissect
from kdissect import read
from kdissect.cli import _is_cut_import, app, verbs
from kdissect.cli.output import some_of
from tests.builders.captures import write_packets
from tests.builders.talks import conversation
from tests.processes import KDISSECT, Done, Run, run

EXAMPLES = {
    command.name: str(getattr(command.cls, "examples_text", ""))
    for command in app.registered_commands
}


VERBS = {str(command.name): command.callback for command in app.registered_commands}


def one_line(result: Done) -> str:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("kdissect: ")
    return lines[0]


def test_version_and_help(kdissect: Run) -> None:
    """--version and --help answer on stdout; a verb's help shows examples."""
    assert run(*KDISSECT, "--version").stdout.startswith("kdissect ")
    shown = kdissect("dissect", "--help")
    assert shown.returncode == 0
    assert "Examples" in shown.stdout


def test_each_declared_option_belongs_to_a_command() -> None:
    """`options.toml` has no option that no command takes."""
    declared = tomllib.loads(Path(verbs.__file__).with_name("options.toml").read_text("utf-8"))
    taken = {name: set(inspect.signature(verb).parameters) for name, verb in VERBS.items()}
    taken["shared"] = set().union(*taken.values())
    assert {name: sorted(set(options) - taken[name]) for name, options in declared.items()} == {
        name: [] for name in declared
    }


def test_each_option_has_one_name() -> None:
    """But for the end of a time, as --from and --to are a pair, and for a spelling."""
    declared = tomllib.loads(Path(verbs.__file__).with_name("options.toml").read_text("utf-8"))
    flags = [option[0] for options in declared.values() for option in options.values()]
    several = {flag for flag in flags if " --" in flag}
    assert several == {"--until --to", "--colour/--no-colour --color/--no-color"}


def test_closed_streams() -> None:
    """A parent that closed stdin, stdout or stderr gets the exit code, no traceback."""
    command = f"{sys.executable} -m kdissect"
    for text, expected in (
        ("show - <&-", 2),
        ("--version >&-", 0),
        ("--version 2>&-", 0),
        ("definitions Fetch <&- >&- 2>&-", 0),
    ):
        result = run("sh", "-c", f"{command} {text}")
        assert result.returncode == expected, result.stderr
        assert "Traceback" not in result.stderr


USAGE = r"""
--nonsense                                            | --nonsense
dissect                                               | Missing argument 'CAPTURE'
dissect x.pcap --out o --conf novalue                 | --conf: 'novalue' is not KEY=VALUE
dissect no/such.pcap --out {out}                      | no/such.pcap: no such file or directory
dissect {tmp}/empty.pcap --out {out}                  | /empty.pcap: the file is empty
dissect {tmp}/text.pcap --out {out}                   | /text.pcap: not a pcap or pcapng file
dissect {tmp}/in --out {out}                          | /in: no capture in this folder
dissect {capture} --out {tmp}/in                      | /in: is a folder with other files
dissect {capture} --out {tmp}/text.pcap/out           | /text.pcap/out: cannot be written
dissect {capture} --out /proc/none/out                | /out: cannot be written (No such file
dissect {capture} --out {out} --from soon             | 'soon' is no time
dissect {capture} --out {out} --host broker           | 'broker' is no IP address
dissect {capture} --out {out} --into lake.kafka --append | replace rows of an earlier run
dissect {capture} --out {out} --into lake.kafka --keep-state | replace rows of an earlier run
dissect {capture} --out {out} --format delta          | --format is for --into
dissect nowhere.pcap --limit frame-sizes=1 --out {out} | did you mean frame_size?
show nowhere.pcap --limit frame-sizes=1               | did you mean frame_size?
extract nowhere.pcap --limit frame-sizes=1 --out {out} | did you mean frame_size?
extract {capture} --exchange 12345 --out {tmp}/x.pcapng | no exchange 12345
show nowhere.pcap                                     | nowhere.pcap: no such file or directory
show {tmp}/text.pcap                                  | /text.pcap: not a pcap or pcapng file
show {capture} --keylog {tmp}/text.pcap | /text.pcap: no line of it is one of a TLS key log
show {capture} --keylog {tmp}/nowhere                 | /nowhere: No such file
show {capture} --slow soon                            | 'soon' is no
show {capture} --slow "5 parsecs"                     | is no duration: give 50ms
show {capture} --slow=-3ms                            | is no duration: give 50ms
show {capture} --slow ""                              | is no duration: give 50ms
show {capture} --where nothing                        | --where
show {capture} --where "no_such_column = 1"           | --where
show {capture} --where "latency_ms >"                 | --where
show {capture} --where "1; drop table x"              | --where
show {capture} --where "exists (select * from read_csv('/etc/passwd'))" | --where
show {capture} --where "client_id in (select content from read_text('/etc/passwd'))" | --where
show {capture} --json -v                              | --json
show {capture} --columns latncy                       | --columns
show {capture} --columns time --json                  | --columns
show {capture} --columns ,                            | --columns
show {capture} --out {tmp}/x.doc                      | x.doc: no format has this ending
show {capture} --out {tmp}/x.csv -v                   | it writes columns
show {capture} --out {tmp}/x.csv --columns ends       | no column 'ends'
definitions Fetsh                                     | no API is named 'Fetsh'; did you mean Fetch?
definitions Fetch x                                   | Invalid value for '[VERSION]'
definitions Fetch 19                                  | Fetch has no version 19; known are 0-18
definitions Fetch 1 99                                | Fetch has no version 99
definitions metadta                                   | did you mean Metadata
definitions Offset                                    | or OffsetCommit
show {capture} --api 99999                            | no API has key 99999
show {capture} --exchange 99999999999999999999        | 9223372036854775807
show {capture} --port 99999                           | 65535
sql {set} "select * form exchanges"                   | Parser Error
sql {set} "select nothing from exchanges"             | "nothing" not found
sql {set} "copy exchanges to 'x.csv'"                 | this is COPY
sql {set} "select 1" --memory-limit lots              | memory limit lots
sql {set} "select 1" --format xml                     | 'xml'
sql {set} "select 1" --out no/such/folder/x           | no/such/folder/x: cannot be written
sql {set} "select 1" --out {tmp}/in                   | /in: is a folder; name a file
sql {set} "select 1" --out {tmp}/a.xlsx               | .csv, .json, .ndjson, .parquet, .arrow
sql {tmp}/in "select 1" | /in: no table set (_kdissect.json is missing), and no capture in it
sql {tmp}/text.pcap "select 1"                        | /text.pcap: not a pcap or pcapng file
sql - "select 1" | a stream of unknown length; kdissect dissect -
check {tmp}/in                                        | /in: no table set
diff {set} {tmp}/in                                   | /in: no table set
diff {set} {set} --fail-on speed                      | --fail-on speed: no such kind
diff {set} {set} --memory-limit x                     | memory limit x
incidents {set} --fail-on bda                         | 'bda' is none of bad, warn, info, advert
report {tmp}/none                                     | /none: no such file or directory
summary {set} {set}                                   | librdkafka.pcap: is in two of the sources
summary {capture} --spool {tmp}/none                  | /none: is no folder
summary - /dev/null | -: a stream of unknown length; kdissect dissect - /dev/null --out DIR makes
summary {capture} --in-process-max 100kB | : 301 kB are more than --in-process-max 100 kB;
summary {capture} --in-process-max 1 | than --in-process-max 1 B; kdissect dissect
readiness {capture} --target 4.0 --in-process-max 1 | than --in-process-max 1 B; kdissect dissect
sql {capture} "select 1" --in-process-max 1 | than --in-process-max 1 B; kdissect dissect
diff {capture} {capture} --in-process-max 1 | than --in-process-max 1 B; kdissect dissect
report {capture} --out {out} --in-process-max 1 | than --in-process-max 1 B; kdissect dissect
report {set} --out {tmp}                              | is a folder
report {set} --out {tmp}/x.html --target 9.9          | 9.9
report {set} --out /dev/null/x.html                   | /dev/null
readiness {set}                                       | Missing option '--target'
readiness {set} --target 9.9 | release '9.9' is not known; known are 2.4 to 4.3
readiness {set} --target latest                       | release 'latest' is not known
readiness {set} --target 4.0 --fail-on ok             | 'ok' is not one of 'breaks', 'unknown'
readiness {set} --target 4.0 --since yesterday        | 'yesterday' is no time
readiness {set} --target 4.0 --inventory {tmp}/no/c.csv | /no/c.csv: is a folder, or in none
readiness {set} {capture} --target 4.0                | name each capture once
replay {capture} --dry-run --api fetsh                | no API is named 'fetsh'; did you mean Fetch?
replay {capture} --dry-run --api *zz?                 | '--api': no API is named '*zz?'
replay {capture} --dry-run --until soon               | '--until': 'soon' is no time
replay {capture} --dry-run --from 2026-11-22 --until 2026-11-21 | 2026-11-21 is not after
replay {capture} --dry-run --to 9092                  | --to: '9092' is no HOST:PORT
replay {capture} --dry-run --to h:1 --against h       | --against: 'h' is no HOST:PORT
replay {capture} --dry-run --timeout soon             | --timeout: 'soon' is no span of time
replay {capture} --dry-run --max-gap 1y               | --max-gap: '1y' is no span of time
replay {set} --dry-run                                | is a table set; name its captures
replay absent.pcap --to h:1 --control-runs 1          | at least 2
replay absent.pcap --to h:1 --control-runs 2 --baseline x.jsonl | --baseline
replay absent.pcap --to h:1 --rename topic:a=b --rename topic:a=c | two new names
replay absent.pcap --to h:1 --rename topic:a=x --rename topic:b=x | two names become one
replay {capture} --save {tmp}/x.replay --topic rd-events | --save: it keeps all requests
replay {capture} --to h:1 --rules {tmp}/rules.toml    | rules.toml: each rule begins with the line
replay absent.pcap --to h:1 --rename client:a=b       | KIND:OLD=NEW
replay {capture} --to h:1 --sasl GSSAPI --sasl-user u | none of PLAIN
replay {capture} --to h:1 --sasl PLAIN                | --sasl-user
replay {capture} --to h:1 --tls-ca {tmp}/no.pem       | /no.pem: no such file
replay {capture} --to h:1 --tls-ca {tmp}/text.pcap    | PEM
replay {capture} --to h:1 --tls-cert {tmp}/text.pcap  | cannot be used
"""


@pytest.mark.parametrize("case", USAGE.strip().splitlines(), ids=lambda case: case.split(" |")[0])
def test_bad_usage(
    kdissect: Run, tmp_path: Path, captures: Path, table_set: Path, case: str
) -> None:
    """Exit 2 with one line that names the fault; nothing on stdout, and nothing written."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("mine")
    (tmp_path / "empty.pcap").write_bytes(b"")
    (tmp_path / "text.pcap").write_text("not a capture at all")
    (tmp_path / "rules.toml").write_text("[rule]\nname = 'a'\n")
    before = sorted(tmp_path.rglob("*"))
    command, said = case.split(" | ")
    places = {"tmp": tmp_path, "out": tmp_path / "out", "set": '"{set}"'}
    places |= {"capture": captures / "librdkafka.pcap"}
    words = [word.format(set=table_set) for word in shlex.split(command.format(**places))]
    result = kdissect(*words)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in one_line(result)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_that_is_no_utf8(kdissect: Run, tmp_path: Path, captures: Path) -> None:
    """One line for a capture and a set; in a folder the file is listed, with the reason."""
    odd, whole = str(tmp_path / "in" / "b\udcff.pcap"), str(captures / "kafkajs.pcap.gz")
    (tmp_path / "in").mkdir()
    shutil.copy(whole, tmp_path / "in" / "a.pcap.gz")
    shutil.copy(whole, odd)
    for words in (["show", odd], ["summary", odd], ["dissect", whole, "--out", odd + "s"]):
        result = kdissect(*words)
        assert (result.returncode, result.stdout) == (2, "")
        assert "the name is no UTF-8; rename it" in one_line(result)
    captured = read(tmp_path / "in").captures.to_pylist()
    assert [row["error"] for row in captured] == [None, "the name is no UTF-8; rename it"]
    assert kdissect("report", whole, "--out", odd + ".html").returncode == 0
    keys = shutil.copy(captures / "tls13.keylog", odd + ".keys")
    shown = kdissect("show", str(captures / "tls13.pcap.gz"), "--keylog", keys)
    assert len(shown.stdout.splitlines()) == 182


def test_no_java(
    kdissect: Run, tmp_path: Path, captures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Java one line names the package to install; exit code 3."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", "")
    result = kdissect("dissect", str(captures / "librdkafka.pcap"), "--out", str(tmp_path / "o"))
    assert result.returncode == 3
    assert "Java 17" in one_line(result)
    assert not (tmp_path / "o").exists()


@pytest.mark.usefixtures("without_spark")
def test_a_cut_capture_gives_its_whole_packets(
    kdissect: Run, tmp_path: Path, captures: Path
) -> None:
    """A capture cut in the middle: exit 0, its exchanges, and a capture_cut anomaly."""
    whole = (captures / "librdkafka.pcap").read_bytes()
    (tmp_path / "cut.pcap").write_bytes(whole[: len(whole) // 2])
    out = tmp_path / "out"
    result = kdissect("dissect", str(tmp_path / "cut.pcap"), "--out", str(out), "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["totals"]["exchanges"] > 50
    assert document["anomalies"]["capture_cut"] == 1
    # the same command again refuses, and leaves the set
    again = kdissect("dissect", str(tmp_path / "cut.pcap"), "--out", str(out))
    assert again.returncode == 2
    assert "overwrite replaces it" in one_line(again)
    assert (out / "_kdissect.json").exists()


@pytest.mark.usefixtures("without_spark")
def test_a_capture_without_kafka(kdissect: Run, tmp_path: Path) -> None:
    """No Kafka found: exit 0 with a warning, tables all the same."""
    text = b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"
    path = write_packets(tmp_path / "http.pcap", conversation([(0, text)], ports=(4000, 80)))
    result = kdissect("dissect", str(path), "--out", str(tmp_path / "out"), "--json")
    assert result.returncode == 0, result.stderr
    assert "no Kafka traffic" in one_line(result)
    assert json.loads(result.stdout)["totals"]["exchanges"] == 0
    data = bytearray(path.read_bytes())
    data[20] = 147  # a link type that its user defines
    path.write_bytes(data)
    told = kdissect("dissect", str(path), "--out", str(tmp_path / "out"), "--overwrite")
    assert "ignored packets: " in told.stderr
    assert "link_type_147" in told.stderr


def test_definitions(kdissect: Run) -> None:
    """An API by name or key; all of them as JSON."""
    assert (
        kdissect("definitions", "fetch", "12").stdout == kdissect("definitions", "1", "12").stdout
    )
    assert len(json.loads(kdissect("definitions", "--json").stdout)["apis"]) == 93


def test_an_interrupt_while_modules_are_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C during imports ends with exit code 130 and one line."""

    def cut() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kdissect.cli.main", cut)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module("kdissect.__main__").main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "kdissect: interrupted\n"


def test_an_interrupt_that_a_compiled_module_hides() -> None:
    """pandas makes a SystemError of it, numpy an ImportError; one of its own is a fault."""

    def raised(kind: type[Exception], by: type[BaseException]) -> Exception:
        error = kind("initialization failed")
        error.__context__ = by()
        return error

    assert _is_cut_import(raised(SystemError, KeyboardInterrupt))
    assert _is_cut_import(raised(ImportError, KeyboardInterrupt))
    assert not _is_cut_import(raised(ImportError, ValueError))
    assert not _is_cut_import(raised(ValueError, KeyboardInterrupt))


def test_an_interrupt_of_the_summary(
    tmp_path: Path, captures: Path, without_spark: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables are written: the run succeeded, and says so."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kdissect.summary.summarise", interrupted)
    out = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["dissect", str(captures / "librdkafka.pcap"), "--out", str(out)]
    )
    assert done.exit_code == 0
    assert f"interrupted; {out} is written" in done.stderr
    assert kdissect.open(out).exchanges.num_rows > 300


def test_an_interrupt_gives_one_line(tmp_path: Path, captures: Path) -> None:
    """SIGINT during a run gives exit code 130 and one line, and leaves no file."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "kdissect", "dissect", str(captures / "librdkafka.pcap")]
    with subprocess.Popen(
        [*command, "--out", str(out)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        while process.poll() is None and not list((out / "_staging").glob("*/")):
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        error = process.stderr.read()
    assert process.returncode == 130
    assert error.strip().splitlines()[-1] == "kdissect: interrupted; nothing was written"
    assert "Traceback" not in error
    assert not out.exists()


def test_replay_takes_apis_as_show_does(kdissect: Run) -> None:
    """In any case, with * and ?, by key."""
    sent = set()
    for text in ("Fetch", "fetch", "F?TCH", "1"):
        done = kdissect("replay", "captures/librdkafka.pcap", "--dry-run", "--api", text)
        sent.add(done.stdout)
    assert len(sent) == 1
    (shown,) = sent
    assert "Plan for captures/librdkafka.pcap: 39 of 319 requests" in shown
    some = kdissect("replay", "captures/librdkafka.pcap", "--dry-run", "--api", "list*").stdout
    rows = [line.split() for line in some.splitlines()]
    chosen = {row[0] for row in rows if len(row) > 2 and row[1] == "read" and row[2] != "-"}
    assert chosen == {"ListOffsets", "ListGroups"}


@pytest.mark.parametrize("verb", EXAMPLES)
def test_examples_of_the_help_can_be_copied(
    verb: str, kdissect: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command is broken into lines: a shell can run each example."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = kdissect(verb, "--help").stdout.partition("Examples:")[2]
    given = EXAMPLES[verb].strip().splitlines()
    listed = shown.strip().splitlines()
    assert [shlex.split(line) for line in listed] == [shlex.split(line) for line in given]


def test_a_line_names_a_few() -> None:
    """And counts the others."""
    assert some_of(["a"]) == "a"
    assert some_of([str(n) for n in range(8)]) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert some_of([str(n) for n in range(2000)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 1,992 more"
