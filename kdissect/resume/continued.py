"""Carried and new segments, assembled together, with the ids and counts of whole connections."""

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
from kdissect.kafka.options import StreamOptions
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.resume.open_connection import (
    NO_NUMBER,
    Ints,
    OpenConnection,
    Phase,
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
    size prefix, from the first byte of the stream here on; in plaintext if it is decrypted.
    """

    stream: Ints
    has: Bools
    pos: Ints
    end: Ints


@dataclass(frozen=True, slots=True)
class Continued:
    """Connections of a window; stream 2 * connection + side is a row of `sides`.

    assembly: its ids, counts and positions are those of whole connections.
    By connection: before (OPEN, its state before the window), pair (of endpoints), is_first and
    is_last (of this pair), client (side), is_kafka, is_tls, is_unread_tls (it is not decrypted),
    last_time (ns), is_closed (both ways). is_stuck: it is Kafka over TLS whose rest cannot be
    decrypted, for want of secrets or after damage. is_given_up: besides, it was read before, or
    much of it is here.
    By stream: sides (SIDE); ends, position after the last byte; seq_of_start, sequence
    number of position 0 here, or NO_NUMBER.
    By segment: stream. By exchange: of (connection), lost (its response is known to be lost), and
    the `frames` of requests and of responses.
    """

    assembly: Assembly
    streams: Streams
    tls: TlsConnections
    before: Rows
    pair: Ints
    is_first: Bools
    is_last: Bools
    client: Ints
    is_kafka: Bools
    is_tls: Bools
    is_unread_tls: Bools
    is_stuck: Bools
    is_given_up: Bools
    last_time: Ints
    is_closed: Bools
    sides: Rows
    ends: Ints
    seq_of_start: Ints
    stream: Ints
    of: Ints
    lost: Bools
    frames: tuple[Frames, Frames]

    def __len__(self) -> int:
        """The number of connections."""
        return len(self.pair)

    @property
    def first_time(self) -> Ints:
        """int64[connections]: time of the first packet of the whole connection, in ns."""
        times: Ints = self.assembly.connections["first_time_ns"]
        return times

    def streams_of(self, direction: int) -> Ints:
        """int64[connections]: the stream with the requests, or with the responses."""
        return 2 * np.arange(len(self)) + (self.client ^ direction)

    def opened_streams(self) -> Iterator[tuple[int, OpenedStream]]:
        """The decrypted streams of Kafka connections that continue."""
        for row, opened in self.tls.opened.items():
            if self.is_kafka[row] and not self.is_given_up[row]:
                yield from ((2 * row + side, opened[side]) for side in (0, 1))


def continued(
    connections: Sequence[OpenConnection],
    batch: SegmentBatch,
    sources: Sources,
    options: StreamOptions,
    key_logs: Sequence[Any],
) -> Continued:
    """Assemble the segments of a batch; connection n continues its pair of endpoints n."""
    assembly, streams, lost, tls = assemble_streams(
        batch, sources, options, key_logs, earlier_state(connections)
    )
    table, sides = streams.connections, streams.sides
    pair, is_first = table["pair"], table["incarnation"] == 0
    before = rows_of(connections)[pair]
    incarnation = before["incarnation"] + table["incarnation"]
    before[~is_first] = new_rows(before["endpoints"][~is_first])
    before["incarnation"] = incarnation
    client = assembly.connections["client_side"].astype(np.int64)
    is_kafka = assembly.connections["protocol"] == Protocol.KAFKA
    is_tls = assembly.connections["is_tls"] != 0
    was_kafka = before["phase"] == Phase.KAFKA
    is_stuck = is_tls & (is_kafka | was_kafka)
    for row, opened in tls.opened.items():
        is_stuck[row] &= not all(stream.can_resume for stream in opened)
    is_unread_tls = is_tls.copy()
    is_unread_tls[list(tls.opened)] = False
    captured = sides["byte_count"].reshape(-1, 2).sum(axis=1)
    has_fin = (sides["fin"] != NO_ACK).reshape(-1, 2).all(axis=1)
    stream = 2 * streams.connection.astype(np.int64) + streams.segments["side"]
    of = assembly.exchanges["connection"].astype(np.int64)
    restated = _connections(assembly, before, table)
    frames = (
        _frames(assembly.exchanges, REQUEST, of, client, tls),
        _frames(assembly.exchanges, RESPONSE, of, client, tls),
    )
    exchanges = _exchanges(assembly.exchanges, frames, before, restated["connection_id"])
    anomalies = _anomalies(assembly, exchanges["exchange_id"], before, client)
    return Continued(
        replace(assembly, connections=restated, exchanges=exchanges, anomalies=anomalies),
        streams,
        tls,
        before,
        pair,
        is_first,
        is_last=np.append(pair[1:] != pair[:-1], True)[: len(pair)],
        client=client,
        is_kafka=is_kafka,
        is_tls=is_tls,
        is_unread_tls=is_unread_tls,
        is_stuck=is_stuck,
        is_given_up=is_stuck & (was_kafka | (captured > LOOKED_AT_MAX)),
        last_time=restated["last_time_ns"],
        is_closed=has_fin | (table["close_reason"] == CloseReason.RST),
        sides=sides,
        ends=np.where(sides["has_data"] != 0, sides["high"] - sides["origin"], 0),
        seq_of_start=_seq_of_start(streams, sides, stream),
        stream=stream,
        of=of,
        lost=lost,
        frames=frames,
    )


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
    exchanges: npt.NDArray[np.void], way: int, of: Ints, client: Ints, tls: TlsConnections
) -> Frames:
    column = exchanges[SIDES[way]]
    has, pos = column["size"] >= 0, column["pos"].copy()
    for row, opened in tls.opened.items():
        low, high = np.searchsorted(of, [row, row + 1]).tolist()
        rows = low + np.flatnonzero(has[low:high])
        if len(rows):  # sizes count plaintext, so positions must do as well
            records = opened[int(client[row]) ^ way].table
            record = records[np.searchsorted(records["tcp_pos"], pos[rows], "right") - 1]
            pos[rows] += record["pos"] - record["tcp_pos"]
    return Frames(2 * of + (client[of] ^ way), has, pos, pos + 4 + column["size"])


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


def _anomalies(
    assembly: Assembly, exchange_ids: Ints, before: Rows, client: Ints
) -> npt.NDArray[np.void]:
    """ANOMALY rows with the new ids of exchanges, and positions in whole streams."""
    anomalies = assembly.anomalies.copy()
    rows, exchange = exchanges_of(anomalies, assembly.exchanges["exchange_id"])
    anomalies["exchange_id"][rows] = exchange_ids[exchange]
    stream, has_place = places_of(anomalies, client)
    anomalies["pos"] += np.where(has_place, before["base"].reshape(-1)[stream], 0)
    return anomalies


def exchanges_of(anomalies: npt.NDArray[np.void], ids: Ints) -> tuple[Ints, Ints]:
    """(rows of the anomalies of an exchange, rows of these exchanges in `ids`)."""
    rows = np.flatnonzero(anomalies["exchange_id"] != 0)
    order = np.argsort(ids)
    return rows, order[np.searchsorted(ids[order], anomalies["exchange_id"][rows])]


def places_of(anomalies: npt.NDArray[np.void], client: Ints) -> tuple[Ints, Bools]:
    """(stream of each anomaly; whether it has a position in it)."""
    of, direction = anomalies["connection"].astype(np.int64), anomalies["direction"]
    has_place = (direction <= RESPONSE) & (anomalies["pos"] >= 0)
    return 2 * of + (client[of] ^ (direction.astype(np.int64) & 1)), has_place


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
