"""What topics hold, read by kafka-python: an independent client, beside librdkafka in `sessions`.

Its decompression needs packages of their own; cramjam, which is here, does it.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cramjam
from kafka import KafkaConsumer, TopicPartition, codec
from kafka.record import default_records

Record = tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]
Logs = dict[tuple[str, int], list[Record]]
_WAIT_MS = 20_000
_XERIAL, _XERIAL_HEAD = b"\x82SNAPPY\x00", 16


def _xerial(data: bytes) -> bytes:
    """Decompress Snappy from Java clients (blocks with sizes) or from others (one block)."""
    if not data.startswith(_XERIAL):
        return bytes(cramjam.snappy.decompress_raw(data))
    out, pos = b"", _XERIAL_HEAD
    while pos < len(data):
        size = int.from_bytes(data[pos : pos + 4], "big")
        out += bytes(cramjam.snappy.decompress_raw(data[pos + 4 : pos + 4 + size]))
        pos += 4 + size
    return out


_CODECS: dict[str, Any] = {
    "snappy": _xerial,
    "lz4": lambda data: bytes(cramjam.lz4.decompress(data)),
    "zstd": lambda data: bytes(cramjam.zstd.decompress(data)),
}


def _use_cramjam() -> None:
    for name, decode in _CODECS.items():
        setattr(codec, f"has_{name}", lambda: True)
        setattr(default_records, f"{name}_decode", decode)


def read_logs(address: str, topics: Iterable[str]) -> Logs:
    """(topic, partition) -> its records, aborted ones too, in the order of their offsets."""
    _use_cramjam()
    consumer: Any = KafkaConsumer(
        bootstrap_servers=[address],
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        consumer_timeout_ms=_WAIT_MS,
    )
    try:
        places = [
            TopicPartition(topic, number)
            for topic in topics
            for number in consumer.partitions_for_topic(topic) or ()
        ]
        consumer.assign(places)
        ends = consumer.end_offsets(places)
        found: Logs = {(place.topic, place.partition): [] for place in places}
        open_places = {place for place in places if ends[place]}
        consumer.seek_to_beginning(*places)
        while open_places:
            fetched = consumer.poll(timeout_ms=500)
            for place, messages in fetched.items():
                found[place.topic, place.partition] += [
                    (each.key, each.value, tuple((n, v) for n, v in each.headers))
                    for each in messages
                ]
            open_places = {each for each in open_places if consumer.position(each) < ends[each]}
        return found
    finally:
        consumer.close()


def produced_logs(path: Path) -> Logs:
    """The records that the captured clients wrote (``NAME.produced.jsonl.gz``), in order."""
    logs: dict[tuple[str, int], dict[int, Record]] = defaultdict(dict)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            headers = tuple((name, _bytes(value)) for name, value in row.get("headers", ()))
            record = _bytes(row["key"]), _bytes(row["value"]), headers
            logs[row["topic"], row["partition"]][row["offset"]] = record
    return {place: [log[at] for at in sorted(log)] for place, log in logs.items()}


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
