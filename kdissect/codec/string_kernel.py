"""Copies strings, bytes and uuids from places in a buffer into Arrow's layout.

Invalid UTF-8 becomes U+FFFD, one for each maximal part of a sequence, as Python's
``bytes.decode("utf-8", "replace")`` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdissect.jit import copy_bytes, inlined, kernel, read_i64, read_u8, store_8

_HIGH_BITS = -0x7F7F7F7F7F7F7F80  # 0x80 in each of eight bytes, as int64
_LENGTH_MASK = 0x7FFFFFFF
_BASE64 = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", np.uint8
)
UUID_TEXT_SIZE = 22


@inlined
def utf8_step(buf: Any, pos: int, limit: int) -> Any:
    """(bytes, is valid) of the next character, or of the bytes that one U+FFFD replaces."""
    lead = read_u8(buf, pos)
    if lead < 0x80:
        return 1, True
    # RFC 3629, 4: the second byte of E0, ED, F0 and F4 has a narrower range
    low = 0x80
    high = 0xBF
    more = 0
    if lead >= 0xC2 and lead <= 0xDF:
        more = 1
    elif lead >= 0xE0 and lead <= 0xEF:
        more = 2
        if lead == 0xE0:
            low = 0xA0
        elif lead == 0xED:
            high = 0x9F
    elif lead >= 0xF0 and lead <= 0xF4:
        more = 3
        if lead == 0xF0:
            low = 0x90
        elif lead == 0xF4:
            high = 0x8F
    if more == 0:
        return 1, False
    for k in range(1, more + 1):
        if pos + k >= limit:
            return k, False
        byte = read_u8(buf, pos + k)
        if byte < low or byte > high:
            return k, False
        low = 0x80
        high = 0xBF
    return more + 1, True


@kernel
def text_offsets(packed: Any, valid: Any, offsets: Any) -> int:
    """Write int32 offsets[n + 1] of n packed places (start << 31 | length); returns their sum.

    The sum is below 2**31, because the caller limits the bytes of all frames.
    """
    total = 0
    for row in range(packed.shape[0]):
        offsets[row] = total
        if valid[row]:
            total += packed[row] & _LENGTH_MASK
    offsets[packed.shape[0]] = total
    return total


@kernel
def text_copy(
    buf: Any, buf_at: int, packed: Any, valid: Any, offsets: Any, out_at: int, check: int,
    invalid: Any,
) -> int:  # fmt: skip
    """Copy the bytes to `out_at`; returns the number of texts that are no UTF-8.

    check: test for UTF-8 and set invalid[row]. buf_at: address of buf.
    """
    wrong = 0
    for row in range(packed.shape[0]):
        if not valid[row]:
            continue
        pos = packed[row] >> 31
        size = packed[row] & _LENGTH_MASK
        limit = pos + size
        copy_bytes(out_at + np.int64(offsets[row]), buf_at + pos, size)
        if not check:
            continue
        seen = np.int64(0)
        at = pos
        while at + 8 <= limit:
            seen |= read_i64(buf, at)
            at += 8
        tail = np.int64(0)
        while at < limit:
            tail |= read_u8(buf, at)
            at += 1
        if (seen & _HIGH_BITS) == 0 and tail < 128:
            continue
        at = pos
        good = True
        while at < limit and good:
            step, good = utf8_step(buf, at, limit)
            at += step
        if not good:
            invalid[row] = 1
            wrong += 1
    return wrong


@kernel
def repaired_offsets(buf: Any, packed: Any, valid: Any, offsets: Any) -> int:
    """Like `text_offsets`, for the repaired texts; -1 if they exceed 2**31 - 1 bytes."""
    total = 0
    for row in range(packed.shape[0]):
        offsets[row] = total
        if valid[row]:
            at = packed[row] >> 31
            limit = at + (packed[row] & _LENGTH_MASK)
            while at < limit:
                step, good = utf8_step(buf, at, limit)
                total += step if good else 3
                at += step
        if total > _LENGTH_MASK:
            return -1
    offsets[packed.shape[0]] = total
    return total


@kernel
def repaired_copy(buf: Any, buf_at: int, packed: Any, valid: Any, out_at: int) -> None:
    """Copy the texts to `out_at`, with U+FFFD in place of invalid UTF-8."""
    for row in range(packed.shape[0]):
        if not valid[row]:
            continue
        at = packed[row] >> 31
        limit = at + (packed[row] & _LENGTH_MASK)
        while at < limit:
            step, good = utf8_step(buf, at, limit)
            if good:
                copy_bytes(out_at, buf_at + at, step)
                out_at += step
            else:
                store_8(out_at, 0xEF)
                store_8(out_at + 1, 0xBF)
                store_8(out_at + 2, 0xBD)
                out_at += 3
            at += step


@kernel
def uuid_texts(buf: Any, place: Any, valid: Any, offsets: Any, out: Any) -> int:
    """Write the 22 characters of the uuid at each place (-1: zero uuid); returns their total.

    offsets: int32[n + 1]. out: uint8[22 * n].
    """
    total = 0
    for row in range(place.shape[0]):
        offsets[row] = total
        if not valid[row]:
            continue
        at = place[row]
        for group in range(6):
            bits = 0
            for k in range(3):
                bits <<= 8
                if at >= 0 and 3 * group + k < 16:
                    bits |= read_u8(buf, at + 3 * group + k)
            for k in range(4):
                if 4 * group + k < UUID_TEXT_SIZE:
                    out[total + 4 * group + k] = _BASE64[(bits >> (18 - 6 * k)) & 63]
        total += UUID_TEXT_SIZE
    offsets[place.shape[0]] = total
    return total
