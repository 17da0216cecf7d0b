"""The plan of a run, which every task receives, and how work is cut into tasks.

Theory of operation
-------------------
Work has units of bounded bytes, so that memory does not depend on the input: a *split* is a range
of one capture, a *bucket* holds whole connections, a *slot* is a range of the concatenated
captures, a *key of events* holds whole groups and producers. A task takes consecutive units, one at
a time. The number of tasks follows from the bytes of the captures and the option `split_bytes`
alone (`task_count`), never from the cores that a session happens to have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.inputs import InputFile
from kdissect.capture.ip_fragments import Joined
from kdissect.capture.mapped_files import Sources
from kdissect.capture.splits import CaptureInfo, Split
from kdissect.pipeline.options import MB, Options

BUCKET_BYTES_MAX = 16 * MB  # average bytes of captures per bucket
SLOT_BYTES_MAX = 64 * MB
EVENT_KEY_BYTES = 64 * MB  # bytes of captures per key of events
TASK_BYTES_SMALL, TASK_BYTES = 8 * MB, 32 * MB
HASHED_PER_SCANNED = 4  # bytes that can be hashed in the time that scanning a byte takes
_TLS_KEY_LOG = 0x544C534B  # type of a pcapng's decryption secrets


def task_count(byte_count: int, split_bytes: int | None = None) -> int:
    """Number of tasks of each step for `byte_count` bytes of captures.

    A task costs Spark and its worker some 30 ms. So a small input has up to four tasks, of 8 MB or
    more, and a larger one a task per 32 MB. A shuffle has a block for each pair of tasks: from 2 GB
    on, the number of tasks grows with the square root of the bytes, so that the blocks stay in
    proportion to the bytes. split_bytes: bytes per task, in place of these.
    """
    if split_bytes is not None:
        return max(1, -(-byte_count // split_bytes))
    few = min(byte_count // TASK_BYTES_SMALL, 4)
    many = min(2 * (byte_count // (2 * TASK_BYTES)), math.isqrt(byte_count * 2 // MB))
    return max(1, few, many)


@dataclass(frozen=True, slots=True)
class Before:
    """The set that a run continues.

    known: what `append.state_to_save` wrote. open_files, event_files, connection_files: absolute
    paths of open connections, of events, and of the rows of open connections. byte_count: bytes of
    its captures, which the plan does not read.
    """

    known: dict[str, Any]
    open_files: tuple[str, ...]
    event_files: tuple[str, ...]
    connection_files: tuple[str, ...]
    byte_count: int


@dataclass(frozen=True)
class RunPlan:
    """All that a task needs to know; made once per run, picklable.

    files: the inputs; files[source] are those that are captures, in the order of `source` numbers.
    sizes: plain bytes of each capture. folder: of copies (`capture.copies`). keeps: the run saves
    state for a later append. before: the set that the run adds to. Its captures have the first
    `source` numbers; they are not read, and `captures` is without them. capture_ids: of these, then
    of `captures`.
    """

    files: tuple[str | InputFile, ...]
    sizes: tuple[int, ...]
    captures: tuple[CaptureInfo, ...]
    capture_ids: tuple[int, ...]
    splits: tuple[Split, ...]
    fragments: Joined | None
    folder: str
    options: Options
    keeps: bool = False
    before: Before | None = None

    @property
    def earlier_count(self) -> int:
        """Number of captures of earlier runs; their `source` numbers come first."""
        return len(self.before.known["capture_ids"]) if self.before else 0

    @cached_property
    def source_start(self) -> npt.NDArray[np.int64]:
        """int64[captures]: position of each one's first byte in the bytes of all captures."""
        sizes = np.array(self.sizes, np.int64)
        return np.cumsum(sizes) - sizes

    @cached_property
    def byte_count(self) -> int:
        """Plain bytes of the captures that this run reads."""
        return sum(self.sizes)

    @cached_property
    def task_count(self) -> int:
        """Number of tasks of each step."""
        return task_count(self.byte_count, self.options.split_bytes)

    @cached_property
    def bucket_count(self) -> int:
        """Number of buckets; a limit counts the connections of a bucket, so `split_bytes` does not
        change it."""
        tasks = task_count(self.byte_count)
        return tasks * max(1, -(-self.byte_count // (tasks * BUCKET_BYTES_MAX)))

    @cached_property
    def slot_count(self) -> int:
        per_task = max(1, -(-self.byte_count // (self.task_count * SLOT_BYTES_MAX)))
        return self.task_count * per_task

    @property
    def slot_bytes(self) -> int:
        return max(1, -(-self.byte_count // self.slot_count))

    @property
    def unit_count(self) -> int:
        """Number of units of the scan: splits, then inputs to hash, then files of saved
        connections."""
        saved = len(self.before.open_files) if self.before else 0
        return len(self.splits) + len(self.files) + saved

    @cached_property
    def scan_bounds(self) -> list[int]:
        """First unit of each scan task, and the end: consecutive units of about equal bytes."""
        hashed = (0 if isinstance(file, str) else file.size // HASHED_PER_SCANNED
                  for file in self.files)  # fmt: skip
        ends = np.cumsum([0, *(split.end - split.pos for split in self.splits), *hashed])
        bounds = np.unique(np.searchsorted(ends, np.linspace(0, ends[-1], self.task_count + 1)))
        count = len(ends) - 1
        saved = range(count, self.unit_count)  # a task for each file
        return [*bounds[bounds < count].tolist(), *saved, self.unit_count]

    @property
    def end_ns(self) -> int:
        """Time of the latest packet so far, in ns since 1970; 0 without packets."""
        times = [info.last_time_ns for info in self.captures if info.last_time_ns is not None]
        return max([self.before.known["end_ns"] if self.before else 0, *times])

    @property
    def event_key_count(self) -> int:
        """Number of keys over which events of groups and producers are spread."""
        byte_count = self.byte_count + (self.before.byte_count if self.before else 0)
        return max(1, -(-byte_count // EVENT_KEY_BYTES))

    def sources(self) -> Sources:
        return Sources(self.files, self.folder)

    def key_logs(self, sources: Sources) -> list[memoryview]:
        """The text of each key log file and of each secrets block inside a capture."""
        files = Sources(self.options.keylog)
        texts = [files.data(number) for number in range(len(files))]
        for info in self.captures:
            for kind, pos, length in info.secrets:
                if kind == _TLS_KEY_LOG and info.source >= 0:
                    texts.append(sources.data(info.source)[pos : pos + length].copy())
        return [text.data for text in texts]
