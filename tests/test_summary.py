"""The summary of a table set."""

from collections import Counter
from pathlib import Path

from kdissect import read
from kdissect.protocol.error_codes import error_name, routine_reason
from kdissect.summary import summarise


def test_routine_errors_do_not_count(captures: Path) -> None:
    """An exchange counts if any of its error codes is not routine; all counts fit the rows."""
    tables = read(captures / "java_2_0_1.pcap")
    failed, routine = Counter[str](), Counter[str]()
    for row in tables.exchanges.to_arrow(["api_name", "error_codes"]).to_pylist():
        api = row["api_name"]
        codes = row["error_codes"] or []
        is_routine = [routine_reason(api, error_name(code)) is not None for code in codes]
        failed[api] += not all(is_routine)
        routine[api] += any(is_routine)
    assert failed.total() > 0
    assert routine.total() > 0
    rows = {row["api"]: row for row in summarise(tables)["apis"]}
    assert {api: row["errors"] for api, row in rows.items()} == dict(failed)
