"""What every task of a run needs to know, and how its work is cut into tasks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kdissect.capture.ip_fragments import Joined
from kdissect.capture.mapped_files import Sources
from kdissect.capture.object_bytes import Version
from kdissect.capture.splits import CaptureInfo, Split
from kdissect.pipeline.options import MB, Options

BUCKET_BYTES = 32 * MB  # of capture per bucket, on average
SLOT_BYTES_MAX = 64 * MB
SLOT_BYTES_MIN = 8 * MB
_TLS_KEY_LOG = 0x544C534B  # type of a pcapng's decryption secrets
EVENT_KEY_BYTES = 64 * MB  # of capture per key of events; a small input has one
TASK_BYTES = 32 * MB  # of capture for each of two tasks a core that scan or assemble; else one


@dataclass(frozen=True, slots=True)
class Before:
    """The set that a run goes on from.

    captures: how many of the plan's are of it; the plan does not read them. open_files,
    event_files: absolute paths. stats: JSON of what was counted of its captures, as assemble and
    scan count. facts: packed `Facts`. names_used: JSON of `NamesUsed`. end_ns: of its latest
    packet. byte_count: of its captures.
    """

    captures: int
    open_files: tuple[str, ...]
    event_files: tuple[str, ...]
    stats: bytes
    facts: bytes
    names_used: bytes
    end_ns: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything a task needs to know; made once, picklable."""

    paths: tuple[str, ...]  # what is read: the captures, or their spooled copies
    sizes: tuple[int, ...]  # of these, in bytes
    captures: tuple[CaptureInfo, ...]  # in the order of `source` numbers
    capture_ids: tuple[int, ...]
    splits: tuple[Split, ...]
    fragments: Joined | None
    bucket_count: int
    slot_bytes: int
    options: Options
    versions: tuple[Version | None, ...] = ()  # of the paths that are objects in stores
    keeps: bool = False  # saves the state for a later append
    before: Before | None = None  # the first captures are of it, and are not read

    @property
    def earlier_count(self) -> int:
        """Captures of earlier runs; they come first."""
        return self.before.captures if self.before else 0

    @property
    def source_start(self) -> list[int]:
        """Position of each source's first byte in the run's bytes."""
        return [0, *itertools.accumulate(self.sizes)][: len(self.sizes)]

    @property
    def byte_count(self) -> int:
        return sum(self.sizes)

    @property
    def slot_count(self) -> int:
        return max(1, -(-self.byte_count // self.slot_bytes))

    @property
    def open_slot(self) -> int:
        """The slot of rows that later captures may change; the last one."""
        return self.slot_count if self.keeps else -1

    @property
    def key_count(self) -> int:
        """Of slots, with that one."""
        return self.slot_count + self.keeps

    @property
    def split_count(self) -> int:
        """Of captures, and of what is kept: the scan's tasks."""
        return len(self.splits) + (len(self.before.open_files) if self.before else 0)

    @property
    def end_ns(self) -> int:
        """The latest packet's time."""
        times = [info.last_time_ns for info in self.captures if info.last_time_ns is not None]
        return max(times, default=0)

    @property
    def event_key_count(self) -> int:
        """Keys over which events of groups and producers are spread."""
        byte_count = self.byte_count + (self.before.byte_count if self.before else 0)
        return max(1, min(4096, -(-byte_count // EVENT_KEY_BYTES)))

    def sources(self) -> Sources:
        return Sources(list(self.paths), list(self.versions))

    def key_logs(self, sources: Sources) -> list[memoryview]:
        """The texts of key log files and of the secrets inside captures."""
        files = Sources(list(self.options.keylog))
        texts = [files.data(number) for number in range(len(files))]
        for info in self.captures:
            for kind, pos, length in info.secrets:
                if kind == _TLS_KEY_LOG and info.source >= 0:
                    texts.append(sources.part(info.source, pos, pos + length).copy())
        return [text.data for text in texts]


def tasks(byte_count: int, parallelism: int) -> int:
    """Tasks that scan or assemble an input of that size: two a core, which even out, if each has
    enough to do. One takes Spark and its worker 20 ms, whatever it does."""
    return parallelism * (2 if byte_count >= 2 * parallelism * TASK_BYTES else 1)


def sized(byte_count: int, parallelism: int) -> tuple[int, int]:
    """(bucket_count, slot_bytes) for an input of that size on so many cores.

    Slots are alike and a multiple of the cores, so that none waits for the others at the end. Fewer
    and larger ones would save tasks, but what is fresh in memory costs more than that.
    """
    slot_count = min(2 * parallelism, byte_count // SLOT_BYTES_MIN)
    slot_count = max(1, slot_count, -(-byte_count // SLOT_BYTES_MAX))
    if slot_count > 1:
        slot_count = -(-slot_count // parallelism) * parallelism
    slot_bytes = max(1, -(-byte_count // slot_count))
    return max(1, min(4096, -(-byte_count // BUCKET_BYTES) * 2)), slot_bytes
