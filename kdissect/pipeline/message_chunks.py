"""Chunks of decoded exchanges, from which tables, records and stories are built.

A chunk has about `chunk_bytes` of frames, so that the output of one kernel is still in the cache
when the next one reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.arrays import in_order_of_time
from kdissect.codec.message_columns import MessageColumns
from kdissect.pipeline.frame_buffer import FrameBuffer
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.tables.arrow_arrays import strings
from kdissect.tables.exchanges import DecodeStatus, VersionSource
from kdissect.tables.message_marks import ChunkMarks, message_marks
from kdissect.tables.topics import TopicNames

CHUNK_ROWS = 1 << 16
LARGE_FRAME = 4096  # bytes beyond this size count a quarter


@dataclass(frozen=True, slots=True)
class DecodedMessages:
    """Messages of one API and side: their rows in the chunk, and their columns."""

    rows: npt.NDArray[np.int64]
    columns: MessageColumns


@dataclass(frozen=True, slots=True)
class MessageChunk:
    """Decoded exchanges.

    status: int8[n, 2], DecodeStatus of request and response. version_source: int8[n]. decoded: by
    (api key, side). client_ids: text[n], from the request headers.
    """

    frames: FrameBuffer
    status: npt.NDArray[np.int8]
    version_source: npt.NDArray[np.int8]
    decoded: dict[tuple[int, int], DecodedMessages]
    marks: ChunkMarks
    client_ids: pa.Array


def iter_chunks(
    exchanges: npt.NDArray[np.void], chunk_bytes: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the rows of each chunk, in order of time."""
    has_request = exchanges["request"]["size"] >= 0
    time_ns = np.where(
        has_request, exchanges["request"]["time_ns"], exchanges["response"]["time_ns"]
    )
    order = in_order_of_time(time_ns, exchanges["exchange_id"])
    sizes = np.zeros(len(exchanges), np.int64)
    for side in SIDES:
        column = exchanges[side]
        size = np.where(column["is_whole"] != 0, column["size"], 64)
        # large frames are mostly records, which are decoded in smaller pieces
        sizes += np.minimum(size, LARGE_FRAME) + np.maximum(size - LARGE_FRAME, 0) // 4
    filled = (np.cumsum(sizes[order]) - sizes[order]) // chunk_bytes
    number = filled + np.arange(len(order)) // CHUNK_ROWS
    if len(order):
        yield from np.split(order, np.flatnonzero(np.diff(number)) + 1)


def decode_messages(
    frames: FrameBuffer, topic_names: TopicNames, elements_max: int
) -> MessageChunk:
    """Decode each whole message whose version has a definition.

    elements_max: limit on the elements of all arrays of a message.
    """
    status, version_source = _status_by_version(frames)
    decoded = {}
    for api_key in np.unique(frames.api_key).tolist():
        for side in (REQUEST, RESPONSE) if api_key in catalog.apis() else ():
            rows = frames.readable(api_key, side)
            if len(rows):
                columns = frames.decode(api_key, side, rows, elements_max)
                decoded[api_key, side] = DecodedMessages(rows, columns)
                status[rows[np.flatnonzero(columns.status)], side] = DecodeStatus.MALFORMED
    parts = [
        message_marks(messages.rows, side, messages.columns.marks)
        for (_, side), messages in decoded.items()
    ]
    marks = ChunkMarks(parts, frames.buf, len(frames.exchanges), topic_names)
    return MessageChunk(frames, status, version_source, decoded, marks, _client_ids(frames))


def _status_by_version(
    frames: FrameBuffer,
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """(DecodeStatus[n, 2] before decoding, VersionSource[n])."""
    exchanges = frames.exchanges
    has_api = np.isin(frames.api_key, sorted(catalog.apis()))
    token = exchanges["is_sasl_token"] != 0
    status = np.full((len(exchanges), 2), DecodeStatus.ABSENT, np.int8)
    for side in (REQUEST, RESPONSE):
        column = exchanges[SIDES[side]]
        state = np.where(
            frames.known(side),
            DecodeStatus.OK,
            np.where(has_api, DecodeStatus.UNKNOWN_VERSION, DecodeStatus.UNKNOWN_API),
        )
        state = np.where(token, DecodeStatus.OK, state)
        state = np.where(
            (column["is_whole"] == 0) & (state == DecodeStatus.OK), DecodeStatus.PARTIAL, state
        )
        status[:, side] = np.where(column["size"] >= 0, state, DecodeStatus.ABSENT)
    version_source = np.full(len(exchanges), VersionSource.REQUEST_HEADER, np.int8)
    version_source[(exchanges["request"]["size"] < 0) | token] = VersionSource.UNKNOWN
    fell_back = frames.response_version != frames.api_version
    fell_back &= frames.api_key == ApiKey.API_VERSIONS  # KIP-511
    version_source[fell_back] = VersionSource.FALLBACK_V0
    version_source[exchanges["confidence"] > 0] = VersionSource.INFERRED
    return status, version_source


def _client_ids(frames: FrameBuffer) -> pa.Array:
    """client_id of each request whose header was captured, even if its version is unknown."""
    exchanges = frames.exchanges
    start, end = frames.start[:, REQUEST], frames.end[:, REQUEST]
    has_header = (
        (end - start >= 10)
        & (exchanges["is_sasl_token"] == 0)
        & (frames.api_key >= 0)
        # request header v0 has no client id
        & ~((frames.api_key == ApiKey.CONTROLLED_SHUTDOWN) & (frames.api_version == 0))
    )
    if len(frames.buf) < 2:
        return pa.nulls(len(exchanges), pa.string())
    at = np.minimum(np.where(has_header, start + 8, 0), len(frames.buf) - 2)
    size = ((frames.buf[at].astype(np.int64) << 8) | frames.buf[at + 1]).astype(np.int16)
    length = size.astype(np.int64)
    fits = has_header & (length >= 0) & (start + 10 + length <= end)
    texts = strings(frames.buf, start + 10, np.where(fits, length, -1))
    return texts.dictionary_encode()
