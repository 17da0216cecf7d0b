"""Kafka's codecs: decompresses into a buffer of the caller, never beyond it.

The caller reuses the output buffer, because fresh pages halve the speed. A fixed buffer also stops
a decompression bomb. Sizes that compressed data announces are compared with the buffer, never
allocated.

Two peculiarities of Kafka are handled here. Java clients frame snappy in the blocks of the xerial
library. Kafka before 0.10 included the magic number in the checksum of an lz4 frame's header
(KAFKA-3160, KIP-57); such headers get the checksum that lz4 libraries expect.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cramjam
import numpy as np
import xxhash

from kdissect.status import Status

Bytes = Any  # contiguous 1-D uint8 array; before Python 3.12 mypy does not see that it is a buffer


class Codec(IntEnum):
    """The low three bits of a record batch's attributes; the table has the names in lower case."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


CODEC_NAMES = tuple(codec.name.lower() for codec in Codec)


@dataclass(frozen=True, slots=True)
class DecompressionLimits:
    """Limits on decompressed record data, in bytes.

    The record section of a batch may decompress to `decompressed_size_max` bytes. Beyond
    `ratio_free_size` it may have at most `ratio_max` times its compressed size. All batches of a
    record set together may have `ratio_max` times the set's size (or `decompressed_size_max`).
    """

    # librdkafka rejects more than receive.message.max.bytes, by default 100 000 000.
    decompressed_size_max: int = 128 << 20
    # The highest ratios are 1032:1 for gzip, 255:1 for lz4 and 21:1 for snappy. zstd has no limit,
    # but real records stay below this.
    ratio_max: int = 1100
    # Java's max.request.size, "effectively also a cap on the uncompressed batch size", is 1 MiB.
    ratio_free_size: int = 8 << 20
    # As many as a batch of the default message.max.bytes (1 MiB) could hold at 1 byte each.
    record_headers_max: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("decompressed_size_max", "ratio_max", "ratio_free_size", "record_headers_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.decompressed_size_max > 1 << 30:  # Arrow's 32-bit offsets in a column
            raise ValueError("decompressed_size_max must be at most 2^30")

    def batch_allowance(self, compressed_size: int) -> int:
        """Bytes that a batch of this compressed size may decompress to."""
        wide = max(self.ratio_free_size, self.ratio_max * compressed_size)
        return min(self.decompressed_size_max, wide)

    def set_allowance(self, set_size: int) -> int:
        """Bytes that all batches of a record set of this size may decompress to."""
        return max(self.decompressed_size_max, self.ratio_max * set_size)


def decompress(codec: int, data: Bytes, out: Bytes) -> tuple[Status, int]:
    """Decompress `data` into `out` (both contiguous uint8).

    Returns (OK, bytes written), or a status and 0: ROOM_NEEDED (`out` is too small), LIMIT (the
    codec needs more memory than allowed), CORRUPT, UNKNOWN_CODEC. `out` is undefined then.
    """
    if codec == Codec.SNAPPY:
        return _decompress_snappy(data, out)
    library: Any
    if codec == Codec.GZIP:
        library = cramjam.gzip
    elif codec == Codec.LZ4:
        library = cramjam.lz4
        data = repair_lz4_header(data)
    elif codec == Codec.ZSTD:
        library = cramjam.zstd
    else:
        return Status.UNKNOWN_CODEC, 0
    try:
        return Status.OK, library.decompress_into(data, out)
    except cramjam.DecompressionError as error:
        # cramjam tells these two only by its texts; tests pin them
        if "write whole buffer" in str(error):
            return Status.ROOM_NEEDED, 0
        # RFC 8878, 3.1.1.1.2: a frame says how many bytes of history it needs. zstd's limit, and
        # Kafka's through zstd-jni, is 2^27.
        if "too much memory" in str(error):
            return Status.LIMIT, 0
        return Status.CORRUPT, 0


def decompressed(codec: int, data: bytes, allowance: int) -> tuple[Status, bytes]:
    """(OK, the decompressed bytes), or a status as of `decompress` and nothing: LIMIT for more
    than `allowance` bytes."""
    source = np.frombuffer(data, np.uint8)
    room = min(max(8 * len(data), 1 << 16), allowance)
    while True:
        out = np.empty(room, np.uint8)
        status, size = decompress(codec, source, out)
        if status == Status.OK:
            return status, out[:size].tobytes()
        if status != Status.ROOM_NEEDED:
            return status, b""
        if room == allowance:
            return Status.LIMIT, b""
        room = min(4 * room, allowance)


XERIAL_MAGIC = b"\x82SNAPPY\x00"
XERIAL_HEADER_SIZE = 16  # magic, int32 format version, int32 oldest compatible version
_XERIAL_MAGIC_WORD = int.from_bytes(XERIAL_MAGIC[:4], "big")


def _decompress_snappy(data: Bytes, out: Bytes) -> tuple[Status, int]:
    view = memoryview(data)
    if bytes(view[:8]) != XERIAL_MAGIC:
        return _snappy_block(data, out)
    pos = 0
    written = 0
    end = data.size
    while pos < end:
        if end - pos < 4:
            return Status.CORRUPT, 0
        block_size = int.from_bytes(view[pos : pos + 4], "big")
        if block_size == _XERIAL_MAGIC_WORD and bytes(view[pos : pos + 8]) == XERIAL_MAGIC:
            pos += XERIAL_HEADER_SIZE  # xerial streams may be concatenated
            if pos > end:
                return Status.CORRUPT, 0
            continue
        pos += 4
        if block_size > end - pos:
            return Status.CORRUPT, 0
        status, size = _snappy_block(data[pos : pos + block_size], out[written:])
        if status != Status.OK:
            return status, 0
        pos += block_size
        written += size
    return Status.OK, written


def _snappy_block(data: Bytes, out: Bytes) -> tuple[Status, int]:
    try:
        if cramjam.snappy.decompress_raw_len(data) > out.size:
            return Status.ROOM_NEEDED, 0
        return Status.OK, cramjam.snappy.decompress_raw_into(data, out)
    except cramjam.DecompressionError:
        return Status.CORRUPT, 0


LZ4_MAGIC = b"\x04\x22\x4d\x18"


def _lz4_header_checksums(header: bytes) -> tuple[int, int]:
    """(correct checksum, checksum of Kafka before 0.10) of a header without its checksum byte."""
    right, old = xxhash.xxh32_intdigest(header[4:]), xxhash.xxh32_intdigest(header)
    return (right >> 8) & 0xFF, (old >> 8) & 0xFF


def repair_lz4_header(data: Bytes) -> Bytes:
    """`data`, or a copy with the correct header checksum if it has Kafka's old wrong one."""
    head = data[:19].tobytes()  # the longest header: content size and dictionary id
    if head[:4] != LZ4_MAGIC or len(head) < 7:
        return data
    flags = head[4]
    place = 6 + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0)
    if place >= len(head):
        return data
    right, old = _lz4_header_checksums(head[:place])
    if head[place] == right or head[place] != old:
        return data
    repaired = data.copy()
    repaired[place] = right
    return repaired


def compress(codec: int, data: bytes, *, xerial: bool = True, old_lz4: bool = False) -> bytes:
    """Compress as Kafka's clients do. Raises ValueError for an unknown codec.

    xerial: frame snappy as Java clients do, else write one raw block (librdkafka and others).
    old_lz4: write the wrong header checksum of Kafka before 0.10.
    """
    if codec == Codec.NONE:
        return data
    if codec == Codec.GZIP:
        return bytes(cramjam.gzip.compress(data))
    if codec == Codec.ZSTD:
        return bytes(cramjam.zstd.compress(data, 3))
    if codec == Codec.LZ4:
        # like Kafka's writer: brokers reject blocks that depend on earlier ones
        writer = cramjam.lz4.Compressor(content_checksum=False, block_linked=False)
        writer.compress(data)
        frame = bytearray(bytes(writer.finish()))
        if old_lz4:
            place = 6 + (8 if frame[4] & 0x08 else 0)
            frame[place] = (xxhash.xxh32_intdigest(bytes(frame[:place])) >> 8) & 0xFF
        return bytes(frame)
    if codec == Codec.SNAPPY:
        return _compress_snappy(data, xerial)
    raise ValueError(f"unknown codec {codec}")


_XERIAL_BLOCK_SIZE = 32 << 10


def _compress_snappy(data: bytes, xerial: bool) -> bytes:
    raw: Any = cramjam.snappy.compress_raw
    if not xerial:
        return bytes(raw(data))
    parts = [XERIAL_MAGIC, (1).to_bytes(4, "big"), (1).to_bytes(4, "big")]
    for pos in range(0, len(data), _XERIAL_BLOCK_SIZE):
        block = bytes(raw(data[pos : pos + _XERIAL_BLOCK_SIZE]))
        parts += [len(block).to_bytes(4, "big"), block]
    return b"".join(parts)
