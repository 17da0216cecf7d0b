"""The floor: what pyarrow, cramjam and crc32c alone need for a capture.

Timed, in as many forked processes as the product has workers, each doing its share one step after
another (no step overlaps within a process, and nothing else runs):

1. read the capture's bytes once, with preadv into one reused buffer of 4 MB;
2. check the CRC-32C of every whole record batch;
3. decompress every compressed batch into one reused buffer;
4. write the tables, given as Arrow tables in memory, with pyarrow.parquet.write_table and its
   defaults but for compression="zstd", compression_level=1: a file per table and process.

Not timed: finding the packets, the streams, the messages and the batches, decoding, building the
tables, starting the processes. Batches lie side by side in memory already, and the tables are
those that `kdissect.read` gives for the capture. A process's share is an equal number of bytes,
of batch bytes, and of each table's rows.
"""

import argparse
import multiprocessing
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cramjam
import crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import kdissect
from bench.measure import serve
from kdissect.pipeline import record_tables

READ_BYTES = 4 << 20
HEADER_SIZE = 61  # of a record batch of magic 2, up to its records
GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
XERIAL_HEADER_SIZE = 16
STEPS = ("read", "check", "decompress", "write")


@dataclass(frozen=True, slots=True)
class Batch:
    """A record batch in the floor's buffer."""

    start: int
    end: int
    codec: int


@dataclass(frozen=True, slots=True)
class Share:
    """The work of one process for one capture."""

    path: str
    byte_range: tuple[int, int]
    buf: memoryview
    batches: list[Batch]
    room: int  # bytes that the largest batch decompresses to
    tables: dict[str, pa.Table]


@contextmanager
def _record_sets_kept(kept: list[bytes]) -> Iterator[None]:
    """While open, record sets that the product decodes are kept aside."""
    original = record_tables.iter_record_chunks

    def keeping(buf: Any, start: Any, length: Any, *rest: Any, **more: Any) -> Any:
        for pos, size in zip(start.tolist(), length.tolist(), strict=True):
            kept.append(buf[pos : pos + size].tobytes())
        return original(buf, start, length, *rest, **more)

    record_tables.iter_record_chunks = keeping
    try:
        yield
    finally:
        record_tables.iter_record_chunks = original


def batches_of(sets: list[bytes]) -> list[Batch]:
    """The whole record batches of sets that lie one behind the other."""
    found = []
    base = 0
    for data in sets:
        pos = 0
        while pos + HEADER_SIZE <= len(data):
            size = struct.unpack_from(">i", data, pos + 8)[0] + 12
            if data[pos + 16] != 2:
                raise ValueError("the floor knows record batches of magic 2 only")
            if size < HEADER_SIZE or pos + size > len(data):
                break
            found.append(Batch(base + pos, base + pos + size, data[pos + 22] & 7))
            pos += size
        base += len(data)
    return found


def prepare(path: str, workers: int) -> list[Share]:
    """Everything that is not timed: tables and batches of a capture, cut into shares."""
    sets: list[bytes] = []
    with _record_sets_kept(sets):
        read = kdissect.read(path)
    tables = {name: read[name].to_arrow() for name in read.names if read[name].num_rows}
    batches = batches_of(sets)
    listed = tables.get("record_batches")
    whole = 0 if listed is None else listed.num_rows - sum(listed["is_partial"].to_pylist())
    if len(batches) != whole:
        raise RuntimeError(f"{len(batches)} record batches found, {whole} in the table")
    sizes = [] if listed is None else [n or 0 for n in listed["uncompressed_size"].to_pylist()]
    buf = memoryview(b"".join(sets))
    byte_count = os.path.getsize(path)
    done = np.cumsum([0] + [batch.end - batch.start for batch in batches])
    number = np.minimum(done[:-1] * workers // max(int(done[-1]), 1), workers - 1)
    shares = []
    for worker in range(workers):
        own = {}
        for name, table in tables.items():
            low, high = (table.num_rows * n // workers for n in (worker, worker + 1))
            if high > low:
                own[name] = table.slice(low, high - low)
        mine = [batches[n] for n in np.flatnonzero(number == worker).tolist()]
        bounds = byte_count * worker // workers, byte_count * (worker + 1) // workers
        shares.append(Share(path, bounds, buf, mine, max(sizes, default=0), own))
    return shares


# -- what is timed --------------------------------------------------------------------------


def _read(share: Share, _out: Path) -> None:
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    pos, end = share.byte_range
    handle = os.open(share.path, os.O_RDONLY)
    try:
        while pos < end:
            pos += os.preadv(handle, [view[: min(READ_BYTES, end - pos)]], pos)
    finally:
        os.close(handle)


def _check(share: Share, _out: Path) -> None:
    buf = share.buf
    for batch in share.batches:
        given = int.from_bytes(buf[batch.start + 17 : batch.start + 21], "big")
        if crc32c.crc32c(buf[batch.start + 21 : batch.end]) != given:
            raise ValueError("a record batch has a wrong CRC")


def _decompress(share: Share, _out: Path) -> None:
    out = np.empty(share.room, np.uint8)
    into: dict[int, Callable[..., Any]] = {
        GZIP: cramjam.gzip.decompress_into,
        LZ4: cramjam.lz4.decompress_into,
        ZSTD: cramjam.zstd.decompress_into,
    }
    for batch in share.batches:
        data = share.buf[batch.start + HEADER_SIZE : batch.end]
        if batch.codec == SNAPPY:
            _snappy(data, out)
        elif batch.codec:
            into[batch.codec](data, out)


def _snappy(data: memoryview, out: Any) -> None:
    if data[:7] != b"\x82SNAPPY":
        cramjam.snappy.decompress_raw_into(data, out)
        return
    pos, written = XERIAL_HEADER_SIZE, 0
    while pos < len(data):
        size = int.from_bytes(data[pos : pos + 4], "big")
        pos += 4
        written += cramjam.snappy.decompress_raw_into(data[pos : pos + size], out[written:])
        pos += size


def _write(share: Share, out: Path) -> None:
    for name, table in share.tables.items():
        pq.write_table(
            table,
            out / f"{name.replace('/', '-')}.parquet",
            compression="zstd",
            compression_level=1,
        )


_SHARES: dict[str, list[Share]] = {}


def _work(task: tuple[str, int, str]) -> dict[str, float]:
    """One process's share; seconds of each step."""
    path, worker, out = task
    share = _SHARES[path][worker]
    folder = Path(out) / f"w{worker}"
    folder.mkdir(parents=True)
    spent = {}
    for name, step in zip(STEPS, (_read, _check, _decompress, _write), strict=True):
        began = time.perf_counter()
        step(share, folder)
        spent[name] = time.perf_counter() - began
    return spent


def main() -> None:
    """Command: floor.py --workers N CAPTURE..., then requests {"path", "out"} on stdin."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("paths", nargs="+")
    given = parser.parse_args()
    for path in given.paths:
        _SHARES[path] = prepare(path, given.workers)
    # the children inherit the tables; one task at a time each
    with multiprocessing.get_context("fork").Pool(given.workers) as pool:

        def answer(path: str, out: str) -> dict[str, Any]:
            shutil.rmtree(out, ignore_errors=True)
            tasks = [(path, worker, out) for worker in range(given.workers)]
            began = time.perf_counter()
            spent = pool.map(_work, tasks, chunksize=1)
            seconds = time.perf_counter() - began
            files = list(Path(out).rglob("*.parquet"))
            return {
                "seconds": seconds,
                "steps": {name: sum(part[name] for part in spent) for name in STEPS},
                "busiest_s": max(sum(part.values()) for part in spent),
                "byte_count": sum(file.stat().st_size for file in files),
                "batch_count": sum(len(share.batches) for share in _SHARES[path]),
            }

        serve(answer)


if __name__ == "__main__":
    main()
