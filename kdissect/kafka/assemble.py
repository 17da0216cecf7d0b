"""Assemble a batch of segments into connections, exchanges, extents and anomalies.

The steps, in order: reassembly, detection, decryption of TLS, framing of requests, framing of
responses, pairing. Each step works on all connections of the batch; this module connects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kdissect.arrays import Bools, Bytes, Indices, Rows
from kdissect.capture.mapped_files import Sources
from kdissect.capture.scratch import MEMORY, Scratch, Written
from kdissect.capture.segments import FRAGMENT_PART, SegmentBatch
from kdissect.kafka import pairing
from kdissect.kafka.anomalies import found_anomalies
from kdissect.kafka.assembly import CONNECTION, EXTENT, Assembly, Protocol
from kdissect.kafka.detection import recognise
from kdissect.kafka.exchanges import NO_RESPONSE, Frames, Pairs
from kdissect.kafka.frame_tables import NO_FRAMES
from kdissect.kafka.options import StreamOptions, check_batch
from kdissect.kafka.plain_streams import PlainStreams, plain_streams
from kdissect.kafka.walk import STREAM, KafkaStreams, new_streams, new_walk
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.tcp.columns import DUPLICATE, CloseReason
from kdissect.tcp.connection_ids import connection_ids
from kdissect.tcp.measurements import TcpFacts
from kdissect.tcp.proxy_protocol import remove_headers
from kdissect.tcp.reassembly import Streams, reassemble
from kdissect.tls.alerts import first_alerts
from kdissect.tls.handshake import TlsFacts
from kdissect.tls.plaintext import TlsConnections
from kdissect.tls.session import TlsState


def _client_by_port(endpoints: Rows, hints: tuple[int, ...]) -> Bytes:
    """uint8[n]: likely client side: the one without a hinted port, else the one with the higher
    port."""
    port_a, port_b = endpoints["port_a"], endpoints["port_b"]
    a_hinted, b_hinted = np.isin(port_a, hints), np.isin(port_b, hints)
    is_b = np.where(a_hinted != b_hinted, a_hinted, port_b > port_a)
    return is_b.astype(np.uint8)


# What earlier segments have shown of a connection that continues in the batch.
EARLIER = np.dtype(
    [
        ("protocol", "u1"),  # NONE if they have not shown it; then nothing else here is known
        ("client_side", "u1"),
        # of the last response: where its end lies from the first byte here on, or NO_RESPONSE; and
        # when
        ("response_end", "<i8"),
        ("response_time", "<i8"),
        ("streams", STREAM, (2,)),  # by side
    ]
)


@dataclass(frozen=True, slots=True)
class EarlierState:
    """State of the first connection of each endpoint pair, from segments before the batch.

    connections: EARLIER[pairs]. tls: by pair, TLS state of connections that begin at a record;
    their positions count plaintext. tcp: by pair, facts of the earlier segments.
    """

    connections: Rows
    tls: dict[int, TlsState]
    tcp: TcpFacts


def assemble_streams(
    batches: list[SegmentBatch],
    sources: Sources,
    options: StreamOptions,
    key_logs: Sequence[memoryview],
    earlier: EarlierState | None = None,
    scratch: Scratch = MEMORY,
) -> tuple[Assembly, Streams, Pairs, TlsConnections]:
    """Assemble all segments of some endpoint pairs into connections, exchanges and anomalies; also
    returns the streams, pairs of frames and TLS connections that they were made from.

    The batch must hold all segments of each of its pairs; other pairs in it make no difference.
    Payload is read in place from `sources`: size prefixes, headers, overlapping segments, and where
    a frame must be searched for, everything; of TLS with secrets all records. Raises ValueError if
    the batch refers to bytes outside the sources.

    batches: a list of one batch, which is removed early. key_logs: text buffers with the secrets of
    TLS connections (`tls.key_log`). earlier: state of earlier segments, if the batch continues
    connections. scratch: for large arrays.
    """
    endpoints = batches[0].endpoints
    check_batch(batches[0])
    streams = reassemble(
        batches, sources, options.duplicate_window_ns, scratch, earlier.tcp if earlier else None
    )
    connections = streams.connections
    is_resumed = _is_resumed(connections, earlier)
    header_faults = remove_headers(streams, is_resumed)
    known = _known(streams, endpoints, options.ports)
    tls_states: dict[int, TlsState] = {}
    if earlier is not None:
        tls_states = _resume(known, connections, is_resumed, earlier)
    kafka_streams = KafkaStreams(
        streams.pieces,
        scratch.copied(streams.segments["time_ns"]),
        scratch.copied(streams.segments["source"]),
        streams.sides,
        known["streams"].reshape(-1),
        known["client_side"].copy(),
        known["protocol"].copy(),
    )
    client_side, protocol = kafka_streams.client_side, kafka_streams.protocol
    size_max = options.frame_size_max
    is_hinted = _is_hinted(endpoints, options.ports)[connections["pair"]]
    rows = np.flatnonzero(protocol == Protocol.NONE)
    recognise(kafka_streams, connections, is_hinted, rows, new_walk(REQUEST, size_max), NO_FRAMES)
    tls, is_tls = _read_tls(kafka_streams, known, streams, key_logs, tls_states, sources.carried)
    plain = plain_streams(kafka_streams, streams, tls, sources.carried)
    # decrypted connections that are not Kafka stay TLS
    rows = np.array([row for row in sorted(tls.opened) if protocol[row] != Protocol.KAFKA], int)
    before = client_side[rows], protocol[rows]
    recognise(plain.streams, connections, is_hinted, rows, new_walk(REQUEST, size_max), NO_FRAMES)
    is_other = protocol[rows] != Protocol.KAFKA
    for column, kept in zip((client_side, protocol), before, strict=True):
        column[rows[is_other]] = kept[is_other]
    written = Written(EXTENT, scratch)
    frames, pairs = _frames(streams, plain, size_max, written, scratch)
    plain_responses = _streams_of(client_side, RESPONSE)[(protocol == Protocol.KAFKA) & ~is_tls]
    for refused, alert in first_alerts(streams, _has_syn(streams), plain_responses).items():
        tls.facts[refused >> 1] = TlsFacts(response_alert=alert)
    table = _connections(endpoints, streams, client_side, protocol)
    table["is_tls"] = is_tls
    _count_bytes(table, streams, plain, frames)
    exchanges = pairs.exchanges(table["connection_id"], streams.segments, known, scratch)
    extents = written.array()
    second = (streams.mark == DUPLICATE) & ((streams.segments["marks"] & FRAGMENT_PART) == 0)
    duplicates = streams.segments["source"][second]
    assembly = Assembly(
        endpoints,
        table,
        exchanges,
        extents,
        found_anomalies(streams, table, frames, pairs, exchanges, tls, header_faults, size_max),
        np.bincount(duplicates, minlength=len(sources)).astype(np.int64),
        tls.facts,
        plain.carried,
        streams.facts,
    )
    return assembly, streams, pairs, tls


def _has_syn(streams: Streams) -> Bytes:
    """uint8[streams]: the SYN of the stream was captured."""
    return (streams.sides["has_syn"] != 0).astype(np.uint8)


def _is_hinted(endpoints: Rows, ports: tuple[int, ...]) -> Bytes:
    """uint8[endpoints]: the user named one of the ports."""
    hinted = np.isin(endpoints["port_a"], ports) | np.isin(endpoints["port_b"], ports)
    return hinted.astype(np.uint8)


def _known(streams: Streams, endpoints: Rows, ports: tuple[int, ...]) -> Rows:
    """EARLIER[connections] without earlier segments: the client side is the likely one."""
    connections = streams.connections
    known = np.zeros(len(connections), EARLIER)
    known["client_side"] = _client_by_port(endpoints, ports)[connections["pair"]]
    known["response_end"] = known["response_time"] = NO_RESPONSE
    known["streams"] = new_streams(_has_syn(streams)).reshape(-1, 2)
    return known


def _is_resumed(connections: Rows, earlier: EarlierState | None) -> Bools:
    """bool[connections]: earlier segments have shown the protocol of the connection."""
    if earlier is None:
        return np.zeros(len(connections), np.bool_)
    is_first: Bools = np.diff(connections["pair"], prepend=-1) != 0
    protocol = earlier.connections["protocol"]
    return is_first & (protocol[connections["pair"]] != Protocol.NONE)


def _resume(
    known: Rows, connections: Rows, is_resumed: Bools, earlier: EarlierState
) -> dict[int, TlsState]:
    """Set what earlier segments have shown of connections that continue; returns the TLS states of
    these."""
    rows = np.flatnonzero(is_resumed)
    pair = connections["pair"][rows]
    has_syn = known["streams"]["is_boundary"][rows]
    known[rows] = earlier.connections[pair]
    known["streams"]["is_boundary"][rows] &= has_syn
    pairs = zip(rows.tolist(), pair.tolist(), strict=True)
    return {row: earlier.tls[number] for row, number in pairs if number in earlier.tls}


def _read_tls(
    kafka: KafkaStreams,
    known: Rows,
    streams: Streams,
    key_logs: Sequence[memoryview],
    states: dict[int, TlsState],
    carried: Bytes,
) -> tuple[TlsConnections, Bools]:
    """Decrypt TLS connections; also returns bool[connections]: the connection has TLS.

    states: by connection, TLS state of earlier segments. carried: bytes that they brought along.
    """
    is_tls: Bools = kafka.protocol == Protocol.TLS
    is_tls[list(states)] = True
    tls = TlsConnections()
    if is_tls.any():
        from kdissect.tls.decrypt import read_tls  # its ciphers take a while to load

        rows = np.flatnonzero(is_tls).tolist()
        tls = read_tls(streams, _has_syn(streams), rows, key_logs, states, carried)
    for connection in states:
        if connection in tls.opened:
            opened = tls.opened[connection][1 - int(kafka.client_side[connection])]
            end = known["response_end"]
            end[connection] = opened.tcp_pos(int(end[connection]))
        else:
            kafka.protocol[connection] = Protocol.TLS
    for connection, side in tls.hello_side.items():
        if streams.connections["client_side"][connection] < 0:
            kafka.client_side[connection] = side
    return tls, is_tls


def _frames(
    streams: Streams, plain: PlainStreams, size_max: int, extents: Written, scratch: Scratch
) -> tuple[tuple[Frames, Frames], Pairs]:
    """Return the requests and the responses, and their pairs; appends the extents of both."""
    kafka, connections = plain.streams, streams.connections
    requests = Frames.of(kafka, new_walk(REQUEST, size_max), None, scratch, extents)
    plain.settle(requests)
    responses = Frames.of(kafka, new_walk(RESPONSE, size_max), requests, scratch, extents)
    plain.settle(responses)
    is_closed = connections["close_reason"] != CloseReason.CAPTURE_END
    return (requests, responses), _pairs(requests, responses, is_closed, scratch)


def _streams_of(client_side: Bytes, direction: int) -> Indices:
    """int64[connections]: the number of the stream with the requests, or with the responses."""
    streams: Indices = 2 * np.arange(len(client_side)) + (client_side ^ direction)
    return streams


def _count_bytes(
    table: Rows, streams: Streams, plain: PlainStreams, frames: tuple[Frames, Frames]
) -> None:
    """Fill the counts of framed, unframed and missing bytes of each connection."""
    sides = streams.sides
    for direction in (REQUEST, RESPONSE):
        of = _streams_of(table["client_side"], direction)
        framed = frames[direction].framed_bytes.copy()
        for row in plain.opened:
            if table["protocol"][row] == Protocol.KAFKA:
                framed[row] += plain.enclosing_bytes(streams.sides, int(of[row]))
        counts = table["direction"][:, direction]
        counts["framed_byte_count"] = framed + sides["header_size"][of]
        counts["unframed_byte_count"] = sides["byte_count"][of] - framed
        counts["missing_byte_count"] = sides["end"][of] - sides["byte_count"][of]


def _pairs(requests: Frames, responses: Frames, is_closed: Bools, scratch: Scratch) -> Pairs:
    buckets = pairing.buckets_for(requests.start, scratch)
    pairing.pair(requests, responses, is_closed.astype(np.uint8), buckets)
    room = len(requests.table) + len(responses.table)
    request, response = scratch.empty(room, np.int64), scratch.empty(room, np.int64)
    count = pairing.number_exchanges(requests, responses, request, response)
    return Pairs(requests.table, responses.table, request[:count], response[:count])


def _connections(endpoints: Rows, streams: Streams, client_side: Bytes, protocol: Bytes) -> Rows:
    connections, sides = streams.connections, streams.sides
    table = np.zeros(len(connections), CONNECTION)
    pair = connections["pair"]
    table["connection_id"] = connection_ids(endpoints, pair, connections["first_time"])
    table["first_time_ns"] = connections["first_time"]
    table["last_time_ns"] = connections["last_time"]
    table["handshake_rtt_ns"] = connections["rtt"]
    table["endpoints"] = pair
    table["client_side"] = client_side
    table["handshake_seen"] = (sides["has_syn"] != 0).reshape(-1, 2).all(axis=1)
    table["protocol"] = protocol
    table["close_reason"] = connections["close_reason"]
    rows = np.arange(len(connections))
    for direction in (REQUEST, RESPONSE):
        counts = table["direction"][:, direction]
        own = sides[2 * rows + (client_side ^ direction)]
        counts["byte_count"] = own["byte_count"] + own["header_size"]
        counts["segment_count"] = own["segment_count"]
        counts["retransmitted_segment_count"] = own["retransmitted_count"]
        counts["out_of_order_segment_count"] = own["out_of_order_count"]
        counts["duplicate_segment_count"] = own["duplicate_count"]
        counts["gap_count"] = own["gap_count"]
    return table
