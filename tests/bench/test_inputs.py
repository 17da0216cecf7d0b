"""The captures that benchmarks make hold what they are to hold, as kdissect reads them."""

from pathlib import Path

import numpy as np
import pytest

import kdissect
from bench.multiply import multiply
from bench.synthesise import (
    PARTITIONS,
    Recipe,
    connections_of,
    crowd,
    heartbeat,
    large_fetch,
    synthesise,
)
from kdissect.codec.compression import CODEC_NAMES
from tests.conftest import CAPTURES

SOURCE = CAPTURES / "librdkafka.pcap"


def test_copies_are_conversations_of_their_own(tmp_path: Path) -> None:
    """Three copies: other hosts, and three times the rows of each table."""
    one = kdissect.read(SOURCE)
    multiply(SOURCE, tmp_path / "three.pcap", 3)
    three = kdissect.read(tmp_path / "three.pcap")
    for name in ("connections", "exchanges", "record_batches", "records"):
        assert len(three[name]) == 3 * len(one[name]), name
    (capture,) = three.captures.to_pylist()
    assert capture["packet_count"] == 3 * one.captures.to_pylist()[0]["packet_count"]
    assert capture["duplicate_packet_count"] == 0
    hosts = {row["client_ip"] for row in three.connections.to_pylist()}
    assert len(hosts) == 3 * len({row["client_ip"] for row in one.connections.to_pylist()})


def test_other_files_are_refused(tmp_path: Path) -> None:
    """What is no pcap, or of an unusual link type, is an error of the caller."""
    path = tmp_path / "other"
    path.write_bytes(b"no capture at all, but long enough")
    with pytest.raises(ValueError, match="is no little-endian pcap"):
        multiply(path, tmp_path / "out", 2)
    path.write_bytes(bytes.fromhex("d4c3b2a1020004000000000000000000ffff000093000000"))
    with pytest.raises(ValueError, match="link type 147"):
        multiply(path, tmp_path / "out", 2)


@pytest.mark.parametrize("magic", [0, 1, 2])
def test_a_synthetic_capture_holds_every_codec(tmp_path: Path, magic: int) -> None:
    """Each codec's records are produced and fetched, nothing is odd."""
    names = CODEC_NAMES if magic == 2 else CODEC_NAMES[:4]
    path = tmp_path / "codecs.pcap"
    synthesise(path, [Recipe(codec, magic, 50 * PARTITIONS, 50) for codec in names])
    tables = kdissect.read(path)
    batches = tables.record_batches.to_pandas()
    assert len(tables.anomalies) == 0
    assert set(batches["magic"]) == {magic}
    assert set(zip(batches["source"], batches["codec"], strict=True)) == {
        (source, codec) for source in ("produce", "fetch") for codec in names
    }
    assert len(tables.records) == 2 * 50 * PARTITIONS * len(names)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_crowd_has_every_exchange(tmp_path: Path, is_large: bool) -> None:
    """Each on its connection, in order, without anomalies."""
    path = tmp_path / "crowd.pcap"
    connection = connections_of(40, 4, 0.5)
    crowd(path, large_fetch() if is_large else heartbeat(), connection)
    tables = kdissect.read(path)
    found = tables.exchanges.to_pandas()
    assert set(found["status"]) == {"paired"}
    assert sorted(found.groupby("connection_id").size()) == sorted(np.bincount(connection))
    assert len(tables.anomalies) == 0
    assert len(tables.records) == (40 * 1200 if is_large else 0)
