"""Turn the messages of a decoded chunk into events for `stories`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Ints, Rows
from kdissect.pipeline.frame_buffer import FrameBuffer
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role
from kdissect.protocol.model import REQUEST
from kdissect.stories.events import Collector
from kdissect.stories.fetch_messages import fetch_events
from kdissect.stories.group_messages import group_events
from kdissect.stories.messages import Messages
from kdissect.stories.producer_messages import ProducedBatches, produce_events, producer_events
from kdissect.tables.message_marks import ChunkMarks, first_match
from kdissect.tables.records import FROM_PRODUCE as PRODUCED

_NUMBERS = ("producer_id", "producer_epoch", "base_sequence", "record_count", "size")


class ChunkStories:
    """Adds the events of one chunk to its task's collector."""

    def __init__(
        self, collector: Collector, messages: Messages, frames: FrameBuffer, marks: ChunkMarks
    ) -> None:
        self.collector = collector
        self.messages = messages
        self.frames = frames
        self.marks = marks

    def add_messages(self) -> None:
        """Add the events of all messages except Produce."""
        for table in group_events(self.messages):
            self.collector.add("groups", table)
        for table in producer_events(self.messages):
            self.collector.add("producers", table)
        for table in fetch_events(self.messages):
            self.collector.add("fetches", table)

    def add_batches(self, sets: Rows, source: Ints, raw: pa.Table, shown: pa.Table) -> None:
        """Add the events of produced batches; raw: rows of BATCHES, shown: rows of
        `record_batches`."""
        if not raw.num_rows:
            return
        at = raw["set_index"].to_numpy()
        has_producer = shown["producer_id"].fill_null(-1).to_numpy() >= 0
        chosen = np.flatnonzero(has_producer & (source[at] == PRODUCED))
        if not len(chosen):
            return
        some, places = shown.take(pa.array(chosen)), raw["pos"].to_numpy()[chosen]
        at = at[chosen]
        row = sets["row"][at]
        errors = self.marks.by_partition(Role.ERROR_CODE)
        error = first_match(sets[at], errors)
        codes = np.append(errors["value"], 0)[error]  # -1 is the last
        number = {name: some[name].fill_null(-1).to_numpy().astype(np.int64) for name in _NUMBERS}
        delta = pc.fill_null(pc.subtract(some["last_offset"], some["base_offset"]), 0)
        topic = pc.coalesce(*(some[name].cast(pa.string()) for name in ("topic", "topic_id")))
        request = self.frames.exchanges["request"]
        batches = ProducedBatches(
            row=row,
            batch_index=some["batch_index"].to_numpy(),
            topic=topic.combine_chunks(),
            partition=some["partition"].to_numpy(),
            answered=self.messages.answered(ApiKey.PRODUCE, row),
            error_code=codes,
            last_delta=delta.to_numpy(),
            is_transactional=some["is_transactional"].fill_null(False).to_numpy(),
            batch_pos=request["pos"][row] + 4 + places - self.frames.start[row, REQUEST],
            **number,
        )
        self.collector.add("producers", produce_events(self.messages, batches))
