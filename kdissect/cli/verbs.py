"""The Typer application, and its verbs: their options by group, examples, and `--debug`."""

from __future__ import annotations

import inspect
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import update_wrapper
from glob import glob
from importlib import import_module, resources
from operator import attrgetter
from typing import Annotated, Any, ClassVar, get_type_hints

import typer
from typer.core import TyperCommand

from kdissect import __version__
from kdissect.cli import debug_log

_DECLARED: dict[str, dict[str, list[Any]]] = tomllib.loads(
    resources.files(__package__).joinpath("options.toml").read_text("utf-8")
)
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


@dataclass(frozen=True)
class OptionGroup:
    """Options that belong together: each field is one. TITLE: of their panel in the help."""

    TITLE: ClassVar[str | None] = None


def verb(help_examples: str) -> Callable[[Callable[..., None]], GroupedCommand]:
    """Return a decorator that registers the function `NAME_command` as `kdissect NAME`.

    The help of the command ends with the examples, a line each. Typer's `epilog` would break them.
    """

    class Verb(TyperCommand):
        examples_text = help_examples

        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            typer.echo(f" Examples:\n{help_examples}")

        def invoke(self, ctx: Any) -> object:
            debug_log.log_options(ctx)
            return super().invoke(ctx)

    def register(command: Callable[..., None]) -> GroupedCommand:
        grouped = GroupedCommand(command)
        app.command(_verb_name(command), cls=Verb)(grouped)
        return grouped

    return register


class GroupedCommand:
    """A command for Typer: each parameter is declared in `options.toml`, and `--debug` is added.

    Options replace a parameter that is an `OptionGroup`. Typer reads a callable's
    `__signature__` and `__annotations__`.
    """

    def __init__(self, command: Callable[..., None]) -> None:
        update_wrapper(self, command)
        self._command = command
        self._groups: dict[str, type[OptionGroup]] = {}
        name_of_verb = _verb_name(command)
        hints = get_type_hints(command)
        parameters: list[inspect.Parameter] = []
        last: list[inspect.Parameter] = []  # groups without a title, behind a verb's own options
        for name, parameter in inspect.signature(command).parameters.items():
            group = hints[name]
            if not (isinstance(group, type) and issubclass(group, OptionGroup)):
                parameters.append(_parameter(name_of_verb, name, group, parameter.default))
                continue
            self._groups[name] = group
            types = get_type_hints(group)
            (parameters if group.TITLE else last).extend(
                _parameter(name_of_verb, field.name, types[field.name], field.default, group.TITLE)
                for field in fields(group)
            )
        parameters += [*last, _DEBUG]
        self.__signature__ = inspect.Signature(parameters)
        self.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}

    def __call__(self, **values: object) -> None:
        del values[_DEBUG.name]  # its callback did the work
        _keep_inputs(values)
        for name, group in self._groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        self._command(**values)


def _keep_inputs(values: Mapping[str, Any]) -> None:
    """Raise BadParameter if a result would replace a file that is read."""
    patterns = values.get("captures") or values.get("source") or ()
    for name in ("out", "inventory"):
        out = values.get(name)
        if not out or not os.path.isfile(out):
            continue
        inputs = (path for pattern in patterns for path in glob(pattern) or [pattern])
        if any(_is_file(path, out) for path in inputs):
            raise typer.BadParameter(f"{out} is read; name another file", param_hint=f"--{name}")


def _is_file(path: str, other: str) -> bool:
    return os.path.isfile(path) and os.path.samefile(path, other)


def _verb_name(command: Callable[..., None]) -> str:
    return command.__name__.removesuffix("_command")


def _parameter(
    verb_name: str, name: str, hint: Any, default: object, panel: str | None = None
) -> inspect.Parameter:
    """Return a parameter with Typer's declaration of it. panel: a title in the help."""
    declared = _DECLARED[verb_name if name in _DECLARED.get(verb_name, ()) else "shared"][name]
    flags, metavar, text, *others = declared
    settings = {"metavar": metavar or None, "help": text, **(others[0] if others else {})}
    for key in ("parser", "check"):
        if key in settings:
            settings["parser"] = _parsed_by(settings.pop(key), keeps_text=key == "check")
    option: object = typer.Argument(**settings)
    if flags:
        option = typer.Option(*flags.split(), rich_help_panel=panel, **settings)
    annotation = Annotated[hint, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _parsed_by(name: str, *, keeps_text: bool) -> Callable[[object], object]:
    """Return a parser of an option's values: the function ``module:function``.

    Its module is imported at the first value. A ValueError becomes an error of usage. keeps_text:
    the function only checks the value, which stays as it is.
    """
    module, _, path = name.partition(":")

    def parse(value: object) -> object:
        if not isinstance(value, str):  # a default
            return value
        try:
            found = attrgetter(path)(import_module(module))(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return value if keeps_text else found

    return parse
