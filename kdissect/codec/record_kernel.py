"""The compiled loops of record decoding.

There are three steps, each over many batches per call. `scan_batches` walks over record sets from
batch header to batch header. `small_crcs` checks batches for which calls of a library take longer.
`parse_records` turns the records of batches into rows of places, whose bytes `strings.gathered`
copies.

Records lie in the input or in a buffer of decompressed bytes, so rows refer to bytes by address. No
kernel allocates. `parse_records` stops between two records if its rows are full, and continues at
the next call: a batch stores the progress of its parsing.
"""

from __future__ import annotations

import numpy as np

from kdissect import jit
from kdissect.arrays import Bytes, Indices, Positions, Rows, Struct
from kdissect.status import Status

# A batch: what `scan_batches` reads in its header, and the progress of decoding its records. Header
# fields beyond its `visible` bytes (if the end is cut off) are undefined.
BATCH = np.dtype(
    [
        ("set_index", "i8"),
        ("batch_index", "i8"),  # in its set
        ("pos", "i8"),
        ("size", "i8"),
        ("state", "i8"),  # WHOLE to BAD_LENGTH
        ("visible", "i8"),  # bytes of `size` that are there
        ("base_offset", "i8"),
        ("last_offset", "i8"),
        ("magic", "i8"),
        ("attributes", "i8"),
        ("crc", "i8"),  # stored
        ("record_count", "i8"),  # announced; for BAD_LENGTH the length
        ("base_timestamp", "i8"),
        ("max_timestamp", "i8"),
        ("producer_id", "i8"),
        ("producer_epoch", "i8"),
        ("base_sequence", "i8"),
        ("leader_epoch", "i8"),
        ("crc_start", "i8"),  # position of the first byte that the CRC covers
        ("section_start", "i8"),  # position of the records
        ("section_size", "i8"),
        ("data_address", "i8"),  # of the records, decompressed
        ("data_size", "i8"),  # -1: they cannot be read
        ("computed_crc", "i8"),
        ("is_wrong_inside", "i8"),  # a message in a wrapper has a wrong CRC
        ("codec_status", "i8"),  # OK, or why there are no decompressed records
        ("status", "i8"),  # OK, or why parsing ended early
        ("parsed_bytes", "i8"),
        ("parsed_records", "i8"),
        ("first_offset", "i8"),  # of its first record
        ("shift", "i8"),  # of the offsets inside a wrapper
    ]
)
_UNREAD = np.zeros(1, BATCH)
for _name in (BATCH.names or ())[: (BATCH.names or ()).index("computed_crc")]:
    _UNREAD[_name] = -1
_IS_LOG_APPEND, _IS_CONTROL, _CODEC = 8, 32, 7  # in `attributes`

# The position of `scan_batches` between two calls. pos: -1 at the beginning of the set.
SCAN_POSITION = np.dtype([("set_index", "i8"), ("pos", "i8"), ("batch_index", "i8")])

# States of a scanned batch.
WHOLE, PARTIAL, ALIEN, TOO_SMALL, BAD_LENGTH = range(5)

ENTRY_HEADER_SIZE = 12  # offset, length
MAGIC_POS = 16
BATCH_HEADER_SIZE = 61  # magic 2, up to the records
MESSAGE_HEADER_SIZE_V0 = 18  # magic 0, up to the key's length
MESSAGE_HEADER_SIZE_V1 = 26
ENTRY_LENGTH_MIN = 14  # a message of magic 0 with null key and null value
SMALL_BATCH = 160  # bytes; a library takes longer for each batch up to here

# The position of `parse_records` between two calls, and the results of the last one.
PARSE_POSITION = np.dtype(
    [
        ("batch", "i8"),  # the next one
        ("row_count", "i8"),
        ("header_count", "i8"),
        ("headers_needed", "i8"),  # headers of a single record that does not fit at all, else 0
    ]
)


# A parsed record, and a header of one, in order. Length -1: null.
_PAIR = "key_address", "key_length", "value_address", "value_length"
HEADER = np.dtype([(name, "i8") for name in _PAIR])
RECORD = np.dtype(
    [
        ("batch", "i8"),
        ("record_index", "i8"),  # in its batch
        ("offset", "i8"),
        ("timestamp", "i8"),
        ("control_type", "i8"),  # NO_CONTROL_TYPE: no control record
        *((name, "i8") for name in _PAIR),
        ("header_count", "i8"),
    ]
)


def scan_start() -> np.void:
    """The SCAN_POSITION before the first set."""
    start: np.void = np.array([(0, -1, 0)], SCAN_POSITION)[0]
    return start


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


if jit.JIT_ENABLED:

    @jit.inlined
    def _sum(a: int, b: int) -> int:
        return a + b

else:

    def _sum(a: int, b: int) -> int:
        """Wrapped around as machine words do."""
        return ((int(a) + int(b) + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


@jit.inlined
def _load_i32(address: int) -> int:
    value = jit.load_u32(address)
    return (jit.int64(value) ^ 0x80000000) - 0x80000000


@jit.inlined
def _load_i64(address: int) -> int:
    return (_load_i32(address) << 32) | jit.int64(jit.load_u32(address + 4))


@jit.kernel
def scan_batches(
    buf: Bytes, start: Positions, length: Indices, position: Struct, batches: Rows
) -> int:
    """Walk over record sets and describe their batches; returns the number of rows, 0 at the end.

    buf: uint8. start, length: int64, the sets inside buf. position: SCAN_POSITION, from which the
    next call continues. batches: BATCH[n].
    """
    set_index = position["set_index"]
    pos = position["pos"]
    batch_index = position["batch_index"]
    count = 0
    while set_index < start.size and count < batches.size:
        end = start[set_index] + length[set_index]
        if pos < 0:
            pos = start[set_index]
            batch_index = 0
        if pos >= end:
            set_index += 1
            pos = -1
            continue
        batches[count] = _UNREAD[0]
        batch = batches[count]
        batch["set_index"] = set_index
        batch["batch_index"] = batch_index
        _scan_batch(buf, pos, end, batch)
        count += 1
        batch_index += 1
        pos += batch["size"]
    position["set_index"] = set_index
    position["pos"] = pos
    position["batch_index"] = batch_index
    return count


@jit.inlined
def _scan_batch(buf: Bytes, pos: int, end: int, batch: Struct) -> None:
    left = end - pos
    batch["pos"] = pos
    batch["size"] = left
    batch["visible"] = left
    batch["state"] = PARTIAL
    batch["attributes"] = 0
    # Kafka's record batch header: baseOffset int64, batchLength int32
    if left >= 8:
        batch["base_offset"] = jit.read_i64(buf, pos)
        batch["last_offset"] = batch["base_offset"]
    if left < ENTRY_HEADER_SIZE:
        return
    entry_length = jit.read_i32(buf, pos + 8)
    if entry_length < ENTRY_LENGTH_MIN:
        batch["state"] = BAD_LENGTH
        batch["record_count"] = entry_length
        return
    # all formats have their magic at byte 16
    if left <= MAGIC_POS:
        return
    magic = jit.read_i8(buf, pos + MAGIC_POS)
    batch["magic"] = magic
    size = ENTRY_HEADER_SIZE + entry_length
    if size <= left:
        batch["size"] = size
        batch["visible"] = size
        batch["state"] = WHOLE
        left = size
    is_whole = batch["state"] == WHOLE
    if magic < 0 or magic > 2:
        if is_whole:
            batch["state"] = ALIEN
        return
    if magic == 2:
        header_size = BATCH_HEADER_SIZE
    elif magic == 1:
        header_size = MESSAGE_HEADER_SIZE_V1 + 8
    else:
        header_size = MESSAGE_HEADER_SIZE_V0 + 8
    if is_whole and size < header_size:
        batch["state"] = TOO_SMALL
        return
    if magic == 2:
        _scan_header(buf, pos, left, batch)
    else:
        _scan_message(buf, pos, left, magic, batch)


@jit.inlined
def _scan_header(buf: Bytes, pos: int, left: int, batch: Struct) -> None:
    # magic 2 (KIP-98): partitionLeaderEpoch, magic, crc, attributes, lastOffsetDelta,
    # baseTimestamp, maxTimestamp, producerId, producerEpoch, baseSequence, record count
    batch["leader_epoch"] = jit.read_i32(buf, pos + 12)
    if left >= 21:
        batch["crc"] = jit.read_u32(buf, pos + 17)
    if left >= 23:
        batch["attributes"] = jit.read_i16(buf, pos + 21)
    if left >= 27:
        batch["last_offset"] = _sum(batch["base_offset"], jit.read_i32(buf, pos + 23))
    if left >= 35:
        batch["base_timestamp"] = jit.read_i64(buf, pos + 27)
    if left >= 43:
        batch["max_timestamp"] = jit.read_i64(buf, pos + 35)
    if left >= 51:
        batch["producer_id"] = jit.read_i64(buf, pos + 43)
    if left >= 53:
        batch["producer_epoch"] = jit.read_i16(buf, pos + 51)
    if left >= 57:
        batch["base_sequence"] = jit.read_i32(buf, pos + 53)
    if left >= BATCH_HEADER_SIZE:
        batch["record_count"] = jit.read_i32(buf, pos + 57)
    # the CRC-32C covers the bytes from the attributes on
    batch["crc_start"] = pos + 21
    batch["section_start"] = pos + BATCH_HEADER_SIZE
    batch["section_size"] = left - BATCH_HEADER_SIZE


@jit.inlined
def _scan_message(buf: Bytes, pos: int, left: int, magic: int, batch: Struct) -> None:
    # magic 0, 1: crc, magic, attributes, timestamp (magic 1, KIP-32), key, value
    batch["crc"] = jit.read_u32(buf, pos + 12)
    batch["crc_start"] = pos + 16
    if left >= 18:
        batch["attributes"] = jit.read_u8(buf, pos + 17)
    if magic == 1 and left >= 26:
        batch["max_timestamp"] = jit.read_i64(buf, pos + 18)
    # The section of a message is the message itself, a message set of one. The section of a wrapper
    # is its value; size -1 if there is none.
    batch["section_start"] = pos
    batch["section_size"] = left
    if batch["state"] != WHOLE or batch["attributes"] & 7 == 0:
        return
    batch["section_size"] = -1
    place = pos + (MESSAGE_HEADER_SIZE_V1 if magic == 1 else MESSAGE_HEADER_SIZE_V0)
    end = pos + left
    key_size = jit.read_i32(buf, place)
    place += 4
    if key_size > 0:
        if key_size > end - place:
            return
        place += key_size
    if end - place < 4:
        return
    value_size = jit.read_i32(buf, place)
    place += 4
    if 0 <= value_size <= end - place:
        batch["section_start"] = place
        batch["section_size"] = value_size


# The CRC-32C (RFC 3720, 12.1) of each byte.
_CRC_TABLE = np.arange(256)
for _ in range(8):
    _CRC_TABLE = (_CRC_TABLE >> 1) ^ (0x82F63B78 * (_CRC_TABLE & 1))


@jit.kernel
def small_crcs(buf: Bytes, batches: Rows) -> None:
    """Compute the CRC-32C of whole batches of magic 2 that have up to SMALL_BATCH bytes."""
    for row in range(len(batches)):
        batch = batches[row]
        if batch["state"] != WHOLE or batch["magic"] != 2 or batch["size"] > SMALL_BATCH:
            continue
        crc = 0xFFFFFFFF
        for place in range(batch["crc_start"], batch["pos"] + batch["size"]):
            crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ jit.read_u8(buf, place)) & 0xFF]
        batch["computed_crc"] = crc ^ 0xFFFFFFFF


# A varint reader returns (value, address after it), or a negated status in place of the address.


@jit.part
def _load_zigzag(address: int, end: int, bits: int) -> tuple[int, int]:
    """A zigzag number: groups of 7 bits, the lowest first, the sign in the lowest bit."""
    if address >= end:
        return 0, -_TRUNCATED
    byte = jit.int64(jit.load_u8(address))
    raw = byte & 0x7F
    address += 1
    shift = 7
    while byte & 0x80:
        if address >= end:
            return 0, -_TRUNCATED
        byte = jit.int64(jit.load_u8(address))
        address += 1
        if shift + 7 > bits and byte >> (bits - shift) != 0:
            return 0, -_OVERFLOW
        raw |= (byte & 0x7F) << shift
        shift += 7
    return ((raw >> 1) & _LOW_63) ^ -(raw & 1), address


@jit.kernel
def parse_records(
    batches: Rows,
    position: Struct,
    byte_count_max: int,
    headers_max: int,
    records: Rows,
    headers: Rows,
) -> int:
    """Parse the records of batches into rows.

    batches: BATCH[n]. position: PARSE_POSITION. records: RECORD. headers: HEADER.
    Returns OK, or ROOM_NEEDED if records, headers or `byte_count_max` bytes of keys, values and
    headers are full: take the rows and call again.
    """
    position["headers_needed"] = 0
    row = 0
    header = 0
    byte_count = 0
    number = position["batch"]
    while number < batches.size:
        batch = batches[number]
        is_v2 = batch["magic"] == 2
        base = batch["data_address"]
        end = base + batch["data_size"]
        status = _OK
        while batch["data_size"] >= 0:
            begin = base + batch["parsed_bytes"]
            if is_v2:
                # the section must end exactly after the announced number of records
                if batch["parsed_records"] >= batch["record_count"] or begin >= end:
                    if batch["parsed_records"] != batch["record_count"] or begin < end:
                        status = _COUNT_MISMATCH
                    break
            elif begin >= end:
                break
            if row == records.size or (byte_count >= byte_count_max and row > 0):
                status = _ROOM_NEEDED
                break
            record = records[row]
            record["header_count"] = 0
            header_bytes = 0
            if is_v2:
                after, stop = _load_record(begin, end, record)
                if after >= 0 and record["header_count"] > headers_max:
                    after = -_LIMIT
                elif after >= 0 and record["header_count"] > headers.size - header:
                    status = _ROOM_NEEDED
                    if row == 0:
                        position["headers_needed"] = record["header_count"]
                    break
                elif after >= 0:
                    after, header_bytes = _load_headers(
                        after, stop, record["header_count"], headers, header
                    )
                if 0 <= after < stop:
                    after = -_SIZE_MISMATCH
            else:
                after = _load_message(begin, end, batch["magic"], record)
            if after < 0:
                status = -after
                break
            record["batch"] = number
            record["record_index"] = batch["parsed_records"]
            _complete_record(batch, record)
            if batch["parsed_records"] == 0:
                batch["first_offset"] = record["offset"]
            batch["parsed_bytes"] = after - base
            batch["parsed_records"] += 1
            byte_count += max(record["key_length"], 0) + max(record["value_length"], 0)
            byte_count += header_bytes
            row += 1
            header += record["header_count"]
        if status == _ROOM_NEEDED:
            break
        if batch["status"] == _OK:
            batch["status"] = status
        number += 1
    position["batch"] = number
    position["row_count"] = row
    position["header_count"] = header
    return _OK if number == batches.size else _ROOM_NEEDED


@jit.part
def _complete_record(batch: Struct, record: Struct) -> None:
    """Replace a record's stored offset and timestamp by the absolute ones; add its control type."""
    record["control_type"] = NO_CONTROL_TYPE
    # with LogAppendTime (KIP-32) all records have the batch's max timestamp; magic 0 has no times
    is_log_append = batch["attributes"] & _IS_LOG_APPEND != 0 and batch["magic"] > 0
    if batch["magic"] == 2:
        record["timestamp"] = _sum(batch["base_timestamp"], record["timestamp"])
        record["offset"] = _sum(batch["base_offset"], record["offset"])
        if batch["attributes"] & _IS_CONTROL:
            key, size = record["key_address"], record["key_length"]
            record["control_type"] = _load_control_type(key, size)
    else:
        record["offset"] = _sum(record["offset"], batch["shift"])
    if is_log_append:
        record["timestamp"] = batch["max_timestamp"]


# Loaders fill a row, and return the address after the bytes or a negated status.


@jit.part
def _load_record(begin: int, end: int, record: Struct) -> tuple[int, int]:
    """Load a record of magic 2 up to its headers, with its deltas; also returns its end."""
    size, p = _load_zigzag(begin, end, 32)
    if p < 0:
        return p, 0
    if size < 0:
        return -_NEGATIVE, 0
    if size > end - p or size < 1:
        return -_TRUNCATED, 0
    stop = p + size
    # after the attributes byte, which has no meaning
    record["timestamp"], p = _load_zigzag(p + 1, stop, 64)
    if p < 0:
        return p, 0
    record["offset"], p = _load_zigzag(p, stop, 32)
    if p < 0:
        return p, 0
    p = _load_pair(p, stop, -1, record)
    if p < 0:
        return p, 0
    header_count, p = _load_zigzag(p, stop, 32)
    if p < 0:
        return p, 0
    if header_count < 0:
        return -_NEGATIVE, 0
    if header_count > (stop - p) >> 1:  # a header has at least two bytes
        return -_IMPOSSIBLE, 0
    record["header_count"] = header_count
    return p, stop


@jit.inlined
def _load_size(p: int, stop: int, least: int) -> tuple[int, int]:
    """A size (-1: null) of at least `least`, and the address of its bytes or a negated status."""
    size, p = _load_zigzag(p, stop, 32)
    if p < 0:
        return size, p
    if size < least:
        return size, -_NEGATIVE
    if size > stop - p:
        return size, -_TRUNCATED
    return size, p


@jit.inlined
def _load_pair(p: int, stop: int, key_min: int, row: Struct) -> int:
    """Load key and value of a record or a header. key_min: -1 if a key may be null, else 0."""
    size, p = _load_size(p, stop, key_min)
    if p < 0:
        return p
    row["key_address"] = p
    row["key_length"] = size
    size, p = _load_size(p + max(size, 0), stop, -1)
    if p < 0:
        return p
    row["value_address"] = p
    row["value_length"] = size
    return p + max(size, 0)


@jit.inlined
def _load_headers(p: int, stop: int, count: int, headers: Rows, first: int) -> tuple[int, int]:
    """Load the headers of a record; also returns the number of their bytes."""
    viewed = 0
    for at in range(first, first + count):
        header = headers[at]
        p = _load_pair(p, stop, 0, header)
        if p < 0:
            return p, 0
        viewed += header["key_length"] + max(header["value_length"], 0)
    return p, viewed


@jit.inlined
def _load_control_type(key: int, key_size: int) -> int:
    """The type in a control record's key: int16 key version, int16 type."""
    if key_size >= 4:
        word = _load_i32(key)
        if word >= 0 and word & 0xFFFF < UNKNOWN_CONTROL_TYPE:
            return word & 0xFFFF
    return UNKNOWN_CONTROL_TYPE


@jit.part
def _load_message(begin: int, end: int, magic: int, record: Struct) -> int:
    """Load a message of magic 0 or 1, with its stored offset."""
    if end - begin < ENTRY_HEADER_SIZE:
        return -_TRUNCATED
    size = _load_i32(begin + 8)
    if size < 0:
        return -_NEGATIVE
    if size > end - begin - ENTRY_HEADER_SIZE or size < ENTRY_LENGTH_MIN:
        return -_TRUNCATED
    stop = begin + ENTRY_HEADER_SIZE + size
    if jit.int64(jit.load_u8(begin + MAGIC_POS)) != magic:
        return -_UNKNOWN_MAGIC
    # a wrapper must not contain another wrapper
    if jit.load_u8(begin + MAGIC_POS + 1) & _CODEC != 0:
        return -_UNKNOWN_CODEC
    record["offset"] = _load_i64(begin)
    record["timestamp"] = -1
    p = begin + MESSAGE_HEADER_SIZE_V0
    if magic == 1:
        p = begin + MESSAGE_HEADER_SIZE_V1
        if stop - p < 8:
            return -_TRUNCATED
        record["timestamp"] = _load_i64(begin + MESSAGE_HEADER_SIZE_V0)
    size = _load_i32(p)
    p += 4
    if size < -1:
        return -_NEGATIVE
    if size > stop - p - 4:
        return -_TRUNCATED
    record["key_address"] = p
    record["key_length"] = size
    p += max(size, 0)
    size = _load_i32(p)
    p += 4
    if size < -1:
        return -_NEGATIVE
    if size > stop - p:
        return -_TRUNCATED
    record["value_address"] = p
    record["value_length"] = size
    p += max(size, 0)
    return p if p == stop else -_SIZE_MISMATCH
