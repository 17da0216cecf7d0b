"""Reads a folder in which captures keep appearing, in micro-batches of whole files, each once.

A file is *complete* when a file that begins later exists, or when it has not changed for
`complete_after_s`. A batch reads the complete files in the order of their first packets.

An *offset* names the query, the number of its batch, the last file in order so far, and the files
of the batch, so that a repeated batch reads the same files:
``{"query": "9f2c...", "number": 3, "time_ns": ..., "path": ..., "files": [[time_ns, path], ...]}``.

Connections cross files: the next batch continues the open connections of a batch (`resume.carry`),
and an exchange is a row of the batch whose packets finish it. This state is saved by query and
number. If it is lost, the earlier files are read again, without their rows.

A file is recognised by its bytes up to the end of the first packet, not by its path:

- A *late* file begins before one that was already read. Its packets cannot continue the open
  connections, so it is read with connections of its own.
- A file that *grew* is read again, without the packets that were read before.
- A file that was moved, copied or compressed after it was read is not read again.

Possible losses are rows of `anomalies` and warnings of the logger "kdissect".
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import secrets
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kdissect import __version__
from kdissect.capture.inputs import describe, listed
from kdissect.capture.segments import SegmentBatch
from kdissect.capture.windows import Window, WindowReader
from kdissect.errors import CaptureError
from kdissect.kafka.assembly import INFO, Anomaly
from kdissect.pipeline.assemble import anomaly_tables
from kdissect.pipeline.disk_index import private_folder
from kdissect.pipeline.filters import anomalies_within, connections_within, exchanges_within
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import capture_id
from kdissect.pipeline.saved_state import COUNTS
from kdissect.pipeline.selection import Selection
from kdissect.resume.carry import CompletedExchanges, ConnectionCarry
from kdissect.show.listing import Lister
from kdissect.show.reading import NO_TIME_YET, first_packet, key_log_texts
from kdissect.tables.anomalies import SEVERITY, AnomalyRow, anomalies_table

Offset = dict[str, Any]
Key = tuple[int, str]  # orders files: time of the first packet, path

SECRET_FILES_MAX = 1024  # captures whose TLS secrets a batch reads again

_log = logging.getLogger("kdissect")


class CaptureFile(NamedTuple):
    """A file of the folder, as it was when it was opened.

    time_ns: of the first packet; NO_TIME_YET without packets. content: digest of the bytes up to
    the end of that packet, or of the path. last_packet: number of the last packet read.
    """

    path: str
    size: int
    changed_ns: int
    time_ns: int
    content: bytes
    last_packet: int = 0

    @property
    def key(self) -> Key:
        return self.time_ns, self.path


@dataclass(slots=True)
class _Connections:
    """Open connections, and the captures by source number."""

    resumed: ConnectionCarry
    paths: list[str] = field(default_factory=list)
    capture_ids: list[int] = field(default_factory=list)
    last_window: Window | None = None


@dataclass(slots=True)
class _State:
    """State that a batch leaves for the next one.

    files: those read, by path. names: of topics, by id. secret_places: by content of a capture, its
    path and how many of its windows hold TLS secrets, which are never saved.
    """

    connections: _Connections
    files: dict[str, CaptureFile] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    secret_places: dict[bytes, tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FolderStream:
    """The captures of a folder or glob.

    spool: folder for the state between batches (default: the temporary folder). complete_after_s:
    seconds without a change after which a file is complete; None: as soon as a later file exists.
    """

    folder: str
    options: Options
    spool: str | None
    complete_after_s: float | None = None
    # by path: the time of any change (also of permissions), and the file at that time
    _opened: dict[str, tuple[int, CaptureFile]] = field(
        default_factory=dict, repr=False, compare=False
    )
    # by place of the state, for one offset: a query requests it repeatedly until new files arrive
    _before: dict[Path, dict[str, CaptureFile]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __reduce__(self) -> tuple[Any, ...]:
        return FolderStream, (self.folder, self.options, self.spool, self.complete_after_s)

    # -- which files ------------------------------------------------------------------------

    def first(self) -> Offset:
        """Return the offset of a new query, before all files."""
        query = secrets.token_hex(8)  # queries on the same folder must not share their state
        return {"query": query, "number": 0, "time_ns": -1, "path": "", "files": []}

    def latest(self, start: Offset) -> Offset:
        """Return the offset after all complete files not read up to `start`; `start` if there
        are none."""
        before = self._files_before(start)
        complete = self._complete()
        new = sorted(file.key for file in complete if _is_new(file, before.get(file.path)))
        if not new:
            return start
        time_ns, path = max([_key(start), *(key for key in new if key[0] != NO_TIME_YET)])
        return {
            "query": start["query"],
            "number": start["number"] + 1,
            "time_ns": time_ns,
            "path": path,
            "files": [list(key) for key in new],
        }

    def _complete(self) -> list[CaptureFile]:
        files = self._files()
        if self.complete_after_s is not None:
            since_ns = time.time_ns() - int(self.complete_after_s * 1e9)
            return [file for file in files if file.changed_ns <= since_ns]
        captures = [file for file in files if file.time_ns != NO_TIME_YET]
        newest = max((file.key for file in captures), default=(0, ""))
        changed_ns = max((file.changed_ns for file in captures), default=0)
        # a file without packets is ordered by its time of change
        return [
            file
            for file in files
            if (file.key < newest if file.time_ns != NO_TIME_YET else file.changed_ns < changed_ns)
        ]

    def _files(self) -> list[CaptureFile]:
        """Return the files with content; hidden files are ignored, since copies are written to
        such names."""
        paths = (path for path in listed(self.folder) if not os.path.basename(path).startswith("."))
        return [file for file in map(self.look, paths) if file is not None]

    def look(self, path: str) -> CaptureFile | None:
        """Return a file as it is now; None if it is missing, empty, or not a regular file.

        Only new and changed files are opened: a folder may hold thousands.
        """
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode) or not status.st_size:
                return None
            changed_ns, file = self._opened.get(path, (0, None))
            if file is None or (changed_ns, file.size) != (status.st_ctime_ns, status.st_size):
                item = describe(path)
                time_ns, head = first_packet(item) if item.is_capture else (NO_TIME_YET, b"")
                content = hashlib.blake2b(head or path.encode(), digest_size=16).digest()
                file = CaptureFile(path, status.st_size, status.st_mtime_ns, time_ns, content)
                self._opened[path] = status.st_ctime_ns, file
        except (FileNotFoundError, CaptureError):
            return None
        return file

    def _files_before(self, at: Offset) -> dict[str, CaptureFile]:
        """Return the files read up to an offset, by path."""
        place = self._place(at)
        if place not in self._before:
            state = self._load(at, only_files=True)
            if state is None:
                return {file.path: file for file in self.files_up_to(at)}
            self._before.clear()
            self._before[place] = state.files
        return self._before[place]

    def files_up_to(self, at: Offset) -> list[CaptureFile]:
        """Return the files up to the last one of an offset, in order."""
        files = [file for file in self._files() if file.key <= _key(at)]
        return sorted(files, key=lambda file: file.key)

    # -- batches ----------------------------------------------------------------------------

    def read(self, start: Offset, end: Offset) -> Iterator[dict[str, pa.Table]]:
        """Yield the tables from the files of the batch from `start` to `end`."""
        state = self._load(start)
        batch = _Batch(self, state or self._new_state())
        if state is None:
            batch.resume(start, end)
        yield from batch.tables(start, end)
        self._save(batch.state, end)

    def _new_state(self) -> _State:
        return _State(_new_connections(self.options))

    def _load(self, at: Offset, only_files: bool = False) -> _State | None:
        """Return the saved state of an offset; None if it is lost or cannot be read."""
        state = self._new_state()
        if at["number"] == 0:
            return state
        try:
            with self._place(at).open("rb") as file:
                # unpickled only from a folder of this user alone
                files = pickle.load(file)
                if not only_files:
                    state = pickle.load(file)
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError):
            return None
        state.files = files
        return state

    def _save(self, state: _State, at: Offset) -> None:
        files, state.files = state.files, {}
        state.connections.last_window = None
        # secrets are never saved: the next batch reads them from the captures
        state.connections.resumed.key_logs = []
        path = self._place(at)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            pickle.dump(files, file)
            pickle.dump(state, file)
        os.replace(name, path)

    def forget_before(self, at: Offset) -> None:
        """Remove the query's state before a committed offset."""
        place = self._place(at)
        if place.exists():
            for path in place.parent.iterdir():
                if not path.name.isdigit() or int(path.name) < int(place.name):
                    path.unlink(missing_ok=True)

    def _place(self, at: Offset) -> Path:
        if "query" not in at:
            raise CaptureError("the checkpoint is another version's; begin with a new one")
        made_of = repr((os.path.abspath(self.folder), self.options))
        digest = hashlib.sha256(made_of.encode()).hexdigest()[:16]
        folder = f"{__version__}-{at['query']}-{digest}"
        return private_folder(self.spool, "streams") / folder / str(at["number"])


class _Batch:
    """Reads one batch: changes the state and collects anomalies."""

    def __init__(self, stream: FolderStream, state: _State) -> None:
        self.stream, self.state, self.options = stream, state, stream.options
        self.anomalies: list[AnomalyRow] = []
        self._by_content = {file.content: file for file in state.files.values()}
        selection = Selection(
            hosts=self.options.hosts,
            time_from_ns=self.options.time_from_ns,
            time_to_ns=self.options.time_to_ns,
        )
        self._lister = Lister(self.options, [], selection, "records")
        self._lister.names.update(state.names)
        self._key_logs = key_log_texts(self.options.keylog)
        self._secrets: dict[bytes, bytes] = {}  # key logs by content of their capture

    def tables(self, start: Offset, end: Offset) -> Iterator[dict[str, pa.Table]]:
        self._read_secrets_again([path for _, path in end["files"]])
        last = _key(start)
        in_order = self.state.connections
        late = _new_connections(self.options)
        given_up, late_count = in_order.resumed.counts.given_up, in_order.resumed.counts.late
        for time_ns, path in end["files"]:
            key = int(time_ns), str(path)
            follows = key >= last
            if follows and time_ns != NO_TIME_YET:
                last = key
            yield from self._tables_of(key, in_order if follows else late, is_late=not follows)
        if late.last_window is not None:
            yield from self._listed(late.resumed.finish(late.last_window, late.paths), late)
        given_up = in_order.resumed.counts.given_up + late.resumed.counts.given_up - given_up
        if given_up:
            self._report(
                Anomaly.LIMIT,
                f"{given_up} connections were quiet for long and made room for others with "
                "requests still open",
            )
        late_count = in_order.resumed.counts.late + late.resumed.counts.late - late_count
        if late_count:
            self._report(Anomaly.LATE_PACKETS, f"{late_count} {COUNTS['late_packets']}")
        self.state.names.update(self._lister.names)
        if self.anomalies:
            yield {"anomalies": anomalies_table(self.anomalies)}

    def resume(self, start: Offset, end: Offset) -> None:
        """Rebuild the state of `start` from the files that still exist."""
        new = {path for _, path in end["files"]}
        files = [file for file in self.stream.files_up_to(start) if file.path not in new]
        for file in files:
            for _ in self._tables_of(file.key, self.state.connections, is_late=False):
                pass
        self.anomalies.clear()
        self._report(
            Anomaly.STATE_LOST,
            f"the saved state of the stream is gone: {len(files)} files were read again for the "
            f"connections that were open after {start['path']}",
        )

    def _tables_of(
        self, key: Key, connections: _Connections, is_late: bool
    ) -> Iterator[dict[str, pa.Table]]:
        """Yield the tables from a file's packets, without the packets that were read before."""
        file = self._file_to_read(key)
        if file is None:
            return
        before = self._by_content.get(file.content)
        after = before.last_packet if before else 0
        self.state.files[file.path] = file
        connections.paths.append(file.path)
        connections.capture_ids.append(capture_id(file.path))
        try:
            reader = WindowReader(file.path, len(connections.paths) - 1, connections.paths)
        except CaptureError as error:
            self._report(Anomaly.NOT_A_CAPTURE, str(error), file)
            return
        yield from self._listed(self._finished(reader, file, after, connections), connections)
        file = file._replace(last_packet=reader.last_packet)
        self.state.files[file.path] = self._by_content[file.content] = file
        if before and reader.last_packet == after:
            return
        if reader.error:
            self._report(Anomaly.CAPTURE_CUT, f"{file.path}: {reader.error}", file)
        if before and is_late:
            self._report(
                Anomaly.CAPTURE_GROWN,
                f"{file.path}: grew after it was read; exchanges that cross packet {after + 1} are "
                "in two parts",
                file,
                after + 1,
            )
        elif is_late:
            self._report(
                Anomaly.CAPTURE_LATE,
                f"{file.path}: came after a later capture was read; exchanges that cross its "
                "borders are in two parts",
                file,
            )

    def _file_to_read(self, key: Key) -> CaptureFile | None:
        """Return a file of the batch as it is now; None if it is not to be read."""
        time_ns, path = key
        file = self.stream.look(path)
        if file is None or file.time_ns != time_ns:
            # a file that had no packet before and has one now belongs to the next batch
            if file is None or time_ns != NO_TIME_YET:
                how = "gone" if file is None else "replaced"
                self._report(Anomaly.CAPTURE_MISSING, f"{path}: was {how} before it was read")
            return None
        before = self._by_content.get(file.content)
        if before is None or file.size > before.size:
            return file
        original = self.stream.look(before.path)
        if path != before.path and original is not None and original.content == file.content:
            self._report(
                Anomaly.CAPTURE_REPEATED,
                f"{path}: begins like {before.path}, which was read; not read again",
                file,
            )
        self.state.files[path] = file._replace(last_packet=before.last_packet)
        return None

    def _finished(
        self, reader: WindowReader, file: CaptureFile, after: int, connections: _Connections
    ) -> Iterator[CompletedExchanges]:
        resumed = connections.resumed
        resumed.key_logs = [*self._key_logs, *self._secrets.values()]
        for number, window in enumerate(reader.windows(), 1):
            if window.secrets:
                self._add_secrets(file, number, window.secrets)
                resumed.key_logs = [*self._key_logs, *self._secrets.values()]
            segments = window.batch.segments
            if after:
                segments = segments[segments["packet"] > after]
                window.batch = SegmentBatch(window.batch.endpoints, segments)
            finished = resumed.add(window, connections.paths)
            if finished and (len(finished.rows) or len(finished.assembly.anomalies)):
                yield finished
            connections.last_window = window

    def _listed(
        self, completed: Iterable[CompletedExchanges], connections: _Connections
    ) -> Iterator[dict[str, pa.Table]]:
        for finished in completed:
            self._lister.capture_ids = connections.capture_ids
            for rows in self._lister.listed(finished):
                yield rows.tables
            yield from self._stream_anomalies(finished, connections)

    def _stream_anomalies(
        self, finished: CompletedExchanges, connections: _Connections
    ) -> Iterator[dict[str, pa.Table]]:
        """Yield faults of TCP streams and of TLS, for the selected hosts and times."""
        assembly, options = finished.assembly, self.options
        times = options.time_from_ns, options.time_to_ns
        of_host = self._lister.selection.of_assembled(assembly)
        overlaps = of_host & connections_within(assembly.connections, *times)
        exchanges = assembly.exchanges
        chosen = exchanges_within(exchanges, *times) & of_host[exchanges["connection"]]
        ids = exchanges["exchange_id"][chosen]
        has_exchange = np.isin(assembly.anomalies["exchange_id"], ids)
        stays = anomalies_within(assembly.anomalies, has_exchange, overlaps)
        assembly = replace(assembly, anomalies=assembly.anomalies[stays])
        sources = finished.sources
        if len(assembly.carried.data):
            sources = sources.carrying(assembly.carried.data)
        for table in anomaly_tables(assembly, sources, connections.capture_ids, options):
            yield {"anomalies": table}

    # -- TLS secrets inside captures --------------------------------------------------------

    def _add_secrets(self, file: CaptureFile, window_count: int, texts: list[bytes]) -> None:
        """Keep the key logs of a capture's window (by its number) for later connections."""
        places, content = self.state.secret_places, file.content
        text = self._secrets.pop(content, b"") + b"".join(part.rstrip() + b"\n" for part in texts)
        places.pop(content, None)
        if any(other.startswith(text) for other in self._secrets.values()):
            return
        # each new capture has a copy of a growing key log: the last copy has all lines
        for known in [key for key, other in self._secrets.items() if text.startswith(other)]:
            del self._secrets[known], places[known]
        self._secrets[content], places[content] = text, (file.path, window_count)
        if len(places) > SECRET_FILES_MAX:
            self._forget_secrets(next(iter(places)), "many others came since")

    def _read_secrets_again(self, new: list[str]) -> None:
        """Read the key logs of captures from earlier batches; `new` are paths that may be moved
        captures."""
        known = {file.content: file for file in self.state.files.values()}
        known |= {file.content: file for file in map(self.stream.look, new) if file is not None}
        for content, (path, window_count) in list(self.state.secret_places.items()):
            path = known[content].path if content in known else path
            file = self.stream.look(path)
            if file is None or file.content != content:
                self._forget_secrets(content, "the file is gone")
            else:
                self._secrets[content] = _secrets_in(path, window_count, file.changed_ns)

    def _forget_secrets(self, content: bytes, why: str) -> None:
        self._secrets.pop(content, None)
        path, _ = self.state.secret_places.pop(content)
        self._report(
            Anomaly.NOT_DECRYPTED,
            f"{path}: its TLS secrets are known no more, since {why}; connections that need them "
            "stay encrypted from here on",
        )

    def _report(
        self,
        kind: Anomaly,
        detail: str,
        file: CaptureFile | None = None,
        packet: int | None = None,
    ) -> None:
        self.anomalies.append(
            AnomalyRow(
                kind,
                detail,
                capture_id=capture_id(file.path) if file else None,
                packet=packet,
                byte_count=file.size if file else None,
            )
        )
        if SEVERITY[kind] != INFO:
            _log.warning("%s", detail)


def _new_connections(options: Options) -> _Connections:
    return _Connections(ConnectionCarry(options.stream_options))


@lru_cache(SECRET_FILES_MAX)
def _secrets_in(path: str, window_count: int, changed_ns: int) -> bytes:
    """Return the key logs in a capture's first windows; a new `changed_ns` reads the file again."""
    windows = islice(WindowReader(path, 0, [path]).windows(), window_count)
    return b"".join(text.rstrip() + b"\n" for window in windows for text in window.secrets)


def _is_new(file: CaptureFile, before: CaptureFile | None) -> bool:
    """Return whether a file or a part of it was not read yet; `before` is the read file of this
    path."""
    if before is None or file.content != before.content:
        return True
    return file.size > before.size and file.time_ns != NO_TIME_YET


def _key(offset: Offset) -> Key:
    return int(offset["time_ns"]), str(offset["path"])
