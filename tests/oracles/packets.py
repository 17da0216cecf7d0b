"""Every packet of a pcap or pcapng capture, with `struct`.

Sources: IETF draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

# Magic number -> byte order and digits of a second's fraction (opsawg-pcap).
MAGICS = {
    bytes.fromhex("a1b2c3d4"): ("big", 6),
    bytes.fromhex("d4c3b2a1"): ("little", 6),
    bytes.fromhex("a1b23c4d"): ("big", 9),
    bytes.fromhex("4d3cb2a1"): ("little", 9),
}
SECTION_MAGIC = bytes.fromhex("0a0d0d0a")
# Blocks without a packet that have a frame number in Wireshark: systemd's journal, custom blocks
# (to be copied or not), Sysdig's events.
NUMBERED = {0x9, 0xBAD, 0x40000BAD, 0x204, 0x216, 0x221}
SECOND_NS = 10**9
SECONDS_MAX = 2**62 - 1
INT64_MAX, INT64_MIN = 2**63 - 1, -(2**63)


@dataclass(frozen=True, slots=True)
class Packet:
    """data[data_pos:data_pos + captured] of a capture; link_type None: `fault` says why."""

    number: int
    pos: int
    time_ns: int
    data_pos: int
    captured: int
    length: int
    link_type: int | None
    fault: str = ""


@dataclass(slots=True)
class Reading:
    """What reading came to: `ending` is end, cut or bad, at byte `pos`, behind `number` records
    that have a frame number in Wireshark."""

    packets: list[Packet] = field(default_factory=list)
    secrets: list[tuple[int, int, int]] = field(default_factory=list)
    ending: str = "end"
    pos: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Interface:
    link_type: int
    snap_length: int
    resolution: int = 6
    offset_s: int = 0


def to_ns(ticks: int, resolution: int, offset_s: int) -> int:
    """Nanoseconds since 1970, in int64's range, of an unsigned 64-bit tick count."""
    per_second = 2 ** (resolution & 127) if resolution & 128 else 10**resolution
    seconds = min(ticks // per_second, SECONDS_MAX)
    fraction_ns = ticks % per_second * SECOND_NS // per_second
    seconds += max(min(offset_s, SECONDS_MAX), -SECONDS_MAX)
    if seconds > INT64_MAX // SECOND_NS - 1:
        return INT64_MAX
    if seconds < INT64_MIN // SECOND_NS + 1:
        return INT64_MIN
    return seconds * SECOND_NS + fraction_ns


def read_capture(data: bytes) -> Reading:
    """All packets of a capture, up to its end or to where it cannot be read."""
    return _read_pcapng(data) if data[:4] == SECTION_MAGIC else _read_pcap(data)


def _read_pcap(data: bytes) -> Reading:
    order, digits = MAGICS[data[:4]]
    mark = "<" if order == "little" else ">"
    reading = Reading(pos=min(24, len(data)))
    link_type = struct.unpack(mark + "I", data[20:24])[0] & 0xFFFF if len(data) >= 24 else 0
    while (left := len(data) - reading.pos) > 0:
        if left < 16:
            reading.ending = "cut"
            break
        seconds, fraction, captured, length = struct.unpack_from(mark + "4I", data, reading.pos)
        too_long = captured > max(2**18, struct.unpack(mark + "I", data[16:20])[0])
        if too_long or not (seconds or fraction or captured or length):
            reading.ending = "bad"
            break
        if captured > left - 16:
            reading.ending = "cut"
            break
        time_ns = seconds * SECOND_NS + fraction * 10 ** (9 - digits)
        reading.number += 1
        reading.packets.append(
            Packet(
                reading.number, reading.pos, time_ns, reading.pos + 16, captured, length, link_type
            )
        )
        reading.pos += 16 + captured
    return reading


def _options(data: bytes, mark: str) -> Iterator[tuple[int, bytes]]:
    pos = 0
    while pos + 4 <= len(data):
        code, size = struct.unpack_from(mark + "2H", data, pos)
        if code == 0 or pos + 4 + size > len(data):
            return
        yield code, data[pos + 4 : pos + 4 + size]
        pos += 4 + size + -size % 4


def _interface(body: bytes, mark: str) -> Interface:
    link_type, _, snap_length = struct.unpack_from(mark + "2HI", body)
    resolution, offset_s = 6, 0
    for code, value in _options(body[8:], mark):
        if code == 9 and value:
            resolution = value[0]
        elif code == 14 and len(value) >= 8:
            (offset_s,) = struct.unpack_from(mark + "q", value)
    return Interface(link_type, snap_length, resolution, offset_s)


def _packet(
    kind: int, body: bytes, mark: str, interfaces: list[Interface], number: int, pos: int, now: int
) -> Packet:
    """A packet block's packet. `now`: the time of the packet before."""
    if len(body) < (4 if kind == 3 else 20):
        return Packet(number, pos, now, pos + 8, 0, 0, None, "malformed_block")
    if kind == 3:
        (length,) = struct.unpack_from(mark + "I", body)
        captured = min(length, len(body) - 4)
        if not interfaces:
            return Packet(number, pos, now, pos + 12, captured, length, None, "unknown_interface")
        captured = min(captured, interfaces[0].snap_length or captured)
        link_type = interfaces[0].link_type
        return Packet(number, pos, now, pos + 12, captured, length, link_type)
    index, high, low, captured, length = struct.unpack_from(mark + "5I", body)
    if kind == 2:
        (index,) = struct.unpack_from(mark + "H", body)
    if captured > len(body) - 20:
        return Packet(number, pos, now, pos + 8, 0, 0, None, "malformed_block")
    if index >= len(interfaces):
        return Packet(number, pos, now, pos + 28, captured, length, None, "unknown_interface")
    used = interfaces[index]
    time_ns = to_ns(high << 32 | low, used.resolution, used.offset_s)
    return Packet(number, pos, time_ns, pos + 28, captured, length, used.link_type)


def _read_pcapng(data: bytes) -> Reading:
    reading = Reading()
    interfaces: list[Interface] = []
    mark = "<"
    now = 0
    while (left := len(data) - reading.pos) > 0:
        pos = reading.pos
        if left < 12:
            reading.ending = "cut"
            break
        is_section = data[pos : pos + 4] == SECTION_MAGIC
        if is_section:
            marks = {b"\x1a\x2b\x3c\x4d": ">", b"\x4d\x3c\x2b\x1a": "<"}
            if data[pos + 8 : pos + 12] not in marks:
                reading.ending = "bad"
                break
            mark = marks[data[pos + 8 : pos + 12]]
        kind, total = struct.unpack_from(mark + "2I", data, pos)
        size = total + -total % 4
        if total < 12:
            reading.ending = "bad"
            break
        if size > left:
            reading.ending = "cut"
            break
        body = data[pos + 8 : pos + size - 4]
        is_bad = struct.unpack_from(mark + "I", data, pos + size - 4) != (total,)
        if is_section:
            is_bad = is_bad or len(body) < 16 or struct.unpack_from(mark + "H", body, 4) != (1,)
            interfaces = []
        if is_bad or (kind == 1 and len(body) < 8):
            reading.ending = "bad"
            break
        if kind == 1:
            interfaces.append(_interface(body, mark))
        elif kind in (2, 3, 6):
            reading.number += 1
            packet = _packet(kind, body, mark, interfaces, reading.number, pos, now)
            reading.packets.append(packet)
            now = packet.time_ns
        elif kind in NUMBERED:
            reading.number += 1
        elif kind == 10 and len(body) >= 8:
            secret_type, secret_size = struct.unpack_from(mark + "2I", body)
            if secret_size <= len(body) - 8:
                reading.secrets.append((secret_type, pos + 16, secret_size))
        reading.pos += size
    return reading
