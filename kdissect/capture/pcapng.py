"""Writes pcapng: one section, an interface per link type, secrets first, packets with comments.

Source: IETF draft-ietf-opsawg-pcapng. Little-endian; times in nanoseconds (if_tsresol 9).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import BinaryIO

# Block types, option codes and the secrets type, by number as in the draft
_SECTION, _INTERFACE, _PACKET, _SECRETS = 0x0A0D0D0A, 1, 6, 10
_BYTE_ORDER_MARK = 0x1A2B3C4D
_COMMENT, _APPLICATION, _NAME, _RESOLUTION = 1, 4, 2, 9
_TLS_KEY_LOG = 0x544C534B
_OPTION_SIZE_MAX = 65535
_TIME_MAX = 2**64 - 1


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _text(text: str) -> bytes:
    """Encode an option's text as UTF-8, cut to 65535 bytes between two characters."""
    data = text.encode("utf-8", "replace")[:_OPTION_SIZE_MAX]
    return data.decode("utf-8", "ignore").encode()


def _options(options: Iterable[tuple[int, bytes]]) -> bytes:
    parts = [struct.pack("<HH", code, len(value)) + _padded(value) for code, value in options]
    return b"".join([*parts, bytes(4)]) if parts else b""


def _block(kind: int, body: bytes) -> bytes:
    size = struct.pack("<I", len(body) + 12)
    return b"".join((struct.pack("<I", kind), size, body, size))


class PcapngWriter:
    """Writes to a binary stream; `secrets` must come before the packets that they decrypt."""

    def __init__(self, out: BinaryIO, application: str, comment: str = "") -> None:
        self._out = out
        self._interfaces: dict[int, int] = {}
        options = [(_APPLICATION, _text(application))]
        if comment:
            options.insert(0, (_COMMENT, _text(comment)))
        header = struct.pack("<IHHq", _BYTE_ORDER_MARK, 1, 0, -1)
        out.write(_block(_SECTION, header + _options(options)))

    def secrets(self, key_log: bytes) -> None:
        """Write lines of a TLS key log (SSLKEYLOGFILE format), for the packets that follow."""
        body = struct.pack("<II", _TLS_KEY_LOG, len(key_log)) + _padded(key_log)
        self._out.write(_block(_SECRETS, body))

    def packet(
        self, link_type: int, time_ns: int, data: bytes, length: int, comment: str = ""
    ) -> None:
        """Write a packet that had `length` bytes on the wire; `data` are its captured bytes."""
        interface = self._interfaces.get(link_type)
        if interface is None:
            interface = self._interfaces[link_type] = len(self._interfaces)
            name = f"link type {link_type}".encode()
            options = _options([(_NAME, name), (_RESOLUTION, b"\x09")])
            self._out.write(_block(_INTERFACE, struct.pack("<HHI", link_type, 0, 0) + options))
        ticks = min(max(time_ns, 0), _TIME_MAX)
        head = struct.pack(
            "<IIIII", interface, ticks >> 32, ticks & 0xFFFFFFFF, len(data), max(length, len(data))
        )
        options = _options([(_COMMENT, _text(comment))]) if comment else b""
        self._out.write(_block(_PACKET, head + _padded(data) + options))
