"""A window: carried and new segments, assembled together.

See `carry` for the terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

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
    Ints,
    OpenConnection,
    Rows,
    earlier_state,
    is_resumed,
    new_rows,
    rows_of,
)
from kdissect.tcp.columns import NO_ACK, CloseReason
from kdissect.tcp.connection_ids import connection_ids, exchange_ids
from kdissect.tcp.reassembly import Streams
from kdissect.tls.plaintext import OpenedStream, TlsConnections

Bools = npt.NDArray[np.bool_]

LOOKED_AT_MAX = 256 << 10  # bytes of a connection in which nothing was recognised


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of one direction, by exchange.

    stream: its number. has: whether the exchange has a frame there. pos, end: of the frame with its
    size prefix, from the first byte of the stream here on; in plaintext if it is decrypted. after:
    STREAM, the stream from its end on.
    """

    stream: Ints
    has: Bools
    pos: Ints
    end: Ints
    after: Rows


class AssembledWindow:
    """Connections of a window; stream 2 * connection + side is a row of `sides`.

    assembly: its connections and exchanges are those of whole connections; its anomalies have
    positions and ids from the first byte here on. streams, tls: what it was made from.

    By connection: before (OPEN, its state before the window), known (protocol there), pair (of
    endpoints), is_last (of this pair), client (side), is_kafka, is_tls, is_unread_tls (it is not
    decrypted), last_time (ns), is_closed (both ways), captured (bytes here). is_stuck: it is Kafka
    over TLS whose rest cannot be decrypted, for want of secrets or after damage. is_given_up:
    besides, it was read before, or much of it is here; `Progress` adds those without a gap that
    may still be filled.

    By stream: sides (SIDE); ends, position after the last byte; seq_of_start, sequence number of
    position 0 here, or NO_NUMBER.
    By segment: stream. By exchange: of (connection), lost (its response is known to be lost),
    id_here (its id in `anomalies`), and the `frames` of requests and of responses.
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
        self.streams, self.tls, self.lost, self.sides = streams, tls, pairs.lost(), sides
        self.pair: Ints = table["pair"]
        self.is_last = np.append(self.pair[1:] != self.pair[:-1], True)[: len(self.pair)]
        self.before = _before(connections, table)
        self.client = assembly.connections["client_side"].astype(np.int64)
        self.is_kafka: Bools = assembly.connections["protocol"] == Protocol.KAFKA
        self.is_tls: Bools = assembly.connections["is_tls"] != 0
        self.known: Ints = self.before["earlier"]["protocol"]
        was_kafka = self.known == Protocol.KAFKA
        self.is_stuck = self.is_tls & (self.is_kafka | was_kafka)
        for row, opened in tls.opened.items():
            self.is_stuck[row] &= not all(stream.can_resume for stream in opened)
        self.is_unread_tls = self.is_tls.copy()
        self.is_unread_tls[list(tls.opened)] = False
        self.captured: Ints = sides["byte_count"].reshape(-1, 2).sum(axis=1)
        self.is_given_up = self.is_stuck & (was_kafka | (self.captured > LOOKED_AT_MAX))
        has_fin = (sides["fin"] != NO_ACK).reshape(-1, 2).all(axis=1)
        self.is_closed = has_fin | (table["close_reason"] == CloseReason.RST)
        self.ends: Ints = np.where(sides["has_data"] != 0, sides["high"] - sides["origin"], 0)
        self.stream = 2 * streams.connection.astype(np.int64) + streams.segments["side"]
        self.seq_of_start = _seq_of_start(streams, sides, self.stream)
        self.of = assembly.exchanges["connection"].astype(np.int64)
        self.frames = (
            _frames(assembly.exchanges, REQUEST, pairs, self.of, self.client, tls),
            _frames(assembly.exchanges, RESPONSE, pairs, self.of, self.client, tls),
        )
        restated = _connections(assembly, self.before, table)
        self.last_time: Ints = restated["last_time_ns"]
        ids = restated["connection_id"]
        exchanges = _exchanges(assembly.exchanges, self.frames, self.before, ids)
        self.id_here = assembly.exchanges["exchange_id"]
        self.assembly = replace(assembly, connections=restated, exchanges=exchanges)

    def __len__(self) -> int:
        """The number of connections."""
        return len(self.pair)

    def streams_of(self, direction: int) -> Ints:
        """int64[connections]: the stream with the requests, or with the responses."""
        return 2 * np.arange(len(self)) + (self.client ^ direction)

    def opened_streams(self) -> Iterator[tuple[int, OpenedStream]]:
        """The decrypted streams of Kafka connections that continue."""
        for row, opened in self.tls.opened.items():
            if self.is_kafka[row] and not self.is_given_up[row]:
                yield from ((2 * row + side, opened[side]) for side in (0, 1))


def _before(connections: Sequence[OpenConnection], table: Rows) -> Rows:
    """OPEN of each connection in `table` before the window."""
    is_first = table["incarnation"] == 0
    before = rows_of(connections)[table["pair"]]
    incarnation = before["incarnation"] + table["incarnation"]
    before[~is_first] = new_rows(before["endpoints"][~is_first])
    before["incarnation"] = incarnation
    return before


def _connections(assembly: Assembly, before: Rows, table: Rows) -> npt.NDArray[np.void]:
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
    connections["connection_id"] = connection_ids(
        assembly.endpoints, table["pair"], first_time, before["incarnation"]
    )
    return connections


def _frames(
    exchanges: npt.NDArray[np.void],
    way: int,
    pairs: Pairs,
    of: Ints,
    client: Ints,
    tls: TlsConnections,
) -> Frames:
    column = exchanges[SIDES[way]]
    table, row_of = ((pairs.requests, pairs.request), (pairs.responses, pairs.response))[way]
    has, pos, after = row_of >= 0, column["pos"].copy(), np.zeros(len(row_of), STREAM)
    after[has] = table["after"][row_of[has]]
    for row, opened in tls.opened.items():
        low, high = np.searchsorted(of, [row, row + 1]).tolist()
        rows = low + np.flatnonzero(has[low:high])
        if len(rows):  # sizes count plaintext, so positions must do as well
            records = opened[int(client[row]) ^ way].table
            record = records[np.searchsorted(records["tcp_pos"], pos[rows], "right") - 1]
            pos[rows] += record["pos"] - record["tcp_pos"]
    return Frames(2 * of + (client[of] ^ way), has, pos, pos + 4 + column["size"], after)


def _exchanges(
    exchanges: npt.NDArray[np.void], frames: tuple[Frames, Frames], before: Rows, ids: Ints
) -> npt.NDArray[np.void]:
    """EXCHANGE rows with positions in whole streams, and ids made from them."""
    exchanges, base = exchanges.copy(), before["base"].reshape(-1)
    for name, frame in zip(SIDES, frames, strict=True):
        pos = exchanges[name]["pos"] + base[frame.stream]
        exchanges[name]["pos"] = np.where(frame.has, pos, -1)
    asked = frames[REQUEST].has
    exchanges["exchange_id"] = exchange_ids(
        ids[exchanges["connection"]],
        np.where(asked, REQUEST, RESPONSE),
        np.where(asked, exchanges["request"]["pos"], exchanges["response"]["pos"]),
    )
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
