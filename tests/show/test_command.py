"""The command as users and pipes meet it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.conftest import ROOT
from tests.show.conftest import shown

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-m", "kdissect", "show"]


def start(*args: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=ROOT, **options,
    )  # fmt: skip


def test_lines_come_as_packets_come(captures: Path, tmp_path: Path) -> None:
    """From a pipe that stays open; an interrupt ends it with 130, without a word too many."""
    data = (captures / "java_2_0_1.pcap").read_bytes()
    beginning = tmp_path / "beginning.pcap"
    beginning.write_bytes(data[:60_000])
    count = len(shown(beginning))  # with those that have no answer yet
    with start("-") as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(data[:60_000])
        process.stdin.flush()
        first = process.stdout.readline()
        assert b"ApiVersions" in first
        process.stdin.write(data[60_000:])
        process.stdin.flush()
        for _ in range(count):
            assert process.stdout.readline().count(b"127.0.0.1") == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == b"kdissect: interrupted\n"


def test_a_reader_that_has_seen_enough(captures: Path) -> None:
    """`| head -1` ends it quietly with 0."""
    with start(os.fspath(captures / "librdkafka.pcap")) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


def test_compressed_and_piped(captures: Path) -> None:
    """gzip on standard input gives the lines of the file."""
    path = captures / "sarama.pcap.gz"
    piped = subprocess.run(
        [*COMMAND, "-"], input=path.read_bytes(), capture_output=True, check=True, cwd=ROOT
    )
    assert len(piped.stdout.splitlines()) == 608


def test_usage(kdissect: Run, tmp_path: Path) -> None:
    """Exit 2 and one line for what cannot be; a warning where there is no Kafka."""
    text = tmp_path / "notes.txt"
    text.write_text("no capture")
    path = "captures/librdkafka.pcap"
    for args in (
        ["nowhere.pcap"], [os.fspath(text)], [path, "--slow", "soon"], [path, "--where", "nothing"],
        [path, "--json", "-v"],
    ):  # fmt: skip
        done = kdissect("show", *args)
        assert (done.returncode, done.stdout) == (2, ""), args
        assert len(done.stderr.strip().splitlines()) == 1
    empty = tmp_path / "empty.pcap"
    empty.write_bytes((ROOT / path).read_bytes()[:24])
    done = kdissect("show", os.fspath(empty))
    assert done.returncode == 0
    assert "no Kafka traffic" in done.stderr


def test_filters_that_nothing_passes(kdissect: Run) -> None:
    """A line says so, of how many; what does pass needs none."""
    path = "captures/librdkafka.pcap"
    done = kdissect("show", path, "--topic", "nosuch", "--json")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "kdissect: warning: 0 of 319 exchanges pass the filters\n"
    assert kdissect("show", path, "--topic", "nosuch", "--quiet").stderr == ""
    assert kdissect("show", path, "--topic", "rd-events").stderr == ""
    assert kdissect("show", path).stderr == ""


def test_hostile_names_do_not_steer_the_terminal(captures: Path, tmp_path: Path) -> None:
    """Escapes in a client id and a topic are shown as text; colours are ours alone."""
    data = (captures / "librdkafka.pcap").read_bytes()
    data = data.replace(b"rd-events", b"\x1b[31mXY\r\n")
    data = data.replace(b"rdkafka-none", b"\xe2\x80\xaeabcdefghi")
    path = tmp_path / "hostile.pcap"
    path.write_bytes(data)
    for args in ([], ["-v", "-x", "--records"]):
        done = subprocess.run(
            [*COMMAND, os.fspath(path), *args], capture_output=True, check=True, cwd=ROOT
        )
        assert b"\\x1b[31mXY\\r\\n" in done.stdout
        assert not any(byte < 32 and byte != 10 for byte in done.stdout)
        assert "\u202e" not in done.stdout.decode()


def test_colours(captures: Path) -> None:
    """None in a pipe unless asked for."""
    for args, has_colour in (([], False), (["--colour"], True)):
        with start(os.fspath(captures / "java_2_0_1.pcap"), *args) as process:
            assert process.stdout
            assert (b"\x1b[" in process.stdout.readline()) == has_colour
            process.stdout.close()


def test_nothing_heavy_is_loaded(captures: Path) -> None:
    """Neither Spark nor pandas, DuckDB or Rich's tables are imported for a list."""
    code = (
        "import sys; sys.argv = ['kdissect', 'show', sys.argv[1]]\n"
        "import os; os._exit = lambda status: (print(sorted({name.split('.')[0] for name in "
        "sys.modules}), file=sys.stderr), sys.exit(0))\n"
        "from kdissect.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, os.fspath(captures / "sarama.pcap.gz")],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    loaded = done.stderr
    for name in ("pyspark", "pandas", "duckdb", "scipy", "altair"):
        assert f"'{name}'" not in loaded
