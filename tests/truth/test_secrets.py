"""Every byte that any verb writes, on the terminal and into files: no secret is in it."""

import gzip
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import kdissect
from kdissect.cli import app
from kdissect.errors import Error
from kdissect.protocol.api_keys import ApiKey
from tests import planted_secrets
from tests.builders.messages import Exchange, exchange, response_frame, write_capture
from tests.builders.showing import raw_text
from tests.cases import cases
from tests.replay.made import Answer, FakeBroker, empty_answer
from tests.truth.hidden import secrets_of, table_bytes
from tests.truth.material import Capture


class _Planted(Capture):
    """The capture of `write_secrets`, written once."""

    @property
    def path(self) -> Path:
        return _written()


@cache
def _written() -> Path:
    return planted_secrets.write_secrets(Path(tempfile.mkdtemp()) / "planted.pcap")


PLANTED = _Planted("planted")
RECORDED = ADMIN, SASL, TOKENS = tuple(
    Capture(name) for name in ("admin/admin", "sasl/sasl", "sasl/sasl_handshake_v0")
)
ALL = (PLANTED, *RECORDED)
_HEAD = (0, 2), (2, 4), (4, 8)  # API, version and correlation id of a request
STYLES = (("-v", "-x", "--records"), (), ("--json", "--records"), ("-v",), ("-x",), ("--json",))

each_capture = cases("capture", [PLANTED], heavy=RECORDED, ids=str)


@cache
def spelt(capture: Capture) -> frozenset[bytes]:
    if capture == PLANTED:
        return frozenset(planted_secrets.spellings())
    found = secrets_of(capture)
    assert len(found) >= 4
    return frozenset(found)


def _contents(path: Path) -> Iterator[bytes]:
    """What a file holds, compressed or not."""
    data = path.read_bytes()
    yield data
    if data.startswith(b"PAR1"):
        yield table_bytes(pq.read_table(path))
    elif data.startswith(b"\x1f\x8b"):
        yield gzip.decompress(data)


def leaks(capture: Capture, data: bytes) -> list[bytes]:
    return [secret for secret in spelt(capture) if secret in data]


def look_into(capture: Capture, out: Path) -> None:
    """No secret is in a file, or in a file of a folder."""
    for path in out.rglob("*") if out.is_dir() else [out]:
        if path.is_file():
            for data in _contents(path):
                assert not leaks(capture, data), path


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
    if out is not None:
        look_into(capture, out)
    return written.decode(errors="replace")


@cache
def table_set(capture: Capture) -> Path:
    """A table set of the capture."""
    folder = Path(tempfile.mkdtemp()) / "tables"
    kdissect.read(str(capture.path)).write(str(folder))
    return folder


def test_every_field_is_judged() -> None:
    """A new definition with a field that sounds like a secret has to be judged by someone."""
    assert not planted_secrets.unclassified()


@each_capture
def test_the_secrets_are_in_the_captures(capture: Capture) -> None:
    """The captures contain the secrets, so a search can fail; --reveal-secrets shows them."""
    held = sum(secret in capture.path.read_bytes() for secret in spelt(capture))
    assert held >= (2 if capture == PLANTED else 4)
    arguments = ["show", str(capture.path), "-x", "--reveal-secrets"]
    shown = CliRunner().invoke(app, arguments).stdout
    assert leaks(capture, raw_text(shown.split("\n")).encode("latin-1"))


QUICK = [(PLANTED, style) for style in STYLES[:3]]


@cases(
    ("capture", "style"),
    QUICK,
    heavy=[(one, style) for one in ALL for style in STYLES if (one, style) not in QUICK],
    ids=str,
)
def test_show_prints_no_secret(capture: Capture, style: tuple[str, ...]) -> None:
    """No style of `show` prints a secret."""
    assert len(run(capture, "show", capture.path, *style)) > 1000


@each_capture
def test_files_and_results_of_table_sets(capture: Capture) -> None:
    """Files of a set, results of SQL, verdicts and differences contain no secret."""
    tables = table_set(capture)
    look_into(capture, tables)
    names = [path.relative_to(tables) for path in tables.rglob("*") if path.is_dir()]
    assert len(names) > 10
    # files have all values of a table, so that one form of it is enough
    for path, form in zip((tables / "apis").iterdir(), cycle(("table", "csv", "json"))):
        run(capture, "sql", tables, f'from "{path.name}"', "--format", form)
    for name in ("inventory", "incidents", "anomalies"):
        json.loads(run(capture, "sql", tables, f"from {name}", "--format", "json"))
    run(capture, "sql", tables, "select error('x') from nowhere")
    for verb in ("summary", "incidents", "check"):
        run(capture, verb, tables)
        json.loads(run(capture, verb, tables, "--json"))
    run(capture, "readiness", tables, "--target", "4.0", "--json")
    run(capture, "readiness", tables, "--target", "4.0")
    other = table_set(PLANTED)
    run(capture, "diff", tables, other, "--json")
    run(capture, "diff", tables, other)


@each_capture
def test_report_contains_no_secret(capture: Capture, tmp_path: Path) -> None:
    """The report's page and its CSV files contain no secret."""
    tables = table_set(capture)
    run(capture, "report", tables, "--out", tmp_path / "report", "--json", out=tmp_path)
    run(capture, "report", tables, "--out", tmp_path / "report", out=tmp_path)
    assert list(tmp_path.rglob("*.csv"))


@each_capture
def test_extract_under_other_names(capture: Capture, tmp_path: Path) -> None:
    """Without `--anonymize` packets are handed over as they are, which `extract` is for."""
    out = tmp_path / "out.pcapng"
    run(capture, "extract", capture.path, "--anonymize", "--out", out, out=tmp_path)
    assert out.stat().st_size > 10_000
    run(capture, "show", out, "-v", "-x")


@each_capture
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
        look_into(capture, out)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target, which is never ready, is asked again for half a second only."""
    monkeypatch.setattr("kdissect.replay.target.settling.WAIT_S", 0.5)


def _replayed(
    capture: Capture, path: Path, folder: Path, answer: Answer | None = None
) -> dict[str, Any]:
    """Replay with every output; none of them has a secret. Returns the verdicts by API."""
    files = {"save": "saved", "html": "run.html", "junit": "run.xml", "json": "run.json"}
    files["out"] = "tables"
    outputs = [word for name, file in files.items() for word in (f"--{name}", folder / file)]
    everything = ("--allow", "produce,groups,transactions,admin", "--pace", "max")
    with FakeBroker(answer).running() as broker:
        to = ("--to", f"127.0.0.1:{broker.port}")
        assert "skipped" in run(capture, "replay", path, *to, "--dry-run", *everything)
        arguments = (*to, *everything, *outputs)
        assert "Verdicts" in run(capture, "replay", path, *arguments, out=folder)
        assert len(list(folder.iterdir())) == 5
        more = [("--baseline", folder / "run.json"), ("--against", to[1], "--control-runs", "2")]
        for number, options in enumerate(more):
            page, lines = (folder / f"run{number}.{end}" for end in ("html", "json"))
            arguments = (*to, *everything, *options, "--html", page, "--json", lines)
            assert "Verdicts" in run(capture, "replay", path, *arguments, out=folder)
            assert page.exists()
            assert lines.exists()
    rows = (folder / "run.json").read_text().splitlines()
    (summary,) = (one for one in map(json.loads, rows) if one["type"] == "summary")
    return {each["api_name"]: each["verdicts"] for each in summary["apis"]}


@each_capture
@pytest.mark.usefixtures("impatient")
def test_replay_writes_no_secret(capture: Capture, tmp_path: Path) -> None:
    """The plan, the saved workload, all outputs of a run, and the messages on the way."""
    _replayed(capture, capture.path, tmp_path)


def _other(value: Any) -> Any:
    """The same message with another text in place of the secret."""
    if isinstance(value, dict):
        return {name: _other(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_other(each) for each in value]
    return {planted_secrets.SECRET: b"other", planted_secrets.SECRET.decode(): "other"}.get(
        value, value
    )


@pytest.mark.parametrize("case", ["refused", "other answer", "other capture"])
def test_differences_tell_no_secret(case: str, tmp_path: Path) -> None:
    """The target refuses, or answers with other secrets; or only its answers have the secret."""
    made: list[Exchange] = []
    answers = {}
    for key, version, side in planted_secrets.secret_messages():
        if side == 1:
            captured = planted_secrets.body(key, version, 1)
            if key == ApiKey.CREATE_TOPICS:
                captured["topics"][0]["name"] = "orders"
            answer = _other(captured)
            if case == "other capture":
                captured, answer = answer, captured
            elif case == "refused" and key == ApiKey.CREATE_DELEGATION_TOKEN:
                answer = {"error_code": 61}  # DELEGATION_TOKEN_AUTH_DISABLED
            answers[key, version] = answer
            asked = {"topics": [{"name": "orders"}]} if key == ApiKey.CREATE_TOPICS else {}
            made.append(exchange(len(made), key, version, asked, captured))

    def answered(_: int, frame: bytes) -> bytes:
        key, version, number = (int.from_bytes(frame[a:b], "big") for a, b in _HEAD)
        if (key, version) not in answers:
            return empty_answer(frame)
        return response_frame(key, version, number, **answers[key, version])

    path = write_capture(tmp_path / "made.pcap", made, ports=range(50000, 50000 + len(made)))
    (tmp_path / "out").mkdir()
    verdicts = _replayed(PLANTED, path, tmp_path / "out", answered)
    different = {name for name, each in verdicts.items() if each.get("different")}
    assert different >= {"CreateTopics", "DescribeConfigs"}
    assert ("CreateDelegationToken" in different) is (case == "refused")
