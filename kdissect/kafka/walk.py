"""A walk over the streams of one direction: the streams, where the walk is, what it has learned."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from kdissect.arrays import Bytes, Ints, Rows, Struct, TimesNs
from kdissect.jit import inlined, int64
from kdissect.protocol import catalog
from kdissect.tcp.byte_ranges import Pieces

API_KEYS, API_VERSIONS = 128, 64  # shape of the table of known APIs
DRAFTS = 2  # versions above the newest defined one that clients already send
CLIENTS_MAX = 8  # client ids remembered per connection
NO_REQUEST = -1

# A frame's header. Numbers are -1 if their bytes are missing; a correlation id is unsigned here.
_HEADER_FIELDS = "size", "key", "api_version", "correlation", "client_length", "client_hash"
HEADER = np.dtype([(name, "i8") for name in _HEADER_FIELDS])

# The point at which a walk continues, in the stream of `connection`.
WALK = np.dtype(
    [
        ("direction", "i8"),
        ("size_max", "i8"),  # largest size of a frame
        ("connection", "i8"),
        ("is_inside", "i8"),  # whether the next fields describe a position in its stream
        ("pos", "i8"),  # of the next size prefix, or where the search starts
        ("covered", "i8"),  # end of the last frame
        ("is_certain", "i8"),  # whether `pos` is a boundary
        ("reason", "i8"),  # why bytes from `covered` on are unframed
        ("size_read", "i8"),  # the size prefix of these bytes, -1 if none
        ("begins", "i8"),  # whether a frame begins at position 0
        ("in_tokens", "i8"),  # whether SASL tokens without headers are expected
        ("is_first", "i8"),  # of requests: whether no frame came before
        ("is_young", "i8"),  # whether only versions, handshakes and tokens came before
        ("last_id", "i8"),  # correlation id of the last frame, -1 if none
        ("rise_max", "i8"),  # of responses: how much ids of uncaptured requests may rise
        # of responses: first request neither answered nor passed over, end of the connection's
        ("next_request", "i8"),
        ("stop_request", "i8"),
        ("refused_count", "i8"),  # of responses: positions that the search found, and were none
        ("extents_needed", "i8"),  # room for the extents of the next frame
        ("header", HEADER),  # scratch, for the header of a frame and of the next ones
        ("following", HEADER),
        ("grade", "i8"),  # of the header of a request
        ("client_count", "i8"),  # of requests: hashes of the client ids so far
        ("clients", "i8", (CLIENTS_MAX,)),
        ("known", "u1", (API_KEYS * API_VERSIONS,)),  # 1 for versions that exist
    ]
)

# What is known of a stream at its position 0. A stream that continues has this from earlier windows
# (`resume.carry`).
STREAM = np.dtype(
    [
        ("is_boundary", "u1"),  # whether a frame begins at position 0
        ("was_framed", "u1"),  # whether frames came before it
        ("in_tokens", "u1"),  # whether SASL tokens follow the last of these
        ("is_young", "u1"),  # whether all of these are versions, handshakes and tokens
        ("last_id", "<i8"),  # correlation id of the last of these, -1 if none
    ]
)


@cache
def _known_apis() -> Bytes:
    """uint8[API_KEYS * API_VERSIONS]: 1 for each api key and version that a request may have."""
    table = np.zeros((API_KEYS, API_VERSIONS), np.uint8)
    for key, api in catalog.apis().items():
        versions = api.request.versions
        if 0 <= key < API_KEYS and not versions.is_empty:
            table[key, max(0, versions.first) : min(versions.last + DRAFTS + 1, API_VERSIONS)] = 1
    return table.reshape(-1)


def new_walk(direction: int, size_max: int) -> Struct:
    """WALK before its first step. size_max: bytes that a size prefix may claim."""
    walk: Struct = np.zeros(1, WALK)[0]
    walk["direction"], walk["size_max"], walk["known"] = direction, size_max, _known_apis()
    walk["last_id"] = walk["size_read"] = -1
    return walk


def new_streams(is_boundary: Bytes) -> Rows:
    """STREAM[n] of streams before their first frame. is_boundary: uint8[n]."""
    streams = np.zeros(len(is_boundary), STREAM)
    streams["is_boundary"] = is_boundary
    streams["is_young"] = 1
    streams["last_id"] = -1
    return streams


class KafkaStreams(NamedTuple):
    """The streams of all connections, Kafka or not; connection c has streams 2c and 2c + 1.

    times: int64, source: int32, per segment. sides: SIDE. origin: STREAM per stream.
    client_side, protocol: uint8 per connection.
    """

    pieces: Pieces
    times: TimesNs
    source: Ints
    sides: Rows
    origin: Rows
    client_side: Bytes
    protocol: Bytes


class Stream(NamedTuple):
    """One stream: its pieces [start, stop), and the end position of the last one; times and source
    of all segments."""

    pieces: Pieces
    times: TimesNs
    source: Ints
    start: int
    stop: int
    end: int


@inlined
def stream_of(streams: KafkaStreams, number: int) -> Stream:
    """The stream with this number."""
    pieces = streams.pieces
    start, stop = streams.sides[number]["piece_start"], streams.sides[number]["piece_stop"]
    end = int64(0)
    if stop > start:
        end = pieces[stop - 1]["end"]
    return Stream(pieces, streams.times, streams.source, start, stop, end)
