"""Reads the packets of a capture, pcap or pcapng, one step at a time.

Sources: IETF draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng.

- pcap: a file header, then 16 bytes before each packet. The two magic numbers (microseconds,
  nanoseconds) are written in the writer's byte order, from which readers learn it.
- pcapng: blocks with their length at both ends, in sections of one byte order. Packets are in
  enhanced, simple and (obsolete) packet blocks. Interface blocks describe how to read them. Blocks
  of other types are skipped by their length. Wireshark numbers some of those as frames (NUMBERED),
  so they are counted.

A CURSOR has the position of the next record, all state that is needed to read it, and the packet
before it. A step moves the cursor past one packet. Interfaces are rows of a table; a pcap file has
one row, so later code need not distinguish the formats.

A step that needs more room returns ROOM_NEEDED without moving: the caller enlarges the table and
steps again.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from kdissect.arrays import Bytes, Rows, Struct
from kdissect.jit import inlined, read_i64, read_u8, read_u16, read_u32

CURSOR = np.dtype(
    [
        ("pos", "i8"),  # of the next record
        ("end", "i8"),  # of the bytes that may be read
        ("format", "i8"),  # PCAP or PCAPNG
        ("little", "i8"),  # 1 when the section is little-endian
        ("section_base", "i8"),  # first interface row of the section
        ("interface_count", "i8"),  # rows so far
        ("secret_count", "i8"),  # rows in the table of secrets; -1: do not collect secrets
        ("fault", "i8"),  # why the last step failed
        ("needed", "i8"),  # after CUT: bytes that the record needs
        ("packet_count", "i8"),  # packets so far
        ("number", "i8"),  # frames so far, as Wireshark counts: packets, and blocks of NUMBERED
        # the last packet:
        ("data_pos", "i8"),
        ("captured", "i8"),
        ("length", "i8"),
        ("time_ns", "i8"),  # a simple packet block has the time of the packet before
        ("interface", "i8"),
    ]
)
PCAP, PCAPNG = 0, 1
NO_INTERFACE, BAD_BLOCK = -1, -2  # values of `interface` for a packet that cannot be dissected

INTERFACE = np.dtype(
    [(name, "i8") for name in ("link_type", "snap_length", "resolution", "time_offset_s")]
)
SECRET = np.dtype([("kind", "i8"), ("pos", "i8"), ("size", "i8")])  # of the bytes of a key log


class Reading(NamedTuple):
    """A capture that is being read: its bytes, CURSOR, INTERFACE[n] and SECRET[n]."""

    data: Bytes
    cursor: Struct
    interfaces: Rows
    secrets: Rows


# Outcomes of a step.
STEP_PACKET, STEP_END, STEP_CUT, STEP_BAD, STEP_ROOM_NEEDED = range(5)

# Values of `fault`.
FAULT_BLOCK_LENGTH, FAULT_TRAILER, FAULT_BYTE_ORDER, FAULT_FORMAT_VERSION = range(1, 5)
FAULT_INTERFACE, FAULT_ZEROS, FAULT_PACKET_LENGTH = range(5, 8)
FAULT_TEXT = {
    FAULT_BLOCK_LENGTH: "block length is impossible",
    FAULT_TRAILER: "the two lengths of a block differ",
    FAULT_BYTE_ORDER: "section header has no byte order mark",
    FAULT_FORMAT_VERSION: "section has an unknown format version",
    FAULT_INTERFACE: "interface block is too short",
    FAULT_ZEROS: "its header has only zeros",
    FAULT_PACKET_LENGTH: "its captured length is impossible",
}

SECOND_NS = 1_000_000_000
TIME_MAX, TIME_MIN = 2**63 - 1, -(2**63)
_SECONDS_MAX = 2**62 - 1  # beyond any clock; the sum of two still fits
_SECOND, _HALF, _LOW = np.uint64(SECOND_NS), np.uint64(32), np.uint64(0xFFFFFFFF)
_POWERS = np.array([10**exponent for exponent in range(20)], np.uint64)

FILE_HEADER_SIZE, RECORD_HEADER_SIZE = 24, 16
CAPTURED_MAX = 1 << 18  # longest packet that libpcap reads, unless the snap length is larger

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
    *(JOURNAL_BLOCK, CUSTOM_BLOCK, PRIVATE_BLOCK),
    *(SYSDIG_EVENT, SYSDIG_EVENT_2, SYSDIG_EVENT_2_LARGE),
)
BYTE_ORDER_MARK, BYTE_ORDER_MARK_SWAPPED = 0x1A2B3C4D, 0x4D3C2B1A
BLOCK_SIZE_MIN = 12  # type, length, length again
OPTION_END, OPTION_RESOLUTION, OPTION_TIME_OFFSET = 0, 9, 14
DEFAULT_RESOLUTION = 6


@inlined
def word16(buf: Bytes, pos: int, little: int) -> int:
    """The unsigned 16-bit integer at `pos`, in the section's byte order."""
    value = read_u16(buf, pos)
    return ((value & 0xFF) << 8) | (value >> 8) if little else value


@inlined
def word32(buf: Bytes, pos: int, little: int) -> int:
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
def signed64(buf: Bytes, pos: int, little: int) -> int:
    """The signed 64-bit integer at `pos`, in the section's byte order."""
    first, second = word32(buf, pos, little), word32(buf, pos + 4, little)
    high, low = (second, first) if little else (first, second)
    if high >= 2**31:
        high -= 2**32
    return (high << 32) | low


@inlined
def to_ns(high: int, low: int, resolution: int, offset_s: int) -> int:
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
    total_s = int(np.int64(min(seconds, np.uint64(_SECONDS_MAX))))
    total_s += max(min(offset_s, _SECONDS_MAX), -_SECONDS_MAX)
    if total_s > TIME_MAX // SECOND_NS - 1:
        return TIME_MAX
    if total_s < TIME_MIN // SECOND_NS + 1:
        return TIME_MIN
    return total_s * SECOND_NS + int(np.int64(ns))


@inlined
def _pcap_step(reading: Reading) -> int:
    """Read one record at the cursor and move past it; returns the outcome."""
    buf, cursor, interfaces, _ = reading
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
    if captured > max(CAPTURED_MAX, interfaces["snap_length"][0]):
        cursor["fault"] = FAULT_PACKET_LENGTH
        return STEP_BAD
    # a machine that loses its power leaves zeros in blocks of the file that were not yet written
    if read_i64(buf, pos) == 0 and read_i64(buf, pos + 8) == 0:
        cursor["fault"] = FAULT_ZEROS
        return STEP_BAD
    if captured > left - RECORD_HEADER_SIZE:
        cursor["needed"] = RECORD_HEADER_SIZE + captured
        return STEP_CUT
    scale = 1 if interfaces["resolution"][0] == 9 else 1000
    time_ns = word32(buf, pos, little) * SECOND_NS + word32(buf, pos + 4, little) * scale
    cursor["data_pos"] = pos + RECORD_HEADER_SIZE
    cursor["captured"] = captured
    cursor["length"] = word32(buf, pos + 12, little)
    cursor["time_ns"] = time_ns
    cursor["interface"] = 0
    cursor["pos"] = pos + RECORD_HEADER_SIZE + captured
    return STEP_PACKET


@inlined
def _add_interface(reading: Reading, pos: int, end: int) -> None:
    """Read an interface block's body and options, data[pos:end], into the next row."""
    buf, cursor, interfaces, _ = reading
    little, row = cursor["little"], cursor["interface_count"]
    interfaces["link_type"][row] = word16(buf, pos, little)
    interfaces["snap_length"][row] = word32(buf, pos + 4, little)
    interfaces["resolution"][row] = DEFAULT_RESOLUTION
    interfaces["time_offset_s"][row] = 0
    cursor["interface_count"] = row + 1
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
def _read_packet_block(reading: Reading, pos: int, kind: int, room: int) -> None:
    """Read the packet block at `pos`, which has a body of `room` bytes.

    Of a faulty block, `interface` is BAD_BLOCK or NO_INTERFACE.
    """
    buf, cursor, interfaces, _ = reading
    little = cursor["little"]
    interface_count = cursor["interface_count"] - cursor["section_base"]
    cursor["data_pos"] = pos + 8
    cursor["captured"] = 0
    cursor["length"] = 0
    cursor["interface"] = BAD_BLOCK
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
    cursor["data_pos"] = pos + 8 + fixed
    cursor["captured"] = captured
    cursor["length"] = length
    if interface >= interface_count:
        cursor["interface"] = NO_INTERFACE
        return
    row = cursor["section_base"] + interface
    cursor["interface"] = row
    if kind != SIMPLE_BLOCK:
        cursor["time_ns"] = to_ns(
            word32(buf, pos + 12, little),
            word32(buf, pos + 16, little),
            interfaces["resolution"][row],
            interfaces["time_offset_s"][row],
        )


@inlined
def _add_secrets(reading: Reading, pos: int, room: int) -> None:
    """Record where the bytes of a decryption secrets block lie, unless its length is wrong."""
    buf, cursor, _, secrets = reading
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
def _pcapng_step(reading: Reading) -> int:
    """Read blocks from the cursor up to and including the next packet; returns the outcome."""
    buf, cursor, interfaces, secrets = reading
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
            _read_packet_block(reading, pos, kind, room)
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
            if cursor["interface_count"] == len(interfaces):
                return STEP_ROOM_NEEDED
            _add_interface(reading, pos + 8, pos + size - 4)
        elif kind == SECRETS_BLOCK and cursor["secret_count"] >= 0:
            if cursor["secret_count"] == len(secrets):
                return STEP_ROOM_NEEDED
            _add_secrets(reading, pos, room)
        elif kind in NUMBERED:
            cursor["number"] += 1
        cursor["pos"] = pos + size


def opened(data: Bytes) -> Reading:
    """Read from the first record on. `data` begins with a magic number.

    A pcap has one interface. Callers enlarge the tables of a pcapng, which are empty. A pcap that
    ends inside its header has no packets: the cursor is at its end.
    """
    cursor, secrets = np.zeros(1, CURSOR)[0], np.zeros(4, SECRET)
    header = data[:FILE_HEADER_SIZE].tobytes()
    cursor["end"] = len(data)
    if header[:4] == SECTION_MAGIC:
        cursor["format"] = PCAPNG
        return Reading(data, cursor, np.zeros(8, INTERFACE), secrets)
    order, digits = MAGICS[header[:4]]
    cursor["pos"] = min(FILE_HEADER_SIZE, len(data))
    cursor["format"], cursor["little"], cursor["interface_count"] = PCAP, order == "little", 1
    snap_length = int.from_bytes(header[16:20], order)
    # draft-ietf-opsawg-pcap, 4: the upper half has the length of a frame check sequence
    link_type = int.from_bytes(header[20:24], order) & 0xFFFF
    interfaces = np.array([(link_type, snap_length, digits, 0)], INTERFACE)
    return Reading(data, cursor, interfaces, secrets)


@inlined
def step(reading: Reading) -> int:
    """Read up to and including the next packet at the cursor; returns the outcome."""
    if reading.cursor["format"] != PCAPNG:
        outcome = _pcap_step(reading)
    else:
        outcome = _pcapng_step(reading)
    if outcome == STEP_PACKET:
        reading.cursor["packet_count"] += 1
        reading.cursor["number"] += 1
    return outcome
