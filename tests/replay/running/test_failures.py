"""Targets that are not there, or are none: every output asked for is written all the same."""

from __future__ import annotations

import json
import socket
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kdissect
from kdissect.cli import app

SOURCE = Path(__file__).resolve().parent.parent.parent / "captures" / "librdkafka.pcap"


def _ends(link: socket.socket) -> None:
    link.close()


def _speaks_http(link: socket.socket) -> None:
    link.recv(100)
    link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    link.close()


def _is_silent(link: socket.socket) -> None:
    link.recv(100)
    time.sleep(20)


@contextmanager
def listening(behave: Callable[[socket.socket], None] | None) -> Iterator[int]:
    """A port of the loopback interface; None: nobody listens there any more."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    if behave is None:
        server.close()
        yield port
        return

    def serve() -> None:
        while True:
            try:
                link, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=behave, args=(link,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield port
    finally:
        server.close()


@pytest.mark.parametrize(
    ("behave", "options", "said"),
    [
        (None, (), "connection refused"),
        (_ends, (), "does this port want --tls"),
        (_speaks_http, (), "no Kafka answer"),
        (_speaks_http, ("--tls", "--tls-no-verify"), "is TLS spoken"),
        (_is_silent, ("--connect-timeout", "1s", "--tls", "--tls-no-verify"), "within 1 s"),
    ],
    ids=["closed port", "ends at once", "another protocol", "no TLS", "silent"],
)
def test_a_target_that_is_none(
    behave: Callable[[socket.socket], None] | None,
    options: tuple[str, ...],
    said: str,
    tmp_path: Path,
) -> None:
    """Exit code 3, one line says why, and so does every output that was asked for."""
    names = {"--junit": "r.xml", "--json": "r.jsonl", "--html": "r.html", "--pcap": "r.pcap"}
    files = {option: tmp_path / name for option, name in names.items()}
    given = [text for option, path in files.items() for text in (option, str(path))]
    began = time.monotonic()
    with listening(behave) as port:
        command = ["replay", str(SOURCE), "--to", f"127.0.0.1:{port}", "--quiet"]
        done = CliRunner().invoke(
            app, [*command, *given, "--out", str(tmp_path / "tables"), *options]
        )
    assert time.monotonic() - began < 90
    assert done.exit_code == 3, done.output
    [line] = done.stderr.splitlines()
    assert line.startswith(f"kdissect: nothing was sent: 127.0.0.1:{port}: ")
    assert said in line

    rows = [json.loads(text) for text in files["--json"].read_text().splitlines()]
    assert rows[0]["steps"] == len(rows) - 2
    assert {row["verdict"] for row in rows[1:-1]} == {"error", "skipped"}
    assert all(said in row["error"] for row in rows[1:-1] if row["verdict"] == "error")
    assert said in rows[-1]["ended"]
    assert rows[-1]["exit_code"] == 3
    suites = ElementTree.parse(files["--junit"]).getroot()
    assert int(suites.get("tests", 0)) == len(rows) - 1
    assert said in (suites[0].find("testcase/error").get("message") or "")  # type: ignore[union-attr]
    assert said in files["--html"].read_text()
    assert kdissect.open(tmp_path / "tables").exchanges.num_rows == 0
    assert kdissect.read(files["--pcap"]).exchanges.num_rows == 0
