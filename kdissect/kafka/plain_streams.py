"""Decrypted streams among the others: pieces for the framing kernels, and their real positions.

A decrypted record is a piece of a *virtual* segment, numbered after the real segments. Its bytes
are carried (`kafka.assembly.Carried`). So the kernels do not know about TLS.
`PlainStreams.settle` replaces virtual segments and plaintext positions in their results by packets
and positions of the TCP stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdissect.arrays import Bytes, Rows, joined
from kdissect.capture.mapped_files import CARRIED_FROM
from kdissect.kafka.assembly import Carried
from kdissect.kafka.exchanges import Frames
from kdissect.kafka.walk import KafkaStreams
from kdissect.tcp.byte_ranges import PIECE
from kdissect.tcp.reassembly import Streams
from kdissect.tls.plaintext import OPENED, OpenedStream, TlsConnections


@dataclass(frozen=True, slots=True)
class PlainStreams:
    """All streams for framing: decrypted ones instead of their ciphertext.

    streams: their times and sources are those of real and virtual segments. records: OPENED, of
    virtual segment real_count + row. opened: by connection, both sides.
    """

    streams: KafkaStreams
    carried: Carried
    records: Rows
    real_count: int
    opened: dict[int, tuple[OpenedStream, OpenedStream]]

    def settle(self, frames: Frames) -> None:
        """Give a direction's frames and faults their real segments and positions."""
        if not self.opened:
            return
        self._turn(frames.table, "first")
        self._turn(frames.faults, "packet")
        last = frames.table["last"]
        virtual = last >= self.real_count
        last[virtual] = self.records["last_segment"][last[virtual] - self.real_count]

    def _turn(self, table: Rows, segment: str) -> None:
        virtual = np.flatnonzero(table[segment] >= self.real_count)
        record = self.records[table[segment][virtual] - self.real_count]
        table["pos"][virtual] += record["tcp_pos"] - record["pos"]
        table[segment][virtual] = record["first_segment"]

    def enclosing_bytes(self, sides: Rows, number: int) -> int:
        """Bytes of a decrypted TCP stream around the plaintext: handshake, headers, padding."""
        opened = self.opened[number >> 1][number & 1]
        inside = int(opened.table["length"].sum()) + opened.lost_byte_count
        return int(sides[number]["byte_count"]) - inside


def plain_streams(
    kafka: KafkaStreams, streams: Streams, tls: TlsConnections, carried: Bytes
) -> PlainStreams:
    """All streams, with the decrypted records of `tls` after the pieces of the captures.

    carried: bytes that the segments brought along; the spool has them before the decrypted ones.
    """
    real_count = len(kafka.times)
    if not tls.opened:
        return PlainStreams(kafka, Carried(carried), np.zeros(0, OPENED), real_count, {})
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
            tables.append(table)
    records = np.concatenate(tables)
    data = tls.spool.array()
    pieces = np.zeros(len(records), PIECE)
    pieces["pos"] = records["pos"]
    pieces["end"] = records["pos"] + records["length"]
    pieces["address"] = records["spool_pos"] + data.ctypes.data
    pieces["file_pos"] = records["spool_pos"] + CARRIED_FROM
    pieces["segment"] = real_count + np.arange(len(records))
    first = records["first_segment"]
    order = np.argsort(records["spool_pos"])
    start, file_pos = records["spool_pos"][order], streams.segments["pos"][first[order]]
    plain = kafka._replace(
        pieces=joined([streams.pieces, pieces]),
        times=np.concatenate([kafka.times, kafka.times[first]]),
        source=np.concatenate([kafka.source, kafka.source[first]]),
        sides=sides,
    )
    return PlainStreams(plain, Carried(data, start, file_pos), records, real_count, tls.opened)
