"""`kdissect show`: prints exchanges on the terminal while they are read."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from kdissect.cli.options import CaptureOptions, SelectionOptions, checked
from kdissect.cli.output import (
    EXIT_INTERRUPTED,
    Format,
    close_stdout,
    format_of,
    no_kafka,
    say,
    write_file,
)
from kdissect.cli.verbs import OptionGroup, verb
from kdissect.show.style import Clock

if TYPE_CHECKING:
    from kdissect.show.listing import Exchanges
    from kdissect.show.loop import Style


@dataclass(frozen=True)
class ShownOptions(OptionGroup):
    """Options for what is shown of each exchange, and how."""

    verbose: bool = False
    raw: bool = False
    records: bool = False
    as_json: bool = False
    columns: str | None = None
    time: Clock | None = None
    out: str | None = None
    header: bool | None = None
    colour: bool | None = None
    quiet: bool = False

    def style(self) -> Style:
        """Return the style; raises BadParameter for options that exclude each other."""
        from kdissect.show.columns import DEFAULT, fitted, parse_columns
        from kdissect.show.loop import Style

        is_text = self.verbose or self.raw
        if self.as_json and is_text:
            raise typer.BadParameter("it shows columns; -v and -x are text", param_hint="--json")
        if self.out is not None and (self.as_json or is_text or self.records):
            raise typer.BadParameter(
                "it writes columns; no --json, -v, -x, --records", param_hint="--out"
            )
        names, is_stored = None, self.as_json or self.out is not None
        if self.columns is not None:
            names = checked("--columns", lambda text: parse_columns(text, is_stored), self.columns)
        shown = DEFAULT if is_stored or names is None else names
        return Style(
            self.as_json,
            self.verbose,
            self.raw,
            self.records,
            _has_colour(self.colour),
            fitted(shown, self.time, _line_width()),
            header=sys.stdout.isatty() if self.header is None else self.header,
            names=names,
        )


@verb("""
  kdissect show trace.pcap
  kdissect show trace.pcap.gz --api Fetch --slow 50ms --topic orders
  kdissect show trace.pcap --errors -v
  kdissect show trace.pcap --connection 10.0.0.7:51234 -x
  kdissect show trace.pcap --where "client_id like 'app-%' and response_size > 1e6" --json
  kdissect show trace.pcap --slow 1s --out slow.csv
  tcpdump -i any -U -w - port 9092 | kdissect show -
""")
def show_command(
    captures: list[str], selected: SelectionOptions, capture: CaptureOptions, shown: ShownOptions
) -> None:
    """Print requests with their answers, a line each, as soon as they are complete, without Spark.

    Values of one option are alternatives; different options must all hold.
    """
    form = format_of(shown.out)
    style = shown.style()
    selection = selected.selection()
    options = capture.options()
    from kdissect.show.listing import Exchanges
    from kdissect.show.loop import show
    from kdissect.text import unread

    def note(line: str) -> None:
        if not shown.quiet:
            say(f"warning: {line}")

    exchanges = Exchanges(captures, options, selection, note, style.detail)
    try:
        if shown.out is not None:
            _write(exchanges, style.names, form, shown.out, shown.quiet)
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
    if left is not None and not shown.quiet:
        say(left)
    if not reading.resumed.counts.kafka:
        note(no_kafka(captures, reading.ignored))


def _write(
    exchanges: Exchanges, names: tuple[str, ...] | None, form: Format, path: str, quiet: bool
) -> None:
    """Write columns of `exchanges` to a file, as far as they come before an interrupt.

    names: None is all columns.
    """
    import pyarrow as pa

    from kdissect.tables.schemas import EXCHANGES
    from kdissect.text import plural

    schema = pa.schema([EXCHANGES.field(name) for name in names or EXCHANGES.names])
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
