"""What tells SASL tokens, as plain Python: the definitions of `sasl_evidence.py`."""

from __future__ import annotations

import re

from kdissect.kafka.sasl_detection import MECHANISM_MAX, MECHANISMS_MAX, TOKEN_BYTES_READ
from kdissect.tcp.pieces_reference import PlainStream

MECHANISM = re.compile(rb"[A-Z0-9_-]{1,%d}" % MECHANISM_MAX)


def end_of_mechanism(stream: PlainStream, pos: int, end: int) -> int | None:
    length = stream.number(pos, 2)
    if length is None or pos + 2 + length > end:
        return None
    name = stream.bytes_at(pos + 2, length)
    return pos + 2 + length if name and MECHANISM.fullmatch(name) else None


def is_mechanisms(stream: PlainStream, pos: int, size: int) -> bool:
    count = stream.number(pos + 10, 4)
    if stream.number(pos + 8, 2) not in (0, 33, 34) or count is None:
        return False
    at = pos + 14
    for _ in range(count if 0 < count <= MECHANISMS_MAX else 0):
        end = end_of_mechanism(stream, at, pos + 4 + size)
        if end is None:
            return False
        at = end
    return 0 < count <= MECHANISMS_MAX and at == pos + 4 + size


def is_gss(start: bytes, size: int) -> bool:
    if start[0] == 0x60:
        if start[1] < 128:
            return start[1] == size - 2 and start[2] == 6
        if start[1] == 0x81:
            return start[2] == size - 3 and start[3] == 6
        return start[1] == 0x82 and int.from_bytes(start[2:], "big") == size - 4
    return start[:2] == b"\5\4" and start[2] < 8 and start[3] == 255


def is_said(stream: PlainStream, pos: int, size: int) -> bool:
    said = stream.bytes_at(pos + 4, min(size, TOKEN_BYTES_READ))
    return said is not None and all((at >= 32 or at == 1) and at != 127 for at in said)


def is_client_token(stream: PlainStream, pos: int, size: int) -> bool:
    if size == 1:
        return stream.byte(pos + 4) == 1
    start = stream.bytes_at(pos + 4, 4)
    if size < 4 or start is None:
        return False
    if is_gss(start, size):
        return True
    if start[:2] in (b"n,", b"y,", b"p=", b"c="):
        return is_said(stream, pos, size)
    said = stream.bytes_at(pos + 4, size) if size <= TOKEN_BYTES_READ else None
    if said is None or any(0 < byte < 32 or byte == 127 for byte in said):
        return False
    parts = said.split(b"\0")
    return len(parts) == 3 and parts[1] != b"" and parts[2] != b""


def is_broker_token(stream: PlainStream, pos: int, size: int) -> bool:
    start = stream.bytes_at(pos + 4, 4)
    if size < 4 or start is None:
        return False
    says = start[:2] in (b"r=", b"v=", b"e=") or start[:1] == b"{"
    return is_gss(start, size) or (says and is_said(stream, pos, size))
