"""Batches of snapshots that FetchSnapshot responses cut (KIP-630): rows for whole and cut ones."""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import kdissect
from kdissect.pipeline import plan
from tests.builders.messages import (
    Exchange,
    batch,
    fetch,
    metadata_record,
    snapshot_piece,
    write_capture,
)
from tests.builders.tables import kinds, rows
from tests.cases import cases

RECORDED = ("record_batches", "records", "internal/TopicRecord", "internal/ConfigRecord")


def topics(seed: int, count: int, sizes: Sequence[int] = (1, 2, 7, 40)) -> list[bytes]:
    """Batches of a snapshot: some small, some large, of every codec."""
    chosen = random.Random(seed)
    made, offset = [], 0
    for number in range(count):
        values = [
            metadata_record(
                "TopicRecord", name=f"t{offset + n}", topic_id=UUID(int=1000 + offset + n)
            )
            if chosen.random() < 0.7
            else metadata_record(
                "ConfigRecord", resource_type=2, resource_name=f"t{n}", name="retention.ms",
                value=str(chosen.random()) * chosen.choice((1, 20)),
            )
            for n in range(chosen.choice(sizes))
        ]  # fmt: skip
        codec = ("none", "none", "zstd", "lz4", "gzip", "snappy")[number % 6]
        made.append(batch([(None, value) for value in values], offset, codec=codec))
        offset += len(values)
    return made


def cuts_of(chosen: random.Random, batches: list[bytes], count: int) -> list[int]:
    """Where pieces begin and end: anywhere, now and then on a boundary of batches."""
    size = sum(map(len, batches))
    boundaries = [sum(map(len, batches[:n])) for n in range(1, len(batches))]
    inner = {chosen.randrange(1, size) for _ in range(count)}
    return sorted({0, size, *inner, *chosen.sample(boundaries, min(2, len(boundaries)))})


def pieces(snapshot: bytes, cuts: list[int], **how: Any) -> list[Exchange]:
    return [
        snapshot_piece(n, low, len(snapshot), snapshot[low:high], **how)
        for n, (low, high) in enumerate(pairwise(cuts))
    ]


def starts_of(batches: list[bytes]) -> list[int]:
    return [sum(map(len, batches[:n])) for n in range(len(batches))]


def whole(tmp_path: Path, snapshot: bytes) -> kdissect.Tables:
    """The same snapshot in one response."""
    path = tmp_path / "whole.pcap"
    return kdissect.read(write_capture(path, pieces(snapshot, [0, len(snapshot)])))


def in_one_piece(batches: list[bytes], cuts: list[int]) -> set[int]:
    """The numbers of the batches that no cut goes through."""
    return {
        number
        for number, start in enumerate(starts_of(batches))
        if not any(start < cut < start + len(batches[number]) for cut in cuts)
    }


def batch_rows(tables: kdissect.Tables) -> dict[int, list[dict[str, Any]]]:
    """Position of a response in the snapshot -> its rows of record_batches, by batch_index."""
    listed = defaultdict(list)
    for row in sorted(rows(tables, "record_batches"), key=lambda row: row["batch_index"]):
        listed[row["exchange_id"]].append(row)
    position = {
        row["exchange_id"]: row["response"]["topics"][0]["partitions"][0]["position"]
        for row in rows(tables, "apis/FetchSnapshot")
    }
    return {position[exchange_id]: some for exchange_id, some in listed.items()}


@cases("seed", range(6), heavy=range(6, 12))
def test_a_cut_batch_is_a_partial_row_in_each_response(tmp_path: Path, seed: int) -> None:
    """Each response has all its bytes in rows; cut batches have their header's values."""
    chosen = random.Random(seed)
    batches = topics(seed, chosen.choice((1, 5, 30)))
    snapshot = b"".join(batches)
    cuts = cuts_of(chosen, batches, chosen.choice((1, 5, 30)))
    path = write_capture(tmp_path / "made.pcap", pieces(snapshot, cuts, follower=3))
    tables = kdissect.read(path)
    assert kinds(tables) == []
    bounds = [*starts_of(batches), len(snapshot)]
    offsets = [row["base_offset"] for row in rows(whole(tmp_path, snapshot), "record_batches")]
    found = batch_rows(tables)
    for low, high in pairwise(cuts):
        expected = [
            (first == start and stop == end, stop - first)
            for start, end in pairwise(bounds)
            if (first := max(start, low)) < (stop := min(end, high))
        ]
        listed = found[low]
        if not any(is_whole for is_whole, _ in expected) and low not in bounds:
            # without a whole batch no header is found after the end of a cut one
            expected = [(False, high - low)]
        assert [(not row["is_partial"], row["size"]) for row in listed] == expected
        assert [row["batch_index"] for row in listed] == list(range(len(listed)))
        if low not in bounds:
            assert listed[0]["base_offset"] is listed[0]["magic"] is listed[0]["crc_ok"] is None
    in_one = in_one_piece(batches, cuts)
    shown = [row for some in found.values() for row in some if not row["is_partial"]]
    assert {row["base_offset"] for row in shown} == {offsets[number] for number in in_one}
    assert all(row["crc_ok"] for row in shown)


@pytest.mark.parametrize("seed", range(4))
def test_records_and_topics_of_whole_batches(tmp_path: Path, seed: int) -> None:
    """They are those of the same batches in Fetch responses, and name topic ids everywhere."""
    batches = topics(seed, 30)
    snapshot = b"".join(batches)
    cuts = cuts_of(random.Random(seed), batches, 10)
    some = [batches[number] for number in sorted(in_one_piece(batches, cuts))]
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", pieces(snapshot, cuts)))
    fetched = kdissect.read(
        write_capture(tmp_path / "fetched.pcap", [fetch(1, "__cluster_metadata", [b"".join(some)])])
    )
    assert kinds(tables) == []
    columns = ("partition", "offset", "timestamp", "key", "value", "control_type")

    def records(tables: kdissect.Tables) -> Counter[tuple[Any, ...]]:
        return Counter(tuple(row[name] for name in columns) for row in rows(tables, "records"))

    def named(tables: kdissect.Tables) -> set[tuple[str, str]]:
        return {(row["topic"], row["topic_id"]) for row in rows(tables, "topics")}

    assert records(tables) == records(fetched)
    assert named(tables) == named(fetched)
    assert {row["source"] for row in rows(tables, "topics")} == {"FetchSnapshot"}
    name, ident = next((name, ident) for name, ident in named(tables) if name.startswith("t"))
    asked = fetch(99, UUID(int=1000 + int(name[1:])), [batches[0]], version=13)
    path = write_capture(tmp_path / "named.pcap", [*pieces(snapshot, cuts), asked])
    [row] = [row for row in rows(kdissect.read(path), "exchanges") if row["api_name"] == "Fetch"]
    assert row["topics"] == [name], ident


@cases("split_bytes", [3_001], heavy=[20_000, None])
def test_splits_and_slots_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split_bytes: int | None
) -> None:
    """Splits and slots that cut a snapshot's responses change no record."""
    batches = topics(1, 120)
    path = write_capture(
        tmp_path / "made.pcap",
        pieces(b"".join(batches), cuts_of(random.Random(1), batches, 50), follower=3),
    )
    expected = {name: Counter(map(repr, rows(kdissect.read(path), name))) for name in RECORDED}
    monkeypatch.setattr(plan, "EVENT_KEY_BYTES", 10_000)
    tables = kdissect.read(path, split_bytes=split_bytes)
    assert {name: Counter(map(repr, rows(tables, name))) for name in RECORDED} == expected
    assert kinds(tables) == []


@pytest.mark.heavy
@pytest.mark.spark
def test_cut_batches_on_spark(spark: Any, tmp_path: Path) -> None:
    """Spark gives the rows of `read()` for batches that responses cut."""
    batches = topics(2, 100)
    exchanges = pieces(b"".join(batches), cuts_of(random.Random(2), batches, 40))
    path = write_capture(tmp_path / "made.pcap", exchanges)
    expected = kdissect.read(path)
    found = kdissect.dissect(spark, path, tmp_path / "out", split_bytes=10_000)
    assert kinds(found) == kinds(expected) == []
    for name in RECORDED:
        assert Counter(map(repr, rows(found, name))) == Counter(map(repr, rows(expected, name)))
    frame = spark.read.format("kdissect").option("path", str(path))
    for name in ("record_batches", "records", "anomalies", "internal/TopicRecord"):
        assert frame.option("table", name).load().count() == len(rows(expected, name)), name


HOSTILE = [-5, -(2**63), 2**63 - 1, 2**62, 1]


@pytest.mark.parametrize("position", HOSTILE)
@pytest.mark.parametrize("size", [0, -1, 2**63 - 1, 100])
def test_positions_that_cannot_be(tmp_path: Path, position: int, size: int) -> None:
    """A response counts for itself: what it says of its position and the snapshot does not
    change that all its bytes are in rows."""
    snapshot = b"".join(topics(7, 6, sizes=(4,)))
    data = [snapshot[:500], snapshot[500:1200], snapshot[300:900], snapshot[500:]]
    positions = [0, position, position, 500]
    exchanges = [
        snapshot_piece(n, at, size, some)
        for n, (at, some) in enumerate(zip(positions, data, strict=True))
    ]
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", exchanges))
    assert kinds(tables) == []
    sizes: Counter[int] = Counter()
    for row in rows(tables, "record_batches"):
        sizes[row["exchange_id"]] += row["size"]
    assert sorted(sizes.values()) == sorted(map(len, data))


def test_a_damaged_batch_in_a_later_response(tmp_path: Path) -> None:
    """Its CRC cannot mark where a batch begins, so its bytes are in the partial row before it."""
    batches = topics(8, 8, sizes=(6,))
    starts = starts_of(batches)
    damaged = bytearray(b"".join(batches))
    damaged[starts[4] + 60] ^= 0xFF
    cuts = [0, starts[3] + 30, len(damaged)]
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", pieces(bytes(damaged), cuts)))
    assert kinds(tables) == []
    first, *others = batch_rows(tables)[cuts[1]]
    assert first["is_partial"]
    assert first["size"] == starts[5] - cuts[1]
    assert [row["base_offset"] for row in others] == [30, 36, 42]
