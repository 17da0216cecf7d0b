"""The Typer application, and its verbs: their options by group, examples, and `--debug`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from functools import update_wrapper
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from kdissect import __version__
from kdissect.cli import debug_log

_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--debug",
            callback=debug_log.start,
            is_eager=True,
            help="Log versions, options, steps and errors to stderr, without secrets.",
        ),
    ],
)


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


def verb(help_examples: str) -> Callable[[Callable[..., None]], GroupedCommand]:
    """Return a decorator that registers the function `NAME_command` as `kdissect NAME`.

    The help of the command ends with the examples, a line each. Typer's `epilog` would break them.
    """

    class Verb(TyperCommand):
        examples_text = help_examples

        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            typer.echo(f" Examples:\n{help_examples}")

        def invoke(self, ctx: Any) -> Any:
            debug_log.log_options(ctx)
            return super().invoke(ctx)

    def register(command: Callable[..., None]) -> GroupedCommand:
        grouped = GroupedCommand(command)
        app.command(command.__name__.removesuffix("_command"), cls=Verb)(grouped)
        return grouped

    return register


class GroupedCommand:
    """A command for Typer: options replace each parameter that is a group, and `--debug` is added.

    Typer reads a callable's `__signature__` and `__annotations__`.
    """

    def __init__(self, command: Callable[..., None]) -> None:
        update_wrapper(self, command)
        hints = get_type_hints(command, include_extras=True)
        self._command = command
        self._groups: dict[str, Any] = {
            name: hint for name, hint in hints.items() if is_dataclass(hint)
        }
        parameters: list[inspect.Parameter] = []
        last: list[inspect.Parameter] = []  # groups without a title, behind a verb's own options
        for name, parameter in inspect.signature(command).parameters.items():
            if name in self._groups:
                group = self._groups[name]
                (parameters if group.TITLE else last).extend(_options(group))
            else:
                parameters.append(
                    parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
                )
        parameters += [*last, _DEBUG]
        self.__signature__ = inspect.Signature(parameters)
        self.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}

    def __call__(self, **values: Any) -> None:
        del values[_DEBUG.name]  # its callback did the work
        for name, group in self._groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        self._command(**values)


def _options(group: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field; the help lists them under the group's title."""
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind, option = get_args(types[field.name])
        option = copy(option)
        option.rich_help_panel = group.TITLE
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[kind, option],
        )
