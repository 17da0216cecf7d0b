"""`kdissect check`: compares sums and rows that the tables of a set must agree on."""

from __future__ import annotations

import json

import typer

from kdissect.cli.app import app
from kdissect.cli.common import (
    EXIT_FINDING,
    AsJson,
    Quiet,
    Sources,
    open_source,
    put,
    with_examples,
)
from kdissect.cli.options import SourceOptions, with_groups

CHECK_EXAMPLES = """
Examples:

  kdissect check tables/

  kdissect check tables/ --json
"""


@app.command("check", cls=with_examples(CHECK_EXAMPLES))
@with_groups
def check_command(
    source: Sources,
    capture: SourceOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check that the tables agree with each other: bytes, packets, ids and rows; exit 1 if not."""
    from kdissect.accounts import check
    from kdissect.text import visible

    document = check(open_source(source, capture))
    faults = document["faults"]
    if as_json:
        put([json.dumps(document, indent=1)])
    elif not quiet:
        put(
            f"{fault['account']}: {visible(fault['place'])}: {fault['left']:,} is not "
            f"{fault['right']:,}"
            for fault in faults
        )
        wrong = len({fault["account"] for fault in faults})
        count = len(document["accounts"])
        put([f"{wrong} of {count} accounts do not add up" if wrong else f"{count} accounts add up"])
    if faults:
        raise typer.Exit(EXIT_FINDING)
