"""`kdissect show`: exchanges on the terminal, as they come."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from kdissect.cli.app import app
from kdissect.cli.common import (
    EXIT_INTERRUPTED,
    Clients,
    FromTime,
    Groups,
    Hosts,
    KeyLogs,
    LimitItems,
    Payload,
    Ports,
    Quiet,
    RevealSecrets,
    ShownPayload,
    Topics,
    ToTime,
    check_choice,
    checked,
    limits_of,
    say,
    some_of,
    with_examples,
)

SHOW_EXAMPLES = """
Examples:

  kdissect show trace.pcap

  kdissect show trace.pcap.gz --api Fetch --slow 50ms --topic orders

  kdissect show trace.pcap --errors -v

  kdissect show trace.pcap --follow 10.0.0.7:51234 -x

  kdissect show trace.pcap --where "client_id like 'app-%' and response_size > 1e6" --json

  tcpdump -i any -U -w - port 9092 | kdissect show -
"""


@app.command("show", cls=with_examples(SHOW_EXAMPLES))
def show_command(
    captures: Annotated[
        list[str],
        typer.Argument(metavar="CAPTURE...", help="Files, folders or globs; '-' is stdin."),
    ],
    api: Annotated[
        list[str] | None,
        typer.Option("--api", metavar="NAME", help="An API by name (* and ? too) or key."),
    ] = None,
    client: Clients = None,
    topic: Topics = None,
    group: Groups = None,
    errors: Annotated[
        bool, typer.Option("--errors", help="Answers with an error code anywhere.")
    ] = False,
    slow: Annotated[
        str | None,
        typer.Option("--slow", metavar="TIME", help="service_ms from this on: 50ms, 1.5s."),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="An expression on the columns of exchanges."),
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option("--follow", metavar="ID", help="One connection: its id, or IP:PORT."),
    ] = None,
    from_time: FromTime = None,
    to_time: ToTime = None,
    host: Hosts = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="The messages in full, as trees.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--hex", "-x", help="The messages' bytes, beside their fields.")
    ] = False,
    records: Annotated[
        bool, typer.Option("--records", help="The records that were produced and fetched.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object a line: the columns of exchanges."),
    ] = False,
    port: Ports = None,
    keylog: KeyLogs = None,
    payload: ShownPayload = Payload.FULL,
    reveal_secrets: RevealSecrets = False,
    colour: Annotated[
        bool | None,
        typer.Option(
            "--colour/--no-colour",
            "--color/--no-color",
            help="Colours (default: on a terminal, unless NO_COLOR is set).",
        ),
    ] = None,
    limit: LimitItems = None,
    quiet: Quiet = False,
) -> None:
    """Requests with their answers, a line each, as they are completed. No Spark, no waiting.

    Values of one option are alternatives; different options must all hold.
    """
    if as_json and (verbose or raw):
        raise typer.BadParameter("it shows columns; -v and -x are text", param_hint="--json")
    has_colour = _has_colour(colour)
    chosen = (
        api,
        client,
        topic,
        group,
        slow,
        where,
        follow,
        from_time,
        to_time,
        host,
        keylog,
        limit,
    )
    out = _Output()
    printed = set()
    try:
        if not (any(chosen) or errors or verbose or raw or records or as_json):
            from kdissect.show.quick import first_lines

            for told in first_lines(captures[0], has_colour) if len(captures) == 1 else ():
                out.write(f"{told.line}\n".encode())
                printed.add(told.packets)
    except BrokenPipeError:
        out.drop()  # who reads us has seen enough
        return
    if os.path.basename(sys.argv[0]) == "kdissect" or sys.argv[0].endswith("__main__.py"):
        from kdissect.startup import light

        light()  # this process shows, and nothing else
    check_choice(host, from_time, to_time)
    from kdissect.pipeline.filters import time_ns
    from kdissect.pipeline.options import Options
    from kdissect.show.filters import Filters, FollowedConnection, api_keys, duration_ms
    from kdissect.show.loop import Style, show

    filters = Filters(
        apis=checked("--api", api_keys, api) if api else frozenset(),
        clients=tuple(client or ()),
        topics=tuple(topic or ()),
        groups=tuple(group or ()),
        hosts=tuple(host or ()),
        errors=errors,
        slow_ms=checked("--slow", duration_ms, slow) if slow is not None else None,
        time_from_ns=None if from_time is None else time_ns(from_time),
        time_to_ns=None if to_time is None else time_ns(to_time),
        follow=checked("--follow", FollowedConnection.of, follow) if follow is not None else None,
        where=where,
    )
    options = Options(
        ports=tuple(port or ()),
        keylog=tuple(keylog or ()),
        payload=payload.value,
        reveal_secrets=reveal_secrets,
        limits=limits_of(limit),
    )
    style = Style(as_json, verbose, raw, records, has_colour)

    def note(line: str) -> None:
        if not quiet:
            say(f"warning: {line}")

    try:
        reading = show(captures, options, filters, style, out.write, note, printed)
        out.flush()
    except BrokenPipeError:
        out.drop()
        return
    except KeyboardInterrupt:
        # how a live capture ends; what was shown is shown
        say("interrupted")
        os._exit(EXIT_INTERRUPTED)
    if not reading.resumed.connection_count:
        note(f"no Kafka traffic found in {some_of(captures)}")


def _has_colour(wanted: bool | None) -> bool:
    if wanted is not None:
        return wanted
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


class _Output:
    """Standard output, which may be closed by who reads it."""

    def write(self, data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def flush(self) -> None:
        sys.stdout.buffer.flush()

    def drop(self) -> None:
        """Nothing more goes out, not even what is left in buffers."""
        empty = os.open(os.devnull, os.O_WRONLY)
        os.dup2(empty, 1)
        os.close(empty)
