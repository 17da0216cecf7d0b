"""A window: carried and new segments, assembled together.

See `carry` for the terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kdissect.arrays import Bools, Ints, Rows
from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SYN, SegmentBatch
from kdissect.kafka.assemble import assemble_streams
from kdissect.kafka.assembly import DIRECTION, Assembly, Protocol
from kdissect.kafka.exchanges import Pairs
from kdissect.kafka.options import StreamOptions
from kdissect.kafka.walk import STREAM
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.resume.open_connection import (
    NO_NUMBER,
    OpenConnection,
    earlier_state,
    is_resumed,
    new_rows,
    rows_of,
)
from kdissect.tcp.columns import NO_ACK, CloseReason
from kdissect.tcp.connection_ids import connection_ids, exchange_ids
from kdissect.tcp.reassembly import Streams


@dataclass(frozen=True, slots=True)
class Frames:
    """The frame that each exchange has in one direction.

    stream: the number of the stream. has: whether there is a frame. pos, end: where the frame
    begins, with its size prefix, and ends; in plaintext if it is decrypted. after: STREAM, what is
    known of the stream after the frame.
    """

    stream: Ints
    has: Bools
    pos: Ints
    end: Ints
    after: Rows


class AssembledWindow:
    """The connections of a window, whose carried and new segments were assembled together.

    What is here of a connection begins with its first carried byte. Positions and the ids in the
    anomalies count from there, except those of `assembly.connections` and `assembly.exchanges`:
    they are the same as in one run over all segments. streams, tls: what the assembly was made of.

    A value for each connection, which has streams 2 * row + side:

        before             OPEN, its state before the window
        earlier_protocol   the protocol in that state
        endpoints          the number of its pair of endpoints, which may have several connections
        is_last            it is the last one of these
        client_side        the side that sends the requests
        is_kafka, is_tls   its protocol here
        is_unread_tls      its TLS is not decrypted
        is_stuck           Kafka over TLS whose rest cannot be decrypted, because secrets are
                           missing or records are damaged
        is_closed          both sides have sent a FIN, or one an RST
        is_closing         one side has sent a FIN
        had_data           it has bytes here, or had some that were looked at
        last_time          time of its last packet in ns
        captured           count of its bytes here

    For each stream: sides (SIDE); ends, the position after its last byte; seq_of_start, the
    sequence number of position 0, or NO_NUMBER. For each segment: segment_stream. For each
    exchange: connection_of, the row of its connection; is_lost, whether the capture lost its
    response; id_here, its id in the anomalies; and the `frames` of requests and of responses.
    """

    def __init__(
        self,
        connections: Sequence[OpenConnection],
        batch: SegmentBatch,
        sources: Sources,
        options: StreamOptions,
        key_logs: Sequence[Any],
    ) -> None:
        """Assemble the segments of a batch; connection n continues its pair of endpoints n."""
        assembly, streams, pairs, tls = assemble_streams(
            [batch], sources, options, key_logs, earlier_state(connections)
        )
        table, sides = streams.connections, streams.sides
        self._sources = sources
        self.streams, self.tls, self.is_lost, self.sides = streams, tls, pairs.lost(), sides
        self.endpoints: Ints = table["pair"]
        self.is_last = np.diff(self.endpoints, append=-1) != 0
        self.before = _before(connections, table)
        self.client_side = assembly.connections["client_side"].astype(np.int64)
        self.is_kafka: Bools = assembly.connections["protocol"] == Protocol.KAFKA
        self.is_tls: Bools = assembly.connections["is_tls"] != 0
        self.earlier_protocol: Ints = self.before["earlier"]["protocol"]
        was_kafka = self.earlier_protocol == Protocol.KAFKA
        self.is_stuck = self.is_tls & (self.is_kafka | was_kafka)
        for row, opened in tls.opened.items():
            self.is_stuck[row] &= not all(stream.can_resume for stream in opened)
        self.is_unread_tls = self.is_tls.copy()
        self.is_unread_tls[list(tls.opened)] = False
        self.captured: Ints = sides["byte_count"].reshape(-1, 2).sum(axis=1)
        self.had_data = (self.captured > 0) | (self.earlier_protocol != Protocol.NONE)
        has_fin = (sides["fin"] != NO_ACK).reshape(-1, 2)
        self.is_closed = has_fin.all(axis=1) | (table["close_reason"] == CloseReason.RST)
        self.is_closing = has_fin.any(axis=1)
        self.ends: Ints = np.where(sides["has_data"] != 0, sides["high"] - sides["origin"], 0)
        self.segment_stream = 2 * streams.connection.astype(np.int64) + streams.segments["side"]
        self.seq_of_start = _seq_of_start(streams, sides, self.segment_stream)
        self.connection_of = assembly.exchanges["connection"].astype(np.int64)
        rows = assembly.exchanges
        self.frames = self._frames(rows, pairs, REQUEST), self._frames(rows, pairs, RESPONSE)
        restated = _connections(assembly, self.before, table)
        self.last_time: Ints = restated["last_time_ns"]
        ids = restated["connection_id"]
        exchanges = _exchanges(rows, self.frames, self.before, ids)
        self.id_here = rows["exchange_id"]
        self.assembly = replace(assembly, connections=restated, exchanges=exchanges)

    def _frames(self, exchanges: Rows, pairs: Pairs, way: int) -> Frames:
        """The frames of the requests, or of the responses."""
        column = exchanges[SIDES[way]]
        table, row_of = ((pairs.requests, pairs.request), (pairs.responses, pairs.response))[way]
        has, pos, after = row_of >= 0, column["pos"].copy(), np.zeros(len(row_of), STREAM)
        after[has] = table["after"][row_of[has]]
        for row, opened in self.tls.opened.items():
            low, high = np.searchsorted(self.connection_of, [row, row + 1]).tolist()
            rows = low + np.flatnonzero(has[low:high])
            if len(rows):  # sizes count plaintext, so positions must do as well
                records = opened[int(self.client_side[row]) ^ way].table
                record = records[np.searchsorted(records["tcp_pos"], pos[rows], "right") - 1]
                pos[rows] += record["pos"] - record["tcp_pos"]
        stream = self.streams_of(way)[self.connection_of]
        return Frames(stream, has, pos, pos + 4 + column["size"], after)

    def __len__(self) -> int:
        """The number of connections."""
        return len(self.endpoints)

    def response_bytes(self, row: int) -> bytes:
        """The captured bytes of the response of exchange `row`, in plaintext; zeros in gaps."""
        frame = self.assembly.exchanges["response"][row]
        first = frame["extent_start"]
        return self._sources.gather(
            self.assembly.extents[first : first + frame["extent_count"]]
        ).tobytes()

    def streams_of(self, direction: int) -> Ints:
        """int64[connections]: the stream with the requests, or with the responses."""
        return 2 * np.arange(len(self)) + (self.client_side ^ direction)


def _before(connections: Sequence[OpenConnection], table: Rows) -> Rows:
    """OPEN of each connection in `table` before the window."""
    is_later = np.diff(table["pair"], prepend=-1) == 0
    before = rows_of(connections)[table["pair"]]
    before[is_later] = new_rows(before["endpoints"][is_later])
    return before


def _connections(assembly: Assembly, before: Rows, table: Rows) -> Rows:
    """CONNECTION rows with the times and counts of earlier windows."""
    connections, earlier = assembly.connections.copy(), before["connection"]
    for name in DIRECTION.names or ():
        connections["direction"][name] += earlier["direction"][name]
    first_time = np.minimum(table["first_time"], earlier["first_time_ns"])
    connections["first_time_ns"] = first_time
    connections["last_time_ns"] = np.maximum(table["last_time"], earlier["last_time_ns"])
    resumed = is_resumed(before)
    for name in ("handshake_seen", "is_tls", "protocol"):
        connections[name] = np.where(resumed, earlier[name], connections[name])
    # a handshake's last ACK is not carried, and the SYNs of a resumed connection are made
    has_rtt = resumed | (earlier["handshake_rtt_ns"] >= 0)
    rtt = connections["handshake_rtt_ns"]
    connections["handshake_rtt_ns"] = np.where(has_rtt, earlier["handshake_rtt_ns"], rtt)
    connections["connection_id"] = connection_ids(assembly.endpoints, table["pair"], first_time)
    return connections


def _exchanges(exchanges: Rows, frames: tuple[Frames, Frames], before: Rows, ids: Ints) -> Rows:
    """EXCHANGE rows with positions in whole streams, and ids made from them."""
    exchanges, base = exchanges.copy(), before["base"].reshape(-1)
    for name, frame in zip(SIDES, frames, strict=True):
        pos = exchanges[name]["pos"] + base[frame.stream]
        exchanges[name]["pos"] = np.where(frame.has, pos, -1)
    exchanges["exchange_id"] = exchange_ids(exchanges, ids)
    return exchanges


def _seq_of_start(streams: Streams, sides: Rows, stream: Ints) -> Ints:
    segments, pieces = streams.segments, streams.pieces
    numbers = np.full(len(sides), NO_NUMBER, np.int64)
    some = np.flatnonzero(sides["piece_stop"] > sides["piece_start"])
    piece = sides["piece_start"][some]
    row = pieces["segment"][piece]
    inside = pieces["file_pos"][piece] - segments["pos"][row] - pieces["pos"][piece]
    is_syn = (segments["flags"][row] & SYN) != 0
    numbers[some] = (segments["seq"][row].astype(np.int64) + is_syn + inside) & 0xFFFFFFFF
    rows = np.flatnonzero(segments["flags"] & SYN)[::-1]  # the first one stays
    before = sides["header_size"][stream[rows]]
    numbers[stream[rows]] = (segments["seq"][rows].astype(np.int64) + 1 + before) & 0xFFFFFFFF
    return numbers
