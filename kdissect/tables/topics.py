"""Names and ids of topics: what messages say, and the rule by which a topic id becomes a name.

A topic id gets the earliest name that a message of the input has beside it (`topic_messages` lists
them); `show` knows those that it has read so far. A name gets the id that messages have beside it,
if that is only one: a recreated topic has several. An id without a name is null in columns with
names of topics; `stories` show the id itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from kdissect.arrays import Bytes, Ints
from kdissect.codec.internal_records import METADATA_TOPIC, METADATA_TOPIC_ID
from kdissect.codec.strings import uuids
from kdissect.tables.arrow_arrays import labels, lists, strings
from kdissect.tables.schemas import TOPICS, table_of

ZERO_UUID_TEXT = "A" * 22
NO_TOPIC = -1  # code of no topic, and of an id without a known name


@dataclass(frozen=True, slots=True)
class TopicNames:
    """of_id: topic id text -> name. id_of: name -> topic id text."""

    of_id: Mapping[str, str]
    id_of: Mapping[str, str]

    def name(self, topic_id: str) -> str:
        """The name of a topic id; the id itself if it is unknown."""
        return self.of_id.get(topic_id, topic_id)

    def names(self, topic_ids: pa.Array) -> pa.Array:
        """`name` of each topic id."""
        ids = topic_ids.dictionary_encode()
        known = [topic_id and self.name(topic_id) for topic_id in ids.dictionary.to_pylist()]
        return pa.array(known, pa.string()).take(ids.indices)


@dataclass(slots=True)
class SeenTopics:
    """Topics that messages name.

    first: (name, id text, "" for none) -> (time in ns, API) of the earliest message.
    """

    first: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)

    def add(self, name: str, topic_id: str, time_ns: int, source: str) -> None:
        known = self.first.get((name, topic_id))
        if known is None or (time_ns, source) < known:
            self.first[name, topic_id] = (time_ns, source)

    def merge(self, other: SeenTopics) -> None:
        for (name, topic_id), (time_ns, source) in other.first.items():
            self.add(name, topic_id, time_ns, source)

    def names(self) -> TopicNames:
        """The name of each id and the id of each name. The metadata log's id is always known."""
        latest_first = sorted(self.first.items(), key=lambda seen: (seen[1], seen[0]), reverse=True)
        of_id: dict[str, str] = {METADATA_TOPIC_ID: METADATA_TOPIC}
        ids_of: dict[str, set[str]] = {METADATA_TOPIC: {METADATA_TOPIC_ID}}
        for (name, topic_id), _ in latest_first:
            if topic_id not in ("", ZERO_UUID_TEXT):
                of_id[topic_id] = name
                ids_of.setdefault(name, set()).add(topic_id)
        return TopicNames(of_id, {name: min(ids) for name, ids in ids_of.items() if len(ids) == 1})

    def table(self) -> pa.Table:
        """Rows of `topics`, sorted by the time of the first message with the name."""
        with_id = {name for name, topic_id in self.first if topic_id}
        rows = sorted(
            (*seen, *key) for key, seen in self.first.items() if key[1] or key[0] not in with_id
        )
        columns = {
            "topic": [name for _, _, name, _ in rows],
            "topic_id": [topic_id or None for *_, topic_id in rows],
            "first_time": np.array([time_ns for time_ns, *_ in rows], np.int64),
            "source": [source for _, source, *_ in rows],
        }
        return table_of(TOPICS, columns)


def names_sql(prefix: str = "") -> str:
    """The same rule as SQL: `topic_id` and `topic`. prefix: of the name of the table `topics`."""
    return f"""
        SELECT topic_id, any_value(topic ORDER BY first_time, source, topic) AS topic
        FROM {prefix}topics
        WHERE topic IS NOT NULL AND topic_id NOT IN ('{METADATA_TOPIC_ID}', '{ZERO_UUID_TEXT}')
        GROUP BY topic_id UNION ALL SELECT '{METADATA_TOPIC_ID}', '{METADATA_TOPIC}'
        """


class ChunkTopics:
    """The topics that a chunk of messages names, as codes.

    names, ids: the topics' names, and texts of their ids. of_names, of_ids: per name and per id
    that was given, the code of the topic's name, or NO_TOPIC. id_codes: per id, its own code.
    """

    def __init__(self, known: TopicNames, buf: Bytes, names: tuple[Ints, Ints], ids: Ints) -> None:
        """names: where names start, and their lengths; ids: where ids start."""
        self._known = known
        encoded = strings(buf, *names).dictionary_encode()
        self.names: list[str] = encoded.dictionary.to_pylist()
        self.of_names = encoded.indices.to_numpy(zero_copy_only=False)
        encoded = uuids(buf, ids, np.ones(len(ids), np.bool_))
        self.ids: list[str] = encoded.dictionary.to_pylist()
        self.id_codes = encoded.indices.to_numpy(zero_copy_only=False)
        self._code_of = {name: code for code, name in enumerate(self.names)}
        of_id = [self._code(known.of_id.get(text)) for text in self.ids]
        self.of_ids = np.array([*of_id, NO_TOPIC])[self.id_codes]

    def _code(self, name: str | None) -> int:
        """The code of a name, which may be new."""
        if name is None:
            return NO_TOPIC
        if name not in self._code_of:
            self._code_of[name] = len(self.names)
            self.names.append(name)
        return self._code_of[name]

    def name_column(self, codes: Ints) -> pa.Array:
        """The names of these codes; null for NO_TOPIC."""
        return labels(np.maximum(codes, 0), self.names or [""], codes >= 0)

    def id_column(self, codes: Ints, id_codes: Ints) -> pa.Array:
        """The ids of topics: their own, or the one known for the name; null if there is none."""
        texts = list(self.ids)
        code_of = {text: code for code, text in enumerate(texts)}
        of_name = np.full(len(self.names) + 1, NO_TOPIC, np.int64)
        for code, name in enumerate(self.names):
            text = self._known.id_of.get(name)
            if text is not None:
                if text not in code_of:
                    code_of[text] = len(texts)
                    texts.append(text)
                of_name[code] = code_of[text]
        codes = np.where(id_codes >= 0, id_codes, of_name[codes])
        return labels(np.maximum(codes, 0), texts or [""], codes >= 0)

    def is_metadata(self, codes: Ints) -> Ints:
        """bool: codes of the metadata log."""
        return codes == self._code_of.get(METADATA_TOPIC, len(self.names))

    def lists(self, rows: Ints, codes: Ints, row_count: int) -> pa.Array:
        """Distinct names per row, in order of first occurrence; rows ascend.

        Empty names are left out: Metadata requests have them beside a topic's id.
        """
        is_named = np.array([name != "" for name in self.names] + [False])[codes]
        rows, codes = rows[is_named], codes[is_named]
        _, first = np.unique(rows * max(len(self.names), 1) + codes, return_index=True)
        first = np.sort(first)
        values = pa.array(self.names, pa.string()).take(pa.array(codes[first]))
        return lists(rows[first], values, row_count)
