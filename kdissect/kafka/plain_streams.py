"""Decrypted streams among the others: pieces for the framing kernels, and their real positions.

A decrypted record is a piece of a *virtual* segment, numbered after the real segments. Its bytes
are carried (`kafka.assembly.Carried`). So the kernels do not know about TLS.
`PlainStreams.settled` replaces virtual segments and plaintext positions in their results by packets
and positions of the TCP stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kdissect.arrays import Bytes, Rows, joined
from kdissect.capture.mapped_files import CARRIED_FROM
from kdissect.capture.scratch import Scratch
from kdissect.kafka.assembly import ANOMALY, Anomaly, Carried, Protocol
from kdissect.kafka.exchanges import Frames
from kdissect.kafka.frame_search import Stream
from kdissect.kafka.frame_tables import FAULT, FAULTS, NOT_DECRYPTED, put_gaps
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

    def settled(
        self, frames: Frames, streams: Streams, direction: int, client_side: Bytes, protocol: Bytes
    ) -> Frames:
        """A direction's frames with real segments and positions. Faults of decrypted streams are
        gaps of the TCP stream, and records that could not be decrypted."""
        if not self.opened:
            return frames
        table, faults = frames.table, frames.faults
        self._turn(table, "first")
        self._turn(faults, "packet")
        last = table["last"]
        virtual = last >= self.real_count
        last[virtual] = self.records["last_segment"][last[virtual] - self.real_count]
        is_opened = np.isin(faults["connection"], list(self.opened))
        parts = [faults[~(is_opened & (faults["kind"] == Anomaly.GAP))]]
        for connection in self.opened:
            if protocol[connection] == Protocol.KAFKA:
                side = int(client_side[connection]) ^ direction
                parts += self._faults(streams, connection, side, direction)
        return replace(frames, faults=joined(parts))

    def _turn(self, table: Rows, segment: str) -> None:
        virtual = np.flatnonzero(table[segment] >= self.real_count)
        record = self.records[table[segment][virtual] - self.real_count]
        table["pos"][virtual] += record["tcp_pos"] - record["pos"]
        table[segment][virtual] = record["first_segment"]

    def _faults(self, streams: Streams, connection: int, side: int, direction: int) -> list[Rows]:
        """Gaps of a TCP stream, and records in it that could not be decrypted."""
        own = streams.sides[2 * connection + side]
        end = int(own["end"])
        stream = Stream(streams.pieces, int(own["piece_start"]), int(own["piece_stop"]), end)
        used = np.zeros(3, np.int64)
        gaps = put_gaps(stream, end, direction, connection, np.zeros(0, ANOMALY), used)
        places = self.opened[connection][side].lost
        lost = np.repeat(FAULT, len(places))
        lost["kind"], lost["direction"] = Anomaly.UNFRAMED_BYTES, direction
        lost["connection"], lost["a"], lost["b"] = connection, NOT_DECRYPTED, -1
        for row, place in zip(lost, places, strict=True):
            row["pos"], row["byte_count"], row["packet"] = place
        return [gaps[: used[FAULTS]], lost]

    def enclosing_bytes(self, sides: Rows, number: int) -> int:
        """Bytes of a decrypted TCP stream around the plaintext: handshake, headers, padding."""
        opened = self.opened[number >> 1][number & 1]
        inside = int(opened.table["length"].sum()) + opened.lost_byte_count
        return int(sides[number]["byte_count"]) - inside


def plain_streams(
    streams: Streams, times: Ints, tls: TlsConnections, carried: Bytes, scratch: Scratch
) -> PlainStreams:
    """All streams, with the decrypted records of `tls` after the pieces of the captures.

    times: of the segments of `streams`. carried: bytes that the segments brought along; decrypted
    ones come after them.
    """
    source = scratch.copied(streams.segments["source"])
    if not tls.opened:
        none = np.zeros(0, OPENED)
        return PlainStreams(
            streams.pieces, streams.sides, times, source, Carried(carried), none, len(times), {}
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
    data, base = tls.spool.array(), len(carried)
    data = np.concatenate([carried, data]) if base else data
    pieces = np.zeros(len(records), PIECE)
    pieces["pos"] = records["pos"]
    pieces["end"] = records["pos"] + records["length"]
    pieces["address"] = records["spool_pos"] + base + data.ctypes.data
    pieces["file_pos"] = records["spool_pos"] + base + CARRIED_FROM
    pieces["segment"] = len(times) + np.arange(len(records))
    first = records["first_segment"]
    order = np.argsort(records["spool_pos"])
    start, file_pos = records["spool_pos"][order] + base, streams.segments["pos"][first[order]]
    return PlainStreams(
        joined([streams.pieces, pieces]),
        sides,
        np.concatenate([times, times[first]]),
        np.concatenate([source, source[first]]),
        Carried(data, start, file_pos),
        records,
        len(times),
        tls.opened,
    )
