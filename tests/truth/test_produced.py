"""Every record that a client says it wrote is in `records`, and again where it was consumed."""

import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.truth import produced, request_log
from tests.truth.material import LOGGED, PRODUCED, Capture, each
from tests.truth.produced import FETCHES

every_capture_with_a_list = each("capture", PRODUCED)

PRODUCE = 0
SHOWN = 8
PERF_TSHARK = Capture("perf/perf_tshark")
PERF_SMALL = Capture("perf/perf_small")


def _empty_key_is_null(capture: Capture) -> bool:
    return capture.name.endswith("/sarama")  # its list writes "" for null keys


@every_capture_with_a_list
def test_every_listed_record_was_produced(capture: Capture, say: Callable[[str], None]) -> None:
    """Records agree in topic, key and value, and in listed partition, offset, time and headers."""
    listed = produced.load(capture.produced_path)
    assert listed
    records = [row for row in capture.rows("records") if row["source"] == "produce"]
    lost = produced.missing(listed, records, empty_key_is_null=_empty_key_is_null(capture))
    assert not lost, (len(lost), lost[:SHOWN])
    with_offset = sum(one.offset is not None for one in listed)
    say(f"{capture}: {len(listed)} listed records were produced, {with_offset} at their offset")


@every_capture_with_a_list
def test_listed_records_come_back_where_consumed(
    capture: Capture, say: Callable[[str], None]
) -> None:
    """A listed record whose offset lies in a fetched batch is there, with the same content; one
    without an offset is there when its topic was read (each such topic was read whole)."""
    lenient = _empty_key_is_null(capture)
    fetched = [row for row in capture.rows("records") if row["source"] in FETCHES]
    there = produced.by_place(fetched)
    covered = {
        (batch["topic"], batch["partition"], offset)
        for batch in capture.rows("record_batches")
        if batch["source"] in FETCHES and batch["record_count"] and not batch["is_partial"]
        for offset in range(batch["base_offset"], batch["last_offset"] + 1)
    }
    listed = produced.load(capture.produced_path)
    placed = [
        one
        for one in listed
        if one.place in covered and one.how != "compacted"  # where the broker removes records
    ]
    lost = [
        one
        for one in placed
        if not any(
            produced.is_equal(one, row, empty_key_is_null=lenient) for row in there[one.place]
        )
    ]
    topics = {row["topic"] for row in fetched}
    unplaced = [one for one in listed if one.place is None and one.topic in topics]
    lost += produced.missing(unplaced, fetched, empty_key_is_null=lenient)
    assert not lost, (len(lost), lost[:SHOWN])
    assert placed or unplaced, "nothing of the list was fetched"
    say(f"{capture}: {len(placed) + len(unplaced)} of {len(listed)} listed records were consumed")


@pytest.mark.heavy
def test_large_batches_have_the_checksums_of_their_values() -> None:
    """Four codecs: bytes and sum of CRC-32 of all values per topic as the clients counted them; as
    many confirmed and consumed as they counted, each equal to what was produced at its offset."""
    counts = PERF_TSHARK.manifest["counts"]
    columns = ["source", "topic", "partition", "offset", "value"]
    table = PERF_TSHARK.tables["records"].to_arrow(columns).to_pylist()
    sent = [r for r in table if r["source"] == "produce" and r["topic"] in counts["produced"]]
    sizes: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for row in sent:
        sizes[row["topic"]] += len(row["value"])
        sums[row["topic"]] += zlib.crc32(row["value"])
    assert sizes == counts["produced_value_bytes"]
    assert sums == counts["sum_of_value_crc32"]
    confirmed = [row for row in sent if row["offset"] is not None]
    assert Counter(row["topic"] for row in confirmed) == counts["produced"]
    values = {(row["topic"], row["partition"], row["offset"]): row["value"] for row in confirmed}
    assert len(values) == len(confirmed)
    fetched = [r for r in table if r["source"] == "fetch" and r["topic"] in counts["consumed"]]
    assert Counter(row["topic"] for row in fetched) == counts["consumed"]
    for row in fetched:
        assert values[row["topic"], row["partition"], row["offset"]] == row["value"], row


@pytest.mark.heavy
def test_many_small_batches_are_all_there() -> None:
    """Confirmed produces per topic, acks=0 included, and each of them consumed."""
    counts = PERF_SMALL.manifest["counts"]
    columns = ["source", "topic", "partition", "offset"]
    table = PERF_SMALL.tables["records"].to_arrow(columns).to_pylist()
    topics = Counter(row["topic"] for row in table if row["source"] == "produce")
    assert {topic: topics[topic] for topic in counts["produced"]} == counts["produced"]
    assert sum(counts["produced"].values()) == counts["produced_total"]
    consumed = {
        (row["topic"], row["partition"], row["offset"])
        for row in table
        if row["source"] == "fetch" and row["topic"] in counts["produced"]
    }
    assert len(consumed) == counts["consumed_total"]


@each("capture", [capture for capture in LOGGED if capture.name.startswith("old_clients/")])
def test_counts_of_old_clients(capture: Capture, say: Callable[[str], None]) -> None:
    """Their values are not listed: each request's bytes per partition are those that the broker
    logged, its records take the offsets up to the next request's, and what was fetched is they."""
    sizes: Counter[tuple[str, int, int]] = Counter()
    for entry in request_log.load(capture.request_log_path):
        if entry.key[4] == PRODUCE and isinstance(entry.request, dict):
            for topic in entry.request["topicData"]:
                for part in topic["partitionData"]:
                    sizes[topic["name"], part["index"], part["recordsSizeInBytes"]] += 1
    sums: Counter[tuple[int, str, int]] = Counter()
    for row in capture.rows("record_batches"):
        if row["source"] == "produce":
            sums[row["exchange_id"], row["topic"], row["partition"]] += row["size"]
    assert Counter((*place, size) for (_, *place), size in sums.items()) == sizes
    records = [row for row in capture.rows("records") if row["control_type"] is None]
    sent = [row for row in records if row["source"] == "produce"]
    offsets = Counter(_place(row) for row in sent if row["offset"] is not None)
    assert set(offsets.values()) <= {1}
    came = {_place(row): (row["key"], row["value"]) for row in records if row["source"] in FETCHES}
    for row in sent:
        if row["offset"] is not None and row["topic"] in {topic for topic, *_ in came}:
            assert came[_place(row)] == (row["key"], row["value"])
    of_topic = Counter(topic for topic, *_ in came)
    wanted = Counter(row["topic"] for row in sent if row["topic"] in of_topic)
    assert of_topic == wanted
    say(f"{capture}: {len(sizes)} sizes of {sizes.total()}, {len(sent)} records")


def _place(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["topic"], row["partition"], row["offset"]
