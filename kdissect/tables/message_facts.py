"""Marks of a chunk: topics, errors, groups and record sets of decoded messages.

The column kernel emits a mark for each field with a role (an error code, a topic name, a record
set). This module merges the marks of all messages of a chunk, in exchange and wire order, and
reduces them to one value or one list per exchange, with array operations only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.arrays import by_value
from kdissect.protocol.column_plan import Role
from kdissect.tables.arrow_arrays import binaries, lists, strings, uuid_texts

Ints = npt.NDArray[Any]

_NO_TOPIC = -1
METADATA_TOPIC = "__cluster_metadata"
METADATA_TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"  # KIP-595: a fixed id, which no message contains
ZERO_UUID_TEXT = "A" * 22


@dataclass(frozen=True, slots=True)
class RecordSets:
    """The `records` fields of a chunk, in exchange and wire order; one row each.

    topic, topic_id: codes into the chunk's topic names and uuid texts (-1: missing).
    """

    row: Ints
    side: Ints
    start: Ints
    length: Ints
    topic: Ints
    topic_id: Ints
    partition: Ints


class Marks(NamedTuple):
    """Columns of marks, with messages of a chunk in place of kernel rows."""

    message: Ints  # 2 * index of the exchange in its chunk, + 1 in a response
    role: Ints
    a: Ints
    b: Ints


def message_marks(rows: npt.NDArray[np.int64], side: int, given: npt.NDArray[np.void]) -> Marks:
    """Marks of the messages `rows` of a chunk, from the column kernel's MARK rows."""
    return Marks(rows[given["row"]] * 2 + side, given["role"], given["a"], given["b"])


_NONE = np.zeros(0, np.int64)


class ChunkMarks:
    """All marks of a chunk, ordered by (row, side, wire order)."""

    def __init__(
        self,
        parts: list[Marks],
        buf: npt.NDArray[np.uint8],
        row_count: int,
        topic_names: dict[str, str],
    ) -> None:
        """topic_names: topic id text -> name, of the whole input."""
        parts = parts or [Marks(_NONE, _NONE, _NONE, _NONE)]
        message, role, a, b = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(message, kind="stable")
        self._message, self._a, self._b = message[order], a[order], b[order]
        self._places_of = by_value(role[order])
        self.buf = buf
        self.row_count = row_count
        self._resolve_topics(topic_names)

    def _of(self, role: Role, side: int | None = None) -> Ints:
        """Positions of the marks of a role, ascending."""
        found = self._places_of.get(int(role), _NONE)
        return found if side is None else found[self._message[found] & 1 == side]

    def _firsts(self, places: Ints) -> tuple[Ints, Ints]:
        """(rows that have one of these marks, ascending; the first mark of each)."""
        rows = self._message[places] >> 1
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        return rows[first], places[first]

    def _resolve_topics(self, topic_names: dict[str, str]) -> None:
        """Assign a code to every topic name and id mark; an id with a known name gets the name's
        code."""
        self._topic_code = np.full(len(self._message), _NO_TOPIC, np.int64)
        self._topic_id_code = np.full(len(self._message), _NO_TOPIC, np.int64)
        named = self._of(Role.TOPIC_NAME)
        named = named[self._b[named] >= 0]
        texts, _ = strings(self.buf, self._a[named], self._b[named])
        encoded = texts.dictionary_encode()
        self.topics: list[str] = encoded.dictionary.to_pylist()
        self._topic_code[named] = encoded.indices.to_numpy(zero_copy_only=False)
        ids = self._of(Role.TOPIC_ID)
        raw = binaries(self.buf, self._a[ids], np.full(len(ids), 16)).dictionary_encode()
        codes = raw.indices.to_numpy(zero_copy_only=False)
        distinct = np.frombuffer(b"".join(raw.dictionary.to_pylist()), np.uint8)
        self.topic_ids: list[str] = uuid_texts(distinct.reshape(-1, 16)).to_pylist()
        self._topic_id_code[ids] = codes
        code_of = {name: code for code, name in enumerate(self.topics)}
        name_of_id = np.full(len(self.topic_ids), _NO_TOPIC, np.int64)
        for code, text in enumerate(self.topic_ids):
            name = topic_names.get(text)
            if name is not None:
                if name not in code_of:
                    code_of[name] = len(self.topics)
                    self.topics.append(name)
                name_of_id[code] = code_of[name]
        self._topic_code[ids] = name_of_id[codes]

    @cached_property
    def error_columns(self) -> tuple[Ints, pa.Array]:
        """(error_code: the first non-zero code in wire order; error_codes: list of all distinct
        non-zero codes, ascending)."""
        code = np.zeros(self.row_count, np.int16)
        errors = self._of(Role.ERROR_CODE, side=1)
        errors = errors[self._a[errors] != 0]
        rows, first = self._firsts(errors)
        code[rows] = self._a[first]
        # row and code in one integer, the code shifted to be unsigned
        pairs = np.unique((self._message[errors] >> 1) * 65536 + (self._a[errors] + 32768))
        values = pa.array((pairs % 65536 - 32768).astype(np.int16))
        return code, lists(pairs // 65536, values, self.row_count)

    def first_number(self, role: Role) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """(value of the first mark of that role, bool: there is one) per row."""
        rows, first = self._firsts(self._of(role))
        value = np.zeros(self.row_count, np.int64)
        valid = np.zeros(self.row_count, bool)
        value[rows] = self._a[first]
        valid[rows] = True
        return value, valid

    def first_text(self, role: Role) -> pa.Array:
        """Text of the first mark of that role per row; null if there is none."""
        here = self._of(role)
        rows, first = self._firsts(here[self._b[here] >= 0])
        start = np.zeros(self.row_count, np.int64)
        length = np.full(self.row_count, -1, np.int64)
        start[rows] = self._a[first]
        length[rows] = self._b[first]
        return strings(self.buf, start, length)[0]

    def topics_column(self) -> pa.Array:
        """Distinct topic names per row, in order of first occurrence.

        Empty names are left out: Metadata requests have them beside a topic's id.
        """
        # the last entry is for NO_TOPIC
        named = np.array([name != "" for name in self.topics] + [False])
        places = self._named_or_with_id
        chosen = places[named[self._topic_code[places]]]
        width = max(len(self.topics), 1)
        keys = (self._message[chosen] >> 1) * width + self._topic_code[chosen]
        _, first = np.unique(keys, return_index=True)
        kept = chosen[np.sort(first)]
        values = pa.array(self.topics, pa.string()).take(pa.array(self._topic_code[kept]))
        return lists(self._message[kept] >> 1, values, self.row_count)

    @cached_property
    def _named_or_with_id(self) -> Ints:
        """Positions of topic name and topic id marks, ascending."""
        return np.sort(
            np.concatenate([self._of(Role.TOPIC_NAME), self._of(Role.TOPIC_ID)]), kind="stable"
        )

    def _latest(self, wanted: Ints, source: Ints) -> Ints:
        """For each wanted mark, the nearest earlier mark of `source` in the same message, or -1.

        Both are ascending positions; a position in both matches itself.
        """
        if not len(source):
            return np.full(len(wanted), -1)
        at = np.searchsorted(source, wanted, side="right") - 1
        before = source[at]  # if there is none, the last element, which `same` excludes
        same = self._message[before] == self._message[wanted]
        return np.where((at >= 0) & same, before, -1)

    def places(self, role: Role) -> RecordSets:
        """Marks of a role with the topic and partition that precede them."""
        wanted = self._of(role)
        name = self._latest(wanted, self._named_or_with_id)
        ident = self._latest(wanted, self._of(Role.TOPIC_ID))
        part = self._latest(wanted, self._of(Role.PARTITION))
        return RecordSets(
            row=self._message[wanted] >> 1,
            side=self._message[wanted] & 1,
            start=self._a[wanted],
            length=self._b[wanted],
            topic=np.where(name >= 0, self._topic_code[name], _NO_TOPIC),
            topic_id=np.where(ident >= 0, self._topic_id_code[ident], _NO_TOPIC),
            partition=np.where(part >= 0, self._a[part], -1),
        )
