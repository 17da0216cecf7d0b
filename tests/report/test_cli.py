"""`kdissect report` as a user runs it."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kdissect.cli import app
from kdissect.report import name_of
from tests.builders.tables import exchange, tables
from tests.processes import Run


@pytest.fixture
def small_set(tmp_path: Path) -> Path:
    """A table set of one exchange."""
    tables(exchanges=[exchange(1)]).write(tmp_path / "small")
    return tmp_path / "small"


def test_default_place_and_incidents(
    table_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """reports/NAME.html in the current folder, CSV files beside it, incidents on the terminal."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["report", str(table_set)])
    assert result.exit_code == 0
    assert (tmp_path / "reports" / "orders.html").is_file()
    assert (tmp_path / "reports" / "orders-errors.csv").is_file()
    assert result.stdout.splitlines()[-1].startswith("Report: reports/orders.html and ")
    found = result.stdout.splitlines()
    assert "info  refused_requests  DeleteGroups" in found
    assert any(line.startswith("      $ kdissect show ") for line in found)


def test_a_report_has_the_names_of_its_sources(tmp_path: Path) -> None:
    """Up to three names of folders and captures; of more sources the first name and the count."""
    (tmp_path / "tables.d").mkdir()
    sources = [tmp_path / "tables.d", "b/one.pcap.gz", "two.pcap", "c/two.pcapng"]
    assert name_of(sources[:1]) == "tables.d"
    assert name_of(sources) == "tables.d+one+two"
    assert name_of([*sources, "three.pcap"]) == "tables.d+3-more"


def test_clients_since_a_time(table_set: Path, tmp_path: Path) -> None:
    """The terminal counts new, gone and changed clients; the page and the CSV name them."""
    out = tmp_path / "page.html"
    inventory = tmp_path / "inventory.csv"
    options = ["--out", str(out), "--since", "2026-11-21T02:15:40Z", "--inventory", str(inventory)]
    result = CliRunner().invoke(app, ["report", str(table_set), *options])
    assert result.exit_code == 0
    assert "Clients since 2026-11-21T02:15:40Z: " in result.stdout
    for path in (inventory, tmp_path / "page-clients.csv"):
        with path.open(newline="") as file:
            changes = {row["client_id"]: row["change"] for row in csv.DictReader(file)}
        assert changes["rd-c0"] == "changed"
        assert changes["rdkafka-gzip"] == "gone"
    assert "Requests from the given time on, compared with those before." in out.read_text()


def test_json_is_one_document(kdissect: Run, small_set: Path, tmp_path: Path) -> None:
    """The document names its files; without CSV there is only the page."""
    out = tmp_path / "sub" / "page.html"
    done = kdissect("report", str(small_set), "--out", str(out), "--no-csv", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["format_version"] == 1
    assert document["files"] == {"html": str(out), "csv": {}}
    assert sorted(path.name for path in out.parent.iterdir()) == ["page.html"]


def test_a_second_report_replaces_the_first(small_set: Path, tmp_path: Path) -> None:
    """An existing page is replaced, and no part stays."""
    out = tmp_path / "page.html"
    out.write_text("old")
    result = CliRunner().invoke(app, ["report", str(small_set), "--out", str(out), "-q"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert out.read_text().startswith("<!doctype html>")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
