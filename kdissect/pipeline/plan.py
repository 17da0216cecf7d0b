"""Plan a run: find the inputs, spool them if needed, and cut them into splits."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from kdissect.background import Background
from kdissect.capture import object_splits, object_store
from kdissect.capture.inputs import InputFile, find_captures, spool
from kdissect.capture.mapped_files import Sources
from kdissect.capture.object_bytes import changed, version_of
from kdissect.capture.splits import plan_splits
from kdissect.errors import CaptureError
from kdissect.pipeline.options import MB, Options
from kdissect.pipeline.run_plan import RunPlan, sized, tasks
from kdissect.step_log import logged_step
from kdissect.tls.key_log import holds_secrets, is_blank

_log = logging.getLogger(__name__)

SPLIT_BYTES_MAX = 128 * MB
SPLIT_BYTES_MIN = 4 * MB
HASHED_BYTES = 256 << 10  # read at a time into one buffer that stays in the cache


class Hashed(NamedTuple):
    """Size and sha256 of a file; state: its (size, time of change) before hashing."""

    size: int
    sha256: str
    state: tuple[int, int]


@contextmanager
def planned(
    paths: Sequence[str | os.PathLike[str]],
    options: Options,
    parallelism: int,
    spool_dir: str | None = None,
    walk_pieces: object_splits.Runner | None = None,
) -> Iterator[RunPlan]:
    """The plan of a run over `paths`; spooled copies are deleted when the context ends.

    walk_pieces: runs walks over pieces of objects in stores; such objects are then read in place.
    Without it they are copied to disk first.
    Raises CaptureError if a named file is missing or no capture, or no file can be used.
    """
    with logged_step(_log, "find captures") as counts:
        inputs = find_captures([os.fspath(path) for path in paths])
        counts["captures"] = len(inputs)
    with planned_inputs(inputs, options, parallelism, spool_dir, walk_pieces) as plan:
        yield plan


@contextmanager
def planned_inputs(
    inputs: list[InputFile],
    options: Options,
    parallelism: int,
    spool_dir: str | None = None,
    walk_pieces: object_splits.Runner | None = None,
) -> Iterator[RunPlan]:
    """Like `planned`, for inputs that were found already."""
    with tempfile.TemporaryDirectory(prefix="kdissect-spool-", dir=spool_dir) as folder:
        with logged_step(_log, "plan", captures=len(inputs)):
            plan = make_plan(inputs, options, parallelism, folder, walk_pieces)
        yield plan


def make_plan(
    inputs: list[InputFile],
    options: Options,
    parallelism: int,
    spool_dir: str,
    walk_pieces: object_splits.Runner | None = None,
) -> RunPlan:
    """Cut the inputs into splits; inputs that cannot be read at a position are spooled first.

    walk_pieces: as for `planned`. Raises CaptureError if none of the inputs is a capture.
    """
    check_key_logs(options.keylog)
    files = [
        replace(item, data_path=item.path)
        if walk_pieces is not None and item.is_ranged
        else spool(item, spool_dir)
        for item in inputs
    ]
    far_files = [item for item in files if item.is_ranged and item.data_path == item.path]
    if not any(item.is_capture for item in files):
        raise CaptureError(f"{inputs[0].path}: {inputs[0].error}")
    byte_count = sum(
        item.size if item in far_files else os.path.getsize(item.data_path)
        for item in files
        if item.is_capture
    )
    split_bytes = options.split_bytes
    if split_bytes is None:
        split_bytes = -(-byte_count // max(1, tasks(byte_count, parallelism)))
        split_bytes = min(max(split_bytes, SPLIT_BYTES_MIN), SPLIT_BYTES_MAX)
    walks: dict[str, object_splits.FarWalk] = {}
    if far_files and walk_pieces is not None:
        piece_bytes = options.split_bytes or min(split_bytes, object_splits.PIECE_BYTES_MAX)
        walks = object_splits.walk_all(
            far_files, piece_bytes, options.limits.fragments, walk_pieces
        )
    split_plan = plan_splits(files, split_bytes, options.limits.fragments, walks)
    sources = split_plan.sources
    bucket_count, slot_bytes = sized(byte_count, parallelism)
    return RunPlan(
        paths=tuple(sources.paths),
        sizes=tuple(int(size) for size in sources.sizes),
        captures=tuple(split_plan.captures),
        capture_ids=tuple(capture_id(info.path) for info in split_plan.captures),
        splits=tuple(split_plan.splits),
        fragments=split_plan.fragments,
        bucket_count=bucket_count,
        slot_bytes=slot_bytes,
        options=options,
        versions=tuple(sources.versions),
    )


def check_key_logs(paths: Sequence[str]) -> None:
    """Raise CaptureError if a key log cannot be read or has no line of a key log."""
    files = Sources(list(paths))
    for number, path in enumerate(paths):
        text = files.data(number).data
        if not holds_secrets(text) and not is_blank(text):
            raise CaptureError(f"{path}: no line of it is one of a TLS key log (SSLKEYLOGFILE)")


def capture_id(path: str) -> int:
    """Positive id of an input file: a hash of its path as the user named it or as it was found."""
    digest = hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 1) or 1


def hash_ahead(inputs: Sequence[InputFile]) -> None:
    """Start to hash these files in the background; `manifest_inputs` uses the result.

    Starting Spark takes seconds and leaves a core idle meanwhile.
    """
    paths = [item.path for item in inputs]
    _ahead[:] = [Background(lambda: {path: hashed(path) for path in paths if _is_file(path)})]


_ahead: list[Background[dict[str, Hashed]]] = []  # at most one, until `manifest_inputs` takes it


def _is_file(path: str) -> bool:
    """Return whether the path is a readable regular file. Errors are reported when the file is
    read."""
    return os.path.isfile(path) and os.access(path, os.R_OK)


def hashed(path: str) -> Hashed:
    """Hash a file; returns its size, digest and state."""
    state = _state(path)
    digest = hashlib.sha256()
    size = 0
    block = memoryview(bytearray(HASHED_BYTES))
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            digest.update(block[:count])
            size += count
    return Hashed(size, digest.hexdigest(), state)


def _state(path: str) -> tuple[int, int]:
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns


def check_unchanged(plan: RunPlan) -> None:
    """Raise EnvironmentFailed if an object in a store was replaced during the run.

    Requests by range do not say which version of an object they want.
    """
    for path, before in zip(plan.paths, plan.versions, strict=True):
        if before is not None:
            with object_store.opened(path) as file:
                now = version_of(file)
            if now != before:
                raise changed(path, before, now)


def manifest_inputs(plan: RunPlan) -> list[dict[str, Any]]:
    """`inputs` of the manifest: path, size, sha256 of each file, and whether it is a capture.

    For a stream, size and sha256 are those of its spooled copy. For an object read in place,
    `sha256` is null and `etag` is the store's, because no task reads all its bytes in order. A hash
    computed ahead is used if the file's size and time of change are the same.
    """
    ahead = _ahead.pop().result() if _ahead else {}
    listed = []
    for info in plan.captures:
        item: dict[str, Any] = {"path": info.path}
        version = plan.versions[info.source] if info.source >= 0 else None
        if info.source < 0 and object_store.is_remote(info.path):
            with object_store.opened(info.path) as file:
                version = version_of(file)
        if version is not None:
            item |= {"size": version.size, "sha256": None, "etag": version.tag}
        else:
            path = info.path if os.path.isfile(info.path) else plan.paths[info.source]
            digest = ahead.get(path)
            if digest is None or digest.state != _state(path):
                digest = hashed(path)
            item |= {"size": digest.size, "sha256": digest.sha256}
        listed.append({**item, "is_capture": info.source >= 0})
    return listed
