"""Secrets of a key log to the keys of records: the key schedules of TLS 1.2 and 1.3.

A key log is what browsers, OpenSSL and Java agents write for the variable SSLKEYLOGFILE: lines of a
label, the client random (or the session's id) and a secret, both in hexadecimal. The key schedule
of TLS 1.2 is RFC 5246 section 6.3, that of TLS 1.3 RFC 8446 section 7.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Iterator, Set

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from kdissect.tls.session import Session

Text = bytes | memoryview
# (label, what names the session) -> secret
Secrets = dict[tuple[str, bytes], bytes]

MASTER = "CLIENT_RANDOM"  # the master secret of TLS 1.2
SESSION = "SESSION"  # the master secret, by session id
HANDSHAKE_SECRETS = ("CLIENT_HANDSHAKE_TRAFFIC_SECRET", "SERVER_HANDSHAKE_TRAFFIC_SECRET")
TRAFFIC = ("CLIENT_TRAFFIC_SECRET_0", "SERVER_TRAFFIC_SECRET_0")
MASTER_SIZE = 48
_HASHES = {"sha256": hashes.SHA256(), "sha384": hashes.SHA384()}

_LINE = re.compile(
    rb"(?:^|(?<=\A\xef\xbb\xbf))[ \t]*"  # some editors begin a file with a mark of UTF-8
    rb"(?:(CLIENT_RANDOM|(?:CLIENT|SERVER)_(?:HANDSHAKE_)?TRAFFIC_SECRET(?:_0)?)"
    rb"[ \t]+([0-9a-fA-F]{64})[ \t]+((?:[0-9a-fA-F]{2}){32,64})"
    rb"|RSA[ \t]+Session-ID:((?:[0-9a-fA-F]{2}){0,32})[ \t]+Master-Key:([0-9a-fA-F]{96}))"
    rb"[ \t]*\r?$",
    re.MULTILINE,
)

_CONTENT = re.compile(rb"^[ \t]*[^ \t\r\n#]", re.MULTILINE)


def holds_secrets(text: Text) -> bool:
    """Return whether the bytes have at least one line of a key log."""
    return _LINE.search(text) is not None


def is_blank(text: Text) -> bool:
    """Return whether there are only comments and empty lines."""
    return _CONTENT.search(text) is None


def lines_of(texts: Iterable[Text], wanted: Set[bytes]) -> Iterator[re.Match[bytes]]:
    """Yield the lines of sessions in `wanted` (client randoms, session ids).

    texts are buffers of bytes. Lines of another form are passed over, as all readers of key logs
    do.
    """
    for text in texts:
        for line in _LINE.finditer(text):
            if bytes.fromhex((line[2] or line[4]).decode()) in wanted:
                yield line


def read_secrets(texts: Iterable[Text], wanted: Set[bytes]) -> Secrets:
    """The secrets of the sessions, from `lines_of`; the first line for a session counts."""
    secrets: Secrets = {}
    for line in lines_of(texts, wanted):
        label, random, secret, session, master = line.groups()
        if label is not None:
            name, key, value = label.decode(), random, secret
        else:
            name, key, value = SESSION, session, master
        at = name, bytes.fromhex(key.decode())
        secrets.setdefault(at, bytes.fromhex(value.decode()))
    return secrets


def prf(secret: bytes, label: bytes, seed: bytes, size: int, hash_name: str) -> bytes:
    """The pseudo-random function of TLS 1.2 (RFC 5246 section 5)."""
    seed = label + seed
    made = b""
    block = seed
    while len(made) < size:
        block = hmac.digest(secret, block, hash_name)
        made += hmac.digest(secret, block + seed, hash_name)
    return made[:size]


def expand_label(secret: bytes, label: bytes, size: int, hash_name: str) -> bytes:
    """HKDF-Expand-Label of TLS 1.3 with an empty context (RFC 8446 section 7.1)."""
    name = b"tls13 " + label
    info = size.to_bytes(2, "big") + bytes([len(name)]) + name + b"\0"
    return HKDFExpand(_HASHES[hash_name], size, info).derive(secret)


def master_secret(session: Session, secrets: Secrets) -> bytes | None:
    """The master secret of a TLS 1.2 session, or None if the key log does not have it."""
    known = secrets.get((MASTER, session.client_random))
    if known is None:
        known = secrets.get((SESSION, session.session_id))
    return known if known is not None and len(known) == MASTER_SIZE else None
