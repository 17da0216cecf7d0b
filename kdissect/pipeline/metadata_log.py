"""Topic names from TopicRecords in fetches of ``__cluster_metadata``.

Brokers learn topics by fetching that log from the controllers, so a capture of a cluster may name a
topic nowhere else. Most of a capture is fetches, so only a few are read: the request must contain
the log's name or its fixed id, and the response must be large enough to hold a batch. A batch that
is split between two responses of a snapshot is not read.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.capture.mapped_files import Sources
from kdissect.codec.internal_records import METADATA, decode_internal
from kdissect.codec.record_batches import DecompressionLimits, RecordChunk, iter_record_chunks
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.frame_buffer import FrameBuffer, chunks
from kdissect.pipeline.record_sets import record_sets
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.tables.message_facts import (
    METADATA_TOPIC,
    METADATA_TOPIC_ID,
    ChunkMarks,
    message_marks,
)

_SMALLEST_BATCH = 61
_NAMES = {METADATA_TOPIC_ID: METADATA_TOPIC}
_MARKS = (base64.urlsafe_b64decode(METADATA_TOPIC_ID + "=="), METADATA_TOPIC.encode())

Rows = npt.NDArray[np.int64]
AddTopic = Callable[[str, str, int, str], None]  # name, id, time in ns, API


def learn_metadata(
    assembly: Assembly, sources: Sources, chunk_bytes: int, add_topic: AddTopic
) -> None:
    """Pass every topic in records of the metadata log to `add_topic`."""
    exchanges = assembly.exchanges
    rows = np.flatnonzero(
        np.isin(exchanges["api_key"], (ApiKey.FETCH, ApiKey.FETCH_SNAPSHOT))
        & (exchanges["request"]["is_whole"] != 0)
        & (exchanges["response"]["is_whole"] != 0)
        & (exchanges["response"]["size"] > _SMALLEST_BATCH)
    )
    asking = [
        chunk[_naming(assembly, sources, chunk)]
        for chunk in chunks(rows, exchanges["request"]["size"], chunk_bytes)
    ]
    if not asking:
        return
    rows = np.concatenate(asking)
    for chunk in chunks(rows, exchanges["response"]["size"], chunk_bytes):
        frames = FrameBuffer.gather(assembly, sources, chunk, (RESPONSE,))
        for api_key in (ApiKey.FETCH, ApiKey.FETCH_SNAPSHOT):
            _read(frames, api_key, add_topic)


def _naming(assembly: Assembly, sources: Sources, rows: Any) -> npt.NDArray[np.int64]:
    """Rows of the requests that contain the log's name or id."""
    frames = FrameBuffer.gather(assembly, sources, rows, (REQUEST,))
    data = frames.buf.tobytes()
    ends = frames.end[:, REQUEST]
    matching = set()
    for mark in _MARKS:
        at = data.find(mark)
        while at >= 0:
            row = int(np.searchsorted(ends, at, side="right"))
            matching.add(row)
            # continue at the next request: one match per request is enough
            at = data.find(mark, max(at + 1, int(ends[row])))
    return np.array(sorted(matching), np.int64)


def _read(frames: FrameBuffer, api_key: int, add_topic: AddTopic) -> None:
    """Pass the topics in whole batches of these responses to `add_topic`."""
    chosen = frames.readable(api_key, RESPONSE)
    if not len(chosen):
        return
    decoded = frames.decode(api_key, RESPONSE, chosen)
    parts = [message_marks(chosen, RESPONSE, decoded.marks)]
    marks = ChunkMarks(parts, frames.buf, len(frames.exchanges), _NAMES)
    sets, lead = record_sets(marks, frames.api_key, frames.buf)
    codes = [code for code, name in enumerate(marks.topics) if name == METADATA_TOPIC]
    start = np.ascontiguousarray(sets.start + lead, np.int64)
    length = np.where(np.isin(sets.topic, codes), sets.length - lead, 0)
    time_ns = frames.exchanges["response"]["time_ns"][sets.row]
    for part in iter_record_chunks(frames.buf, start, length, DecompressionLimits()):
        _add_topics(part, time_ns, api_key, add_topic)


def _add_topics(part: RecordChunk, time_ns: Rows, api_key: int, add_topic: AddTopic) -> None:
    """Pass the topics of TopicRecords to `add_topic`; time_ns: of each record set."""
    records = pa.table(part.records)
    records = records.filter(records["control_type"].is_null())
    set_index = records["set_index"].to_numpy()
    columns, _ = decode_internal(METADATA, records["key"], records["value"])
    for column in columns:
        if column.name == "TopicRecord":
            times = time_ns[set_index[column.rows]].tolist()
            for value, time in zip(column.value.to_pylist(), times, strict=True):
                add_topic(value["name"], value["topic_id"], time, catalog.api(api_key).name)
