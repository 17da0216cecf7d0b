"""Decrypts TLS records: AEAD and CBC suites of TLS 1.2, AEAD suites of TLS 1.3.

An opener belongs to one direction and one set of keys. A record needs only its own bytes and its
number, so it can be decrypted if others are lost.
"""

from __future__ import annotations

import hmac
from abc import ABC, abstractmethod
from io import BytesIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESCCM, AESGCM, ChaCha20Poly1305

from kdissect.tls.cipher_suites import Suite
from kdissect.tls.key_log import expand_label, prf
from kdissect.tls.session import Session

IV_SIZE, _BLOCK = 12, 16
SALT_SIZE = 4  # of GCM and CCM in TLS 1.2; the other 8 bytes of the nonce are in the record
MAC_SIZES = {"sha1": 20, "sha256": 32, "sha384": 48}
Aead = AESGCM | AESCCM | ChaCha20Poly1305


class Opener(ABC):
    """overhead: bytes that a record's body is longer than its plaintext (CBC: at least).

    skipped: bytes of the body before the first byte of ciphertext.
    """

    overhead: int
    skipped = 0

    @abstractmethod
    def open(self, number: int, header: bytes, body: bytes) -> tuple[int, bytes] | None:
        """(content type, plaintext) of record `number`, or None if it is not authentic."""

    def hint(self, body: bytes) -> int:
        """The number that the record seems to have, or -1 if it has none in it."""
        return -1

    def updated(self) -> Opener:
        """The opener after a KeyUpdate (RFC 8446 section 7.2)."""
        return self


def _aead(suite: Suite, key: bytes) -> Aead:
    if suite.mode == "gcm":
        return AESGCM(key)
    if suite.mode == "ccm":
        return AESCCM(key, suite.tag_size)
    return ChaCha20Poly1305(key)


def _nonce(iv: bytes, number: int) -> bytes:
    return (int.from_bytes(iv, "big") ^ number).to_bytes(IV_SIZE, "big")


class Tls13(Opener):
    """RFC 8446 section 5.2: the type is the last byte that is not zero, after the content."""

    def __init__(self, suite: Suite, secret: bytes) -> None:
        key = expand_label(secret, b"key", suite.key_size, suite.hash_name)
        self._iv = expand_label(secret, b"iv", IV_SIZE, suite.hash_name)
        self._aead = _aead(suite, key)
        self._suite, self._secret = suite, secret
        self.overhead = suite.tag_size + 1

    def open(self, number: int, header: bytes, body: bytes) -> tuple[int, bytes] | None:
        if len(body) < self.overhead:
            return None
        try:
            inner = self._aead.decrypt(_nonce(self._iv, number), body, header)
        except InvalidTag:
            return None
        inner = inner.rstrip(b"\0")
        return (inner[-1], inner[:-1]) if inner else (0, b"")

    def updated(self) -> Tls13:
        size = len(self._secret)
        secret = expand_label(self._secret, b"traffic upd", size, self._suite.hash_name)
        return Tls13(self._suite, secret)


class Aead12(Opener):
    """RFC 5288 and 6655 (the record begins with 8 bytes of nonce), RFC 7905 (it does not)."""

    def __init__(self, suite: Suite, key: bytes, iv: bytes) -> None:
        self._aead = _aead(suite, key)
        self._iv = iv
        self.skipped = 0 if suite.mode == "chacha" else 8
        self.overhead = self.skipped + suite.tag_size

    def open(self, number: int, header: bytes, body: bytes) -> tuple[int, bytes] | None:
        size = len(body) - self.overhead
        if size < 0:
            return None
        nonce = self._iv + body[:8] if self.skipped else _nonce(self._iv, number)
        known = number.to_bytes(8, "big") + header[:3] + size.to_bytes(2, "big")
        try:
            return header[0], self._aead.decrypt(nonce, body[self.skipped :], known)
        except InvalidTag:
            return None

    def hint(self, body: bytes) -> int:
        """Most senders use the record's number as the nonce."""
        return int.from_bytes(body[:8], "big") if self.skipped else -1


class Cbc12(Opener):
    """RFC 5246 section 6.2.3.2, and RFC 7366 if both sides agreed on encrypt-then-MAC."""

    def __init__(self, suite: Suite, key: bytes, mac_key: bytes, is_encrypt_then_mac: bool) -> None:
        self._key, self._mac_key, self._mac = algorithms.AES(key), mac_key, suite.mac
        self._mac_size = MAC_SIZES[suite.mac]
        self._mac_last = is_encrypt_then_mac
        self.overhead = _BLOCK + self._mac_size + 1
        self.skipped = _BLOCK

    def open(self, number: int, header: bytes, body: bytes) -> tuple[int, bytes] | None:
        tag = b""
        if self._mac_last:
            body, tag = body[: -self._mac_size], body[-self._mac_size :]
            if not self._is_authentic(number, header, body, tag):
                return None
        if len(body) < 2 * _BLOCK or len(body) % _BLOCK:
            return None
        decryptor = Cipher(self._key, modes.CBC(body[:_BLOCK])).decryptor()
        plain = decryptor.update(body[_BLOCK:]) + decryptor.finalize()
        padding = plain[-1] + 1
        mac_size = 0 if self._mac_last else self._mac_size
        size = len(plain) - padding - mac_size
        if size < 0 or plain[-padding:] != plain[-1:] * padding:
            return None
        content = plain[:size]
        if not self._mac_last:
            if not self._is_authentic(number, header, content, plain[size : size + mac_size]):
                return None
        return header[0], content

    def _is_authentic(self, number: int, header: bytes, data: bytes, tag: bytes) -> bool:
        known = number.to_bytes(8, "big") + header[:3] + len(data).to_bytes(2, "big")
        return hmac.compare_digest(hmac.digest(self._mac_key, known + data, self._mac), tag)


def openers_12(suite: Suite, master: bytes, session: Session) -> tuple[Opener, Opener]:
    """Of the client's and of the server's records, from the key block (RFC 5246 section 6.3)."""
    mac_size = MAC_SIZES.get(suite.mac, 0)
    iv_size = {"chacha": IV_SIZE, "cbc": 0}.get(suite.mode, SALT_SIZE)
    sizes = (mac_size, mac_size, suite.key_size, suite.key_size, iv_size, iv_size)
    seed = session.server_random + session.client_random
    block = BytesIO(prf(master, b"key expansion", seed, sum(sizes), suite.hash_name))
    parts = [block.read(size) for size in sizes]
    client, server = (
        Cbc12(suite, key, mac_key, session.is_encrypt_then_mac)
        if suite.mode == "cbc"
        else Aead12(suite, key, iv)
        for mac_key, key, iv in (parts[0::2], parts[1::2])
    )
    return client, server
