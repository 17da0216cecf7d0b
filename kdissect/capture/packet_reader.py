"""Reads the packets of a capture, pcap or pcapng, one step at a time.

Sources: IETF draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng.

- pcap: a file header, then 16 bytes before each packet. The two magic numbers (microseconds,
  nanoseconds) are written in the writer's byte order, from which readers learn it.
- pcapng: blocks with their length at both ends, in sections of one byte order. Packets are in
  enhanced, simple and (obsolete) packet blocks. Interface blocks describe how to read them. Blocks
  of other types are skipped by their length. Wireshark numbers some of those as frames (NUMBERED),
  so they are counted.

A CURSOR has the position of the next record and all state that is needed to read it. A step moves
the cursor past one packet and fills a PACKET. Interfaces are rows of a table; a pcap file has one
row, so later code need not distinguish the formats.

A step that needs more room returns ROOM_NEEDED without moving: the caller enlarges the table and
steps again.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kdissect.jit import inlined, read_u8, read_u16, read_u32

CURSOR = np.dtype(
    [
        ("pos", "i8"),  # of the next record
        ("end", "i8"),  # of the bytes that may be read
        ("format", "i8"),  # PCAP or PCAPNG
        ("little", "i8"),  # 1 when the section is little-endian
        ("section_base", "i8"),  # first interface row of the section
        ("interface_count", "i8"),  # rows so far
        ("time_ns", "i8"),  # of the last packet, because a simple packet block has no time
        ("secret_count", "i8"),  # rows in the table of secrets; -1: do not collect secrets
        ("fault", "i8"),  # why the last step failed
        ("needed", "i8"),  # after CUT: bytes that the record needs
        ("other_count", "i8"),  # records so far that only Wireshark numbers as frames
    ]
)
PCAP, PCAPNG = 0, 1

PACKET = np.dtype(
    [(name, "i8") for name in ("data_pos", "captured", "length", "time_ns", "interface",
                               "record_pos")]
)  # fmt: skip
NO_INTERFACE, BAD_BLOCK = -1, -2  # values of `interface` for a packet that cannot be dissected

INTERFACE = np.dtype(
    [(name, "i8") for name in ("link_type", "snap_length", "resolution", "time_offset_s")]
)
SECRET = np.dtype([("kind", "i8"), ("pos", "i8"), ("size", "i8")])  # of the bytes of a key log

# Outcomes of a step.
STEP_PACKET, STEP_END, STEP_CUT, STEP_BAD, STEP_ROOM_NEEDED = range(5)

# Values of `fault`.
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
_SECOND, _HALF, _LOW = np.uint64(SECOND_NS), np.uint64(32), np.uint64(0xFFFFFFFF)
_POWERS = np.array([10**exponent for exponent in range(20)], np.uint64)

FILE_HEADER_SIZE, RECORD_HEADER_SIZE = 24, 16

# First four bytes -> (byte order, decimal digits of a second's fraction).
MAGICS: dict[bytes, tuple[Literal["big", "little"], int]] = {
    b"\xa1\xb2\xc3\xd4": ("big", 6),
    b"\xd4\xc3\xb2\xa1": ("little", 6),
    b"\xa1\xb2\x3c\x4d": ("big", 9),
    b"\x4d\x3c\xb2\xa1": ("little", 9),
}

SECTION_MAGIC = b"\x0a\x0d\x0d\x0a"
SECTION_HEADER = 0x0A0D0D0A  # reads the same in both byte orders
INTERFACE_BLOCK, OLD_PACKET_BLOCK, SIMPLE_BLOCK, ENHANCED_BLOCK, SECRETS_BLOCK = 1, 2, 3, 6, 10
# Systemd journal entries, custom blocks (to be copied or not), Sysdig events (three versions).
JOURNAL_BLOCK, CUSTOM_BLOCK, PRIVATE_BLOCK = 9, 0x00000BAD, 0x40000BAD
SYSDIG_EVENT, SYSDIG_EVENT_2, SYSDIG_EVENT_2_LARGE = 0x204, 0x216, 0x221
NUMBERED = (
    JOURNAL_BLOCK, CUSTOM_BLOCK, PRIVATE_BLOCK, SYSDIG_EVENT, SYSDIG_EVENT_2, SYSDIG_EVENT_2_LARGE,
)  # fmt: skip
BYTE_ORDER_MARK, BYTE_ORDER_MARK_SWAPPED = 0x1A2B3C4D, 0x4D3C2B1A
BLOCK_SIZE_MIN = 12  # type, length, length again
OPTION_END, OPTION_RESOLUTION, OPTION_TIME_OFFSET = 0, 9, 14
DEFAULT_RESOLUTION = 6


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
    Seconds are capped at 2**62 - 1, the result at int64's range.
    """
    exponent = resolution & 0x7F
    ticks = np.uint64(high) << np.uint64(32) | np.uint64(low)
    ns = ticks
    seconds = np.uint64(0)
    if resolution & 0x80:
        shift = np.uint64(exponent)
        if exponent < 64:
            seconds = ticks >> shift
            ns = ticks & ((np.uint64(1) << shift) - np.uint64(1))
        if exponent <= 32:
            ns = ns * _SECOND >> shift
        else:
            ns = (ns >> _HALF) * _SECOND + ((ns & _LOW) * _SECOND >> _HALF)
            ns = ns >> min(shift - _HALF, np.uint64(63))
    elif exponent <= 9:
        seconds = ticks // _POWERS[exponent]
        ns = ticks % _POWERS[exponent] * _POWERS[9 - exponent]
    elif exponent <= 28:
        seconds = ticks // _POWERS[exponent - 9] // _SECOND
        ns = ticks // _POWERS[exponent - 9] % _SECOND
    else:  # with finer ticks a 64-bit count is less than a nanosecond
        ns = np.uint64(0)
    total_s = np.int64(min(seconds, np.uint64(_SECONDS_MAX)))
    total_s += max(min(offset_s, _SECONDS_MAX), -_SECONDS_MAX)
    if total_s > TIME_MAX // SECOND_NS - 1:
        return TIME_MAX
    if total_s < TIME_MIN // SECOND_NS + 1:
        return TIME_MIN
    return total_s * SECOND_NS + np.int64(ns)


@inlined
def _pcap_step(buf: Any, cursor: Any, interfaces: Any, packet: Any) -> Any:
    """Read one record at the cursor and move past it; returns the outcome."""
    pos = cursor["pos"]
    left = cursor["end"] - pos
    if left == 0:
        return STEP_END
    if left < RECORD_HEADER_SIZE:
        cursor["needed"] = RECORD_HEADER_SIZE
        return STEP_CUT
    little = cursor["little"]
    # draft-ietf-opsawg-pcap, 5: seconds, fraction, captured length, original length
    captured = word32(buf, pos + 8, little)
    if captured > left - RECORD_HEADER_SIZE:
        cursor["needed"] = RECORD_HEADER_SIZE + captured
        return STEP_CUT
    scale = 1 if interfaces["resolution"][0] == 9 else 1000
    time_ns = word32(buf, pos, little) * SECOND_NS + word32(buf, pos + 4, little) * scale
    packet["record_pos"] = pos
    packet["data_pos"] = pos + RECORD_HEADER_SIZE
    packet["captured"] = captured
    packet["length"] = word32(buf, pos + 12, little)
    packet["time_ns"] = time_ns
    packet["interface"] = 0
    cursor["time_ns"] = time_ns
    cursor["pos"] = pos + RECORD_HEADER_SIZE + captured
    return STEP_PACKET


@inlined
def add_interface(buf: Any, pos: Any, end: Any, little: Any, interfaces: Any, row: Any) -> Any:
    """Read an interface block's body and options, buf[pos:end], into a row of the table."""
    interfaces["link_type"][row] = word16(buf, pos, little)
    interfaces["snap_length"][row] = word32(buf, pos + 4, little)
    interfaces["resolution"][row] = DEFAULT_RESOLUTION
    interfaces["time_offset_s"][row] = 0
    option = pos + 8
    # draft-ietf-opsawg-pcapng, 3.5: options of code, length and value, padded to 4 bytes
    while option + 4 <= end:
        code = word16(buf, option, little)
        size = word16(buf, option + 2, little)
        value = option + 4
        if code == OPTION_END or value + size > end:
            break
        if code == OPTION_RESOLUTION and size >= 1:
            interfaces["resolution"][row] = read_u8(buf, value)
        elif code == OPTION_TIME_OFFSET and size >= 8:
            interfaces["time_offset_s"][row] = signed64(buf, value, little)
        option = value + ((size + 3) & ~3)


@inlined
def read_packet_block(
    buf: Any, pos: Any, kind: Any, room: Any, cursor: Any, interfaces: Any, packet: Any
) -> Any:
    """Fill `packet` from the packet block at `pos` with a body of `room` bytes.

    Of a faulty block, INTERFACE is BAD_BLOCK or NO_INTERFACE.
    """
    little = cursor["little"]
    interface_count = cursor["interface_count"] - cursor["section_base"]
    packet["record_pos"] = pos
    packet["data_pos"] = pos + 8
    packet["captured"] = 0
    packet["length"] = 0
    packet["time_ns"] = cursor["time_ns"]
    packet["interface"] = BAD_BLOCK
    fixed = 4 if kind == SIMPLE_BLOCK else 20
    if room < fixed:
        return
    if kind == SIMPLE_BLOCK:
        # draft-ietf-opsawg-pcapng, 4.4: a simple block has the original length only and belongs to
        # interface 0; the snap length limits the captured bytes.
        length = word32(buf, pos + 8, little)
        interface = 0
        captured = min(length, room - fixed)
        if interface_count > 0:
            snap_length = interfaces["snap_length"][cursor["section_base"]]
            if snap_length > 0:
                captured = min(captured, snap_length)
    else:
        narrow = kind == OLD_PACKET_BLOCK  # its interface has 16 bits, followed by a count of drops
        interface = word16(buf, pos + 8, little) if narrow else word32(buf, pos + 8, little)
        captured = word32(buf, pos + 20, little)
        length = word32(buf, pos + 24, little)
        if captured > room - fixed:
            return
    packet["data_pos"] = pos + 8 + fixed
    packet["captured"] = captured
    packet["length"] = length
    if interface >= interface_count:
        packet["interface"] = NO_INTERFACE
        return
    row = cursor["section_base"] + interface
    packet["interface"] = row
    if kind != SIMPLE_BLOCK:
        packet["time_ns"] = to_ns(
            word32(buf, pos + 12, little),
            word32(buf, pos + 16, little),
            interfaces["resolution"][row],
            interfaces["time_offset_s"][row],
        )
        cursor["time_ns"] = packet["time_ns"]


@inlined
def add_secrets(buf: Any, pos: Any, room: Any, cursor: Any, secrets: Any) -> Any:
    """Record where the bytes of a decryption secrets block lie, unless its length is wrong."""
    if room < 8:
        return
    size = word32(buf, pos + 12, cursor["little"])
    if size > room - 8:
        return
    row = cursor["secret_count"]
    secrets["kind"][row] = word32(buf, pos + 8, cursor["little"])
    secrets["pos"][row] = pos + 16
    secrets["size"][row] = size
    cursor["secret_count"] += 1


@inlined
def _pcapng_step(buf: Any, cursor: Any, interfaces: Any, secrets: Any, packet: Any) -> Any:
    """Read blocks from the cursor up to and including the next packet; returns the outcome."""
    while True:
        pos = cursor["pos"]
        left = cursor["end"] - pos
        if left == 0:
            return STEP_END
        if left < BLOCK_SIZE_MIN:
            cursor["needed"] = BLOCK_SIZE_MIN
            return STEP_CUT
        # draft-ietf-opsawg-pcapng, 4.1: a section header gives the byte order of its section
        if read_u32(buf, pos) == SECTION_HEADER:
            mark = read_u32(buf, pos + 8)
            if mark not in (BYTE_ORDER_MARK, BYTE_ORDER_MARK_SWAPPED):
                cursor["fault"] = FAULT_BYTE_ORDER
                return STEP_BAD
            cursor["little"] = np.int64(mark == BYTE_ORDER_MARK_SWAPPED)
        little = cursor["little"]
        kind = word32(buf, pos, little)
        total = word32(buf, pos + 4, little)
        if total < BLOCK_SIZE_MIN:
            cursor["fault"] = FAULT_BLOCK_LENGTH
            return STEP_BAD
        size = (total + 3) & ~3  # some writers do not count the padding
        if size > left:
            cursor["needed"] = size
            return STEP_CUT
        if word32(buf, pos + size - 4, little) != total:
            cursor["fault"] = FAULT_TRAILER
            return STEP_BAD
        room = size - BLOCK_SIZE_MIN
        if kind in (ENHANCED_BLOCK, SIMPLE_BLOCK, OLD_PACKET_BLOCK):
            read_packet_block(buf, pos, kind, room, cursor, interfaces, packet)
            cursor["pos"] = pos + size
            return STEP_PACKET
        if kind == SECTION_HEADER:
            if room < 16:
                cursor["fault"] = FAULT_BLOCK_LENGTH
                return STEP_BAD
            if word16(buf, pos + 12, little) != 1:
                cursor["fault"] = FAULT_FORMAT_VERSION
                return STEP_BAD
            cursor["section_base"] = cursor["interface_count"]
        elif kind == INTERFACE_BLOCK:
            if room < 8:
                cursor["fault"] = FAULT_INTERFACE
                return STEP_BAD
            row = cursor["interface_count"]
            if row == len(interfaces):
                return STEP_ROOM_NEEDED
            add_interface(buf, pos + 8, pos + size - 4, little, interfaces, row)
            cursor["interface_count"] = row + 1
        elif kind == SECRETS_BLOCK and cursor["secret_count"] >= 0:
            if cursor["secret_count"] == len(secrets):
                return STEP_ROOM_NEEDED
            add_secrets(buf, pos, room, cursor, secrets)
        elif kind in NUMBERED:
            cursor["other_count"] += 1
        cursor["pos"] = pos + size


def opened(data: npt.NDArray[np.uint8]) -> tuple[np.void, npt.NDArray[np.void]]:
    """(cursor at the first record, table of interfaces). `data` begins with a magic number.

    A pcap has one interface. Callers enlarge the table of a pcapng, which is empty. A pcap that
    ends inside its header has no packets: the cursor is at its end.
    """
    cursor = np.zeros(1, CURSOR)[0]
    header = data[:FILE_HEADER_SIZE].tobytes()
    cursor["end"] = len(data)
    if header[:4] == SECTION_MAGIC:
        cursor["format"] = PCAPNG
        return cursor, np.zeros(8, INTERFACE)
    order, digits = MAGICS[header[:4]]
    cursor["pos"] = min(FILE_HEADER_SIZE, len(data))
    cursor["format"], cursor["little"], cursor["interface_count"] = PCAP, order == "little", 1
    snap_length = int.from_bytes(header[16:20], order)
    # draft-ietf-opsawg-pcap, 4: the upper half has the length of a frame check sequence
    link_type = int.from_bytes(header[20:24], order) & 0xFFFF
    return cursor, np.array([(link_type, snap_length, digits, 0)], INTERFACE)


@inlined
def step(buf: Any, cursor: Any, interfaces: Any, secrets: Any, packet: Any) -> Any:
    """Read up to and including the next packet at the cursor; returns the outcome."""
    if cursor["format"] != PCAPNG:
        return _pcap_step(buf, cursor, interfaces, packet)
    return _pcapng_step(buf, cursor, interfaces, secrets, packet)
