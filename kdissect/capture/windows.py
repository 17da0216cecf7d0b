"""Reads a capture once, front to back, a window of packets at a time; also from a pipe.

A window is a part of the file in a buffer that the next window reuses, so memory depends only on
the size of windows. The first windows are small, so that output starts early. A pipe returns the
bytes that it has: a window then holds the packets that have arrived.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kdissect.arrays import Bytes, read_only
from kdissect.capture import inputs, object_store
from kdissect.capture.ip_fragments import Joined, join
from kdissect.capture.mapped_files import Sources
from kdissect.capture.packet_reader import FILE_HEADER_SIZE, SECTION_MAGIC, STEP_BAD, STEP_CUT
from kdissect.capture.scan import scan
from kdissect.capture.segments import ENDPOINTS, SEGMENT, SegmentBatch
from kdissect.capture.splits import FRAGMENT_MAX, RecordWalk
from kdissect.errors import CaptureError

WINDOW_BYTES_MIN = 256 << 10  # the first one; each later one is twice as large
WINDOW_BYTES_MAX = 8 << 20
RECORD_BYTES_MAX = 256 << 20  # larger than any packet; a damaged length must not fill the memory
# wait this long for more from a pipe that has delivered so many bytes
PATIENCE_S, MUCH_BYTES = 0.005, 32 << 10
PIPE_BYTES = 1 << 20  # requested capacity of a pipe
TLS_KEY_LOG = 0x544C534B  # type of a pcapng's decryption secrets


def buffer_as_sources(paths: Sequence[str], buffer: Bytes) -> Sources:
    """A buffer as the bytes of every capture: positions are those in the buffer."""
    return Sources(paths, arrays=dict.fromkeys(range(len(paths)), buffer))


@dataclass(frozen=True, slots=True)
class Window:
    """Packets of a window.

    batch: their segments. sources: their bytes, until the next window is read. secrets: key logs
    that a pcapng contains among these packets. ignored: the number of other packets by reason.
    """

    batch: SegmentBatch
    sources: Sources
    secrets: list[bytes]
    ignored: Counter[str]


def _enlarge_pipe(descriptor: int) -> None:
    """Let the pipe hold PIPE_BYTES where the system can (Linux)."""
    with suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


class _Plain(io.RawIOBase):
    """The bytes of a file or a pipe. head: bytes that are read again before all others."""

    error: str | None = None

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.head = b""
        mode = os.fstat(descriptor).st_mode
        self._waits = not stat.S_ISREG(mode)
        if stat.S_ISFIFO(mode):
            _enlarge_pipe(descriptor)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a memoryview, at least one; returns their number, 0 at the end.

        A file fills it; a pipe gives the bytes that it has.
        """
        room = memoryview(buffer)
        done = min(len(self.head), len(room))
        room[:done] = self.head[:done]
        self.head = self.head[done:]
        while done < len(room):
            if done and self._waits:
                # a fast writer continues at once, and small windows cost more
                patience_s = PATIENCE_S if done >= MUCH_BYTES else 0
                if not select.select([self._descriptor], [], [], patience_s)[0]:
                    break
            count = os.readv(self._descriptor, [room[done:]])
            if not count:
                break
            done += count
        return done

    def close(self) -> None:
        if not self.closed and self._descriptor > 2:
            os.close(self._descriptor)
        super().close()


class WindowReader:
    """Reads one capture as windows. Raises CaptureError if it is none.

    source: its number among the captures of the run. error: after the last window, why the capture
    could not be read to its end.
    """

    def __init__(self, path: str, source: int, paths: list[str]) -> None:
        self.path, self.source, self._paths = path, source, paths
        self.error: str | None = None
        self._buffer = np.zeros(0, np.uint8)
        self._bytes = open_bytes(path)
        head = _head(self._bytes)
        if inputs.detect_format(head[:4]) == "unknown":
            reason = "the file is empty" if not head else "not a pcap or pcapng file"
            raise CaptureError(f"{path}: {reason}")
        self._walk = RecordWalk(np.frombuffer(head, np.uint8), 2**62, FRAGMENT_MAX)
        self._left = head[int(self._walk.cursor["pos"]) :]
        if len(head) < FILE_HEADER_SIZE and head[:4] != SECTION_MAGIC:
            self.error = f"the file header is cut: {len(head)} bytes"
        self._base = len(head) - len(self._left)  # position of the next window in the file

    @property
    def packet_count(self) -> int:
        """Packets so far."""
        return int(self._walk.cursor["packet_count"])

    def windows(self) -> Iterator[Window]:
        """Yield the windows; each is valid until the next one is requested."""
        size = WINDOW_BYTES_MIN
        needed = 0
        while self.error is None:
            left = self._left
            if len(self._buffer) < max(size, needed):
                self._buffer = np.empty(max(size, needed), np.uint8)
            buffer = self._buffer
            buffer[: len(left)] = np.frombuffer(left, np.uint8)
            view = memoryview(buffer)[len(left) : max(size, needed)]  # type: ignore[arg-type]
            count = self._bytes.readinto(view)
            filled = len(left) + count
            if not count and not left:
                break
            window = self._window(buffer, filled)
            needed = int(self._walk.cursor["needed"]) if self._walk.outcome == STEP_CUT else 0
            if not count or needed > RECORD_BYTES_MAX or self._walk.outcome == STEP_BAD:
                self.error = self._fault()
            if not count:
                break
            size = min(2 * size, WINDOW_BYTES_MAX)
            yield window
        self.error = "; ".join(text for text in (self._bytes.error, self.error) if text) or None
        self._bytes.close()

    def _fault(self) -> str | None:
        """Why the record after the last window cannot be read."""
        return self._walk.error(self._base - int(self._walk.cursor["pos"]))

    def _window(self, buffer: Bytes, filled: int) -> Window:
        """The complete packets among the first `filled` bytes of the buffer."""
        data = read_only(buffer[:filled])
        walk, cursor = self._walk, self._walk.cursor
        walk.reading = walk.reading._replace(data=data)
        cursor["pos"], cursor["end"], cursor["secret_count"] = 0, filled, 0
        walk.counts["splits"] = walk.counts["fragments"] = 0
        walk.run()
        sources = buffer_as_sources(self._paths, data)
        batch = SegmentBatch(np.zeros(0, ENDPOINTS), np.zeros(0, SEGMENT))
        ignored: Counter[str] = Counter()
        for split in walk.make_splits(self.source):
            result = scan(replace(split, fragments=self._joined(sources)), sources)
            batch = result.batch
            ignored.update(result.ignored_reasons)
        end = int(cursor["pos"])
        self._left = data[end:].tobytes()
        self._base += end
        self._forget_sections()
        rows = walk.reading.secrets[: cursor["secret_count"]].tolist()
        texts = [
            data[pos : pos + size].tobytes() for kind, pos, size in rows if kind == TLS_KEY_LOG
        ]
        return Window(batch, sources, texts, ignored)

    def _joined(self, sources: Sources) -> Joined | None:
        """The joined IP fragments of the window."""
        table = self._walk.fragment_table()
        if not len(table):
            return None
        return join([table[:0]] * self.source + [table], sources, 0)

    def _forget_sections(self) -> None:
        """Drop interfaces of earlier sections, which cannot occur again."""
        cursor = self._walk.cursor
        base = int(cursor["section_base"])
        if base:
            kept = self._walk.reading.interfaces[base:].copy()
            self._walk.reading.interfaces[: len(kept)] = kept
            cursor["interface_count"] -= base
            cursor["section_base"] = 0


def open_bytes(path: str) -> _Plain | inputs.Unpacked:
    """The plain bytes of a capture, or of standard input ("-"), unpacked if they are compressed.

    Raises CaptureError if it cannot be opened.
    """
    if object_store.is_remote(path):
        raise CaptureError(f"{path}: is in an object store, which only dissect and read can read")
    try:
        descriptor = sys.stdin.fileno() if path == inputs.STDIN else os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CaptureError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    raw = _Plain(descriptor)
    raw.head = _head(raw)
    compression = inputs.detect_compression(raw.head[:4])
    if compression == "none":
        return raw
    if path != inputs.STDIN and os.path.isfile(path):
        raw.close()
        return inputs.Unpacked(path, compression)
    return inputs.Unpacked(path, compression, raw)


def _head(data: _Plain | inputs.Unpacked) -> bytes:
    """The first bytes of a file, up to the size of a file header."""
    room = bytearray(FILE_HEADER_SIZE)
    done = 0
    while done < len(room) and (count := data.readinto(memoryview(room)[done:])):
        done += count
    return bytes(room[:done])
