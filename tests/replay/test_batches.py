"""Headers of record batches, against the values that were packed."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from kdissect.replay.batches import BATCH_HEADER_SIZE, headers, last_data

OFFSETS = st.integers(0, 1 << 40)
CONTROL = 32


@st.composite
def entries(draw: st.DrawFn) -> tuple[bytes, tuple[int, int, int, bool]]:
    """A batch, or an entry of magic 0 or 1, whose content does not matter here; its base and last
    offset, producer id, and whether it is a control batch."""
    offset = draw(OFFSETS)
    if draw(st.booleans()):
        rest = draw(st.binary(min_size=14, max_size=30))
        old = bytes([*rest[:4], draw(st.integers(0, 1)), *rest[5:]])
        return struct.pack(">qi", offset, len(old)) + old, (offset, offset, -1, False)
    content = draw(st.binary(max_size=20))
    attributes = draw(st.sampled_from([0, 3, 16, CONTROL, CONTROL + 16]))
    producer = draw(st.sampled_from([-1, 0, 4711, 1 << 40]))
    delta = draw(st.integers(0, 99))
    head = struct.pack(
        ">qiibIhiqqqhii",
        offset, BATCH_HEADER_SIZE - 12 + len(content), 0, 2, 0, attributes,
        delta, 0, 0, producer, 0, 0, 1,
    )  # fmt: skip
    return head + content, (offset, offset + delta, producer, bool(attributes & CONTROL))


@given(st.lists(entries(), max_size=4), st.integers(0, 400))
def test_headers_have_the_packed_values(
    packed: list[tuple[bytes, tuple[int, int, int, bool]]], kept: int
) -> None:
    """Of all batches that are whole after any cut; only the last one can be partial."""
    data = b"".join(entry for entry, _ in packed)[:kept]
    found = list(headers(data))
    ends = [sum(len(entry) for entry, _ in packed[: n + 1]) for n in range(len(packed))]
    whole = [values for (_, values), end in zip(packed, ends, strict=True) if end <= len(data)]
    assert [
        (each.base_offset, each.last_offset, each.producer_id, each.is_control)
        for each in found
        if not each.is_partial
    ] == whole
    assert not any(each.is_partial for each in found[:-1])
    assert last_data(data) == max([-1, *(last for _, last, _, is_marker in whole if not is_marker)])
