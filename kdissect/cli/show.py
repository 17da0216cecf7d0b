"""`kdissect show`: prints exchanges on the terminal while they are read."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kdissect.cli.messages import EXIT_INTERRUPTED, close_stdout, say, some_of
from kdissect.cli.options import CaptureOptions, Captures, Quiet, SelectionOptions, checked
from kdissect.cli.rows import Format, format_of, write_file
from kdissect.cli.verbs import verb
from kdissect.show.style import Clock

if TYPE_CHECKING:
    from kdissect.show.listing import Exchanges


@verb("""
  kdissect show trace.pcap
  kdissect show trace.pcap.gz --api Fetch --slow 50ms --topic orders
  kdissect show trace.pcap --errors -v
  kdissect show trace.pcap --follow 10.0.0.7:51234 -x
  kdissect show trace.pcap --where "client_id like 'app-%' and response_size > 1e6" --json
  kdissect show trace.pcap --slow 1s --out slow.csv
  tcpdump -i any -U -w - port 9092 | kdissect show -
""")
def show_command(
    captures: Captures,
    selected: SelectionOptions,
    capture: CaptureOptions,
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
        bool, typer.Option("--json", help="One JSON object a line: the columns of exchanges.")
    ] = False,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="NAMES",
            help="time, ends, address, client, api, sizes, latency, exchange, packets, detail, or "
            "columns of exchanges; a comma between them, + before one that is added.",
        ),
    ] = None,
    time: Annotated[
        Clock | None,
        typer.Option(
            "--time",
            help="utc (date and time), clock (time of day), relative (seconds since the first "
            "line), delta (since the line before).",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the columns of exchanges to FILE: .csv, .json, .ndjson, .parquet, .arrow.",
        ),
    ] = None,
    header: Annotated[
        bool | None,
        typer.Option("--header/--no-header", help="A line of titles (default: on a terminal)."),
    ] = None,
    colour: Annotated[
        bool | None,
        typer.Option(
            "--colour/--no-colour",
            "--color/--no-color",
            help="Colours (default: on a terminal, unless NO_COLOR is set).",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Print requests with their answers, a line each, as soon as they are complete, without Spark.

    Values of one option are alternatives; different options must all hold.
    """
    if as_json and (verbose or raw):
        raise typer.BadParameter("it shows columns; -v and -x are text", param_hint="--json")
    form = format_of(out)
    if out is not None and (as_json or verbose or raw or records):
        raise typer.BadParameter(
            "it writes columns; no --json, -v, -x, --records", param_hint="--out"
        )
    from kdissect.show.columns import DEFAULT, fitted, parse_columns
    from kdissect.show.listing import Exchanges
    from kdissect.show.loop import Style, show
    from kdissect.tables.schemas import EXCHANGES
    from kdissect.text import unread

    selection = selected.selection()
    options = capture.options()
    is_stored = as_json or out is not None
    names: tuple[str, ...] = EXCHANGES.names if out is not None else DEFAULT
    if columns is not None:
        names = checked("--columns", lambda text: parse_columns(text, is_stored), columns)
    style = Style(
        as_json,
        verbose,
        raw,
        records,
        _has_colour(colour),
        fitted(DEFAULT if is_stored else names, time, _line_width()),
        header=sys.stdout.isatty() if header is None else header,
        names=None if columns is None else names,
    )

    def note(line: str) -> None:
        if not quiet:
            say(f"warning: {line}")

    exchanges = Exchanges(captures, options, selection, note, style.detail)
    try:
        if out is not None:
            _write(exchanges, names, form, out, quiet)
        else:
            show(exchanges, options, style, _put_bytes)
    except BrokenPipeError:
        close_stdout()
        return
    except KeyboardInterrupt:
        # the usual end of a live capture: lines shown so far stay, and a file has the rows so far
        say("interrupted")
        os._exit(EXIT_INTERRUPTED)
    reading = exchanges.reading
    left = unread(reading.unread)
    if left is not None and not quiet:
        say(left)
    if not reading.resumed.counts.kafka:
        note(f"no Kafka traffic found in {some_of(captures)}")


def _write(
    exchanges: Exchanges, names: tuple[str, ...], form: Format, path: str, quiet: bool
) -> None:
    """Write columns of `exchanges` to a file, as far as they come before an interrupt."""
    import pyarrow as pa

    from kdissect.tables.schemas import EXCHANGES
    from kdissect.text import plural

    schema = pa.schema([EXCHANGES.field(name) for name in names])
    write_file(form, schema, exchanges.batches(schema), path)
    if not quiet:
        say(f"{plural(exchanges.count, 'exchange')} in {path}")
    if exchanges.is_interrupted:
        raise KeyboardInterrupt


def _has_colour(wanted: bool | None) -> bool:
    if wanted is not None:
        return wanted
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def _line_width() -> int | None:
    """Return COLUMNS or the terminal's width; None for a file or a pipe, which have no limit."""
    width = os.environ.get("COLUMNS", "")
    if width.isdigit() and int(width):
        return int(width)
    return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None


def _put_bytes(data: bytes) -> None:
    """Write to stdout now: a reader follows the capture."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
