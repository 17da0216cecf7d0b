"""Events of a decoded chunk for `stories`: its messages as that layer takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.pipeline.frame_buffer import FrameBuffer
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role
from kdissect.protocol.model import REQUEST
from kdissect.stories.events import Collector
from kdissect.stories.fetch_messages import fetch_events
from kdissect.stories.group_messages import group_events
from kdissect.stories.messages import Messages
from kdissect.stories.producer_messages import ProducedBatches, produce_events, producer_events
from kdissect.tables.message_facts import ChunkMarks, RecordSets
from kdissect.tables.records import FROM_PRODUCE as PRODUCED

_NUMBERS = ("producer_id", "producer_epoch", "base_sequence", "record_count", "size")


class ChunkStories:
    """Adds the events of one chunk to the collector of its task."""

    def __init__(
        self, collector: Collector, messages: Messages, frames: FrameBuffer, marks: ChunkMarks
    ) -> None:
        self.collector = collector
        self.messages = messages
        self.frames = frames
        self.marks = marks

    def add_messages(self) -> None:
        """Events of all messages but Produce."""
        for table in group_events(self.messages):
            self.collector.add("groups", table)
        for table in producer_events(self.messages):
            self.collector.add("producers", table)
        for table in fetch_events(self.messages):
            self.collector.add("fetches", table)

    def add_batches(
        self, sets: RecordSets, source: npt.NDArray[Any], raw: pa.Table, shown: pa.Table
    ) -> None:
        """Events of produced batches; raw: `wire.records.BATCHES`, shown: `record_batches`."""
        if not raw.num_rows:
            return
        at = raw["set_index"].to_numpy()
        has_producer = shown["producer_id"].fill_null(-1).to_numpy() >= 0
        chosen = np.flatnonzero(has_producer & (source[at] == PRODUCED))
        if not len(chosen):
            return
        via = pa.array(chosen)
        some, places = shown.take(via), raw["pos"].to_numpy()[chosen]
        at = at[chosen]
        row = sets.row[at]
        answered, error_code = self._answers(sets)
        number = {name: some[name].fill_null(-1).to_numpy().astype(np.int64) for name in _NUMBERS}
        delta = pc.fill_null(pc.subtract(some["last_offset"], some["base_offset"]), 0)
        request = self.frames.exchanges["request"]
        batches = ProducedBatches(
            row=row,
            batch_index=some["batch_index"].to_numpy(),
            topic=pc.coalesce(_plain(some["topic"]), _plain(some["topic_id"])).combine_chunks(),
            partition=some["partition"].to_numpy(),
            answered=answered[at],
            error_code=error_code[at],
            last_delta=delta.to_numpy(),
            is_transactional=some["is_transactional"].fill_null(False).to_numpy(),
            batch_pos=request["pos"][row] + 4 + places - self.frames.start[row, REQUEST],
            **number,
        )
        self.collector.add("producers", produce_events(self.messages, batches))

    def _answers(self, sets: RecordSets) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Per record set whether its Produce was answered, and the error of its partition."""
        answered = self.messages.answered(ApiKey.PRODUCE, sets.row)
        given = self.marks.places(Role.ERROR_CODE)
        keys, wanted = _keys(given), _keys(sets)
        codes = np.zeros(len(sets.row), np.int64)
        if len(keys):
            known, first = np.unique(keys, return_index=True)
            at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            codes = np.where(known[at] == wanted, given.start[first[at]], 0)
        return answered, codes


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string())


def _keys(rows: RecordSets) -> npt.NDArray[np.void]:
    """Exchange, topic and partition of each place."""
    key = np.zeros(len(rows.row), [("row", "<i8"), ("topic", "<i8"), ("part", "<i8")])
    key["row"] = rows.row
    # an id without a name counts from below, so that it never equals a name's code
    key["topic"] = np.where(rows.topic >= 0, rows.topic, -2 - rows.topic_id)
    key["part"] = rows.partition
    return key
