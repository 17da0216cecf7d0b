"""Finds the captures that the user named, and makes them readable at any position.

A capture is recognised by its first bytes, never by its name. Compressed files, standard input and
pipes are *spooled*: written uncompressed to a folder of the caller, piece by piece. So are objects
in stores, unless the caller reads them in place (`InputFile.is_ranged`).
"""

from __future__ import annotations

import glob
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import BinaryIO

import pyarrow as pa

from kdissect.capture import object_store
from kdissect.capture.object_bytes import version_of
from kdissect.capture.pcap import MAGICS
from kdissect.capture.pcapng import SECTION_MAGIC
from kdissect.errors import CaptureError, EnvironmentFailed

STDIN = "-"
_PIECE = 1 << 20  # bytes decompressed at a time
_LOOKED_AT_A_TIME = 16  # objects examined at a time; each takes a store some 10 ms
_HEAD = 4096  # bytes of a compressed stream that contain its first four plain bytes

_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
_NO_CAPTURE = "not a pcap or pcapng file"


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input of the run. path: as the user sees it. data_path: file with its plain bytes.

    format: pcap, pcapng, unknown, or stream (standard input or a pipe, not examined yet).
    compression: none, gzip, zstd, lz4. size: bytes. error: why it is no capture, or was not fully
    unpacked. tag: the store's tag of an object's content.
    """

    path: str
    format: str
    compression: str = "none"
    size: int = 0
    error: str | None = None
    data_path: str = ""
    tag: str = ""

    @property
    def is_capture(self) -> bool:
        return self.format in ("pcap", "pcapng")

    @property
    def is_ranged(self) -> bool:
        """Return whether it can be read in place, in an object store."""
        return self.is_capture and self.compression == "none" and object_store.is_remote(self.path)


def detect_format(head: bytes) -> str:
    """pcap, pcapng or unknown, from a file's first four bytes."""
    if head[:4] in MAGICS:
        return "pcap"
    return "pcapng" if head[:4] == SECTION_MAGIC else "unknown"


def detect_compression(head: bytes) -> str:
    """none, gzip, zstd or lz4, from a file's first four bytes."""
    # RFC 8878, 3.1.2: zstd may begin with skippable frames (pzstd writes them); lz4 has the same
    # numbers.
    if head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50:
        return "zstd"
    return next((name for magic, name in _COMPRESSIONS.items() if head.startswith(magic)), "none")


def _pieces(path: str, compression: str, size: int, skip: int = 0) -> Iterator[bytes]:
    """Yield the plain bytes of a compressed file after the first `skip`, `size` at a time."""
    with (
        object_store.opened(path) if object_store.is_remote(path) else pa.OSFile(path, "rb") as raw,
        pa.CompressedInputStream(raw, compression) as stream,
    ):
        while skip > 0 and (piece := stream.read(min(skip, _PIECE))):
            skip -= len(piece)
        while piece := stream.read(size):
            yield piece


def _unpack(path: str, compression: str, out: BinaryIO) -> str | None:
    """Write all plain bytes of a compressed file; returns the error that ended it, or None."""
    written = 0
    size = _PIECE
    while True:
        try:
            for piece in _pieces(path, compression, size, written):
                out.write(piece)
                written += len(piece)
            return None
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            # A failing read returns none of its bytes, so read the rest one byte at a time.
            if size == 1:
                reason = str(error).splitlines()[0]
                return f"{compression} data is damaged after {written} plain bytes: {reason}"
            size = 1


def _look(path: str) -> InputFile:
    """Describe a regular file from its first bytes. Raises OSError."""
    with open(path, "rb") as file:
        return _looked_at(path, os.fstat(file.fileno()).st_size, file.read(4), path)


def _look_far(url: str) -> InputFile:
    """Describe an object in a store. Raises CaptureError, EnvironmentFailed."""
    with object_store.opened(url) as file:
        version = version_of(file)
        head = file.read_at(min(4, version.size), 0)
    return replace(_looked_at(url, version.size, head, ""), tag=version.tag)


def _looked_at(path: str, size: int, head: bytes, data_path: str) -> InputFile:
    if size == 0:
        return InputFile(path, "unknown", error="the file is empty")
    compression = detect_compression(head)
    if compression == "none":
        kind = detect_format(head)
        error = None if kind != "unknown" else _NO_CAPTURE
        return InputFile(path, kind, "none", size, error, data_path)
    plain = b""
    try:
        for piece in _pieces(path, compression, _HEAD):
            plain += piece
            if len(plain) >= 4:
                break
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if not plain:
            reason = str(error).splitlines()[0]
            text = f"{compression} data is damaged before its first bytes: {reason}"
            return InputFile(path, "unknown", compression, size, text)
    kind = detect_format(plain)
    error_text = None if kind != "unknown" else f"{compression} of something that is no capture"
    return InputFile(path, kind, compression, size, error_text)


def describe(path: str) -> InputFile:
    """Describe a file from its first bytes; a file that cannot be read has an error."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return _look(path)
        return InputFile(path, "unknown", error="not a regular file")
    except OSError as error:
        return InputFile(path, "unknown", error=error.strerror or str(error))


def _named_file(path: str) -> InputFile:
    """A file that the user named; raises CaptureError if it is no capture."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise CaptureError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return InputFile(path, "stream")
    file = describe(path)
    if not file.is_capture:
        raise CaptureError(f"{path}: {file.error}")
    return file


def listed(path: str) -> list[str]:
    """The files of a folder (recursive) or of a glob, without opening them."""
    if not os.path.isdir(path):
        paths: list[str] = []
        for match in sorted(glob.glob(path, recursive=True)):
            paths += listed(match) if os.path.isdir(match) else [match]
        return paths
    files: list[str] = []
    for folder, folders, names in os.walk(path):
        folders.sort()
        files.extend(os.path.join(folder, name) for name in sorted(names))
    return files


def _folder(path: str) -> list[InputFile]:
    files = [describe(file) for file in listed(path)]
    if not any(file.is_capture for file in files):
        raise CaptureError(f"{path}: no capture in this folder ({len(files)} other files)")
    return files


def _expand(path: str) -> list[InputFile]:
    if path == STDIN:
        return [InputFile(STDIN, "stream")]
    if object_store.is_remote(path):
        return _far_files(path)
    if not os.path.lexists(path) and glob.has_magic(path):
        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            raise CaptureError(f"{path}: no file matches")
        files = [file for match in matches for file in _matched(match)]
        if not any(file.is_capture or file.format == "stream" for file in files):
            raise CaptureError(f"{path}: no capture among the files that match")
        return files
    return _folder(path) if os.path.isdir(path) else [_named_file(path)]


def _far_files(url: str) -> list[InputFile]:
    """The objects at a URL. Raises CaptureError if none of them is a capture."""
    matches = object_store.matching(url)
    if matches is None:
        raise CaptureError(f"{url}: no such file, and nothing under that name")
    with ThreadPoolExecutor(_LOOKED_AT_A_TIME) as pool:
        files = list(pool.map(_look_far, (match for match, _ in matches)))
    if not any(file.is_capture for file in files):
        error = files[0].error if matches[0][0] == url else f"no capture ({len(files)} other files)"
        raise CaptureError(f"{url}: {error}")
    return files


def _matched(path: str) -> list[InputFile]:
    """The files of one match of a glob; they need not be captures."""
    if not os.path.isdir(path):
        return [describe(path)]
    try:
        return _folder(path)
    except CaptureError:
        return []


def find_captures(paths: Iterable[str | os.PathLike[str]]) -> list[InputFile]:
    """The files named by paths, folders (recursive), globs, URLs of object stores, and "-"
    (stdin).

    Files of a folder or glob that are no captures are included with their error. A file that is
    named twice is included once. Raises CaptureError if there are no paths, if a named file is
    missing or no capture, if a folder has no captures, or if a glob has no matches.
    """
    files: dict[str, InputFile] = {}
    for path in paths:
        for file in _expand(os.fspath(path)):
            is_here = file.path != STDIN and not object_store.is_remote(file.path)
            files.setdefault(os.path.realpath(file.path) if is_here else file.path, file)
    if not files:
        raise CaptureError("no captures: no path was given")
    return list(files.values())


def _new_file(folder: str | os.PathLike[str]) -> tuple[BinaryIO, str]:
    descriptor, path = tempfile.mkstemp(prefix="capture-", suffix=".spool", dir=folder)
    return os.fdopen(descriptor, "wb"), path


def spool(file: InputFile, spool_dir: str | os.PathLike[str]) -> InputFile:
    """The input with `data_path` set; a compressed file or a stream is written to spool_dir first.

    The caller deletes spool_dir after the run. From a damaged compressed file the readable part is
    used, with an error. Raises CaptureError if a stream is no capture, EnvironmentFailed if
    spool_dir cannot be written.
    """
    if file.data_path or file.format == "unknown":
        return file
    try:
        if file.format == "stream":
            return _spool_stream(file, spool_dir)
        out, path = _new_file(spool_dir)
        with out:
            if file.compression == "none":
                with object_store.opened(file.path) as far:
                    shutil.copyfileobj(far, out, _PIECE)
                return replace(file, data_path=path)
            damage = _unpack(file.path, file.compression, out)
    except OSError as error:
        raise EnvironmentFailed(f"{file.path}: spooling to {spool_dir}: {error}") from error
    return replace(file, data_path=path, error=damage)


def _spool_stream(file: InputFile, spool_dir: str | os.PathLike[str]) -> InputFile:
    out, path = _new_file(spool_dir)
    with out:
        if file.path == STDIN:
            shutil.copyfileobj(sys.stdin.buffer, out, _PIECE)
        else:
            with open(file.path, "rb") as stream:
                shutil.copyfileobj(stream, out, _PIECE)
    seen = _look(path)
    if not seen.is_capture:
        raise CaptureError(f"{file.path}: {seen.error}")
    if seen.compression == "none":
        return replace(seen, path=file.path)
    plain = spool(seen, spool_dir)
    os.unlink(path)
    return replace(plain, path=file.path)
