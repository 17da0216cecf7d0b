"""Rate of record decoding per codec, beside its floor: CRC and decompression alone.

    python bench/bench_records.py [--megabytes 64] [--runs 5]

The floor checks every batch's CRC and decompresses into one reused buffer, with the same libraries.
Decoding does that and gives Arrow columns of every batch and record. Runs are interleaved, medians
printed; sizes are of decompressed records. The last table leaves checks, codecs and Arrow out: it
parses sections and copies keys and values, over and over the same 8 MB.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import crc32c
import numpy as np

from kdissect.codec import record_kernel as rk
from kdissect.codec.compression import CODEC_NAMES, decompress
from kdissect.codec.record_batches import iter_record_chunks
from kdissect.codec.record_codec import encode_batch, encode_messages

SETS = 20  # distinct record sets; the input repeats them


@dataclass(frozen=True)
class Case:
    name: str
    codec: str
    value_size: int
    batch_records: int
    magic: int = 2


CASES = [
    *(Case(f"289-byte values, {codec}", codec, 289, 50) for codec in CODEC_NAMES),
    *(Case(f"40-byte values, {codec}", codec, 40, 300) for codec in CODEC_NAMES),
    Case("one record a batch", "none", 289, 1),
    Case("magic 1, uncompressed", "none", 289, 50, magic=1),
    Case("magic 1, gzip", "gzip", 289, 50, magic=1),
]


def record_sets(case: Case) -> tuple[list[bytes], int]:
    """Record sets of one batch (or message set), and the size of their records decompressed."""
    rng = np.random.default_rng(7)
    words = rng.integers(97, 113, (SETS * case.batch_records, case.value_size), dtype=np.uint8)
    sets = []
    size = 0
    for i in range(SETS):
        rows = [
            {
                "offset": j,
                "timestamp_ms": 1_700_000_000_000 + j,
                "key": b"key%07d" % j,
                "value": words[j].tobytes(),
            }
            for j in range(i * case.batch_records, (i + 1) * case.batch_records)
        ]
        if case.magic == 1:
            sets.append(encode_messages(rows, 1, codec=case.codec))
            size += len(encode_messages(rows, 1))
        else:
            sets.append(encode_batch(rows, codec=case.codec))
            size += len(encode_batch(rows)) - 61
    return sets, size


def floor(case: Case, buf: Any, sizes: list[int], arena: Any) -> None:
    """CRC and decompression of every batch and nothing else (magic 2 only)."""
    view = memoryview(buf)
    codec = CODEC_NAMES.index(case.codec)
    pos = 0
    used = 0
    for size in sizes:
        crc32c.crc32c(view[pos + 21 : pos + size])
        if codec:
            used += decompress(codec, buf[pos + 61 : pos + size], arena[used:])[1]
            if used > arena.size // 2:
                used = 0
        pos += size


def measure(runs: int, *works: Callable[[], Any]) -> list[float]:
    """Median seconds of each, the runs interleaved after one that warms up."""
    times: list[list[float]] = [[] for _ in works]
    for run in range(runs + 1):
        for work, found in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            if run:
                found.append(time.perf_counter() - began)
    return [statistics.median(found) for found in times]


def run_case(case: Case, megabytes: int, runs: int, arena: Any) -> str:
    sets, size = record_sets(case)
    repeats = max(1, megabytes * 1_000_000 // size)
    buf = np.frombuffer(b"".join(sets) * repeats, np.uint8)
    length = np.array([len(data) for data in sets] * repeats, np.int64)
    start = np.cumsum(length) - length
    sizes = length.tolist()
    count = SETS * case.batch_records * repeats

    def decode() -> None:
        found = sum(chunk.records.num_rows for chunk in iter_record_chunks(buf, start, length))
        assert found == count, (found, count)

    if case.magic == 2:
        decoding, bare = measure(runs, decode, lambda: floor(case, buf, sizes, arena))
        beside = f"{bare * 1e3:9.1f} {decoding / bare:7.2f}"
    else:
        (decoding,) = measure(runs, decode)
        beside = f"{'-':>9} {'-':>7}"
    rate = f"{count / decoding / 1e6:9.2f} {size * repeats / decoding / 1e9:7.2f}"
    return f"{case.name:26} {count:9} {decoding * 1e3:9.1f} {beside} {rate}"


def hot_rate(value_size: int, batch_records: int, runs: int) -> str:
    """The kernels alone on one chunk."""
    sets, size = record_sets(Case("", "none", value_size, batch_records))
    repeats = max(1, 8_000_000 // size)
    buf = np.frombuffer(b"".join(sets) * repeats, np.uint8)
    batches = np.empty(SETS * repeats, rk.SCANNED_BATCH)
    scanned = rk.scan_batches(buf, np.array([0]), np.array([buf.size]), rk.scan_start(), batches)
    sections = np.zeros(scanned, rk.SECTION)
    sections["address"] = buf.ctypes.data + batches["section_start"]
    sections["length"] = batches["section_size"]
    sections["kind"] = rk.RECORDS
    sections["record_count"] = batches["record_count"]
    count = scanned * batch_records
    records = rk.record_columns(count)
    headers = rk.header_columns(0)
    offsets = np.empty(count + 1, np.int32)
    data = np.empty(size * repeats, np.uint8)
    validity = np.zeros(count // 8 + 1, np.uint8)

    def parse() -> None:
        position = np.zeros(1, rk.PARSE_POSITION)[0]
        rk.parse_records(sections.copy(), position, 1 << 40, 1 << 20, records, headers)
        assert position["row_count"] == count

    def copy() -> None:
        for address, length in (
            (records.key_address, records.key_length),
            (records.value_address, records.value_length),
        ):
            rk.gather(address, length, count, offsets, validity, data.ctypes.data)

    parsing, copying = measure(10 * runs, parse, copy)
    both = parsing + copying
    return (
        f"{value_size:3}-byte values: parse {parsing / count * 1e9:.1f} ns a record, "
        f"copy {copying / count * 1e9:.1f} ns; together {count / both / 1e6:.1f} M records/s, "
        f"{size * repeats / both / 1e9:.2f} GB/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64, help="decompressed size of a case")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    arena = np.zeros(16 << 20, np.uint8)
    print(
        f"{'records':26} {'count':>9} {'ours ms':>9} {'floor ms':>9} {'ratio':>7} "
        f"{'M rec/s':>9} {'GB/s':>7}"
    )
    for case in CASES:
        print(run_case(case, options.megabytes, options.runs, arena), flush=True)
    print("\nkernels alone, hot:")
    for value_size, batch_records in ((289, 50), (40, 300)):
        print(hot_rate(value_size, batch_records, options.runs))


if __name__ == "__main__":
    main()
