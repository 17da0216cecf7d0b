"""Kernel and reference agree on whatever bytes there are."""

from typing import Any

import crc32c
import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from kdissect.codec.compression import CODEC_NAMES, DecompressionLimits, compress
from kdissect.codec.record_encoder import encode_batch, encode_message, encode_messages
from kdissect.codec.strings import as_text
from tests.codec.record_cases import assert_twins_agree

INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
MAYBE = st.none() | st.binary(max_size=20)


@st.composite
def batches(draw: Any) -> bytes:
    """A record batch of magic 2 with any header."""
    base_offset = draw(st.integers(0, 2**62))
    records = [
        {
            "offset": base_offset + draw(INT32),
            "timestamp_ms": draw(INT64),
            "key": draw(MAYBE),
            "value": draw(MAYBE),
            "headers": draw(
                st.lists(
                    st.fixed_dictionaries(
                        {"key": st.text(max_size=4) | st.binary(max_size=4), "value": MAYBE}
                    ),
                    max_size=3,
                )
            ),
        }
        for _ in range(draw(st.integers(0, 4)))
    ]
    return encode_batch(
        records,
        base_offset=base_offset,
        last_offset=base_offset + draw(INT32),
        codec=draw(st.sampled_from(CODEC_NAMES)),
        timestamp_type=draw(st.sampled_from(["CreateTime", "LogAppendTime"])),
        base_timestamp_ms=draw(INT64),
        max_timestamp_ms=draw(INT64),
        producer_id=draw(INT64),
        producer_epoch=draw(st.integers(-(2**15), 2**15 - 1)),
        base_sequence=draw(INT32),
        partition_leader_epoch=draw(INT32),
        is_transactional=draw(st.booleans()),
        is_control=draw(st.booleans()),
        delete_horizon_ms=draw(st.none() | INT64),
        record_count=draw(st.none() | st.integers(-1, 6)),
        xerial=draw(st.booleans()),
    )


@st.composite
def message_sets(draw: Any) -> bytes:
    magic = draw(st.integers(0, 1))
    record = st.fixed_dictionaries(
        {"offset": st.integers(0, 2**62), "timestamp_ms": INT64, "key": MAYBE, "value": MAYBE}
    )
    return encode_messages(
        draw(st.lists(record, min_size=1, max_size=4)),
        magic,
        codec=draw(st.sampled_from(CODEC_NAMES)),
        timestamp_type=draw(st.sampled_from(["CreateTime", "LogAppendTime"])),
        wrapper_offset=draw(st.none() | st.just(0) | INT64),
        xerial=draw(st.booleans()),
    )


RECORD_SETS = st.lists(batches() | message_sets(), max_size=4).map(b"".join)
CHUNK_BYTES = st.sampled_from([1, 64, 8 << 20])


@given(st.lists(RECORD_SETS, max_size=3), CHUNK_BYTES)
def test_random_sets(sets: list[bytes], chunk_bytes: int) -> None:
    """Sets of good and changed batches, in chunks of any size."""
    assert_twins_agree(sets, chunk_bytes=chunk_bytes)


@given(RECORD_SETS, st.data(), CHUNK_BYTES)
def test_flipped_bytes(data: bytes, draw: Any, chunk_bytes: int) -> None:
    """Bytes changed anywhere; some batches get their CRC redone, which must not matter."""
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        if damaged:
            pos = draw.draw(st.integers(0, len(damaged) - 1))
            damaged[pos] = draw.draw(st.integers(0, 255))
    assert_twins_agree([bytes(damaged), data], chunk_bytes=chunk_bytes)


@given(batches(), st.data())
def test_damaged_sections(batch: bytes, draw: Any) -> None:
    """Bytes of the section changed, inserted or cut, under a header that fits."""
    section = bytearray(batch[61:])
    for _ in range(draw.draw(st.integers(1, 3))):
        pos = draw.draw(st.integers(0, len(section)))
        some = draw.draw(st.binary(max_size=3))
        section[pos : pos + draw.draw(st.integers(0, 3))] = some
    data = bytearray(batch[:61] + bytes(section))
    data[8:12] = (len(data) - 12).to_bytes(4, "big")
    data[17:21] = crc32c.crc32c(bytes(data[21:])).to_bytes(4, "big")
    assert_twins_agree([bytes(data)])


@given(message_sets(), st.integers(0, 1), INT64, st.data())
def test_damaged_wrappers(inner: bytes, magic: int, offset: int, draw: Any) -> None:
    """A wrapper whose message set was changed, with a CRC that is right."""
    changed = bytearray(inner)
    for _ in range(draw.draw(st.integers(0, 3))):
        changed[draw.draw(st.integers(0, len(changed) - 1))] = draw.draw(st.integers(0, 255))
    record = {"offset": offset, "timestamp_ms": 77, "key": b"k", "value": compress(1, changed)}
    attributes = 1 | draw.draw(st.sampled_from([0, 8]))
    assert_twins_agree([encode_message(record, magic, attributes)])


@given(st.binary(max_size=200))
@example(b"\x00" * 100)
@example(b"\xff" * 100)
def test_random_bytes(data: bytes) -> None:
    """Bytes without any structure."""
    assert_twins_agree([data, data[1:]])


@given(
    st.integers(0, 2).flatmap(
        lambda magic: st.tuples(st.just(magic), st.integers(14, 120), st.binary(max_size=130))
    )
)
def test_random_bytes_behind_a_header(case: tuple[int, int, bytes]) -> None:
    """Random bytes after a header of any magic and length."""
    magic, length, rest = case
    assert_twins_agree([bytes(8) + length.to_bytes(4, "big") + bytes(4) + bytes([magic]) + rest])


@given(batches(), st.integers(1, 300), st.integers(1, 4))
def test_limits(batch: bytes, size: int, ratio: int) -> None:
    """Any limits of decompression."""
    limits = DecompressionLimits(
        decompressed_size_max=size, ratio_max=ratio, ratio_free_size=size // 2 + 1
    )
    assert_twins_agree([batch * 3], limits)


@given(st.lists(st.binary(max_size=6) | st.text(max_size=3).map(str.encode), max_size=20))
@example([b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe0\x9f\xbf", b"\xc0\x80", b"\xf0\x9f\x98\x80"])
def test_text_is_the_utf8_of_python(strings: list[bytes]) -> None:
    """A column of text accepts the UTF-8 that Python accepts, and repairs the rest as Python."""

    def is_invalid(string: bytes) -> bool:
        try:
            string.decode()
        except UnicodeDecodeError:
            return True
        return False

    text, wrong = as_text(pa.array([*strings, None], pa.binary()))
    assert wrong.tolist() == [row for row, string in enumerate(strings) if is_invalid(string)]
    assert text.to_pylist() == [*(string.decode("utf-8", "replace") for string in strings), None]
