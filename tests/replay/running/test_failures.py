"""Targets that are absent or speak another protocol: every output is written."""

import asyncio
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
from kdissect.protocol import catalog
from kdissect.replay.model import OptionError
from kdissect.replay.running.session import SessionOptions, replay
from kdissect.replay.target.cluster import Target
from kdissect.replay.workload.saved_file import save
from tests.builders.messages import a_request, a_response
from tests.builders.workloads import exchange, workload
from tests.conftest import CAPTURES
from tests.replay.made import API_VERSIONS, METADATA, Answer, FakeBroker, PlanMaker, answering

SOURCE = CAPTURES / "librdkafka.pcap"


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
    """A port of the loopback interface; after None it has no listener."""
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
        (_is_silent, ("--timeout", "1s", "--tls", "--tls-no-verify"), "within 1 s"),
    ],
    ids=["closed port", "ends at once", "another protocol", "no TLS", "silent"],
)
def test_a_target_with_another_protocol(
    behave: Callable[[socket.socket], None] | None,
    options: tuple[str, ...],
    said: str,
    tmp_path: Path,
) -> None:
    """Exit code 3 with one line; every output has the reason, too."""
    names = {"--junit": "r.xml", "--json": "r.jsonl", "--html": "r.html"}
    files = {option: tmp_path / name for option, name in names.items()}
    given = [text for option, path in files.items() for text in (option, str(path))]
    with listening(behave) as port:
        command = ["replay", str(SOURCE), "--to", f"127.0.0.1:{port}", "--quiet"]
        done = CliRunner().invoke(
            app, [*command, *given, "--out", str(tmp_path / "tables"), *options]
        )
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


# A broker of the cluster "captured", with nothing in it.
of_cluster = answering(
    lambda api_key, request: {"cluster_id": "captured"} if api_key == METADATA else None
)


@pytest.mark.parametrize("answer", [None, of_cluster], ids=["cannot be probed", "is refused"])
def test_the_reference_is_closed_where_the_target_is_no_good(
    maker: PlanMaker, answer: Answer | None
) -> None:
    """--against was probed first, and its connection ends when the replay does."""
    maker.add(0)
    plan = maker.plan()
    plan.workload.facts.cluster_ids = ["captured"]

    async def run() -> None:
        other = Target("127.0.0.1", target.port)
        against = Target("127.0.0.1", reference.port)
        try:
            results = await replay(plan, other, SessionOptions(), against)
            assert "refused" in results.run.ended
        except OptionError:
            assert answer is not None
        end = time.monotonic() + 60
        while reference._writers or target._writers:
            assert time.monotonic() < end, "a connection stays open"
            await asyncio.sleep(0.01)

    with FakeBroker().running() as reference, FakeBroker(answer).running() as target:
        if answer is None:
            target.close()
            while target._server and target._server.is_serving():
                time.sleep(0.01)
        asyncio.run(run())
        assert reference.connections == 1


def test_unsent_fields_are_named(tmp_path: Path) -> None:
    """--reencode to a target whose OffsetFetch ends at v6, before require_stable."""
    key = catalog.api("OffsetFetch").key
    topics = [{"name": "t", "partition_indexes": [0]}]
    body = {"group_id": "g", "topics": topics, "require_stable": True}
    asked = a_request(key, 7, **body)
    answered = a_response(key, 7, topics=[], error_code=0)
    source = tmp_path / "asked.replay"
    save(workload([exchange(0, asked, 0, 1, answered)]), str(source))

    offered = [
        {"api_key": each, "min_version": api.request.versions[0],
         "max_version": 6 if each == key else api.request.versions[1]}
        for each, api in catalog.apis().items()
    ]  # fmt: skip
    answer = answering(
        lambda api_key, request: {"api_keys": offered} if api_key == API_VERSIONS else None
    )
    lines = tmp_path / "r.jsonl"
    with FakeBroker(answer).running() as server:
        done = CliRunner().invoke(
            app,
            ["replay", str(source), "--to", f"127.0.0.1:{server.port}", "--api", "offsetFETCH",
             "--reencode", "--pace", "max", "--fail-on", "none", "--json", str(lines)],
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = [json.loads(text) for text in lines.read_text().splitlines()]
    sent = [row for row in rows[1:-1] if row["sent_time"]]
    assert {(row["api_name"], row["sent_api_version"]) for row in sent} == {("OffsetFetch", 6)}
    lacking = [row for row in sent if row["dropped"]]
    assert lacking
    assert all(row["dropped"][0] == {"path": "require_stable", "value": "true"} for row in lacking)
    note = f"which has no require_stable; left out: {len(lacking)} x true"
    assert note in " ".join(done.stdout.split())
    assert any(note in each for each in rows[0]["notes"])
