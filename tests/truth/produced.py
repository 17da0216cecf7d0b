"""What clients say they wrote, and the records of the tables in the same words."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.truth.request_log import read_lines

FETCHES = ("fetch", "share_fetch")  # sources of records that a consumer was given

Headers = tuple[tuple[str, bytes | None], ...]
Place = tuple[str, int, int]
"""topic, partition, offset"""


@dataclass(frozen=True)
class Produced:
    """A record that a client's library confirmed. None: not in the list."""

    how: str | None
    topic: str
    partition: int | None
    offset: int | None
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: Headers | None

    @property
    def told(self) -> tuple[str, ...]:
        """Columns of the list besides topic, key and value, as the client sent the record."""
        names = ["partition", "offset", "headers"]
        if self.how != "logappend":  # there the time is the broker's, from the response
            names.append("timestamp_ms")
        return tuple(name for name in names if getattr(self, name) is not None)

    @property
    def place(self) -> Place | None:
        if self.partition is None or self.offset is None:
            return None
        return self.topic, self.partition, self.offset


def load(path: Path) -> list[Produced]:
    """All records of NAME.produced.jsonl.gz. Texts stand for their UTF-8 bytes."""
    return [_produced(line) for line in read_lines(path)]


def _produced(one: dict[str, Any]) -> Produced:
    offset = one.get("offset")
    headers = one.get("headers")
    return Produced(
        how=one["how"],
        topic=one["topic"],
        partition=one.get("partition"),
        offset=None if offset is None or offset < 0 else offset,  # acks=0 has none
        timestamp_ms=one.get("timestamp"),
        key=_bytes(one["key"]),
        value=_bytes(one["value"]),
        headers=None if headers is None else tuple((k, _bytes(v)) for k, v in headers),
    )


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _headers(row: dict[str, Any]) -> Headers:
    return tuple((header["key"], header["value"]) for header in row["headers"])


def missing(
    listed: Iterable[Produced], records: Iterable[dict[str, Any]], *, empty_key_is_null: bool
) -> list[Produced]:
    """Listed records that are not in rows of `records`, as multisets: values repeat.

    Each listed record is compared by all that the list tells of it.
    """
    records = list(records)
    by_told: dict[tuple[str, ...], list[Produced]] = defaultdict(list)
    for one in listed:
        by_told[one.told].append(one)
    lost = []
    for told, group in by_told.items():
        there: Counter[tuple[Any, ...]] = Counter()
        for row in records:
            rest = (_headers(row) if name == "headers" else row[name] for name in told)
            key = (row["key"] or None) if empty_key_is_null else row["key"]
            there[row["topic"], key, row["value"], *rest] += 1
        for one in group:
            key = (one.key or None) if empty_key_is_null else one.key
            wanted = (one.topic, key, one.value, *(getattr(one, name) for name in told))
            if there[wanted]:
                there[wanted] -= 1
            else:
                lost.append(one)
    return lost


def by_place(records: Iterable[dict[str, Any]]) -> dict[Place, list[dict[str, Any]]]:
    """Rows by topic, partition and offset; a topic created anew has a place twice."""
    found: dict[Place, list[dict[str, Any]]] = defaultdict(list)
    for row in records:
        found[row["topic"], row["partition"], row["offset"]].append(row)
    return found


def is_equal(one: Produced, row: dict[str, Any], *, empty_key_is_null: bool) -> bool:
    """True if a fetched record has the listed contents, and the listed time if any."""
    key, row_key = one.key, row["key"]
    if empty_key_is_null:
        key, row_key = key or None, row_key or None
    if one.headers is not None and one.headers != _headers(row):
        return False
    if one.timestamp_ms is not None and one.timestamp_ms != row["timestamp_ms"]:
        return False
    return (key, one.value) == (row_key, row["value"])
