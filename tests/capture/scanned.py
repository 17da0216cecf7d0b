"""Segments that kdissect finds in a capture, as the oracle names them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from kdissect.capture.inputs import InputFile, find_captures
from kdissect.capture.mapped_files import Sources
from kdissect.capture.scan import ScanResult, scan
from kdissect.capture.segments import SegmentBatch
from kdissect.capture.splits import CaptureInfo, Split
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import RunPlan, make_plan
from tests.oracles.link_layers import Segment


def write(folder: Path, data: bytes, name: str = "made.pcap") -> InputFile:
    path = folder / name
    path.write_bytes(data)
    return find_captures([path])[0]


def planned(
    files: Iterable[InputFile], split_bytes: int = 1 << 30, folder: str | Path = ""
) -> RunPlan:
    """The plan of a run over some captures; `folder`: for unpacked copies."""
    return make_plan(list(files), Options(split_bytes=split_bytes), str(folder))


def read(
    file: InputFile, split_bytes: int = 1 << 30, folder: str | Path = ""
) -> tuple[CaptureInfo, Sequence[Split], list[ScanResult], Sources]:
    plan = planned([file], split_bytes, folder)
    sources = plan.sources()
    results = [scan(split, sources) for split in plan.splits]
    return plan.captures[0], plan.splits, results, sources


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
