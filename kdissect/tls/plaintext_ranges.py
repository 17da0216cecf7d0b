"""Decrypted streams among the others: pieces for the framing kernels, and their real positions.

A decrypted record is a piece of a *virtual* segment, numbered after the real segments. Its source
is numbered after the captures. So the kernels do not know about TLS; `PlainStreams.settle` replaces
virtual segments and plaintext positions in their results by packets and positions of the TCP
stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.arrays import joined
from kdissect.capture.scratch import MEMORY, Scratch, Written
from kdissect.kafka import frame_tables
from kdissect.kafka.assembly import NO_CARRIED, WARNING, Anomaly, Carried, Protocol, TlsFacts
from kdissect.kafka.detection import recognise
from kdissect.kafka.frame_search import Kafka, PendingRequests
from kdissect.kafka.frame_tables import FAULT_WIDTH
from kdissect.tcp.byte_ranges import PIECE, Pieces
from kdissect.tcp.columns import (
    BYTE_COUNT,
    CONNECTION_WIDTH,
    END,
    PIECE_START,
    PIECE_STOP,
    SIDE_WIDTH,
)
from kdissect.tcp.reassembly import Streams
from kdissect.tls.session import GENERATION_MAX, RecordPoint, Session

Ints = npt.NDArray[np.int64]

# A decrypted record of application data. pos: in the decrypted stream; tcp_pos: that of its first
# byte of ciphertext in the TCP stream; record_start, record_end: there too, header included.
OPENED = np.dtype(
    [
        ("pos", "<i8"),
        ("length", "<i8"),
        ("spool_pos", "<i8"),
        ("tcp_pos", "<i8"),
        ("first_segment", "<i8"),
        ("last_segment", "<i8"),
        ("record_start", "<i8"),
        ("record_end", "<i8"),
        ("number", "<i8"),
        ("generation", "<i8"),
    ]
)
CLOSED_MAX = 256 << 10  # bytes after the last opened record that make a stream unreadable


@dataclass(slots=True)
class OpenedStream:
    """The decrypted records of a stream. table: OPENED[n]; lost: (pos, bytes, segment) runs.

    start, after: TCP position and point of plaintext position 0, and of the one after the last
    record; None if it is not known which keys apply there. closed_byte_count: captured bytes
    after the last opened record.
    """

    table: npt.NDArray[np.void]
    lost: list[tuple[int, int, int]]
    start: tuple[int, RecordPoint] | None = None
    after: tuple[int, RecordPoint] | None = None
    closed_byte_count: int = 0

    @property
    def lost_byte_count(self) -> int:
        return sum(count for _, count, _ in self.lost)

    @property
    def end(self) -> int:
        """The position after the last decrypted byte."""
        return int(self.table["pos"][-1] + self.table["length"][-1]) if len(self.table) else 0

    @property
    def can_resume(self) -> bool:
        """Return whether `point` gives a point for each position, from which the rest can be
        decrypted."""
        if self.start is None or self.after is None or self.closed_byte_count > CLOSED_MAX:
            return False
        return self.start[1].generation >= 0 and self.after[1].generation <= GENERATION_MAX

    def point(self, pos: int) -> tuple[int, RecordPoint]:
        """TCP position and point of the record with a plaintext position.

        For a position between two records it is the end of the first, so that the next run reads
        the lost ones again.
        """
        assert self.start is not None
        assert self.after is not None
        if pos >= self.end:
            return self.after
        index = int(np.searchsorted(self.table["pos"], pos, "right")) - 1
        if index < 0:
            return self.start
        row = self.table[index]
        number, generation = int(row["number"]), int(row["generation"])
        inside, start = pos - int(row["pos"]), int(row["record_start"])
        if inside >= row["length"]:
            return int(row["record_end"]), RecordPoint(number + 1, generation)
        return start, RecordPoint(number, generation, int(row["tcp_pos"]) + inside - start)

    def tcp_pos(self, pos: int) -> int:
        """The TCP position of a plaintext position; `pos` itself if no record begins with it."""
        index = int(np.searchsorted(self.table["pos"], pos))
        is_there = index < len(self.table) and self.table["pos"][index] == pos
        return int(self.table["tcp_pos"][index]) if is_there else pos

    def settled(self, tcp_pos: int) -> int:
        """The position up to which all records end before `tcp_pos`."""
        count = int(np.searchsorted(self.table["record_end"], tcp_pos, "right"))
        return OpenedStream(self.table[:count], []).end


@dataclass(slots=True)
class TlsConnections:
    """Facts about the TLS connections of a batch; keys are rows of the connections.

    hello_side: the side that sent the ClientHello.
    opened: both streams, by side, of connections with keys.
    sessions: facts about the keys of these connections.
    failed: why the other connections have no keys, if there is a key log.
    past_handshake: connections that sent application data.
    """

    facts: dict[int, TlsFacts] = field(default_factory=dict)
    hello_side: dict[int, int] = field(default_factory=dict)
    opened: dict[int, tuple[OpenedStream, OpenedStream]] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    past_handshake: list[int] = field(default_factory=list)
    spool: Written = field(default_factory=lambda: Written(np.uint8, Scratch(in_files=True)))


@dataclass(frozen=True, slots=True)
class PlainStreams:
    """All streams for framing: decrypted ones instead of their ciphertext.

    times, source: of real and virtual segments. opened: by connection, both sides.
    """

    pieces: Pieces
    sides: Ints
    times: Ints
    source: npt.NDArray[np.int32]
    carried: Carried
    records: npt.NDArray[np.void]  # OPENED, of virtual segment real_count + row
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
        last[virtual] = self.records["last_segment"][last[virtual] - self.real_count]

    def _turn(self, table: Any, segment: int, pos: int) -> None:
        virtual = np.flatnonzero(table[:, segment] >= self.real_count)
        record = self.records[table[virtual, segment] - self.real_count]
        table[virtual, pos] += record["tcp_pos"] - record["pos"]
        table[virtual, segment] = record["first_segment"]


def plain_streams(
    streams: Streams, tls: TlsConnections, source_count: int, scratch: Scratch = MEMORY
) -> PlainStreams:
    """All streams, with the decrypted records of `tls` after the pieces of the captures."""
    times = scratch.copied(streams.segments["time_ns"])
    source = scratch.copied(streams.segments["source"])
    if not tls.opened:
        none = np.zeros(0, OPENED)
        return PlainStreams(
            streams.pieces, streams.sides, times, source, NO_CARRIED, none, len(times), {}
        )
    sides = streams.sides.copy()
    tables = []
    count = len(streams.pieces)
    for connection, opened in tls.opened.items():
        for side in (0, 1):
            table = opened[side].table
            at = (2 * connection + side) * SIDE_WIDTH
            sides[at + PIECE_START] = count
            count += len(table)
            sides[at + PIECE_STOP] = count
            sides[at + END] = opened[side].end
            tables.append(table)
    records = np.concatenate(tables)
    data = tls.spool.array()
    pieces = np.zeros(len(records), PIECE)
    pieces["pos"] = records["pos"]
    pieces["end"] = records["pos"] + records["length"]
    pieces["address"] = records["spool_pos"] + data.ctypes.data
    pieces["file_pos"] = records["spool_pos"]
    pieces["segment"] = len(times) + np.arange(len(records))
    first = records["first_segment"]
    order = np.argsort(records["spool_pos"])
    carried = Carried(
        source_count,
        data,
        records["spool_pos"][order],
        source[first[order]],
        streams.segments["pos"][first[order]],
    )
    return PlainStreams(
        joined([streams.pieces, pieces]),
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
    pending: PendingRequests,
    client_side: npt.NDArray[np.uint8],
    protocol: npt.NDArray[np.uint8],
) -> None:
    """Detect the protocol of decrypted connections, if it is not known; others stay TLS."""
    rows = np.array(sorted(plain.opened), np.int64)
    rows = rows[protocol[rows] != Protocol.KAFKA]
    if not len(rows):
        return
    both = np.stack([2 * rows, 2 * rows + 1], 1).reshape(-1)
    side = client_side[rows]
    protocols = np.zeros(len(rows), np.uint8)
    recognise(
        plain.pieces,
        plain.times,
        plain.sides.reshape(-1, SIDE_WIDTH)[both].reshape(-1),
        connections.reshape(-1, CONNECTION_WIDTH)[rows].reshape(-1),
        has_origin[both],
        hinted[rows],
        kafka,
        pending,
        side,
        protocols,
    )
    is_kafka = protocols == Protocol.KAFKA
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
    inside = int(opened.table["length"].sum())
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
    """A direction's faults. Those of decrypted streams are gaps of the TCP stream, and records that
    could not be decrypted."""
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
