"""Fast reads of batch headers agree with the full parser."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from kdissect.replay.batch_headers import BATCH_HEADER_SIZE, has_producer, headers, last_data

OFFSETS = st.integers(0, 1 << 40)


@st.composite
def entries(draw: st.DrawFn) -> bytes:
    """A batch, or an entry of magic 0 or 1; its content does not matter here."""
    offset = draw(OFFSETS)
    if draw(st.booleans()):
        rest = draw(st.binary(min_size=14, max_size=30))
        old = bytes([*rest[:4], draw(st.integers(0, 1)), *rest[5:]])
        return struct.pack(">qi", offset, len(old)) + old
    content = draw(st.binary(max_size=20))
    attributes = draw(st.sampled_from([0, 3, 16, 32, 48]))
    producer = draw(st.sampled_from([-1, 0, 4711, 1 << 40]))
    head = struct.pack(
        ">qiibIhiqqqhii",
        offset, BATCH_HEADER_SIZE - 12 + len(content), 0, 2, 0, attributes,
        draw(st.integers(0, 99)), 0, 0, producer, 0, 0, 1,
    )  # fmt: skip
    return head + content


@given(st.lists(entries(), max_size=4), st.binary(max_size=70), st.integers(0, 400))
def test_fast_reads_agree_with_all_headers(parts: list[bytes], tail: bytes, cut: int) -> None:
    """Fast reads agree with `headers` for any cut, and any bytes after the batches."""
    data = (b"".join(parts) + tail)[: 400 - cut]
    found = list(headers(data))
    wanted = [it.last_offset for it in found if not it.is_partial and not it.is_control]
    assert last_data(data) == max([-1, *wanted])
    assert has_producer(data) or all(it.producer_id < 0 or it.is_partial for it in found)


def test_a_producer_id_is_read_from_headers() -> None:
    """`has_producer` reads the producer ID of every batch header."""
    plain = struct.pack(
        ">qiibIhiqqqhii", 5, BATCH_HEADER_SIZE - 12, 0, 2, 0, 0, 2, 0, 0, -1, -1, -1, 3
    )
    assert not has_producer(plain + plain)
    assert last_data(plain) == 7
    assert has_producer(plain[:43] + bytes(8) + plain[51:])
