"""Decrypted streams among the others: their pieces for the framing kernels, and the way back.

A decrypted record is a piece whose segment is a *virtual* one, numbered behind the real segments;
its source is the one behind the captures. So the kernels need not know of TLS, and what they found
is turned back into packets and places of the TCP stream here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.file_arrays import MEMORY, Scratch
from kdissect.capture.spool import Spool
from kdissect.kafka import frame_tables
from kdissect.kafka.assembly import NO_CARRIED, WARNING, Anomaly, Carried, Protocol, TlsFacts
from kdissect.kafka.detection import recognise
from kdissect.kafka.frame_search import Asked, Kafka
from kdissect.kafka.frame_tables import FAULT_WIDTH
from kdissect.tcp.byte_ranges import Pieces
from kdissect.tcp.columns import (
    BYTE_COUNT,
    CONNECTION_WIDTH,
    END,
    PIECE_START,
    PIECE_STOP,
    SIDE_WIDTH,
)
from kdissect.tcp.reassembly import Streams

Ints = npt.NDArray[np.int64]

# Columns of a decrypted record. PLAIN: position in the decrypted stream; PLACE: of its first byte
# of ciphertext in the TCP stream; FIRST, LAST: segments.
_PLAIN, LENGTH, _CARRIED, _PLACE, _FIRST, _LAST = range(6)
OPENED_WIDTH = 6


@dataclass(slots=True)
class OpenedStream:
    """What came of a stream: table int64[n, OPENED_WIDTH]; lost: (pos, bytes, segment) runs."""

    table: Ints
    lost: list[tuple[int, int, int]]

    @property
    def lost_byte_count(self) -> int:
        return sum(count for _, count, _ in self.lost)


@dataclass(slots=True)
class TlsConnections:
    """What the TLS connections of a batch told; keys are rows of the connections.

    hello_side: who sent the ClientHello. opened: both streams, by side. failed: reasons.
    """

    facts: dict[int, TlsFacts] = field(default_factory=dict)
    hello_side: dict[int, int] = field(default_factory=dict)
    opened: dict[int, tuple[OpenedStream, OpenedStream]] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    spool: Spool = field(default_factory=Spool)


@dataclass(frozen=True, slots=True)
class PlainStreams:
    """All streams as framing shall see them: the decrypted ones instead of their ciphertext.

    times, source: of real and virtual segments. opened: by connection, both sides.
    """

    pieces: Pieces
    sides: Ints
    times: Ints
    source: npt.NDArray[np.int32]
    carried: Carried
    records: Ints  # [n, OPENED_WIDTH], of virtual segment real_count + row
    real_count: int
    opened: dict[int, tuple[OpenedStream, OpenedStream]]

    def settle(self, frames: Any, faults: Any) -> None:
        """Virtual segments and plaintext positions of frames and faults to real ones, in place."""
        if not len(self.records):
            return
        self._turn(frames, frame_tables.FIRST, frame_tables.POS)
        self._turn(faults, frame_tables.FAULT_SEGMENT, frame_tables.FAULT_POS)
        last = frames[:, frame_tables.LAST]
        virtual = last >= self.real_count
        last[virtual] = self.records[last[virtual] - self.real_count, _LAST]

    def _turn(self, table: Any, segment: int, pos: int) -> None:
        virtual = np.flatnonzero(table[:, segment] >= self.real_count)
        record = self.records[table[virtual, segment] - self.real_count]
        table[virtual, pos] += record[:, _PLACE] - record[:, _PLAIN]
        table[virtual, segment] = record[:, _FIRST]


def plain_streams(
    streams: Streams, tls: TlsConnections, source_count: int, scratch: Scratch = MEMORY
) -> PlainStreams:
    """Put the decrypted records of `tls` behind the pieces of the captures."""
    times = scratch.copied(streams.segments["time_ns"])
    source = scratch.copied(streams.segments["source"])
    if not tls.opened:
        none = np.zeros((0, OPENED_WIDTH), np.int64)
        return PlainStreams(
            streams.pieces, streams.sides, times, source, NO_CARRIED, none, len(times), {}
        )
    sides = streams.sides.copy()
    tables = []
    count = len(streams.pieces.pos)
    for connection, opened in tls.opened.items():
        for side in (0, 1):
            table = opened[side].table
            at = (2 * connection + side) * SIDE_WIDTH
            sides[at + PIECE_START] = count
            count += len(table)
            sides[at + PIECE_STOP] = count
            sides[at + END] = int(table[-1, _PLAIN] + table[-1, LENGTH]) if len(table) else 0
            tables.append(table)
    records = np.concatenate(tables)
    data = tls.spool.data()
    pieces = streams.pieces
    merged = Pieces(
        np.concatenate([pieces.pos, records[:, _PLAIN]]),
        np.concatenate([pieces.length, records[:, LENGTH]]),
        np.concatenate(
            [pieces.address, (records[:, _CARRIED] + data.ctypes.data).astype(np.uint64)]
        ),
        np.concatenate([pieces.file_pos, records[:, _CARRIED]]),
        np.concatenate([pieces.segment, len(times) + np.arange(len(records))]),
    )
    first = records[:, _FIRST]
    order = np.argsort(records[:, _CARRIED])
    carried = Carried(
        source_count,
        data,
        records[order, _CARRIED],
        source[first[order]],
        streams.segments["pos"][first[order]],
    )
    return PlainStreams(
        merged,
        sides,
        np.concatenate([times, times[first]]),
        np.concatenate([source, np.full(len(records), source_count, np.int32)]),
        carried,
        records,
        len(times),
        tls.opened,
    )


def recognise_plain(
    plain: PlainStreams,
    connections: Ints,
    has_origin: npt.NDArray[np.uint8],
    hinted: npt.NDArray[np.uint8],
    kafka: Kafka,
    asked: Asked,
    client_side: npt.NDArray[np.uint8],
    protocol: npt.NDArray[np.uint8],
) -> None:
    """What decrypted connections speak; those that do not speak Kafka stay TLS."""
    rows = np.array(sorted(plain.opened), np.int64)
    if not len(rows):
        return
    both = np.stack([2 * rows, 2 * rows + 1], 1).reshape(-1)
    side = client_side[rows]
    found = np.zeros(len(rows), np.uint8)
    recognise(
        plain.pieces,
        plain.times,
        plain.sides.reshape(-1, SIDE_WIDTH)[both].reshape(-1),
        connections.reshape(-1, CONNECTION_WIDTH)[rows].reshape(-1),
        has_origin[both],
        hinted[rows],
        kafka,
        asked,
        side,
        found,
    )
    is_kafka = found == Protocol.KAFKA
    protocol[rows[is_kafka]] = Protocol.KAFKA
    client_side[rows[is_kafka]] = side[is_kafka]


def account(
    plain: PlainStreams,
    sides: Ints,
    number: int,
    framed: int,
) -> tuple[int, int]:
    """(framed, unframed) bytes of a decrypted stream, `framed` of whose plaintext is in frames."""
    opened = plain.opened[number >> 1][number & 1]
    inside = int(opened.table[:, LENGTH].sum())
    unframed = inside - framed + opened.lost_byte_count
    return int(sides[number * SIDE_WIDTH + BYTE_COUNT]) - unframed, unframed


def faults_of(
    plain: PlainStreams,
    streams: Streams,
    direction: int,
    client_side: npt.NDArray[np.uint8],
    protocol: npt.NDArray[np.uint8],
    faults: Ints,
) -> Ints:
    """A direction's faults, those of decrypted streams told of the TCP stream: the gaps that it
    has, and records that could not be decrypted."""
    if not plain.opened:
        return faults
    is_opened = np.isin(faults[:, frame_tables.FAULT_CONNECTION], list(plain.opened))
    is_gap = faults[:, frame_tables.FAULT_KIND] == Anomaly.GAP
    more = np.zeros(0, np.int64)
    used = np.zeros(3, np.int64)
    for connection, opened in plain.opened.items():
        if protocol[connection] != Protocol.KAFKA:
            continue
        side = int(client_side[connection]) ^ direction
        at = (2 * connection + side) * SIDE_WIDTH
        more = frame_tables.put_gaps(
            streams.pieces, int(streams.sides[at + PIECE_START]),
            int(streams.sides[at + PIECE_STOP]), int(streams.sides[at + END]), direction,
            connection, more, used,
        )  # fmt: skip
        for pos, count, segment in opened[side].lost:
            more = frame_tables.put_fault(
                more, used, int(Anomaly.UNFRAMED_BYTES), WARNING, direction, connection, segment,
                pos, count, frame_tables.NOT_DECRYPTED, -1, -1,
            )  # fmt: skip
    made = more[: used[frame_tables.FAULTS] * FAULT_WIDTH].reshape(-1, FAULT_WIDTH)
    return np.concatenate([faults[~(is_opened & is_gap)], made])
