"""Turn the messages of a decoded chunk into events for `stories`."""

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

    def add_batches(
        self, sets: RecordSets, source: npt.NDArray[Any], raw: pa.Table, shown: pa.Table
    ) -> None:
        """Add the events of produced batches; raw: rows of BATCHES, shown: rows of
        `record_batches`."""
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
        has_response, error_code = self._answers(sets)
        number = {name: some[name].fill_null(-1).to_numpy().astype(np.int64) for name in _NUMBERS}
        delta = pc.fill_null(pc.subtract(some["last_offset"], some["base_offset"]), 0)
        request = self.frames.exchanges["request"]
        batches = ProducedBatches(
            row=row,
            batch_index=some["batch_index"].to_numpy(),
            topic=pc.coalesce(_plain(some["topic"]), _plain(some["topic_id"])).combine_chunks(),
            partition=some["partition"].to_numpy(),
            answered=has_response[at],
            error_code=error_code[at],
            last_delta=delta.to_numpy(),
            is_transactional=some["is_transactional"].fill_null(False).to_numpy(),
            batch_pos=request["pos"][row] + 4 + places - self.frames.start[row, REQUEST],
            **number,
        )
        self.collector.add("producers", produce_events(self.messages, batches))

    def _answers(self, sets: RecordSets) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """(bool: its Produce has a response, int64: its partition's error code), per record set."""
        has_response = self.messages.answered(ApiKey.PRODUCE, sets.row)
        error_places = self.marks.places(Role.ERROR_CODE)
        keys, wanted = _keys(error_places), _keys(sets)
        codes = np.zeros(len(sets.row), np.int64)
        if len(keys):
            distinct, first = np.unique(keys, return_index=True)
            at = np.minimum(np.searchsorted(distinct, wanted), len(distinct) - 1)
            codes = np.where(distinct[at] == wanted, error_places.start[first[at]], 0)
        return has_response, codes


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string())


def _keys(rows: RecordSets) -> npt.NDArray[np.void]:
    """(exchange row, topic, partition) of each record set."""
    key = np.zeros(len(rows.row), [("row", "<i8"), ("topic", "<i8"), ("part", "<i8")])
    key["row"] = rows.row
    # ids without a name get codes below -1, so they never equal a name's code
    key["topic"] = np.where(rows.topic >= 0, rows.topic, -2 - rows.topic_id)
    key["part"] = rows.partition
    return key
