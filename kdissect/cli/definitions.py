"""`kdissect definitions`: shows the message definitions of Kafka's APIs."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from kdissect.cli.verbs import verb

if TYPE_CHECKING:
    from kdissect.tables.schemas import Row


@verb("""
  kdissect definitions
  kdissect definitions Fetch
  kdissect definitions 1 12 --json
  kdissect definitions fetch 12 13
""")
def definitions_command(
    api: str | None = None,
    api_version: int | None = None,
    other_version: int | None = None,
    as_json: bool = False,
) -> None:
    """Show Kafka's APIs: fields, types, versions, and what changed between two versions."""
    from kdissect.protocol import catalog, describe

    try:
        document: Row | None
        if api is None:
            text, document = describe.api_list_text(), describe.api_list_json()
        elif other_version is not None and api_version is not None:
            text = describe.comparison_text(api, api_version, other_version)
            document = describe.comparison_json(api, api_version, other_version)
        elif _is_api(api):
            text = describe.api_text(api, api_version)
            document = describe.api_json(api, api_version)
        else:
            text, document = catalog.source(api), None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="API") from None
    if as_json and document is None:
        raise typer.BadParameter(f"{api} is no API; --json describes APIs", param_hint="--json")
    typer.echo(json.dumps(document, indent=1) if as_json else text.rstrip("\n"))


def _is_api(name: str) -> bool:
    """Return True for an API, and for unknown names (whose error suggests similar ones)."""
    from kdissect.protocol import catalog

    with suppress(ValueError):
        catalog.api(name)
        return True
    with suppress(ValueError):
        catalog.definition(name)
        return False
    return True
