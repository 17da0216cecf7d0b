"""How a run grows with its input: plans of made inputs, by the product's own code.

No capture of these sizes exists here. `make_plan` gets a list of inputs and a runner that answers
with the splits of such files, as walks over them would. Everything after that is a real plan. Each
size has a process of its own, so that the driver's memory is its own.
"""

import base64
import multiprocessing
import pickle
import resource
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kdissect.capture.inputs import InputFile
from kdissect.capture.packet_reader import CURSOR
from kdissect.capture.splits import CaptureInfo, Split, WalkedCapture
from kdissect.pipeline.learn import Cluster
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import RunPlan, TaskPlan, make_plan
from kdissect.pipeline.set_folder import SetFolder
from kdissect.pipeline.task_table import share_in

GB = 1 << 30
INPUTS = {"10 GB": (10, 1), "1 TB": (1024, 1), "100 TB": (102_400, 4)}  # GB, GB of each file
PACKET_BYTES = 1000
TOPICS = 100_000
START_NS, FILE_NS = 1_700_000_000_000_000_000, 60_000_000_000
INTERFACES = bytes(40)  # a row, as each split of a pcap has


def main() -> None:
    """Command: python -m bench.scale; prints a table in Markdown, and the bytes of names."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for name, size in INPUTS.items():
        with context.Pool(1) as pool:
            rows.append({"input": name, **pool.apply(planned, size)})
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" + "---:|" * (len(rows[0]) - 1))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
    print(f"\nnames of {TOPICS:,} topics in a decode task: {names_bytes(TOPICS) / 1e6:.1f} MB")


def planned(total_gb: int, file_gb: int) -> dict[str, int | str]:
    """Figures of the plan for so many GB in files of `file_gb`."""
    began = time.perf_counter()
    plan = planned_run(total_gb, file_gb)
    items = [row.data for row in plan.scan_rows()]
    took = time.perf_counter() - began
    return {
        "files": len(plan.files),
        "splits": len(plan.splits),
        "tasks": plan.task_count,
        "buckets": plan.bucket_count,
        "slots": plan.slot_count,
        "keys of events": plan.event_key_count,
        "plan in a task, MB": f"{len(pickle.dumps(shared(plan))) / 1e6:.2f}",
        "units of a scan task, kB": f"{max(map(len, items)) / 1e3:.1f}",
        "driver, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "seconds": f"{took:.1f}",
    }


def shared(plan: RunPlan) -> TaskPlan:
    """The plan as each task gets it; what is large is in files, which go."""
    with tempfile.TemporaryDirectory() as out:
        return plan.for_tasks(share_in(SetFolder(out), "run", plan.folder))


def names_bytes(count: int) -> int:
    """Pickled bytes of the names of so many topics, as each decode task gets them."""
    cluster = Cluster()
    for number in range(count):
        topic_id = base64.urlsafe_b64encode(uuid.UUID(int=number).bytes).decode().rstrip("=")
        cluster.topics.add(f"payments.orders-{number}", topic_id, START_NS, "Metadata")
    return len(pickle.dumps(cluster.known_names()))


def planned_run(total_gb: int, file_gb: int) -> RunPlan:
    """The plan for so many GB in files of `file_gb`."""
    paths = [f"/mnt/captures/2026-11-26/{number:06}.pcap" for number in range(total_gb // file_gb)]
    inputs = [InputFile(path, "pcap", size=file_gb * GB, data_path=path) for path in paths]
    return make_plan(inputs, Options(), "/tmp", _walks)


def _walks(walk: Callable[[Any], Any], groups: Sequence[Any]) -> list[list[WalkedCapture]]:
    """The results of `plan._walked` for each group of inputs, as a `Runner` returns them."""
    assert isinstance(walk, partial)
    made = partial(_walked, split_bytes=walk.keywords["split_bytes"])
    return [list(map(made, group)) for group in groups]


def _walked(file: InputFile, split_bytes: int) -> WalkedCapture:
    start = START_NS + int(file.path[-11:-5]) * FILE_NS
    splits = []
    for pos in range(0, file.size, split_bytes):
        end = min(pos + split_bytes, file.size)
        number = pos // PACKET_BYTES
        cursor = np.zeros(1, CURSOR)
        cursor["pos"], cursor["number"], cursor["time_ns"] = pos, number, start + pos
        count = split_bytes // PACKET_BYTES
        splits.append(Split(0, cursor.tobytes(), end, count, number + count, INTERFACES))
    info = CaptureInfo(
        0, file.path, "pcap", "none", ("ethernet",), start, start + FILE_NS,
        file.size // PACKET_BYTES, file.size,
    )  # fmt: skip
    return WalkedCapture(file, info, file.size, tuple(splits), start)


if __name__ == "__main__":
    main()
