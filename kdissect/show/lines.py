"""Rows of `exchanges` as lines for people: array operations over all rows of a table at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.show import style, text_columns
from kdissect.show.columns import COMPOSED, GAP, LineLayout, ShownColumn
from kdissect.show.text_columns import joined
from kdissect.text import shortened, visible

_STATES = {
    "paired": "",
    "no_response_expected": style.NO_ANSWER_WANTED,
    "request_missing": "request not captured",
    "response_missing": "answer not captured",
    "connection_closed": "closed before the answer",
}
_DECODED = {
    "ok": "",
    "absent": "",
    "partial": "bytes missing",
    "unknown_version": "unknown version",
    "unknown_api": "unknown API",
    "malformed": "malformed",
}


_COLOURS = {
    "time": style.DIM,
    "api": style.CYAN,
    "sizes": style.DIM,
    "latency": style.YELLOW,
    "exchange": style.DIM,
    "packets": style.DIM,
}


class LineMaker:
    """Turns tables into bytes to be written, with colours or without."""

    def __init__(self, layout: LineLayout, colour: bool) -> None:
        self._layout, self._colour = layout, colour
        self._first_ns: int | None = None  # of the first line
        self._last_ns = 0  # of the line before

    def lines(self, table: pa.Table) -> list[bytes]:
        """A line for each row, without its end."""
        return [line.encode() for line in self._column(table).to_pylist()]

    def block(self, table: pa.Table) -> bytes:
        """All lines, each with its end."""
        lines = joined(self._column(table), "\n")
        buffers = lines.buffers()
        offsets = np.frombuffer(buffers[1], np.int32)[lines.offset : lines.offset + len(lines) + 1]
        return bytes(memoryview(buffers[2])[int(offsets[0]) : int(offsets[-1])])

    def header(self) -> bytes:
        """The line of titles, with its end."""
        text = self._layout.header()
        return (f"{style.BOLD}{text}{style.RESET}" if self._colour else text).encode() + b"\n"

    def _column(self, rows: pa.Table) -> pa.Array:
        table = text_columns.plain(rows)
        *columns, last = self._layout.columns
        parts: list[pa.Array | str] = []
        for column in columns:
            parts += [self._cell(table, column), GAP]
        if last.name == "detail":
            parts.append(self._detail(table))
        else:
            parts.append(self._cell(table, last))
        return pc.utf8_rtrim(joined(*parts), " ")

    def _cell(self, table: pa.RecordBatch, column: ShownColumn) -> pa.Array:
        """A column's text, as wide as it is; cut where the line has an end."""
        if column.name in COMPOSED:
            shown = getattr(self, f"_{column.name}")(table)
        else:
            shown = text_columns.stored(table[column.name])
        if self._layout.width is not None:
            shown = text_columns.cut(shown, column.width)
        padded = text_columns.padded(shown, column.width, column.is_right)
        colour = _COLOURS.get(column.name)
        return padded if colour is None else self._painted(padded, colour)

    def _detail(self, table: pa.RecordBatch) -> pa.Array:
        """Faults, then topics, group and transaction: whole, or cut at the end of the line."""
        painted = pc.utf8_rtrim(
            joined(self._faults(table), self._what(table), self._queued(table)), " "
        )
        rest = self._layout.rest
        if rest is None:
            return painted
        plain = painted
        if self._colour:
            plain = pc.replace_substring_regex(painted, "\x1b\\[[0-9]*m", "")
        cut = text_columns.cut(plain, rest)
        is_whole = pc.equal(cut, plain)
        return pc.if_else(is_whole, painted, cut)

    def _painted(self, part: pa.Array | str, colour: str) -> pa.Array:
        if not self._colour:
            return part
        if isinstance(part, str):
            return f"{colour}{part}{style.RESET}"
        return joined(colour, part, style.RESET)

    def _time(self, table: pa.RecordBatch) -> pa.Array:
        asked = table["request_time_ns"].is_valid()
        column = pc.if_else(asked, table["request_time_ns"], table["response_time_ns"])
        time_ns = column.to_numpy(zero_copy_only=False).astype(np.int64)
        clock = self._layout.clock
        if clock in ("utc", "clock"):
            return text_columns.time_column(time_ns, with_date=clock == "utc")
        if self._first_ns is None:
            self._first_ns = self._last_ns = int(time_ns[0])
        if clock == "relative":
            return text_columns.seconds_column(time_ns - self._first_ns)
        before = np.concatenate([[self._last_ns], time_ns[:-1]])
        self._last_ns = int(time_ns[-1])
        return text_columns.seconds_column(time_ns - before)

    def _ends(self, table: pa.RecordBatch) -> pa.Array:
        client = text_columns.padded(self._end(table, "client"), style.ADDRESS_WIDTH)
        return joined(client, style.ARROW, self._end(table, "broker"))

    def _address(self, table: pa.RecordBatch) -> pa.Array:
        return self._end(table, "client")

    def _end(self, table: pa.RecordBatch, side: str) -> pa.Array:
        names, index = text_columns.distinct(table[f"{side}_ip"])
        shown = pa.array([f"[{name}]" if ":" in name else name for name in names.to_pylist()])
        port = table[f"{side}_port"].cast(pa.string())
        return joined(shown.take(index), ":", port)

    def _client(self, table: pa.RecordBatch) -> pa.Array:
        names, index = text_columns.distinct(table["client_id"])
        shown = pa.array([visible(name or "") or '""' for name in names.to_pylist()], pa.string())
        # without a name, the address says who it is, unless another column does
        has_address = any(column.name in ("ends", "address") for column in self._layout.columns)
        other = pa.scalar("-") if has_address else self._end(table, "client")
        return pc.coalesce(shown.take(index), other)

    def _api(self, table: pa.RecordBatch) -> pa.Array:
        key = table["api_key"].cast(pa.string())
        name = pc.coalesce(table["api_name"], joined("api ", key))
        name = pc.if_else(
            pc.and_(table["api_name"].is_null(), table["api_key"].is_null()), "?", name
        )
        version = table["api_version"].cast(pa.string())
        version = joined(pc.if_else(version.is_valid(), " v", ""), version)
        inferred = pc.equal(table["version_source"], "inferred")
        tail = joined(version, pc.if_else(inferred, "?", ""))
        if self._layout.width is None:
            return joined(name, tail)
        # the version stays whole
        (width,) = (column.width for column in self._layout.columns if column.name == "api")
        return pa.array(
            [
                shortened(each, width - len(end)) + end
                for each, end in zip(name.to_pylist(), tail.to_pylist(), strict=True)
            ]
        )

    def _sizes(self, table: pa.RecordBatch) -> pa.Array:
        def number(name: str) -> pa.Array:
            return pc.coalesce(table[name].cast(pa.string()), "-")

        response = text_columns.padded(number("response_size"), style.SIZE_WIDTH, right=True)
        return joined(number("request_size"), style.ARROW, response, " B")

    def _latency(self, table: pa.RecordBatch) -> pa.Array:
        column = table["latency_ms"]
        value = column.fill_null(0.0).to_numpy(zero_copy_only=False)
        shown = joined(text_columns.millis_column(value), " ms")
        return pc.if_else(column.is_valid(), shown, "-   ")

    def _exchange(self, table: pa.RecordBatch) -> pa.Array:
        return text_columns.stored(table["exchange_id"])

    def _packets(self, table: pa.RecordBatch) -> pa.Array:
        sides = (table[f"{side}_packet"] for side in ("request", "response"))
        request, response = (pc.coalesce(side.cast(pa.string()), "-") for side in sides)
        return joined(request, style.ARROW, response)

    def _what(self, table: pa.RecordBatch) -> pa.Array:
        """Topics, group, transaction."""
        topics = table["topics"]
        count = pc.list_value_length(topics).fill_null(0)
        more = pc.subtract(count, style.TOPICS_SHOWN)
        names = pc.binary_join(pc.list_slice(topics, 0, style.TOPICS_SHOWN), ", ")
        rest = pc.if_else(pc.greater(more, 0), joined(", +", more.cast(pa.string())), "")
        has_topics = pc.greater(count, 0)
        named = joined(self._painted(text_columns.visible_column(names), style.GREEN), rest, GAP)
        parts = [pc.if_else(has_topics, named, "")]
        for column, word in (("group_id", "group "), ("transactional_id", "txn ")):
            values = table[column]
            if values.null_count == len(values):
                continue
            named = self._painted(text_columns.visible_column(values), style.MAGENTA)
            shown = joined(word, named, GAP)
            parts.append(pc.if_else(values.is_valid(), shown, ""))
        return joined(*parts)

    def _faults(self, table: pa.RecordBatch) -> pa.Array:
        """The text of each row's problems: errors, throttling, missing or undecodable messages."""
        parts: list[pa.Array | str] = []
        codes = table["error_codes"]
        wrong = pc.greater(pc.list_value_length(codes).fill_null(0), 0)
        if pc.any(wrong).as_py():
            name = table["error_name"]
            others = pc.subtract(pc.list_value_length(codes), 1)
            more = pc.if_else(pc.greater(others, 0), joined(" +", others.cast(pa.string())), "")
            shown = self._painted(joined("! ", name, more), style.RED)
            parts.append(pc.if_else(wrong, joined(shown, GAP), ""))
        throttle = table["throttle_time_ms"]
        slowed = pc.greater(throttle, 0).fill_null(False)
        if pc.any(slowed).as_py():
            shown = joined("throttled ", throttle.cast(pa.string()), " ms")
            parts.append(pc.if_else(slowed, joined(self._painted(shown, style.YELLOW), GAP), ""))
        for column, phrases in (("status", _STATES), ("decode_status", _DECODED)):
            names, index = text_columns.distinct(table[column])
            words = [phrases.get(name, name) for name in names.to_pylist()]
            if any(words):
                notes = [
                    self._painted(f"({word})", style.YELLOW) + GAP if word else "" for word in words
                ]
                parts.append(pa.array(notes).take(index))
        return joined(*parts) if parts else pa.array([""] * table.num_rows)

    def _queued(self, table: pa.RecordBatch) -> pa.Array:
        """The wait for earlier requests of the connection, if it is long."""
        queued = table["queued_ms"]
        value = queued.fill_null(0.0).to_numpy(zero_copy_only=False)
        shown = joined("queued ", text_columns.millis_column(value), " ms")
        return pc.if_else(
            pa.array(value >= style.QUEUED_MS), self._painted(shown, style.YELLOW), ""
        )
