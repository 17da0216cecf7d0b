"""Decrypts TLS connections: facts of their handshakes and, with a key log, their plaintext.

Theory of operation
-------------------
*Position in the pipeline.* After reassembly and detection, before framing. The readable part of
each TLS connection's handshake is parsed. If a key log has its secrets, its records are decrypted
once, here, into a spool (an unnamed temporary file, mapped). Each decrypted record of application
data becomes a piece of the stream at its address in the spool. So detection, framing and pairing
run the same kernels on TLS as on clear text. Memory holds the payload of one record, and an OPENED
row for each.

*Decrypted bytes travel.* The extents of other exchanges point into captures that every worker can
read. Plaintext is in no capture, so the plaintext of an exchange's frames travels with its row to
the task that decodes it (`kafka.assembly.Carried`). Sending keys and record numbers would decrypt
everything twice and put secrets into every later step. Only TLS pays the price, shuffled payload.

*Record numbers.* A record is authentic only with its number, which is not in it (but see
`Opener.hint`). While nothing is lost the numbers count up. After lost or damaged bytes the number
is searched forward, within what the lost bytes can have held; the right one authenticates. The
search has a budget of bytes per stream, so hostile streams cost linear time. TLS 1.3 changes keys
after Finished and KeyUpdate; if such a message is lost, the next keys are tried too.

*Resuming.* A direction resumes before any record with its number, its count of KeyUpdates and the
facts of the handshake (`tls.session`). `OpenedStream.point` finds the record for a position of the
plaintext. The secrets come from the key log each time.

*Lost records.* With an AEAD suite, k records of n bytes held n - k * (5 + overhead) bytes of
plaintext, so the end of a frame that spans them is known. With CBC padding that is an estimate, and
framing searches on if it fails.

*Positions.* The position of a plaintext byte is that of its ciphertext byte in the TCP stream. Its
packet and time are those of its record's segments: of the first segment for first bytes, of the
last for last ones, since a record can be read only after all of it arrived.

*Accounts.* byte_count counts ciphertext. Unframed are decrypted bytes in no frame and the bytes of
records that could not be decrypted. Everything else, handshake and record headers included, lies
within known boundaries: framed.

*Not decrypted*: records after a renegotiation of TLS 1.2, early data of TLS 1.3 (no Kafka client
uses either), versions before 1.2. They are reported like other records without a key.

The cipher library takes one call per record, so this loop is Python; records of TLS connections
with keys are the only bytes that pay for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kdissect.arrays import Bytes, Marks, Rows
from kdissect.capture.scratch import Written
from kdissect.tcp.byte_ranges import read_bytes
from kdissect.tcp.reassembly import Streams
from kdissect.tls import handshake, records
from kdissect.tls.alerts import fatal_alert
from kdissect.tls.certificates import read_certificate
from kdissect.tls.cipher_suites import Suite, suite_name, suite_of
from kdissect.tls.ciphers import Opener, Tls13, openers_12
from kdissect.tls.handshake import (
    CERTIFICATE,
    CLIENT_HELLO,
    FINISHED,
    KEY_UPDATE,
    MESSAGE_MAX,
    SERVER_HELLO,
    TLS_12,
    TLS_13,
    Certificate,
    ServerHello,
    TlsFacts,
)
from kdissect.tls.key_log import (
    HANDSHAKE_SECRETS,
    TRAFFIC,
    Secrets,
    Text,
    master_secret,
    read_secrets,
)
from kdissect.tls.plaintext import OPENED, OpenedStream, TlsConnections
from kdissect.tls.records import TLS_HEADER_SIZE, Record, each_record, walk_records
from kdissect.tls.session import SESSION_ID_MAX, RecordPoint, Session, TlsState

_CLIENT, SERVER = 0, 1
SEARCH_BYTES = 1 << 20  # of trial decryption per stream, and
SEARCH_SHARE = 8  # times its captured bytes
TRIAL_COST = 256  # bytes that a trial costs besides those of its record
OF_HANDSHAKE = -1  # generation of the handshake's own keys

# Why a connection was not decrypted: `reason` of the anomaly `not_decrypted`.
NO_HELLO, NO_SECRET, NO_SUITE, WRONG_SECRET, ONE_SECRET = range(5)


def read_tls(
    streams: Streams,
    has_origin: Marks,
    connections: Iterable[int],
    key_logs: Sequence[Text],
    resumed: Mapping[int, TlsState],
    carried: Bytes,
) -> TlsConnections:
    """Handshakes of the given TLS connections; with key logs (buffers of text) their plaintext.

    resumed: those whose streams begin at a record (`RecordPoint`), instead of a handshake. carried:
    bytes that the spool has before the plaintext.
    """
    tls = TlsConnections()
    if key_logs:
        tls.spool.append(carried)
    sessions: dict[int, Session | None] = {}
    for connection in connections:
        if connection in resumed:
            sessions[connection] = resumed[connection].session
            continue
        session = _read_hello(tls, streams, has_origin, connection)
        if key_logs:
            sessions[connection] = session
    names = {name for session in sessions.values() if session for name in session.names()}
    secrets = read_secrets(key_logs, names) if names else {}
    for connection, session in sessions.items():
        state = resumed.get(connection)
        if session is None:
            tls.failed[connection] = NO_HELLO
            continue
        keys = _keys(session, secrets)
        if isinstance(keys, int):
            if key_logs:
                tls.failed[connection] = keys
            continue
        points = state.points if state else (None, None)
        one, two = keys[session.client_side], keys[1 - session.client_side]
        sides = [
            _Direction(streams, 2 * connection, one, tls.spool, points[0]),
            _Direction(streams, 2 * connection + 1, two, tls.spool, points[1]),
        ]
        opened = sides[0].run(has_origin), sides[1].run(has_origin)
        if state is None and not any(side.has_opened for side in sides):
            tls.failed[connection] = WRONG_SECRET
            continue
        tls.opened[connection] = opened
        tls.sessions[connection] = session
        if state is None:
            if not (one.openers and two.openers):
                tls.failed[connection] = ONE_SECRET
            client, server = sides[session.client_side], sides[1 - session.client_side]
            facts = tls.facts[connection]
            tls.facts[connection] = replace(
                facts,
                broker_certificate=server.certificate or facts.broker_certificate,
                client_certificate=client.certificate or facts.client_certificate,
            )
    return tls


# -- handshakes -----------------------------------------------------------------------------


def _bytes_of(streams: Streams, record: Record) -> bytes:
    """A record that was captured whole, with its header."""
    return read_bytes(streams.pieces, record.piece, record.pos, record.size)


def _clear_handshake(streams: Streams, table: Rows, past_change: bool) -> bytes:
    """The handshake bytes at the start of a stream that are not encrypted, without alerts.

    past_change: also after ChangeCipherSpec, which means nothing in TLS 1.3.
    """
    messages = b""
    for record in each_record(table):
        # a server may warn before its hello, for example of an unrecognized_name (RFC 6066, 3)
        if record.kind == records.ALERT or (record.kind == records.CHANGE_CIPHER and past_change):
            continue
        if record.kind != records.HANDSHAKE or record.captured < record.size:
            break
        if len(messages) > MESSAGE_MAX:
            break
        messages += _bytes_of(streams, record)[TLS_HEADER_SIZE:]
    return messages


def _read_hello(
    tls: TlsConnections, streams: Streams, has_origin: Marks, connection: int
) -> Session | None:
    """Add the facts of a handshake to `tls`; returns its session, None if a hello is missing."""
    tables = [
        walk_records(streams.pieces, streams.sides, 2 * connection + side, has_origin)
        for side in (0, 1)
    ]
    flights = [_clear_handshake(streams, table, False) for table in tables]
    client_side = 1 if flights[1][:1] == bytes([CLIENT_HELLO]) else 0
    if flights[0][:1] == bytes([SERVER_HELLO]):
        client_side = 1
    client_flight, server_flight = flights[client_side], flights[1 - client_side]
    client = server = None
    for kind, _, body in handshake.messages(client_flight):
        if kind == CLIENT_HELLO and client is None:
            client = handshake.client_hello(body)
    server = _server_hello(server_flight)
    if server is not None and server.is_retry:
        server_flight = _clear_handshake(streams, tables[1 - client_side], True)
        server = _server_hello(server_flight) or server
    certificates = [
        _certificate(flight, server.version) if server else None
        for flight in (server_flight, client_flight)
    ]
    suite = suite_of(server.suite) if server else None
    alerts = [
        fatal_alert(streams.pieces, each_record(table), suite, side == client_side)
        for side, table in enumerate(tables)
    ]
    session = None
    if client is not None and server is not None:
        session = Session(
            client_side,
            server.version,
            server.suite,
            client.random,
            server.random,
            server.session_id if len(server.session_id) <= SESSION_ID_MAX else b"",
            server.is_encrypt_then_mac,
        )
    tls.facts[connection] = TlsFacts(
        version=handshake.version_name(server.version) if server else None,
        sni=client.server_name if client else None,
        cipher=suite_name(server.suite) if server else None,
        broker_certificate=certificates[0],
        client_certificate=certificates[1],
        request_alert=alerts[client_side],
        response_alert=alerts[1 - client_side],
        secret_names=frozenset(session.names() if session else ()),
    )
    # TLS 1.3 uses records of application data for the rest of the handshake too
    if all((table["kind"] == records.APPLICATION).any() for table in tables):
        tls.past_handshake.append(connection)
    if client is not None:
        tls.hello_side[connection] = client_side
    return session


def _server_hello(flight: bytes) -> ServerHello | None:
    """The last one: a HelloRetryRequest (RFC 8446 section 4.1.4) comes before the real one."""
    found = None
    for kind, _, body in handshake.messages(flight):
        if kind == SERVER_HELLO:
            found = handshake.server_hello(body) or found
    return found


def _certificate(flight: bytes, version: int) -> Certificate | None:
    """The sender's own certificate in a flight of handshake messages."""
    for kind, _, body in handshake.messages(flight):
        der = handshake.certificate(body, version) if kind == CERTIFICATE else None
        if der is not None and (found := read_certificate(der)):
            return found
    return None


def _keys(session: Session, secrets: Secrets) -> tuple[_Keys, _Keys] | int:
    """Keys of the client's and the server's records, or why there are none."""
    suite = suite_of(session.suite)
    if suite is None or session.version not in (TLS_12, TLS_13):
        return NO_SUITE
    if suite.is_13 != (session.version == TLS_13):
        return NO_SUITE
    if not suite.is_13:
        master = master_secret(session, secrets)
        if master is None:
            return NO_SECRET
        one, two = openers_12(suite, master, session)
        return _Keys([one], False), _Keys([two], False)
    keys = tuple(_keys_13(suite, session, secrets, side) for side in (_CLIENT, SERVER))
    if not (keys[0].openers or keys[1].openers):
        return NO_SECRET
    return keys[0], keys[1]


@dataclass(frozen=True, slots=True)
class _Keys:
    """Of one direction, in the order of use.

    generation: KeyUpdates (RFC 8446 section 7.2) before the first opener, or OF_HANDSHAKE.
    """

    openers: list[Opener]
    is_13: bool
    generation: int = 0

    def after(self, updates: int) -> _Keys:
        """The keys after that many KeyUpdates, if they are known."""
        last = self.openers[-1:]
        for _ in range(updates):
            last = [opener.updated() for opener in last]
        return _Keys(last, self.is_13, updates)


def _keys_13(suite: Suite, session: Session, secrets: Secrets, side: int) -> _Keys:
    traffic = secrets.get((TRAFFIC[side], session.client_random))
    if traffic is None:
        return _Keys([], True)
    early = secrets.get((HANDSHAKE_SECRETS[side], session.client_random))
    if early is None:
        return _Keys([Tls13(suite, traffic)], True)
    return _Keys([Tls13(suite, early), Tls13(suite, traffic)], True, OF_HANDSHAKE)


# -- records --------------------------------------------------------------------------------


class _Direction:
    """One stream's records, opened in order; from a handshake on, or from a point."""

    def __init__(
        self, streams: Streams, stream: int, keys: _Keys, spool: Written, point: RecordPoint | None
    ) -> None:
        self._streams, self._stream, self._spool = streams, stream, spool
        self._keys = keys.after(point.generation) if point else keys
        # the next record, if nothing was lost
        self._next = point or RecordPoint(0, keys.generation)
        self._plain = 0  # plaintext position after the last opened record
        self._end = 0  # after the last application data
        # since the last opened record: numbers that lost records took, and the bytes of these
        self._least = self._most = self._lost_bytes = 0
        self._is_on = keys.is_13 or point is not None  # records are encrypted from here on
        # Without the handshake's own keys nothing says which records are the handshake's.
        self._is_hunting = keys.is_13 and point is None and keys.generation != OF_HANDSHAKE
        self._skip = point.skip if point else 0  # bytes of the first record that are not needed
        self._budget = 0
        self._opened = array("q")
        start = (0, point) if point else None
        self._result = OpenedStream(np.zeros(0, OPENED), [], start, start)
        self._messages = b""
        self.certificate: Certificate | None = None

    @property
    def has_opened(self) -> bool:
        """Return whether any record was opened, of a direction that begins with a handshake."""
        return self._next != RecordPoint(0, self._keys.generation)

    @property
    def _opener(self) -> int:
        """The index of the keys of the next record."""
        return self._next.generation - self._keys.generation

    def run(self, has_origin: Marks) -> OpenedStream:
        streams = self._streams
        table = walk_records(streams.pieces, streams.sides, self._stream, has_origin)
        self._budget = SEARCH_BYTES + SEARCH_SHARE * int(table["captured"].sum())
        for row in each_record(table):
            self._record(row)
        if self._opened:
            self._result.table = np.frombuffer(self._opened, OPENED)
        return self._result

    def _record(self, row: Record) -> None:
        kind, size = row.kind, row.size
        if kind == records.LOST:
            self._is_on = True
            openers = self._keys.openers
            overhead = openers[self._opener].overhead if openers else 0
            self._lose(row, 0, size // (TLS_HEADER_SIZE + overhead) + 1)
        elif kind == records.CHANGE_CIPHER:
            self._is_on = True
        elif not self._is_on or (self._keys.is_13 and kind != records.APPLICATION):
            return  # in clear text
        elif row.captured < size:
            self._lose(row, 0 if self._is_hunting else 1, 1)
        elif not self._open(row):
            if self._is_hunting:
                self._note_lost(row)
            else:
                self._lose(row, 0, 1)

    def _lose(self, row: Record, least: int, most: int) -> None:
        """A record, or a stretch, is lost: it takes from `least` to `most` numbers."""
        self._least += least
        self._most += most
        self._lost_bytes += row.size
        self._note_lost(row)

    def _note_lost(self, row: Record) -> None:
        lost, count = self._result.lost, row.captured
        if not count:
            return
        self._result.closed_byte_count += count
        if lost and lost[-1][0] + lost[-1][1] == row.pos:
            before, so_far, segment = lost[-1]
            lost[-1] = before, so_far + count, segment
        else:
            lost.append((row.pos, count, row.first))

    def _open(self, row: Record) -> bool:
        data = _bytes_of(self._streams, row)
        header, body = data[:TLS_HEADER_SIZE], data[TLS_HEADER_SIZE:]
        for index, number in self._candidates(body):
            opener = self._keys.openers[index]
            inner = opener.open(number, header, body)
            if inner is not None:
                self._move(index, number, opener.overhead)
                self._accept(row, number, opener.skipped, *inner)
                return True
        return False

    def _candidates(self, body: bytes) -> Iterator[tuple[int, int]]:
        """(opener, number) to try, the likeliest first, while the budget lasts."""
        openers = self._keys.openers
        if not openers:
            return
        opener, number = self._opener, self._next.number
        low, high = number + self._least, number + self._most
        yield opener, low
        hint = openers[opener].hint(body)
        if low < hint <= high:
            yield opener, hint
        numbers = [(opener, range(low + 1, high + 1))]
        if self._keys.is_13:
            numbers.append((opener + 1, range(max(1, self._most + 1))))
        cost = len(body) + TRIAL_COST
        for index, some in numbers:
            if index == len(openers) and high > low:
                openers.append(openers[-1].updated())
            for number in some if index < len(openers) else ():
                if self._budget < cost:
                    return
                self._budget -= cost
                yield index, number

    def _move(self, index: int, number: int, overhead: int) -> None:
        """Go behind a record that was opened, over the lost ones before it."""
        passed = number - self._next.number if index == self._opener else number
        if self._is_hunting and passed == 0:  # all before was the handshake
            self._result.lost.clear()
        elif self._lost_bytes:
            self._plain += max(1, self._lost_bytes - passed * (TLS_HEADER_SIZE + overhead))
        self._is_hunting = False
        self._next = RecordPoint(number + 1, self._keys.generation + index)
        self._least = self._most = self._lost_bytes = self._result.closed_byte_count = 0

    def _accept(self, row: Record, number: int, skipped: int, kind: int, content: bytes) -> None:
        if kind == records.APPLICATION:
            self._add(row, number, content, skipped)
        elif kind == records.HANDSHAKE and self._keys.is_13:
            self._read_messages(content)
        is_past_handshake = self._next.generation >= 0
        if is_past_handshake and not self._messages and self._plain == self._end:
            self._result.after = row.pos + row.size, self._next
            if not self._end:
                self._result.start = self._result.after

    def _add(self, row: Record, number: int, content: bytes, skipped: int) -> None:
        """An OPENED row of application data, without fields that a resumed stream ignores."""
        pos, tcp_pos = row.pos, row.pos + TLS_HEADER_SIZE + skipped
        if pos == 0 and self._skip:
            needed = max(tcp_pos, self._skip)
            content, tcp_pos = content[needed - tcp_pos :], needed
        plain = self._plain
        if self._result.start is None and not plain:
            self._result.start = pos, RecordPoint(number, self._next.generation)
        if content:
            self._opened.extend(
                (
                    plain,
                    len(content),
                    self._spool.append(np.frombuffer(content, np.uint8)),
                    tcp_pos,
                    row.first,
                    row.last,
                    pos,
                    pos + row.size,
                    number,
                    self._next.generation,
                )
            )
            self._plain = self._end = plain + len(content)

    def _next_keys(self) -> None:
        """Number records from 0 on again, by the next keys."""
        self._next = RecordPoint(0, self._next.generation + 1)

    def _read_messages(self, content: bytes) -> None:
        """TLS 1.3: the messages that change keys, and the certificate."""
        self._messages += content
        self.certificate = self.certificate or _certificate(self._messages, TLS_13)
        done = 0
        for kind, end, _ in handshake.messages(self._messages):
            done = end
            if kind == FINISHED and self._next.generation == OF_HANDSHAKE:
                self._next_keys()
            elif kind == KEY_UPDATE:
                openers, at = self._keys.openers, self._opener
                openers[at + 1 :] = [openers[at].updated()]
                self._next_keys()
        self._messages = self._messages[done:]
        if len(self._messages) > MESSAGE_MAX:
            self._messages = b""
