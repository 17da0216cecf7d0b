"""One exchange repeated over many TCP connections, or mostly over one: captures of any shape, fast.

Every exchange has the same bytes but for its correlation id. Its packets are made once and tiled;
what differs between exchanges (times, addresses, ports, numbers) is written by the column. IP and
TCP checksums are 0, as where a network card fills them in.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.synthesise import (
    BROKER_PORT,
    CLIENT_ID,
    ETHERNET,
    SEGMENT_SIZE,
    START_TIME_NS,
    Exchange,
    Recipe,
    exchanges,
)
from kdissect.codec.message import Message, encode_message

CLIENTS_PER_HOST = 50_000  # ports that a client's address has
PACKET_GAP_US = 20
BLOCK_BYTES = 32 << 20
SEED = 20_26
_PACKET, _IP, _TCP, _PAYLOAD = 0, 30, 50, 70  # places in a packet with its pcap header

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def heartbeat() -> Exchange:
    """Heartbeat v0 and its answer: about the smallest messages that there are."""
    asked = struct.pack(">hhih", 12, 0, 0, len(CLIENT_ID)) + CLIENT_ID
    asked += struct.pack(">h", 5) + b"group" + struct.pack(">ih", 7, 8) + b"member-1"
    told = struct.pack(">ih", 0, 0)
    return struct.pack(">i", len(asked)) + asked, struct.pack(">i", len(told)) + told


def large_fetch() -> Exchange:
    """A Fetch of three batches of 400 records, lz4."""
    return list(exchanges(0, Recipe("lz4", record_count=1200)))[1]


def connections_of(count: int, connection_count: int, share: float) -> Ints:
    """int64[count]: the connection of each exchange; `share` of them are the first one's."""
    connection = np.arange(count) % connection_count
    if share:
        connection[np.random.default_rng(SEED).random(count) < share] = 0
    return connection


def offset_fetch() -> Exchange:
    """OffsetFetch v2 of one partition: a small request that nothing has to come before."""
    partition = {"partition_index": 0, "committed_offset": 7, "metadata": "", "error_code": 0}
    asked = {"group_id": "group", "topics": [{"name": "t", "partition_indexes": [0]}]}
    told = {"topics": [{"name": "t", "partitions": [partition]}], "error_code": 0}
    header = {"correlation_id": 0, "client_id": CLIENT_ID.decode()}
    request = encode_message(Message(9, 2, "request", header, asked))
    response = encode_message(Message(9, 2, "response", {"correlation_id": 0}, told))
    return struct.pack(">i", len(request)) + request, struct.pack(">i", len(response)) + response


def crowd(
    target: str | os.PathLike[str],
    exchange: Exchange,
    connection: npt.NDArray[Any],
    gap_us: int = PACKET_GAP_US,
) -> None:
    """Write a pcap in which exchange i is one of the connection connection[i], a packet each
    gap_us."""
    payloads = [
        (side, at, data[at : at + SEGMENT_SIZE])
        for side, data in enumerate(exchange)
        for at in range(0, len(data), SEGMENT_SIZE)
    ]
    packets = [_packet(payload) for _, _, payload in payloads]
    template = np.frombuffer(b"".join(packets), np.uint8)
    turn = _turns(connection)
    rows = max(1, BLOCK_BYTES // len(template))
    with Path(target).open("wb") as out:
        out.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 262_144, 1))
        for first in range(0, len(connection), rows):
            some = slice(first, first + rows)
            block = np.tile(template, (len(connection[some]), 1))
            base = 0
            for number, ((side, at, payload), packet) in enumerate(
                zip(payloads, packets, strict=True)
            ):
                here = block[:, base : base + len(packet)]
                index = np.arange(first, first + len(here)) * len(payloads) + number
                _fill_head(here, connection[some], index * gap_us, index, side)
                _fill_numbers(here, turn[some], exchange, side, at, len(payload))
                base += len(packet)
            out.write(block.tobytes())


def _packet(payload: bytes) -> bytes:
    tcp = struct.pack(">HHIIBBHHH", 0, 0, 0, 0, 0x50, 0x18, 65535, 0, 0)
    ip = struct.pack(">HHHHBBH", 0x4500, 40 + len(payload), 0, 0x4000, 64, 6, 0) + bytes(8)
    frame = ETHERNET + ip + tcp + payload
    return struct.pack("<IIII", 0, 0, len(frame), len(frame)) + frame


def _turns(connection: npt.NDArray[Any]) -> Ints:
    """Of each exchange how many of its connection came before it."""
    order = np.argsort(connection, kind="stable")
    grouped = connection[order]
    turn = np.empty(len(connection), np.int64)
    turn[order] = np.arange(len(connection)) - np.searchsorted(grouped, grouped)
    return turn


def _put(block: Bytes, place: int, values: Any, kind: str) -> None:
    words = np.ascontiguousarray(np.broadcast_to(values, len(block)).astype(kind))
    size = words.itemsize
    block[:, place : place + size] = words.view(np.uint8).reshape(len(block), size)


def _fill_head(
    packet: Bytes, connection: npt.NDArray[Any], time_us: Ints, index: Ints, side: int
) -> None:
    _put(packet, _PACKET, START_TIME_NS // 10**9 + time_us // 10**6, "<u4")
    _put(packet, _PACKET + 4, time_us % 10**6, "<u4")
    client = (10 << 24) + 1 + connection // CLIENTS_PER_HOST, 10_000 + connection % CLIENTS_PER_HOST
    broker = 0xC0000201, BROKER_PORT  # RFC 5737
    sender, receiver = (client, broker) if side == 0 else (broker, client)
    _put(packet, _IP + 4, index & 0xFFFF, ">u2")
    _put(packet, _IP + 12, sender[0], ">u4")
    _put(packet, _IP + 16, receiver[0], ">u4")
    _put(packet, _TCP, sender[1], ">u2")
    _put(packet, _TCP + 2, receiver[1], ">u2")


def _fill_numbers(
    packet: Bytes, turn: Ints, exchange: Exchange, side: int, at: int, size: int
) -> None:
    """Sequence numbers, and the correlation id where the packet begins a message."""
    own, other = len(exchange[side]), len(exchange[1 - side])
    heard = turn + (1 if side == 1 else 0)  # the answer comes behind all of its request
    _put(packet, _TCP + 4, (turn * own + at) & 0xFFFFFFFF, ">u4")
    _put(packet, _TCP + 8, (heard * other) & 0xFFFFFFFF, ">u4")
    if at == 0:
        place = _PAYLOAD + (8 if side == 0 else 4)
        assert place - _PAYLOAD + 4 <= size
        _put(packet, place, turn & 0x7FFFFFFF, ">u4")
