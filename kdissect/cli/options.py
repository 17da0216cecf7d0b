"""Groups of options that several commands share.

A group is a frozen dataclass whose fields are options. A command has a parameter of that class, and
`verbs` shows Typer an option for each field instead.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

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
    limits_of,
)

if TYPE_CHECKING:
    from kdissect.pipeline.options import Options
    from kdissect.pipeline.selection import Selection

IN_PROCESS_MAX = "256MB"

Spool = Annotated[
    str | None,
    typer.Option(
        "--spool", metavar="DIR", help="Folder for uncompressed copies of compressed captures."
    ),
]


@dataclass(frozen=True)
class ReadingOptions:
    """Options for reading captures."""

    TITLE: ClassVar[str] = "Captures"

    port: Ports = None
    keylog: KeyLogs = None
    limit: LimitItems = None

    def options(self) -> Options:
        """Return the options of a run that shows no record data; raises BadParameter."""
        from kdissect.pipeline.options import Options

        return Options(
            ports=tuple(self.port or ()),
            keylog=tuple(self.keylog or ()),
            payload="none",
            limits=limits_of(self.limit),
        )


@dataclass(frozen=True)
class CaptureOptions(ReadingOptions):
    """Options for reading captures and showing their records."""

    payload: ShownPayload = Payload.FULL
    reveal_secrets: RevealSecrets = False

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
        str,
        typer.Option(
            "--in-process-max",
            metavar="SIZE",
            help="Captures up to this size are dissected in this process.",
        ),
    ] = IN_PROCESS_MAX

    @property
    def given(self) -> list[str]:
        """The options that differ from their defaults, as a user types them."""
        return [
            "--" + field.name.replace("_", "-")
            for field in fields(self)
            if getattr(self, field.name) not in (field.default, [])
        ]


@dataclass(frozen=True)
class NameOptions:
    """Options that select exchanges by the names in them."""

    TITLE: ClassVar[str] = "Which exchanges"

    api: Annotated[
        list[str] | None,
        typer.Option(
            "--api",
            metavar="NAME",
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

    def by_name(self) -> Selection:
        """Return the selection; raises BadParameter, with the option's name, for a wrong value."""
        from kdissect.pipeline.selection import Selection, api_keys

        return Selection(
            apis=checked("--api", api_keys, self.api) if self.api else frozenset(),
            clients=tuple(self.client or ()),
            topics=tuple(self.topic or ()),
            groups=tuple(self.group or ()),
        )


@dataclass(frozen=True)
class SelectionOptions(NameOptions):
    """Options that select exchanges."""

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
        """Return the selection; raises BadParameter, with the option's name, for a wrong value."""
        from kdissect.pipeline.filters import time_ns
        from kdissect.pipeline.selection import ConnectionName, duration_ms

        check_choice(self.host, self.from_time, self.until_time)
        return replace(
            self.by_name(),
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
class ReplaySelectionOptions(NameOptions):
    """Options that select the requests to replay, where `--to` is the target and not a time."""

    from_time: FromTime = None
    until_time: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Exchanges before this time.")
    ] = None

    def times_ns(self) -> tuple[int | None, int | None]:
        """Return both times; raises BadParameter for a wrong value."""
        from kdissect.pipeline.filters import time_ns

        check_choice(None, self.from_time, self.until_time)
        return (
            None if self.from_time is None else time_ns(self.from_time),
            None if self.until_time is None else time_ns(self.until_time),
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
        typer.Option(
            "--since",
            metavar="TIME",
            help="Show which clients are new, gone or changed from this time on.",
        ),
    ] = None

    @property
    def is_given(self) -> bool:
        """Return whether the user wants the inventory."""
        return self.inventory is not None or self.since is not None

    def check(self) -> None:
        """Raise BadParameter for a time that cannot be read, or a file that cannot be written."""
        from kdissect.pipeline.filters import time_ns

        if self.since is not None:
            checked("--since", time_ns, self.since)
        if self.inventory is not None:
            path = Path(self.inventory)
            if path.is_dir() or not path.absolute().parent.is_dir():
                raise typer.BadParameter(
                    f"{path}: is a folder, or in none", param_hint="--inventory"
                )
