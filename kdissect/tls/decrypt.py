"""TLS connections: what their handshakes say and, with a key log, their plaintext as pieces.

Theory of operation
-------------------
*Where it sits.* Behind reassembly and recognition, in front of framing. For each connection that
speaks TLS the readable handshake is parsed. Where a key log has its secrets, its records are
decrypted once, here, into a spool (an unnamed temporary file, mapped), and each decrypted record
of application data becomes a piece of the stream at that spool's address. So recognition, framing
and pairing run on TLS by the same kernels as on bytes that were captured in clear. Payload in
memory is one record; what is kept of a record is 48 bytes of index.

*Why decrypted bytes travel.* An exchange's extents elsewhere point into captures that every worker
can read. Plaintext is in no capture, so the plaintext of an exchange's frames travels with its
row to the task that decodes it (EXTENT.transform 1, `pipeline.exchange_index`), cut into rows of
bounded size like all of the index. Sending keys and record numbers instead would decrypt everything
twice and put secrets into every later step. The price, shuffled payload, is paid by TLS alone.

*Numbers.* A record is authentic only with its number, which is not in it (but see `Opener.hint`).
While nothing is lost the numbers count up. Behind lost or damaged bytes the number is searched
forward, within what the lost bytes can have held; the right one authenticates. The search has a
budget of bytes per stream, so that hostile streams cost linear time. TLS 1.3 changes keys behind
Finished and KeyUpdate; where such a message is lost, the next keys are tried too.

*Holes.* k lost records of n bytes held n - k * (5 + overhead) bytes of plaintext with an AEAD
suite, so a frame that spans them keeps its end. With CBC padding that is an estimate, and framing
searches on where it fails.

*Places.* A plaintext byte is told by the place of its ciphertext byte in the TCP stream, and by the
packet and the time of its record's segments: the first segment for first bytes, the last for
last ones, as a record can be read only when all of it has arrived.

*Accounts.* byte_count counts ciphertext. Unframed are decrypted bytes in no frame and the bytes of
records that could not be decrypted; everything else, handshake and record headers included, lies
within known boundaries: framed.

*Not decrypted*: records behind a renegotiation of TLS 1.2, early data of TLS 1.3 (no Kafka client
uses either), versions before 1.2; they are reported like other records without a key.

The cipher library takes one call per record, so this loop is Python; records of TLS connections
with keys are the only bytes that pay for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.spool import Spool
from kdissect.kafka.assembly import TlsFacts
from kdissect.tcp.byte_ranges import read_bytes
from kdissect.tcp.reassembly import Streams
from kdissect.tls import handshake, records
from kdissect.tls.cipher_suites import Suite, suite_name, suite_of
from kdissect.tls.ciphers import Opener, Tls13, openers_12
from kdissect.tls.handshake import (
    CERTIFICATE,
    CLIENT_HELLO,
    CLIENT_KEY_EXCHANGE,
    FINISHED,
    KEY_UPDATE,
    MESSAGE_MAX,
    SERVER_HELLO,
    TLS_12,
    TLS_13,
    ClientHello,
    ServerHello,
)
from kdissect.tls.key_log import (
    HANDSHAKE_SECRETS,
    TRAFFIC,
    Secrets,
    Session,
    master_secret,
    names_of,
    read_secrets,
)
from kdissect.tls.plaintext_ranges import OPENED_WIDTH, OpenedStream, TlsConnections
from kdissect.tls.records import RECORD_WIDTH, TLS_HEADER_SIZE, walk_records

Ints = npt.NDArray[np.int64]

_CLIENT, SERVER = 0, 1
SERVER_HELLO_DONE = 14
SEARCH_BYTES = 32 << 20  # of trial decryption per stream, and
SEARCH_SHARE = 8  # times the stream's own bytes
TRIAL_COST = 256  # bytes that a trial costs besides those of its record
_ROWS_AT_ONCE = 4096

# Why a connection was not decrypted, `a` of the anomaly `not_decrypted`.
NO_HELLO, NO_SECRET, NO_SUITE, WRONG_SECRET = range(4)


@dataclass(frozen=True, slots=True)
class _Hello:
    """A connection's readable handshake."""

    client_side: int
    client: ClientHello | None
    server: ServerHello | None
    session: Session | None


def read_tls(
    streams: Streams,
    has_origin: npt.NDArray[np.uint8],
    connections: Iterable[int],
    key_logs: Sequence[Any],
) -> TlsConnections:
    """Handshakes of the given TLS connections; with key logs (buffers of text) their plaintext."""
    told = TlsConnections()
    hellos: dict[int, _Hello] = {}
    for connection in connections:
        hello, facts = _read_hello(streams, has_origin, connection)
        told.facts[connection] = facts
        if hello.client is not None:
            told.hello_side[connection] = hello.client_side
        if key_logs:
            hellos[connection] = hello
    wanted: set[bytes] = set()
    for hello in hellos.values():
        if hello.session is not None:
            wanted |= names_of(hello.session)
    secrets = read_secrets(key_logs, wanted) if wanted else {}
    for connection, hello in hellos.items():
        found = _openers(hello, secrets)
        if isinstance(found, int):
            told.failed[connection] = found
            continue
        one, two = (
            _Direction(streams, 2 * connection + side, found[side ^ hello.client_side], told.spool)
            for side in (0, 1)
        )
        opened = one.run(has_origin), two.run(has_origin)
        if not (one.has_opened or two.has_opened):
            told.failed[connection] = WRONG_SECRET
            continue
        told.opened[connection] = opened
        server = two if hello.client_side == 0 else one
        client = one if hello.client_side == 0 else two
        told.facts[connection] = replace(
            told.facts[connection],
            **_certificate_facts(server.certificate, client.certificate),
        )
    return told


# -- handshakes -----------------------------------------------------------------------------


def _rows(table: Ints) -> Iterator[list[int]]:
    rows = table.reshape(-1, RECORD_WIDTH)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        yield from rows[start : start + _ROWS_AT_ONCE].tolist()


def _clear_handshake(streams: Streams, table: Ints, past_change: bool) -> bytes:
    """The handshake bytes at the start of a stream that are not encrypted.

    past_change: also behind ChangeCipherSpec, which means nothing in TLS 1.3.
    """
    found = b""
    for row in _rows(table):
        kind, size = row[records.TYPE], row[records.SIZE]
        if kind == records.CHANGE_CIPHER and past_change:
            continue
        if kind != records.HANDSHAKE or row[records.CAPTURED] < size or len(found) > MESSAGE_MAX:
            break
        found += read_bytes(
            streams.pieces,
            row[records.PIECE],
            row[records.POS] + TLS_HEADER_SIZE,
            size - TLS_HEADER_SIZE,
        )
    return found


def _read_hello(
    streams: Streams, has_origin: npt.NDArray[np.uint8], connection: int
) -> tuple[_Hello, TlsFacts]:
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
    certificates: list[bytes | None] = [None, None]
    if server is not None:
        for number, flight in enumerate((server_flight, client_flight)):
            for kind, _, body in handshake.messages(flight):
                if kind == CERTIFICATE and certificates[number] is None:
                    certificates[number] = handshake.certificate(body, server.version)
    facts = TlsFacts(
        version=handshake.version_name(server.version) if server else None,
        sni=client.server_name if client else None,
        cipher=suite_name(server.suite) if server else None,
        **_certificate_facts(*certificates),
    )
    session = None
    if client is not None and server is not None:
        session = _session(client, server, client_flight, server_flight)
    return _Hello(client_side, client, server, session), facts


def _server_hello(flight: bytes) -> ServerHello | None:
    """The last one: behind a retry request comes the real one."""
    found = None
    for kind, _, body in handshake.messages(flight):
        if kind == SERVER_HELLO:
            found = handshake.server_hello(body) or found
    return found


def _certificate_facts(server: bytes | None, client: bytes | None) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if server is not None:
        facts["certificate_names"] = handshake.certificate_names(server)
    if client is not None:
        facts["client_subject"] = handshake.certificate_subject(client)
    return facts


def _session(
    client: ClientHello, server: ServerHello, client_flight: bytes, server_flight: bytes
) -> Session:
    """What names the session's secret; the transcript is that of RFC 7627 section 3."""
    secret = b""
    hello_end = exchange_end = done_end = 0
    for kind, end, body in handshake.messages(client_flight):
        if kind == CLIENT_HELLO:
            hello_end = end
        elif kind == CLIENT_KEY_EXCHANGE:
            secret = handshake.encrypted_secret(body)
            exchange_end = end
    for kind, end, _ in handshake.messages(server_flight):
        if kind == SERVER_HELLO_DONE:
            done_end = end
    return Session(
        client_random=client.random,
        server_random=server.random,
        session_id=server.session_id,
        encrypted_secret=secret,
        transcript=client_flight[:hello_end]
        + server_flight[:done_end]
        + client_flight[hello_end:exchange_end],
        is_extended=server.is_extended,
    )


def _openers(hello: _Hello, secrets: Secrets) -> tuple[_Keys, _Keys] | int:
    """Keys of the client's and the server's records, or why there are none."""
    server, session = hello.server, hello.session
    if server is None or session is None:
        return NO_HELLO
    suite = suite_of(server.suite)
    if suite is None or server.version not in (TLS_12, TLS_13):
        return NO_SUITE
    if suite.is_13 != (server.version == TLS_13):
        return NO_SUITE
    if not suite.is_13:
        master = master_secret(session, secrets, suite.hash_name)
        if master is None:
            return NO_SECRET
        one, two = openers_12(suite, master, session, server.is_encrypt_then_mac)
        return _Keys([one], False), _Keys([two], False)
    keys = tuple(_keys_13(suite, session, secrets, side) for side in (_CLIENT, SERVER))
    if not (keys[0].openers or keys[1].openers):
        return NO_SECRET
    return keys[0], keys[1]


@dataclass(frozen=True, slots=True)
class _Keys:
    """Of one direction, in the order of use. has_handshake: the first are the handshake's."""

    openers: list[Opener]
    is_13: bool
    has_handshake: bool = False


def _keys_13(suite: Suite, session: Session, secrets: Secrets, side: int) -> _Keys:
    traffic = secrets.get((TRAFFIC[side], session.client_random))
    if traffic is None:
        return _Keys([], True)
    early = secrets.get((HANDSHAKE_SECRETS[side], session.client_random))
    openers: list[Opener] = [Tls13(suite, traffic)]
    if early is not None:
        openers.insert(0, Tls13(suite, early))
    return _Keys(openers, True, early is not None)


# -- records --------------------------------------------------------------------------------


class _Direction:
    """One stream's records, opened in order."""

    def __init__(self, streams: Streams, stream: int, keys: _Keys, spool: Spool) -> None:
        self._streams, self._stream, self._spool = streams, stream, spool
        self._is_13, self._has_handshake = keys.is_13, keys.has_handshake
        self._openers = keys.openers
        self._epoch = 0  # index of the opener in use
        self._next = 0  # number behind the last opened record
        self._low = 0  # the next record's number is in low .. high
        self._high = 0
        self._is_on = keys.is_13  # records are encrypted from here on
        # Without the handshake's own keys nothing tells which records are the handshake's.
        self._is_hunting = keys.is_13 and not keys.has_handshake
        self._budget = 0
        self._plain = 0
        self._hole = 0  # ciphertext bytes since the last opened record that were not opened
        self._opened = array("q")
        self._lost: list[tuple[int, int, int]] = []
        self._messages = b""
        self.has_opened = False
        self.certificate: bytes | None = None

    def run(self, has_origin: npt.NDArray[np.uint8]) -> OpenedStream:
        streams = self._streams
        table = walk_records(streams.pieces, streams.sides, self._stream, has_origin)
        self._budget = SEARCH_BYTES + SEARCH_SHARE * int(
            table.reshape(-1, RECORD_WIDTH)[:, records.SIZE].sum()
        )
        for row in _rows(table):
            self._record(row)
        opened = np.array(self._opened, np.int64).reshape(-1, OPENED_WIDTH)
        return OpenedStream(opened, self._lost)

    def _record(self, row: list[int]) -> None:
        kind, size = row[records.TYPE], row[records.SIZE]
        is_whole = row[records.CAPTURED] == size
        if kind == records.LOST:
            self._is_on = True
            smallest = TLS_HEADER_SIZE + (
                self._openers[self._epoch].overhead if self._openers else 0
            )
            self._lose(row, size // smallest + 1, 0)
        elif kind == records.CHANGE_CIPHER:
            self._is_on = True
        elif self._is_clear(kind):
            return
        elif not is_whole:
            self._lose(row, 1, 0 if self._is_hunting else 1)
        elif not self._open(row):
            if self._is_hunting:
                self._note_lost(row)
            else:
                self._lose(row, 1, 0)

    def _is_clear(self, kind: int) -> bool:
        return not self._is_on or (self._is_13 and kind != records.APPLICATION)

    def _lose(self, row: list[int], most: int, least: int) -> None:
        """A record, or a stretch, is lost: it takes from `least` to `most` numbers."""
        self._low += least
        self._high += most
        self._hole += row[records.SIZE]
        self._note_lost(row)

    def _note_lost(self, row: list[int]) -> None:
        pos, count = row[records.POS], row[records.CAPTURED]
        if not count:
            return
        if self._lost and self._lost[-1][0] + self._lost[-1][1] == pos:
            before, so_far, segment = self._lost[-1]
            self._lost[-1] = before, so_far + count, segment
        else:
            self._lost.append((pos, count, row[records.FIRST]))

    def _open(self, row: list[int]) -> bool:
        data = read_bytes(
            self._streams.pieces, row[records.PIECE], row[records.POS], row[records.SIZE]
        )
        header, body = data[:TLS_HEADER_SIZE], data[TLS_HEADER_SIZE:]
        for epoch, number in self._candidates(body):
            inner = self._openers[epoch].open(number, header, body)
            if inner is not None:
                self._accept(row, epoch, number, *inner)
                return True
        return False

    def _candidates(self, body: bytes) -> Iterator[tuple[int, int]]:
        """(opener, number) to try, the likeliest first, while the budget lasts."""
        if not self._openers:
            return
        yield self._epoch, self._low
        hint = self._openers[self._epoch].hint(body)
        if self._low < hint <= self._high:
            yield self._epoch, hint
        cost = len(body) + TRIAL_COST
        for number in range(self._low + 1, self._high + 1):
            if self._budget < cost:
                return
            self._budget -= cost
            yield self._epoch, number
        if not self._is_13:
            return
        if self._epoch + 1 == len(self._openers) and self._high > self._low:
            last = self._openers[-1]
            assert isinstance(last, Tls13)
            self._openers.append(last.updated())
        if self._epoch + 1 < len(self._openers):
            for number in range(max(1, self._high - self._next + 1)):
                if self._budget < cost:
                    return
                self._budget -= cost
                yield self._epoch + 1, number

    def _accept(self, row: list[int], epoch: int, number: int, kind: int, content: bytes) -> None:
        opener = self._openers[epoch]
        passed = number - self._next if epoch == self._epoch else number
        if self._is_hunting:
            self._is_hunting = False
            if passed == 0:  # all before was the handshake
                self._lost.clear()
                self._hole = 0
        if self._hole:
            self._plain += max(1, self._hole - passed * (TLS_HEADER_SIZE + opener.overhead))
            self._hole = 0
        self.has_opened = True
        self._turn(epoch, number + 1)
        if kind == records.APPLICATION:
            if content:
                self._opened.extend(
                    (
                        self._plain,
                        len(content),
                        self._spool.write(content),
                        row[records.POS] + TLS_HEADER_SIZE + opener.skipped,
                        row[records.FIRST],
                        row[records.LAST],
                    )
                )
                self._plain += len(content)
        elif kind == records.HANDSHAKE and self._is_13:
            self._read_messages(content)

    def _turn(self, epoch: int, number: int) -> None:
        self._epoch = epoch
        self._next = self._low = self._high = number

    def _read_messages(self, content: bytes) -> None:
        """TLS 1.3: the messages that change keys, and the certificate."""
        self._messages += content
        done = 0
        for kind, end, body in handshake.messages(self._messages):
            done = end
            if kind == CERTIFICATE and self.certificate is None:
                self.certificate = handshake.certificate(body, TLS_13)
            elif kind == FINISHED and self._has_handshake and self._epoch == 0:
                self._turn(self._epoch + 1, 0)
            elif kind == KEY_UPDATE:
                last = self._openers[self._epoch]
                assert isinstance(last, Tls13)
                self._openers[self._epoch + 1 :] = [last.updated()]
                self._turn(self._epoch + 1, 0)
        self._messages = self._messages[done:]
        if len(self._messages) > MESSAGE_MAX:
            self._messages = b""
