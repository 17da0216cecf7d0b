"""Assemble a batch of segments into connections, exchanges, extents and anomalies.

The steps, in order: reassembly, detection, decryption of TLS, framing of requests, framing of
responses, pairing. Each step works on all connections of the batch; this module connects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kdissect.arrays import Bools, Bytes, Rows
from kdissect.capture.mapped_files import Sources
from kdissect.capture.scratch import MEMORY, Scratch, Written
from kdissect.capture.segments import FRAGMENT_PART, SegmentBatch
from kdissect.kafka import framing, pairing
from kdissect.kafka.anomalies import found_anomalies
from kdissect.kafka.assembly import CONNECTION, EXTENT, Assembly, Protocol
from kdissect.kafka.detection import recognise
from kdissect.kafka.exchanges import NO_RESPONSE, Frames, Ints, Pairs
from kdissect.kafka.frame_search import API_KEYS, API_VERSIONS, Kafka
from kdissect.kafka.framing import STREAM, new_streams
from kdissect.kafka.options import StreamOptions, check_batch
from kdissect.kafka.plain_streams import PlainStreams, plain_streams
from kdissect.protocol import catalog
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

DRAFTS = 2  # versions above the newest defined one that clients already send


@cache
def known_apis() -> Bytes:
    """uint8[API_KEYS * API_VERSIONS]: 1 for each api key and version that a request may have."""
    table = np.zeros((API_KEYS, API_VERSIONS), np.uint8)
    for key, api in catalog.apis().items():
        versions = api.request.versions
        if 0 <= key < API_KEYS and not versions.is_empty:
            table[key, max(0, versions.first) : min(versions.last + DRAFTS + 1, API_VERSIONS)] = 1
    return table.reshape(-1)


def _client_by_port(endpoints: Any, hints: tuple[int, ...]) -> Bytes:
    """uint8[n]: likely client side: the one without a hinted port, else the one with the higher
    port."""
    port_a, port_b = endpoints["port_a"], endpoints["port_b"]
    a_hinted, b_hinted = np.isin(port_a, hints), np.isin(port_b, hints)
    is_b = np.where(a_hinted != b_hinted, a_hinted, port_b > port_a)
    return is_b.astype(np.uint8)


# What earlier segments have shown of a connection that continues in the batch.
EARLIER = np.dtype([
    ("protocol", "u1"),  # NONE if they have not shown it; then nothing else here is known
    ("client_side", "u1"),
    ("has_loss", "u1"),  # whether bytes of responses are missing
    # of the last response: where its end lies from the first byte here on, or NO_RESPONSE; and when
    ("response_end", "<i8"),
    ("response_time", "<i8"),
    ("streams", STREAM, (2,)),  # by side
])  # fmt: skip


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
    key_logs: Sequence[Any],
    earlier: EarlierState | None = None,
    scratch: Scratch = MEMORY,
) -> tuple[Assembly, Streams, Pairs, TlsConnections]:
    """Assemble all segments of some endpoint pairs into connections, exchanges and anomalies; also
    returns the streams, pairs of frames and TLS connections that they were made from.

    The batch must hold all segments of each of its pairs; other pairs in it make no difference. Of
    the payload, only size prefixes, headers, searched ranges and overlapping segments are read, in
    place from `sources`. Raises ValueError if the batch refers to bytes outside the sources.

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
    kafka = Kafka(known_apis(), np.array([options.frame_size_max], np.int64))

    detection = _start_detection(streams, endpoints, options.ports)
    if earlier is not None:
        _resume(detection, connections, is_resumed, earlier)
    client_side, protocol = detection.client_side, detection.protocol
    times = scratch.copied(streams.segments["time_ns"])
    rows = np.flatnonzero(protocol == Protocol.NONE)
    client_side[rows], protocol[rows] = detection.recognised(streams, times, kafka, rows)
    tls, is_tls = _read_tls(detection, streams, connections, key_logs)
    plain = plain_streams(streams, times, tls, sources.carried, scratch)
    # decrypted connections that are not Kafka stay TLS
    rows = np.array([row for row in sorted(tls.opened) if protocol[row] != Protocol.KAFKA], int)
    side, found = detection.recognised(plain, plain.times, kafka, rows)
    is_kafka = found == Protocol.KAFKA
    client_side[rows[is_kafka]], protocol[rows[is_kafka]] = side[is_kafka], Protocol.KAFKA
    written = Written(EXTENT, scratch)
    frames, pairs = _frames(streams, plain, detection, kafka, written, scratch)
    plain_responses = _streams_of(client_side, RESPONSE)[(protocol == Protocol.KAFKA) & ~is_tls]
    for refused, alert in first_alerts(streams, detection.has_syn, plain_responses).items():
        tls.facts[refused >> 1] = TlsFacts(response_alert=alert)
    table = _connections(endpoints, streams, client_side, protocol)
    table["is_tls"] = is_tls
    _count_bytes(table, streams, plain, frames)
    exchanges = pairs.exchanges(
        table["connection_id"], streams.segments, detection.last_response, scratch
    )
    extents = written.array()
    second = (streams.mark == DUPLICATE) & ((streams.segments["ip_id"] & FRAGMENT_PART) == 0)
    duplicates = streams.segments["source"][second]
    assembly = Assembly(
        endpoints,
        table,
        exchanges,
        extents,
        found_anomalies(
            streams, table, frames, pairs, exchanges, tls, header_faults, options.frame_size_max
        ),
        np.bincount(duplicates, minlength=len(sources)).astype(np.int64),
        tls.facts,
        plain.carried,
        streams.facts,
    )
    return assembly, streams, pairs, tls


@dataclass(frozen=True, slots=True)
class _Detection:
    """Arrays of each connection that detection starts from and fills.

    client_side, protocol: uint8. is_likely: uint8, 1 for connections with a hinted port. has_syn:
    uint8[streams]. origin: STREAM[streams]. had_loss: bool. last_response: int64[connections, 2],
    EARLIER's response_end and response_time. tls: by connection, TLS state of earlier segments.
    connections: CONNECTION of `tcp.columns`.
    """

    connections: Rows
    client_side: Bytes
    protocol: Bytes
    is_likely: Bytes
    has_syn: Bytes
    origin: Rows
    had_loss: Bools
    last_response: Ints
    tls: dict[int, TlsState]

    def recognised(
        self, streams: Streams | PlainStreams, times: Ints, kafka: Kafka, rows: Ints
    ) -> tuple[Bytes, Bytes]:
        """(client sides, protocols) of the connections `rows`. times: of the segments."""
        side, protocol = recognise(
            streams.pieces, times, streams.sides, self.connections, self.has_syn, self.is_likely,
            kafka, rows, self.client_side,
        )  # fmt: skip
        return side, protocol


def _start_detection(streams: Streams, endpoints: Any, ports: tuple[int, ...]) -> _Detection:
    """Return the state before detection, without earlier segments."""
    pair = streams.connections["pair"]
    has_syn = (streams.sides["has_syn"] != 0).astype(np.uint8)
    hinted = np.isin(endpoints["port_a"], ports) | np.isin(endpoints["port_b"], ports)
    return _Detection(
        connections=streams.connections,
        client_side=_client_by_port(endpoints, ports)[pair],
        protocol=np.zeros(len(pair), np.uint8),
        is_likely=hinted.astype(np.uint8)[pair],
        has_syn=has_syn,
        origin=new_streams(has_syn),
        had_loss=np.zeros(len(pair), np.bool_),
        last_response=np.full((len(pair), 2), NO_RESPONSE, np.int64),
        tls={},
    )


def _is_resumed(connections: Any, earlier: EarlierState | None) -> Bools:
    """bool[connections]: earlier segments have shown the protocol of the connection."""
    if earlier is None:
        return np.zeros(len(connections), np.bool_)
    is_first: Bools = connections["incarnation"] == 0
    protocol = earlier.connections["protocol"]
    return is_first & (protocol[connections["pair"]] != Protocol.NONE)


def _resume(
    detection: _Detection, connections: Any, is_resumed: Any, earlier: EarlierState
) -> None:
    """Set the state of earlier segments for connections that continue."""
    rows = np.flatnonzero(is_resumed)
    pair = connections["pair"][rows]
    known = earlier.connections[pair]
    for side in (0, 1):
        stream = 2 * rows + side
        detection.origin[stream] = known["streams"][:, side]
        detection.origin["is_boundary"][stream] &= detection.has_syn[stream]
    detection.had_loss[rows] = known["has_loss"] != 0
    detection.last_response[rows, 0] = known["response_end"]
    detection.last_response[rows, 1] = known["response_time"]
    detection.protocol[rows] = known["protocol"]
    detection.client_side[rows] = known["client_side"]
    for row, number in zip(rows.tolist(), pair.tolist(), strict=True):
        if number in earlier.tls:
            detection.tls[row] = earlier.tls[number]


def _read_tls(
    detection: _Detection, streams: Streams, connections: Any, key_logs: Sequence[Any]
) -> tuple[TlsConnections, Bools]:
    """Decrypt TLS connections; also returns bool[connections]: the connection has TLS."""
    protocol, client_side = detection.protocol, detection.client_side
    is_tls: Bools = protocol == Protocol.TLS
    is_tls[list(detection.tls)] = True
    tls = TlsConnections()
    if is_tls.any():
        from kdissect.tls.decrypt import read_tls  # its ciphers take a while to load

        rows = np.flatnonzero(is_tls).tolist()
        tls = read_tls(streams, detection.has_syn, rows, key_logs, detection.tls)
    for connection in detection.tls:
        if connection in tls.opened:
            opened = tls.opened[connection][1 - int(client_side[connection])]
            last = detection.last_response
            last[connection, 0] = opened.tcp_pos(int(last[connection, 0]))
        else:
            protocol[connection] = Protocol.TLS
    for connection, side in tls.hello_side.items():
        if connections["client_side"][connection] < 0:
            client_side[connection] = side
    return tls, is_tls


def _frames(
    streams: Streams,
    plain: PlainStreams,
    detection: _Detection,
    kafka: Kafka,
    extents: Written,
    scratch: Scratch,
) -> tuple[tuple[Frames, Frames], Pairs]:
    """Return the requests and the responses, and their pairs; appends the extents of both."""
    client_side, protocol = detection.client_side, detection.protocol
    connections = streams.connections
    kafka_streams = framing.KafkaStreams(
        plain.pieces, plain.source, plain.times, plain.sides, client_side, protocol,
        detection.origin,
    )  # fmt: skip

    def walk_requests(state: framing.WalkState, most: int) -> Any:
        return framing.some_requests(kafka_streams, kafka, state, most)

    requests = Frames.of(walk_requests, len(connections), scratch, extents)
    requests = plain.settled(requests, streams, REQUEST, client_side, protocol)
    of_responses = _streams_of(client_side, RESPONSE)

    def walk_responses(state: framing.WalkState, most: int) -> Any:
        found = framing.some_responses(
            kafka_streams, kafka, requests.table, requests.start, state, most
        )
        if state.walk["request"][0] != framing.NO_REQUEST:
            from kdissect.kafka.response_bodies import refuse_other_bytes  # it loads the decoder

            stream = framing.bounds_of(plain.pieces, plain.sides, of_responses[state.connection])
            refuse_other_bytes(state, plain.pieces, stream, requests.table)
        return found

    responses = Frames.of(walk_responses, len(connections), scratch, extents)
    responses = plain.settled(responses, streams, RESPONSE, client_side, protocol)
    pairs = _pairs(
        requests, responses,
        connections["close_reason"] != CloseReason.CAPTURE_END,
        (_missing(streams)[of_responses] > 0) | detection.had_loss, scratch,
    )  # fmt: skip
    return (requests, responses), pairs


def _streams_of(client_side: Bytes, direction: int) -> Ints:
    """int64[connections]: the number of the stream with the requests, or with the responses."""
    return 2 * np.arange(len(client_side)) + (client_side ^ direction)


def _missing(streams: Streams) -> Ints:
    """int64[streams]: the count of bytes that the capture lacks."""
    return streams.sides["end"] - streams.sides["byte_count"]


def _count_bytes(
    table: Rows, streams: Streams, plain: PlainStreams, frames: tuple[Frames, Frames]
) -> None:
    """Fill the counts of framed, unframed and missing bytes of each connection."""
    sides, missing = streams.sides, _missing(streams)
    for direction in (REQUEST, RESPONSE):
        of = _streams_of(table["client_side"], direction)
        framed = frames[direction].framed_bytes.copy()
        for row in plain.opened:
            if table["protocol"][row] == Protocol.KAFKA:
                framed[row] += plain.enclosing_bytes(streams.sides, int(of[row]))
        counts = table["direction"][:, direction]
        counts["framed_byte_count"] = framed + sides["header_size"][of]
        counts["unframed_byte_count"] = sides["byte_count"][of] - framed
        counts["missing_byte_count"] = missing[of]


def _pairs(
    requests: Frames, responses: Frames, is_closed: Any, has_loss: Any, scratch: Scratch
) -> Pairs:
    rows = requests.table, requests.start, responses.table, responses.start
    pairing.pair(
        *rows, is_closed.astype(np.uint8), has_loss.astype(np.uint8),
        pairing.buckets_for(requests.start, scratch),
    )  # fmt: skip
    room = len(requests.table) + len(responses.table)
    request, response = scratch.empty(room, np.int64), scratch.empty(room, np.int64)
    count = pairing.in_order(*rows, request, response)
    return Pairs(requests.table, responses.table, request[:count], response[:count])


def _connections(
    endpoints: Rows,
    streams: Streams,
    client_side: Bytes,
    protocol: Bytes,
) -> Rows:
    connections, sides = streams.connections, streams.sides
    table = np.zeros(len(connections), CONNECTION)
    pair = connections["pair"]
    table["connection_id"] = connection_ids(
        endpoints, pair, connections["first_time"], connections["incarnation"]
    )
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
