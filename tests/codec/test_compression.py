"""Codecs decompress into bounded buffers, and refuse data that is wrong or too large."""

import random

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kdissect.codec.compression import (
    XERIAL_MAGIC,
    Codec,
    DecompressionLimits,
    compress,
    decompress,
    repair_lz4_header,
)
from kdissect.status import Status

CODECS = [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD]
TEXT = b"".join(b"record %d of the test, " % (i % 700) for i in range(10_000))


def view(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("spare", [0, 1, 100_000])
@pytest.mark.parametrize("xerial", [True, False])
def test_round_trip(codec: Codec, spare: int, xerial: bool) -> None:
    """Compressed text fits into a buffer of its size, or of more."""
    out = np.zeros(len(TEXT) + spare, np.uint8)
    status, size = decompress(codec, view(compress(codec, TEXT, xerial=xerial)), out)
    assert (status, size) == (Status.OK, len(TEXT))
    assert out[:size].tobytes() == TEXT


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("room", [0, 1, 1000, len(TEXT) - 1])
def test_full_output_differs_from_corrupt_input(codec: Codec, room: int) -> None:
    """Nothing is written beyond the output; depends on the library's wording, so pinned here."""
    arena = np.zeros(room + 64, np.uint8)
    status, size = decompress(codec, view(compress(codec, TEXT)), arena[:room])
    assert (status, size) == (Status.ROOM_NEEDED, 0)
    assert not arena[room:].any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("xerial", [True, False])
def test_cut_input_is_corrupt(codec: Codec, xerial: bool) -> None:
    """Each shorter input is refused, except a xerial stream between blocks."""
    data = compress(codec, TEXT[:500], xerial=xerial)
    out = np.zeros(1000, np.uint8)
    for size in range(len(data)):
        status, _ = decompress(codec, view(data[:size]), out)
        # A xerial stream may end between two blocks.
        empty = codec == Codec.SNAPPY and xerial and size in (8, 16)
        assert status == Status.OK if empty and size == 16 else status != Status.OK, size


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
def test_damaged_input_gives_a_status(codec: Codec, data: st.DataObject) -> None:
    """No exception and nothing beyond the output, whatever the bytes."""
    damaged = bytearray(compress(codec, TEXT[:300], xerial=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(0, 6))):
        pos = data.draw(st.integers(0, len(damaged) - 1))
        damaged[pos] = data.draw(st.integers(0, 255))
    arena = np.zeros(400, np.uint8)
    status, size = decompress(codec, view(bytes(damaged)), arena[:350])
    assert status in (Status.OK, Status.CORRUPT, Status.ROOM_NEEDED, Status.LIMIT)
    assert 0 <= size <= 350
    assert not arena[350:].any()


@pytest.mark.parametrize("codec", CODECS)
def test_random_bytes_are_no_compressed_data(codec: Codec) -> None:
    """Five random bytes and more are refused, in every codec."""
    rng = random.Random(7)
    out = np.zeros(1000, np.uint8)
    for size in (0, 1, 5, 50, 500):
        for _ in range(20):
            assert decompress(codec, view(rng.randbytes(size)), out)[0] != Status.OK or size < 5


def test_unknown_codec() -> None:
    """Codecs above zstd's number have a status of their own."""
    for codec in (5, 6, 7):
        assert decompress(codec, view(b"abc"), np.zeros(9, np.uint8)) == (Status.UNKNOWN_CODEC, 0)


def test_xerial_streams_behind_each_other() -> None:
    """snappy-java reads concatenated streams, header and all."""
    data = compress(Codec.SNAPPY, b"one") + compress(Codec.SNAPPY, b"two")
    out = np.zeros(10, np.uint8)
    assert decompress(Codec.SNAPPY, view(data), out) == (Status.OK, 6)
    assert out[:6].tobytes() == b"onetwo"


@pytest.mark.parametrize(
    "tail", [b"\0", b"\0\0\0\5abc", b"\xff\xff\xff\xff", b"\0\0\0\3\xff\xff\xff", XERIAL_MAGIC]
)
def test_xerial_with_a_bad_block_is_corrupt(tail: bytes) -> None:
    """A block with a wrong length after a good one is refused."""
    data = compress(Codec.SNAPPY, b"one") + tail
    assert decompress(Codec.SNAPPY, view(data), np.zeros(10, np.uint8))[0] == Status.CORRUPT


@pytest.mark.parametrize("size", [3, 200_000])
def test_old_lz4_header_checksum_is_repaired(size: int) -> None:
    """Kafka before 0.10 hashed the magic number too (KAFKA-3160)."""
    old = compress(Codec.LZ4, TEXT[:size], old_lz4=True)
    new = compress(Codec.LZ4, TEXT[:size])
    assert old != new
    out = np.zeros(size, np.uint8)
    assert decompress(Codec.LZ4, view(old), out) == (Status.OK, size)
    assert repair_lz4_header(view(old)).tobytes() == new
    untouched = view(new)
    assert repair_lz4_header(untouched) is untouched


@pytest.mark.parametrize("flags", [0x40, 0x48, 0x49, 0x41])
def test_lz4_header_of_any_length(flags: int) -> None:
    """The checksum of Kafka's old lz4 frames is repaired for all header flags."""
    head = b"\x04\x22\x4d\x18" + bytes([flags, 0x40])
    head += bytes(8 if flags & 8 else 0) + bytes(4 if flags & 1 else 0)
    old = (xxhash.xxh32_intdigest(head) >> 8) & 255
    right = (xxhash.xxh32_intdigest(head[4:]) >> 8) & 255
    repaired = repair_lz4_header(view(head + bytes([old]) + bytes(4)))
    assert repaired[len(head)] == right
    for size in range(len(head) + 1):
        assert repair_lz4_header(view(head[:size])).tobytes() == head[:size]


def zstd_frame(window_log: int) -> bytes:
    """A frame of one raw block that announces this window."""
    block = (1 | 6 << 3).to_bytes(3, "little") + b"abcdef"
    return b"\x28\xb5\x2f\xfd" + bytes([0, (window_log - 10) << 3]) + block


@pytest.mark.parametrize("window_log", [10, 20, 27, 28, 31, 41])
def test_zstd_windows(window_log: int) -> None:
    """Kafka's clients accept up to 2^27; more is refused before anything is allocated."""
    found = decompress(Codec.ZSTD, view(zstd_frame(window_log)), np.zeros(6, np.uint8))
    assert found == ((Status.OK, 6) if window_log <= 27 else (Status.LIMIT, 0))


def test_zstd_single_segment_announces_its_content() -> None:
    """A single segment has the content's size for a window (RFC 8878)."""
    frame = view(b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\1\0\0")
    assert decompress(Codec.ZSTD, frame, np.zeros(6, np.uint8)) == (Status.LIMIT, 0)


def test_allowances_grow_with_the_compressed_size() -> None:
    """Allowances grow with the compressed size up to the limits; wrong limits raise ValueError."""
    limits = DecompressionLimits(decompressed_size_max=1000, ratio_max=3, ratio_free_size=100)
    assert [limits.batch_allowance(size) for size in (0, 10, 50, 400)] == [100, 100, 150, 1000]
    assert [limits.set_allowance(size) for size in (0, 1000)] == [1000, 3000]
    with pytest.raises(ValueError, match="ratio_max"):
        DecompressionLimits(ratio_max=0)
    with pytest.raises(ValueError, match="decompressed_size_max"):
        DecompressionLimits(decompressed_size_max=1 << 31)
    with pytest.raises(ValueError, match="codec"):
        compress(9, b"")
