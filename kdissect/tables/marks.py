"""Marks of a chunk: what decoded messages say about topics, errors, groups and record sets.

The column kernel emits a mark where a field has a role (an error code, a topic name, a record
set). Here the marks of all messages of a chunk are put together, in exchange and wire order, and
reduced to one value or one list per exchange with array operations only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.protocol.plan import Role
from kdissect.tables.values import lists, strings, uuid_texts

Ints = npt.NDArray[Any]

# row: index of the exchange in its chunk; side: 0 request, 1 response.
MARK = np.dtype(
    [("row", "<i4"), ("side", "i1"), ("role", "<i2"), ("a", "<i8"), ("b", "<i8")], align=True
)

NO_TOPIC = -1
METADATA_TOPIC = "__cluster_metadata"
METADATA_TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"  # KIP-595: its id, which no message tells
ZERO_UUID = "A" * 22


@dataclass(frozen=True, slots=True)
class RecordSets:
    """The `records` fields of a chunk, in exchange and wire order; one row each.

    topic, topic_id: codes into the chunk's topic texts and uuid texts (-1: not said here).
    """

    row: Ints
    side: Ints
    start: Ints
    length: Ints
    topic: Ints
    topic_id: Ints
    partition: Ints


def message_marks(
    rows: npt.NDArray[np.int64], side: int, given: npt.NDArray[np.void]
) -> npt.NDArray[np.void]:
    """MARK rows of the messages `rows` of a chunk from the column kernel's marks."""
    marks = np.zeros(len(given), MARK)
    marks["row"] = rows[given["row"]]
    marks["side"] = side
    for name in ("role", "a", "b"):
        marks[name] = given[name]
    return marks


class ChunkMarks:
    """All marks of a chunk, ordered by (row, side, wire order)."""

    def __init__(
        self,
        parts: list[npt.NDArray[np.void]],
        buf: npt.NDArray[np.uint8],
        row_count: int,
        topic_names: dict[str, str],
    ) -> None:
        """parts: MARK arrays; topic_names: topic id text -> name, of the whole input."""
        marks = np.concatenate(parts) if parts else np.zeros(0, MARK)
        order = np.argsort(marks["row"].astype(np.int64) * 2 + marks["side"], kind="stable")
        self.marks = marks[order]
        self._role = np.ascontiguousarray(self.marks["role"])
        self.buf = buf
        self.row_count = row_count
        self._resolve_topics(topic_names)

    def _of(self, *roles: Role, side: int | None = None) -> npt.NDArray[np.bool_]:
        chosen = self._role == int(roles[0])
        for role in roles[1:]:
            chosen |= self._role == int(role)
        return chosen if side is None else chosen & (self.marks["side"] == side)

    def _resolve_topics(self, topic_names: dict[str, str]) -> None:
        """Give every topic name and id mark a code; ids get the name's code where known."""
        marks = self.marks
        self.topic_code = np.full(len(marks), NO_TOPIC, np.int64)
        self.topic_id_code = np.full(len(marks), NO_TOPIC, np.int64)
        named = np.flatnonzero(self._of(Role.TOPIC_NAME) & (marks["b"] >= 0))
        texts, _ = strings(self.buf, marks["a"][named], marks["b"][named])
        encoded = texts.dictionary_encode()
        self.topics: list[str] = encoded.dictionary.to_pylist()
        self.topic_code[named] = encoded.indices.to_numpy(zero_copy_only=False)
        ids = np.flatnonzero(self._of(Role.TOPIC_ID))
        places = marks["a"][ids][:, None] + np.arange(16)
        raw = np.ascontiguousarray(self.buf[places]) if len(ids) else np.zeros((0, 16), np.uint8)
        distinct, codes = np.unique(raw.view("V16").ravel(), return_inverse=True)
        self.topic_ids: list[str] = uuid_texts(
            np.frombuffer(distinct.tobytes(), np.uint8).reshape(-1, 16)
        ).to_pylist()
        self.topic_id_code[ids] = codes
        known = {name: code for code, name in enumerate(self.topics)}
        name_of_id = np.full(len(self.topic_ids), NO_TOPIC, np.int64)
        for code, text in enumerate(self.topic_ids):
            name = topic_names.get(text)
            if name is not None:
                if name not in known:
                    known[name] = len(self.topics)
                    self.topics.append(name)
                name_of_id[code] = known[name]
        self.name_of_id = name_of_id
        self.topic_code[ids] = name_of_id[codes] if len(ids) else NO_TOPIC

    def error_columns(self) -> tuple[Ints, pa.Array]:
        """(error_code, error_codes list): first non-zero in wire order, and all distinct ones."""
        code = np.zeros(self.row_count, np.int16)
        wrong = self.marks[self._of(Role.ERROR_CODE, side=1) & (self.marks["a"] != 0)]
        rows, first = np.unique(wrong["row"], return_index=True)
        code[rows] = wrong["a"][first]
        pairs = np.unique(wrong["row"].astype(np.int64) * 65536 + (wrong["a"] + 32768))
        values = pa.array((pairs % 65536 - 32768).astype(np.int16))
        return code, lists(pairs // 65536, values, self.row_count)

    def first_number(self, role: Role) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Per row the first mark's number of that role, and where there is one."""
        here = self.marks[self._of(role)]
        rows, first = np.unique(here["row"], return_index=True)
        value = np.zeros(self.row_count, np.int64)
        valid = np.zeros(self.row_count, bool)
        value[rows] = here["a"][first]
        valid[rows] = True
        return value, valid

    def first_text(self, role: Role) -> pa.Array:
        """Per row the first mark's string of that role (null where there is none)."""
        here = self.marks[self._of(role)]
        here = here[here["b"] >= 0]
        rows, first = np.unique(here["row"], return_index=True)
        start = np.zeros(self.row_count, np.int64)
        length = np.full(self.row_count, -1, np.int64)
        start[rows] = here["a"][first]
        length[rows] = here["b"][first]
        return strings(self.buf, start, length)[0]

    def topics_column(self) -> pa.Array:
        """Per row the distinct topic names, in the order in which they are first met.

        An empty one names nothing: Metadata requests have it beside a topic's id.
        """
        named = np.array([name != "" for name in self.topics] + [False])  # the last: NO_TOPIC
        chosen = np.flatnonzero(named[self.topic_code])
        width = max(len(self.topics), 1)
        keys = self.marks["row"][chosen].astype(np.int64) * width + self.topic_code[chosen]
        _, first = np.unique(keys, return_index=True)
        kept = chosen[np.sort(first)]
        values = pa.array(self.topics, pa.string()).take(pa.array(self.topic_code[kept]))
        return lists(self.marks["row"][kept], values, self.row_count)

    def _latest(self, wanted: Ints, source: npt.NDArray[np.bool_]) -> Ints:
        """For each wanted mark the nearest earlier one in `source` of the same message, or -1."""
        index = np.where(source, np.arange(len(self.marks)), -1)
        before = np.maximum.accumulate(index)[wanted] if len(index) else index
        marks = self.marks
        same = (marks["row"][before] == marks["row"][wanted]) & (
            marks["side"][before] == marks["side"][wanted]
        )
        return np.where((before >= 0) & same, before, -1)

    def places(self, role: Role) -> RecordSets:
        """Marks of a role with the topic and partition that stand before them."""
        wanted = np.flatnonzero(self._of(role))
        marks = self.marks
        name = self._latest(wanted, self._of(Role.TOPIC_NAME, Role.TOPIC_ID))
        ident = self._latest(wanted, self._of(Role.TOPIC_ID))
        part = self._latest(wanted, self._of(Role.PARTITION))
        return RecordSets(
            row=marks["row"][wanted].astype(np.int64),
            side=marks["side"][wanted],
            start=marks["a"][wanted],
            length=marks["b"][wanted],
            topic=np.where(name >= 0, self.topic_code[name], NO_TOPIC),
            topic_id=np.where(ident >= 0, self.topic_id_code[ident], NO_TOPIC),
            partition=np.where(part >= 0, marks["a"][part], -1),
        )
