"""The plan of a run, which every task receives, and how work is cut into tasks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kdissect.capture.ip_fragments import Joined
from kdissect.capture.mapped_files import Sources
from kdissect.capture.object_bytes import Version
from kdissect.capture.splits import CaptureInfo, Split
from kdissect.pipeline.options import MB, Options

BUCKET_BYTES = 32 * MB  # average bytes of captures per bucket
SLOT_BYTES_MAX = 64 * MB
SLOT_BYTES_MIN = 8 * MB
_TLS_KEY_LOG = 0x544C534B  # type of a pcapng's decryption secrets
EVENT_KEY_BYTES = 64 * MB  # bytes of captures per key of events; a small input has one key
# bytes of captures per task from which scan and assemble use two tasks per core
TASK_BYTES = 32 * MB


@dataclass(frozen=True, slots=True)
class Before:
    """The set that a run continues.

    capture_ids: of its captures, which the plan does not read.
    open_files, event_files, connection_files: absolute paths of open connections, of events, and of
    the rows of open connections. facts: packed `Cluster`. names_used: JSON of `NamesUsed`. end_ns:
    time of its latest packet. byte_count: bytes of its captures.
    """

    capture_ids: tuple[int, ...]
    open_files: tuple[str, ...]
    event_files: tuple[str, ...]
    connection_files: tuple[str, ...]
    facts: bytes
    names_used: bytes
    end_ns: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All that a task needs to know; made once per run, picklable."""

    paths: tuple[str, ...]  # files to read: the captures, or their spooled copies
    sizes: tuple[int, ...]  # of `paths`, in bytes
    captures: tuple[CaptureInfo, ...]  # in the order of `source` numbers, without earlier ones
    capture_ids: tuple[int, ...]  # of earlier captures, then of these
    splits: tuple[Split, ...]
    fragments: Joined | None
    bucket_count: int
    slot_bytes: int
    options: Options
    versions: tuple[Version | None, ...] = ()  # of the paths that are objects in stores
    keeps: bool = False  # the run saves state for a later append
    # the set that the run adds to; its captures have the first `source` numbers
    before: Before | None = None

    @property
    def earlier_count(self) -> int:
        """Number of captures of earlier runs; their `source` numbers come first."""
        return len(self.before.capture_ids) if self.before else 0

    @property
    def source_start(self) -> list[int]:
        """Position of each source's first byte in the concatenated bytes of all sources."""
        return [0, *itertools.accumulate(self.sizes)][: len(self.sizes)]

    @property
    def byte_count(self) -> int:
        return sum(self.sizes)

    @property
    def slot_count(self) -> int:
        return max(1, -(-self.byte_count // self.slot_bytes))

    @property
    def split_count(self) -> int:
        """Number of scan tasks: splits of captures, and files of saved connections."""
        return len(self.splits) + (len(self.before.open_files) if self.before else 0)

    @property
    def end_ns(self) -> int:
        """Time of the latest packet so far, in ns since 1970; 0 without packets."""
        times = [info.last_time_ns for info in self.captures if info.last_time_ns is not None]
        return max([self.before.end_ns if self.before else 0, *times])

    @property
    def event_key_count(self) -> int:
        """Number of keys over which events of groups and producers are spread."""
        byte_count = self.byte_count + (self.before.byte_count if self.before else 0)
        return max(1, min(4096, -(-byte_count // EVENT_KEY_BYTES)))

    def sources(self) -> Sources:
        return Sources(list(self.paths), list(self.versions))

    def key_logs(self, sources: Sources) -> list[memoryview]:
        """The text of each key log file and of each secrets block inside a capture."""
        files = Sources(list(self.options.keylog))
        texts = [files.data(number) for number in range(len(files))]
        for info in self.captures:
            for kind, pos, length in info.secrets:
                if kind == _TLS_KEY_LOG and info.source >= 0:
                    texts.append(sources.part(info.source, pos, pos + length).copy())
        return [text.data for text in texts]


def tasks(byte_count: int, parallelism: int) -> int:
    """Number of scan or assemble tasks for an input of `byte_count` bytes.

    Two tasks per core even out the load if each has enough to do. A task costs Spark and its worker
    20 ms.
    """
    return parallelism * (2 if byte_count >= 2 * parallelism * TASK_BYTES else 1)


def sized(byte_count: int, parallelism: int) -> tuple[int, int]:
    """(bucket_count, slot_bytes) for an input of `byte_count` bytes on so many cores.

    Slots have equal bytes and their number is a multiple of the cores, so that all cores end
    together. Fewer, larger slots would save tasks, but page faults on fresh memory would cost more.
    """
    slot_count = min(2 * parallelism, byte_count // SLOT_BYTES_MIN)
    slot_count = max(1, slot_count, -(-byte_count // SLOT_BYTES_MAX))
    if slot_count > 1:
        slot_count = -(-slot_count // parallelism) * parallelism
    slot_bytes = max(1, -(-byte_count // slot_count))
    return max(1, min(4096, -(-byte_count // BUCKET_BYTES) * 2)), slot_bytes
