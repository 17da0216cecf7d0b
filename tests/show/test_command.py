"""The command as users and pipes meet it."""

import contextlib
import fcntl
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import termios
import time
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kdissect as package
from kdissect.pipeline.options import Options
from kdissect.pipeline.selection import Selection
from kdissect.show import listing
from kdissect.show.columns import fitted
from kdissect.show.listing import Exchanges
from kdissect.show.loop import Style
from kdissect.show.style import Clock
from kdissect.tables.schemas import EXCHANGES
from kdissect.text import display_width
from tests.builders.showing import shown
from tests.cases import cases
from tests.conftest import ROOT
from tests.processes import KDISSECT, Run

PIPED = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
COMMAND = (*KDISSECT, "show")


def start(*args: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=ROOT, env=PIPED, **options,
    )  # fmt: skip


def test_lines_come_as_packets_come(captures: Path, tmp_path: Path) -> None:
    """From a pipe that stays open; an interrupt ends it with 130, without a word too many."""
    data = (captures / "java_2_0_1.pcap").read_bytes()
    beginning = tmp_path / "beginning.pcap"
    beginning.write_bytes(data[:60_000])
    count = len(shown(beginning))  # with those that have no answer yet
    with start("-") as process:
        process.stdin.write(data[:60_000])
        process.stdin.flush()
        first = process.stdout.readline()
        assert b"ApiVersions" in first
        process.stdin.write(data[60_000:])
        process.stdin.flush()
        for _ in range(count):
            assert process.stdout.readline().count(b"127.0.0.1") == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        assert process.stderr.read() == b"kdissect: interrupted\n"


def test_a_reader_that_has_seen_enough(captures: Path) -> None:
    """`| head -1` ends it quietly with 0."""
    with start(os.fspath(captures / "librdkafka.pcap")) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
        assert process.stderr.read() == b""


def test_compressed_and_piped(captures: Path) -> None:
    """gzip on standard input gives the lines of the file."""
    path = captures / "sarama.pcap.gz"
    piped = subprocess.run(
        [*COMMAND, "-"], input=path.read_bytes(), capture_output=True, check=True, cwd=ROOT
    )
    assert len(piped.stdout.splitlines()) == 608


def test_a_capture_without_kafka_gives_a_warning(kdissect: Run, tmp_path: Path) -> None:
    """It has a header, and no packet."""
    empty = tmp_path / "empty.pcap"
    empty.write_bytes((ROOT / "captures/librdkafka.pcap").read_bytes()[:24])
    done = kdissect("show", os.fspath(empty))
    assert done.returncode == 0
    assert "no Kafka traffic" in done.stderr


def test_why_packets_were_not_read(kdissect: Run, tmp_path: Path) -> None:
    """All packets have a link type that its user defines."""
    data = bytearray((ROOT / "captures/librdkafka.pcap").read_bytes())
    data[20] = 147
    path = tmp_path / "user.pcap"
    path.write_bytes(data)
    told = kdissect("show", os.fspath(path)).stderr
    assert told.endswith("user.pcap; ignored packets: 1,265 unsupported_link_type_147\n")


def test_filters_that_nothing_passes(kdissect: Run) -> None:
    """A line has the count of exchanges if filters select no exchange."""
    path = "captures/librdkafka.pcap"
    done = kdissect("show", path, "--topic", "nosuch", "--json")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "kdissect: warning: 0 of 319 exchanges pass the filters\n"
    assert kdissect("show", path, "--topic", "nosuch", "--quiet").stderr == ""
    assert kdissect("show", path, "--topic", "rd-events").stderr == ""
    assert kdissect("show", path).stderr == ""


def hostile(captures: Path, tmp_path: Path, topic: bytes) -> str:
    """A capture with another topic of nine bytes, and a client id that turns writing around."""
    data = (captures / "librdkafka.pcap").read_bytes().replace(b"rd-events", topic)
    path = tmp_path / "hostile.pcap"
    path.write_bytes(data.replace(b"rdkafka-none", b"\xe2\x80\xaeabcdefghi"))
    return os.fspath(path)


def test_hostile_names_do_not_steer_the_terminal(
    kdissect: Run, captures: Path, tmp_path: Path
) -> None:
    """Escapes in a client id and a topic are shown as text; colours are ours alone."""
    path = hostile(captures, tmp_path, b"\x1b[31mXY\r\n")
    for args in ([], ["-v", "-x", "--records"]):
        lines = kdissect("show", path, *args).stdout
        assert "\\x1b[31mXY\\r\\n" in lines
        assert not any(ord(letter) < 32 and letter != "\n" for letter in lines)
        assert "\u202e" not in lines


def test_a_pipe_has_colours_only_with_the_option(kdissect: Run, captures: Path) -> None:
    """Output into a pipe has colours only with --colour."""
    path = os.fspath(captures / "java_2_0_1.pcap")
    for args, has_colour in (([], False), (["--colour"], True)):
        assert ("\x1b[" in kdissect("show", path, *args).stdout) == has_colour


@cases("width", [40, 100, 200], heavy=[80, 120])
def test_lines_fit_the_terminal(
    width: int, kdissect: Run, captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of names that are long, wide and hostile too; nothing is wrapped."""
    path = hostile(captures, tmp_path, "名前名".encode())
    monkeypatch.setenv("COLUMNS", str(width))
    done = kdissect("show", path, "--header", "--colour")
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in done.stdout.splitlines()]
    assert len(lines) == 320
    assert max(map(display_width, lines)) <= width
    if width >= 80:
        assert all(re.match(r"(2026-11-21 )?02:15:\d\d\.\d{6} ", line) for line in lines[1:])
        assert sum("ms" in line for line in lines) > 300
        assert any("! NOT_COORDIN" in line for line in lines)
        assert any("FindCoordinator v2" in line for line in lines)


@pytest.mark.parametrize("flags", [["-v"], ["-x"], ["--records"]])
def test_messages_and_records_fit_the_terminal(
    flags: list[str], kdissect: Run, captures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long values end with …; the colours of a line that is cut go."""
    monkeypatch.setenv("COLUMNS", "80")
    done = kdissect("show", os.fspath(captures / "librdkafka.pcap"), "--colour", *flags)
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in done.stdout.splitlines()]
    assert len(lines) > 4000
    assert max(map(display_width, lines)) == 80
    assert any(line.endswith("…") for line in lines)


def rows_of(path: Path) -> list[object]:
    """Rows of a file, or the lines of text after the first."""
    if path.suffix == ".parquet":
        return list(pq.read_table(path).to_pylist())
    if path.suffix == ".arrow":
        return list(pa.ipc.open_file(path).read_all().to_pylist())
    return [line.rstrip(",") for line in path.read_text().splitlines()[1:]]


def test_rows_to_files(kdissect: Run, captures: Path, tmp_path: Path) -> None:
    """By the file's ending, the rows of `exchanges`; sql writes the same."""
    path = os.fspath(captures / "librdkafka.pcap")
    names = ["exchange_id", "api_name", "latency_ms", "topics", "request_time"]
    for ending in ("csv", "json", "ndjson", "parquet", "arrow"):
        file, expected = tmp_path / f"shown.{ending}", tmp_path / f"expected.{ending}"
        done = kdissect(
            "show", path, "--api", "Fetch", "--columns", ",".join(names), "--out", os.fspath(file)
        )
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == f"kdissect: 39 exchanges in {file}\n"
        query = f"select {','.join(names)} from exchanges where api_name = 'Fetch'"
        kdissect("sql", path, query, "--out", os.fspath(expected))
        rows, rows_of_sql = rows_of(file), rows_of(expected)
        assert len(rows) >= 38
        assert sorted(map(str, rows)) == sorted(map(str, rows_of_sql))


def test_an_interrupted_capture_leaves_a_whole_file(captures: Path, tmp_path: Path) -> None:
    """A live capture ends by Ctrl-C: the file has the rows until then."""
    file = tmp_path / "live.csv"
    with start("-", "--out", os.fspath(file)) as process:
        process.stdin.write((captures / "java_2_0_1.pcap").read_bytes())
        process.stdin.flush()
        deadline = time.monotonic() + 120
        while not any(part.stat().st_size > 10_000 for part in tmp_path.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        said = process.stderr.read().decode()
    assert said.endswith("kdissect: interrupted\n")
    rows = file.read_text().splitlines()
    assert len(rows) > 50
    assert {row.count(",") >= 44 for row in rows} == {True}


def test_an_interrupt_during_a_write_ends_the_rows_behind_it(captures: Path) -> None:
    """It does not end the write, which would leave no file."""
    handler = signal.getsignal(signal.SIGINT)  # Spark's own, where a session was made before
    exchanges = Exchanges([captures / "java_2_0_1.pcap"], Options(), Selection(), str)
    batches = exchanges.batches(EXCHANGES)
    assert next(batches).num_rows
    signal.raise_signal(signal.SIGINT)
    assert list(batches) == []
    assert exchanges.is_interrupted
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_metadata_log_is_known_after_many_topics(
    captures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of the oldest topics are forgotten, but not that of the log with credentials."""
    monkeypatch.setattr(listing, "TOPICS_MAX", 0)
    exchanges = Exchanges([captures / "librdkafka.pcap"], Options(), Selection(), str)
    assert sum(listed.table.num_rows for listed in exchanges)
    assert list(exchanges._names.values()) == ["__cluster_metadata"]


def test_a_terminal_gets_titles_and_a_pipe_whole_lines(
    kdissect: Run, captures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cut is cut for people only."""
    path = os.fspath(captures / "librdkafka.pcap")
    monkeypatch.delenv("COLUMNS", raising=False)
    piped = kdissect("show", path).stdout
    assert "…" not in piped
    assert "TIME" not in piped
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 90, 0, 0))
    with subprocess.Popen(
        [*COMMAND, path, "--no-colour"], env=PIPED, stdout=follower, stderr=follower, cwd=ROOT
    ) as process:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal is gone with its last writer
            while part := os.read(leader, 1 << 16):
                shown += part
        assert process.wait(120) == 0
    os.close(leader)
    lines = shown.decode().replace("\r\n", "\n").splitlines()
    assert lines[0].startswith("TIME (UTC)")
    assert len(lines) == 320
    assert max(map(len, lines)) == 90


def test_columns_can_be_chosen_and_added(kdissect: Run, captures: Path) -> None:
    """Some of the list, of the table, and both; for JSON members of the table."""
    path = os.fspath(captures / "librdkafka.pcap")
    row = json.loads(kdissect("show", path, "--json", "--api", "InitPr", "--exchange",
                              "5942878023527640839").stdout)  # fmt: skip
    chosen = ("--exchange", row["exchange_id"], "--header")
    for columns, titles, cells in (
        ("exchange,packets,api", "EXCHANGE ID PACKETS API", "{exchange_id} {request_packet} → "
         "{response_packet} {api_name} v{api_version}"),
        ("error_code,client_ip", "error_code client_ip", "{error_code} {client_ip}"),
        ("detail,broker_port", "broker_port ERRORS, TOPICS, GROUP", "{broker_port} ! {error_name}"),
        ("time,+exchange_id", "TIME (UTC) exchange_id", "2026-11-21 02:15:31.575611 {exchange_id}"),
    ):  # fmt: skip
        shown = kdissect("show", path, *chosen, "--columns", columns, "--time", "utc")
        assert [" ".join(line.split()) for line in shown.stdout.splitlines()] == [
            titles,
            cells.format(**row),
        ], shown.stderr
    added = kdissect("show", path, *chosen, "--columns", "+exchange").stdout.splitlines()
    assert "EXCHANGE ID" in added[0]
    assert row["exchange_id"] in added[1]
    some = kdissect("show", path, "--json", *chosen, "--columns", "exchange_id,api_name")
    assert json.loads(some.stdout) == {name: row[name] for name in ("exchange_id", "api_name")}


def test_times_are_absolute_or_relative(captures: Path) -> None:
    """Of the day, since the first line, since the line before."""
    path = captures / "librdkafka.pcap"

    def seconds(clock: Clock) -> list[float]:
        layout = fitted(("time",), clock, None)
        return [float(line) for line in shown(path, Style(layout=layout))]

    clock = shown(path, Style(layout=fitted(("time",), "clock", None)))
    assert clock[0] == "02:15:30.515691"
    relative, delta = seconds("relative"), seconds("delta")
    assert relative[0] == delta[0] == 0
    expected = [
        (datetime.fromisoformat(f"2026-11-21 {text}") - datetime(2026, 11, 21, 2, 15, 30, 515691))
        .total_seconds() for text in clock
    ]  # fmt: skip
    assert relative == pytest.approx(expected, abs=1e-9)
    assert list(itertools.accumulate(delta)) == pytest.approx(expected, abs=1e-6)


def test_connections_that_stay_encrypted_are_counted(kdissect: Run, captures: Path) -> None:
    """One line counts the connections that stay encrypted; with the key log it is absent."""
    command = ["show", "captures/tls13.pcap.gz"]
    tables = package.read(captures / "tls13.pcap.gz")
    count = tables.connections.to_arrow()["protocol"].to_pylist().count("tls")
    assert f"kdissect: not read: {count} TLS connections not decrypted" in kdissect(*command).stderr
    assert kdissect(*command, "--keylog", "captures/tls13.keylog").stderr == ""
