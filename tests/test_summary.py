"""The summary of a table set."""

from collections import Counter
from pathlib import Path

from kdissect import read
from kdissect.protocol.error_codes import error_name, routine_reason
from kdissect.summary import summarise
from tests.builders.tables import exchange, tables


def test_routine_errors_do_not_count(captures: Path) -> None:
    """An exchange counts if any of its error codes is not routine; all counts fit the rows."""
    shown = read(captures / "java_2_0_1.pcap")
    failed, routine = Counter[str](), Counter[str]()
    for row in shown.exchanges.to_arrow(["api_name", "error_codes"]).to_pylist():
        api = row["api_name"]
        codes = row["error_codes"] or []
        is_routine = [routine_reason(api, error_name(code)) is not None for code in codes]
        failed[api] += not all(is_routine)
        routine[api] += any(is_routine)
    assert failed.total() > 0
    assert routine.total() > 0
    rows = {row["api"]: row for row in summarise(shown)["apis"]}
    assert {api: row["errors"] for api, row in rows.items()} == dict(failed)


def test_versions_are_those_that_requests_tell() -> None:
    """A version that was guessed from a response stays open."""
    told = {"api_version": 5, "version_source": "request_header", "version_confidence": 1.0}
    guessed = {"api_version": 9, "version_source": "inferred", "version_confidence": 0.5}
    for rows, versions in (([told, guessed], [5, 5]), ([guessed], [None, None])):
        made = [exchange(number, **row) for number, row in enumerate(rows, 1)]
        (row,) = summarise(tables(exchanges=made))["apis"]
        assert row["versions"] == versions
