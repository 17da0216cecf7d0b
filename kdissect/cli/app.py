"""The Typer application `app`; each command module registers its command with it."""

from __future__ import annotations

from typing import Annotated

import typer

from kdissect import __version__

app = typer.Typer(
    name="kdissect",
    help="Packet captures of Apache Kafka traffic to tables.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kdissect {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Packet captures of Apache Kafka traffic to tables."""
