"""Detects the protocol of a connection by its content; ports only add certainty.

The first rule that holds decides:
1. No payload: none.
2. Kafka requests from the first byte on. A request header of a known API is followed by another
   request, or its frame ends with the stream. SASL tokens without headers may come first. If the
   stream ends inside the first request, size, api key and version are enough. An unknown API needs
   a printable client id and a frame that ends with the stream. A Produce request without client id
   needs a plausible body.
3. ZooKeeper's connect packets or requests (tested before Kafka, because the framing is the same),
   TLS records, the HTTP/2 preface, or HTTP methods or status lines at the start of a stream.
4. Kafka requests found by a search, if the capture begins in the middle.
5. Responses, for captures of one direction: two from the first byte on with rising ids, or the
   ApiVersions or SaslHandshake response that most connections begin with, or a chain that a search
   finds. Rules 4 and 5 first assume the likely client, then the other side.
6. A port that the user named: Kafka.
7. TLS or HTTP in the middle, at the start of a segment. Otherwise the protocol is other: also if
   only one response was captured, unless rule 5 knows it.

If the capture lacks the TCP handshake, the client is the side that sends the requests.
"""

from __future__ import annotations

from kdissect.arrays import Bytes, Indices, Rows, Struct
from kdissect.jit import inlined, int64, kernel
from kdissect.kafka import frame_search as search
from kdissect.kafka.acks import may_be_produce
from kdissect.kafka.assembly import Protocol
from kdissect.kafka.framing import TOKEN_SIZE_MAX
from kdissect.kafka.walk import KafkaStreams, Stream, stream_of
from kdissect.tcp.byte_ranges import find, peek
from kdissect.tls.records import HANDSHAKE, record_size

TOKENS_MAX = 8  # tokens before the first request of a 0.9 client
PARTIAL_SIZE_MAX = 1 << 20  # largest size of a request that is only partly there
REPLIES_LOOKED_AT = 16  # of ZooKeeper, consecutive
PATH_LOOKED_AT = 64  # bytes of a path of ZooKeeper
SEGMENTS_LOOKED_AT = 8  # to find TLS and HTTP in the middle of a connection

_NONE = int(Protocol.NONE)
_KAFKA = int(Protocol.KAFKA)
_TLS = int(Protocol.TLS)
_HTTP = int(Protocol.HTTP)
_HTTP2 = int(Protocol.HTTP2)
_ZOOKEEPER = int(Protocol.ZOOKEEPER)
_OTHER = int(Protocol.OTHER)

# First four bytes of HTTP messages, and of the HTTP/2 preface.
_METHODS = tuple(
    int.from_bytes(word, "big")
    for word in (b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"PATC", b"CONN", b"HTTP")
)
_PREFACE = int.from_bytes(b"PRI ", "big")


@inlined
def _is_text(word: int) -> int:
    """HTTP or HTTP2 if `word`, the first four bytes, begins such a message; else NONE."""
    for method in _METHODS:
        if word == method:
            return _HTTP
    return _HTTP2 if word == _PREFACE else _NONE


@kernel
def _is_tls(stream: Stream, index: int, pos: int) -> bool:
    """Return whether TLS records begin at `pos`: two plausible headers, or one ClientHello or
    ServerHello."""
    for seen in range(2):
        size = record_size(stream.pieces, index, stream.stop, pos)
        if size <= 0:
            return size < 0 and seen > 0
        # RFC 8446, 4: handshake message types 1 (ClientHello) and 2 (ServerHello)
        if seen == 0 and peek(stream.pieces, index, stream.stop, pos, 1) == HANDSHAKE:
            if peek(stream.pieces, index, stream.stop, pos + 5, 1) in (1, 2):
                return True
        pos += size
        if pos >= stream.end:
            return pos == stream.end
        index = find(stream.pieces, index, stream.stop, pos)
    return True


@kernel
def _is_path(stream: Stream, index: int, pos: int, size: int) -> bool:
    """Return whether the `size` bytes at `pos`, as far as they were captured, are a slash and
    printable ASCII. A count and a topic or directory id of a Kafka response may begin so, too."""
    for at in range(min(size, PATH_LOOKED_AT)):
        byte = peek(stream.pieces, index, stream.stop, pos + at, 1)
        if byte < 0:
            return at > 0
        if (at == 0 and byte != 0x2F) or not 0x20 <= byte < 0x7F:
            return False
    return True


@kernel
def _is_zookeeper(stream: Stream) -> bool:
    """Return whether the stream begins with ZooKeeper's connect packets, or with requests that have
    a path.

    ConnectRequest: protocol version 0, zxid, timeout, session id, a password of 16 bytes, and
    perhaps a flag. ConnectResponse: the same without zxid. A request: xid, opcode, path. A ping:
    xid -2, opcode 11.
    """
    pieces = stream.pieces
    index = stream.start
    if index >= stream.stop:
        return False
    pos = pieces[index]["pos"]
    for _ in range(3):
        size = peek(pieces, index, stream.stop, pos, 4)
        first = peek(pieces, index, stream.stop, pos + 4, 4)
        second = peek(pieces, index, stream.stop, pos + 8, 4)
        if size < 8 or first < 0 or second < 0:
            return False
        if first == 0 and size in (44, 45):
            if peek(pieces, index, stream.stop, pos + 28, 4) == 16:
                return True
        if first == 0 and size in (36, 37):
            if peek(pieces, index, stream.stop, pos + 20, 4) == 16:
                return True
        if size == 8 and first == 0xFFFFFFFE and second == 11:
            return True
        path = peek(pieces, index, stream.stop, pos + 12, 4)
        if 0 < path <= size - 12 and second <= 110:
            if _is_path(stream, index, pos + 16, path):
                return True
        pos += 4 + size
        if pos >= stream.end:
            return False
        index = find(pieces, index, stream.stop, pos)
    return False


@kernel
def _are_zookeeper_replies(stream: Stream, index: int, pos: int) -> bool:
    """Return whether the frames from `pos` on are ZooKeeper replies, which resemble Kafka
    responses.

    A reply is xid, zxid, error code, body. Zxids never fall; their upper half is the leader's
    epoch. If that is 0 (a single server), the replies must include one to a ping.
    """
    pieces = stream.pieces
    last = int64(-1)
    has_epochs = True
    has_ping = False
    count = 0
    for _ in range(REPLIES_LOOKED_AT):
        if pos >= stream.end:
            break
        index = find(pieces, index, stream.stop, pos)
        size = peek(pieces, index, stream.stop, pos, 4)
        xid = peek(pieces, index, stream.stop, pos + 4, 4)
        epoch = peek(pieces, index, stream.stop, pos + 8, 4)
        low = peek(pieces, index, stream.stop, pos + 12, 4)
        error = peek(pieces, index, stream.stop, pos + 16, 4)
        if size < 0 or xid < 0 or epoch < 0 or low < 0 or error < 0:
            break
        if size < 16 or not (error == 0 or error > 0xFFFFFF00):
            return False
        if xid != 0xFFFFFFFF:  # a watch event, whose zxid is -1
            zxid = (epoch << 32) | low
            if zxid < last:
                return False
            last = zxid
            has_ping |= xid == 0xFFFFFFFE and size == 16
            has_epochs &= 0 < epoch < 0x100000
        count += 1
        pos += 4 + size
    return count >= 3 and (has_ping or has_epochs)


@kernel
def _begins_with_requests(stream: Stream, walk: Struct, has_origin: bool, is_named: bool) -> bool:
    """Rule 2 of the module, at the first captured byte.

    is_named: client ids must be equal and not empty, and correlation ids must rise. This matters if
    the client side is unknown: a response resembles a Produce request without client id while
    correlation ids are small, or one whose client id is the name of a topic. Other protocols with
    sizes and small numbers (SMPP) also resemble Produce without client id, so the body of such a
    request must be plausible as well.
    """
    pieces = stream.pieces
    header = walk["header"]
    index = stream.start
    if index >= stream.stop:
        return False
    pos = pieces[index]["pos"]
    for number in range(TOKENS_MAX + 1):
        grade = search.request_header(stream, index, pos, walk, header)
        size = header["size"]
        end = pos + 4 + size
        client = header["client_hash"]
        if is_named and grade == search.GOOD and header["client_length"] == 0:
            return False
        is_bare = grade == search.GOOD and header["key"] == 0 and header["client_length"] <= 0
        if is_bare and not may_be_produce(stream, index, pos, header):
            return False
        if grade in (search.GOOD, search.FAIR):
            if end == stream.end:
                return not is_named or header["key"] != 0
            if end > stream.end:
                return grade == search.GOOD and size <= PARTIAL_SIZE_MAX
            behind = find(pieces, index, stream.stop, end)
            correlation = header["correlation"]
            after = search.request_header(stream, behind, end, walk, header)
            if after == search.GOOD:
                rises = (
                    0 < search.step(header["correlation"], correlation) <= search.REQUEST_STEP_MAX
                )
                return not is_named or (header["client_hash"] == client and rises)
            if grade == search.GOOD:
                # a request whose every byte is plausible may be followed by other bytes
                return after == search.ABSENT or (has_origin and number == 0)
            return False
        if grade == search.ABSENT:
            is_possible = not is_named and number == 0 and 8 <= size <= PARTIAL_SIZE_MAX
            return is_possible and search.is_known(walk, header)
        if not has_origin or size < 0 or size > TOKEN_SIZE_MAX or end >= stream.end:
            return False
        pos = end
        index = find(pieces, index, stream.stop, pos)
    return False


@kernel
def _begins_with_responses(stream: Stream, walk: Struct, has_origin: bool) -> bool:
    """Rule 5 of the module, at the first byte. Without a SYN only self-identifying responses
    count."""
    header = walk["header"]
    index = stream.start
    if index >= stream.stop or stream.pieces[index]["pos"] != 0:
        return False
    if not search.response_header(stream, index, int64(0), walk, header):
        return False
    size = header["size"]
    first = header["correlation"]
    if size < 0 or first < 0 or 4 + size > stream.end:
        return False
    if search.names_listed(stream, index, int64(0), size) != search.NO_LIST:
        return True
    if not has_origin or 4 + size == stream.end:
        return False
    behind = find(stream.pieces, index, stream.stop, 4 + size)
    if not search.response_header(stream, behind, 4 + size, walk, header):
        return False
    if header["size"] < 0 or header["correlation"] < 0:
        return False
    return 0 < search.step(header["correlation"], first) <= search.STEP_MAX


@kernel
def recognise(
    streams: KafkaStreams,
    connections: Rows,
    is_hinted: Bytes,
    rows: Indices,
    walk: Struct,
    pending: Rows,
) -> None:
    """Fill `protocol` and `client_side` of the connections `rows`, from the first bytes that
    decide.

    client_side: first the choice by port, which stays if nothing else decides. connections: of
    `tcp.columns`. is_hinted: uint8, 1 if the user named a port of the connection. walk: a new one.
    pending: no FRAME, because responses are recognised without requests.
    """
    walk["rise_max"] = search.RISE_MAX
    header = walk["header"]
    pieces = streams.pieces
    client_side, protocol, origin = streams.client_side, streams.protocol, streams.origin
    for connection in rows:
        sides = stream_of(streams, 2 * connection), stream_of(streams, 2 * connection + 1)
        known_client = connections[connection]["client_side"]
        if sides[0].start == sides[0].stop and sides[1].start == sides[1].stop:
            protocol[connection] = _NONE
            if known_client >= 0:
                client_side[connection] = known_client
            continue
        content = _NONE
        zookeeper = _is_zookeeper(sides[0]) or _is_zookeeper(sides[1])
        likely_client = int64(client_side[connection]) if known_client < 0 else known_client
        for turn in range(3):
            # The client side if it is known. Otherwise the likely side, the other side, then the
            # likely side without the conditions on names.
            side = 1 - likely_client if turn == 1 else likely_client
            if content or zookeeper or (known_client >= 0 and side != known_client):
                continue
            begins = origin[2 * connection + side]["is_boundary"] != 0
            is_named = known_client < 0 and turn < 2
            if _begins_with_requests(sides[side], walk, begins, is_named):
                content = _KAFKA
                client_side[connection] = side
        if known_client >= 0:
            client_side[connection] = known_client
        if not content and zookeeper:
            content = _ZOOKEEPER
        for stream in sides:
            if not content and stream.start < stream.stop:
                pos = pieces[stream.start]["pos"]
                if _is_tls(stream, stream.start, pos):
                    content = _TLS
                elif pos == 0:
                    content = _is_text(peek(pieces, stream.start, stream.stop, 0, 4))
        for turn in range(2):
            # The likely client first, with both rules, because each direction can resemble the
            # other.
            client = 1 - likely_client if turn == 1 else likely_client
            if content or (known_client >= 0 and client != known_client):
                continue
            stream = sides[client]
            if stream.start < stream.stop:
                at = search.find_request(stream, stream.start, int64(0), walk)
                # If ports suggest otherwise, a single Produce is not enough: a response resembles
                # it.
                alone = header["key"] == 0 and at + 4 + header["size"] >= stream.end
                if at >= 0 and not (turn == 1 and alone):
                    content = _KAFKA
            stream = sides[1 - client]
            if not content and stream.start < stream.stop:
                begins = origin[2 * connection + 1 - client]["is_boundary"] != 0
                if _begins_with_responses(stream, walk, begins):
                    content = _KAFKA
                else:
                    at = search.find_response(stream, stream.start, int64(0), walk, pending)
                    if at >= 0:
                        index = find(pieces, stream.start, stream.stop, at)
                        is_other = _are_zookeeper_replies(stream, index, at)
                        content = _ZOOKEEPER if is_other else _KAFKA
            if content:
                client_side[connection] = client
        if not content and is_hinted[connection]:
            content = _KAFKA
        for stream in sides:
            for index in range(stream.start, min(stream.stop, stream.start + SEGMENTS_LOOKED_AT)):
                if not content:
                    pos = pieces[index]["pos"]
                    content = _is_text(peek(pieces, index, stream.stop, pos, 4))
                    if not content and _is_tls(stream, index, pos):
                        content = _TLS
        protocol[connection] = content if content else _OTHER
