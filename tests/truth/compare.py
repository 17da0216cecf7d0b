"""Compares a decoded body of the tables with the broker's log of the same message.

Two kinds of log. Brokers since 2.6 write JSON: it leaves out tagged fields that have their default
and shows records only as their size, bytes as base64 and uuids as base64url. Older brokers print
structs as text, with field names of their own. The tables hold the union of a message's versions:
what the version lacks must be null.
"""

from __future__ import annotations

import base64
import re
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.truth.definitions import Field, Layout

# Logged as sizes, and by ShareFetch and FetchSnapshot in ways of their own (captures/README.md);
# `records_sizes` compares the sizes, test_produced the records.
RECORDS = {"records": "recordsSizeInBytes", "unalignedRecords": "unalignedRecordsSizeInBytes"}


@dataclass
class Comparison:
    """The result of comparisons: the count of values, and the differences."""

    fields: int = 0
    differences: list[str] = field(default_factory=list)

    def body(self, layout: Layout, log: dict[str, Any], row: dict[str, Any], path: str) -> None:
        """Compare a body (or a struct in it) as JSON with the same as a row of `apis/`."""
        known = set()
        for member in layout.fields:
            known.add(member.log_name)
            if member.log_name in RECORDS:
                known.add(RECORDS[member.log_name])
            elif member.column not in row:
                self._differ(path, member, "there is no such column")
            elif member.log_name in log:
                self._field(member, log[member.log_name], row[member.column], path)
            elif member.is_tagged:
                self._field(member, member.default, row[member.column], path)
            else:
                self._differ(path, member, "not in the log")
        for name in log.keys() - known:
            self.differences.append(f"{path}.{name}: only in the log")
        for column in layout.absent:
            if row.get(column) is not None and column != "records":
                self.differences.append(
                    f"{path}.{column}: {row[column]!r}, and this version has no such field"
                )

    def _field(self, member: Field, logged: Any, value: Any, path: str) -> None:
        if logged is None or value is None or not member.is_array:
            self._element(member, logged, value, path)
        elif len(logged) != len(value):
            self._differ(path, member, f"{len(value)} elements, log {len(logged)}")
        elif member.children is None and member.type != "bytes" and logged == value:
            self.fields += len(value)
        else:
            for index, (one, other) in enumerate(zip(logged, value, strict=True)):
                self._element(member, one, other, f"{path}[{index}]")

    def _element(self, member: Field, logged: Any, value: Any, path: str) -> None:
        if member.children is not None and logged is not None and value is not None:
            self.body(member.children, logged, value, f"{path}.{member.column}")
            return
        self.fields += 1
        if logged is not None and member.type == "bytes":
            logged = base64.b64decode(logged)
        elif logged is not None and member.type == "float64":
            logged = float(logged)
        if logged != value or type(logged) is not type(value):
            self._differ(path, member, f"{value!r}, log {logged!r}")

    def _differ(self, path: str, member: Field, what: str) -> None:
        self.differences.append(f"{path}.{member.column}: {what}")

    def text(
        self, layout: Layout, log: str, row: dict[str, Any], path: str, *, any_order: bool = False
    ) -> None:
        """Compare a body as a struct's text with the same as a row of `apis/`.

        The text cannot be parsed alone (strings are not quoted), so it is read along the row:
        each value must stand there, in the order of the wire, or lists in any order.
        """
        reader = _TextReader(log, any_order)
        try:
            reader.struct(layout, row, path)
            if reader.pos != len(log):
                self.differences.append(f"{path}: the log goes on: {log[reader.pos :][:80]}")
        except _TextDiffers as problem:
            self.differences.append(str(problem))
        self.fields += reader.fields


class _TextDiffers(Exception):
    pass


class _TextReader:
    """Reads `{name=value,list=[{...},{...}]}` with a row at hand."""

    def __init__(self, text: str, any_order: bool) -> None:
        self._text = text
        self._any_order = any_order
        self.pos = 0
        self.fields = 0

    def struct(self, layout: Layout, row: dict[str, Any], path: str) -> None:
        self._take("{", path)
        wrapped = 0  # structs that later definitions dissolved into the one around them
        for index, member in enumerate(layout.fields):
            here = f"{path}.{member.column}"
            if index:
                self._take(",", here)
            self._take_match(r"\w+=", here)
            if member.children is None and not member.is_array and self._is_next("{"):
                self._take_match(r"\{\w+=", here)
                wrapped += 1
            self._field(member, row.get(member.column), here)
            if wrapped and self._is_next("}") and self._closes_wrapper(layout, index):
                self._take("}", here)
                wrapped -= 1
        self._take("}", path)

    def _closes_wrapper(self, layout: Layout, index: int) -> bool:
        """Whether this brace is the wrapper's: another follows it, or another field does."""
        return self._text[self.pos + 1 : self.pos + 2] == (
            "," if index + 1 < len(layout.fields) else "}"
        )

    def _field(self, member: Field, value: Any, path: str) -> None:
        if not member.is_array or value is None:
            self._leaf(member, value, path)
            return
        self._take("[", path)
        left = list(value)
        for index in range(len(value)):
            if index:
                self._take(",", path)
            left.pop(self._one_of(member, left, f"{path}[{index}]"))
        self._take("]", path)

    def _one_of(self, member: Field, elements: list[Any], path: str) -> int:
        """Read the first of the elements, or any one where the order is not the wire's."""
        if not self._any_order:
            self._list_element(member, elements[0], path)
            return 0
        start, fields = self.pos, self.fields
        for index, element in enumerate(elements):
            try:
                self._list_element(member, element, path)
            except _TextDiffers:
                self.pos, self.fields = start, fields
            else:
                return index
        raise _TextDiffers(f"{path}: no element is the log's {self._text[start:][:80]!r}")

    def _list_element(self, member: Field, value: Any, path: str) -> None:
        """An element; a struct of one field and that field alone have stood for each other."""
        is_struct = self._is_next("{")
        if member.children is None and is_struct:
            self._take_match(r"\{\w+=", path)
            self._leaf(member, value, path)
            self._take("}", path)
        elif member.children is None:
            self._leaf(member, value, path)
        elif is_struct:
            self.struct(member.children, value, path)
        else:
            (only,) = member.children.fields
            self._field(only, value[only.column], path)

    def _leaf(self, member: Field, value: Any, path: str) -> None:
        self.fields += 1
        if member.type == "records":
            self._take_match(r"null|[\w.$]+@[0-9a-f]+|\[[^\]]*\]", path)
        elif value is None:
            self._take("null", path)
        elif member.type == "bytes":
            found = self._take_match(r"java\.nio\.\w+\[pos=(\d+) lim=(\d+) cap=\d+\]", path)
            size = int(found[2]) - int(found[1])
            if size != len(value):
                raise _TextDiffers(f"{path}: {len(value)} bytes, log {size}")
        elif isinstance(value, bool):
            self._take(str(value).lower(), path)
        else:
            self._take(str(value), path)
            if not re.match(r"[,\]}]", self._text[self.pos : self.pos + 1]):
                raise _TextDiffers(f"{path}: {value!r}, the log goes on")

    def _is_next(self, text: str) -> bool:
        return self._text.startswith(text, self.pos)

    def _take(self, text: str, path: str) -> None:
        if not self._is_next(text):
            found = self._text[self.pos :][:60]
            raise _TextDiffers(f"{path}: {text!r}, log {found!r}")
        self.pos += len(text)

    def _take_match(self, pattern: str, path: str) -> re.Match[str]:
        found = re.compile(pattern).match(self._text, self.pos)
        if found is None:
            rest = self._text[self.pos :][:60]
            raise _TextDiffers(f"{path}: the log has {rest!r}")
        self.pos = found.end()
        return found


def records_sizes(log: dict[str, Any]) -> Counter[tuple[str, int]]:
    """Bytes of record data per (topic name or id, partition) of a Produce request or Fetch
    response, as logged; partitions without any are left out."""
    sizes: Counter[tuple[str, int]] = Counter()
    for topic in log.get("topicData", ()) or log.get("responses", ()):
        name = topic.get("name") or topic.get("topic") or topic.get("topicId")
        for part in topic.get("partitionData", ()) or topic.get("partitions", ()):
            size = part.get("recordsSizeInBytes", 0)
            if size:
                sizes[name, part.get("index", part.get("partitionIndex"))] += size
    return sizes


def text_records_sizes(log: str) -> Counter[tuple[str, int]]:
    """The same of a Produce request's text (`partitionSizes=[topic-0=226,...]`)."""
    sizes: Counter[tuple[str, int]] = Counter()
    for topic, partition, size in re.findall(r"[\[,]([^=\[,]+)-(\d+)=(\d+)", log):
        sizes[topic, int(partition)] += int(size)
    return sizes


def plain(value: Any) -> Any:
    """A value of `decode_message` in the form that the tables have: uuids as Kafka's text."""
    if isinstance(value, uuid.UUID):
        return base64.urlsafe_b64encode(value.bytes).rstrip(b"=").decode()
    if isinstance(value, list):
        return [plain(element) for element in value]
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return value
