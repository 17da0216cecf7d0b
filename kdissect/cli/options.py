"""The groups of options that several verbs share.

A group is a frozen dataclass whose fields are options; `options.toml` has how a user types each. A
verb has a parameter of that class, and `verbs` shows Typer an option for each field instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import typer

from kdissect.cli.output import EXIT_FINDING, put
from kdissect.cli.verbs import OptionGroup

if TYPE_CHECKING:
    from kdissect.pipeline.options import Limits, Options
    from kdissect.pipeline.selection import Selection

Given = TypeVar("Given")
Value = TypeVar("Value")


def checked(option: str, read: Callable[[Given], Value], value: Given) -> Value:
    """Return `read(value)` for an option's value; its ValueError becomes BadParameter."""
    try:
        return read(value)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def given(options: object, *others: str) -> dict[str, Any]:
    """Return the fields of a group that have a value, by name, without the `others`."""
    return {
        name: value
        for name, value in vars(options).items()
        if value is not None and name not in others
    }


def period_ns(from_: str | None, until: str | None) -> tuple[int | None, int | None]:
    """Return both times as ns since 1970; raises BadParameter if --until is not after --from."""
    from kdissect.pipeline.filters import time_ns

    first = None if from_ is None else time_ns(from_)
    last = None if until is None else time_ns(until)
    if first is not None and last is not None and first >= last:
        raise typer.BadParameter(f"{until} is not after {from_}", param_hint="--until")
    return first, last


@dataclass(frozen=True)
class ResultOptions(OptionGroup):
    """Options for the result that a verb prints."""

    as_json: bool = False
    quiet: bool = False

    def put(self, document: object, lines: Iterable[str], *, failed: bool = False) -> None:
        """Print the document as JSON, its lines, or nothing; end with exit code 1 if it failed."""
        if self.as_json:
            put([json.dumps(document, indent=1, default=str)])
        elif not self.quiet:
            put(lines)
        if failed:
            raise typer.Exit(EXIT_FINDING)


@dataclass(frozen=True)
class ReadingOptions(OptionGroup):
    """Options for reading captures."""

    TITLE = "Captures"

    port: list[int] | None = None
    keylog: list[str] | None = None
    limit: list[str] | None = None

    @property
    def limits(self) -> Limits:
        """The limits; raises BadParameter, which lists all of them, for a wrong one."""
        from kdissect.pipeline.options import Limits

        return checked("--limit", Limits.parse, self.limit or [])

    def read_arguments(self) -> dict[str, Any]:
        """Return arguments of `kdissect.read` and `kdissect.dissect`; raises BadParameter."""
        shared = given(self, "port", "limit")
        return {**shared, "ports": self.port or (), "limits": self.limits}

    def options(self) -> Options:
        """Return the options of a run that shows no record data; raises BadParameter."""
        from kdissect.pipeline.options import Options

        return Options(
            ports=tuple(self.port or ()),
            keylog=tuple(self.keylog or ()),
            payload="none",
            limits=self.limits,
        )


@dataclass(frozen=True)
class CaptureOptions(ReadingOptions):
    """Options for reading captures and showing their records."""

    payload: Literal["full", "keys", "hash", "none"] = "full"
    reveal_secrets: bool = False

    def options(self) -> Options:
        """Return the options of a run that shows records; raises BadParameter."""
        return replace(super().options(), payload=self.payload, reveal_secrets=self.reveal_secrets)


@dataclass(frozen=True)
class SourceOptions(CaptureOptions):
    """Options for captures in commands that also accept a table set."""

    spool: str | None = None
    in_process_max: int = 256_000_000

    def read_arguments(self) -> dict[str, Any]:
        """Return arguments of `kdissect.read`; raises BadParameter."""
        arguments = super().read_arguments()
        del arguments["in_process_max"]
        return arguments

    @property
    def flags_given(self) -> list[str]:
        """The options that differ from their defaults, as a user types them."""
        return [
            "--" + field.name.replace("_", "-")
            for field in fields(self)
            if getattr(self, field.name) not in (field.default, [])
        ]


@dataclass(frozen=True)
class RequestOptions(OptionGroup):
    """Options that select exchanges by their request: its names and its time."""

    TITLE = "Which exchanges"

    api: list[Any] | None = None
    client: list[str] | None = None
    topic: list[str] | None = None
    group: list[str] | None = None
    from_: str | None = None
    until: str | None = None

    def selection(self) -> Selection:
        """Return the selection; raises BadParameter for an empty range of times."""
        from kdissect.pipeline.selection import Selection

        first, last = period_ns(self.from_, self.until)
        return Selection(
            apis=frozenset().union(*self.api or ()),
            clients=tuple(self.client or ()),
            topics=tuple(self.topic or ()),
            groups=tuple(self.group or ()),
            time_from_ns=first,
            time_to_ns=last,
        )


@dataclass(frozen=True)
class SelectionOptions(RequestOptions):
    """Options that select exchanges."""

    hosts: list[str] | None = None
    connection: list[Any] | None = None
    exchange: list[int] | None = None
    errors: bool = False
    slow: float | None = None
    where: str | None = None

    def selection(self) -> Selection:
        """Return the selection; raises BadParameter for an empty range of times."""
        return replace(
            super().selection(),
            hosts=tuple(self.hosts or ()),
            errors=self.errors,
            slow_ms=self.slow,
            connections=tuple(self.connection or ()),
            exchanges=tuple(self.exchange or ()),
            where=self.where,
        )
