"""From what the user named to a `RunPlan`: inputs found, spooled where needed, cut into splits."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kdissect.capture.inputs import InputFile, find_captures, spool
from kdissect.capture.source import Sources
from kdissect.capture.split import plan_splits
from kdissect.errors import CaptureError
from kdissect.pipeline.options import MB, Options
from kdissect.pipeline.steps import RunPlan, sized
from kdissect.stream.tls_keys import holds_secrets, is_blank

SPLIT_BYTES_MAX = 128 * MB
SPLIT_BYTES_MIN = 4 * MB
HASHED_BYTES = 256 << 10  # at a time, into one buffer: they stay in the cache


@contextmanager
def planned(
    paths: Sequence[str | os.PathLike[str]],
    options: Options,
    parallelism: int,
    spool_dir: str | None = None,
) -> Iterator[RunPlan]:
    """The plan of a run; spooled copies live as long as the context.

    Raises CaptureError when a named file is missing or no capture, or nothing can be used.
    """
    inputs = find_captures([os.fspath(path) for path in paths])
    with tempfile.TemporaryDirectory(prefix="kdissect-spool-", dir=spool_dir) as folder:
        yield make_plan(inputs, options, parallelism, folder)


def make_plan(
    inputs: list[InputFile], options: Options, parallelism: int, spool_dir: str
) -> RunPlan:
    """Split the inputs; those that cannot be read at a position are spooled first.

    Raises CaptureError when none of them is a capture.
    """
    check_key_logs(options.keylog)
    files = [spool(item, spool_dir) for item in inputs]
    if not any(item.is_capture for item in files):
        raise CaptureError(f"{inputs[0].path}: {inputs[0].error}")
    byte_count = sum(os.path.getsize(item.data_path) for item in files if item.is_capture)
    split_bytes = options.split_bytes
    if split_bytes is None:
        split_bytes = byte_count // max(1, 2 * parallelism)
        split_bytes = min(max(split_bytes, SPLIT_BYTES_MIN), SPLIT_BYTES_MAX)
    found = plan_splits(files, split_bytes, options.limits.fragments)
    sources = found.sources
    bucket_count, slot_bytes = sized(byte_count, parallelism)
    return RunPlan(
        paths=tuple(sources.paths),
        sizes=tuple(int(size) for size in sources.sizes),
        captures=tuple(found.captures),
        capture_ids=tuple(capture_id(info.path) for info in found.captures),
        splits=tuple(found.splits),
        fragments=found.fragments,
        bucket_count=bucket_count,
        slot_bytes=slot_bytes,
        options=options,
    )


def check_key_logs(paths: Sequence[str]) -> None:
    """Raise CaptureError for a key log that cannot be read, or has other lines only."""
    files = Sources(list(paths))
    for number, path in enumerate(paths):
        text = memoryview(files.data(number))  # type: ignore[arg-type]
        if not holds_secrets(text) and not is_blank(text):
            raise CaptureError(f"{path}: no line of it is one of a TLS key log (SSLKEYLOGFILE)")


def capture_id(path: str) -> int:
    """Positive id of an input file: a hash of its path as it was named or found."""
    digest = hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 1) or 1


def manifest_inputs(plan: RunPlan) -> list[dict[str, Any]]:
    """`inputs` of the manifest: path, size and sha256 of each file as the user has it.

    Of a stream, which cannot be read twice, those of its spooled bytes.
    """
    listed = []
    block = memoryview(bytearray(HASHED_BYTES))
    for info in plan.captures:
        path = Path(info.path)
        if not path.is_file():
            path = Path(plan.paths[info.source])
        digest = hashlib.sha256()
        size = 0
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(block):
                digest.update(block[:count])
                size += count
        listed.append({"path": info.path, "size": size, "sha256": digest.hexdigest()})
    return listed
