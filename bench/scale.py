"""How a run grows with its input: plans of made inputs, by the product's own code.

No capture of these sizes exists here. `make_plan` gets a list of objects, with tags, and a runner
that answers as tasks would: with the splits and IP fragments of such files, and with the segments
of joined fragments. Everything after that is a real plan. Then the driver sums up what the tasks of
each step would tell it, with the facts of many topics. Each size has a process of its own, so that
the driver's memory is its own.
"""

import base64
import multiprocessing
import pickle
import resource
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from kdissect.capture.inputs import InputFile
from kdissect.capture.ip_fragments import FRAGMENT, LOST, Joined
from kdissect.capture.packet_reader import CURSOR
from kdissect.capture.segments import ENDPOINTS, SEGMENT, SegmentBatch
from kdissect.capture.splits import CaptureInfo, Split, WalkedCapture
from kdissect.pipeline.learn import Cluster
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import RunPlan, make_plan
from kdissect.pipeline.run_tables import RunSummary
from kdissect.pipeline.set_folder import SetFolder
from kdissect.pipeline.spark import FACT_TASKS
from kdissect.pipeline.step_rows import RUN, StepRow
from kdissect.pipeline.table_writer import StagedFile
from kdissect.pipeline.task_table import share_in

GB = 1 << 30
INPUTS = {"10 GB": (10, 1), "1 TB": (1024, 1), "100 TB": (102_400, 4)}  # GB, GB of each file
PACKET_BYTES = 1000
TOPICS = 100_000
FRAGMENTS = 10_000  # in each file
TABLES = 20  # that a decode task writes
START_NS, FILE_NS = 1_700_000_000_000_000_000, 60_000_000_000
INTERFACES = bytes(40)  # a row, as each split of a pcap has


def main() -> None:
    """Command: python -m bench.scale; prints a table in Markdown."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for name, size in INPUTS.items():
        with context.Pool(1) as pool:
            rows.append({"input": name, **pool.apply(planned, size)})
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" + "---:|" * (len(rows[0]) - 1))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


def planned(total_gb: int, file_gb: int, topics: int = TOPICS) -> dict[str, int | str]:
    """Figures of the plan for so many GB in files of `file_gb`, and of what its tasks tell."""
    began = time.perf_counter()
    plan = planned_run(total_gb, file_gb)
    items = [len(row.data) for row in plan.scan_rows()]
    known = facts(topics).known_names()
    with tempfile.TemporaryDirectory() as out:
        share = share_in(SetFolder(out), "run", plan.folder)
        function = pickle.dumps((plan.for_tasks(share), known.for_tasks(share)))
        file_bytes = sum(file.stat().st_size for file in Path(out).rglob("*.arrow"))
    told, file_count = collected(plan, topics)
    took = time.perf_counter() - began
    return {
        "files": len(plan.files),
        "splits": len(plan.splits),
        "tasks": plan.task_count,
        "buckets": plan.bucket_count,
        "slots": plan.slot_count,
        "keys of events": plan.event_key_count,
        "function of a decode task, MB": f"{len(function) / 1e6:.2f}",
        "tables beside the run, MB": f"{file_bytes / 1e6:.1f}",
        "units of a scan task, MB": f"{max(items) / 1e6:.2f}",
        "told to the driver, MB": f"{told / 1e6:.1f}",
        "files of tables": file_count,
        "driver, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "seconds": f"{took:.1f}",
    }


@cache
def facts(topics: int) -> Cluster:
    """What each task learns of a cluster with so many topics."""
    cluster = Cluster()
    for number in range(topics):
        topic_id = base64.urlsafe_b64encode(uuid.UUID(int=number).bytes).decode().rstrip("=")
        cluster.topics.add(f"payments.orders-{number}", topic_id, START_NS, "Metadata")
    return cluster


def collected(plan: RunPlan, topics: int) -> tuple[int, int]:
    """Bytes of the rows about the run that the driver collects and sums up; files of tables."""
    counts = Counter(dict.fromkeys(range(len(plan.sizes)), 1_000_000))
    hashes = {number: f"{number:064}" for number in range(len(plan.files))}
    scanned = RunSummary(packets=counts, tcp=counts, duplicates=counts, hashes=hashes).row()
    files = [StagedFile(f"table{number}", f"{number:080}", 1000) for number in range(TABLES)]
    is_merged = plan.task_count > FACT_TASKS
    *parts, assembled = RunSummary(facts=facts(topics)).rows(FACT_TASKS if is_merged else 0)
    merged = [row._replace(key=RUN) for row in parts]
    per_task = [assembled, RunSummary(files=files).row()]
    steps = [[scanned], merged, *([row] * plan.task_count for row in per_task)]
    summary, size = RunSummary(), 0
    for rows in steps:
        for row in [StepRow(*row[:-1], bytes(bytearray(row.data))) for row in rows]:
            summary.add(row)
            size += len(row.data)
    assert len(summary.facts.topics.first) == topics
    return size, len(summary.files)


def planned_run(total_gb: int, file_gb: int) -> RunPlan:
    """The plan for so many GB in files of `file_gb`."""
    urls = [f"s3://captures/2026-11-26/{number:06}.pcap" for number in range(total_gb // file_gb)]
    inputs = [
        # no two files have one size
        InputFile(url, "pcap", size=file_gb * GB - number % 1009 * 8, tag=uuid.uuid4().hex)
        for number, url in enumerate(urls)
    ]
    return make_plan(inputs, Options(), "/tmp", _in_tasks)


def _in_tasks(call: Callable[..., Any], items: Sequence[Any]) -> list[Any]:
    """What tasks of a `Runner` return for the calls of a plan."""
    assert isinstance(call, partial)
    answer = {"_walked": _walked, "_fragments": _fragments, "_joined": _joined}[call.func.__name__]
    return [pickle.loads(pickle.dumps(answer(item, **call.keywords))) for item in items]


def _walked(
    inputs: list[InputFile], folder: str, split_bytes: int, fragment_max: int
) -> list[WalkedCapture]:
    return [_walk(file, split_bytes, fragment_max) for file in inputs]


def _walk(file: InputFile, split_bytes: int, fragment_max: int) -> WalkedCapture:
    start = START_NS + int(file.path[-11:-5]) * FILE_NS
    splits = []
    for pos in range(0, file.size, split_bytes):
        end = min(pos + split_bytes, file.size)
        number, last = pos // PACKET_BYTES, end // PACKET_BYTES
        cursor = np.zeros(1, CURSOR)
        cursor["pos"], cursor["number"], cursor["time_ns"] = pos, number, start + pos
        splits.append(Split(0, cursor.tobytes(), end, last - number, last, INTERFACES))
    info = CaptureInfo(
        0, file.path, "pcap", "none", ("ethernet",), start, start + FILE_NS,
        file.size // PACKET_BYTES, file.size,
    )  # fmt: skip
    rows = np.zeros(min(FRAGMENTS, fragment_max), FRAGMENT)
    rows["packet"] = 1 + np.arange(len(rows)) * (file.size // PACKET_BYTES // FRAGMENTS)
    left = FRAGMENTS - len(rows)
    return WalkedCapture(file, info, file.size, tuple(splits), start, rows, left)


def _fragments(wanted: tuple[int, InputFile, int], folder: str) -> tuple[int, InputFile, Any]:
    number, file, count = wanted
    return number, file, _walk(file, GB, count).fragments


def _joined(found: list[tuple[int, InputFile, Any]], folder: str, passed_over: int) -> Joined:
    """A segment for each two fragments, and a pair of endpoints for each 100 segments."""
    segments = np.zeros(sum(len(table) for *_, table in found) // 2, SEGMENT)
    segments["source"] = np.concatenate([np.full(len(rows), at) for at, _, rows in found])[1::2]
    segments["packet"] = np.concatenate([rows["packet"] for *_, rows in found])[1::2]
    segments["endpoints"] = np.arange(len(segments)) // 100
    pairs = np.zeros(len(segments) // 100 + 1, ENDPOINTS)
    completed = np.column_stack([segments["source"], segments["packet"]])
    return Joined(SegmentBatch(pairs, segments), completed, np.zeros(0, LOST), passed_over)


if __name__ == "__main__":
    main()
