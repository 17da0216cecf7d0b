"""Parses the readable part of a TLS handshake: versions, names, cipher suite, certificates.

RFC 5246 section 7.4, RFC 8446 section 4, RFC 6066 (server name). Every length is compared with the
bytes that are left; an invalid message gives None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CLIENT_HELLO, SERVER_HELLO, CERTIFICATE, FINISHED, KEY_UPDATE = 1, 2, 11, 20, 24
TLS_12, TLS_13 = 0x0303, 0x0304
MESSAGE_MAX = 1 << 16  # bytes of a handshake message, and of a direction's handshake, looked at
RANDOM_SIZE = 32

_SERVER_NAME, _ENCRYPT_THEN_MAC, _VERSIONS = 0, 22, 43
_VERSION_NAMES = dict(enumerate(("SSLv3", "TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"), 0x0300))

# The random of a ServerHello that asks for another ClientHello (RFC 8446 section 4.1.3).
RETRY_RANDOM = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")


@dataclass(frozen=True, slots=True)
class ClientHello:
    random: bytes
    server_name: str | None


@dataclass(frozen=True, slots=True)
class ServerHello:
    random: bytes
    session_id: bytes
    version: int
    suite: int
    is_encrypt_then_mac: bool

    @property
    def is_retry(self) -> bool:
        return self.random == RETRY_RANDOM


@dataclass(frozen=True, slots=True)
class Certificate:
    """An X.509 certificate; None for a field that is invalid.

    subject, issuer: RFC 4514 text. not_before, not_after: seconds since 1970.
    names: the common names and alternative names of the subject.
    """

    subject: str | None = None
    issuer: str | None = None
    not_before: int | None = None
    not_after: int | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TlsFacts:
    """Facts from a connection's TLS handshake; None if the handshake lacks them.

    broker_certificate, client_certificate: the sender's own, without the rest of its chain.
    request_alert, response_alert: by which the client or the broker ended the handshake.
    secret_names: values under which a key log may list the session's secrets.
    """

    version: str | None = None
    sni: str | None = None
    cipher: str | None = None
    broker_certificate: Certificate | None = None
    client_certificate: Certificate | None = None
    request_alert: str | None = None
    response_alert: str | None = None
    secret_names: frozenset[bytes] = frozenset()


class _Short(Exception):
    """A length announces more bytes than there are."""


class _HandshakeReader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.pos = 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.pos:
            raise _Short
        self.pos += count
        return self.data[self.pos - count : self.pos]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> _HandshakeReader:
        """The bytes after a length field of `size` bytes."""
        return _HandshakeReader(self.take(self.number(size)))

    def rest(self) -> bytes:
        return self.take(len(self.data) - self.pos)

    @property
    def is_done(self) -> bool:
        return self.pos >= len(self.data)


def version_name(version: int) -> str:
    return _VERSION_NAMES.get(version, f"0x{version:04X}")


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(type, end in data, body) of each whole message in the joined bodies of handshake records."""
    pos = 0
    while len(data) - pos >= 4:
        end = pos + 4 + int.from_bytes(data[pos + 1 : pos + 4], "big")
        if end > len(data):
            return
        yield data[pos], end, data[pos + 4 : end]
        pos = end


def _extensions(reader: _HandshakeReader) -> dict[int, bytes]:
    extensions: dict[int, bytes] = {}
    if reader.is_done:
        return extensions
    block = reader.vector(2)
    while not block.is_done:
        kind = block.number(2)
        extensions.setdefault(kind, block.vector(2).rest())
    return extensions


def client_hello(body: bytes) -> ClientHello | None:
    reader = _HandshakeReader(body)
    try:
        reader.take(2)  # version
        random = reader.take(RANDOM_SIZE)
        for size in (1, 2, 1):  # session id, cipher suites, compressions
            reader.vector(size)
        extensions = _extensions(reader)
    except _Short:
        return None
    return ClientHello(random, _server_name(extensions))


def _server_name(extensions: dict[int, bytes]) -> str | None:
    try:
        listed = _HandshakeReader(extensions.get(_SERVER_NAME, b"")).vector(2)
        while not listed.is_done:
            kind = listed.number(1)
            name = listed.vector(2).rest()
            if kind == 0:
                return name.decode("ascii", "replace")
    except _Short:
        pass
    return None


def server_hello(body: bytes) -> ServerHello | None:
    reader = _HandshakeReader(body)
    try:
        version = reader.number(2)
        random = reader.take(RANDOM_SIZE)
        session_id = reader.vector(1).rest()
        suite = reader.number(2)
        reader.number(1)
        extensions = _extensions(reader)
    except _Short:
        return None
    chosen = extensions.get(_VERSIONS, b"")
    if len(chosen) == 2:
        version = int.from_bytes(chosen, "big")
    return ServerHello(random, session_id, version, suite, _ENCRYPT_THEN_MAC in extensions)


def certificate(body: bytes, version: int) -> bytes | None:
    """DER of the first certificate, the sender's own, of a Certificate message."""
    reader = _HandshakeReader(body)
    try:
        if version == TLS_13:
            reader.vector(1)
        return reader.vector(3).vector(3).rest() or None
    except _Short:
        return None
