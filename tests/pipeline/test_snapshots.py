"""Snapshots in pieces through captures: every batch is decoded once, wherever it was cut."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import kdissect
from kdissect.pipeline import run_plan
from tests.pipeline.made import Exchange, batch, fetch, snapshot_piece, write_capture
from tests.pipeline.test_internal import kinds, metadata, rows

PLACES = {"exchange_id", "batch_index"}
RECORDED = ("record_batches", "records", "internal/TopicRecord", "internal/ConfigRecord")


def topics(seed: int, count: int, sizes: Sequence[int] = (1, 2, 7, 40)) -> list[bytes]:
    """Batches of a snapshot: some small, some large, of every codec."""
    chosen = random.Random(seed)
    made, offset = [], 0
    for number in range(count):
        values = [
            metadata("TopicRecord", name=f"t{offset + n}", topic_id=UUID(int=1000 + offset + n))
            if chosen.random() < 0.7
            else metadata(
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


def content(tables: kdissect.Tables, *more: str) -> dict[str, Counter[str]]:
    """Rows of record data without what tells the exchange, which differs."""
    found = {}
    for name in RECORDED:
        if name in tables.names:
            listed = rows(tables, name)
            for row in listed:
                for column in (*PLACES, *more):
                    row.pop(column, None)
            found[name] = Counter(map(repr, listed))
    return found


def whole(tmp_path: Path, snapshot: bytes, **how: Any) -> kdissect.Tables:
    """The oracle: the same snapshot in one piece."""
    path = tmp_path / "whole.pcap"
    return kdissect.read(write_capture(path, pieces(snapshot, [0, len(snapshot)])), **how)


def places(tables: kdissect.Tables) -> list[tuple[int, int]]:
    return [(row["exchange_id"], row["batch_index"]) for row in rows(tables, "record_batches")]


def position_of(tables: kdissect.Tables) -> dict[int, int]:
    """Exchange -> position of its piece."""
    return {
        row["exchange_id"]: row["response"]["topics"][0]["partitions"][0]["position"]
        for row in rows(tables, "apis/FetchSnapshot")
    }


@pytest.mark.parametrize("seed", range(12))
def test_every_batch_is_decoded_once(tmp_path: Path, seed: int) -> None:
    """Also batches in three pieces and more, over two connections of one follower; the exchange of
    each is the one that completed it."""
    chosen = random.Random(seed)
    batches = topics(seed, chosen.choice((1, 5, 30)))
    snapshot = b"".join(batches)
    cuts = cuts_of(chosen, batches, chosen.choice((1, 5, 60)))
    exchanges = pieces(snapshot, cuts, follower=3)
    ports = [50_000 + (n > len(exchanges) // 2) for n in range(len(exchanges))]
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", exchanges, ports))
    assert kinds(tables) == []
    oracle = whole(tmp_path, snapshot)
    assert content(tables) == content(oracle)
    assert len(set(places(tables))) == len(batches)
    records = rows(tables, "records")
    assert {(row["exchange_id"], row["batch_index"]) for row in records} == set(places(tables))
    listed = {row["base_offset"]: row for row in rows(tables, "record_batches")}
    ends = dict(pairwise(cuts))
    end = 0
    position = position_of(tables)
    for row in sorted(rows(oracle, "record_batches"), key=lambda row: row["base_offset"]):
        end += row["size"]
        at = position[listed[row["base_offset"]]["exchange_id"]]
        assert at < end <= ends[at]


@pytest.mark.parametrize("seed", range(4))
def test_topics_told_in_pieces(tmp_path: Path, seed: int) -> None:
    """Names of ids are known before anything is decoded, those in cut batches too."""
    batches = topics(seed, 30)
    snapshot = b"".join(batches)
    cuts = cuts_of(random.Random(seed), batches, 40)
    exchanges = [*pieces(snapshot, cuts), fetch(99, UUID(int=1001), [batches[0]], version=13)]
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", exchanges))
    told = {row["topic"]: row for row in rows(tables, "topics")}
    oracle = {row["topic"]: row for row in rows(whole(tmp_path, snapshot), "topics")}
    assert told.keys() == oracle.keys()
    assert {row["source"] for row in told.values()} == {"FetchSnapshot"}
    by_id = {row["topic_id"]: name for name, row in told.items()}
    for row in rows(tables, "exchanges"):
        if row["api_name"] == "Fetch":
            ids = [each["topic_id"] for each in rows(tables, "apis/Fetch")[0]["request"]["topics"]]
            assert row["topics"] == [by_id[ids[0]]] if ids[0] in by_id else row["topics"] == []


@pytest.mark.parametrize("split_bytes", [3_001, 20_000, None])
def test_pieces_in_many_splits_and_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split_bytes: int | None
) -> None:
    """Each slot decodes a few pieces; keys of events are several too."""
    batches = topics(1, 120)
    snapshot = b"".join(batches)
    cuts = cuts_of(random.Random(1), batches, 50)
    one = pieces(snapshot, cuts, follower=3)
    other = pieces(snapshot, cuts, follower=3, end_offset=200)
    both = [each for pair in zip(one, other, strict=True) for each in pair]
    path = write_capture(tmp_path / "made.pcap", both)
    expected = {name: Counter(map(repr, rows(kdissect.read(path), name))) for name in RECORDED}
    oracle = content(whole(tmp_path, snapshot))
    for name, found in expected.items():
        assert found.total() == 2 * oracle[name].total()
    monkeypatch.setattr(run_plan, "SLOT_BYTES_MIN", 4_000)
    monkeypatch.setattr(run_plan, "EVENT_KEY_BYTES", 10_000)
    tables = kdissect.read(path, split_bytes=split_bytes)
    assert {name: Counter(map(repr, rows(tables, name))) for name in RECORDED} == expected
    assert kinds(tables) == []


@pytest.mark.heavy
@pytest.mark.spark
def test_pieces_on_spark(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = topics(2, 100)
    snapshot = b"".join(batches)
    cuts = cuts_of(random.Random(2), batches, 40)
    del cuts[7]  # one piece is larger
    exchanges = pieces(snapshot, cuts)
    del exchanges[20]
    path = write_capture(tmp_path / "made.pcap", exchanges)
    expected = kdissect.read(path)
    monkeypatch.setattr(run_plan, "SLOT_BYTES_MIN", 4_000)
    found = kdissect.dissect(spark, path, tmp_path / "out", split_bytes=10_000)
    assert kinds(found) == kinds(expected) == ["snapshot_gap"]
    for name in (*RECORDED, "anomalies"):
        assert Counter(map(repr, rows(found, name))) == Counter(map(repr, rows(expected, name)))
    frame = spark.read.format("kdissect").option("path", str(path))
    for name in ("record_batches", "records", "anomalies", "internal/TopicRecord"):
        assert frame.option("table", name).load().count() == len(rows(expected, name)), name


def test_pieces_sent_again(tmp_path: Path) -> None:
    """A follower asks again for what it did not take: batches in several pieces stay once."""
    batches = topics(3, 12, sizes=(3, 9))
    snapshot = b"".join(batches)
    cuts = cuts_of(random.Random(3), batches, 9)
    exchanges = pieces(snapshot, cuts, follower=1)
    again = [*exchanges[:3], exchanges[2], *exchanges[3:7], exchanges[6], *exchanges, *exchanges]
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", again))
    assert kinds(tables) == []
    found, oracle = content(tables), content(whole(tmp_path, snapshot))
    for name in found:
        assert set(found[name]) == set(oracle[name])
    within = {
        start
        for low, high in pairwise(cuts)
        for start, each in zip(starts_of(batches), batches, strict=True)
        if low <= start and start + len(each) <= high
    }
    assert 0 < len(within) < len(batches)
    times = Counter(row["base_offset"] for row in rows(tables, "record_batches"))
    first = [row["base_offset"] for row in rows(whole(tmp_path, snapshot), "record_batches")]
    for start, offset in zip(starts_of(batches), sorted(first), strict=True):
        assert times[offset] >= 2 if start in within else times[offset] == 1


def starts_of(batches: list[bytes]) -> list[int]:
    return [sum(map(len, batches[:n])) for n in range(len(batches))]


def test_a_longer_piece_at_the_same_position(tmp_path: Path) -> None:
    """The second answer holds more of the snapshot, and the download goes on behind it."""
    batches = topics(4, 10, sizes=(5,))
    snapshot = b"".join(batches)
    size, low = len(snapshot), len(batches[0]) + 20
    middle, high = low + len(batches[1]) * 3, low + len(batches[1]) * 5 + 11
    exchanges = [
        snapshot_piece(0, 0, size, snapshot[:low]),
        snapshot_piece(1, low, size, snapshot[low:middle]),
        snapshot_piece(2, low, size, snapshot[low:high]),
        snapshot_piece(3, high, size, snapshot[high:]),
    ]
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", exchanges))
    assert kinds(tables) == []
    found, oracle = content(tables), content(whole(tmp_path, snapshot))
    assert {name: set(each) for name, each in found.items()} == {
        name: set(each) for name, each in oracle.items()
    }


def test_pieces_out_of_order_and_of_several_followers(tmp_path: Path) -> None:
    """Two followers download the same snapshot at once, one of them from behind."""
    batches = topics(5, 30)
    snapshot = b"".join(batches)
    chosen = random.Random(5)
    cuts = [cuts_of(chosen, batches, 12), cuts_of(chosen, batches, 20)]
    listed = [(50_000, each) for each in reversed(pieces(snapshot, cuts[0], follower=1))]
    listed += [(50_001, each) for each in pieces(snapshot, cuts[1], follower=2)]
    chosen.shuffle(listed)
    ports, exchanges = zip(*listed, strict=True)
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", exchanges, ports))
    assert kinds(tables) == []
    oracle = content(whole(tmp_path, snapshot))
    doubled = {
        name: Counter({row: 2 * n for row, n in each.items()}) for name, each in oracle.items()
    }
    assert content(tables) == doubled
    assert len(set(places(tables))) == 2 * len(batches)


@pytest.mark.parametrize("seed", range(6))
def test_missing_pieces(tmp_path: Path, seed: int) -> None:
    """A gap for each run of missing pieces, partial rows beside it, everything else once."""
    chosen = random.Random(seed)
    batches = topics(seed, 25)
    snapshot = b"".join(batches)
    cuts = cuts_of(chosen, batches, 14)
    ranges = list(pairwise(cuts))
    missing = set(chosen.sample(range(len(ranges)), 3))
    exchanges = [
        each for n, each in enumerate(pieces(snapshot, cuts, follower=1)) if n not in missing
    ]
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", exchanges))
    gaps = [row for row in rows(tables, "anomalies") if row["kind"] == "snapshot_gap"]
    assert set(kinds(tables)) == {"snapshot_gap"}
    assert sum(row["byte_count"] for row in gaps) == sum(
        b - a for a, b in (ranges[n] for n in missing)
    )
    assert len(gaps) == sum(n - 1 not in missing for n in missing)
    lost = [ranges[n] for n in missing]
    complete = [
        not any(low < start + len(each) and start < high for low, high in lost)
        for start, each in zip(starts_of(batches), batches, strict=True)
    ]
    listed = rows(tables, "record_batches")
    assert sum(not row["is_partial"] for row in listed) == sum(complete)
    assert sum(row["size"] for row in listed) == len(snapshot) - sum(b - a for a, b in lost)
    found, oracle = content(tables), content(whole(tmp_path, snapshot))
    assert not found["records"] - oracle["records"]
    assert len(set(places(tables))) == len(listed)


def test_a_lost_request_and_a_lost_response(tmp_path: Path) -> None:
    """The connection tells whose piece it is; without the response there is none."""
    batches = topics(6, 20)
    snapshot = b"".join(batches)
    cuts = cuts_of(random.Random(6), batches, 8)
    exchanges = pieces(snapshot, cuts, follower=7)
    path = tmp_path / "made.pcap"
    tables = kdissect.read(write_capture(path, exchanges, lost={(4, 1)}))
    assert "snapshot_gap" in kinds(tables)
    [gap] = [row for row in rows(tables, "anomalies") if row["kind"] == "snapshot_gap"]
    assert gap["byte_count"] == cuts[5] - cuts[4]
    tables = kdissect.read(write_capture(path, exchanges, lost={(4, 0)}))
    if len(position_of(tables)) == len(exchanges):  # the version was found without the request
        assert "snapshot_gap" not in kinds(tables)
        assert content(tables) == content(whole(tmp_path, snapshot))


HOSTILE = [-5, -(2**63), 2**63 - 1, 2**62, 1]


@pytest.mark.parametrize("position", HOSTILE)
@pytest.mark.parametrize("size", [0, -1, 2**63 - 1, 100])
def test_positions_that_cannot_be(tmp_path: Path, position: int, size: int) -> None:
    """Nothing crashes, what is whole in a piece is there, bytes of all pieces are in rows."""
    batches = topics(7, 6, sizes=(4,))
    snapshot = b"".join(batches)
    exchanges = [
        snapshot_piece(0, 0, size, snapshot[:500]),
        snapshot_piece(1, position, size, snapshot[500:1200]),
        snapshot_piece(2, position, size, snapshot[300:900]),
        snapshot_piece(3, 500, size, snapshot[500:]),
    ]
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", exchanges))
    assert rows(tables, "record_batches")
    assert kinds(tables)
    assert set(kinds(tables)) <= {"snapshot_gap", "malformed_records", "overlap_conflict"}


@pytest.mark.parametrize(
    ("at", "value", "kind"),
    [
        (60, b"\xff", "wrong_crc"),
        (8, b"\x80", "malformed_records"),  # a negative length
        (8, b"\0\0\0\1", "malformed_records"),  # a length that no batch has
        (8, b"\0\x0f", "malformed_records"),  # one beyond where the next batch begins
        (8, b"\x7f", "limit"),
    ],
)
def test_a_damaged_batch_in_pieces(tmp_path: Path, at: int, value: bytes, kind: str) -> None:
    """It has a row or a fault that says why not; those around it are there."""
    batches = topics(8, 8, sizes=(6,))
    start = sum(map(len, batches[:3]))
    broken = bytearray(b"".join(batches))
    broken[start + at : start + at + len(value)] = value
    cuts = [0, start + 30, start + 60, len(broken)]
    path = write_capture(tmp_path / "made.pcap", pieces(bytes(broken), cuts))
    tables = kdissect.read(path, limits={"frame_size": 1 << 20})
    assert kind in kinds(tables)
    assert set(kinds(tables)) <= {kind, "malformed_records", "record_count_mismatch"}
    offsets = {row["base_offset"] for row in rows(tables, "record_batches") if row["crc_ok"]}
    assert offsets == {6 * n for n in range(8)} - {18}
    assert len(set(places(tables))) == len(places(tables))


def test_secrets_and_payload(tmp_path: Path) -> None:
    """What is joined is shown as everything else is."""
    secret = metadata("ConfigRecord", resource_type=4, resource_name="1",
                      name="ssl.keystore.password", value="hunter2" * 30)  # fmt: skip
    broken = metadata("UserScramCredentialRecord", name="eve", salt=b"hunter2" * 9)[:-3]
    batches = [*topics(9, 2), batch([(b"key", secret), (None, broken)], 1000)]
    damaged = batch([(None, secret)], 1002)
    snapshot = b"".join([*batches, damaged[:-1] + bytes([damaged[-1] ^ 1]), *topics(10, 2)])
    start = sum(map(len, batches))
    cuts = [0, start - 80, start + 80, len(snapshot)]
    path = write_capture(tmp_path / "made.pcap", pieces(snapshot, cuts))
    for payload in ("full", "keys", "hash", "none"):
        tables = kdissect.read(path, payload=payload)
        oracle = whole(tmp_path, snapshot, payload=payload)
        assert content(tables) == content(oracle)
        for name in tables.names:
            assert "hunter2" not in repr(rows(tables, name)), name
        assert kinds(tables) == kinds(oracle)
        assert sorted(str(row["data"]) for row in rows(tables, "anomalies")) == sorted(
            str(row["data"]) for row in rows(oracle, "anomalies")
        )
    opened = kdissect.read(path, reveal_secrets=True)
    assert content(opened) == content(whole(tmp_path, snapshot, reveal_secrets=True))
    assert "hunter2" in repr(rows(opened, "records"))
    values = kdissect.read(path, decode_values="string")
    assert "value_text" in values["records"].schema.names
