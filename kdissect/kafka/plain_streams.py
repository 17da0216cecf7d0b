"""Decrypted streams among the others: pieces for the framing kernels, and their real positions.

A decrypted record is a piece of a *virtual* segment, numbered after the real segments. Its source
is numbered after the captures. So the kernels do not know about TLS; `PlainStreams.settle` replaces
virtual segments and plaintext positions in their results by packets and positions of the TCP
stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.arrays import Bytes, joined
from kdissect.capture.scratch import MEMORY, Scratch
from kdissect.kafka import frame_tables
from kdissect.kafka.assembly import NO_CARRIED, WARNING, Anomaly, Carried, Protocol
from kdissect.kafka.detection import recognise
from kdissect.kafka.frame_search import Kafka
from kdissect.kafka.frame_tables import FAULT_WIDTH
from kdissect.tcp.byte_ranges import PIECE, Pieces
from kdissect.tcp.reassembly import Streams
from kdissect.tls.plaintext import OPENED, OpenedStream, TlsConnections

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlainStreams:
    """All streams for framing: decrypted ones instead of their ciphertext.

    times, source: of real and virtual segments. opened: by connection, both sides.
    """

    pieces: Pieces
    sides: npt.NDArray[np.void]  # SIDE
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
            own = sides[2 * connection + side]
            own["piece_start"] = count
            count += len(table)
            own["piece_stop"] = count
            own["end"] = opened[side].end
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
    plain: PlainStreams, connections: Any, has_origin: Bytes, hinted: Bytes, kafka: Kafka,
    client_side: Bytes, protocol: Bytes,
) -> None:  # fmt: skip
    """Detect the protocol of decrypted connections, if it is not known; others stay TLS."""
    rows = np.array(sorted(plain.opened), np.int64)
    rows = rows[protocol[rows] != Protocol.KAFKA]
    if not len(rows):
        return
    side, found = recognise(
        plain.pieces, plain.times, plain.sides, connections, has_origin, hinted, kafka, rows,
        client_side,
    )  # fmt: skip
    is_kafka = found == Protocol.KAFKA
    protocol[rows[is_kafka]] = Protocol.KAFKA
    client_side[rows[is_kafka]] = side[is_kafka]


def account(plain: PlainStreams, sides: Any, number: int, framed: int) -> tuple[int, int]:
    """(framed, unframed) bytes of a decrypted stream, `framed` of whose plaintext is in frames."""
    opened = plain.opened[number >> 1][number & 1]
    inside = int(opened.table["length"].sum())
    unframed = inside - framed + opened.lost_byte_count
    return int(sides[number]["byte_count"]) - unframed, unframed


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
        own = streams.sides[2 * connection + side]
        more = frame_tables.put_gaps(
            streams.pieces, int(own["piece_start"]), int(own["piece_stop"]), int(own["end"]),
            direction, connection, more, used,
        )  # fmt: skip
        for pos, count, segment in opened[side].lost:
            more = frame_tables.put_fault(
                more, used, int(Anomaly.UNFRAMED_BYTES), WARNING, direction, connection, segment,
                pos, count, frame_tables.NOT_DECRYPTED, -1, -1,
            )  # fmt: skip
    made = more[: used[frame_tables.FAULTS] * FAULT_WIDTH].reshape(-1, FAULT_WIDTH)
    return np.concatenate([faults[~(is_opened & is_gap)], made])
