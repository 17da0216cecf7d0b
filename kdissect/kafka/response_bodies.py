"""Decodes bodies of responses as evidence: for single responses, and for frames after a gap.

A response after a gap
----------------------
A search finds a response by its size and its correlation id (`frame_search.py`). Other bytes may
resemble these. If all bytes of the response are there, they have to decode as an answer to its
request; else the search goes on (`refuse_other_bytes`).

A connection with single responses
----------------------------------
A chain of frames is recognised by its headers. A single response has no other frame to agree with.
This occurs if a client opens a connection per request, or if a capture of one direction begins near
the end of a connection. But the response can be decoded. If a definition decodes a frame to its
last byte, with plausible names, hosts, ports and counts, the frame is a Kafka response
(`codec.response_detection` computes its weight).

A falsely detected connection does more harm than a missed one. So all of this must hold as well:
- no other protocol was detected, and the first bytes of the other side were not captured;
- the first captured byte begins a frame: after its size comes an id below ID_MAX and a byte that
  may follow an id (`frame_search.response_header`);
- each frame is followed by another one with an id slightly above, by the end of the stream, or by a
  gap;
- one of the first FRAMES_READ frames was captured completely and has weight WEIGHT_MIN.

The stream then begins at a boundary, as if its SYN had been captured. Equal responses are weighed
once. At most TRIED_MAX different ones, with TRIED_BYTES in all, are decoded with every definition
of a response; later ones only with definitions that succeeded before.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.codec.response_detection import Pair, every_response, fits, weight
from kdissect.jit import inlined, kernel
from kdissect.kafka.assembly import Protocol
from kdissect.kafka.frame_search import HEADER, STEP_MAX, response_header, step
from kdissect.kafka.frame_tables import API_KEY, VERSION
from kdissect.kafka.framing import NO_REQUEST, WalkState, bounds_of
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.tcp.byte_ranges import find, int64, read_bytes
from kdissect.tcp.columns import CLIENT_SIDE, CONNECTION_WIDTH, PIECE_START, SIDE_WIDTH
from kdissect.tcp.reassembly import Streams

ID_MAX = 1 << 24  # for a single response; text of other protocols is above it
_SIZE_MIN = 20  # bytes; shorter responses are no evidence
_SIZE_MAX = 1 << 20  # bytes; larger responses are not weighed
FRAMES_READ = 4  # per stream
WEIGHT_MIN = 18
TRIED_MAX = 2048
TRIED_BYTES = 16 << 20
AT_ONCE = 1024  # connections whose responses are weighed together
LOT = 4 << 20  # bytes of responses in memory together
REFUSED_MAX = 1000  # of a stream; after so many the score of a frame decides, as for larger frames

Ints = npt.NDArray[np.int64]


@inlined
def _is_whole(pieces: Any, index: int, stop: int, end: int) -> bool:
    """Return whether all bytes from inside piece `index` up to `end` were captured."""
    while pieces[index]["end"] < end:
        index += 1
        if index >= stop or pieces[index]["pos"] > pieces[index - 1]["end"]:
            return False
    return True


@kernel
def chains(pieces: Any, sides: Any, streams: Any, limit: int, headers: Any, ends: Any) -> None:
    """Find where the first frames of `streams` end, while they are complete and may be responses.

    headers: HEADER[1], scratch.
    ends: int64[len(streams) * FRAMES_READ], zeros on entry; receives the position after each frame.
    A stream that cannot begin with a response gets none.
    """
    header = headers[0]
    for row in range(len(streams)):
        index, stop, end = bounds_of(pieces, sides, streams[row])
        pos = int64(0)
        last = int64(-1)
        for number in range(FRAMES_READ + 1):
            if pos >= end:
                break
            index = find(pieces, index, stop, pos)
            if pieces[index]["pos"] > pos:
                break  # the next frame is in a gap
            accept = response_header(pieces, index, stop, pos, limit, header)
            size = header["size"]
            correlation = header["correlation"]
            if correlation >= 0:
                accept = accept and correlation < ID_MAX
                accept = accept and (last < 0 or 0 < step(correlation, last) <= STEP_MAX)
            if not accept:
                for place in range(row * FRAMES_READ, (row + 1) * FRAMES_READ):
                    ends[place] = 0
                break
            if size < 0 or correlation < 0 or number == FRAMES_READ:
                break
            if not _is_whole(pieces, index, stop, pos + 4 + size):
                break
            pos += 4 + size
            last = correlation
            ends[row * FRAMES_READ + number] = pos


class _Tried:
    """The responses weighed so far; see the module for the limits."""

    def __init__(self) -> None:
        self.results: dict[bytes, bool] = {}  # by digest of the frame without its id
        self.successful: set[Pair] = set()
        self.count = 0
        self.size = 0

    def try_out(self, frames: list[bytes]) -> list[bool]:
        """Return whether each frame, given without its size prefix, has enough weight."""
        names = [blake2b(frame[4:], digest_size=16).digest() for frame in frames]
        new = {
            name: frame
            for name, frame in zip(names, frames, strict=True)
            if name not in self.results
        }
        everything: dict[bytes, bytes] = {}
        later: dict[bytes, bytes] = {}
        for name, frame in new.items():
            is_first = self.count < TRIED_MAX and self.size < TRIED_BYTES
            (everything if is_first else later)[name] = frame
            self.count += is_first
            self.size += len(frame) if is_first else 0
        self._weigh(everything, every_response())
        self._weigh(later, frozenset(self.successful))
        return [self.results[name] for name in names]

    def _weigh(self, named: dict[bytes, bytes], pairs: frozenset[Pair]) -> None:
        if not named:
            return
        names, frames = list(named), list(named.values())
        buf = np.frombuffer(b"".join(frames), np.uint8)
        lengths = np.array([len(frame) for frame in frames], np.int64)
        end = np.cumsum(lengths)
        start = end - lengths
        self.results.update(dict.fromkeys(names, False))
        for key, version in sorted(pairs):
            for row in np.flatnonzero(fits(key, version, buf, start, end)).tolist():
                if weight(key, version, frames[row]) >= WEIGHT_MIN:
                    self.results[names[row]] = True
                    self.successful.add((key, version))


def refuse_other_bytes(state: WalkState, pieces: Any, stream: Any, requests: Ints) -> None:
    """Continue a walk one byte further if the frame that its search found is no response.

    stream: `bounds_of` the stream. requests: int64[n, FRAME_WIDTH], among them WALK.request, whose
    response it would be. After REFUSED_MAX frames of a stream the walk keeps the next ones, so that
    the time stays linear in the bytes.
    """
    walk = state.walk[0]
    key, version = requests[walk["request"], [API_KEY, VERSION]].tolist()
    walk["request"] = NO_REQUEST
    index, stop, _ = stream
    pos, size = int(walk["pos"]) + 4, int(state.headers[0]["size"])
    index = find(pieces, index, stop, pos)
    if walk["refused_count"] == REFUSED_MAX or size > _SIZE_MAX:
        return
    if not _is_whole(pieces, index, stop, pos + size):
        return
    if key not in catalog.apis() or version not in catalog.api(key).response.versions:
        return
    # KIP-511: a broker answers an unknown version of ApiVersions with version 0.
    versions = {version, 0} if key == ApiKey.API_VERSIONS else {version}
    frame = np.frombuffer(read_bytes(pieces, index, pos, size), np.uint8)
    start, end = np.zeros(1, np.int64), np.array([size], np.int64)
    if not any(fits(key, version, frame, start, end)[0] for version in versions):
        walk["pos"] += 1
        walk["refused_count"] += 1


def detect_single_responses(
    streams: Streams, alone: Ints, limit: int, client_side: Any, protocol: Any, origin: Any
) -> None:
    """Detect Kafka among the connections `alone`, of which only one side's beginning was captured.

    Updates client_side uint8 and protocol uint8 per connection, and origin STREAM per stream.
    limit: largest size of a frame in bytes.
    """
    pieces = streams.pieces
    sides = streams.sides.reshape(-1, SIDE_WIDTH)
    handshake_client = streams.connections.reshape(-1, CONNECTION_WIDTH)[:, CLIENT_SIDE]
    broker = (streams.begins_at()[1::2] == 0).astype(np.int64)
    rows = alone[handshake_client[alone] != broker[alone]]
    tried = _Tried()
    for first in range(0, len(rows), AT_ONCE):
        portion = rows[first : first + AT_ONCE]
        numbers = 2 * portion + broker[portion]
        frame_ends = np.zeros(len(portion) * FRAMES_READ, np.int64)
        chains(pieces, streams.sides, numbers, limit, np.zeros(1, HEADER), frame_ends)
        ends = frame_ends.reshape(-1, FRAMES_READ)
        starts = np.concatenate([np.zeros((len(portion), 1), np.int64), ends[:, :-1]], 1)
        size = ends - starts - 4
        row, number = np.nonzero((size >= _SIZE_MIN) & (size <= _SIZE_MAX))
        pos, size = starts[row, number] + 4, size[row, number]
        piece = sides[numbers[row], PIECE_START]
        is_response = np.zeros(len(row), np.bool_)
        lots = np.flatnonzero(np.diff(np.cumsum(size) // LOT)) + 1
        for lot in np.split(np.arange(len(row)), lots):
            places = zip(piece[lot].tolist(), pos[lot].tolist(), size[lot].tolist(), strict=True)
            is_response[lot] = tried.try_out([read_bytes(pieces, *place) for place in places])
        kafka = portion[np.unique(row[is_response])]
        protocol[kafka] = Protocol.KAFKA
        client_side[kafka] = 1 - broker[kafka]
        origin["is_boundary"][2 * kafka + broker[kafka]] = 1
