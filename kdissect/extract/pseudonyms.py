"""Pseudonyms: replaces names of people and places, each always by the same other name.

A text has one pseudonym wherever it occurs and whatever it names there: a topic in a request, in a
subscription and in a setting. Pseudonyms are numbered in the order of appearance, so they stay
readable. Keys and values of records become noise of the same length, derived from a random key that
this process never writes out.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from ipaddress import ip_address
from uuid import UUID

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_NO_ID = UUID(int=0)
_FIRST_IPV4, _FIRST_IPV6 = ip_address("10.0.0.1"), ip_address("fd00::1")


class Pseudonyms:
    """The pseudonyms of one run."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def name(self, kind: str, text: str) -> str:
        """Return `kind` and a number; the empty text stays empty."""
        if not text:
            return text
        pseudonym = self._names.get(text)
        if pseudonym is None:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            pseudonym = self._names[text] = f"{kind}-{number}"
        return pseudonym

    def address(self, text: str) -> str:
        """Return another IP address of the same version, counted from 10.0.0.1 or fd00::1."""
        pseudonym = self._names.get(text)
        if pseudonym is None:
            version = ip_address(text).version
            number = self._counts[f"v{version}"] = self._counts.get(f"v{version}", -1) + 1
            first = _FIRST_IPV4 if version == 4 else _FIRST_IPV6
            pseudonym = self._names[text] = str(first + number)
        return pseudonym

    def host(self, text: str) -> str:
        """Replace an address or a host name; a leading slash (Java's notation of addresses)
        stays."""
        slash, plain = ("/", text[1:]) if text.startswith("/") else ("", text)
        try:
            canonical = str(ip_address(plain))
        except ValueError:
            return slash + self.name("host", plain)
        return slash + self.address(canonical)

    def value(self, text: str) -> str:
        """Replace a setting's value, but keep numbers and booleans: they identify no host."""
        if _NUMBER.fullmatch(text) or text in ("true", "false", ""):
            return text
        return self.name("value", text)

    def uuid(self, value: UUID) -> UUID:
        """Replace an id; the zero id stays."""
        return value if value == _NO_ID else UUID(bytes=self._noise(value.bytes, 16))

    def data(self, data: bytes) -> bytes:
        """Return hexadecimal digits, as many as `data` has bytes; equal data give equal digits."""
        return self._noise(data, len(data) // 2 + 1).hex().encode()[: len(data)]

    def _noise(self, data: bytes, size: int) -> bytes:
        return hashlib.shake_256(self._key + data).digest(size)
