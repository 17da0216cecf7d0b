"""Topics that only the metadata log tells: TopicRecords in fetches of ``__cluster_metadata``.

Brokers learn of topics by fetching that log from the controllers, so a capture of a cluster may
name a topic nowhere else. Fetches are most of a capture: only those are read whose request names
the log, by name or by its fixed id, and whose response is larger than one without records. Batches
in several pieces of a snapshot are joined where one connection carries these.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.arrays import copied
from kdissect.capture.mapped_files import Sources
from kdissect.codec.internal_records import METADATA, decode_internal
from kdissect.codec.message_columns import MessageColumns
from kdissect.codec.record_batches import DecompressionLimits, RecordChunk, iter_record_chunks
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.frame_buffer import FrameBuffer
from kdissect.pipeline.record_sets import record_sets
from kdissect.pipeline.snapshots import Edges
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.stories.messages import Messages
from kdissect.stories.snapshots import BatchFragment, JoinedBatches, Joiner
from kdissect.tables.connections import broker_texts
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
    """Give every topic of the metadata log's records in the assembly to `add_topic`."""
    exchanges = assembly.exchanges
    rows = np.flatnonzero(
        np.isin(exchanges["api_key"], (ApiKey.FETCH, ApiKey.FETCH_SNAPSHOT))
        & (exchanges["request"]["is_whole"] != 0)
        & (exchanges["response"]["is_whole"] != 0)
        & (
            (exchanges["response"]["size"] > _SMALLEST_BATCH)
            | (exchanges["api_key"] == ApiKey.FETCH_SNAPSHOT)  # pieces of batches
        )
    )
    asking = [
        chunk[_naming(assembly, sources, chunk)]
        for chunk in _chunks(rows, exchanges["request"]["size"], chunk_bytes)
    ]
    if not asking:
        return
    rows = np.concatenate(asking)
    # pieces of snapshots in the order in which they came
    rows = rows[np.argsort(exchanges["response"]["time_ns"][rows], kind="stable")]
    brokers = broker_texts(assembly.endpoints, assembly.connections)

    def fragments() -> Iterator[BatchFragment]:
        for chunk in _chunks(rows, exchanges["response"]["size"], chunk_bytes):
            frames = FrameBuffer.gather(assembly, sources, chunk, (RESPONSE,))
            for api_key in (ApiKey.FETCH, ApiKey.FETCH_SNAPSHOT):
                yield from _read(frames, api_key, brokers, add_topic)

    for found in Joiner(DecompressionLimits().decompressed_size_max).join(fragments()):
        if isinstance(found, JoinedBatches):
            data = np.frombuffer(found.data, np.uint8)
            place = np.zeros(1, np.int64), np.array([len(data)])
            time_ns = np.array([found.at.time_ns])
            for part in iter_record_chunks(data, *place, DecompressionLimits()):
                _tell(part, time_ns, ApiKey.FETCH_SNAPSHOT, add_topic)


def _chunks(rows: Any, sizes: Any, chunk_bytes: int) -> list[npt.NDArray[np.int64]]:
    if not len(rows):
        return []
    filled = np.cumsum(sizes[rows] + 64) // chunk_bytes
    return np.split(rows, np.flatnonzero(np.diff(filled)) + 1)


def _naming(assembly: Assembly, sources: Sources, rows: Any) -> npt.NDArray[np.int64]:
    """Which of these requests hold the log's name or id somewhere."""
    frames = FrameBuffer.gather(assembly, sources, rows, (REQUEST,))
    data = frames.buf.tobytes()
    ends = frames.end[:, REQUEST]
    found = set()
    for mark in _MARKS:
        at = data.find(mark)
        while at >= 0:
            row = int(np.searchsorted(ends, at, side="right"))
            found.add(row)
            # on to the next request: one place in each is enough
            at = data.find(mark, max(at + 1, int(ends[row])))
    return np.array(sorted(found), np.int64)


def _read(
    frames: FrameBuffer, api_key: int, brokers: pa.Array, add_topic: AddTopic
) -> Iterator[BatchFragment]:
    """Tell the topics of whole batches; the edges of pieces of snapshots are given back."""
    chosen = frames.readable(api_key, RESPONSE)
    if not len(chosen):
        return
    decoded = frames.decode(api_key, RESPONSE, chosen)
    parts = [message_marks(chosen, RESPONSE, decoded.marks)]
    marks = ChunkMarks(parts, frames.buf, len(frames.exchanges), _NAMES)
    sets, lead = record_sets(marks, frames.api_key, frames.buf)
    codes = [code for code, name in enumerate(marks.topics) if name == METADATA_TOPIC]
    mine = np.isin(sets.topic, codes)
    start = np.ascontiguousarray(sets.start + lead, np.int64)
    length = np.where(mine, sets.length - lead, 0)
    time_ns = frames.exchanges["response"]["time_ns"][sets.row]
    pieces = np.flatnonzero(mine) if api_key == ApiKey.FETCH_SNAPSHOT else np.zeros(0, np.int64)
    messages = _messages(frames, (api_key, chosen, decoded), brokers)
    edges = Edges(sets, lead, pieces, messages, frames.start[:, RESPONSE])
    for part in iter_record_chunks(frames.buf, start, length, DecompressionLimits()):
        _tell(part, time_ns, api_key, add_topic)
        batches = pa.table(part.batches)
        edges.without_open(batches, batches)
    if len(pieces):
        nowhere = np.zeros(len(sets.row), np.int64)
        yield from edges.fragments((nowhere, nowhere), marks, {}, [])


def _messages(
    frames: FrameBuffer, decoded: tuple[int, Rows, MessageColumns], brokers: pa.Array
) -> Messages:
    """What `Edges` looks at. Whose download a piece is of does not matter here: the bytes do."""
    count = len(frames.exchanges)
    exchanges = copied(frames.exchanges)
    exchanges["response"]["source"] = -1
    return Messages(
        exchanges=exchanges,
        connection_id=np.zeros(count, np.int64),
        capture_id=np.zeros(count, np.int64),
        client_id=pa.nulls(count, pa.string()),
        broker=brokers.take(pa.array(exchanges["connection"])),
        error_code=np.zeros(count, np.int16),
        decoded={(decoded[0], RESPONSE): (decoded[1], decoded[2])},
        topic_names={},
    )


def _tell(part: RecordChunk, time_ns: Rows, api_key: int, add_topic: AddTopic) -> None:
    """Give the topics of metadata records to `add_topic`; time_ns: of each record set."""
    records = pa.table(part.records)
    records = records.filter(records["control_type"].is_null())
    set_index = records["set_index"].to_numpy()
    columns, _ = decode_internal(METADATA, records["key"], records["value"])
    for found in columns:
        if found.name == "TopicRecord":
            times = time_ns[set_index[found.rows]].tolist()
            for value, time in zip(found.value.to_pylist(), times, strict=True):
                add_topic(value["name"], value["topic_id"], time, catalog.api(api_key).name)
