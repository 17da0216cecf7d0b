"""Options that several verbs share, as groups: a command names a group as one of its parameters.

A group is a frozen dataclass whose fields are options. `with_groups` gives Typer a signature with
an option for each field, and the command the group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from kdissect.cli.common import (
    KeyLogs,
    LimitItems,
    Payload,
    Ports,
    RevealSecrets,
    ShownPayload,
)

IN_PROCESS_MAX = "256MB"

Spool = Annotated[
    str | None,
    typer.Option(
        "--spool", metavar="DIR", help="Folder for uncompressed copies of compressed captures."
    ),
]


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer sees it: instead of a group, the options that are its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(
                parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            )
            continue
        parameters += _options(groups[name])

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(group: Any) -> Iterator[inspect.Parameter]:
    """A parameter for each field, listed in the help under the group's title."""
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


@dataclass(frozen=True)
class CaptureOptions:
    """How captures are read and shown."""

    TITLE: ClassVar[str] = "Captures"

    port: Ports = None
    keylog: KeyLogs = None
    payload: ShownPayload = Payload.FULL
    reveal_secrets: RevealSecrets = False
    limit: LimitItems = None


@dataclass(frozen=True)
class SourceOptions(CaptureOptions):
    """How a capture is read that a verb takes instead of a table set."""

    spool: Spool = None
    in_process_max: Annotated[
        str,
        typer.Option(
            "--in-process-max",
            metavar="SIZE",
            help="Captures up to this size are dissected in this process.",
        ),
    ] = IN_PROCESS_MAX

    @property
    def given(self) -> list[str]:
        """The options that differ from their defaults, as they are typed."""
        return [
            "--" + field.name.replace("_", "-")
            for field in fields(self)
            if getattr(self, field.name) not in (field.default, [])
        ]
