"""The records of exchanges, as lines and as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from kdissect.show import style
from kdissect.show.detail import bytes_text, value_text
from kdissect.tables.schemas import Row
from kdissect.tables.value_text import json_value
from kdissect.text import visible

VALUE_SHOWN = 400  # bytes of a key or a value; how many more there are is said
HEADER_SHOWN = 64


class Records:
    """Records and batches of some exchanges, by exchange."""

    def __init__(self, tables: dict[str, pa.Table], exchange_ids: pa.Array) -> None:
        self._records = _by_exchange(tables.get("records"), exchange_ids)
        self._batches = _by_exchange(tables.get("record_batches"), exchange_ids)
        self._inner: dict[tuple[int, int, int], tuple[str, Row]] = {}
        for name, table in tables.items():
            if name.startswith("internal/"):
                for rows in _by_exchange(table, exchange_ids).values():
                    for row in rows:
                        key = (row["exchange_id"], row["batch_index"], row["record_index"])
                        self._inner[key] = (name.removeprefix("internal/"), row)

    def lines(self, exchange_id: int, colour: bool) -> Iterator[str]:
        """A line for each batch and each record."""
        records = defaultdict(list)
        for row in self._records.get(exchange_id, []):
            records[row["batch_index"]].append(row)
        for batch in self._batches.get(exchange_id, []):
            yield "  " + style.painted(_batch_line(batch), style.DIM, colour)
            for row in records.pop(batch["batch_index"], []):
                yield "    " + self._line(row, colour)
        for rows in records.values():
            yield from ("    " + self._line(row, colour) for row in rows)

    def _line(self, row: Row, colour: bool) -> str:
        offset = "?" if row["offset"] is None else row["offset"]
        topic = visible(row["topic"] or row["topic_id"] or "?")
        place = style.painted(f"{topic}-{row['partition']} @ {offset}", style.GREEN, colour)
        when = row["timestamp"]
        parts = [place]
        if when is not None:
            parts.append(f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d}")
        if row["control_type"] is not None:
            parts.append(f"control {row['control_type']}")
        inner = self._inner.get((row["exchange_id"], row["batch_index"], row["record_index"]))
        if inner is not None:
            name, found = inner
            parts.append(f"{name} {_shown(found.get('key'))} = {_shown(found['value'])}")
        else:
            parts.append(f"{_data(row['key'])} = {_data(row['value'])}")
        if row["headers"]:
            headers = (
                f"{visible(str(header['key']))}: {_data(header['value'], HEADER_SHOWN)}"
                for header in row["headers"]
            )
            parts.append("{" + ", ".join(headers) + "}")
        return "  ".join(parts)

    def members(self, exchange_id: int) -> str:
        """`,"records":[...]` of an exchange, for its JSON object; bytes are in base64."""
        import json

        rows = []
        for row in self._records.get(exchange_id, []):
            shown = {name: json_value(item) for name, item in row.items() if name != "exchange_id"}
            rows.append(shown)
        return f',"records":{json.dumps(rows, ensure_ascii=False)}'


def _by_exchange(table: pa.Table | None, exchange_ids: pa.Array) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = defaultdict(list)
    if table is not None:
        wanted = table.filter(pc.is_in(table["exchange_id"], exchange_ids))
        for row in wanted.to_pylist():
            found[row["exchange_id"]].append(row)
    return found


def _batch_line(batch: Row) -> str:
    topic = visible(batch["topic"] or batch["topic_id"] or "?")
    count = "" if batch["record_count"] is None else f", {batch['record_count']} records"
    facts = [f"{batch['size']} bytes", f"magic {batch['magic']}"]
    if batch["codec"] is not None:
        facts.append(batch["codec"])
    if batch["is_partial"]:
        facts.append("cut off by the size of the fetch")
    if batch["crc_ok"] is False:
        facts.append("wrong CRC")
    for name, word in (("is_transactional", "transactional"), ("is_control", "control")):
        if batch[name]:
            facts.append(word)
    if batch["producer_id"] is not None and batch["producer_id"] >= 0:
        facts.append(f"producer {batch['producer_id']} epoch {batch['producer_epoch']}")
        facts.append(f"sequence {batch['base_sequence']}")
    first = batch["base_offset"]
    return f"{topic}-{batch['partition']} batch from {first}{count}: {', '.join(facts)}"


def _data(data: bytes | None, most: int = VALUE_SHOWN) -> str:
    return "null" if data is None else bytes_text(data, most)


def _shown(item: object) -> str:
    if isinstance(item, dict):
        item = {name: each for name, each in item.items() if each is not None}
    return value_text(item)
