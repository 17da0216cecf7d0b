"""`kdissect incidents`: its lines, its JSON document and its exit codes."""

import json
from pathlib import Path

import pytest

from tests.builders.tables import connection, exchange, tables
from tests.console import run_here

REFUSED = {
    "api_name": "SaslAuthenticate",
    "error_code": 58,
    "error_name": "SASL_AUTHENTICATION_FAILED",
    "error_codes": [58],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table set with a login loop."""
    folder = tmp_path_factory.mktemp("incidents")
    exchanges = [exchange(n, at_us=n * 1_000_000, **REFUSED) for n in range(5)]
    tables(exchanges=exchanges, connections=[connection()]).write(folder / "tables")
    return folder


def test_an_empty_table_set_has_no_incidents(tmp_path: Path) -> None:
    """One line says so."""
    tables().write(tmp_path / "tables")
    assert run_here("kdissect incidents tables", tmp_path) == "No incidents found\n"


def test_json_is_one_document(folder: Path) -> None:
    """Ids are texts, and times are RFC 3339."""
    document = json.loads(run_here("kdissect incidents tables --json", folder))
    (row,) = document["incidents"]
    assert document["format_version"] == 1
    assert row["evidence"]["exchange_ids"] == ["0", "1", "2", "3", "4"]
    assert row["start_time"] == "2026-09-21T14:13:20.000000Z"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("", 0),
        ("--fail-on broker_stall", 0),
        ("--fail-on broker_stall,login_failures", 1),
        ("--fail-on broker_stall --fail-on bad", 1),
        ("--fail-on info", 1),
    ],
)
def test_fail_on_decides_the_exit_code(folder: Path, options: str, code: int) -> None:
    """A kind, or a severity and above, gives exit code 1."""
    text = run_here(f'kdissect incidents tables -q {options}; echo "exit $?"', folder)
    assert text == f"exit {code}\n"


def test_sql_queries_the_incidents(folder: Path) -> None:
    """The table is a view like the others."""
    query = "select kind, request_count from incidents"
    expected = ["kind,request_count", "login_failures,5"]
    assert run_here(f'kdissect sql tables "{query}" --format csv', folder).splitlines() == expected
