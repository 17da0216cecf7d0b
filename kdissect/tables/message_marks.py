"""Marks of a chunk of messages, reduced to one value or one list per exchange.

The column kernel emits a mark for each field with a role (an error code, a topic name, a record
set). `ChunkMarks` joins the marks of all messages of a chunk, in exchange and wire order. It
works on arrays; only for pieces of snapshots it loops.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pyarrow as pa

from kdissect.arrays import Bools, Bytes, Codes, Indices, Ints, Rows, by_value, joined, stable_order
from kdissect.codec.column_kernel import MARK
from kdissect.codec.record_batches import first_batch
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role
from kdissect.protocol.model import RESPONSE
from kdissect.tables.arrow_arrays import lists, strings
from kdissect.tables.topics import NO_TOPIC, ChunkTopics, TopicNames

# A mark with the topic and the partition that precede it in its message. topic, topic_id: codes
# of `ChunkTopics`; partition: -1 if there is none.
PARTITION_MARK = np.dtype(
    [
        ("row", "<i8"),
        ("side", "<i8"),
        ("value", "<i8"),
        ("length", "<i8"),
        ("topic", "<i8"),
        ("topic_id", "<i8"),
        ("partition", "<i8"),
    ]
)

_NONE = np.zeros(0, np.int64)


class ChunkMarks:
    """All marks of a chunk, ordered by (row, side, wire order)."""

    def __init__(
        self, parts: list[tuple[Indices, int, Rows]], buf: Bytes, row_count: int, known: TopicNames
    ) -> None:
        """parts: (rows of messages in the chunk, their side, their MARK rows of the column kernel).
        known: names of topic ids, of the whole input."""
        all_marks = joined([np.zeros(0, MARK), *(marks for _, _, marks in parts)])
        messages = [rows[marks["row"]] * 2 + side for rows, side, marks in parts]
        message = np.concatenate([_NONE, *messages])
        order = stable_order(message)
        self._message = message[order]
        self._value, self._length = all_marks["value"][order], all_marks["length"][order]
        self._places_of = by_value(all_marks["role"][order])
        self.buf = buf
        self.row_count = row_count
        named, ids = self._of(Role.TOPIC_NAME), self._of(Role.TOPIC_ID)
        named = named[self._length[named] >= 0]
        self.topics = ChunkTopics(
            known, buf, (self._value[named], self._length[named]), self._value[ids]
        )
        self._topic, self._topic_id = np.full((2, len(order)), NO_TOPIC)
        self._topic[named], self._topic[ids] = self.topics.of_names, self.topics.of_ids
        self._topic_id[ids] = self.topics.id_codes
        self._with_topic = np.sort(np.concatenate([self._of(Role.TOPIC_NAME), ids]))

    def _of(self, role: Role, side: int | None = None) -> Indices:
        """Indices of the marks of a role, ascending."""
        found = self._places_of.get(int(role), _NONE)
        return found if side is None else found[self._message[found] & 1 == side]

    def _firsts(self, marks: Indices) -> tuple[Indices, Indices]:
        """(rows that have one of these marks, ascending; the first mark of each)."""
        rows = self._message[marks] >> 1
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        return rows[first], marks[first]

    @cached_property
    def error_columns(self) -> tuple[Codes, pa.Array]:
        """(error_code: the first non-zero code in wire order; error_codes: list of all distinct
        non-zero codes, ascending)."""
        code = np.zeros(self.row_count, np.int16)
        errors = self._of(Role.ERROR_CODE, RESPONSE)
        errors = errors[self._value[errors] != 0]
        rows, first = self._firsts(errors)
        code[rows] = self._value[first]
        # row and code in one integer, the code shifted to be unsigned
        pairs = np.unique((self._message[errors] >> 1) * 65536 + (self._value[errors] + 32768))
        values = pa.array((pairs % 65536 - 32768).astype(np.int16))
        return code, lists(pairs // 65536, values, self.row_count)

    def first_number(self, role: Role) -> tuple[Ints, Bools]:
        """(value of the first mark of that role, bool: there is one) per row."""
        rows, first = self._firsts(self._of(role))
        value = np.zeros(self.row_count, np.int64)
        valid = np.zeros(self.row_count, np.bool_)
        value[rows] = self._value[first]
        valid[rows] = True
        return value, valid

    def first_text(self, role: Role) -> pa.Array:
        """Text of the first mark of that role that is not null, per row; null if there is none."""
        here = self._of(role)
        rows, first = self._firsts(here[self._length[here] >= 0])
        start = np.zeros(self.row_count, np.int64)
        length = np.full(self.row_count, -1, np.int64)
        start[rows], length[rows] = self._value[first], self._length[first]
        return strings(self.buf, start, length)

    def topic_lists(self) -> pa.Array:
        """The topics that an exchange is about: distinct names of both messages, per row."""
        rows = self._message[self._with_topic] >> 1
        return self.topics.lists(rows, self._topic[self._with_topic], self.row_count)

    def _latest(self, wanted: Indices, source: Indices) -> Indices:
        """For each wanted mark, the nearest earlier mark of `source` in the same message, or -1.

        Both ascend; a mark in both matches itself.
        """
        if not len(source):
            return np.full(len(wanted), -1)
        at = np.searchsorted(source, wanted, side="right") - 1
        before = source[at]  # if there is none, the last element, which `same` excludes
        same = self._message[before] == self._message[wanted]
        return np.where((at >= 0) & same, before, -1)

    def by_partition(self, role: Role) -> Rows:
        """PARTITION_MARK rows of a role."""
        wanted = self._of(role)
        name = self._latest(wanted, self._with_topic)
        ident = self._latest(wanted, self._of(Role.TOPIC_ID))
        part = self._latest(wanted, self._of(Role.PARTITION))
        marks = np.zeros(len(wanted), PARTITION_MARK)
        marks["row"], marks["side"] = self._message[wanted] >> 1, self._message[wanted] & 1
        marks["value"], marks["length"] = self._value[wanted], self._length[wanted]
        marks["topic"] = np.where(name >= 0, self._topic[name], NO_TOPIC)
        marks["topic_id"] = np.where(ident >= 0, self._topic_id[ident], NO_TOPIC)
        marks["partition"] = np.where(part >= 0, self._value[part], -1)
        return marks

    @cached_property
    def record_marks(self) -> Rows:
        """PARTITION_MARK rows of record sets, also of empty ones."""
        return self.by_partition(Role.RECORDS)

    def record_sets(self, api_key: Codes) -> tuple[Rows, Ints]:
        """(PARTITION_MARK rows of the record sets that are not empty, bytes before the first batch
        of each).

        api_key: of each exchange of the chunk. FetchSnapshot (KIP-630) sends a snapshot in pieces;
        a piece with a position above 0 may start inside a batch. Other sets start with a batch.
        """
        sets = self.record_marks
        is_piece = api_key[sets["row"]] == ApiKey.FETCH_SNAPSHOT
        position = np.zeros(len(sets), np.int64)
        if is_piece.any():
            positions = self.by_partition(Role.SNAPSHOT_POSITION)
            # a FetchSnapshot response has one position and one record set per partition
            position[is_piece] = positions["value"][positions["side"] == RESPONSE]
        kept = sets["length"] > 0
        sets, position = sets[kept], position[kept]
        lead = np.zeros(len(sets), np.int64)
        for at in np.flatnonzero(position != 0).tolist():
            start, length = int(sets["value"][at]), int(sets["length"][at])
            lead[at] = first_batch(self.buf[start : start + length])
        return sets, lead


def first_match(wanted: Rows, given: Rows) -> Indices:
    """Per wanted PARTITION_MARK, the first given one of its exchange, topic and partition; or -1.

    A topic is known by its name, or by its id if that has no known name.
    """
    if not len(given):
        return np.full(len(wanted), -1)
    both = np.concatenate([given, wanted])
    # ids without a name get codes below those of names, so the two never collide
    topic = np.where(both["topic"] >= 0, both["topic"], -2 - both["topic_id"])
    topic -= topic.min()
    # with return_index NumPy sorts stably, which is faster here: the pairs are nearly sorted
    pairs = both["row"] * (int(topic.max()) + 1) + topic
    _, _, pairs = np.unique(pairs, return_index=True, return_inverse=True)
    keys = (pairs << 32) | (both["partition"] & 0xFFFFFFFF)
    known, first = np.unique(keys[: len(given)], return_index=True)
    keys = keys[len(given) :]
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[at] == keys, first[at], -1)
