"""Rows of `exchanges` as lines for people: array operations over all rows of a table at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.show import style, text_columns
from kdissect.show.text_columns import joined
from kdissect.text import visible

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
    "encrypted": "encrypted",
    "partial": "bytes missing",
    "unknown_version": "unknown version",
    "unknown_api": "unknown API",
    "malformed": "malformed",
}


class LineMaker:
    """Turns tables into bytes to be written, with colours or without."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def lines(self, table: pa.Table) -> list[bytes]:
        """A line for each row, without its end."""
        return [line.encode() for line in self._column(table).to_pylist()]

    def block(self, table: pa.Table) -> bytes:
        """All lines, each with its end."""
        lines = joined(self._column(table), "\n")
        buffers = lines.buffers()
        offsets = np.frombuffer(buffers[1], np.int32)[lines.offset : lines.offset + len(lines) + 1]
        return bytes(memoryview(buffers[2])[int(offsets[0]) : int(offsets[-1])])

    def _column(self, table: pa.Table) -> pa.Array:
        asked = table["request_time_ns"].is_valid()
        time = pc.if_else(asked, table["request_time_ns"], table["response_time_ns"])
        when = text_columns.time_column(
            text_columns.plain(time).to_numpy(zero_copy_only=False).astype(np.int64)
        )
        parts = [
            self._painted(when, style.DIM),
            "  ",
            self._address(table, "client"),
            self._painted(style.ARROW, style.DIM),
            self._address(table, "broker"),
            "  ",
            self._client(table),
            "  ",
            self._painted(self._api(table), style.CYAN),
            " ",
            self._painted(self._sizes(table), style.DIM),
            " ",
            self._latency(table),
            self._what(table),
            self._faults(table),
        ]
        return joined(*parts)

    def _painted(self, part: Any, colour: str) -> Any:
        if not self._colour:
            return part
        if isinstance(part, str):
            return f"{colour}{part}{style.RESET}"
        return joined(colour, part, style.RESET)

    def _address(self, table: pa.Table, side: str) -> pa.Array:
        names, index = text_columns.distinct(table[f"{side}_ip"])
        shown = pa.array([f"[{name}]" if ":" in name else name for name in names.to_pylist()])
        port = text_columns.plain(table[f"{side}_port"]).cast(pa.string())
        return text_columns.padded(joined(shown.take(index), ":", port), style.ADDRESS_WIDTH)

    def _client(self, table: pa.Table) -> pa.Array:
        names, index = text_columns.distinct(table["client_id"])
        shown = [visible(name or "") or '""' for name in names.to_pylist()]
        width = style.CLIENT_WIDTH
        padded = pa.array([*(name.ljust(width) for name in shown), "-".ljust(width)])
        return padded.take(index.fill_null(len(shown)))

    def _api(self, table: pa.Table) -> pa.Array:
        key = text_columns.plain(table["api_key"]).cast(pa.string())
        name = pc.coalesce(text_columns.plain(table["api_name"]), joined("api ", key))
        name = pc.if_else(
            pc.and_(table["api_name"].is_null(), table["api_key"].is_null()), "?", name
        )
        version = text_columns.plain(table["api_version"]).cast(pa.string())
        version = joined(chosen_text(version, " v"), version)
        inferred = pc.equal(text_columns.plain(table["version_source"]), "inferred")
        mark = pc.if_else(inferred, "?", "")
        return text_columns.padded(joined(text_columns.plain(name), version, mark), style.API_WIDTH)

    def _sizes(self, table: pa.Table) -> pa.Array:
        def number(name: str) -> pa.Array:
            return pc.coalesce(text_columns.plain(table[name]).cast(pa.string()), "-")

        request = text_columns.padded(number("request_size"), style.SIZE_WIDTH, right=True)
        response = text_columns.padded(number("response_size"), style.SIZE_WIDTH, right=True)
        return joined(request, style.ARROW, response, " B")

    def _latency(self, table: pa.Table) -> pa.Array:
        column = text_columns.plain(table["latency_ms"])
        value = column.fill_null(0.0).to_numpy(zero_copy_only=False)
        shown = joined(text_columns.millis_column(value), " ms")
        shown = pc.if_else(column.is_valid(), shown, "-   ")
        return self._painted(
            text_columns.padded(shown, style.LATENCY_WIDTH, right=True), style.YELLOW
        )

    def _what(self, table: pa.Table) -> pa.Array:
        """Topics, group, transaction."""
        topics = text_columns.plain(table["topics"])
        count = pc.list_value_length(topics).fill_null(0)
        more = pc.subtract(count, style.TOPICS_SHOWN)
        names = pc.binary_join(pc.list_slice(topics, 0, style.TOPICS_SHOWN), ", ")
        rest = pc.if_else(pc.greater(more, 0), joined(", +", more.cast(pa.string())), "")
        has_topics = pc.greater(count, 0)
        named = joined("  ", self._painted(text_columns.visible_column(names), style.GREEN))
        parts = [pc.if_else(has_topics, named, ""), rest]
        for column, word in (("group_id", "  group "), ("transactional_id", "  txn ")):
            values = text_columns.plain(table[column])
            if values.null_count == len(values):
                continue
            shown = joined(word, self._painted(text_columns.visible_column(values), style.MAGENTA))
            parts.append(pc.if_else(values.is_valid(), shown, ""))
        return joined(*parts)

    def _faults(self, table: pa.Table) -> pa.Array:
        """Errors, throttling, queueing, what is missing or wrong."""
        parts: list[Any] = []
        codes = text_columns.plain(table["error_codes"])
        wrong = pc.greater(pc.list_value_length(codes).fill_null(0), 0)
        if pc.any(wrong).as_py():
            name = text_columns.plain(table["error_name"])
            others = pc.subtract(pc.list_value_length(codes), 1)
            more = pc.if_else(pc.greater(others, 0), joined(" +", others.cast(pa.string())), "")
            shown = self._painted(joined("! ", name, more), style.RED)
            parts.append(pc.if_else(wrong, joined("  ", shown), ""))
        throttle = text_columns.plain(table["throttle_time_ms"])
        slowed = pc.greater(throttle, 0).fill_null(False)
        if pc.any(slowed).as_py():
            shown = joined("  throttled ", throttle.cast(pa.string()), " ms")
            parts.append(pc.if_else(slowed, self._painted(shown, style.YELLOW), ""))
        queued = text_columns.plain(table["queued_ms"])
        has_queued = pc.greater_equal(queued, style.QUEUED_MS).fill_null(False)
        if pc.any(has_queued).as_py():
            value = queued.fill_null(0.0).to_numpy(zero_copy_only=False)
            shown = joined("  queued ", text_columns.millis_column(value), " ms")
            parts.append(pc.if_else(has_queued, self._painted(shown, style.YELLOW), ""))
        for column, phrases in (("status", _STATES), ("decode_status", _DECODED)):
            names, index = text_columns.distinct(table[column])
            told = [phrases.get(name, name) for name in names.to_pylist()]
            if any(told):
                notes = [
                    f"  {self._painted(f'({word})', style.YELLOW)}" if word else "" for word in told
                ]
                parts.append(pa.array(notes).take(index))
        return joined(*parts) if parts else pa.array([""] * table.num_rows)


def chosen_text(column: pa.Array, word: str) -> pa.Array:
    """`word` where the column is not null, else nothing."""
    return pc.if_else(column.is_valid(), word, "")
