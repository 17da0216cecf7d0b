"""Each limit crossed: an anomaly says so, and all the rest is as before."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import kdissect
from kdissect.pipeline.options import Limits
from kdissect.replay.workload.source import load_workload
from tests.builders.captures import read_packets, write_packets
from tests.builders.frames import request, response
from tests.builders.talks import conversation
from tests.capture.fragmenting import fragmented, ipv4_fragments
from tests.processes import Run

CAPTURE = Path(__file__).parents[2] / "captures" / "librdkafka.pcap"


def of_kind(tables: Any, kind: str) -> list[dict[str, Any]]:
    return [row for row in tables.anomalies.to_pylist() if row["kind"] == kind]


def read_talk(folder: Path, talk: list[tuple[int, bytes]], **limits: int) -> Any:
    packets = conversation(talk, segment_size=500)
    return kdissect.read(write_packets(folder / "made.pcap", packets), limits=limits)


def talk(count: int) -> list[tuple[int, bytes]]:
    said = []
    for number in range(1, count + 1):
        said += [(0, request(number, body=bytes(100))), (1, response(number, bytes(100)))]
    return said


def test_a_frame_above_the_limit_is_skipped(tmp_path: Path) -> None:
    """A larger frame is skipped, with an anomaly of its connection."""
    said = [*talk(5), (0, request(6, body=bytes(2000))), *talk(5)]
    assert not of_kind(read_talk(tmp_path, said), "limit")
    tables = read_talk(tmp_path, said, frame_size=1000)
    (row,) = of_kind(tables, "limit")
    assert "2022" not in row["detail"]
    assert row["detail"].endswith("of frame_size, 1000")
    assert row["connection_id"] is not None
    sizes = tables.exchanges.to_pandas()["request_size"]
    assert sizes.max() < 1000
    assert len(sizes) >= 5
    (unframed,) = of_kind(tables, "unframed_bytes")
    assert unframed["byte_count"] > 2000


@pytest.mark.parametrize("name", ["decompressed_size", "decompression_ratio"])
def test_batches_above_a_limit_lose_their_records(name: str, librdkafka: kdissect.Tables) -> None:
    """Batches above a limit keep their row and lose their records."""
    value = {"decompressed_size": 300, "decompression_ratio": 1}[name]
    tables = kdissect.read(CAPTURE, limits={name: value})
    crossed = of_kind(tables, "decompression_limit")
    if name == "decompressed_size":
        assert crossed
        assert tables.records.num_rows < librdkafka.records.num_rows
    assert tables.record_batches.num_rows == librdkafka.record_batches.num_rows
    assert tables.exchanges.num_rows == librdkafka.exchanges.num_rows


def test_packets_of_connections_beyond_the_limit_are_counted(librdkafka: kdissect.Tables) -> None:
    """Packets of further connections are counted as ignored."""
    tables = kdissect.read(CAPTURE, limits={"connections": 4})
    rows = tables.connections.num_rows
    assert rows <= 8  # two buckets
    (before,) = librdkafka.captures.to_pylist()
    (after,) = tables.captures.to_pylist()
    given_up = dict(after["ignored_reasons"])["connection_limit"]
    assert before["tcp_packet_count"] == after["tcp_packet_count"] + given_up
    assert after["packet_count"] == after["tcp_packet_count"] + after["ignored_packet_count"]
    details = [row["detail"] for row in of_kind(tables, "limit")]
    lost = librdkafka.connections.num_rows - rows
    assert sum(int(detail.split(" ")[0]) for detail in details) == lost
    small = kdissect.read(CAPTURE, limits={"connections": 4}, split_bytes=5000)
    ids = [set(one.connections.to_pandas()["connection_id"]) for one in (tables, small)]
    assert ids[0] == ids[1]


def test_fragments_beyond_the_limit_are_given_up(tmp_path: Path) -> None:
    """Further fragments are given up, with one anomaly for each capture."""
    datagrams = fragmented(read_packets(CAPTURE)[:420], lambda _, one: ipv4_fragments(one, 552))
    packets = [*chain.from_iterable(datagrams)]
    path = write_packets(tmp_path / "made.pcap", packets)
    whole = kdissect.read(path)
    tables = kdissect.read(path, limits={"fragments": 12})
    (row,) = of_kind(tables, "limit")
    assert "limit of fragments" in row["detail"]
    (before,) = whole.captures.to_pylist()
    (after,) = tables.captures.to_pylist()
    assert after["packet_count"] == before["packet_count"]
    assert after["packet_count"] == after["tcp_packet_count"] + after["ignored_packet_count"]
    assert after["tcp_packet_count"] < before["tcp_packet_count"]


def test_messages_with_longer_arrays_are_malformed(librdkafka: kdissect.Tables) -> None:
    """Messages with longer arrays are malformed; the rows stay."""
    tables = kdissect.read(CAPTURE, limits={"array_elements": 30})
    crossed = of_kind(tables, "limit")
    assert crossed
    assert all("limit reached" in row["detail"] for row in crossed)
    before, after = (one.exchanges.to_pandas() for one in (librdkafka, tables))
    assert len(before) == len(after)
    malformed = after["decode_status"] == "malformed"
    assert 0 < malformed.sum() <= len(crossed)
    assert tables.api("Metadata").num_rows > 0


def test_anomalies_hold_bytes_up_to_the_limit(tmp_path: Path) -> None:
    """The anomaly has the first bytes of an unknown version, and byte_count counts all."""
    said = [(0, request(1, 18, 3, body=bytes(50))), (0, request(2, 3, 60, body=bytes(200)))]
    for limits, size in (({}, 222), ({"anomaly_data": 16}, 16)):
        tables = read_talk(tmp_path, said, **limits)
        rows = [row for row in tables.anomalies.to_pylist() if row["byte_count"] == 216]
        for row in rows:
            assert len(row["data"]) == min(size, 216)
        longest = max(len(row["data"] or b"") for row in tables.anomalies.to_pylist())
        assert longest <= size


def test_records_with_more_headers_are_left_out(librdkafka: kdissect.Tables) -> None:
    """Records with more headers are left out, with an anomaly."""
    counts = [len(row or ()) for row in librdkafka.records.to_arrow()["headers"].to_pylist()]
    most = max(counts)
    assert most > 1
    tables = kdissect.read(CAPTURE, limits={"record_headers": most - 1})
    assert of_kind(tables, "limit")
    assert tables.records.num_rows < librdkafka.records.num_rows


def test_unknown_names_and_wrong_numbers_are_refused() -> None:
    """Names take hyphens; unknown names and other numbers raise ValueError."""
    assert Limits.parse(["frame-size=5", "nesting=7"]) == Limits(frame_size=5, nesting=7)
    assert Limits.of(Limits(nesting=2)).nesting == 2
    for given, reason in (
        ({"frame_sizes": 1}, r"no limit 'frame_sizes', .* decompressed_size, .*mean frame_size"),
        ({"nesting": 0}, "nesting: 0 is no positive number"),
        ({"nesting": True}, "no positive number"),
        ({"anomaly_data": 2**21}, "more than"),
    ):
        with pytest.raises(ValueError, match=reason):
            kdissect.read(CAPTURE, limits=given)
    for text in ("nesting", "nesting=many", "nesting=-1", "=3"):
        with pytest.raises(ValueError, match=r"limit|NAME=VALUE"):
            Limits.parse([text])


def test_every_limit_is_documented() -> None:
    """Every limit is in docs/limits.md with its default."""
    text = (Path(__file__).parents[2] / "docs" / "limits.md").read_text("utf-8")
    for name in Limits.names():
        default = f"{getattr(Limits(), name):,}".replace(",", " ")
        assert f"| `{name}` | {default} |" in text, name


def test_show_extract_and_replay_keep_to_limits(tmp_path: Path, kdissect: Run) -> None:
    """No verb writes or sends requests beyond frame_size."""
    said = [*talk(5), (0, request(6, body=bytes(2000))), *talk(5)]
    path = write_packets(tmp_path / "made.pcap", conversation(said, segment_size=500))
    few = ("--limit", "frame_size=1000")
    lines = kdissect("show", str(path), *few).stdout.splitlines()
    assert len(lines) + 1 == len(kdissect("show", str(path)).stdout.splitlines())
    counts = []
    for number, limit in enumerate(((), few)):
        out = str(tmp_path / f"{number}.pcapng")
        done = kdissect("extract", str(path), "--client", "orders", "--out", out, "--json", *limit)
        counts.append(json.loads(done.stdout)["exchanges"])
    assert counts[0] == counts[1] + 1
    sizes = []
    for limits in (None, {"frame_size": 1000}):
        workload = load_workload(path, limits=limits)
        sizes.append(
            [len(one.request or b"") for each in workload.connections for one in each.exchanges]
        )
    assert max(sizes[0]) > 2000 > 1000 > max(sizes[1])
