"""Real captures: counts as their manifests say, the same rows for any split size, in time order."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kdissect.capture.inputs import InputFile, find_captures
from kdissect.capture.scan import scan
from kdissect.capture.segments import SegmentBatch
from kdissect.capture.splits import CaptureInfo
from tests.capture.scanned import ignored_of, planned, read, segments_of
from tests.material import CAPTURES as SHARED
from tests.material import needs_material
from tests.oracles.link_layers import scan_capture

pytestmark = needs_material


def manifest_counts() -> dict[str, int]:
    """Packets of every capture: by its own manifest, or by the list of derived shapes."""
    counts: dict[str, int] = {}
    for manifest in SHARED.glob("*/*.json"):
        told = json.loads(manifest.read_text())
        if "file" in told and "check" in told:
            counts[f"{manifest.parent.name}/{told['file']}"] = told["check"]["packets"]
    shapes = json.loads((SHARED / "shapes" / "shapes.json").read_text())["files"]
    for name, told in shapes.items():
        counts[f"shapes/{name}"] = told["packets"]
    return counts


COUNTS = manifest_counts() if SHARED.is_dir() else {}


def found(name: str) -> InputFile:
    return find_captures([SHARED / name])[0]


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_packet_count_is_the_manifest_s(name: str, tmp_path: Path) -> None:
    """Every packet of these captures is a TCP segment that was wholly understood."""
    info, _, results, _ = read(found(name), folder=tmp_path)
    assert info.packet_count == COUNTS[name]
    assert sum(result.tcp_packet_count for result in results) == COUNTS[name]
    assert ignored_of(results) == {}
    assert (info.error is not None) == (name == "shapes/cut.pcap")


def test_every_capture_has_a_count(tmp_path: Path) -> None:
    """The list of counts names each shared capture."""
    files = [file for file in find_captures([SHARED]) if file.is_capture]
    captures = planned(files, folder=tmp_path).captures
    assert {Path(capture.path).relative_to(SHARED).as_posix() for capture in captures} == set(
        COUNTS
    )


SHAPES = [name for name in sorted(COUNTS) if name.startswith("shapes/")]


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_read_like_the_oracle(name: str, tmp_path: Path) -> None:
    """Segments equal the oracle's, in splits, too."""
    _, _, results, sources = read(found(name), 50_000, tmp_path)
    assert len(results) > 0
    assert segments_of(results) == scan_capture(sources.data(0).tobytes())[0]


@pytest.mark.parametrize(
    "name", ["shapes/pcapng_two_interfaces.pcapng", "shapes/cut.pcap", "shapes/sll2.pcap"]
)
@pytest.mark.parametrize("split_bytes", [1, 777, 10_000, 100_000])
def test_split_size_changes_nothing(name: str, split_bytes: int) -> None:
    """The segments of all splits are those of one."""
    file = found(name)
    whole, _, (expected,), _ = read(file)
    info, _, results, _ = read(file, split_bytes)
    assert info == whole
    joined = SegmentBatch.concat([result.batch for result in results])
    assert len(joined.endpoints) == len(expected.batch.endpoints)
    names = [n for n in joined.segments.dtype.names or () if n != "endpoints"]
    assert (joined.segments[names] == expected.batch.segments[names]).all()
    pairs = joined.endpoints[joined.segments["endpoints"]]
    assert (pairs == expected.batch.endpoints[expected.batch.segments["endpoints"]]).all()


def times_of(files: list[InputFile]) -> tuple[Sequence[CaptureInfo], list[int]]:
    plan = planned(files)
    batches = [scan(split, plan.sources()).batch for split in plan.splits]
    times = np.concatenate([batch.segments["time_ns"] for batch in batches])
    return plan.captures, times.tolist()


def test_rotated_files_come_in_order_of_time() -> None:
    """Files in any order are sorted by their first packet."""
    files = find_captures([str(SHARED / "shapes/rotated_*")])
    _, whole = times_of([found("other_clients/librdkafka.pcap")])
    for seed in range(3):
        random.Random(seed).shuffle(files)
        captures, times = times_of(files)
        assert [Path(capture.path).name[8:13] for capture in captures] == [
            f"{n:05}" for n in range(5)
        ]
        assert times == whole


def test_other_files_are_listed_last(tmp_path: Path) -> None:
    """Files without packets have an error, after the captures."""
    plan = planned(find_captures([SHARED / "tls"]), folder=tmp_path)
    sources, captures = plan.sources(), plan.captures
    assert [capture.source for capture in captures] == [0, 1] + [-1] * (len(captures) - 2)
    assert all(capture.error for capture in captures[2:])
    assert [sources.name(number) for number in (0, 1)] == [info.path for info in captures[:2]]


def test_secrets_of_a_pcapng_are_its_key_log() -> None:
    """The block of decryption secrets has the key log's bytes."""
    info, _, _, sources = read(found("shapes/tls_dsb.pcapng"))
    ((kind, pos, length),) = info.secrets
    assert kind == 0x544C534B
    log = sources.data(0)[pos : pos + length].tobytes()
    assert log == (SHARED / "tls" / "tls13.keylog").read_bytes()


def test_snap_length_is_counted() -> None:
    """Cut packets are counted and listed."""
    info, _, (result,), _ = read(found("shapes/snap128.pcap"))
    assert info.truncated_packet_count == result.truncated_packet_count == 410
    assert len(result.cut_segments) == 410
