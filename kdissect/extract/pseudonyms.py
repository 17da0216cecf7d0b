"""Pseudonyms: other names for what a capture tells of people and places, the same every time.

A text that was seen keeps its pseudonym wherever it comes again, whatever it names there: a topic
in a request, in a subscription and in a config. Numbers count up in the order of appearance, so
that names stay readable; what is not a name (keys, values) becomes noise of the same length, made
with a key that exists in this process only.
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
    """The mapping of one run."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def name(self, kind: str, text: str) -> str:
        """`kind` and a number; the empty text stays empty."""
        if not text:
            return text
        found = self._names.get(text)
        if found is None:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            found = self._names[text] = f"{kind}-{number}"
        return found

    def address(self, text: str) -> str:
        """Another IP address of the same version: 10.0.0.1 and on, fd00::1 and on."""
        found = self._names.get(text)
        if found is None:
            version = ip_address(text).version
            number = self._counts[f"v{version}"] = self._counts.get(f"v{version}", -1) + 1
            first = _FIRST_IPV4 if version == 4 else _FIRST_IPV6
            found = self._names[text] = str(first + number)
        return found

    def host(self, text: str) -> str:
        """An address or a host's name; a leading slash (Java's way to write one) stays."""
        slash, plain = ("/", text[1:]) if text.startswith("/") else ("", text)
        try:
            canonical = str(ip_address(plain))
        except ValueError:
            return slash + self.name("host", plain)
        return slash + self.address(canonical)

    def value(self, text: str) -> str:
        """A setting: numbers and booleans stay, they name nobody."""
        if _NUMBER.fullmatch(text) or text in ("true", "false", ""):
            return text
        return self.name("value", text)

    def uuid(self, value: UUID) -> UUID:
        """Another id; the zero id stays."""
        return value if value == _NO_ID else UUID(bytes=self._noise(value.bytes, 16))

    def data(self, data: bytes) -> bytes:
        """As many bytes of hexadecimal digits; equal data give equal ones."""
        return self._noise(data, len(data) // 2 + 1).hex().encode()[: len(data)]

    def _noise(self, data: bytes, size: int) -> bytes:
        return hashlib.shake_256(self._key + data).digest(size)
