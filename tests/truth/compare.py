"""Compares a decoded body of the tables with the broker's log of the same message.

Brokers since 2.6 log JSON: it leaves out tagged fields that have their default and shows records
only as their size, bytes as base64 and uuids as base64url. The tables hold the union of a message's
versions: what the version lacks must be null. Older brokers print structs as text that cannot be
parsed; of it only the sizes of record data are compared.
"""

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
