"""Captures made to exhaust a reader: work stays linear in the packets, memory bounded.

The default suite counts the steps of small ones and reads larger ones; `heavy` runs those of a
million packets.
"""

import resource
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import kdissect
from tests.builders.captures import pcap
from tests.builders.frames import request
from tests.cases import cases
from tests.steps import assert_linear

PACKET = np.dtype(
    [
        ("seconds", "<u4"), ("fraction", "<u4"), ("captured", "<u4"), ("length", "<u4"),
        ("ethernet", "u1", 14), ("version", "u1"), ("tos", "u1"), ("total", ">u2"), ("id", ">u2"),
        ("fragment", ">u2"), ("ttl", "u1"), ("protocol", "u1"), ("ip_sum", ">u2"),
        ("source", ">u4"), ("target", ">u4"), ("port", ">u2"), ("target_port", ">u2"),
        ("seq", ">u4"), ("ack", ">u4"), ("offset", "u1"), ("flags", "u1"), ("window", ">u2"),
        ("tcp_sum", ">u2"), ("urgent", ">u2"),
    ]
)  # fmt: skip
MEMORY_MAX = 1500 << 20  # bytes that a million packets may add


def write(path: Path, count: int, payload: bytes, **columns: Any) -> Path:
    """A capture of `count` packets with one payload; columns of PACKET as given."""
    kind = np.dtype(
        [*PACKET.descr, ("payload", "u1", (len(payload),))] if payload else PACKET.descr
    )
    rows = np.zeros(count, kind)
    number = np.arange(count)
    rows["seconds"] = 1_700_000_000 + number // 100_000
    rows["fraction"] = number % 100_000 * 10
    rows["captured"] = rows["length"] = 54 + len(payload)
    rows["ethernet"][:, 12] = 8
    rows["version"], rows["ttl"], rows["protocol"] = 0x45, 64, 6
    rows["total"], rows["id"] = 40 + len(payload), number & 0xFFFF
    rows["source"], rows["target"], rows["port"] = 0x0A000002, 0x0A000001, 50000
    rows["target_port"], rows["offset"], rows["flags"], rows["window"] = 9092, 0x50, 24, 512
    for name, values in columns.items():
        rows[name] = values
    if payload:
        rows["payload"] = np.frombuffer(payload, np.uint8)
    path.write_bytes(pcap([]) + rows.tobytes())
    return path


REQUEST = request(5)


def flood(path: Path, count: int) -> Path:
    """A SYN each, from as many clients."""
    number = np.arange(count)
    return write(path, count, b"", source=0x0B000000 + number, seq=number, flags=2)


def gaps(path: Path, count: int) -> Path:
    """One connection with as many gaps."""
    return write(path, count, REQUEST, seq=np.arange(count) * 48 % 2**32)


def retransmissions(path: Path, count: int) -> Path:
    """Every other packet repeats, shifted, bytes sent any time before."""
    choose = np.random.default_rng(1)
    number = np.arange(count)
    earlier = choose.integers(0, np.maximum(number // 2, 1))
    seq = np.where(number % 2 == 0, number // 2, earlier) * len(REQUEST)
    seq = seq + 100 - np.where(number % 2 == 0, 0, choose.integers(0, 20, count))
    return write(path, count, REQUEST, seq=seq)


def fragments(path: Path, count: int) -> Path:
    """First fragments of datagrams that never go on, more than identifications."""
    number = np.arange(count)
    return write(
        path, count, bytes(8), source=0x0B000000 + number // 60000, seq=number, fragment=0x2000
    )


def overlaps(path: Path, count: int) -> Path:
    """One datagram: small fragments, each far from the others, then ever larger ones over them."""
    number = np.arange(count)
    at = np.where(number % 600 < 500, number % 600 * 16, 0)
    claims = np.where(number % 600 < 500, 48, 9000)
    return write(path, count, bytes(8), fragment=0x2000 | at, total=claims, id=7)


def giant(path: Path, count: int) -> Path:
    """Sound requests, then a frame of the largest size whose bytes never come."""
    write(path, 1, REQUEST, seq=1)
    data = path.read_bytes()
    start = struct.pack(">i", 104_857_600) + request(6, 0, 9)[4:]
    for number in range(count):
        write(path, 1, start if number == 0 else bytes(24), seq=1 + 24 * (number + 1))
        data += path.read_bytes()[24:]
    path.write_bytes(data)
    return path


def measured(path: Path) -> tuple[Any, int]:
    """(tables, bytes by which the process grew)."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tables = kdissect.read(path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return tables, grown * 1024


def check(make: Any, count: int, tables: Any) -> None:
    (capture,) = tables.captures.to_pylist()
    assert capture["packet_count"] == count
    if make in (fragments, overlaps):
        assert dict(capture["ignored_reasons"]) == {"ip_fragment": count}
        kinds = tables.anomalies.to_pandas(["kind"])["kind"].value_counts()
        assert kinds["lost_fragments"] == count if make is fragments else kinds["lost_fragments"]
        return
    assert capture["tcp_packet_count"] == count
    if make is flood:
        assert tables.connections.num_rows == count
        return
    (row,) = tables.connections.to_pylist()
    assert row["request_byte_count"] == (
        row["request_framed_byte_count"] + row["request_unframed_byte_count"]
    )
    if make is gaps:
        assert row["request_gap_count"] == count - 1
    if make is retransmissions:
        assert row["request_framed_byte_count"] == (count + 1) // 2 * len(REQUEST)
        assert tables.exchanges.num_rows == (count + 1) // 2


def read_made(name: str, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kdissect.read(globals()[name](Path(folder, "made.pcap"), count))


@cases("make", [flood, overlaps], heavy=[gaps, retransmissions, fragments])
def test_work_is_linear_in_the_packets(make: Any) -> None:
    """Twice the packets take at most twice the steps."""
    assert_linear(read_made, 50, make.__name__)


MAKERS = (flood, gaps, retransmissions, fragments, overlaps)


@cases(
    ("make", "count"),
    [(make, 10_000) for make in MAKERS],
    heavy=[(make, 100_000 if make is retransmissions else 1_000_000) for make in MAKERS],
)
def test_memory_is_bounded(make: Any, count: int, tmp_path: Path) -> None:
    """Many packets of each kind stay below MEMORY_MAX."""
    measured(make(tmp_path / "first.pcap", 100))  # compiles
    tables, grown = measured(make(tmp_path / "many.pcap", count))
    check(make, count, tables)
    assert grown < MEMORY_MAX


def test_a_frame_that_never_comes_is_no_memory(tmp_path: Path) -> None:
    """A size prefix of 100 MiB allocates nothing."""
    tables, grown = measured(giant(tmp_path / "giant.pcap", 100))
    check(giant, 101, tables)
    rows = tables.exchanges.to_pylist()
    assert [row["request_size"] for row in rows] == [20, 104_857_600]
    assert rows[1]["request_decode_status"] == "partial"
    assert "partial_frame" in tables.anomalies.to_arrow().column("kind").to_pylist()
    assert grown < 200 << 20
