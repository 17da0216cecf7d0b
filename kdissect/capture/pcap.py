"""The pcap format: a file header, then 16 bytes before each packet.

Source: IETF draft-ietf-opsawg-pcap. The two magic numbers (microseconds, nanoseconds) are written
in the writer's byte order, from which readers learn it. A third one marks the *modified* format of
some Linux systems of the 1990s, with 8 more bytes before each packet (interface number, protocol,
kind).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kdissect.capture.packet_reader import (
    CAPTURED,
    CURSOR_SIZE,
    DATA_POS,
    END,
    FORMAT,
    INTERFACE,
    INTERFACE_COUNT,
    LENGTH,
    LITTLE,
    MODIFIED_PCAP,
    NEEDED,
    PCAP,
    POS,
    RECORD_POS,
    RESOLUTION,
    SECOND_NS,
    STEP_CUT,
    STEP_END,
    STEP_PACKET,
    TIME,
    TIME_NS,
    word32,
)
from kdissect.jit import inlined

FILE_HEADER_SIZE, RECORD_HEADER_SIZE = 24, 16
MODIFIED_HEADER_SIZE = RECORD_HEADER_SIZE + 8

# First four bytes -> (byte order, decimal digits of a second's fraction).
MAGICS: dict[bytes, tuple[Literal["big", "little"], int]] = {
    b"\xa1\xb2\xc3\xd4": ("big", 6),
    b"\xd4\xc3\xb2\xa1": ("little", 6),
    b"\xa1\xb2\x3c\x4d": ("big", 9),
    b"\x4d\x3c\xb2\xa1": ("little", 9),
    b"\xa1\xb2\xcd\x34": ("big", 6),
    b"\x34\xcd\xb2\xa1": ("little", 6),
}
MODIFIED = (b"\xa1\xb2\xcd\x34", b"\x34\xcd\xb2\xa1")


def open_pcap(
    data: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(cursor at the first packet, table with the one interface). `data` begins with a magic
    number.

    A file that ends inside its header has no packets: the cursor is at its end.
    """
    header = data[:FILE_HEADER_SIZE].tobytes()
    order, digits = MAGICS[header[:4]]
    cursor = np.zeros(CURSOR_SIZE, np.int64)
    cursor[[POS, END]] = min(FILE_HEADER_SIZE, len(data)), len(data)
    form = MODIFIED_PCAP if header[:4] in MODIFIED else PCAP
    cursor[[FORMAT, LITTLE, INTERFACE_COUNT]] = form, order == "little", 1
    snap_length = int.from_bytes(header[16:20], order)
    # draft-ietf-opsawg-pcap, 4: the upper half has the length of a frame check sequence
    link_type = int.from_bytes(header[20:24], order) & 0xFFFF
    return cursor, np.array([link_type, snap_length, digits, 0], np.int64)


@inlined
def pcap_step(buf: Any, cursor: Any, interfaces: Any, packet: Any) -> Any:
    """Read one record at the cursor and move past it; returns the outcome."""
    pos = cursor[POS]
    left = cursor[END] - pos
    if left == 0:
        return STEP_END
    header = MODIFIED_HEADER_SIZE if cursor[FORMAT] == MODIFIED_PCAP else RECORD_HEADER_SIZE
    if left < header:
        cursor[NEEDED] = header
        return STEP_CUT
    little = cursor[LITTLE]
    # draft-ietf-opsawg-pcap, 5: seconds, fraction, captured length, original length
    captured = word32(buf, pos + 8, little)
    if captured > left - header:
        cursor[NEEDED] = header + captured
        return STEP_CUT
    scale = 1 if interfaces[RESOLUTION] == 9 else 1000
    time_ns = word32(buf, pos, little) * SECOND_NS + word32(buf, pos + 4, little) * scale
    packet[RECORD_POS] = pos
    packet[DATA_POS] = pos + header
    packet[CAPTURED] = captured
    packet[LENGTH] = word32(buf, pos + 12, little)
    packet[TIME_NS] = time_ns
    packet[INTERFACE] = 0
    cursor[TIME] = time_ns
    cursor[POS] = pos + header + captured
    return STEP_PACKET
