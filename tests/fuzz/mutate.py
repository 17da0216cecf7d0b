"""Changes to a capture at every level, each with the packets that it leaves untouched.

A mutation knows the connections whose packets it changed (`touched`, None for all), and when it
only changed bytes inside of bodies, the frames these are in (`frames`): all others must come out as
they were.
"""

import random
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import crc32c

from tests.builders.captures import Key, Packet, pcap_bytes, pcapng_bytes
from tests.fuzz.bases import Base

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 9, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF,
           0x80000000, 0xFFFFFFFF, 0x6400000, 0x6400001)  # fmt: skip
INTERESTING = (
    b"\0", b"\1", b"\xff", b"\x7f", b"\x80", b"\xff\xff", b"\x7f\xff", b"\x80\0", b"\xff" * 4,
    b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\0", b"\xff" * 8, b"\xff" * 4 + b"\x0f",
    b"\xfe" + b"\xff" * 8 + b"\x01", b"\x80" * 10, b"\xff\xff\xff\xff\x07",
)  # fmt: skip


@dataclass
class Mutated:
    """packet_count is None if the file's own structure changed."""

    data: bytes = b""
    packet_count: int | None = None
    touched: set[Key] | None = field(default_factory=set)
    frames: set[int] = field(default_factory=set)  # exchange ids
    is_renumbered: bool = False
    may_refuse: bool = False  # the file may no longer be a capture


class Nothing(Exception):
    """There is no packet that the mutation could change."""


class Mutation:
    """One capture while it is changed."""

    def __init__(self, base: Base, choose: random.Random) -> None:
        self.base = base
        self.choose = choose
        self.packets: list[Packet] = list(base.packets)
        self.result = Mutated()

    def touch(self, packet: Packet) -> None:
        if self.result.touched is not None and packet.is_tcp:
            self.result.touched.add(packet.key)

    def any_index(self) -> int:
        return self.choose.randrange(len(self.packets))

    def any_packet(self) -> tuple[int, Packet]:
        row = self.any_index()
        return row, self.packets[row]

    def with_payload(self) -> tuple[int, Packet]:
        rows = [
            row
            for row, packet in enumerate(self.packets)
            if packet.is_tcp and len(packet.payload) > 0
        ]
        if not rows:
            raise Nothing
        row = self.choose.choice(rows)
        return row, self.packets[row]

    def replace(self, row: int, packet: Packet) -> None:
        self.touch(self.packets[row])
        self.touch(packet)
        self.packets[row] = packet

    def noise(self) -> bytes:
        if self.choose.random() < 0.7:
            return self.choose.choice(INTERESTING)
        return self.choose.randbytes(self.choose.randint(1, 12))


# -- packets --------------------------------------------------------------------------------


def drop(m: Mutation) -> None:
    row = m.any_index()
    for _ in range(m.choose.choice((1, 1, 2, 5, 20))):
        if row < len(m.packets) and len(m.packets) > 1:
            m.touch(m.packets.pop(row))
            m.result.is_renumbered = True


def start_late(m: Mutation) -> None:
    for packet in m.packets[: (row := m.any_index())]:
        m.touch(packet)
    del m.packets[:row]
    m.result.is_renumbered = True


def one_direction(m: Mutation) -> None:
    port = m.choose.choice(m.packets)
    if not port.is_tcp:
        return
    kept = [packet for packet in m.packets if not packet.is_tcp or packet.source != port.source]
    for packet in m.packets:
        if packet.is_tcp and packet.source == port.source:
            m.touch(packet)
    if kept:
        m.packets = kept
        m.result.is_renumbered = True


def twice(m: Mutation) -> None:
    row, packet = m.any_packet()
    m.touch(packet)
    later = m.choose.choice((0, 1000, 9_000_000, 11_000_000, 10**9))
    place = min(len(m.packets), row + 1 + m.choose.randint(0, 5))
    m.packets.insert(place, replace(packet, time_ns=packet.time_ns + later))
    m.result.is_renumbered = True


def swap(m: Mutation) -> None:
    row = m.any_index()
    other = min(len(m.packets) - 1, row + m.choose.randint(1, 9))
    m.touch(m.packets[row])
    m.touch(m.packets[other])
    m.packets[row], m.packets[other] = m.packets[other], m.packets[row]
    m.result.is_renumbered = True


def cut_packet(m: Mutation) -> None:
    row, packet = m.any_packet()
    size = m.choose.randint(0, len(packet.data))
    m.replace(row, replace(packet, data=packet.data[:size]))


def flip_header(m: Mutation) -> None:
    row, packet = m.any_packet()
    stop = packet.payload_pos if packet.is_tcp else len(packet.data)
    at = m.choose.randrange(max(1, stop))
    m.replace(row, packet.put(at, m.noise()))


def step_clock(m: Mutation) -> None:
    row, packet = m.any_packet()
    away = m.choose.choice((-(10**9), 10**9, -(10**13), 10**15, -(10**4)))
    m.replace(row, replace(packet, time_ns=max(0, packet.time_ns + away) % (2**32 * 10**9)))


def other_packet(m: Mutation) -> None:
    packet = m.choose.choice(m.packets)
    noise, arp = m.choose.randbytes(m.choose.randint(0, 100)), bytes(12) + b"\x08\x06" + bytes(28)
    data = m.choose.choice((noise, arp, packet.data[:14] + m.choose.randbytes(60)))
    extra = Packet(packet.time_ns, data, len(data))
    m.packets.insert(m.any_index(), extra)
    m.touch(extra)
    m.result.is_renumbered = True


# -- segments -------------------------------------------------------------------------------


def change_numbers(m: Mutation) -> None:
    """Sequence number, acknowledgement, flags or ports of a segment."""
    row, packet = m.any_packet()
    if not packet.is_tcp:
        return
    at, size = m.choose.choice(((4, 4), (8, 4), (13, 1), (0, 2), (2, 2), (12, 1)))
    place = packet.tcp_pos + at
    old = int.from_bytes(packet.data[place : place + size], "big")
    new = m.choose.choice((old + m.choose.randint(-2000, 2000), m.choose.getrandbits(32), old ^ 1))
    m.replace(row, packet.put(place, (new % 256**size).to_bytes(size, "big")))


def resize(m: Mutation) -> None:
    row, packet = m.with_payload()
    payload = packet.payload
    at = m.choose.randrange(len(payload))
    new = m.choose.choice(
        (
            payload[:at],
            payload + m.choose.randbytes(m.choose.randint(1, 100)),
            payload[:at] + m.noise() + payload[at:],
            payload[:at] + payload[at + m.choose.randint(1, 8) :],
            payload * 2,
        )
    )
    m.replace(row, packet.with_payload(new[:60000]))


def conflict(m: Mutation) -> None:
    """A retransmission with other bytes, which reaches before or after the first copy."""
    row, packet = m.with_payload()
    payload = m.choose.randbytes(m.choose.randint(1, 2 * len(packet.payload)))[:60000]
    seq = (packet.seq + m.choose.randint(-len(payload), len(payload))) % 2**32
    again = packet.with_payload(payload).put(packet.tcp_pos + 4, struct.pack(">I", seq))
    m.touch(packet)
    place = max(0, min(len(m.packets), row + m.choose.randint(-3, 4)))
    m.packets.insert(place, again)
    m.result.is_renumbered = True


def split_segments(m: Mutation) -> None:
    """The same bytes in smaller segments: nothing but packet numbers changes for others."""
    row, packet = m.with_payload()
    step = m.choose.choice((1, 3, 7, 100))
    payload = packet.payload[: 200 * step]
    rest = packet.payload[len(payload) :]
    parts = [payload[at : at + step] for at in range(0, len(payload), step)] + [rest]
    made, done = [], 0
    for part in parts:
        if part:
            seq = struct.pack(">I", (packet.seq + done) % 2**32)
            made.append(packet.with_payload(part).put(packet.tcp_pos + 4, seq))
            done += len(part)
    if m.choose.random() < 0.3:
        m.choose.shuffle(made)
    m.touch(packet)
    m.packets[row : row + 1] = made
    m.result.is_renumbered = True


# -- frames, messages, batches --------------------------------------------------------------


def change_frame(m: Mutation) -> None:
    """Size prefix, api key, version, correlation id or client id of a frame."""
    row, packet = m.with_payload()
    place = m.base.positions[row] if row < len(m.base.positions) else 0
    frames = m.base.frames.get((packet.source, packet.key), [])
    here = [f for f in frames if place <= f.pos < place + len(packet.payload)]
    start = m.choose.choice(here).pos - place if here else 0
    at, size = m.choose.choice(((0, 4), (4, 2), (6, 2), (8, 4), (12, 2), (4, 4)))
    at += packet.payload_pos + start
    old = int.from_bytes(packet.data[at : at + size], "big")
    new = m.choose.choice((m.choose.choice(NUMBERS), old + m.choose.randint(-40, 40), old ^ 1))
    m.replace(row, packet.put(at, (new % 256**size).to_bytes(size, "big")))


def _put_inside(m: Mutation, row: int, at: int, new: bytes) -> None:
    """Bytes of a payload; when all are in the body of one frame, only that is touched."""
    packet = m.packets[row]
    new = new[: len(packet.data) - at]
    pos = m.base.positions[row] + at - packet.payload_pos
    for frame in m.base.frames.get((packet.source, packet.key), []):
        start = frame.pos + 4 + frame.body
        if start <= pos and pos + len(new) <= frame.pos + 4 + frame.size:
            m.result.frames.add(frame.exchange_id)
            m.packets[row] = packet.put(at, new)
            return
    m.replace(row, packet.put(at, new))


def change_message(m: Mutation) -> None:
    row, packet = m.with_payload()
    at = m.choose.randrange(packet.payload_pos, len(packet.data))
    _put_inside(m, row, at, m.noise())


def _batches(payload: bytes) -> list[int]:
    """Places that look like record batches or old messages."""
    found = []
    for at in range(len(payload) - 20):
        if payload[at + 16] <= 2 and payload[at + 8] == 0 and payload[at : at + 4] == b"\0\0\0\0":
            size = int.from_bytes(payload[at + 8 : at + 12], "big")
            if 14 <= size <= 1 << 20 and (payload[at + 16] < 2 or size >= 49):
                found.append(at)
    return found


def change_batch(m: Mutation) -> None:
    """A field of a record batch; half of the time with a checksum that fits."""
    rows = [row for row, p in enumerate(m.packets) if p.is_tcp and len(p.payload) > 60]
    m.choose.shuffle(rows)
    for row in rows[:40]:
        packet = m.packets[row]
        payload = packet.payload
        places = _batches(payload)
        if not places:
            continue
        start = m.choose.choice(places)
        size = int.from_bytes(payload[start + 8 : start + 12], "big")
        whole = start + 12 + size <= len(payload)
        field_at, width = m.choose.choice(
            ((8, 4), (12, 4), (16, 1), (17, 4), (21, 2), (22, 1), (23, 4), (57, 4), (57, 4),
             (61, 9), (61, 0))
        )  # fmt: skip
        if width == 0:
            field_at = m.choose.randint(61, max(61, min(12 + size, len(payload) - start) - 1))
        new = m.noise() if width in (0, 9) else m.choose.choice(NUMBERS).to_bytes(4, "big")[-width:]
        made = bytearray(payload)
        made[start + field_at : start + field_at + len(new)] = new
        made = made[: len(payload)]
        if whole and size > 49 and m.choose.random() < 0.5:
            checksum = crc32c.crc32c(bytes(made[start + 21 : start + 12 + size]))
            made[start + 17 : start + 21] = struct.pack(">I", checksum)
        first = next(
            (i for i, (a, b) in enumerate(zip(payload, made, strict=True)) if a != b), None
        )
        if first is None:
            continue
        last = max(i for i, (a, b) in enumerate(zip(payload, made, strict=True)) if a != b)
        _put_inside(m, row, packet.payload_pos + first, bytes(made[first : last + 1]))
        return


# -- the file -------------------------------------------------------------------------------


def damage_file(m: Mutation) -> None:
    """Other bytes anywhere in the file, or a cut end; no packet is sure to remain."""
    writer = m.choose.choice((pcap_bytes, pcapng_bytes))
    data = bytearray(writer(m.packets))
    for _ in range(m.choose.choice((1, 1, 3, 10))):
        at = m.choose.choice((m.choose.randrange(len(data)), m.choose.randrange(200)))
        new = m.noise()
        data[at : at + len(new)] = new
    if m.choose.random() < 0.5:
        del data[m.choose.randrange(len(data)) :]
    m.result.data = bytes(data)
    m.result.touched = None
    m.result.may_refuse = True


def other_link(m: Mutation) -> None:
    link_type = m.choose.choice((0, 12, 101, 105, 108, 113, 127, 189, 228, 229, 276, 147, 9, 65535))
    m.result.data = pcap_bytes(m.packets, link_type)
    m.result.packet_count = len(m.packets)
    m.result.touched = None


def as_pcapng(m: Mutation) -> None:
    m.result.data = pcapng_bytes(m.packets)
    m.result.packet_count = len(m.packets)


LEVELS: dict[str, tuple[Callable[[Mutation], None], ...]] = {
    "packet": (drop, start_late, one_direction, twice, swap, cut_packet, flip_header, step_clock,
               other_packet),
    "segment": (change_numbers, resize, conflict, split_segments),
    "frame": (change_frame,),
    "message": (change_message,),
    "batch": (change_batch,),
    "file": (damage_file, other_link, as_pcapng),
}  # fmt: skip
WEIGHTS = {"packet": 5, "segment": 4, "frame": 3, "message": 5, "batch": 4, "file": 2}
_IN_PLACE = {"message", "batch"}  # need packets where the base has them


def mutated(base: Base, choose: random.Random) -> tuple[str, Mutated]:
    """(description, result) of one mutation, or of several of any level."""
    m = Mutation(base, choose)
    levels = choose.choices(list(WEIGHTS), list(WEIGHTS.values()), k=choose.choice((1, 1, 1, 2, 4)))
    levels.sort(key=lambda level: (level == "file", level not in _IN_PLACE, level != "frame"))
    done = []
    for level in levels:
        change = choose.choice(LEVELS[level])
        done.append(change.__name__)
        if m.packets and not m.result.data:
            with suppress(Nothing):
                change(m)
    if not m.result.data:
        m.result.data = pcap_bytes(m.packets)
        m.result.packet_count = len(m.packets)
    return ", ".join(done), m.result
