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
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from kdissect.cli.common import (
    FromTime,
    Hosts,
    KeyLogs,
    LimitItems,
    Payload,
    Ports,
    RevealSecrets,
    ShownPayload,
    UntilTime,
    check_choice,
    checked,
)

if TYPE_CHECKING:
    from kdissect.pipeline.selection import Selection

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
class ReadingOptions:
    """How captures are read."""

    TITLE: ClassVar[str] = "Captures"

    port: Ports = None
    keylog: KeyLogs = None
    limit: LimitItems = None


@dataclass(frozen=True)
class CaptureOptions(ReadingOptions):
    """How captures are read and shown."""

    payload: ShownPayload = Payload.FULL
    reveal_secrets: RevealSecrets = False


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


@dataclass(frozen=True)
class SelectionOptions:
    """Which exchanges a verb works on."""

    TITLE: ClassVar[str] = "Which exchanges"

    api: Annotated[
        list[str] | None,
        typer.Option(
            "--api",
            metavar="NAME",
            help="An API by name, by the beginning of one (* and ? fit anything), or by key.",
        ),
    ] = None
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client", metavar="NAME", help="A client id (* and ? fit anything), an IP or IP:PORT."
        ),
    ] = None
    topic: Annotated[
        list[str] | None, typer.Option("--topic", metavar="NAME", help="A topic; * and ? too.")
    ] = None
    group: Annotated[
        list[str] | None,
        typer.Option("--group", metavar="ID", help="A group or a transactional id; * and ? too."),
    ] = None
    host: Hosts = None
    connection: Annotated[
        list[str] | None,
        typer.Option(
            "--connection", "--follow", metavar="ID", help="A connection_id, or IP:PORT of an end."
        ),
    ] = None
    exchange: Annotated[
        list[int] | None, typer.Option("--exchange", metavar="ID", help="An exchange_id.")
    ] = None
    from_time: FromTime = None
    until_time: UntilTime = None
    errors: Annotated[
        bool, typer.Option("--errors", help="Responses with an error code anywhere.")
    ] = False
    slow: Annotated[
        str | None,
        typer.Option("--slow", metavar="TIME", help="service_ms from this on: 50ms, 1.5s."),
    ] = None
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="An expression on the columns of exchanges."),
    ] = None

    def selection(self) -> Selection:
        """Raises BadParameter, naming the option, for a value that is wrong."""
        from kdissect.pipeline.filters import time_ns
        from kdissect.pipeline.selection import ConnectionName, Selection, api_keys, duration_ms

        check_choice(self.host, self.from_time, self.until_time)
        return Selection(
            apis=checked("--api", api_keys, self.api) if self.api else frozenset(),
            clients=tuple(self.client or ()),
            topics=tuple(self.topic or ()),
            groups=tuple(self.group or ()),
            hosts=tuple(self.host or ()),
            time_from_ns=None if self.from_time is None else time_ns(self.from_time),
            time_to_ns=None if self.until_time is None else time_ns(self.until_time),
            errors=self.errors,
            slow_ms=None if self.slow is None else checked("--slow", duration_ms, self.slow),
            connections=tuple(
                checked("--connection", ConnectionName.of, text) for text in self.connection or ()
            ),
            exchanges=tuple(self.exchange or ()),
            where=self.where,
        )


@dataclass(frozen=True)
class ReplaySelectionOptions(SelectionOptions):
    """The same where `--to` is the target."""

    until_time: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Exchanges before this time.")
    ] = None
