"""`kdissect check`: compares sums and rows that the tables of a set must agree on."""

from __future__ import annotations

import json
import logging

import typer

from kdissect.cli.messages import EXIT_FINDING, put
from kdissect.cli.options import AsJson, Quiet, SourceOptions, Sources
from kdissect.cli.sources import open_source
from kdissect.cli.verbs import verb
from kdissect.step_log import logged_step

_log = logging.getLogger(__name__)

CHECK_EXAMPLES = """
  kdissect check tables/
  kdissect check tables/ --json
"""


@verb("check", CHECK_EXAMPLES)
def check_command(
    source: Sources,
    capture: SourceOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check that the tables agree with each other: bytes, packets, ids and rows; exit 1 if not."""
    from kdissect.accounts import check
    from kdissect.text import visible

    tables = open_source(source, capture)
    with logged_step(_log, "check"):
        document = check(tables)
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
