"""Every byte that any verb writes, on the terminal and into files: no secret is in it."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import kdissect
from kdissect.cli.app import app
from kdissect.errors import Error
from kdissect.pipeline.saved_state import read_state
from tests.replay.made import FakeBroker
from tests.show.test_details import raw_text
from tests.truth.hidden import secrets_of
from tests.truth.material import Capture

ADMIN, SASL, TOKENS = (
    Capture(name) for name in ("admin/admin", "sasl/sasl", "sasl/sasl_handshake_v0")
)
HEAVY = pytest.mark.heavy
RICHEST: tuple[str, ...] = ("-v", "-x", "--records")
OTHER: tuple[tuple[str, ...], ...] = ((), ("--json", "--records"))


def _each(*often: Capture) -> pytest.MarkDecorator:
    """A test for each capture, heavy for those that are not named."""
    cases = (
        pytest.param(one, marks=[] if one in often else HEAVY) for one in (ADMIN, SASL, TOKENS)
    )
    return pytest.mark.parametrize("capture", cases, ids=str)


@cache
def spelt(capture: Capture) -> frozenset[bytes]:
    found = secrets_of(capture)
    assert len(found) >= 4
    return frozenset(found)


def _columns(table: Any) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return bytes(out.getvalue().to_pybytes())


def _contents(path: Path) -> Iterator[bytes]:
    """What a file holds, compressed or not."""
    data = path.read_bytes()
    yield data
    if data.startswith(b"PAR1"):
        yield _columns(pq.read_table(path))
    elif data.startswith(b"\x1f\x8b"):
        yield gzip.decompress(data)
    elif path.parent.name == "_state":
        yield from (bytes(part) for part in read_state(str(path)))


def leaks(capture: Capture, data: bytes) -> list[bytes]:
    return [secret for secret in spelt(capture) if secret in data]


def run(capture: Capture, *arguments: str | Path, out: Path | None = None) -> str:
    """Run a verb, look into all that it wrote; its output on the terminal."""
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    written = result.stdout_bytes + b"\n" + result.stderr_bytes
    if isinstance(result.exception, Error):
        written += str(result.exception).encode()  # what the command says of it
    elif not isinstance(result.exception, SystemExit | None):
        raise result.exception
    assert not leaks(capture, written), arguments
    dumped = raw_text(written.decode(errors="replace").split("\n"))
    assert not leaks(capture, dumped.encode("latin-1")), arguments
    for path in [] if out is None else out.rglob("*") if out.is_dir() else [out]:
        if path.is_file():
            for data in _contents(path):
                assert not leaks(capture, data), (arguments, path)
    return written.decode(errors="replace")


@pytest.fixture(scope="module")
def table_sets(tmp_path_factory: pytest.TempPathFactory) -> dict[Capture, Path]:
    folder = tmp_path_factory.mktemp("sets")
    found = {}
    for number, capture in enumerate((ADMIN, SASL, TOKENS)):
        found[capture] = folder / str(number)
        kdissect.read(str(capture.path)).write(str(found[capture]))
    return found


@_each(TOKENS)
def test_the_secrets_are_in_the_captures(capture: Capture) -> None:
    """The captures contain the secrets, so a search can fail; --reveal-secrets shows them."""
    assert sum(secret in capture.path.read_bytes() for secret in spelt(capture)) >= 4
    arguments = ["show", str(capture.path), "-x", "--reveal-secrets"]
    shown = CliRunner().invoke(app, arguments).stdout
    assert leaks(capture, raw_text(shown.split("\n")).encode("latin-1"))


@pytest.mark.parametrize(
    ("capture", "style"),
    [
        pytest.param(
            capture,
            style,
            id=f"{capture} {' '.join(style)}",
            # the capture with the most kinds of secrets
            marks=[] if style in (RICHEST, *OTHER) and capture == ADMIN else [HEAVY],
        )
        for capture in (ADMIN, SASL, TOKENS)
        for style in (RICHEST, *OTHER, ("-v",), ("-x",), ("--json",))
    ],
)
def test_show_prints_no_secret(capture: Capture, style: tuple[str, ...]) -> None:
    """No style of `show` prints a secret."""
    assert len(run(capture, "show", capture.path, *style)) > 1000


@_each(ADMIN)
def test_files_and_results_of_table_sets(
    capture: Capture, table_sets: dict[Capture, Path], tmp_path: Path
) -> None:
    """Files of a set, results of SQL, verdicts and differences contain no secret."""
    tables = table_sets[capture]
    for path in tables.rglob("*"):
        if path.is_file():
            for data in _contents(path):
                assert not leaks(capture, data), path
    names = [path.relative_to(tables) for path in tables.rglob("*") if path.is_dir()]
    assert len(names) > 10
    for form, table in (("table", "SaslAuthenticate"), ("csv", "SaslToken"), ("json", "Envelope")):
        run(capture, "sql", tables, f'from "{table}"', "--format", form)
    run(capture, "sql", tables, "select error('x') from nowhere")
    run(capture, "readiness", tables, "--target", "4.0", "--json")
    run(capture, "readiness", tables, "--target", "4.0")
    run(capture, "diff", tables, table_sets[TOKENS], "--json")
    run(capture, "diff", tables, table_sets[TOKENS])


@_each(ADMIN)
def test_report_contains_no_secret(
    capture: Capture, table_sets: dict[Capture, Path], tmp_path: Path
) -> None:
    """The report's page and its CSV files contain no secret."""
    as_json = ["--json"] if capture == TOKENS else []
    run(
        capture, "report", table_sets[capture], "--out", tmp_path / "report", *as_json, out=tmp_path
    )
    assert list(tmp_path.rglob("*.csv"))


@_each(TOKENS)  # tests/extract has secrets of administration
def test_extract_under_other_names(capture: Capture, tmp_path: Path) -> None:
    """Without `--anonymize` packets are handed over as they are, which `extract` is for."""
    out = tmp_path / "out.pcapng"
    run(capture, "extract", capture.path, "--anonymize", "--out", out, out=tmp_path)
    assert out.stat().st_size > 10_000
    run(capture, "show", out, "-v", "-x")


@_each(TOKENS)
def test_dissect_and_its_state(capture: Capture, tmp_path: Path, in_process: None) -> None:
    """What a set keeps for the next captures, from several places on."""
    data = capture.path.read_bytes()
    for part in (0.3, 0.6, 1.0):
        cut = tmp_path / "cut.pcap"
        cut.write_bytes(data[: int(len(data) * part)])
        out = tmp_path / "tables"
        kdissect.dissect(None, str(cut), str(out), overwrite=True, keep_state=True)
        state = list((out / "_state").glob("*"))
        assert state or "missing" in kdissect.open(str(out)).manifest["state"]
        for path in out.rglob("*"):
            if path.is_file():
                for content in _contents(path):
                    assert not leaks(capture, content), path


@_each(SASL)
def test_replay_writes_no_secret(capture: Capture, tmp_path: Path) -> None:
    """The plan, the saved workload, all outputs of a run, and the messages on the way."""
    outputs = [
        word
        for name, file in (
            ("--save", "saved"),
            ("--html", "run.html"),
            ("--junit", "run.xml"),
            ("--json", "run.json"),
            ("--out", "tables"),
        )
        for word in (name, tmp_path / file)
    ]
    everything = ("--allow", "produce,groups,transactions,admin", "--pace", "max")
    with FakeBroker().running() as broker:
        to = ("--to", f"127.0.0.1:{broker.port}")
        said = run(capture, "replay", capture.path, *to, "--dry-run", *everything)
        assert "skipped" in said
        arguments = (*to, *everything, *outputs, "--timeout", "2")
        said = run(capture, "replay", capture.path, *arguments, out=tmp_path)
        assert "Verdicts" in said
    assert len(list(tmp_path.iterdir())) == 5
