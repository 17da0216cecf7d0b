"""The compiled loops of record decoding; `record_codec` has their meaning in plain Python.

There are four steps, each over many batches per call. `scan_batches` walks over record sets from
batch header to batch header. `small_crcs` checks small uncompressed batches (each message of magic
0 or 1 is a batch, so calling a library for each would cost more than the check). `parse_records`
turns record sections into rows of views. `gather` copies the viewed bytes into Arrow's buffers.

Sections lie in the input or in a buffer of decompressed bytes, so rows refer to bytes by address.
Nothing is allocated here. `parse_records` stops between two records if its rows are full, and
continues at the next call: the state of an item is stored in the item.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdissect.codec.string_kernel import utf8_step
from kdissect.jit import (
    JIT_ENABLED,
    copy_bytes,
    inlined,
    kernel,
    load_u8,
    load_u32,
    part,
    read_i8,
    read_i16,
    read_i32,
    read_i64,
    read_u8,
    read_u32,
)
from kdissect.status import Status

# Words of a scanned batch. Fields beyond its `visible` bytes (if the end is cut off) are undefined.
SET, INDEX, POS, SIZE, STATE, VISIBLE = 0, 1, 2, 3, 4, 5
BASE_OFFSET, LAST_OFFSET, MAGIC, ATTRIBUTES, CRC, COUNT = 6, 7, 8, 9, 10, 11
BASE_TIME, MAX_TIME, PRODUCER_ID, PRODUCER_EPOCH, BASE_SEQUENCE, LEADER_EPOCH = range(12, 18)
CRC_START, SECTION_START, SECTION_SIZE = 18, 19, 20
BATCH_WORDS = 21

# States of a scanned batch.
WHOLE, PARTIAL, ALIEN, TOO_SMALL, BAD_LENGTH = range(5)

ENTRY_HEADER_SIZE = 12  # offset, length
MAGIC_POS = 16
BATCH_HEADER_SIZE = 61  # magic 2, up to the records
MESSAGE_HEADER_SIZE_V0 = 18  # magic 0, up to the key's length
MESSAGE_HEADER_SIZE_V1 = 26
ENTRY_LENGTH_MIN = 14  # a message of magic 0 with null key and null value

# Words of an item: a record section, and the progress of parsing it.
ADDRESS, LENGTH, KIND, ITEM_COUNT, OFFSET, TIME, FLAGS, ITEM_MAGIC = range(8)
_NEXT, READ, ITEM_STATUS, SHIFT, FIRST_OFFSET, IS_WALKED = range(8, 14)
ITEM_WORDS = 14

SKIP, BATCH, MESSAGES = 0, 1, 2  # KIND
IS_LOG_APPEND, IS_CONTROL, IS_WRAPPER = 1, 2, 4  # FLAGS

# Columns of parsed rows and headers; each table is stored column by column in one array.
ROW_ITEM, ROW_INDEX, ROW_OFFSET, ROW_TIME, ROW_CONTROL = range(5)
KEY_ADDRESS, KEY_LENGTH, VALUE_ADDRESS, VALUE_LENGTH, ROW_HEADERS = range(5, 10)
ROW_COLUMNS = 10
HEADER_KEY_ADDRESS, HEADER_KEY_LENGTH, HEADER_VALUE_ADDRESS, HEADER_VALUE_LENGTH = range(4)
HEADER_COLUMNS = 4

# Words of `parse_records`' state.
NEXT_ITEM, ROW_COUNT, HEADER_COUNT, HEADERS_NEEDED = 0, 1, 2, 3
STATE_WORDS = 4

NO_CONTROL_TYPE = -1
UNKNOWN_CONTROL_TYPE = 7

_OK = int(Status.OK)
_TRUNCATED = int(Status.TRUNCATED)
_OVERFLOW = int(Status.VARINT_OVERFLOW)
_NEGATIVE = int(Status.NEGATIVE_LENGTH)
_IMPOSSIBLE = int(Status.COUNT_IMPOSSIBLE)
_SIZE_MISMATCH = int(Status.SIZE_MISMATCH)
_COUNT_MISMATCH = int(Status.COUNT_MISMATCH)
_UNKNOWN_CODEC = int(Status.UNKNOWN_CODEC)
_UNKNOWN_MAGIC = int(Status.UNKNOWN_MAGIC)
_LIMIT = int(Status.LIMIT)
_ROOM_NEEDED = int(Status.ROOM_NEEDED)

_LOW_63 = 0x7FFFFFFFFFFFFFFF


if JIT_ENABLED:

    @inlined
    def _sum(a: int, b: int) -> int:
        return a + b

else:

    def _sum(a: int, b: int) -> int:
        """Wrapped around as machine words do."""
        return ((int(a) + int(b) + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


@inlined
def _load_i32(address: Any) -> Any:
    value = load_u32(address)
    return (np.int64(value) ^ 0x80000000) - 0x80000000


@inlined
def _load_i64(address: Any) -> Any:
    return (_load_i32(address) << 32) | np.int64(load_u32(address + 4))


@kernel
def scan_batches(buf: Any, start: Any, length: Any, state: Any, out: Any) -> Any:
    """Walk over record sets and describe their batches; returns the number of rows, 0 at the end.

    buf: uint8. start, length: int64, the sets inside buf. state: int64[3] (set, pos or -1 at the
    set's beginning, batch index), from which the next call continues. out: int64, whole batch rows.
    """
    row_count_max = out.size // BATCH_WORDS
    set_index = state[0]
    pos = state[1]
    index = state[2]
    count = 0
    while set_index < start.size and count < row_count_max:
        end = start[set_index] + length[set_index]
        if pos < 0:
            pos = start[set_index]
            index = 0
        if pos >= end:
            set_index += 1
            pos = -1
            continue
        size = _scan_batch(buf, pos, end, out, count * BATCH_WORDS)
        out[count * BATCH_WORDS + SET] = set_index
        out[count * BATCH_WORDS + INDEX] = index
        count += 1
        index += 1
        pos += size
    state[0] = set_index
    state[1] = pos
    state[2] = index
    return count


@inlined
def _scan_batch(buf: Any, pos: Any, end: Any, out: Any, row: Any) -> Any:
    left = end - pos
    for word in range(BATCH_WORDS):
        out[row + word] = -1
    out[row + POS] = pos
    out[row + SIZE] = left
    out[row + VISIBLE] = left
    out[row + STATE] = PARTIAL
    out[row + ATTRIBUTES] = 0
    # Kafka's record batch header: baseOffset int64, batchLength int32
    if left >= 8:
        out[row + BASE_OFFSET] = read_i64(buf, pos)
        out[row + LAST_OFFSET] = out[row + BASE_OFFSET]
    if left < ENTRY_HEADER_SIZE:
        return left
    entry_length = read_i32(buf, pos + 8)
    if entry_length < ENTRY_LENGTH_MIN:
        out[row + STATE] = BAD_LENGTH
        out[row + COUNT] = entry_length
        return left
    # all formats have their magic at byte 16
    if left <= MAGIC_POS:
        return left
    magic = read_i8(buf, pos + MAGIC_POS)
    out[row + MAGIC] = magic
    size = ENTRY_HEADER_SIZE + entry_length
    if size <= left:
        out[row + SIZE] = size
        out[row + VISIBLE] = size
        out[row + STATE] = WHOLE
        left = size
    is_whole = out[row + STATE] == WHOLE
    if magic < 0 or magic > 2:
        if is_whole:
            out[row + STATE] = ALIEN
        return out[row + SIZE]
    if magic == 2:
        header_size = BATCH_HEADER_SIZE
    elif magic == 1:
        header_size = MESSAGE_HEADER_SIZE_V1 + 8
    else:
        header_size = MESSAGE_HEADER_SIZE_V0 + 8
    if is_whole and size < header_size:
        out[row + STATE] = TOO_SMALL
        return size
    if magic == 2:
        _scan_header(buf, pos, left, out, row)
    else:
        _scan_message(buf, pos, left, magic, out, row)
    return out[row + SIZE]


@inlined
def _scan_header(buf: Any, pos: Any, left: Any, out: Any, row: Any) -> Any:
    # magic 2 (KIP-98): partitionLeaderEpoch, magic, crc, attributes, lastOffsetDelta,
    # baseTimestamp, maxTimestamp, producerId, producerEpoch, baseSequence, record count
    out[row + LEADER_EPOCH] = read_i32(buf, pos + 12)
    if left >= 21:
        out[row + CRC] = read_u32(buf, pos + 17)
    if left >= 23:
        out[row + ATTRIBUTES] = read_i16(buf, pos + 21)
    if left >= 27:
        out[row + LAST_OFFSET] = _sum(out[row + BASE_OFFSET], read_i32(buf, pos + 23))
    if left >= 35:
        out[row + BASE_TIME] = read_i64(buf, pos + 27)
    if left >= 43:
        out[row + MAX_TIME] = read_i64(buf, pos + 35)
    if left >= 51:
        out[row + PRODUCER_ID] = read_i64(buf, pos + 43)
    if left >= 53:
        out[row + PRODUCER_EPOCH] = read_i16(buf, pos + 51)
    if left >= 57:
        out[row + BASE_SEQUENCE] = read_i32(buf, pos + 53)
    if left >= BATCH_HEADER_SIZE:
        out[row + COUNT] = read_i32(buf, pos + 57)
    # the CRC-32C covers the bytes from the attributes on
    out[row + CRC_START] = pos + 21
    out[row + SECTION_START] = pos + BATCH_HEADER_SIZE
    out[row + SECTION_SIZE] = left - BATCH_HEADER_SIZE


@inlined
def _scan_message(buf: Any, pos: Any, left: Any, magic: Any, out: Any, row: Any) -> Any:
    # magic 0, 1: crc, magic, attributes, timestamp (magic 1, KIP-32), key, value
    out[row + CRC] = read_u32(buf, pos + 12)
    out[row + CRC_START] = pos + 16
    if left >= 18:
        out[row + ATTRIBUTES] = read_u8(buf, pos + 17)
    if magic == 1 and left >= 26:
        out[row + MAX_TIME] = read_i64(buf, pos + 18)
    # The section of a message is the message itself, a message set of one. The section of a wrapper
    # is its value; size -1 if there is none.
    out[row + SECTION_START] = pos
    out[row + SECTION_SIZE] = left
    if out[row + STATE] != WHOLE or out[row + ATTRIBUTES] & 7 == 0:
        return
    out[row + SECTION_SIZE] = -1
    place = pos + (MESSAGE_HEADER_SIZE_V1 if magic == 1 else MESSAGE_HEADER_SIZE_V0)
    end = pos + left
    key_size = read_i32(buf, place)
    place += 4
    if key_size > 0:
        if key_size > end - place:
            return
        place += key_size
    if end - place < 4:
        return
    value_size = read_i32(buf, place)
    place += 4
    if 0 <= value_size <= end - place:
        out[row + SECTION_START] = place
        out[row + SECTION_SIZE] = value_size


def _crc_table(polynomial: int) -> Any:
    """Eight tables of 256 for a 32-bit CRC (reflected polynomial), which handle eight bytes per
    step."""
    table = np.zeros((8, 256), np.int64)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (polynomial if value & 1 else 0)
        table[0, byte] = value
    for step in range(1, 8):
        previous = table[step - 1]
        table[step] = (previous >> 8) ^ table[0, previous & 0xFF]
    return table.reshape(-1)


CRC32_TABLE = _crc_table(0xEDB88320)
CRC32C_TABLE = _crc_table(0x82F63B78)  # Castagnoli polynomial, RFC 3720, 12.1


@inlined
def _crc32(buf: Any, pos: Any, end: Any, table: Any) -> Any:
    crc = 0xFFFFFFFF
    while pos + 8 <= end:
        crc = (
            table[7 * 256 + ((crc & 0xFF) ^ read_u8(buf, pos))]
            ^ table[6 * 256 + ((crc >> 8 & 0xFF) ^ read_u8(buf, pos + 1))]
            ^ table[5 * 256 + ((crc >> 16 & 0xFF) ^ read_u8(buf, pos + 2))]
            ^ table[4 * 256 + ((crc >> 24 & 0xFF) ^ read_u8(buf, pos + 3))]
            ^ table[3 * 256 + read_u8(buf, pos + 4)]
            ^ table[2 * 256 + read_u8(buf, pos + 5)]
            ^ table[1 * 256 + read_u8(buf, pos + 6)]
            ^ table[read_u8(buf, pos + 7)]
        )
        pos += 8
    while pos < end:
        crc = (crc >> 8) ^ table[(crc ^ read_u8(buf, pos)) & 0xFF]
        pos += 1
    return crc ^ 0xFFFFFFFF


@kernel
def small_crcs(buf: Any, start: Any, end: Any, table: Any, out: Any) -> Any:
    """Write the CRC of buf[start:end] for each pair; all arrays int64 except buf.

    table: CRC32_TABLE or CRC32C_TABLE. A byte takes half a nanosecond; a library that uses the
    processor's CRC-32C takes a twentieth of that.
    """
    for i in range(start.size):
        out[i] = _crc32(buf, start[i], end[i], table)


@kernel
def wrong_inner_crc(section: Any, magic: Any, table: Any, out: Any) -> Any:
    """Index of the first message in a decompressed wrapper whose CRC-32 is wrong; -1 if none.

    section: uint8. out: int64[2], receives its stored and its computed CRC. The search ends where
    the section has no further message of this magic.
    """
    pos = 0
    index = 0
    while section.size - pos > MAGIC_POS:
        size = read_i32(section, pos + 8)
        if size < ENTRY_LENGTH_MIN or size > section.size - pos - ENTRY_HEADER_SIZE:
            break
        if read_i8(section, pos + MAGIC_POS) != magic:
            break
        end = pos + ENTRY_HEADER_SIZE + size
        out[0] = read_u32(section, pos + 12)
        out[1] = _crc32(section, pos + 16, end, table)
        if out[0] != out[1]:
            return index
        pos = end
        index += 1
    return -1


# A varint reader returns (value, address after it), or a negated status in place of the address.


@part
def _load_zigzag(address: Any, end: Any, bits: Any) -> Any:
    """A zigzag number: groups of 7 bits, the lowest first, the sign in the lowest bit."""
    if address >= end:
        return 0, -_TRUNCATED
    byte = np.int64(load_u8(address))
    raw = byte & 0x7F
    address += 1
    shift = 7
    while byte & 0x80:
        if address >= end:
            return 0, -_TRUNCATED
        byte = np.int64(load_u8(address))
        address += 1
        if shift + 7 > bits and byte >> (bits - shift) != 0:
            return 0, -_OVERFLOW
        raw |= (byte & 0x7F) << shift
        shift += 7
    return ((raw >> 1) & _LOW_63) ^ -(raw & 1), address


@inlined
def _load_varint(address: Any, end: Any) -> Any:
    return _load_zigzag(address, end, 32)


@inlined
def _load_varlong(address: Any, end: Any) -> Any:
    return _load_zigzag(address, end, 64)


@kernel
def parse_records(
    items: Any, state: Any, byte_count_max: Any, headers_max: Any, rows: Any, headers: Any
) -> Any:
    """Parse the record sections of items into rows.

    items: int64, whole items. state: int64[4]: first item; on return also the rows and headers
    written, and the headers needed. rows, headers: int64, tables of ROW_COLUMNS and HEADER_COLUMNS.
    A row has its item, its index in the batch, control type (-1 none), address and length (-1 null)
    of key and value, and its number of headers.
    Returns OK, or ROOM_NEEDED if rows, headers or `byte_count_max` bytes of keys, values and
    headers are full: take the rows and call again. HEADERS_NEEDED is the number of headers of a
    single record that does not fit at all, else 0.
    """
    room = rows.size // ROW_COLUMNS
    header_room = headers.size // HEADER_COLUMNS
    row = 0
    header = 0
    byte_count = 0
    item_count = items.size // ITEM_WORDS
    state[HEADERS_NEEDED] = 0
    i = state[NEXT_ITEM]
    while i < item_count:
        at = i * ITEM_WORDS
        base = items[at + ADDRESS]
        end = base + items[at + LENGTH]
        kind = items[at + KIND]
        status = _OK
        if kind == MESSAGES and items[at + IS_WALKED] == 0:
            _walk_messages(items, at, base, end)
        while kind != SKIP:
            begin = base + items[at + _NEXT]
            if kind == BATCH:
                # the section must end exactly after the announced number of records
                if items[at + READ] >= items[at + ITEM_COUNT] or begin >= end:
                    if items[at + READ] != items[at + ITEM_COUNT] or begin < end:
                        status = _COUNT_MISMATCH
                    break
            elif begin >= end:
                break
            if row == room or (byte_count >= byte_count_max and row > 0):
                status = _ROOM_NEEDED
                break
            more = 0
            header_bytes = 0
            control = NO_CONTROL_TYPE
            if kind == BATCH:
                after, stop, time, offset, key, key_size, value, value_size, more = _load_record(
                    begin, end
                )
                # with LogAppendTime (KIP-32) all records have the batch's max timestamp
                if items[at + FLAGS] & IS_LOG_APPEND:
                    time = 0
                time = _sum(items[at + TIME], time)
                offset = _sum(items[at + OFFSET], offset)
                if items[at + FLAGS] & IS_CONTROL:
                    control = _load_control_type(key, key_size)
                if more > headers_max:
                    after = -_LIMIT
                elif more > header_room - header:
                    status = _ROOM_NEEDED
                    if row == 0:
                        state[HEADERS_NEEDED] = more
                    break
                elif more > 0:
                    after, header_bytes = _load_headers(after, stop, more, headers, header)
                if 0 <= after < stop:
                    after = -_SIZE_MISMATCH
            else:
                after, time, offset, key, key_size, value, value_size = _load_message(
                    begin, end, items[at + ITEM_MAGIC]
                )
                if items[at + FLAGS] & IS_LOG_APPEND:
                    time = items[at + TIME]
                offset = _sum(offset, items[at + SHIFT])
            if after < 0:
                status = -after
                break
            rows[ROW_ITEM * room + row] = i
            rows[ROW_INDEX * room + row] = items[at + READ]
            rows[ROW_OFFSET * room + row] = offset
            rows[ROW_TIME * room + row] = time
            rows[ROW_CONTROL * room + row] = control
            rows[KEY_ADDRESS * room + row] = key
            rows[KEY_LENGTH * room + row] = key_size
            rows[VALUE_ADDRESS * room + row] = value
            rows[VALUE_LENGTH * room + row] = value_size
            rows[ROW_HEADERS * room + row] = more
            if items[at + READ] == 0:
                items[at + FIRST_OFFSET] = offset
            items[at + _NEXT] = after - base
            items[at + READ] += 1
            row += 1
            header += more
            byte_count += max(key_size, 0) + max(value_size, 0) + header_bytes
        if status == _ROOM_NEEDED:
            state[NEXT_ITEM] = i
            state[ROW_COUNT] = row
            state[HEADER_COUNT] = header
            return _ROOM_NEEDED
        if items[at + ITEM_STATUS] == _OK:
            items[at + ITEM_STATUS] = status
        i += 1
    state[NEXT_ITEM] = i
    state[ROW_COUNT] = row
    state[HEADER_COUNT] = header
    return _OK


# Helpers get numbers, not arrays: counting references to arrays would cost more than a record.


@inlined
def _load_record(begin: Any, end: Any) -> Any:
    """A record of magic 2 up to its headers.

    Returns the next address or a negated status, the record's end, timestamp and offset deltas,
    address and size of key and value, and the number of headers.
    """
    size, p = _load_varint(begin, end)
    if p < 0:
        return p, 0, 0, 0, 0, 0, 0, 0, 0
    if size < 0:
        return -_NEGATIVE, 0, 0, 0, 0, 0, 0, 0, 0
    if size > end - p or size < 1:
        return -_TRUNCATED, 0, 0, 0, 0, 0, 0, 0, 0
    stop = p + size
    time, p = _load_varlong(p + 1, stop)  # after the attributes byte, which has no meaning
    if p < 0:
        return p, 0, 0, 0, 0, 0, 0, 0, 0
    offset, p = _load_varint(p, stop)
    if p < 0:
        return p, 0, 0, 0, 0, 0, 0, 0, 0
    key_size, p = _load_size(p, stop)
    if p < 0:
        return p, 0, 0, 0, 0, 0, 0, 0, 0
    key = p
    value_size, p = _load_size(p + max(key_size, 0), stop)
    if p < 0:
        return p, 0, 0, 0, 0, 0, 0, 0, 0
    value = p
    more, p = _load_varint(p + max(value_size, 0), stop)
    if p < 0:
        return p, 0, 0, 0, 0, 0, 0, 0, 0
    if more < 0:
        return -_NEGATIVE, 0, 0, 0, 0, 0, 0, 0, 0
    if more > (stop - p) >> 1:  # a header has at least two bytes
        return -_IMPOSSIBLE, 0, 0, 0, 0, 0, 0, 0, 0
    return p, stop, time, offset, key, key_size, value, value_size, more


@inlined
def _load_size(p: Any, stop: Any) -> Any:
    """A nullable size (-1: null), and the address of its bytes or a negated status."""
    size, p = _load_varint(p, stop)
    if p < 0:
        return size, p
    if size < -1:
        return size, -_NEGATIVE
    if size > stop - p:
        return size, -_TRUNCATED
    return size, p


@inlined
def _load_headers(p: Any, stop: Any, more: Any, headers: Any, header: Any) -> Any:
    """Headers of a record: (next address or a negated status, bytes viewed)."""
    room = headers.size // HEADER_COLUMNS
    viewed = 0
    for j in range(header, header + more):
        size, p = _load_size(p, stop)
        if p < 0:
            return p, 0
        if size < 0:
            return -_NEGATIVE, 0
        headers[HEADER_KEY_ADDRESS * room + j] = p
        headers[HEADER_KEY_LENGTH * room + j] = size
        p += size
        viewed += size
        size, p = _load_size(p, stop)
        if p < 0:
            return p, 0
        headers[HEADER_VALUE_ADDRESS * room + j] = p
        headers[HEADER_VALUE_LENGTH * room + j] = size
        p += max(size, 0)
        viewed += max(size, 0)
    return p, viewed


@inlined
def _load_control_type(key: Any, key_size: Any) -> Any:
    """The type in a control record's key: int16 key version, int16 type."""
    if key_size >= 4:
        word = _load_i32(key)
        if word >= 0 and word & 0xFFFF < UNKNOWN_CONTROL_TYPE:
            return word & 0xFFFF
    return UNKNOWN_CONTROL_TYPE


@inlined
def _walk_messages(items: Any, at: Any, base: Any, end: Any) -> Any:
    """Compute the shift of a wrapper's inner offsets (magic 1).

    Inner offsets count from 0, and the wrapper has the last one's absolute offset (KIP-31). A
    stored 0 means that no offsets were assigned yet: then they stay.
    """
    items[at + IS_WALKED] = 1
    items[at + SHIFT] = 0
    if (
        items[at + FLAGS] & IS_WRAPPER == 0
        or items[at + ITEM_MAGIC] != 1
        or items[at + OFFSET] == 0
    ):
        return
    last = 0
    p = base
    while end - p >= ENTRY_HEADER_SIZE:
        size = _load_i32(p + 8)
        if size < ENTRY_LENGTH_MIN or size > end - p - ENTRY_HEADER_SIZE:
            break
        last = _load_i64(p)
        p += ENTRY_HEADER_SIZE + size
    if p > base:
        items[at + SHIFT] = _sum(items[at + OFFSET], -last)


@inlined
def _load_message(begin: Any, end: Any, magic: Any) -> Any:
    """A message of magic 0 or 1.

    Returns the next address or a negated status, timestamp, stored offset, address and size of key
    and value.
    """
    if end - begin < ENTRY_HEADER_SIZE:
        return -_TRUNCATED, 0, 0, 0, 0, 0, 0
    size = _load_i32(begin + 8)
    if size < 0:
        return -_NEGATIVE, 0, 0, 0, 0, 0, 0
    if size > end - begin - ENTRY_HEADER_SIZE or size < ENTRY_LENGTH_MIN:
        return -_TRUNCATED, 0, 0, 0, 0, 0, 0
    stop = begin + ENTRY_HEADER_SIZE + size
    if np.int64(load_u8(begin + MAGIC_POS)) != magic:
        return -_UNKNOWN_MAGIC, 0, 0, 0, 0, 0, 0
    # a wrapper must not contain another wrapper
    if load_u8(begin + MAGIC_POS + 1) & 7 != 0:
        return -_UNKNOWN_CODEC, 0, 0, 0, 0, 0, 0
    time = -1
    p = begin + MESSAGE_HEADER_SIZE_V0
    if magic == 1:
        p = begin + MESSAGE_HEADER_SIZE_V1
        if stop - p < 8:
            return -_TRUNCATED, 0, 0, 0, 0, 0, 0
        time = _load_i64(begin + MESSAGE_HEADER_SIZE_V0)
    key_size = _load_i32(p)
    p += 4
    if key_size < -1:
        return -_NEGATIVE, 0, 0, 0, 0, 0, 0
    if key_size > stop - p - 4:
        return -_TRUNCATED, 0, 0, 0, 0, 0, 0
    key = p
    p += max(key_size, 0)
    value_size = _load_i32(p)
    p += 4
    if value_size < -1:
        return -_NEGATIVE, 0, 0, 0, 0, 0, 0
    if value_size > stop - p:
        return -_TRUNCATED, 0, 0, 0, 0, 0, 0
    value = p
    p += max(value_size, 0)
    if p != stop:
        return -_SIZE_MISMATCH, 0, 0, 0, 0, 0, 0
    return p, time, _load_i64(begin), key, key_size, value, value_size


@kernel
def gather(
    address: Any, length: Any, count: Any, offsets: Any, validity: Any, data_address: Any
) -> Any:
    """Copy `count` byte strings into Arrow's buffers, concatenated; returns the number of nulls.

    address, length: int64 (-1: null). offsets: int32[count + 1]. validity: uint8, a bit each, zero
    on entry. data_address: destination, with room for the sum of the lengths.
    """
    place = 0
    null_count = 0
    offsets[0] = 0
    for i in range(count):
        size = length[i]
        if size >= 0:
            validity[i >> 3] |= np.uint8(1 << (i & 7))
            copy_bytes(data_address + place, address[i], size)
            place += size
        else:
            null_count += 1
        offsets[i + 1] = place
    return null_count


@kernel
def find_invalid_utf8(data: Any, offsets: Any, out: Any) -> Any:
    """Mark with 1 the strings data[offsets[i]:offsets[i + 1]] that are no UTF-8; returns their
    number.

    data: uint8. offsets: int32. out: uint8, zeros on entry. RFC 3629 defines UTF-8.
    """
    invalid_count = 0
    for i in range(offsets.size - 1):
        pos: Any = np.int64(offsets[i])
        end: Any = np.int64(offsets[i + 1])
        while pos < end:
            size, is_good = utf8_step(data, pos, end)
            if not is_good:
                out[i] = 1
                invalid_count += 1
                break
            pos += size
    return invalid_count
