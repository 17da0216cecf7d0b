"""The pcapng format: blocks with their length at both ends, in sections of one byte order.

Source: IETF draft-ietf-opsawg-pcapng. Packets are in enhanced, simple and (obsolete) packet blocks.
Interface blocks describe how to read them. Blocks of other types are skipped by their length.
Wireshark numbers some of those as frames (NUMBERED), so they are counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.packet_reader import (
    BAD_BLOCK,
    CAPTURED,
    CURSOR_SIZE,
    DATA_POS,
    END,
    FAULT,
    FAULT_BLOCK_LENGTH,
    FAULT_BYTE_ORDER,
    FAULT_FORMAT_VERSION,
    FAULT_INTERFACE,
    FAULT_TRAILER,
    FORMAT,
    INTERFACE,
    INTERFACE_COUNT,
    INTERFACE_SIZE,
    LENGTH,
    LINK_TYPE,
    LITTLE,
    NEEDED,
    NO_INTERFACE,
    OTHER_COUNT,
    PCAPNG,
    POS,
    RECORD_POS,
    RESOLUTION,
    SECRET_COUNT,
    SECRET_SIZE,
    SECTION_BASE,
    SNAP_LENGTH,
    STEP_BAD,
    STEP_CUT,
    STEP_END,
    STEP_PACKET,
    STEP_ROOM_NEEDED,
    TIME,
    TIME_NS,
    TIME_OFFSET_S,
    signed64,
    to_ns,
    word16,
    word32,
)
from kdissect.jit import inlined, read_u8, read_u32

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


def open_pcapng(
    data: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(cursor at the first section header, empty table of interfaces that callers enlarge).

    cursor: the reader's state, see `packet_reader`.
    """
    cursor = np.zeros(CURSOR_SIZE, np.int64)
    cursor[END] = len(data)
    cursor[FORMAT] = PCAPNG
    return cursor, np.zeros(8 * INTERFACE_SIZE, np.int64)


@inlined
def add_interface(buf: Any, pos: Any, end: Any, little: Any, interfaces: Any, row: Any) -> Any:
    """Read an interface block's body and options, buf[pos:end], into a row of the table."""
    at = row * INTERFACE_SIZE
    interfaces[at + LINK_TYPE] = word16(buf, pos, little)
    interfaces[at + SNAP_LENGTH] = word32(buf, pos + 4, little)
    interfaces[at + RESOLUTION] = DEFAULT_RESOLUTION
    interfaces[at + TIME_OFFSET_S] = 0
    option = pos + 8
    # draft-ietf-opsawg-pcapng, 3.5: options of code, length and value, padded to 4 bytes
    while option + 4 <= end:
        code = word16(buf, option, little)
        size = word16(buf, option + 2, little)
        value = option + 4
        if code == OPTION_END or value + size > end:
            break
        if code == OPTION_RESOLUTION and size >= 1:
            interfaces[at + RESOLUTION] = read_u8(buf, value)
        elif code == OPTION_TIME_OFFSET and size >= 8:
            interfaces[at + TIME_OFFSET_S] = signed64(buf, value, little)
        option = value + ((size + 3) & ~3)


@inlined
def read_packet_block(
    buf: Any, pos: Any, kind: Any, room: Any, cursor: Any, interfaces: Any, packet: Any
) -> Any:
    """Fill `packet` from the packet block at `pos` with a body of `room` bytes.

    Of a faulty block, INTERFACE is BAD_BLOCK or NO_INTERFACE.
    """
    little = cursor[LITTLE]
    interface_count = cursor[INTERFACE_COUNT] - cursor[SECTION_BASE]
    packet[RECORD_POS] = pos
    packet[DATA_POS] = pos + 8
    packet[CAPTURED] = 0
    packet[LENGTH] = 0
    packet[TIME_NS] = cursor[TIME]
    packet[INTERFACE] = BAD_BLOCK
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
            snap_length = interfaces[cursor[SECTION_BASE] * INTERFACE_SIZE + SNAP_LENGTH]
            if snap_length > 0:
                captured = min(captured, snap_length)
    else:
        narrow = kind == OLD_PACKET_BLOCK  # its interface has 16 bits, followed by a count of drops
        interface = word16(buf, pos + 8, little) if narrow else word32(buf, pos + 8, little)
        captured = word32(buf, pos + 20, little)
        length = word32(buf, pos + 24, little)
        if captured > room - fixed:
            return
    packet[DATA_POS] = pos + 8 + fixed
    packet[CAPTURED] = captured
    packet[LENGTH] = length
    if interface >= interface_count:
        packet[INTERFACE] = NO_INTERFACE
        return
    row = cursor[SECTION_BASE] + interface
    packet[INTERFACE] = row
    if kind != SIMPLE_BLOCK:
        at = row * INTERFACE_SIZE
        packet[TIME_NS] = to_ns(
            word32(buf, pos + 12, little),
            word32(buf, pos + 16, little),
            interfaces[at + RESOLUTION],
            interfaces[at + TIME_OFFSET_S],
        )
        cursor[TIME] = packet[TIME_NS]


@inlined
def add_secrets(buf: Any, pos: Any, room: Any, cursor: Any, secrets: Any) -> Any:
    """Record where the bytes of a decryption secrets block lie, unless its length is wrong."""
    if room < 8:
        return
    size = word32(buf, pos + 12, cursor[LITTLE])
    if size > room - 8:
        return
    at = cursor[SECRET_COUNT] * SECRET_SIZE
    secrets[at] = word32(buf, pos + 8, cursor[LITTLE])
    secrets[at + 1] = pos + 16
    secrets[at + 2] = size
    cursor[SECRET_COUNT] += 1


@inlined
def pcapng_step(buf: Any, cursor: Any, interfaces: Any, secrets: Any, packet: Any) -> Any:
    """Read blocks from the cursor up to and including the next packet; returns the outcome."""
    while True:
        pos = cursor[POS]
        left = cursor[END] - pos
        if left == 0:
            return STEP_END
        if left < BLOCK_SIZE_MIN:
            cursor[NEEDED] = BLOCK_SIZE_MIN
            return STEP_CUT
        # draft-ietf-opsawg-pcapng, 4.1: a section header gives the byte order of its section
        if read_u32(buf, pos) == SECTION_HEADER:
            mark = read_u32(buf, pos + 8)
            if mark not in (BYTE_ORDER_MARK, BYTE_ORDER_MARK_SWAPPED):
                cursor[FAULT] = FAULT_BYTE_ORDER
                return STEP_BAD
            cursor[LITTLE] = np.int64(mark == BYTE_ORDER_MARK_SWAPPED)
        little = cursor[LITTLE]
        kind = word32(buf, pos, little)
        total = word32(buf, pos + 4, little)
        if total < BLOCK_SIZE_MIN:
            cursor[FAULT] = FAULT_BLOCK_LENGTH
            return STEP_BAD
        size = (total + 3) & ~3  # some writers do not count the padding
        if size > left:
            cursor[NEEDED] = size
            return STEP_CUT
        if word32(buf, pos + size - 4, little) != total:
            cursor[FAULT] = FAULT_TRAILER
            return STEP_BAD
        room = size - BLOCK_SIZE_MIN
        if kind in (ENHANCED_BLOCK, SIMPLE_BLOCK, OLD_PACKET_BLOCK):
            read_packet_block(buf, pos, kind, room, cursor, interfaces, packet)
            cursor[POS] = pos + size
            return STEP_PACKET
        if kind == SECTION_HEADER:
            if room < 16:
                cursor[FAULT] = FAULT_BLOCK_LENGTH
                return STEP_BAD
            if word16(buf, pos + 12, little) != 1:
                cursor[FAULT] = FAULT_FORMAT_VERSION
                return STEP_BAD
            cursor[SECTION_BASE] = cursor[INTERFACE_COUNT]
        elif kind == INTERFACE_BLOCK:
            if room < 8:
                cursor[FAULT] = FAULT_INTERFACE
                return STEP_BAD
            row = cursor[INTERFACE_COUNT]
            if (row + 1) * INTERFACE_SIZE > len(interfaces):
                return STEP_ROOM_NEEDED
            add_interface(buf, pos + 8, pos + size - 4, little, interfaces, row)
            cursor[INTERFACE_COUNT] = row + 1
        elif kind == SECRETS_BLOCK and cursor[SECRET_COUNT] >= 0:
            if (cursor[SECRET_COUNT] + 1) * SECRET_SIZE > len(secrets):
                return STEP_ROOM_NEEDED
            add_secrets(buf, pos, room, cursor, secrets)
        elif kind in NUMBERED:
            cursor[OTHER_COUNT] += 1
        cursor[POS] = pos + size
