"""The options that several verbs share. Each is declared once.

A group is a frozen dataclass whose fields are options. A verb has a parameter of that class, and
`verbs` shows Typer an option for each field instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import typer

from kdissect.cli.messages import EXIT_FINDING, put

if TYPE_CHECKING:
    from kdissect.pipeline.options import Limits, Options
    from kdissect.pipeline.selection import Selection

Value = TypeVar("Value")


def parsed_by(name: str, *, keeps_text: bool = False) -> Callable[[Any], Any]:
    """Return a parser of an option's values: the function ``module:function``.

    Its module is imported at the first value. A ValueError becomes an error of usage. keeps_text:
    the function only checks the value, which stays as it is.
    """
    module, _, path = name.partition(":")

    def parse(value: Any) -> Any:
        if not isinstance(value, str):  # a default
            return value
        try:
            found = attrgetter(path)(import_module(module))(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return value if keeps_text else found

    return parse


def checked(option: str, read: Callable[[Any], Value], value: Any) -> Value:
    """Return `read(value)` for an option's value; its ValueError becomes BadParameter."""
    try:
        return read(value)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


class Payload(StrEnum):
    """The values of --payload."""

    FULL = "full"
    KEYS = "keys"
    HASH = "hash"
    NONE = "none"


Captures = Annotated[
    list[str], typer.Argument(metavar="CAPTURE...", help="Files, folders or globs; '-' is stdin.")
]
Sources = Annotated[
    list[str],
    typer.Argument(metavar="SOURCE...", help="Table sets, or captures (files, folders, globs)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Ports = Annotated[
    list[int] | None,
    typer.Option(
        "--port",
        metavar="N",
        min=1,
        max=65535,
        help="A port of Kafka brokers: a hint, not a filter.",
    ),
]
KeyLogs = Annotated[
    list[str] | None,
    typer.Option(
        "--keylog",
        metavar="FILE",
        help="Secrets of TLS connections (SSLKEYLOGFILE format); repeatable.",
    ),
]
Spool = Annotated[
    str | None,
    typer.Option(
        "--spool", metavar="DIR", help="Folder for uncompressed copies of compressed captures."
    ),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="IP",
        parser=parsed_by("kdissect.pipeline.filters:host_bytes", keeps_text=True),
        help="Connections of this address only; repeatable.",
    ),
]


def _time(*names: str, about: str) -> Any:
    parser = parsed_by("kdissect.pipeline.filters:time_ns", keeps_text=True)
    return typer.Option(*names, metavar="TIME", parser=parser, help=about)


_UNTIL = "Exchanges before this time."
_FROM = "Exchanges from this time on: RFC 3339, UTC if no zone is given, or seconds since 1970."
FromTime = Annotated[str | None, _time("--from", about=_FROM)]
UntilTime = Annotated[str | None, _time("--until", "--to", about=_UNTIL)]


def period_ns(from_time: str | None, until_time: str | None) -> tuple[int | None, int | None]:
    """Return both times as ns since 1970; raises BadParameter if --until is not after --from."""
    from kdissect.pipeline.filters import time_ns

    first = None if from_time is None else time_ns(from_time)
    last = None if until_time is None else time_ns(until_time)
    if first is not None and last is not None and first >= last:
        raise typer.BadParameter(f"{until_time} is not after {from_time}", param_hint="--until")
    return first, last


@dataclass(frozen=True)
class ResultOptions:
    """Options for the result that a verb prints."""

    TITLE: ClassVar[str | None] = None

    as_json: AsJson = False
    quiet: Quiet = False

    def put(self, document: Any, lines: Iterable[str], *, failed: bool = False) -> None:
        """Print the document as JSON, its lines, or nothing; end with exit code 1 if it failed."""
        if self.as_json:
            put([json.dumps(document, indent=1, default=str)])
        elif not self.quiet:
            put(lines)
        if failed:
            raise typer.Exit(EXIT_FINDING)


@dataclass(frozen=True)
class ReadingOptions:
    """Options for reading captures."""

    TITLE: ClassVar[str] = "Captures"

    port: Ports = None
    keylog: KeyLogs = None
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=VALUE",
            help="Largest value accepted from a capture (docs/limits.md); repeatable.",
        ),
    ] = None

    @property
    def limits(self) -> Limits:
        """The limits; raises BadParameter, which lists all of them, for a wrong one."""
        from kdissect.pipeline.options import Limits

        return checked("--limit", Limits.parse, self.limit or ())

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

    payload: Annotated[
        Payload,
        typer.Option(
            "--payload",
            help="Record data that is shown: full; keys (values are null); hash (16 hex digits of "
            "the xxh3_64 of keys and values); none (keys and values are null).",
        ),
    ] = Payload.FULL
    reveal_secrets: Annotated[
        bool, typer.Option("--reveal-secrets", help="Show passwords, tokens and sensitive configs.")
    ] = False

    def options(self) -> Options:
        """Return the options of a run that shows records; raises BadParameter."""
        return replace(
            super().options(), payload=self.payload.value, reveal_secrets=self.reveal_secrets
        )


@dataclass(frozen=True)
class SourceOptions(CaptureOptions):
    """Options for captures in commands that also accept a table set."""

    spool: Spool = None
    in_process_max: Annotated[
        int,
        typer.Option(
            "--in-process-max",
            metavar="SIZE",
            parser=parsed_by("kdissect.cli.sources:parse_size"),
            show_default=False,
            help="Captures up to this size are dissected in this process (default: 256MB).",
        ),
    ] = 256_000_000

    @property
    def given(self) -> list[str]:
        """The options that differ from their defaults, as a user types them."""
        return [
            "--" + field.name.replace("_", "-")
            for field in fields(self)
            if getattr(self, field.name) not in (field.default, [])
        ]


@dataclass(frozen=True)
class RequestOptions:
    """Options that select exchanges by their request: its names and its time."""

    TITLE: ClassVar[str] = "Which exchanges"

    api: Annotated[
        list[Any] | None,
        typer.Option(
            "--api",
            metavar="NAME",
            parser=parsed_by("kdissect.pipeline.selection:api_keys"),
            help="An API by name or its beginning (* and ? match anything), or by key.",
        ),
    ] = None
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client",
            metavar="NAME",
            help="A client id (* and ? match anything), an IP or IP:PORT.",
        ),
    ] = None
    topic: Annotated[
        list[str] | None, typer.Option("--topic", metavar="NAME", help="A topic; * and ? too.")
    ] = None
    group: Annotated[
        list[str] | None,
        typer.Option("--group", metavar="ID", help="A group or a transactional id; * and ? too."),
    ] = None
    from_time: FromTime = None
    until_time: Annotated[str | None, _time("--until", about=_UNTIL)] = (
        None  # --to is the target of a replay
    )

    def selection(self) -> Selection:
        """Return the selection; raises BadParameter for an empty range of times."""
        from kdissect.pipeline.selection import Selection

        first, last = period_ns(self.from_time, self.until_time)
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

    until_time: UntilTime = None
    host: Hosts = None
    connection: Annotated[
        list[Any] | None,
        typer.Option(
            "--connection",
            "--follow",
            metavar="ID",
            parser=parsed_by("kdissect.pipeline.selection:ConnectionName.of"),
            help="A connection_id, or IP:PORT of an end.",
        ),
    ] = None
    exchange: Annotated[
        list[int] | None, typer.Option("--exchange", metavar="ID", help="An exchange_id.")
    ] = None
    errors: Annotated[
        bool, typer.Option("--errors", help="Responses with an error code anywhere.")
    ] = False
    slow: Annotated[
        float | None,
        typer.Option(
            "--slow",
            metavar="TIME",
            parser=parsed_by("kdissect.pipeline.selection:duration_ms"),
            help="service_ms from this on: 50ms, 1.5s.",
        ),
    ] = None
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="An expression on the columns of exchanges."),
    ] = None

    def selection(self) -> Selection:
        """Return the selection; raises BadParameter for an empty range of times."""
        return replace(
            super().selection(),
            hosts=tuple(self.host or ()),
            errors=self.errors,
            slow_ms=self.slow,
            connections=tuple(self.connection or ()),
            exchanges=tuple(self.exchange or ()),
            where=self.where,
        )


@dataclass(frozen=True)
class InventoryOptions:
    """Options for the inventory of clients."""

    TITLE: ClassVar[str] = "Inventory of clients"

    inventory: Annotated[
        str | None,
        typer.Option(
            "--inventory",
            metavar="FILE.csv",
            help="Write each client with its software, API versions, topics and groups.",
        ),
    ] = None
    since: Annotated[
        str | None,
        _time("--since", about="Show which clients are new, gone or changed from this time on."),
    ] = None

    @property
    def is_given(self) -> bool:
        """Return whether the user wants the inventory."""
        return self.inventory is not None or self.since is not None

    @property
    def since_us(self) -> int | None:
        """Return the time in microseconds since 1970."""
        from kdissect.pipeline.filters import time_ns

        return None if self.since is None else time_ns(self.since) // 1000

    def check(self) -> None:
        """Raise BadParameter for a file that cannot be written."""
        if self.inventory is not None:
            path = Path(self.inventory)
            if path.is_dir() or not path.absolute().parent.is_dir():
                raise typer.BadParameter(
                    f"{path}: is a folder, or in none", param_hint="--inventory"
                )
