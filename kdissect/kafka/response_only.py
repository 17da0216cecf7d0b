"""Connections of which nothing is there but an answer or two: told by what those answers say.

Theory of operation
-------------------
Headers are enough for a chain of frames. An answer alone (a client that opens a connection for
each request; a capture of one direction that begins near the end of a connection) has nothing
beside it to agree with, but it can be decoded: a frame that a definition reads to its last byte,
with names, hosts, ports and counts that fit each other, is an answer of Kafka's
(`codec.response_detection` weighs it).

A false connection costs more than a missing one, so all of this must hold as well:
- nothing was recognised in the connection, and what the other side said first was not captured;
- the first captured byte begins a frame: its size is followed by an id below ID_MAX and a byte that
  can follow one (`frame_search.response_header`);
- each of the frames from there on is followed by another one with an id a little above, or by
  nothing: the end of the stream, or a gap;
- one of the first FRAMES_READ of them is there whole, and weighs WEIGHT_MIN.

The stream then begins at a boundary, as if its SYN were there. Equal answers are weighed once; at
most TRIED_MAX different ones, of TRIED_BYTES, with every definition of a response, all others with
those that told of one.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.codec.response_detection import Pair, every_response, fits, weight
from kdissect.jit import inlined, making_kernel
from kdissect.kafka.assembly import Protocol
from kdissect.kafka.frame_search import (  # fmt: skip
    CORRELATION,
    HEADER_WIDTH,
    SIZE,
    STEP_MAX,
    response_header,
    step,
)
from kdissect.kafka.framing import AT_ORIGIN, stream_of
from kdissect.tcp.byte_ranges import find, int64, read_bytes
from kdissect.tcp.columns import CLIENT_SIDE, CONNECTION_WIDTH, PIECE_START, SIDE_WIDTH
from kdissect.tcp.reassembly import Streams

ID_MAX = 1 << 24  # of an answer alone: text of other protocols is above
_SIZE_MIN = 20  # shorter ones say too little
_SIZE_MAX = 1 << 20  # larger ones are not weighed
FRAMES_READ = 4  # of a stream
WEIGHT_MIN = 18
TRIED_MAX = 2048
TRIED_BYTES = 16 << 20
AT_ONCE = 1024  # connections whose answers are weighed together, at most
LOT = 4 << 20  # bytes of answers held together

Ints = npt.NDArray[np.int64]


@inlined
def _is_whole(pieces: Any, index: int, stop: int, end: int) -> bool:
    """Whether every byte from inside of piece `index` up to `end` was captured."""
    while pieces.pos[index] + pieces.length[index] < end:
        index += 1
        if index >= stop or pieces.pos[index] > pieces.pos[index - 1] + pieces.length[index - 1]:
            return False
    return True


@making_kernel
def chains(pieces: Any, sides: Any, streams: Any, limit: int, ends: Any) -> None:
    """Where the first frames of `streams` end that are there whole and may be answers.

    ends int64[len(streams) * FRAMES_READ], zeros: the position behind each of them. A stream that
    cannot be answers from its first byte on has none.
    """
    header = np.empty(HEADER_WIDTH, np.int64)
    for row in range(len(streams)):
        stream = stream_of(pieces, sides, streams[row])
        index = stream.start
        pos = int64(0)
        last = int64(-1)
        for number in range(FRAMES_READ + 1):
            if pos >= stream.end:
                break
            index = find(pieces, index, stream.stop, pos)
            if pieces.pos[index] > pos:
                break  # the next one is in a gap
            accept = response_header(pieces, index, stream.stop, pos, limit, header)
            size = header[SIZE]
            correlation = header[CORRELATION]
            if correlation >= 0:
                accept = accept and correlation < ID_MAX
                accept = accept and (last < 0 or 0 < step(correlation, last) <= STEP_MAX)
            if not accept:
                ends[row * FRAMES_READ : (row + 1) * FRAMES_READ] = 0
                break
            if size < 0 or correlation < 0 or number == FRAMES_READ:
                break
            if not _is_whole(pieces, index, stream.stop, pos + 4 + size):
                break
            pos += 4 + size
            last = correlation
            ends[row * FRAMES_READ + number] = pos


class _Tried:
    """What was weighed so far; see the top for what is tried."""

    def __init__(self) -> None:
        self.told: dict[bytes, bool] = {}  # by a digest of the frame without its id
        self.telling: set[Pair] = set()
        self.count = 0
        self.size = 0

    def try_out(self, frames: list[bytes]) -> list[bool]:
        """Whether each of the frames, given without their sizes, weighs enough."""
        names = [blake2b(frame[4:], digest_size=16).digest() for frame in frames]
        new = {
            name: frame for name, frame in zip(names, frames, strict=True) if name not in self.told
        }
        everything: dict[bytes, bytes] = {}
        known: dict[bytes, bytes] = {}
        for name, frame in new.items():
            is_first = self.count < TRIED_MAX and self.size < TRIED_BYTES
            (everything if is_first else known)[name] = frame
            self.count += is_first
            self.size += len(frame) if is_first else 0
        self._weigh(everything, every_response())
        self._weigh(known, frozenset(self.telling))
        return [self.told[name] for name in names]

    def _weigh(self, named: dict[bytes, bytes], pairs: frozenset[Pair]) -> None:
        if not named:
            return
        names, frames = list(named), list(named.values())
        buf = np.frombuffer(b"".join(frames), np.uint8)
        lengths = np.array([len(frame) for frame in frames], np.int64)
        end = np.cumsum(lengths)
        start = end - lengths
        self.told.update(dict.fromkeys(names, False))
        for key, version in sorted(pairs):
            for row in np.flatnonzero(fits(key, version, buf, start, end)).tolist():
                if weight(key, version, frames[row]) >= WEIGHT_MIN:
                    self.told[names[row]] = True
                    self.telling.add((key, version))


def tell_lone(
    streams: Streams, alone: Ints, limit: int, client_side: Any, protocol: Any, has_origin: Ints
) -> None:
    """Find the connections of answers among those of `alone`, of which one side begins.

    Changes client_side uint8 and protocol uint8 of each connection, and has_origin int64 of each
    stream, where they are. limit: a frame's size.
    """
    pieces = streams.pieces
    sides = streams.sides.reshape(-1, SIDE_WIDTH)
    told = streams.connections.reshape(-1, CONNECTION_WIDTH)[:, CLIENT_SIDE]
    broker = (streams.begins_at()[1::2] == 0).astype(np.int64)
    rows = alone[told[alone] != broker[alone]]
    tried = _Tried()
    for first in range(0, len(rows), AT_ONCE):
        some = rows[first : first + AT_ONCE]
        numbers = 2 * some + broker[some]
        found = np.zeros(len(some) * FRAMES_READ, np.int64)
        chains(pieces, streams.sides, numbers, limit, found)
        ends = found.reshape(-1, FRAMES_READ)
        starts = np.concatenate([np.zeros((len(some), 1), np.int64), ends[:, :-1]], 1)
        size = ends - starts - 4
        row, number = np.nonzero((size >= _SIZE_MIN) & (size <= _SIZE_MAX))
        pos, size = starts[row, number] + 4, size[row, number]
        piece = sides[numbers[row], PIECE_START]
        tells = np.zeros(len(row), np.bool_)
        lots = np.flatnonzero(np.diff(np.cumsum(size) // LOT)) + 1
        for lot in np.split(np.arange(len(row)), lots):
            places = zip(piece[lot].tolist(), pos[lot].tolist(), size[lot].tolist(), strict=True)
            tells[lot] = tried.try_out([read_bytes(pieces, *place) for place in places])
        kafka = some[np.unique(row[tells])]
        protocol[kafka] = Protocol.KAFKA
        client_side[kafka] = 1 - broker[kafka]
        has_origin[2 * kafka + broker[kafka]] |= AT_ORIGIN
