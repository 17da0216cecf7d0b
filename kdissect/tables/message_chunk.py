"""Exchanges whose frames are gathered into one buffer, and decoded.

Tables, records and stories are built from chunks of about CHUNK_BYTES of frames, so that the
output of one kernel is still in the cache when the next one reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import (
    Bools,
    Bytes,
    Codes,
    Ids,
    Indices,
    Ints,
    Positions,
    Rows,
    States,
    by_value,
    in_order_of_time,
    take,
)
from kdissect.capture.mapped_files import Sources
from kdissect.codec.arrow_columns import UNKNOWN_TAGS
from kdissect.codec.message_columns import ELEMENTS_MAX, MessageColumns, body_type, decode_columns
from kdissect.jit import kernel
from kdissect.kafka.assembly import EXTENT, Assembly
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import plan
from kdissect.protocol.error_codes import ErrorCode
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.tables.arrow_arrays import strings
from kdissect.tables.connections import EndpointColumns, endpoint_columns
from kdissect.tables.message_marks import ChunkMarks
from kdissect.tables.topics import TopicNames

CHUNK_BYTES = 8 << 20  # of frames decoded at a time; they fit the caches of a core
LARGE_FRAME = 4096  # bytes; of a larger frame a quarter counts
DAY_NS = 86_400 * 10**9
_LONGEST = 1 << 62  # bytes of a frame
_NO_ROWS = np.zeros(0, np.int64)


class DecodeStatus(IntEnum):
    """Values of *_decode_status, best to worst; the table has the names in lower case."""

    OK = 0
    ABSENT = 1
    PARTIAL = 2
    UNKNOWN_VERSION = 3
    UNKNOWN_API = 4
    MALFORMED = 5


class VersionSource(IntEnum):
    """Values of version_source; the table has the names in lower case."""

    REQUEST_HEADER = 0
    FALLBACK_V0 = 1
    INFERRED = 2
    UNKNOWN = 3


@cache
def known_versions() -> Bools:
    """bool[api_key, api_version]: whether a definition exists."""
    apis = catalog.apis()
    table = np.zeros((max(apis) + 2, 64), bool)
    for key, api in apis.items():
        table[key, api.request.versions.first : api.request.versions.last + 1] = True
    return table


@dataclass(slots=True)
class FrameBuffer:
    """Some exchanges and the bytes of their frames.

    assembly: of the exchanges. exchanges: EXCHANGE[n]. api_key, api_version: int16[n], copies of
    its columns. connection_ids: int64[n].
    buf: uint8, all frames. start, end: int64[n, 2], position in `buf` of the request's and the
    response's frame without the size prefix; equal if there is none. A frame ends early at a gap
    or a cut; only sides with `is_whole` are decoded.
    response_version: int16[n]: api_version, or 0 for an ApiVersions response with error 35.
    """

    assembly: Assembly
    exchanges: Rows
    api_key: Codes
    api_version: Codes
    connection_ids: Ids
    buf: Bytes
    start: Positions
    end: Positions
    response_version: Codes
    _readable: dict[int, dict[int, Indices]] = field(default_factory=dict, repr=False)

    @staticmethod
    def gather(
        assembly: Assembly,
        sources: Sources,
        rows: Indices,
        sides: tuple[int, ...] = (REQUEST, RESPONSE),
        prefix: int | None = None,
    ) -> FrameBuffer:
        """Copy the frames of the exchanges `rows`; prefix: at most this many bytes of each
        frame."""
        exchanges = take(assembly.exchanges, rows)
        count = len(rows)
        start = np.zeros((count, 2), np.int64)
        end = np.zeros((count, 2), np.int64)
        columns = [exchanges[SIDES[side]] for side in sides]
        chosen = np.empty(sum(int(column["extent_count"].sum()) for column in columns), EXTENT)
        used = at = 0
        for side, column in zip(sides, columns, strict=True):
            first, extent_count = column["extent_start"].copy(), column["extent_count"].copy()
            length = np.full(count, _LONGEST if prefix is None else prefix)
            used += _put_extents(assembly.extents, first, extent_count, chosen[used:], length)
            end[:, side] = at + np.cumsum(length)
            start[:, side] = end[:, side] - length
            at += int(length.sum())
        buf = sources.gather(chosen[:used])
        api_key, api_version = exchanges["api_key"].copy(), exchanges["api_version"].copy()
        ids = assembly.connections["connection_id"][exchanges["connection"]]
        frames = FrameBuffer(
            assembly, exchanges, api_key, api_version, ids, buf, start, end, api_version.copy()
        )
        frames._fall_back()
        return frames

    def _fall_back(self) -> None:
        """KIP-511: a broker answers ApiVersions with error 35 in a v0 body, whatever the
        request's version."""
        rows = np.flatnonzero(
            (self.api_key == ApiKey.API_VERSIONS)
            & (self.end[:, RESPONSE] - self.start[:, RESPONSE] >= 6)
        )
        at = self.start[rows, RESPONSE] + 4
        code = (self.buf[at].astype(np.int64) << 8) | self.buf[at + 1]
        self.response_version[rows[code == ErrorCode.UNSUPPORTED_VERSION]] = 0

    def versions(self, side: int) -> Codes:
        """int16[n]: api_version to decode that side of each exchange with."""
        return self.response_version if side == RESPONSE else self.api_version

    def known(self, side: int) -> Bools:
        """bool[n]: whether API and version of that side have a definition."""
        table = known_versions()
        key = self.api_key.astype(np.int64)
        version = self.versions(side).astype(np.int64)
        inside = (key >= 0) & (key < len(table)) & (version >= 0) & (version < 64)
        return inside & table[np.where(inside, key, 0), np.where(inside, version, 0)]

    def whole(self, side: int) -> Bools:
        """bool[n]: whether all bytes of that side's frame were captured."""
        return self.exchanges[SIDES[side]]["is_whole"] != 0

    def readable(self, api_key: int, side: int) -> Indices:
        """Rows, ascending, of that API whose side is whole and has a known version."""
        if side not in self._readable:  # computed once, used for every API
            rows = np.flatnonzero(self.whole(side) & self.known(side))
            places = by_value(self.api_key[rows])
            self._readable[side] = {key: rows[some] for key, some in places.items()}
        return self._readable[side].get(api_key, _NO_ROWS)

    def decode(
        self, api_key: int, side: int, rows: Indices, elements_max: int = ELEMENTS_MAX
    ) -> MessageColumns:
        """Decode the messages of `rows` (indices into exchanges) into columns."""
        return decode_columns(
            plan(api_key, SIDES[side]),
            self.buf,
            self.start[rows, side],
            self.end[rows, side],
            self.versions(side)[rows],
            elements_max,
        )


@kernel
def _put_extents(extents: Rows, first: Indices, count: Ints, chosen: Rows, length: Indices) -> int:
    """Choose the captured extents at the beginning of each frame; returns how many.

    first, count: int64, int32 by frame, its extents. length: int64, the most bytes of a frame,
    becomes the bytes that were found.
    """
    used = 0
    for row in range(len(first)):
        room = length[row]
        for index in range(first[row], first[row] + count[row]):
            extent = extents[index]
            # After a gap the position within the message is unknown: the frame ends there.
            if extent["source"] < 0 or room == 0:
                break
            size = min(extent["length"], room)
            chosen[used]["pos"] = extent["pos"]
            chosen[used]["length"] = size
            chosen[used]["source"] = extent["source"]
            used += 1
            room -= size
        length[row] -= room
    return used


def chunks(rows: Indices, sizes: Ints, chunk_bytes: int = CHUNK_BYTES) -> list[Indices]:
    """Split rows of exchanges so that the frames of a part, of these sizes, fit a buffer of about
    `chunk_bytes`."""
    if not len(rows):
        return []
    filled = np.cumsum(sizes[rows] + 64) // chunk_bytes
    return np.split(rows, np.flatnonzero(np.diff(filled)) + 1)


def frame_sizes(exchanges: Rows) -> Ints:
    """int64[n]: bytes of the whole frames of each exchange."""
    sizes = np.zeros(len(exchanges), np.int64)
    for side in SIDES:
        column = exchanges[side]
        sizes += np.where(column["is_whole"] != 0, column["size"], 0)
    return sizes


def chunks_in_time(exchanges: Rows, by_day: bool = False) -> list[Indices]:
    """The rows of all exchanges, in order of time, as `chunks`. by_day: none has two days."""
    time_ns = begin_ns(exchanges)
    order = in_order_of_time(time_ns, exchanges["exchange_id"])
    sizes = frame_sizes(exchanges)
    # large frames are mostly records, which are decoded in smaller pieces
    sizes = np.maximum(sizes // 4, np.minimum(sizes, LARGE_FRAME))
    of_day = [order]
    if by_day:
        of_day = np.split(order, np.flatnonzero(np.diff(time_ns[order] // DAY_NS)) + 1)
    return [part for rows in of_day for part in chunks(rows, sizes)]


def begin_ns(exchanges: Rows) -> Ints:
    """int64[n]: ns since 1970 of the first byte of each request, else response."""
    has_request = exchanges["request"]["size"] >= 0
    return np.where(has_request, exchanges["request"]["time_ns"], exchanges["response"]["time_ns"])


# -- decoded chunks -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodedMessages:
    """Messages of one API and side: their rows in the chunk, and their columns."""

    rows: Indices
    columns: MessageColumns


@dataclass(frozen=True)
class MessageChunk:
    """Decoded exchanges: tables, records and stories are made of it.

    capture_ids: by source. status: int8[n, 2], DecodeStatus of request and response.
    version_source: int8[n]. decoded: by (api key, side). topic_names: of the whole input.
    client_ids: text[n], from the request headers.
    """

    frames: FrameBuffer
    capture_ids: Ids
    status: States
    version_source: States
    decoded: dict[tuple[int, int], DecodedMessages]
    marks: ChunkMarks
    topic_names: TopicNames
    client_ids: pa.Array

    @property
    def exchanges(self) -> Rows:
        """EXCHANGE[n]"""
        return self.frames.exchanges

    @cached_property
    def endpoints(self) -> EndpointColumns:
        """Addresses by row of the assembly's connections."""
        assembly = self.frames.assembly
        return endpoint_columns(assembly.endpoints, assembly.connections)

    @cached_property
    def broker(self) -> pa.Array:
        """string[n]: the broker's address and port, separated by a space."""
        port = pa.array(self.endpoints.broker_port).cast(pa.string())
        ip = self.endpoints.broker_ip.cast(pa.string())
        texts = pc.binary_join_element_wise(ip, port, " ")
        return texts.take(pa.array(self.exchanges["connection"]))

    def capture_id(self, side: int) -> Ids:
        """int64[n]: of the first byte of that side; 0 for none."""
        return np.append(self.capture_ids, 0)[self.exchanges[SIDES[side]]["source"]]

    @property
    def error_code(self) -> Codes:
        """The first non-zero code in the response of each row, otherwise 0."""
        return self.marks.error_columns[0]

    def rows(self, api_key: int) -> Indices:
        """Rows whose request of that API was decoded."""
        return self._good(api_key, REQUEST)

    def _good(self, api_key: int, side: int) -> Indices:
        decoded = self.decoded.get((api_key, side))
        if decoded is None:
            return np.zeros(0, np.int64)
        return decoded.rows[decoded.columns.status == 0]

    def answered(self, api_key: int, rows: Indices) -> Bools:
        """bool per row: it has a decoded response."""
        return np.isin(rows, self._good(api_key, RESPONSE))

    def columns(self, api_key: int, side: int, rows: Indices) -> tuple[pa.Array, pa.Array]:
        """(bodies, unknown tags) of that side of these rows; null if a row has none."""
        decoded = self.decoded.get((api_key, side))
        if decoded is None:
            kinds = body_type(api_key, SIDES[side]), UNKNOWN_TAGS
            return pa.nulls(len(rows), kinds[0]), pa.nulls(len(rows), kinds[1])
        there, columns = decoded.rows, decoded.columns
        if len(there) == len(rows) and bool(np.all(there == rows)):
            return columns.body, columns.unknown_tags
        at = np.searchsorted(there, rows)
        via = pa.array(at, pa.int64(), mask=np.append(there, -1)[at] != rows)
        return columns.body.take(via), columns.unknown_tags.take(via)

    def body(self, api_key: int, side: int, rows: Indices) -> pa.StructArray:
        """Bodies of these rows, null if a row has none."""
        return self.columns(api_key, side, rows)[0]

    def requests(self, api_key: int) -> tuple[Indices, pa.StructArray | None]:
        """(rows, bodies) of the decoded requests of that API; no bodies without a row."""
        rows = self.rows(api_key)
        return rows, self.body(api_key, REQUEST, rows) if len(rows) else None

    def values(self, api_key: int, side: int, rows: Indices) -> list[Any]:
        """Bodies of these rows as plain values, None if a row has none."""
        values: list[Any] = self.body(api_key, side, rows).to_pylist()
        return values

    def errors(self, api_key: int, rows: Ints) -> pa.Array:
        """Error code per row, null if no response was decoded."""
        return pa.array(self.error_code[rows].astype(np.int16), mask=~self.answered(api_key, rows))


def decode_messages(
    frames: FrameBuffer, capture_ids: Ids, topic_names: TopicNames, elements_max: int
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
        (messages.rows, side, messages.columns.marks) for (_, side), messages in decoded.items()
    ]
    marks = ChunkMarks(parts, frames.buf, len(frames.exchanges), topic_names)
    return MessageChunk(
        frames, capture_ids, status, version_source, decoded, marks, topic_names, client_ids(frames)
    )


def _status_by_version(frames: FrameBuffer) -> tuple[States, States]:
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


def client_ids(frames: FrameBuffer) -> pa.Array:
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
