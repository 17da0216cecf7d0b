"""A batch of segments to connections, exchanges, extents and anomalies: the steps in order.

reassembly -> recognise -> framing of requests -> framing of responses -> pairing. The steps are
kernels over all connections of the batch; what is here only joins their columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.accelerate import kernel
from kdissect.capture.index import ACK, FRAGMENT_PART, SYN, SegmentBatch
from kdissect.protocol import catalog
from kdissect.stream import framing, pairing
from kdissect.stream.bounds import bounded
from kdissect.stream.columns import (
    BYTE_COUNT,
    CLIENT_SIDE,
    CLOSE_REASON,
    CONFLICT_WIDTH,
    CONNECTION_WIDTH,
    DUPLICATE,
    DUPLICATE_COUNT,
    END,
    FIRST_TIME,
    GAP_COUNT,
    HAS_SYN,
    INCARNATION,
    LAST_TIME,
    OUT_OF_ORDER_COUNT,
    PAIR,
    PIECE_START,
    PIECE_STOP,
    RETRANSMITTED_COUNT,
    RTT,
    SEGMENT_COUNT,
    SIDE_WIDTH,
)
from kdissect.stream.evidence import API_VERSIONS, KEYS, Asked, Kafka
from kdissect.stream.framing import EXTENT_WIDTH, FAULT_WIDTH, FRAME_WIDTH
from kdissect.stream.ids import connection_ids, exchange_ids
from kdissect.stream.index import (
    ANOMALY,
    CARRIED,
    CONNECTION,
    EXCHANGE,
    EXTENT,
    INFO,
    NO_API,
    NO_DIRECTION,
    REQUEST,
    RESPONSE,
    WARNING,
    Anomaly,
    Assembly,
    Carried,
    CloseReason,
    PairStatus,
    Protocol,
)  # fmt: skip
from kdissect.stream.options import MappedSources, StreamOptions, check_batch
from kdissect.stream.pairing import OUT_OF_ORDER, SECOND, UNASKED
from kdissect.stream.pieces import Pieces
from kdissect.stream.reassembly import Streams, reassemble
from kdissect.stream.recognise import recognise
from kdissect.stream.tls_pieces import (
    PlainStreams,
    Tls,
    account,
    faults_of,
    plain_streams,
    recognise_plain,
)

Ints = npt.NDArray[np.int64]

_REQUEST_MISSING = int(PairStatus.REQUEST_MISSING)
NO_PIECES = Pieces(*(np.zeros(0, kind) for kind in ("i8", "i8", "u8", "i8", "i8")))
DRAFTS = 2  # versions above the newest known one that clients already ask for


@cache
def known_apis() -> npt.NDArray[np.uint8]:
    """uint8[KEYS * API_VERSIONS]: 1 for each api key and version a request may have."""
    table = np.zeros((KEYS, API_VERSIONS), np.uint8)
    for key, api in catalog.apis().items():
        versions = api.request.versions
        if 0 <= key < KEYS and not versions.is_empty:
            table[key, max(0, versions.first) : min(versions.last + DRAFTS + 1, API_VERSIONS)] = 1
    return table.reshape(-1)


@dataclass(frozen=True, slots=True)
class _Frames:
    """The frames of one direction: table int64[n, FRAME_WIDTH], faults, extents, first row."""

    table: Ints
    extents: Ints
    faults: Ints
    start: Ints  # of each connection, and the end

    @staticmethod
    def of(found: Any, connection_count: int) -> _Frames:
        frames, extents, faults, used = found
        table = frames[: used[0] * FRAME_WIDTH].reshape(-1, FRAME_WIDTH)
        start = np.searchsorted(
            np.ascontiguousarray(table[:, framing.CONNECTION]), np.arange(connection_count + 1)
        )
        return _Frames(
            table,
            extents[: used[1] * EXTENT_WIDTH].reshape(-1, EXTENT_WIDTH),
            faults[: used[2] * FAULT_WIDTH].reshape(-1, FAULT_WIDTH),
            start.astype(np.int64),
        )

    def settled(
        self,
        plain: PlainStreams,
        streams: Streams,
        direction: int,
        client_side: npt.NDArray[np.uint8],
        protocol: npt.NDArray[np.uint8],
    ) -> _Frames:
        """With what was found in decrypted streams told of packets and the TCP stream."""
        plain.settle(self.table, self.faults)
        faults = faults_of(plain, streams, direction, client_side, protocol, self.faults)
        return _Frames(self.table, self.extents, faults, self.start)

    def behind_hole(self, has_origin: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
        """By frame: bytes directly before it are in no frame, or no one knows. has_origin: by
        connection, whether position 0 is known to be where the stream began."""
        pos = self.table[:, framing.POS]
        end = pos + 4 + self.table[:, framing.FRAME_SIZE]
        before = np.empty(len(pos), np.int64)
        before[1:] = end[:-1]
        some = np.flatnonzero(self.start[:-1] < self.start[1:])
        before[self.start[some]] = np.where(has_origin[some], 0, -1)
        return (pos != before).astype(np.uint8)

    def column(self, number: int) -> Ints:
        return np.ascontiguousarray(self.table[:, number])

    def is_whole(self) -> npt.NDArray[np.bool_]:
        return self.table[:, framing.CAPTURED] == self.table[:, framing.FRAME_SIZE] + 4


def _client_by_port(endpoints: Any, hints: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """uint8[n]: the side that does not have a hinted port, else the one with the higher port."""
    port_a, port_b = endpoints["port_a"], endpoints["port_b"]
    a_hinted, b_hinted = np.isin(port_a, hints), np.isin(port_b, hints)
    is_b = np.where(a_hinted != b_hinted, a_hinted, port_b > port_a)
    return is_b.astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the first connection of each endpoint pair from segments before the batch.

    has_origin: int64[2 * pairs], by pair and side, bits of `framing` for streams that begin with a
    SYN here. is_kafka, client_side: uint8[pairs]; the latter counts where is_kafka is 1.
    done_pair, done_pos int64: requests of the batch that were answered before it, by pair and
    position.
    """

    has_origin: Ints
    is_kafka: npt.NDArray[np.uint8]
    client_side: npt.NDArray[np.uint8]
    done_pair: Ints
    done_pos: Ints


def _is_done(requests: _Frames, connections: Any, known: Known | None) -> npt.NDArray[np.uint8]:
    """By request: whether a response before the batch answered it."""
    done = np.zeros(len(requests.table), np.uint8)
    if known is None or not len(known.done_pos):
        return done
    row_of = np.full(int(known.done_pair.max()) + 1, -1, np.int64)
    first = np.flatnonzero(connections[:, INCARNATION] == 0)
    first = first[connections[first, PAIR] < len(row_of)]
    row_of[connections[first, PAIR]] = first
    here = np.stack([requests.table[:, framing.CONNECTION], requests.table[:, framing.POS]], 1)
    there = np.stack([row_of[known.done_pair], known.done_pos], 1)
    both = np.concatenate([here, there])
    _, number = np.unique(both, axis=0, return_inverse=True)
    number = number.reshape(-1)
    done[np.isin(number[: len(here)], number[len(here) :])] = 1
    return done


def _acknowledged(responses: _Frames, streams: Streams, of_requests: Ints) -> Ints:
    """By response: the position in the request stream, modulo 2^32, that its segment tells to have
    come, or NO_ACK. of_requests: by connection, that stream."""
    segments, pieces = streams.segments, streams.pieces
    sides = streams.sides.reshape(-1, SIDE_WIDTH)[of_requests]
    piece = sides[:, PIECE_START]
    has_bytes = sides[:, PIECE_STOP] > piece
    piece = piece[has_bytes]
    first = pieces.segment[piece]
    inside = pieces.file_pos[piece] - segments["pos"][first] - pieces.pos[piece]
    is_syn = segments["flags"][first] & SYN != 0
    origin = np.zeros(len(sides), np.int64)  # sequence number of position 0
    origin[has_bytes] = segments["seq"][first].astype(np.int64) + is_syn + inside
    segment = responses.table[:, framing.FIRST]
    connection = responses.table[:, framing.CONNECTION]
    ack = segments["ack"][segment].astype(np.int64)
    has_ack = (segments["flags"][segment] & ACK != 0) & has_bytes[connection]
    has_ack &= segments["ip_id"][segment] & FRAGMENT_PART == 0
    return np.where(has_ack, (ack - origin[connection]) & 0xFFFFFFFF, pairing.NO_ACK)


def _recognise_others(
    streams: Streams, has_origin: Any, likely: Any, kafka: Kafka, nobody: Asked, client_side: Any,
    protocol: Any,
) -> None:  # fmt: skip
    """Recognise the connections of which nothing is known."""
    rows = np.flatnonzero(protocol == Protocol.NONE)
    both = np.stack([2 * rows, 2 * rows + 1], 1).reshape(-1)
    side, found = client_side[rows], protocol[rows]
    recognise(
        streams.pieces, np.ascontiguousarray(streams.segments["time_ns"]),
        streams.sides.reshape(-1, SIDE_WIDTH)[both].reshape(-1),
        streams.connections.reshape(-1, CONNECTION_WIDTH)[rows].reshape(-1),
        has_origin[both], likely[rows], kafka, nobody, side, found,
    )  # fmt: skip
    client_side[rows], protocol[rows] = side, found


def assemble(
    batch: SegmentBatch,
    sources: MappedSources,
    options: StreamOptions | None = None,
    key_logs: Sequence[Any] = (),
) -> Assembly:
    """Connections, exchanges and anomalies of all segments of some endpoint pairs.

    The batch must hold all segments of each of its pairs; what other pairs it holds changes
    nothing. Payload is read where `sources` has it, only size prefixes and headers, and what a
    search or the comparison of overlapping segments needs. key_logs: buffers of text with the
    secrets of TLS connections (`tls_keys`). Raises ValueError when the batch points outside of the
    sources.
    """
    options = options or StreamOptions()
    return assemble_streams(batch, sources, options, key_logs, keep_pieces=False)[0]


def assemble_streams(
    batch: SegmentBatch,
    sources: MappedSources,
    options: StreamOptions,
    key_logs: Sequence[Any] = (),
    known: Known | None = None,
    *,
    keep_pieces: bool = True,
) -> tuple[Assembly, Streams, npt.NDArray[np.bool_]]:
    """`assemble`, the streams behind it, and by exchange whether its answer is known to be lost;
    `known` where a batch goes on with connections.

    keep_pieces: false leaves the streams without pieces, and memory for what comes behind them.
    """
    check_batch(batch, sources)
    streams = reassemble(batch, sources, options.duplicate_window_ns)
    endpoints = batch.endpoints
    del batch  # as large as `streams.segments`, unless it is the same
    connections = streams.connections.reshape(-1, CONNECTION_WIDTH)
    sides = streams.sides.reshape(-1, SIDE_WIDTH)
    pair = connections[:, PAIR]
    has_origin = np.ascontiguousarray(sides[:, HAS_SYN] != 0).astype(np.uint8)
    kafka = Kafka(known_apis(), np.array([options.frame_size_max], np.int64))

    client_side = _client_by_port(endpoints, options.ports)[pair]
    protocol = np.zeros(len(connections), np.uint8)
    hinted = np.isin(endpoints["port_a"], options.ports)
    hinted |= np.isin(endpoints["port_b"], options.ports)
    nobody = Asked(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    likely = hinted.astype(np.uint8)[pair]
    origin = has_origin.astype(np.int64)
    if known is not None:
        first = np.flatnonzero(connections[:, INCARNATION] == 0)
        for side in (0, 1):
            stream = 2 * first + side
            origin[stream] |= np.where(
                has_origin[stream], known.has_origin[2 * pair[first] + side], 0
            )
        first = first[known.is_kafka[pair[first]] != 0]
        protocol[first] = Protocol.KAFKA
        client_side[first] = known.client_side[pair[first]]
    _recognise_others(streams, has_origin, likely, kafka, nobody, client_side, protocol)
    is_tls = protocol == Protocol.TLS
    tls = Tls()
    if is_tls.any():
        from kdissect.stream.tls import read_tls  # its ciphers take a while to load

        tls = read_tls(streams, has_origin, np.flatnonzero(is_tls).tolist(), key_logs)
    for connection, side in tls.hello_side.items():
        if connections[connection, CLIENT_SIDE] < 0:
            client_side[connection] = side
    plain = plain_streams(streams, tls, len(sources.sizes))
    recognise_plain(
        plain, streams.connections, has_origin, likely, kafka, nobody, client_side, protocol
    )
    times, source = plain.times, plain.source

    requests = _Frames.of(
        framing.frame_requests(
            plain.pieces, source, plain.sides, client_side, protocol, origin, kafka
        ),
        len(connections),
    ).settled(plain, streams, REQUEST, client_side, protocol)
    asked = Asked(
        requests.column(framing.ID),
        times[requests.column(framing.FIRST)],
        requests.column(framing.KIND),
    )
    responses = _Frames.of(
        framing.frame_responses(
            plain.pieces, source, times, plain.sides, client_side, protocol, origin, kafka,
            asked, requests.start,
        ),
        len(connections),
    )  # fmt: skip
    rows = np.arange(len(connections))
    of_requests, of_responses = 2 * rows + client_side, 2 * rows + 1 - client_side
    behind_hole = responses.behind_hole(origin[of_responses] != 0)
    responses = responses.settled(plain, streams, RESPONSE, client_side, protocol)

    missing = sides[:, END] - sides[:, BYTE_COUNT]
    answer_of = np.empty(len(requests.table), np.int64)
    is_lost = np.empty(len(requests.table), np.uint8)
    status = np.empty(len(requests.table), np.uint8)
    request_of = np.empty(len(responses.table), np.int64)
    came = np.empty(len(responses.table), np.uint8)
    pairing.pair(
        asked, requests.column(framing.POS) + 4 + requests.column(framing.FRAME_SIZE),
        requests.start, _is_done(requests, connections, known), responses.column(framing.ID),
        responses.column(framing.KIND), times[responses.column(framing.FIRST)],
        _acknowledged(responses, streams, of_requests), behind_hole,
        responses.start, (connections[:, CLOSE_REASON] != CloseReason.CAPTURE_END).astype(np.uint8),
        (missing[of_responses] > 0).astype(np.uint8), answer_of, request_of, status, came, is_lost,
    )  # fmt: skip

    table = _connections(endpoints, streams, client_side, protocol)
    table["is_tls"] = is_tls
    for direction, of, frames in (
        (REQUEST, of_requests, requests),
        (RESPONSE, of_responses, responses),
    ):
        captured = frames.table[:, framing.CAPTURED]  # as a double too: no stream has 2^53 bytes
        framed = np.bincount(frames.table[:, framing.CONNECTION], captured, len(connections))
        framed = framed.astype(np.int64)
        counts = table["direction"][:, direction]
        counts["framed_byte_count"] = framed
        counts["unframed_byte_count"] = sides[of, BYTE_COUNT] - framed
        counts["missing_byte_count"] = missing[of]
        for row in plain.opened:
            if protocol[row] == Protocol.KAFKA:
                counts["framed_byte_count"][row], counts["unframed_byte_count"][row] = account(
                    plain, streams.sides, int(of[row]), int(framed[row])
                )

    carried = plain.carried
    del plain, times, source
    if not keep_pieces:
        streams = replace(streams, pieces=NO_PIECES)
    exchanges, of_request, of_response = _exchanges(
        streams.segments, table["connection_id"], requests, responses, answer_of, request_of, status
    )
    extents = _extents(requests.extents, responses.extents, carried)
    anomalies = _anomalies(
        streams, protocol, client_side, requests, responses, exchanges, of_request, of_response,
        request_of, came, tls,
    )  # fmt: skip
    anomalies = bounded(anomalies, options)
    second = (streams.mark == DUPLICATE) & ((streams.segments["ip_id"] & FRAGMENT_PART) == 0)
    duplicates = streams.segments["source"][second]
    assembly = Assembly(
        endpoints,
        table,
        exchanges,
        extents,
        anomalies,
        np.bincount(duplicates, minlength=len(sources.sizes)).astype(np.int64),
        tls.facts,
        carried,
    )
    lost = np.zeros(len(exchanges), np.bool_)
    lost[of_request] = is_lost != 0
    return assembly, streams, lost


def _connections(
    endpoints: npt.NDArray[np.void],
    streams: Streams,
    client_side: npt.NDArray[np.uint8],
    protocol: npt.NDArray[np.uint8],
) -> npt.NDArray[np.void]:
    connections = streams.connections.reshape(-1, CONNECTION_WIDTH)
    sides = streams.sides.reshape(-1, SIDE_WIDTH)
    table = np.zeros(len(connections), CONNECTION)
    pair = connections[:, PAIR]
    table["connection_id"] = connection_ids(
        endpoints, pair, connections[:, FIRST_TIME], connections[:, INCARNATION]
    )
    table["first_time_ns"] = connections[:, FIRST_TIME]
    table["last_time_ns"] = connections[:, LAST_TIME]
    table["handshake_rtt_ns"] = connections[:, RTT]
    table["endpoints"] = pair
    table["client_side"] = client_side
    table["handshake_seen"] = (sides[0::2, HAS_SYN] != 0) & (sides[1::2, HAS_SYN] != 0)
    table["protocol"] = protocol
    table["close_reason"] = connections[:, CLOSE_REASON]
    rows = np.arange(len(connections))
    for direction in (REQUEST, RESPONSE):
        counts = table["direction"][:, direction]
        own = sides[2 * rows + (client_side ^ direction)]
        counts["byte_count"] = own[:, BYTE_COUNT]
        counts["segment_count"] = own[:, SEGMENT_COUNT]
        counts["retransmitted_segment_count"] = own[:, RETRANSMITTED_COUNT]
        counts["out_of_order_segment_count"] = own[:, OUT_OF_ORDER_COUNT]
        counts["duplicate_segment_count"] = own[:, DUPLICATE_COUNT]
        counts["gap_count"] = own[:, GAP_COUNT]
    return table


@kernel
def _fill_sides(side: Any, table: Any, row: Any, segments: Any, extent_base: int) -> None:
    """The SIDE rows of exchanges whose frame is `row` of a flat table (-1: they have none)."""
    for index in range(len(row)):
        if row[index] < 0:
            side[index]["size"] = -1
            side[index]["pos"] = -1
            side[index]["packet"] = -1
            side[index]["source"] = -1
            continue
        at = row[index] * FRAME_WIDTH
        first = segments[table[at + framing.FIRST]]
        side[index]["time_ns"] = first["time_ns"]
        side[index]["end_time_ns"] = segments[table[at + framing.LAST]]["time_ns"]
        side[index]["size"] = table[at + framing.FRAME_SIZE]
        side[index]["pos"] = table[at + framing.POS]
        side[index]["packet"] = first["packet"]
        side[index]["extent_start"] = table[at + framing.EXTENT_START] + extent_base
        side[index]["extent_count"] = table[at + framing.EXTENT_COUNT]
        side[index]["source"] = first["source"]
        side[index]["is_whole"] = table[at + framing.CAPTURED] == table[at + framing.FRAME_SIZE] + 4


@kernel
def _fill_heads(
    exchanges: Any, requests: Any, request: Any, responses: Any, response: Any, status: Any
) -> None:
    """What exchanges say of both sides: as the request's frame tells, else the response's."""
    for index in range(len(exchanges)):
        exchange = exchanges[index]
        if request[index] >= 0:
            at = request[index] * FRAME_WIDTH
            exchange["status"] = status[request[index]]
            exchange["api_key"] = np.int16(requests[at + framing.API_KEY])
            exchange["api_version"] = np.int16(requests[at + framing.VERSION])
            exchange["connection"] = requests[at + framing.CONNECTION]
            exchange["correlation_id"] = np.int32(requests[at + framing.ID])
            exchange["is_sasl_token"] = requests[at + framing.KIND] == framing.TOKEN
        else:
            at = response[index] * FRAME_WIDTH
            exchange["status"] = _REQUEST_MISSING
            exchange["api_key"] = NO_API
            exchange["api_version"] = NO_API
            exchange["connection"] = responses[at + framing.CONNECTION]
            exchange["correlation_id"] = np.int32(responses[at + framing.ID])
            exchange["is_sasl_token"] = responses[at + framing.KIND] == framing.TOKEN


def _exchanges(
    segments: Any,
    connection_id: Any,
    requests: _Frames,
    responses: _Frames,
    answer_of: Ints,
    request_of: Ints,
    status: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.void], Ints, Ints]:
    """The exchanges, and the exchange of each request and of each response."""
    room = len(answer_of) + len(request_of)
    request, response = np.empty(room, np.int64), np.empty(room, np.int64)
    count = pairing.in_order(
        requests.start, responses.start, requests.column(framing.FIRST),
        responses.column(framing.FIRST), request_of, answer_of, request, response,
    )  # fmt: skip
    request, response = request[:count], response[:count]
    asked, answered = request >= 0, response >= 0
    exchanges = np.zeros(count, EXCHANGE)
    asked_table, told_table = requests.table.reshape(-1), responses.table.reshape(-1)
    _fill_sides(exchanges["request"], asked_table, request, segments, 0)
    base = len(requests.extents)
    _fill_sides(exchanges["response"], told_table, response, segments, base)
    _fill_heads(exchanges, asked_table, request, told_table, response, status)
    pos = np.where(asked, exchanges["request"]["pos"], exchanges["response"]["pos"])
    exchanges["exchange_id"] = exchange_ids(
        connection_id[exchanges["connection"]], np.where(asked, REQUEST, RESPONSE), pos
    )
    of_request = np.empty(len(answer_of), np.int64)
    of_request[request[asked]] = np.flatnonzero(asked)
    of_response = np.empty(len(request_of), np.int64)
    of_response[response[answered]] = np.flatnonzero(answered)
    return exchanges, of_request, of_response


def _extents(requests: Ints, responses: Ints, carried: Carried) -> npt.NDArray[np.void]:
    """EXTENT of the extents of all frames."""
    extents = np.zeros(len(requests) + len(responses), EXTENT)
    for part, some in ((slice(len(requests)), requests), (slice(len(requests), None), responses)):
        for column, name in enumerate(("pos", "length", "source")):
            extents[name][part] = some[:, column]
    if len(carried.data):
        extents["transform"][extents["source"] == carried.source] = CARRIED
    return extents


def _fault_rows(frames: _Frames, segments: Any, extent_base: int) -> npt.NDArray[np.void]:
    """Faults of the framing as rows of ANOMALY."""
    rows = np.zeros(len(frames.faults), ANOMALY)
    for name, column in (
        ("kind", framing.FAULT_KIND),
        ("severity", framing.SEVERITY),
        ("direction", framing.DIRECTION),
        ("connection", framing.FAULT_CONNECTION),
        ("pos", framing.FAULT_POS),
        ("byte_count", framing.FAULT_BYTES),
        ("a", framing.FAULT_A),
        ("b", framing.FAULT_B),
        ("extent_count", framing.FAULT_EXTENTS),
    ):
        rows[name] = frames.faults[:, column]
    rows["extent_start"] = frames.faults[:, framing.FAULT_EXTENT] + extent_base
    _place(rows, segments, frames.faults[:, framing.FAULT_SEGMENT])
    return rows


def _place(rows: Any, segments: Any, segment: Ints) -> None:
    """Source and packet of anomalies from their segment (-1: none)."""
    known = segment >= 0
    rows["source"] = rows["packet"] = -1
    rows["source"][known] = segments["source"][segment[known]]
    rows["packet"][known] = segments["packet"][segment[known]]


def _frame_anomalies(
    kind: Anomaly, severity: int, direction: int, frames: _Frames, rows: Any, exchange_id: Ints,
    segments: Any, a: Any, b: Any = 0, byte_count: Any = 0,
) -> npt.NDArray[np.void]:  # fmt: skip
    """Anomalies about whole frames: `rows` of a direction's table."""
    table = frames.table[rows]
    made = np.zeros(len(table), ANOMALY)
    made["kind"] = kind
    made["severity"] = severity
    made["direction"] = direction
    made["connection"] = table[:, framing.CONNECTION]
    made["pos"] = table[:, framing.POS]
    made["byte_count"] = byte_count
    made["exchange_id"] = exchange_id
    made["a"] = a
    made["b"] = b
    _place(made, segments, table[:, framing.FIRST])
    return made


def _signed(identifiers: Ints) -> Ints:
    """Correlation ids as Kafka writes them."""
    return identifiers.astype(np.uint32).view(np.int32).astype(np.int64)


def _anomalies(
    streams: Streams,
    protocol: npt.NDArray[np.uint8],
    client_side: npt.NDArray[np.uint8],
    requests: _Frames,
    responses: _Frames,
    exchanges: Any,
    of_request: Ints,
    of_response: Ints,
    request_of: Ints,
    came: npt.NDArray[np.uint8],
    tls: Tls,
) -> npt.NDArray[np.void]:
    segments = streams.segments
    parts = [
        _fault_rows(requests, segments, 0),
        _fault_rows(responses, segments, len(requests.extents)),
    ]
    conflicts = streams.conflicts.reshape(-1, CONFLICT_WIDTH)
    conflicts = conflicts[protocol[conflicts[:, 0] >> 1] == Protocol.KAFKA]
    made = np.zeros(len(conflicts), ANOMALY)
    made["kind"] = Anomaly.OVERLAP_CONFLICT
    made["severity"] = WARNING
    made["connection"] = conflicts[:, 0] >> 1
    made["direction"] = (conflicts[:, 0] & 1) ^ client_side[conflicts[:, 0] >> 1]
    made["pos"] = conflicts[:, 2]
    made["byte_count"] = conflicts[:, 3]
    _place(made, segments, conflicts[:, 1])
    parts.append(made)

    parts.append(_encrypted(tls))
    ids = exchanges["exchange_id"]
    for direction, frames, of in (
        (REQUEST, requests, of_request),
        (RESPONSE, responses, of_response),
    ):
        rows = np.flatnonzero(~frames.is_whole())
        size = frames.table[rows, framing.FRAME_SIZE]
        parts.append(
            _frame_anomalies(
                Anomaly.PARTIAL_FRAME, WARNING, direction, frames, rows, ids[of[rows]], segments,
                size, byte_count=size + 4 - frames.table[rows, framing.CAPTURED],
            )
        )  # fmt: skip
    number = _signed(responses.table[:, framing.ID])
    for kind, severity, how in (
        (Anomaly.RESPONSE_WITHOUT_REQUEST, INFO, UNASKED),
        (Anomaly.DUPLICATE_RESPONSE, WARNING, SECOND),
        (Anomaly.OUT_OF_ORDER_RESPONSE, WARNING, OUT_OF_ORDER),
    ):
        rows = np.flatnonzero(came == how)
        parts.append(
            _frame_anomalies(
                kind, severity, RESPONSE, responses, rows, ids[of_response[rows]], segments,
                number[rows], _passed(number, request_of, rows) if how == OUT_OF_ORDER else 0,
            )
        )  # fmt: skip
    late = exchanges["request"]["end_time_ns"] - exchanges["response"]["time_ns"]
    paired = (request_of >= 0) & (responses.table[:, framing.KIND] != framing.TOKEN)
    rows = np.flatnonzero(paired & (late[of_response] > 0))
    parts.append(
        _frame_anomalies(
            Anomaly.NEGATIVE_LATENCY, INFO, RESPONSE, responses, rows, ids[of_response[rows]],
            segments, late[of_response[rows]],
        )
    )  # fmt: skip
    anomalies = np.concatenate(parts)
    order = np.lexsort(
        (anomalies["kind"], anomalies["pos"], anomalies["direction"], anomalies["connection"])
    )
    return anomalies[order]


def _encrypted(tls: Tls) -> npt.NDArray[np.void]:
    """A row for each TLS connection whose secrets are not in the key logs that there are."""
    made = np.zeros(len(tls.failed), ANOMALY)
    made["kind"] = Anomaly.NOT_DECRYPTED
    made["severity"] = INFO
    made["direction"] = NO_DIRECTION
    made["connection"] = list(tls.failed.keys())
    made["a"] = list(tls.failed.values())
    made["source"] = made["packet"] = made["pos"] = -1
    return made


def _passed(number: Ints, request_of: Ints, rows: Ints) -> Ints:
    """For responses out of order: the id of an earlier one that answered a later request."""
    highest = np.maximum.accumulate(request_of)
    first = np.searchsorted(highest, highest[rows])  # the response that set the maximum
    return number[first]
