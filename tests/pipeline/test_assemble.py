"""Rows are the same whether a bucket is assembled at once, in memory, or in parts and files."""

from pathlib import Path

import numpy as np
import pytest

import kdissect
from bench.synthesise import connections_of, crowd, heartbeat
from kdissect.capture import scratch
from kdissect.capture.inputs import find_captures
from kdissect.capture.segments import ENDPOINTS, SEGMENT, SegmentBatch
from kdissect.kafka import exchanges
from kdissect.pipeline import assemble, scan
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import planned
from kdissect.pipeline.step_rows import RowKind
from tests.builders.captures import split_capture
from tests.cases import cases
from tests.conftest import CAPTURES

SOME = [CAPTURES / "librdkafka.pcap", CAPTURES / "tls13.pcap.gz"]  # plain and decrypted
OTHERS = [path for path in sorted(CAPTURES.glob("*.pcap*")) if path not in SOME]


def divide(patch: pytest.MonkeyPatch, large_bytes: int) -> None:
    """Every limit so small that all is done in pieces."""
    patch.setattr(assemble, "LARGE_BYTES", large_bytes)
    patch.setattr(assemble, "PART_ROWS", 7)
    patch.setattr(scan, "ROW_BYTES_MAX", 1000)
    patch.setattr(exchanges, "FRAMES_AT_ONCE", 3)
    patch.setattr(scratch, "FILE_BYTES_MIN", 1)


def same_tables(expected: kdissect.Tables, found: kdissect.Tables) -> None:
    assert found.names == expected.names
    for table in expected.names:
        one, two = found[table].to_arrow(), expected[table].to_arrow()
        assert one.num_rows == two.num_rows, table
        if table == "anomalies":
            assert sorted(map(repr, one.to_pylist())) == sorted(map(repr, two.to_pylist()))
        else:
            assert one.equals(two), table


@cases("path", SOME, heavy=OTHERS, ids=lambda path: path.name)
def test_parts_and_files_change_no_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets in parts and in temporary files give the tables of buckets in memory."""
    keylog = sorted(CAPTURES.glob("*.keylog"))
    expected = kdissect.read(path, keylog=keylog)
    divide(monkeypatch, 3000)
    same_tables(expected, kdissect.read(path, keylog=keylog, split_bytes=100_000))


def test_a_giant_among_others_over_rotated_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With packets lost and files cut into three, one of them a little ahead of its time."""
    whole = tmp_path / "whole.pcap"
    crowd(whole, heartbeat(), connections_of(3000, 9, 0.9))
    head, packets = split_capture(whole.read_bytes())
    rng = np.random.default_rng(5)
    packets = [packet for packet in packets if rng.random() > 0.003]
    for at in rng.integers(0, len(packets) - 9, 40).tolist():
        packets[at], packets[at + 7] = packets[at + 7], packets[at]
    files = []
    for number, (first, stop) in enumerate(((0, 2000), (1900, 4200), (4200, None))):
        files.append(tmp_path / f"{number}.pcap")
        files[-1].write_bytes(head + b"".join(packets[first:stop]))
    expected = kdissect.read(files)
    assert len(expected["anomalies"].to_arrow()) > 10
    divide(monkeypatch, 20_000)
    same_tables(expected, kdissect.read(files, split_bytes=90_000))
    first, last = "2023-11-14T22:13:20.030Z", "2023-11-14T22:13:20.080Z"
    some = kdissect.read(files, from_=first, until=last)
    monkeypatch.undo()
    same_tables(kdissect.read(files, from_=first, until=last), some)


@pytest.mark.parametrize("large_bytes", [0, 600, 1 << 20])
def test_segments_of_a_connection_stay_in_order(
    large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection's segments come out in the order in which they came in."""
    divide(monkeypatch, large_bytes)
    rng = np.random.default_rng(1)
    pairs = np.zeros(5, ENDPOINTS)
    pairs["port_a"] = np.arange(5)
    gathered = assemble.Gathered()
    expected: dict[int, list[int]] = {number: [] for number in range(5)}
    packet = 0
    for _ in range(20):
        segments = np.zeros(10, SEGMENT)
        segments["endpoints"] = rng.choice(5, 10, p=(0.1, 0.1, 0.1, 0.6, 0.1))
        segments["packet"] = np.arange(packet, packet + 10)
        packet += 10
        for row in segments:
            expected[int(row["endpoints"])].append(int(row["packet"]))
        used, index = np.unique(segments["endpoints"], return_inverse=True)
        segments["endpoints"] = index
        gathered.add(SegmentBatch(pairs[used], segments))
    batch, _ = gathered.batch()
    ports = batch.endpoints["port_a"][batch.segments["endpoints"]]
    found = {number: batch.segments["packet"][ports == number].tolist() for number in range(5)}
    assert found == expected


def test_segments_of_small_files_share_a_row(tmp_path: Path) -> None:
    """Rows do not grow with the number of files that a task reads."""
    head, packets = split_capture(SOME[0].read_bytes())
    for number, start in enumerate(range(0, len(packets), 25)):
        (tmp_path / f"{number:03}.pcap").write_bytes(head + b"".join(packets[start : start + 25]))
    inputs = find_captures([str(tmp_path)])
    assert len(inputs) > 40
    with planned(inputs, Options()) as plan:
        rows = scan.scan(plan, plan.sources(), plan.scan_rows())
        found = [row for row in rows if row.kind == RowKind.SEGMENTS]
    assert len(found) == len({row.key for row in found})
    segments = np.concatenate([row.data.segments for row in found])
    assert sorted(set(segments["source"].tolist())) == list(range(len(inputs)))
    places = segments[["source", "packet"]].tolist()
    assert len(set(places)) == len(places) >= len(packets) * 9 // 10
