"""Record sets: Kafka's vectors, faults among good batches, limits, splitting into chunks."""

import resource
import struct
from typing import Any

import crc32c
import numpy as np
import pytest

from kdissect.codec import compression, record_batches
from kdissect.codec.compression import CODEC_NAMES, DecompressionLimits, compress
from kdissect.codec.record_batches import BATCHES, RECORD_SCHEMA, FaultStage, iter_record_chunks
from kdissect.codec.record_encoder import encode_batch, encode_message, encode_messages
from kdissect.status import Status
from tests.codec.record_cases import assert_twins_agree, decode_columns
from tests.codec.vectors import record_vectors

VECTOR_NAMES = {"base_timestamp": "base_timestamp_ms", "max_timestamp": "max_timestamp_ms"}


def raw(value: Any) -> bytes | None:
    return None if value is None else bytes.fromhex(value["$bytes"])


def rows(count: int, value_size: int = 20, first: int = 1000) -> list[dict[str, Any]]:
    return [
        {
            "offset": first + i,
            "timestamp_ms": 1_700_000_000_000 + i,
            "key": None if i % 3 == 0 else b"key-%d" % i,
            "value": None if i % 5 == 4 else bytes([i & 255]) * value_size,
            "headers": [{"key": f"h{j}", "value": b"v" * j or None} for j in range(i % 3)],
        }
        for i in range(count)
    ]


def plain(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("offset", "timestamp_ms", "key", "value", "headers")
    return [{name: record[name] for name in names} for record in records]


@pytest.mark.parametrize("chunk_bytes", [8 << 20, 700])
def test_kafkas_own_batches_read_as_kafka_reads_them(chunk_bytes: int) -> None:
    """Both decoders read each batch and record of Kafka's own writer as Kafka's own reader does."""
    cases = record_vectors()
    sets = [bytes.fromhex(case["data"]) for case in cases]
    found = assert_twins_agree(sets, chunk_bytes=chunk_bytes)
    records_seen = 0
    for case, got in zip(cases, found, strict=True):
        assert len(got.batches) == len(case["batches"]), case["name"]
        for index, (batch, expected) in enumerate(zip(got.batches, case["batches"], strict=True)):
            is_alien = expected.pop("error", None) is not None
            wanted = expected.pop("records")
            assert batch["pos"] == expected.pop("position")
            if is_alien:  # docs/tables.md: base_offset, magic and size, the rest null
                expected["is_partial"] = None
            for name, value in expected.items():
                assert batch[VECTOR_NAMES.get(name, name)] == value or (
                    # a cut batch tells its header's count; Kafka's reader does not look
                    name == "record_count" and batch["is_partial"]
                ), (case["name"], index, name)
            have = [record for record in got.records if record["batch_index"] == index]
            assert [record["record_index"] for record in have] == list(range(len(have)))
            records_seen += len(have)
            assert [
                {
                    "offset": record["offset"],
                    "timestamp": record["timestamp_ms"],
                    "key": record["key"],
                    "value": record["value"],
                    "headers": [(header["key"], header["value"]) for header in record["headers"]],
                    "control_type": record["control_type"],
                }
                for record in have
            ] == [
                record
                | {
                    "key": raw(record["key"]),
                    "value": raw(record["value"]),
                    "headers": [(key, raw(value)) for key, value in record["headers"]],
                }
                for record in wanted or []
            ], (case["name"], index)
    print(f"{len(cases)} record sets, {records_seen} records")


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("xerial", [True, False])
def test_batch_round_trip(codec: str, xerial: bool) -> None:
    """What encode_batch writes comes back, header and records, through both decoders."""
    records = rows(40)
    data = encode_batch(
        records,
        codec=codec,
        xerial=xerial,
        producer_id=7,
        producer_epoch=3,
        base_sequence=11,
        partition_leader_epoch=5,
        is_transactional=True,
    )
    (found,) = assert_twins_agree([data])
    assert plain(found.records) == records
    assert not found.faults
    (batch,) = found.batches
    section = encode_batch(records)[61:]
    assert batch["uncompressed_size"] == len(section)
    assert (batch["codec"], batch["crc_ok"], batch["record_count"]) == (codec, True, 40)
    assert (batch["producer_id"], batch["producer_epoch"], batch["base_sequence"]) == (7, 3, 11)
    assert (batch["is_transactional"], batch["is_control"]) == (True, False)
    assert (batch["base_offset"], batch["last_offset"]) == (1000, 1039)


@pytest.mark.parametrize("codec", CODEC_NAMES[:4])
@pytest.mark.parametrize("magic", [0, 1])
def test_message_set_round_trip(codec: str, magic: int) -> None:
    """Messages of magic 0 and 1 come back from each codec, with offsets and checksums."""
    records = [record | {"headers": []} for record in rows(9)]
    (found,) = assert_twins_agree([encode_messages(records, magic, codec=codec)])
    if magic == 0:
        records = [record | {"timestamp_ms": -1} for record in records]
    assert plain(found.records) == records
    assert not found.faults
    assert len(found.batches) == (9 if codec == "none" else 1)
    assert {batch["crc_ok"] for batch in found.batches} == {True}
    assert found.batches[0]["base_offset"] == 1000
    assert found.batches[-1]["last_offset"] == 1008


def test_schema_of_chunks() -> None:
    """Batches and records have their fixed Arrow schemas."""
    buf = np.frombuffer(encode_batch(rows(3)), np.uint8)
    (chunk,) = iter_record_chunks(buf, np.array([0]), np.array([buf.size]))
    assert chunk.batches.schema == BATCHES
    assert chunk.records.schema == RECORD_SCHEMA


def refreshed(data: bytearray) -> bytes:
    """The batch with the CRC that its bytes now have."""
    data[17:21] = crc32c.crc32c(bytes(data[21:])).to_bytes(4, "big")
    return bytes(data)


def changed(pos: int, value: bytes, batch: bytes) -> bytes:
    data = bytearray(batch)
    data[pos : pos + len(value)] = value
    return refreshed(data)


def announced(count: int) -> bytes:
    """Four records, of another number by the header."""
    return encode_batch(rows(4), record_count=count)


GOOD = encode_batch(rows(4))
ONE = encode_batch(rows(1))
BROKEN_KEY = encode_batch([rows(1)[0] | {"headers": [{"key": b"\xff\xe2\x82a", "value": b""}]}])
FRAMING, CRC, CODEC, RECORDS, TEXT = FaultStage
# what: (batch, fault, its stage, records that still read)
FAULTS: dict[str, tuple[bytes, Status, FaultStage, int]] = {
    "wrong crc": (GOOD[:17] + bytes(4) + GOOD[21:], Status.BAD_CRC, CRC, 4),
    "more records announced": (announced(5), Status.COUNT_MISMATCH, RECORDS, 4),
    "fewer records announced": (announced(3), Status.COUNT_MISMATCH, RECORDS, 3),
    "a negative count": (announced(-1), Status.COUNT_MISMATCH, RECORDS, 0),
    "unknown codec": (changed(21, b"\0\x05", GOOD), Status.UNKNOWN_CODEC, CODEC, 0),
    "not compressed at all": (changed(21, b"\0\x04", GOOD), Status.CORRUPT, CODEC, 0),
    "unknown magic": (GOOD[:16] + b"\x09" + GOOD[17:], Status.UNKNOWN_MAGIC, FRAMING, 0),
    "too small": (struct.pack(">qiib", 5, 20, 0, 2) + bytes(15), Status.TRUNCATED, FRAMING, 0),
    "a record too long": (changed(61, b"\x7e", ONE), Status.TRUNCATED, RECORDS, 0),
    "a negative size": (changed(61, b"\x01", ONE), Status.NEGATIVE_LENGTH, RECORDS, 0),
    "six bytes": (changed(61, b"\xff" * 5 + b"\x01", ONE), Status.VARINT_OVERFLOW, RECORDS, 0),
    "header keys that are no UTF-8": (BROKEN_KEY, Status.INVALID_UTF8, TEXT, 1),
}


@pytest.mark.parametrize("what", FAULTS)
def test_good_batches_around_a_bad_one_are_kept(what: str) -> None:
    """A fault in one batch costs no record of its neighbours."""
    bad, status, stage, kept = FAULTS[what]
    (found,) = assert_twins_agree([GOOD + bad + GOOD])
    assert [fault[:3] for fault in found.faults] == [(1, status, stage)]
    counts = [sum(r["batch_index"] == i for r in found.records) for i in range(3)]
    assert counts == [4, kept, 4]
    assert found.faults[0][3:5] == (len(GOOD), len(bad))


@pytest.mark.parametrize("length", [-1, 0, 13, -(1 << 31)])
def test_impossible_length_ends_the_set(length: int) -> None:
    """The batches before stay, the rest of the set is one fault, the next set is untouched."""
    tail = struct.pack(">qi", 5, length) + GOOD
    first, second = assert_twins_agree([GOOD + tail, GOOD])
    assert len(first.batches) == 1
    (fault,) = first.faults
    kind = Status.NEGATIVE_LENGTH if length < 0 else Status.TRUNCATED
    assert fault == (1, kind, FaultStage.FRAMING, len(GOOD), len(tail), 0)
    assert len(second.records) == 4


@pytest.mark.parametrize(
    "data",
    [
        GOOD + encode_batch(rows(5), codec="zstd"),
        encode_messages(rows(3), 0) + encode_messages(rows(2), 1, codec="gzip"),
    ],
    ids=["magic 2", "magic 0 and 1"],
)
def test_cut_at_every_length(data: bytes) -> None:
    """A record set that ends anywhere has one partial batch at most and no fault."""
    sets = [data[:size] for size in range(len(data) + 1)]
    for result in assert_twins_agree(sets):
        assert not result.faults
        assert [b["is_partial"] for b in result.batches[:-1]] == [False] * (len(result.batches) - 1)


def test_a_partial_batch_has_the_values_of_its_header() -> None:
    """A cut batch has its header's facts, no records and no checksum."""
    (found,) = assert_twins_agree([GOOD[:70]])
    (batch,) = found.batches
    assert batch["is_partial"] is True
    assert (batch["size"], batch["record_count"], batch["codec"]) == (70, 4, "none")
    assert batch["crc_ok"] is None
    assert batch["uncompressed_size"] is None
    assert not found.records


def test_control_types_of_unusual_keys() -> None:
    """Keys with another size or version than those of Kafka's own batches."""
    keys = [b"", b"\0\0\0", struct.pack(">hh", -1, 0), struct.pack(">hhq", 1, 1, 9)]
    records = [record | {"key": key} for record, key in zip(rows(4), keys, strict=True)]
    (found,) = assert_twins_agree([encode_batch(records, is_control=True)])
    names = [record["control_type"] for record in found.records]
    assert names == ["UNKNOWN", "UNKNOWN", "UNKNOWN", "COMMIT"]


def wrapper(magic: int, value: bytes | None) -> bytes:
    """A message whose attributes say that its value is compressed with gzip."""
    return encode_message({"offset": 9, "timestamp_ms": 5, "key": None, "value": value}, magic, 1)


@pytest.mark.parametrize(
    ("inner", "status", "kept"),
    [
        (encode_messages(rows(2), 1)[:-1], Status.TRUNCATED, 1),
        (encode_messages(rows(1), 1) + encode_messages(rows(1), 0), Status.UNKNOWN_MAGIC, 1),
        (encode_messages(rows(2), 1, codec="gzip"), Status.UNKNOWN_CODEC, 0),
        (encode_messages(rows(1), 1) + b"\0" * 5, Status.TRUNCATED, 1),
        (struct.pack(">qi", 0, -5), Status.NEGATIVE_LENGTH, 0),
    ],
)
def test_wrapper_with_something_else_inside(inner: bytes, status: Status, kept: int) -> None:
    """Other bytes inside a compressed message are a fault; messages before them stay."""
    (found,) = assert_twins_agree([wrapper(1, compress(1, inner))])
    assert [fault[1:3] for fault in found.faults] == [(status, FaultStage.RECORDS)]
    assert len(found.records) == kept


@pytest.mark.parametrize("magic", [0, 1])
def test_wrong_crc_inside_a_wrapper_is_a_fault(magic: int) -> None:
    """The wrapper's own CRC is right, so the batch is; the message still reads."""
    inner = bytearray(encode_messages(rows(3), magic))
    inner[-1] ^= 1
    (found,) = assert_twins_agree([wrapper(magic, compress(1, bytes(inner)))])
    assert [fault[1:3] for fault in found.faults] == [(Status.BAD_CRC, FaultStage.RECORDS)]
    assert found.batches[0]["crc_ok"] is True
    assert len(found.records) == 3


def test_wrapper_without_value_is_corrupt() -> None:
    """A compressed message with a null value is a fault of its codec."""
    (found,) = assert_twins_agree([wrapper(1, None)])
    assert [fault[1:3] for fault in found.faults] == [(Status.CORRUPT, FaultStage.CODEC)]


@pytest.mark.parametrize("chunk_bytes", [1, 100, 5000, 1 << 20])
def test_any_chunk_size_gives_the_same_rows(chunk_bytes: int) -> None:
    """Rows do not depend on the size of chunks."""
    sets = [
        b"".join(encode_batch(rows(30, 50), codec=codec) for codec in CODEC_NAMES),
        b"",
        encode_messages(rows(20), 1) + encode_batch(rows(200)) + b"\0" * 7,
    ]
    assert_twins_agree(sets, chunk_bytes=chunk_bytes)


def packed(codec: str, records: bytes, count: int = 1) -> bytes:
    """A batch with this section of records, compressed."""
    section = compress(CODEC_NAMES.index(codec), records)
    data = bytearray(encode_batch([], record_count=count)[:61] + section)
    data[8:12] = (len(data) - 12).to_bytes(4, "big")
    data[21:23] = bytes([0, CODEC_NAMES.index(codec)])
    return refreshed(data)


def test_large_batch_is_split_over_chunks() -> None:
    """A batch of many records comes in pieces of bounded size, its own row in the last one."""
    count = 300_000
    record = b"\x0c\0\0\0\1\1\0"  # the smallest one: no key, no value, no headers
    buf = np.frombuffer(packed("zstd", record * count, count), np.uint8)
    chunks = list(iter_record_chunks(buf, np.array([0]), np.array([buf.size])))
    assert [chunk.records.num_rows for chunk in chunks] == [131072, 131072, 37856]
    assert [chunk.batches.num_rows for chunk in chunks] == [0, 0, 1]
    assert chunks[-1].batches["record_count"].to_pylist() == [count]
    assert chunks[-1].records["record_index"][-1].as_py() == count - 1


def test_more_headers_than_the_buffers_hold() -> None:
    """Buffers grow for 140,000 headers; the limit is a fault."""
    headers = [{"key": "k", "value": None}] * 140_000
    records = rows(3)
    records[1]["headers"] = headers
    (found,) = decode_columns([encode_batch(records)])
    assert [len(record["headers"]) for record in found.records] == [0, 140_000, 2]
    limited = DecompressionLimits(record_headers_max=1000)
    (found,) = assert_twins_agree([encode_batch(records)], limited)
    assert [fault[1:3] for fault in found.faults] == [(Status.LIMIT, FaultStage.RECORDS)]
    assert len(found.records) == 1


@pytest.mark.parametrize("codec", CODEC_NAMES[1:])
def test_bomb_ends_at_the_limit(codec: str) -> None:
    """A batch that decompresses beyond the limit is a fault; its neighbours stay."""
    limits = DecompressionLimits(decompressed_size_max=1 << 20)
    (found,) = assert_twins_agree([GOOD + packed(codec, bytes(4 << 20)) + GOOD], limits)
    assert [fault[:3] for fault in found.faults] == [(1, Status.LIMIT, FaultStage.CODEC)]
    assert found.batches[1]["uncompressed_size"] is None
    assert len(found.records) == 8


def test_many_bombs_cost_bounded_work_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand batches that each want 8 MiB are stopped by the allowance of their set."""
    one = bytearray(packed("zstd", bytes((8 << 20) - 1)))
    bombs = []
    for number in range(2000):
        one[27:35] = number.to_bytes(8, "big")  # a timestamp: no two batches are the same
        bombs.append(bytes(refreshed(one)))
    buf = np.frombuffer(b"".join(bombs), np.uint8)
    allowed = DecompressionLimits().set_allowance(buf.size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rooms: list[int] = []

    def decompress(codec: int, data: Any, out: Any) -> tuple[Status, int]:
        rooms.append(len(out))
        return compression.decompress(codec, data, out)

    monkeypatch.setattr(record_batches, "decompress", decompress)
    faults = 0
    for chunk in iter_record_chunks(buf, np.array([0]), np.array([buf.size])):
        faults += int((chunk.faults["kind"] == Status.LIMIT).sum())
    assert faults > 1_900
    assert allowed / 2 < sum(rooms) < 2 * allowed
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def test_arguments_that_do_not_fit_raise() -> None:
    """Positions outside of the buffer, other types and empty chunks raise ValueError."""
    buf = np.zeros(10, np.uint8)
    for start, length in (([0], [11]), ([-1], [2]), ([5], [-1]), ([0, 1], [1]), ([11], [0])):
        with pytest.raises(ValueError, match="start and length"):
            iter_record_chunks(buf, np.array(start), np.array(length))
    with pytest.raises(ValueError, match="buf"):
        iter_record_chunks(np.zeros(4, np.int32), np.array([0]), np.array([1]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_bytes"):
        iter_record_chunks(buf, np.array([0]), np.array([1]), chunk_bytes=0)


def test_iterators_side_by_side_do_not_disturb_each_other() -> None:
    """Two decoders at work at once keep their own state."""
    first = np.frombuffer(encode_batch(rows(500, 100), codec="lz4"), np.uint8)
    second = np.frombuffer(encode_batch(rows(500, 100, first=9), codec="zstd"), np.uint8)
    pair = [
        iter_record_chunks(buf, np.array([0]), np.array([buf.size]), chunk_bytes=1000)
        for buf in (first, second)
    ]
    offsets: list[list[int]] = [[], []]
    for chunks in zip(*pair, strict=True):
        for found, chunk in zip(offsets, chunks, strict=True):
            found += chunk.records["offset"].to_pylist()
    assert offsets == [list(range(1000, 1500)), list(range(9, 509))]


def test_varints_at_their_bounds() -> None:
    """The largest and smallest deltas of offset and time are read."""
    extreme = [
        {"offset": offset, "timestamp_ms": time, "key": None, "value": None, "headers": []}
        for offset, time in [(2**31 - 1, 2**63 - 1), (-(2**31), -(2**63)), (0, 0)]
    ]
    data = encode_batch(extreme, base_offset=0, base_timestamp_ms=0, last_offset=5)
    (found,) = assert_twins_agree([data])
    assert plain(found.records) == extreme


def row(offset: int, value: bytes) -> dict[str, Any]:
    return {"offset": offset, "timestamp_ms": 7, "key": None, "value": value}


# XORed into bytes, it leaves their CRC-32C as it is: the polynomial, lowest bit first
SAME_CRC = int(f"{0x11EDC6F41:033b}"[::-1], 2).to_bytes(5, "little")


@pytest.mark.parametrize("codec", CODEC_NAMES[1:])
@pytest.mark.parametrize("chunk_bytes", [1, 2000, 8 << 20])
def test_batches_that_come_again_are_read_again(codec: str, chunk_bytes: int) -> None:
    """A repeated batch is read again, with the broker's fields or with other records."""
    records = [[row(k, b"%d" % n * 90) for k in range(3)] for n in range(3)]
    sent = [encode_batch(some, codec=codec) for some in records]
    stored = [(1000 + n).to_bytes(8, "big") + data[8:] for n, data in enumerate(sent)]
    other = bytearray(sent[1])
    other[-5:] = bytes(a ^ b for a, b in zip(other[-5:], SAME_CRC, strict=True))
    assert crc32c.crc32c(other[21:]) == crc32c.crc32c(sent[1][21:])
    old = []
    if codec != "zstd":
        message = row(5, b"old" * 50)
        old = [encode_messages([message], magic, codec=codec) for magic in (1, 0, 1, 0)]
    sets = [sent[0] + sent[1], stored[0] + bytes(other), stored[1], *old, sent[2] + sent[0], *old]
    found = assert_twins_agree(sets, chunk_bytes=chunk_bytes)
    assert [row["offset"] for row in found[2].records] == [1001, 1002, 1003]


def test_earlier_batches_count_for_the_limit() -> None:
    """A set may not be larger for batches that were decompressed already."""
    batch = encode_batch([row(0, bytes(20_000))], codec="gzip")
    limits = DecompressionLimits(decompressed_size_max=50_000, ratio_max=1)
    found = assert_twins_agree([batch * 2, batch * 4], limits=limits)
    assert [len(one.records) for one in found] == [2, 2]
    assert [len(one.faults) for one in found] == [0, 2]
