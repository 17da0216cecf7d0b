"""N copies of a pcap in one file: the same packets between other hosts, at other times.

Every copy has client and broker addresses of its own, so that its connections are others; payload
is untouched. Copies follow one another. Checksums stay those of the input, as nothing verifies
them: network cards fill them in after a capture.
"""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FILE_HEADER_SIZE = 24
PACKET_HEADER_SIZE = 16
LITTLE_ENDIAN = b"\xd4\xc3\xb2\xa1"  # and microseconds
LINK_SIZES = {1: 14, 101: 0}  # Ethernet, raw IP -> size of its header
IPV4 = 4
FIRST_HOST = (10 << 24) + 1  # of 10.0.0.0/8
HOSTS_MAX = (1 << 24) - 2


def multiply(source: str | os.PathLike[str], target: str | os.PathLike[str], copies: int) -> None:
    """Write `copies` copies of the pcap `source` to `target`.

    Each copy is that much later than the one before as the capture is long, and a second more.
    Packets that are not IPv4 keep their addresses. Raises ValueError for another format or link
    type, or more addresses than there is room for.
    """
    data = np.fromfile(source, np.uint8)
    header = data[:FILE_HEADER_SIZE].tobytes()
    if header[:4] != LITTLE_ENDIAN:
        raise ValueError(f"{os.fspath(source)}: is no little-endian pcap")
    (link,) = struct.unpack_from("<I", header, 20)
    if link not in LINK_SIZES:
        raise ValueError(f"{os.fspath(source)}: link type {link} is none of {sorted(LINK_SIZES)}")
    start = packet_starts(data)
    ip = start + PACKET_HEADER_SIZE + LINK_SIZES[link]
    ip = ip[data[ip] >> 4 == IPV4]
    places = np.concatenate([ip + 12, ip + 16])  # of the sender's and the receiver's address
    hosts, number = np.unique(_load(data, places, ">u4"), return_inverse=True)
    if len(hosts) * copies > HOSTS_MAX:
        raise ValueError(f"{copies} copies of {len(hosts)} addresses exceed 10.0.0.0/8")
    time_s = _load(data, start, "<u4")
    period_s = int(time_s.max() - time_s.min()) + 2
    with Path(target).open("wb") as out:
        out.write(header)
        for copy in range(copies):
            _store(data, start, (time_s + copy * period_s).astype("<u4"))
            _store(data, places, (FIRST_HOST + copy * len(hosts) + number).astype(">u4"))
            out.write(data[FILE_HEADER_SIZE:])


def packet_starts(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """int64[n]: where the header of each packet begins."""
    view = memoryview(data)
    starts, pos = [], FILE_HEADER_SIZE
    while pos < len(data):
        starts.append(pos)
        pos += PACKET_HEADER_SIZE + int.from_bytes(view[pos + 8 : pos + 12], "little")
    return np.array(starts, np.int64)


def _load(data: npt.NDArray[np.uint8], place: npt.NDArray[np.int64], kind: str) -> Any:
    return data[place[:, None] + np.arange(4)].view(kind).reshape(-1)


def _store(
    data: npt.NDArray[np.uint8], place: npt.NDArray[np.int64], values: npt.NDArray[Any]
) -> None:
    data[place[:, None] + np.arange(4)] = values.view(np.uint8).reshape(-1, 4)
