"""The plan of a run, which every task receives: its inputs, and how work is cut into tasks.

Theory of operation
-------------------
Work has units of bounded bytes, so that memory does not depend on the input: a *split* is a range
of one capture, a *bucket* holds whole connections, a *slot* is a range of the concatenated
captures, a *key of events* holds whole groups and producers. A task takes consecutive units, one at
a time. The number of tasks follows from the bytes of the captures and the option `split_bytes`
alone (`task_count`), never from the cores that a session happens to have.

The caller's process lists the inputs. Everything that reads them is a call for some inputs, or for
all together, which a `Runner` makes: on Spark in tasks.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from kdissect.arrays import Ids, Ints, Rows
from kdissect.capture.copies import local_path, spooled
from kdissect.capture.inputs import InputFile
from kdissect.capture.ip_fragments import Joined, join
from kdissect.capture.mapped_files import Sources
from kdissect.capture.object_store import is_remote
from kdissect.capture.splits import CaptureInfo, Split, WalkedCapture, walk_capture
from kdissect.capture.windows import TLS_KEY_LOG
from kdissect.errors import CaptureError, OutputError
from kdissect.pipeline.options import MB, Options
from kdissect.pipeline.step_rows import RowKind, StepRow
from kdissect.pipeline.task_table import Share, TaskTable
from kdissect.step_log import logged_step
from kdissect.tls.key_log import holds_secrets, is_blank

SPLIT_BYTES_MIN, SPLIT_BYTES_MAX = 4 * MB, 256 * MB
SPLITS_PER_TASK = 4  # tasks have equal bytes to within a split
BUCKET_BYTES_MAX = 32 * MB  # average bytes of captures per bucket
SLOT_BYTES_MAX = 64 * MB
EVENT_KEY_BYTES = 64 * MB  # bytes of captures per key of events
TASK_BYTES = 64 * MB
WALKED_HERE_MAX = 256 * MB  # plain files of so many bytes are walked in less time than a job takes
FILE_COST = MB  # bytes that can be walked in the time that opening a file takes
HASHED_PER_SCANNED = 4  # bytes that can be hashed in the time that scanning a byte takes

# A split, the number in `RunPlan.files` of an input to hash, or a file of saved connections.
ScanUnit = Split | int | str

Item = TypeVar("Item")
Result = TypeVar("Result")


class Runner(Protocol):
    """Calls a function for each item, in a task of its own; returns the results in the order of
    items."""

    def __call__(self, call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]: ...


def task_count(byte_count: int, split_bytes: int | None = None) -> int:
    """Number of tasks of each step for `byte_count` bytes of captures.

    Below 64 MB there is one, because a second one costs more time than it saves. Then there are two
    for each 128 MB, and two for the rest. A shuffle has a block for each pair of tasks:
    from 8 GB on, the number of tasks grows with the square root of the bytes, so that the blocks
    stay in proportion to the bytes. split_bytes: bytes per task, in place of these.
    """
    if split_bytes is not None:
        return max(1, -(-byte_count // split_bytes))
    if byte_count < TASK_BYTES:
        return 1
    return min(2 * -(-byte_count // (2 * TASK_BYTES)), math.isqrt(byte_count * 2 // MB))


@dataclass(frozen=True, slots=True)
class Before:
    """The set that a run continues.

    known: what `append.state_to_save` wrote. open_files, event_files: absolute paths of open
    connections and of events. capture_count, byte_count: of its captures, which the plan does not
    read.
    """

    known: dict[str, Any]
    open_files: tuple[str, ...]
    event_files: tuple[str, ...]
    capture_count: int
    byte_count: int


class InputTable(Sequence[InputFile]):
    """The inputs in a table with their fields as columns."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> InputFile:  # type: ignore[override]
        return InputFile(**{name: self._table[name][number].as_py() for name in _FIELDS})


_FIELDS = [field.name for field in fields(InputFile)]


@dataclass(frozen=True)
class RunPlan:
    """All that a task needs to know; made once per run, picklable.

    files: the inputs; files[source] are those that are captures, in the order of `source` numbers.
    sizes: plain bytes of each capture. secrets: (source, pos, length) of key logs inside captures.
    folder: of copies (`capture.copies`). keeps: the run saves state for a later append. before: the
    set that the run adds to. Its captures have the first `source` numbers; they are not read, and
    `captures` is without them. capture_ids: of these, then of `captures`. end_ns: time of the
    latest packet so far, in ns since 1970; 0 without packets. has_fragments: the captures have IP
    fragments. key_log_hashes: sha256 of each key log file, as it was when the run was planned.
    """

    files: Sequence[InputFile]
    sizes: Ints
    captures: tuple[CaptureInfo, ...]
    capture_ids: Ids
    secrets: pa.Table
    end_ns: int
    splits: tuple[Split, ...]
    has_fragments: bool
    folder: str
    options: Options
    key_log_hashes: list[str]
    keeps: bool = False
    before: Before | None = None

    @property
    def earlier_count(self) -> int:
        """Number of captures of earlier runs; their `source` numbers come first."""
        return self.before.capture_count if self.before else 0

    @cached_property
    def source_start(self) -> Ints:
        """int64[captures]: position of each one's first byte in the bytes of all captures."""
        return np.cumsum(self.sizes) - self.sizes

    @cached_property
    def byte_count(self) -> int:
        """Plain bytes of the captures that this run reads."""
        return int(self.sizes.sum())

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

    def scan_rows(self) -> list[StepRow]:
        """A row for each scan task, with consecutive units of about equal bytes: numbers of inputs
        to hash, then splits, then files of saved connections.

        A file is hashed as a whole, so that a large one takes longest, and has to begin first.
        """
        saved_files = self.before.open_files if self.before else ()
        numbers = range(self.earlier_count, len(self.files))
        units: list[tuple[int, ScanUnit]] = list(enumerate([*numbers, *self.splits, *saved_files]))
        hashed = (file.size // HASHED_PER_SCANNED for file in self.files[self.earlier_count :])
        ends = np.cumsum([0, *hashed, *(split.end - split.pos for split in self.splits)])
        bounds = np.unique(np.searchsorted(ends, np.linspace(0, ends[-1], self.task_count + 1)))
        count = len(ends) - 1
        saved = range(count, len(units))  # a task for each file
        starts = [*bounds[bounds < count].tolist(), *saved, len(units)]
        return [
            StepRow(task, RowKind.UNITS, task, pickle.dumps(units[start:stop]))
            for task, (start, stop) in enumerate(pairwise(starts))
        ]

    def for_tasks(self, share: Share) -> TaskPlan:
        """The plan without what only the driver reads, and its tables, for `of_task`. A scan task
        gets its splits from `scan_rows`."""
        columns = {name: [getattr(file, name) for file in self.files] for name in _FIELDS}
        sizes = np.append(self.sizes, np.zeros(len(self.files) - len(self.sizes), np.int64))
        inputs = pa.table({**columns, "bytes": sizes, "id": self.capture_ids})
        plan = replace(
            self,
            files=(),
            sizes=sizes[:0].copy(),
            captures=(),
            capture_ids=self.capture_ids[:0].copy(),
            secrets=self.secrets.schema.empty_table(),
            splits=(),
            before=self.before and replace(self.before, known={}, open_files=(), event_files=()),
        )
        return plan, share("inputs", inputs), share("secrets", self.secrets)

    @staticmethod
    def of_task(shared: TaskPlan) -> RunPlan:
        """The plan, in a task. The size of what is no capture is 0."""
        plan, inputs, secrets = shared[0], shared[1].read(), shared[2].read()
        sizes, ids = (inputs[name].to_numpy() for name in ("bytes", "id"))
        files = InputTable(inputs)
        return replace(plan, files=files, sizes=sizes, capture_ids=ids, secrets=secrets)

    @property
    def event_key_count(self) -> int:
        """Number of keys over which events of groups and producers are spread."""
        byte_count = self.byte_count + (self.before.byte_count if self.before else 0)
        return max(1, -(-byte_count // EVENT_KEY_BYTES))

    def sources(self) -> Sources:
        return Sources(self.files, self.folder)

    @cached_property
    def key_logs(self) -> list[memoryview]:
        """The text of each key log file and of each secrets block inside a capture."""
        texts, sources = read_key_logs(self.options.keylog), self.sources()
        for source, pos, length in zip(*self.secrets.to_pydict().values(), strict=True):
            texts.append(sources.data(source)[pos : pos + length].copy().data)
        return texts


# A plan without its tables of inputs and of secrets, and these.
TaskPlan = tuple[RunPlan, TaskTable, TaskTable]


# -- making a plan ---------------------------------------------------------------------------


@contextmanager
def planned(
    inputs: list[InputFile],
    options: Options,
    spool_dir: str | None = None,
    in_tasks: Runner | None = None,
) -> Iterator[RunPlan]:
    """The plan of a run over these inputs; copies of captures are deleted when the context ends.

    in_tasks: walks over the captures if they are large, or have to be copied first; without it this
    process does. Raises CaptureError if none of the inputs is a capture, OutputError if `spool_dir`
    is no folder.
    """
    if spool_dir is not None and not os.path.isdir(spool_dir):
        raise OutputError(f"{spool_dir}: is no folder; unpacked copies need one that exists")
    with tempfile.TemporaryDirectory(prefix="kdissect-spool-", dir=spool_dir) as folder:
        with logged_step("plan", captures=len(inputs)):
            plan = make_plan(inputs, options, folder, in_tasks)
        yield plan


def make_plan(
    inputs: list[InputFile], options: Options, folder: str, in_tasks: Runner | None = None
) -> RunPlan:
    """Cut the inputs into splits. folder: for copies. in_tasks: as for `planned`.

    Raises CaptureError if none of the inputs is a capture.
    """
    key_logs = read_key_logs(options.keylog)
    # this process has the standard input
    inputs = [spooled(item, folder) if item.format == "stream" else item for item in inputs]
    captures = [item for item in inputs if item.is_capture]
    listed = sum(item.size for item in captures)
    split_bytes = options.split_bytes
    if split_bytes is None:
        split_bytes = -(-listed // (task_count(listed) * SPLITS_PER_TASK))
        split_bytes = min(max(split_bytes, SPLIT_BYTES_MIN), SPLIT_BYTES_MAX)
    fragment_max = options.limits.fragments
    walk_all = partial(
        _walked,
        folder=folder,
        split_bytes=split_bytes,
        fragment_max=-(-fragment_max // max(len(captures), 1)),
    )
    is_quick = listed <= WALKED_HERE_MAX and all(item.data_path for item in captures)
    if in_tasks is None or is_quick:
        in_tasks = _here
    found = [walk for some in in_tasks(walk_all, list(_groups(inputs))) for walk in some]
    walks = sorted(found, key=_order)
    read = [walk for walk in walks if walk.info.source >= 0]
    if not read:
        raise CaptureError(f"{found[0].file.path}: {found[0].file.error}")
    splits = [
        replace(split, source=source) for source, walk in enumerate(read) for split in walk.splits
    ]
    has_fragments = any(walk.passed_over or len(walk.fragments) for walk in read)
    if has_fragments:
        joined = _joined_fragments(read, fragment_max, folder, in_tasks)
        ends = np.array([(split.source, split.last_number) for split in splits], np.int64)
        for number, part in joined.by_split(*ends.T).items():
            splits[number] = replace(splits[number], fragments=part)
    return RunPlan(
        files=tuple(walk.file for walk in walks),
        sizes=np.array([walk.size for walk in read], np.int64),
        captures=tuple(
            replace(walk.info, source=number if number < len(read) else -1)
            for number, walk in enumerate(walks)
        ),
        capture_ids=np.array([capture_id(walk.file.path) for walk in walks], np.int64),
        secrets=_secrets(read),
        end_ns=max((walk.info.last_time_ns or 0 for walk in read), default=0),
        splits=tuple(splits),
        has_fragments=has_fragments,
        folder=folder,
        options=options,
        key_log_hashes=sorted(hashlib.sha256(text).hexdigest() for text in key_logs),
    )


def _secrets(walks: Sequence[WalkedCapture]) -> pa.Table:
    """The places of the key logs inside the captures."""
    places = [
        (source, pos, length)
        for source, walk in enumerate(walks)
        for kind, pos, length in walk.info.secrets
        if kind == TLS_KEY_LOG
    ]
    columns = np.array(places, np.int64).reshape(-1, 3).T
    return pa.table(dict(zip(("source", "pos", "length"), columns, strict=True)))


def _order(walk: WalkedCapture) -> tuple[bool | int | str, ...]:
    """Captures by the time of their first packet, then by path, so that the order of the arguments
    does not matter; those without packets come after them, and inputs that are no captures last."""
    if walk.info.source < 0:
        return (True,)
    return False, walk.start_time_ns is None, walk.start_time_ns or 0, walk.file.path


# A capture with its number in the run, and the number of its fragments to find or the fragments.
FragmentsWanted = tuple[int, InputFile, int]
FragmentsFound = tuple[int, InputFile, Rows]


def _joined_fragments(
    walks: Sequence[WalkedCapture], room: int, folder: str, in_tasks: Runner
) -> Joined:
    """Join the first `room` IP fragments of all captures together.

    Each walk returned its share of them at most, so that this process never holds more than twice
    as many. A capture that may have more is walked again.
    """
    found: list[FragmentsFound] = []
    wanted: list[FragmentsWanted] = []
    passed_over = 0
    for number, walk in enumerate(walks):
        has = len(walk.fragments) + walk.passed_over
        count = min(has, room)
        room -= count
        passed_over += has - count
        if count > len(walk.fragments):
            wanted.append((number, walk.file, count))
        elif has:
            found.append((number, walk.file, walk.fragments[:count]))
    found += in_tasks(partial(_fragments, folder=folder), wanted) if wanted else []
    found.sort(key=lambda one: one[0])
    (joined,) = in_tasks(partial(_joined, folder=folder, passed_over=passed_over), [found])
    return joined


def _fragments(wanted: FragmentsWanted, folder: str) -> FragmentsFound:
    """The first fragments of a capture."""
    number, file, count = wanted
    return number, file, walk_capture(file, folder, 2**62, count).fragments


def _joined(found: list[FragmentsFound], folder: str, passed_over: int) -> Joined:
    numbers, files, tables = zip(*found, strict=True)
    joined = join(tables, Sources(files, folder), passed_over)
    source_of = np.array(numbers)
    for table in (joined.batch.segments, joined.lost):
        table["source"] = source_of[table["source"]]
    joined.completed[:, 0] = source_of[joined.completed[:, 0]]
    return joined


def _here(call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The `Runner` of this process."""
    return [call(item) for item in items]


def _groups(inputs: Sequence[InputFile]) -> Iterator[list[InputFile]]:
    """Yield consecutive inputs that one task walks over: many small ones, or one large one."""
    group: list[InputFile] = []
    cost = 0
    for item in inputs:
        if group and cost + item.size > SPLIT_BYTES_MAX:
            yield group
            group, cost = [], 0
        group.append(item)
        cost += item.size + FILE_COST
    if group:
        yield group


def _walked(
    inputs: list[InputFile], folder: str, split_bytes: int, fragment_max: int
) -> list[WalkedCapture]:
    return [walk_capture(item, folder, split_bytes, fragment_max) for item in inputs]


def read_key_logs(paths: Sequence[str]) -> list[memoryview]:
    """The text of each key log. Raises CaptureError if one cannot be read or has no line of a key
    log."""
    files = Sources(paths)
    texts = [files.data(number).data for number in range(len(paths))]
    for path, text in zip(paths, texts, strict=True):
        if not holds_secrets(text) and not is_blank(text):
            raise CaptureError(f"{path}: no line of it is one of a TLS key log (SSLKEYLOGFILE)")
    return texts


def capture_id(path: str) -> int:
    """Positive id of an input file: a hash of its path as the user named it or as it was found."""
    digest = hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 1) or 1


def hashed(path: str, size: int) -> str:
    """The sha256 of a file's first `size` bytes. Raises OSError."""
    digest = hashlib.sha256()
    piece = memoryview(bytearray(MB))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece[:size]):
            digest.update(piece[:count])
            size -= count
    return digest.hexdigest()


def hashed_input(file: InputFile, folder: str) -> str | None:
    """The sha256 of an input: the file that the user named, or the copy of a stream or an object.

    None if it cannot be read, and for an object that is compressed, of which no bytes are kept.
    folder: of copies. Raises EnvironmentFailed if the store fails.
    """
    path = file.path if os.path.isfile(file.path) else file.data_path
    if is_remote(file.path):
        if not file.is_capture or file.compression != "none":
            return None
        path = local_path(file, folder)
    try:
        return hashed(path, file.size)
    except OSError:
        return None


def manifest_inputs(plan: RunPlan, hashes: dict[int, str]) -> list[dict[str, Any]]:
    """`inputs` of the manifest: path, size, sha256 of each file, and whether it is a capture.

    size: before the run read the file, so that an append sees whether it grew since then. hashes:
    sha256 of so many bytes by number in `plan.files`, from the scan. For a stream both are those of
    its spooled copy. An object also has the store's `etag`, a local file its `real_path`.
    """
    listed = []
    files = plan.files[plan.earlier_count :]
    for number, (info, file) in enumerate(
        zip(plan.captures, files, strict=True), plan.earlier_count
    ):
        place = {"real_path": os.path.realpath(file.path)}
        if is_remote(file.path):
            place = {"etag": file.tag}
        item = {"path": info.path, "size": file.size, "sha256": hashes.get(number)}
        listed.append({**item, **place, "is_capture": info.source >= 0})
    return listed
