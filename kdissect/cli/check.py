"""`kdissect check`: compares sums and rows that the tables of a set must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kdissect.cli.options import ResultOptions, SourceOptions, Sources
from kdissect.cli.sources import open_source
from kdissect.cli.verbs import verb
from kdissect.step_log import logged_step


@verb("""
  kdissect check tables/
  kdissect check tables/ --json
""")
def check_command(source: Sources, capture: SourceOptions, result: ResultOptions) -> None:
    """Check that the tables agree with each other: bytes, packets, ids and rows; exit 1 if not."""
    from kdissect.accounts import check

    tables = open_source(source, capture)
    with logged_step("check"):
        document = check(tables)
    result.put(document, _lines(document), failed=bool(document["faults"]))


def _lines(document: dict[str, Any]) -> Iterator[str]:
    from kdissect.text import visible

    for fault in document["faults"]:
        place = visible(fault["place"])
        yield f"{fault['account']}: {place}: {fault['left']:,} is not {fault['right']:,}"
    wrong = len({fault["account"] for fault in document["faults"]})
    count = len(document["accounts"])
    yield f"{wrong} of {count} accounts do not add up" if wrong else f"{count} accounts add up"
