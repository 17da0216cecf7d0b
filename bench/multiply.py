"""N copies of a pcap in one file: the same packets between other hosts, at other times.

Every copy has client and broker addresses of its own, so that its connections are others; payload
is untouched. Copies follow one another, or lie packet by packet side by side (`interleave`), which
is what many connections at a time look like. A block of packets is in memory at a time (one per
copy when interleaved), so inputs and outputs may be of any size.
"""

from __future__ import annotations

import argparse
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]

FILE_HEADER_SIZE = 24
PACKET_HEADER_SIZE = 16
# magic as it lies in the file -> byte order; the last two count nanoseconds
BYTE_ORDERS = {
    b"\xd4\xc3\xb2\xa1": "<",
    b"\xa1\xb2\xc3\xd4": ">",
    b"\x4d\x3c\xb2\xa1": "<",
    b"\xa1\xb2\x3c\x4d": ">",
}
# link type -> (size of its header, place of the ethertype in it or None)
LINKS: dict[int, tuple[int, int | None]] = {
    1: (14, 12),
    101: (0, None),
    113: (16, 14),
    276: (20, 0),
}
TCP = 6
# Of 10.0.0.0/8 and fd00::/96: addresses that real captures may hold too, but never beside these.
IPV4_BASE = 10 << 24
IPV4_ROOM = (1 << 24) - 2
IPV6_PREFIX = b"\xfd" + bytes(11)


@dataclass(frozen=True, slots=True)
class Multiplied:
    """The written file and its counts."""

    path: Path
    copies: int
    packet_count: int
    byte_count: int


@dataclass(slots=True)
class _Block:
    """Whole packets: their bytes, and the place of each packet's header and its end."""

    data: Bytes
    start: Places
    end: Places


@dataclass(slots=True)
class _Survey:
    """The results of the first pass over the input."""

    ipv4: npt.NDArray[np.uint32]  # distinct addresses, ascending
    ipv6: npt.NDArray[np.void]
    span_s: int  # whole seconds that every packet's time lies in


def multiply(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    copies: int,
    *,
    interleave: bool = False,
    block_bytes: int = 16 << 20,
) -> Multiplied:
    """Write `copies` copies of the pcap `source` to `target`.

    Copies one after another are that much later as the capture is long, and a second more;
    interleaved ones have the times of the input. Packets that are not IP stay as they are. Raises
    ValueError for what is no pcap, an unusual link type, or more addresses than there is room for.
    """
    if copies < 1:
        raise ValueError("copies must be at least 1")
    with Path(source).open("rb") as stream, Path(target).open("wb") as out:
        header = stream.read(FILE_HEADER_SIZE)
        order, link = _read_header(header, source)
        survey = _survey(_blocks(stream, order, block_bytes), order, link)
        if len(survey.ipv4) * copies > IPV4_ROOM:
            raise ValueError(f"{copies} copies of {len(survey.ipv4)} addresses exceed 10.0.0.0/8")
        out.write(header)
        packet_count = 0
        if interleave:
            for block in _blocks(stream, order, block_bytes):
                packet_count += copies * len(block.start)
                out.write(_side_by_side(block, survey, order, link, copies))
        else:
            for copy in range(copies):
                for block in _blocks(stream, order, block_bytes):
                    packet_count += len(block.start)
                    _rewrite(block, survey, order, link, copy, copy * (survey.span_s + 1))
                    out.write(block.data)
        return Multiplied(Path(target), copies, packet_count, out.tell())


def _read_header(header: bytes, source: str | os.PathLike[str]) -> tuple[str, int]:
    order = BYTE_ORDERS.get(header[:4])
    if order is None or len(header) < FILE_HEADER_SIZE:
        raise ValueError(f"{os.fspath(source)}: is no pcap")
    link = struct.unpack_from(f"{order}I", header, 20)[0] & 0xFFFF
    if link not in LINKS:
        raise ValueError(f"{os.fspath(source)}: link type {link} is none of {sorted(LINKS)}")
    return order, link


def _blocks(stream: BinaryIO, order: str, block_bytes: int) -> Iterator[_Block]:
    """Whole packets of the file, about `block_bytes` at a time; a packet cut at the end is left."""
    unpack = struct.Struct(f"{order}I").unpack_from
    stream.seek(FILE_HEADER_SIZE)
    rest = b""
    while piece := stream.read(block_bytes):
        data = bytearray(rest + piece)
        pos, size = 0, len(data)
        starts = []
        while pos + PACKET_HEADER_SIZE <= size:
            end = pos + PACKET_HEADER_SIZE + unpack(data, pos + 8)[0]
            if end > size:
                break
            starts.append(pos)
            pos = end
        rest = bytes(data[pos:])
        start = np.array(starts, np.int64)
        if len(start):
            yield _Block(np.frombuffer(data, np.uint8)[:pos], start, np.append(start[1:], pos))


def _survey(blocks: Iterator[_Block], order: str, link: int) -> _Survey:
    ipv4: Any = np.empty(0, np.uint32)
    ipv6: Any = np.empty(0, "V16")
    first, last = 1 << 32, 0
    for block in blocks:
        time_s = _load(block.data, block.start, f"{order}u4")
        first, last = min(first, int(time_s.min())), max(last, int(time_s.max()))
        narrow, wide = _ip_places(block, link)
        for place in (narrow + 12, narrow + 16):
            ipv4 = np.union1d(ipv4, _load(block.data, place, ">u4"))
        for place in (wide + 8, wide + 24):
            ipv6 = np.unique(np.concatenate([ipv6, _load(block.data, place, "V16")]))
    return _Survey(ipv4, ipv6, max(0, last - first) + 1)


def _load(data: Bytes, place: Places, dtype: str) -> Any:
    kind = np.dtype(dtype)
    words = data[place[:, None] + np.arange(kind.itemsize)]
    return np.ascontiguousarray(words).view(kind).reshape(len(place))


def _store(data: Bytes, place: Places, values: npt.NDArray[Any]) -> None:
    words = np.ascontiguousarray(values).view(np.uint8).reshape(len(place), values.itemsize)
    data[place[:, None] + np.arange(values.itemsize)] = words


def _ip_places(block: _Block, link: int) -> tuple[Places, Places]:
    """Return the places of IPv4 and IPv6 headers that were captured whole."""
    link_size, ethertype_at = LINKS[link]
    place = block.start + PACKET_HEADER_SIZE + link_size
    found = []
    for nibble, ethertype, size in ((4, 0x0800, 20), (6, 0x86DD, 40)):
        here = place[place + size <= block.end]
        chosen = block.data[here] >> 4 == nibble
        if ethertype_at is not None:
            kind = _load(block.data, here - link_size + ethertype_at, ">u2")
            chosen &= kind == ethertype
        found.append(here[chosen])
    return found[0], found[1]


def _rewrite(
    block: _Block, survey: _Survey, order: str, link: int, copy: int, later_s: int
) -> None:
    """Give the block's packets the addresses and times of a copy; checksums stay right."""
    data = block.data
    time_s = _load(data, block.start, f"{order}u4").astype(np.int64) + later_s
    _store(data, block.start, (time_s & 0xFFFFFFFF).astype(f"{order}u4"))
    narrow, wide = _ip_places(block, link)
    before = _words(data, narrow + 12, 8)
    for place in (narrow + 12, narrow + 16):
        number = np.searchsorted(survey.ipv4, _load(data, place, ">u4"))
        _store(data, place, (IPV4_BASE + 1 + copy * len(survey.ipv4) + number).astype(">u4"))
    change = before - _words(data, narrow + 12, 8)
    _adjust(data, narrow + 10, change)
    header_size = (data[narrow] & 15).astype(np.int64) * 4
    fragment = _load(data, narrow + 6, ">u2") & 0x3FFF
    whole_tcp = (data[narrow + 9] == TCP) & (fragment == 0)
    _adjust_tcp(block, narrow, narrow + header_size, whole_tcp, change)
    before = _words(data, wide + 8, 32)
    for place in (wide + 8, wide + 24):
        number = np.searchsorted(survey.ipv6, _load(data, place, "V16"))
        number = number + copy * len(survey.ipv6) + 1
        prefix = np.tile(np.frombuffer(IPV6_PREFIX, np.uint8), (len(place), 1))
        low = number.astype(">u4").view(np.uint8).reshape(len(place), 4)
        _store(data, place, np.ascontiguousarray(np.hstack([prefix, low])).view("V16"))
    change = before - _words(data, wide + 8, 32)
    _adjust_tcp(block, wide, wide + 40, data[wide + 6] == TCP, change)


def _words(data: Bytes, place: Places, size: int) -> npt.NDArray[np.int64]:
    """Sum of the 16-bit words of `size` bytes at each place."""
    words = data[place[:, None] + np.arange(size)].astype(np.int64)
    total: npt.NDArray[np.int64] = (words[:, 0::2] << 8).sum(axis=1) + words[:, 1::2].sum(axis=1)
    return total


def _adjust(data: Bytes, place: Places, change: npt.NDArray[np.int64]) -> None:
    """Update the checksums at `place`: `change` is old words minus new ones (RFC 1624)."""
    total = _load(data, place, ">u2").astype(np.int64) + change
    # one's complement sums count modulo 0xffff
    _store(data, place, (total % 0xFFFF).astype(">u2"))


def _adjust_tcp(
    block: _Block, ip: Places, tcp: Places, chosen: npt.NDArray[np.bool_], change: Any
) -> None:
    """TCP's checksum covers the addresses as well."""
    end = block.end[np.searchsorted(block.start, ip, side="right") - 1]
    chosen = chosen & (tcp + 18 <= end)
    _adjust(block.data, tcp[chosen] + 16, change[chosen])


def _side_by_side(block: _Block, survey: _Survey, order: str, link: int, copies: int) -> bytes:
    """Each packet once per copy, before the next packet."""
    views = []
    for copy in range(copies):
        other = _Block(block.data.copy(), block.start, block.end)
        _rewrite(other, survey, order, link, copy, 0)
        views.append(memoryview(other.data))
    bounds = zip(block.start.tolist(), block.end.tolist(), strict=True)
    return b"".join([view[start:end] for start, end in bounds for view in views])


def main() -> None:
    """Command: multiply.py SOURCE TARGET COPIES [--interleave]."""
    parser = argparse.ArgumentParser(description="N copies of a pcap in one file.")
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("copies", type=int)
    parser.add_argument("--interleave", action="store_true", help="packet by packet side by side")
    given = parser.parse_args()
    done = multiply(given.source, given.target, given.copies, interleave=given.interleave)
    print(
        f"{done.path}: {done.copies} copies, {done.packet_count} packets, {done.byte_count} bytes"
    )


if __name__ == "__main__":
    main()
