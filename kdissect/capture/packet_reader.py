"""The reading position in a capture, which the steps of `pcap` and `pcapng` share.

A *cursor* is an int64 array with the position of the next record and all state that is needed to
read it. A step moves the cursor past one packet and fills a *packet*, another small int64 array.
Interfaces are rows of four int64 in a flat table; a pcap file has one row, so later code need not
distinguish the formats.

A step that needs more room returns ROOM_NEEDED without moving: the caller enlarges the table and
steps again.
"""

from __future__ import annotations

from typing import Any

from kdissect.jit import inlined, read_u16, read_u32

# Cursor fields.
POS, END = 0, 1  # of the next record; of the bytes that may be read
FORMAT, LITTLE = 2, 3  # PCAP, PCAPNG or MODIFIED_PCAP; 1 when the section is little-endian
SECTION_BASE, INTERFACE_COUNT = 4, 5  # first interface row of the section; rows so far
TIME = 6  # ns of the last packet, because a simple packet block has no time
SECRET_COUNT = 7  # rows in the table of secrets; -1: do not collect secrets
FAULT, NEEDED = 8, 9  # why the last step failed; for CUT, bytes that the record needs
OTHER_COUNT = 10  # records so far that are no packets but have a frame number in Wireshark
CURSOR_SIZE = 11

PCAP, PCAPNG, MODIFIED_PCAP = 0, 1, 2

# Packet fields.
DATA_POS, CAPTURED, LENGTH, TIME_NS, INTERFACE, RECORD_POS = range(6)
PACKET_SIZE = 6
NO_INTERFACE, BAD_BLOCK = -1, -2  # values of INTERFACE for a packet that cannot be dissected

# Interface fields.
LINK_TYPE, SNAP_LENGTH, RESOLUTION, TIME_OFFSET_S = range(4)
INTERFACE_SIZE = 4

# A row of the table of secrets: type, position and length of the bytes.
SECRET_SIZE = 3

# Outcomes of a step.
STEP_PACKET, STEP_END, STEP_CUT, STEP_BAD, STEP_ROOM_NEEDED = range(5)

# Values of FAULT.
FAULT_BLOCK_LENGTH, FAULT_TRAILER, FAULT_BYTE_ORDER, FAULT_FORMAT_VERSION, FAULT_INTERFACE = range(
    1, 6
)
FAULT_TEXT = {
    FAULT_BLOCK_LENGTH: "block length is impossible",
    FAULT_TRAILER: "the two lengths of a block differ",
    FAULT_BYTE_ORDER: "section header has no byte order mark",
    FAULT_FORMAT_VERSION: "section has an unknown format version",
    FAULT_INTERFACE: "interface block is too short",
}

SECOND_NS = 1_000_000_000
TIME_MAX, TIME_MIN = 2**63 - 1, -(2**63)
_SECONDS_MAX = 2**62 - 1  # beyond any clock; the sum of two still fits


@inlined
def word16(buf: Any, pos: Any, little: Any) -> Any:
    """The unsigned 16-bit integer at `pos`, in the section's byte order."""
    value = read_u16(buf, pos)
    return ((value & 0xFF) << 8) | (value >> 8) if little else value


@inlined
def word32(buf: Any, pos: Any, little: Any) -> Any:
    """The unsigned 32-bit integer at `pos`, in the section's byte order."""
    value = read_u32(buf, pos)
    if little:
        return (
            ((value & 0xFF) << 24)
            | ((value & 0xFF00) << 8)
            | ((value >> 8) & 0xFF00)
            | (value >> 24)
        )
    return value


@inlined
def signed64(buf: Any, pos: Any, little: Any) -> Any:
    """The signed 64-bit integer at `pos`, in the section's byte order."""
    first, second = word32(buf, pos, little), word32(buf, pos + 4, little)
    high, low = (second, first) if little else (first, second)
    if high >= 2**31:
        high -= 2**32
    return (high << 32) | low


@inlined
def to_ns(high: Any, low: Any, resolution: Any, offset_s: Any) -> Any:
    """Nanoseconds since 1970 of a 64-bit tick count, given as two 32-bit halves.

    `resolution` is pcapng's if_tsresol: ticks of 10**-n seconds, or of 2**-n if the top bit is set.
    All steps stay in signed 64 bits: seconds are capped at 2**62 - 1, the result at int64's range.
    """
    exponent = resolution & 0x7F
    seconds = 0
    fraction = 0
    if resolution & 0x80:
        if exponent < 32:
            if high >> min(30 + exponent, 32):
                seconds = _SECONDS_MAX
            else:
                seconds = (high << (32 - exponent)) | (low >> exponent)
            fraction = ((low & ((1 << exponent) - 1)) * SECOND_NS) >> exponent
        else:
            part = high
            if exponent < 64:
                seconds = high >> (exponent - 32)
                part = high & ((1 << (exponent - 32)) - 1)
            scaled = part * SECOND_NS + ((low * SECOND_NS) >> 32)
            fraction = scaled >> min(exponent - 32, 63)
    elif exponent <= 9:
        unit = 10**exponent
        rest = ((high % unit) << 32) + low
        if high // unit >= 2**30:
            seconds = _SECONDS_MAX
        else:
            seconds = ((high // unit) << 32) + rest // unit
        fraction = (rest % unit) * 10 ** (9 - exponent)
    elif exponent <= 36:  # with finer ticks a 64-bit count is less than a nanosecond
        if exponent <= 18:
            unit = 10 ** (exponent - 9)
            ns = ((high // unit) << 32) + (((high % unit) << 32) + low) // unit
        else:
            unit = 10**9
            ns = ((high // unit) << 32) + (((high % unit) << 32) + low) // unit
            ns //= 10 ** (exponent - 18)
        seconds = ns // SECOND_NS
        fraction = ns % SECOND_NS
    total_s = min(seconds, _SECONDS_MAX) + max(min(offset_s, _SECONDS_MAX), -_SECONDS_MAX)
    if total_s > TIME_MAX // SECOND_NS - 1:
        return TIME_MAX
    if total_s < TIME_MIN // SECOND_NS + 1:
        return TIME_MIN
    return total_s * SECOND_NS + fraction
