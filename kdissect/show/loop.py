"""Writes exchanges for `show` as they are completed: lines, message trees, or JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from kdissect.pipeline.options import Options
from kdissect.show.columns import DEFAULT, LineLayout, fitted
from kdissect.show.lines import LineMaker
from kdissect.show.listing import Exchanges, Listed
from kdissect.tables.schemas import Row
from kdissect.tables.value_text import COMPACT, json_objects
from kdissect.text import display_width, shortened

Write = Callable[[bytes], object]


# Ids beyond 2^53 are strings. Scripts calculate with times, so these stay numbers.
_NUMBERS = ("request_time_ns", "response_time_ns")


def json_lines(table: pa.Table, more: list[str] | None = None) -> bytes:
    """Return each row as a JSON object on a line; `more`: members to add to each, as JSON."""
    lines = json_objects(table.column_names, table.to_batches(), COMPACT, _NUMBERS)
    if more is not None:
        lines = (f"{line[:-1]}{members}}}" for line, members in zip(lines, more, strict=True))
    return "".join(f"{line}\n" for line in lines).encode()


@dataclass(frozen=True, slots=True)
class Style:
    """The style in which `show` writes exchanges.

    as_json: a JSON object a line instead of text.
    tree: also the fields of the decoded messages.
    raw: also their bytes.
    records: also the records of produced and fetched batches.
    colour: with colours for a terminal.
    layout: the columns of a line.
    header: a line of titles comes first.
    names: the columns of JSON, None for all.
    """

    as_json: bool = False
    tree: bool = False
    raw: bool = False
    records: bool = False
    colour: bool = False
    layout: LineLayout = field(default_factory=lambda: fitted(DEFAULT, None, None))
    header: bool = False
    names: tuple[str, ...] | None = None

    @property
    def detail(self) -> str:
        return "records" if self.records else "frames" if self.tree or self.raw else ""


def show(exchanges: Exchanges, options: Options, style: Style, write: Write) -> None:
    """Write the exchanges in this style."""
    shower = _Shower(style, options, write)
    for listed in exchanges:
        shower.show(listed)


_COLOUR = re.compile("\x1b\\[[0-9]*m")
_TIMES = ("upload_ms", "queued_ms", "service_ms", "download_ms")


def _time_line(row: Row) -> str:
    """Return the line of an answered exchange's times."""
    spans = [
        f"{name.removesuffix('_ms')} {'unknown' if row[name] is None else f'{row[name]:.3f} ms'}"
        for name in _TIMES
    ]
    kind = "answer or long poll" if row["wait"] == "undecided" else row["wait"].replace("_", " ")
    return f"  time: {', '.join(spans)}; {kind}"


def _connection_line(row: Row) -> str:
    """Return the line of a connection's handshake and round-trip times."""
    parts = []
    if row["proxied_from"] is not None:
        parts.append(f"proxied from {row['proxied_from']}")
    for name, side in (("client", "request"), ("broker", "response")):
        if not row[f"{side}_syn_seen"]:
            parts.append(f"{name}'s SYN unknown")
            continue
        mss, scale = row[f"{side}_mss"], row[f"{side}_window_scale"]
        options = [
            "no MSS" if mss is None else f"MSS {mss}",
            "no window scaling" if scale is None else f"window scale {scale}",
            "SACK" if row[f"{side}_sack_permitted"] else "no SACK",
        ]
        parts.append(f"{name} {', '.join(options)}")
    for name, side in (("client", "request"), ("broker", "response")):
        p50, p99 = row[f"{side}_rtt_ms_p50"], row[f"{side}_rtt_ms_p99"]
        if p50 is not None:
            parts.append(f"{name}'s RTT p50 {p50:.3f} ms, p99 {p99:.3f} ms")
    return f"  connection: {'; '.join(parts)}"


class _Shower:
    """Writes listed exchanges in one style: lines, lines with message trees, or JSON."""

    def __init__(self, style: Style, options: Options, write: Write) -> None:
        self._style, self._options, self._write = style, options, write
        self._lines = LineMaker(style.layout, style.colour)
        self._is_first = True
        self._shown_connections: set[int] = set()

    def show(self, listed: Listed) -> None:
        if not listed.table.num_rows:
            return
        if self._style.header and not self._style.as_json and self._is_first:
            self._write(self._lines.header())
        self._is_first = False
        if self._style.as_json:
            self._write_json(listed)
        elif self._style.detail:
            self._write_details(listed)
        else:
            self._write(self._lines.block(listed.table))

    def _write_json(self, listed: Listed) -> None:
        more = None
        if self._style.records:
            from kdissect.show.records import Records

            ids = listed.table["exchange_id"].combine_chunks()
            records = Records(listed.tables, ids)
            more = [records.members(ident) for ident in ids.to_pylist()]
        names = self._style.names
        table = listed.table if names is None else listed.table.select(names)
        self._write(json_lines(table, more))

    def _write_details(self, listed: Listed) -> None:
        from kdissect.show.detail import Detailer
        from kdissect.show.records import Records

        style = self._style
        ids = listed.table["exchange_id"].combine_chunks()
        detailer = Detailer(self._options, style.raw, style.colour)
        records = Records(listed.tables, ids) if style.records else None
        topics = listed.table["topics"].to_pylist()
        times = listed.table.select(["wait", *_TIMES]).to_pylist()
        lines = self._lines.lines(listed.table)
        for row, (line, ident) in enumerate(zip(lines, ids.to_pylist(), strict=True)):
            out = [line]
            if style.tree or style.raw:
                assert listed.frames is not None
                out += self._connection_lines(listed, row)
                if times[row]["wait"] is not None:
                    out.append(_time_line(times[row]).encode())
                found = detailer.lines(listed.frames, row, topics[row] or [])
                out += [shown.encode("utf-8", "replace") for shown in found]
            if records is not None:
                out += [
                    shown.encode("utf-8", "replace") for shown in records.lines(ident, style.colour)
                ]
            self._write(b"\n".join(self._cut(line) for line in out) + b"\n")

    def _connection_lines(self, listed: Listed, row: int) -> list[bytes]:
        """The line of an exchange's connection, if that was not shown yet."""
        assert listed.connections is not None
        ident = listed.table["connection_id"][row].as_py()
        if ident in self._shown_connections:
            return []
        self._shown_connections.add(ident)
        number = listed.connections["connection_id"].index(ident).as_py()
        facts = listed.connections.slice(number, 1).to_pylist()[0]
        return [_connection_line(facts).encode()]

    def _cut(self, line: bytes) -> bytes:
        """The line as wide as the terminal; a line that is cut loses its colours."""
        width = self._style.layout.width
        if width is None or len(line) <= width:
            return line
        plain = _COLOUR.sub("", line.decode())
        return line if display_width(plain) <= width else shortened(plain, width).encode()
