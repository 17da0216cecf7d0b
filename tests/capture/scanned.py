"""Segments that kdissect finds in a capture, as the oracle names them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kdissect.capture.inputs import InputFile, find_captures
from kdissect.capture.ip_fragments import Joined
from kdissect.capture.mapped_files import Sources
from kdissect.capture.scan import ScanResult, scan
from kdissect.capture.segments import SegmentBatch
from kdissect.capture.splits import CaptureInfo, Split, numbered, walk_capture
from tests.oracles.link_layers import Segment


def write(folder: Path, data: bytes, name: str = "made.pcap") -> InputFile:
    path = folder / name
    path.write_bytes(data)
    return find_captures([path])[0]


class Planned(NamedTuple):
    """What the plan of a run has of its captures."""

    sources: Sources
    captures: list[CaptureInfo]
    splits: list[Split]
    fragments: Joined | None


def planned(
    files: Iterable[InputFile], split_bytes: int = 1 << 30, folder: str | Path = ""
) -> Planned:
    """The splits of some captures; `folder`: for unpacked copies."""
    found = numbered([walk_capture(file, str(folder), split_bytes) for file in files])
    joined = found.joined(str(folder)) if any(map(len, found.fragments)) else None
    return Planned(Sources(found.files, str(folder)), found.captures, found.splits, joined)


def read(
    file: InputFile, split_bytes: int = 1 << 30, folder: str | Path = ""
) -> tuple[CaptureInfo, list[Split], list[ScanResult], Sources]:
    plan = planned([file], split_bytes, folder)
    results = [scan(split, plan.sources, plan.fragments) for split in plan.splits]
    return plan.captures[0], plan.splits, results, plan.sources


def written_out(batch: SegmentBatch) -> list[Segment]:
    """A batch's rows as the oracle gives them."""
    pairs = [
        (bytes(row["ip_a"]), int(row["port_a"]), bytes(row["ip_b"]), int(row["port_b"]),
         int(row["network"]))
        for row in batch.endpoints
    ]  # fmt: skip
    names = [name for name in Segment._fields if name != "endpoints"]
    columns = {name: batch.segments[name].tolist() for name in names}
    columns["endpoints"] = [pairs[row] for row in batch.segments["endpoints"].tolist()]
    return [Segment(*row) for row in zip(*(columns[n] for n in Segment._fields), strict=True)]


def segments_of(results: Iterable[ScanResult]) -> list[Segment]:
    return [segment for result in results for segment in written_out(result.batch)]


def ignored_of(results: Iterable[ScanResult]) -> dict[str, int]:
    total: dict[str, int] = {}
    for result in results:
        for name, count in result.ignored_reasons.items():
            total[name] = total.get(name, 0) + count
    return total
