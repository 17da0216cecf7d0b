"""Finds the captures that the user named. `copies` makes them readable at any position.

A capture is recognised by its first bytes, never by its name. Objects under a prefix or a glob are
listed only: the tasks that read them look at their first bytes.
"""

from __future__ import annotations

import glob
import io
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from kdissect.capture import object_store
from kdissect.capture.packet_reader import MAGICS, SECTION_MAGIC
from kdissect.errors import CaptureError
from kdissect.step_log import logged_step

STDIN = "-"
UNSEEN = "unseen"  # format of an object whose first bytes were not read yet
_PIECE = 64 << 10  # bytes decompressed at a time; Arrow reads as many compressed ones
_ENDLESS = 1 << 62

_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
_NO_CAPTURE = "not a pcap or pcapng file"


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input of the run. path: as the user sees it.

    format: pcap, pcapng, unknown, stream (standard input or a pipe, not examined yet) or UNSEEN.
    compression: none, gzip, zstd, lz4. size: bytes. error: why it is no capture, or was not fully
    unpacked. data_path: the file with its plain bytes on every host; "" if each host needs a copy.
    tag: the store's tag of an object's content; its time of change while it is UNSEEN.
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
        """Return whether it is a capture, or may be one."""
        return self.format in ("pcap", "pcapng", UNSEEN)


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


class _Packed(io.RawIOBase):
    """Compressed bytes as they lie in `raw`; after the first `until` of them, one at a time."""

    def __init__(self, raw: Any, until: int) -> None:
        super().__init__()
        self._raw, self._until = raw, until
        self.count = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        room = self._until - self.count
        data: bytes = self._raw.read(min(size, room) if room > 0 else 1)
        self.count += len(data)
        return data


class Unpacked(io.RawIOBase):
    """The plain bytes of a compressed file, object or stream. error: at the end, why it is early.

    stream: the compressed bytes; without it, the file or object at `path` is opened.
    """

    def __init__(self, path: str, compression: str, stream: io.RawIOBase | None = None) -> None:
        super().__init__()
        self._path, self._compression, self._stream = path, compression, stream
        self.error: str | None = None
        self._pieces = self._read()
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; returns the number of bytes, fewer at the end."""
        room = memoryview(buffer)
        done = 0
        while done < len(room):
            piece = self._rest or next(self._pieces, b"")
            if not piece:
                break
            count = min(len(piece), len(room) - done)
            room[done : done + count] = piece[:count]
            self._rest = piece[count:]
            done += count
        return done

    def _read(self) -> Iterator[bytes]:
        done, until = 0, _ENDLESS
        # A failing read returns none of its bytes, and Arrow fails for all that it unpacks at once.
        # So the rest is read one byte at a time, from packed bytes that come one at a time.
        for size in (_PIECE, 1) if self._stream is None else (_PIECE,):
            try:
                with self._open() as raw:
                    packed = _Packed(raw, until)
                    plain = pa.CompressedInputStream(packed, self._compression)
                    skip = done
                    while skip > 0 and (piece := plain.read(min(skip, _PIECE))):
                        skip -= len(piece)
                    while piece := plain.read(size):
                        done += len(piece)
                        yield piece
                return
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                reason = str(error).splitlines()[0]
                until = packed.count - 2 * _PIECE
        place = f"after {done} plain bytes" if done else "before its first bytes"
        self.error = f"{self._compression} data is damaged {place}: {reason}"

    def _open(self) -> Any:
        if self._stream is not None:
            return pa.PythonFile(self._stream, "r")
        is_remote = object_store.is_remote(self._path)
        return object_store.opened(self._path) if is_remote else pa.OSFile(self._path, "rb")


def look_at_file(path: str) -> InputFile:
    """Describe a regular file from its first bytes. Raises OSError."""
    with open(path, "rb") as file:
        return _looked_at(path, os.fstat(file.fileno()).st_size, file.read(4), path)


def _look_at_object(url: str) -> InputFile:
    """Describe an object in a store. Raises CaptureError, EnvironmentFailed."""
    with object_store.opened(url) as file:
        size, tag = file.version()
        head = file.read_at(min(4, size), 0)
    return replace(_looked_at(url, size, head, ""), tag=tag)


def _looked_at(path: str, size: int, head: bytes, data_path: str) -> InputFile:
    if size == 0:
        return InputFile(path, "unknown", error="the file is empty")
    compression = detect_compression(head)
    if compression == "none":
        kind = detect_format(head)
        error = None if kind != "unknown" else _NO_CAPTURE
        return InputFile(path, kind, "none", size, error, data_path)
    unpacked = Unpacked(path, compression)
    kind, text = detect_format(unpacked.read(4) or b""), None
    if kind == "unknown":
        text = unpacked.error or f"{compression} of something that is no capture"
    return InputFile(path, kind, compression, size, text)


def describe(path: str) -> InputFile:
    """Describe a file or an object from its first bytes; a file that cannot be read has an error.

    Raises CaptureError, EnvironmentFailed for an object that cannot be read.
    """
    if object_store.is_remote(path):
        return _look_at_object(path)
    name = os.fsencode(path).decode("utf-8", "replace")
    if name != path:  # neither Arrow nor JSON has a place for other names
        return InputFile(name, "unknown", error="the name is no UTF-8; rename it")
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return look_at_file(path)
        if stat.S_ISDIR(mode):
            os.scandir(path).close()  # raises the reason why `listed` has no files of it
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
    """The files of a folder (recursive) or of a glob, without opening them.

    A folder that cannot be read stands for its files.
    """
    if not os.path.isdir(path):
        paths: list[str] = []
        for match in sorted(glob.glob(path, recursive=True)):
            paths += listed(match) if os.path.isdir(match) else [match]
        return paths
    files: list[str] = []
    for folder, folders, names in os.walk(path, onerror=lambda error: files.append(error.filename)):
        folders.sort()
        files.extend(os.path.join(folder, name) for name in sorted(names))
    return files


def _expand(path: str) -> list[InputFile]:
    if path == STDIN:
        return [InputFile(STDIN, "stream")]
    if object_store.is_remote(path):
        return _far_files(path)
    is_glob = not os.path.lexists(path) and glob.has_magic(path)
    if not (is_glob or os.path.isdir(path)):
        return [_named_file(path)]
    files = [describe(file) for file in listed(path)]
    if is_glob and not files:
        raise CaptureError(f"{path}: no file matches")
    if not any(file.is_capture for file in files):
        if files and files[0].path == path:
            raise CaptureError(f"{path}: {files[0].error}")
        if os.path.isfile(os.path.join(path, "_kdissect.json")):
            raise CaptureError(f"{path}: is a table set; name its captures")
        folder = f"in this folder ({len(files)} other files)"
        raise CaptureError(
            f"{path}: no capture {'among the files that match' if is_glob else folder}"
        )
    return files


def _far_files(url: str) -> list[InputFile]:
    """The objects at a URL; one that is named itself is looked at.

    Raises CaptureError if there are none, or if the named one is no capture.
    """
    matches = object_store.matching(url)
    if matches is None:
        raise CaptureError(f"{url}: no such file, and nothing under that name")
    if matches[0][0] != url:
        return [InputFile(path, UNSEEN, size=size, tag=tag) for path, size, tag in matches]
    file = describe(url)
    if not file.is_capture:
        raise CaptureError(f"{url}: {file.error}")
    return [file]


def find_captures(paths: Iterable[str | os.PathLike[str]]) -> list[InputFile]:
    """The files named by paths, folders (recursive), globs, URLs of object stores, and "-"
    (stdin).

    Files of a folder or glob that are no captures are included with their error. A file that is
    named twice is included once. Raises CaptureError if there are no paths, if a named file is
    missing or no capture, if a folder has no captures, or if a glob has no matches.
    """
    files: dict[str, InputFile] = {}
    with logged_step("find captures") as counts:
        for path in paths:
            for file in _expand(os.fspath(path)):
                is_here = file.path != STDIN and not object_store.is_remote(file.path)
                files.setdefault(os.path.realpath(file.path) if is_here else file.path, file)
        counts["files"] = len(files)
    if not files:
        raise CaptureError("no captures: no path was given")
    return list(files.values())
