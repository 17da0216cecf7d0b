"""The saved state of a table set, from which a later `--append` continues; files in `_state/`.

`append` describes the whole.
"""

from __future__ import annotations

import itertools
import os
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kdissect.arrays import Ints
from kdissect.capture.segments import SEGMENT, SegmentBatch
from kdissect.errors import CaptureError
from kdissect.pipeline.cluster import NamesUsed
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.set_folder import SetFolder
from kdissect.pipeline.step_rows import ENDED_CONNECTIONS, OPEN_CONNECTIONS
from kdissect.resume.open_connection import (
    OpenConnection,
    pack_connections,
    rows_of,
    unpack_connections,
)
from kdissect.stories.events import Collector, Packed, unpack
from kdissect.tables.arrow_arrays import plain
from kdissect.tables.schemas import FIXED_TABLES

STATE_FOLDER = "_state"  # readers of tables skip folders with a leading underscore
OPEN_FILES, EVENT_FILES, KNOWN_FILE = (
    f"{STATE_FOLDER}/open",
    f"{STATE_FOLDER}/events",
    f"{STATE_FOLDER}/known",
)
PART_BYTES = 32 << 20  # bytes of states packed together
# What a run counts that keeps state, with the text for each.
COUNTS = {
    "late_packets": "packets came when the rows that they belong to were complete",
    "late_names": "names of topics or users became known that earlier rows lack",
    "carry_limits": "connections go on that a limit ended, or for which there are no TLS secrets "
    "any more",
    "open_exchanges": "requests or responses are not complete: the next --append continues them",
}
_MAGIC = b"kdissect state 1\n"


@dataclass(frozen=True, slots=True)
class StateFiles:
    """Writes the state's files in the tasks of a run; picklable."""

    out: str
    run_id: str

    def write(self, kind: str, parts: Iterable[bytes]) -> dict[str, Any]:
        """Write a file of kind OPEN_FILES, EVENT_FILES or KNOWN_FILE; returns the fields of its
        StagedFile.

        Only the user may read it (mode 0600), because it holds captured bytes.
        """
        place = SetFolder(self.out)
        name = place.staged(self.run_id, "state", f"{kind}-{uuid.uuid4().hex}-{self.run_id}")
        path = Path(self.out, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_MAGIC)
            for part in parts:
                packed = pa.compress(part, codec="zstd", asbytes=True)
                file.write(struct.pack("<QQ", len(part), len(packed)))
                file.write(packed)
        return {"table": kind, "path": name, "row_count": 0}


def read_state(path: str) -> Iterator[bytes]:
    """Yield the parts of a state file. Raises CaptureError if it is another file or incomplete."""
    try:
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CaptureError(f"{path}: is no state of a table set")
            while head := file.read(16):
                size, packed_size = struct.unpack("<QQ", head) if len(head) == 16 else (0, 1 << 62)
                packed = file.read(min(packed_size, os.fstat(file.fileno()).st_size))
                if len(packed) != packed_size:
                    raise CaptureError(f"{path}: ends in the middle")
                yield pa.decompress(packed, size, codec="zstd", asbytes=True)
    except (OSError, pa.ArrowException) as error:
        raise CaptureError(f"{path}: not readable ({error})") from error


# -- connections ----------------------------------------------------------------------------


def write_connections(files: StateFiles, connections: list[OpenConnection]) -> dict[str, Any]:
    """Write a file of OPEN_FILES; returns the fields of its StagedFile."""
    pieces = _in_pieces(connections, PART_BYTES)
    return files.write(OPEN_FILES, (pack_connections(some) for some in pieces))


def connection_pieces(
    path: str, bucket_of: Callable[[SegmentBatch, int], Ints], bucket_count: int, bytes_max: int
) -> Iterator[tuple[int, bytes]]:
    """Yield (bucket of this run, packed connections) from a file of OPEN_FILES."""
    for data in read_state(path):
        try:
            connections = unpack_connections(data)
        except ValueError as error:
            raise CaptureError(f"{path}: not readable ({error})") from error
        endpoints = rows_of(connections)["endpoints"].copy()
        key = bucket_of(SegmentBatch(endpoints, np.zeros(0, SEGMENT)), bucket_count)
        for bucket in np.unique(key).tolist():
            in_bucket = [connections[row] for row in np.flatnonzero(key == bucket).tolist()]
            for some in _in_pieces(in_bucket, bytes_max):
                yield bucket, pack_connections(some)


def _in_pieces(connections: list[OpenConnection], bytes_max: int) -> Iterator[list[OpenConnection]]:
    sizes = np.array([one.size + 1024 for one in connections], np.int64)
    number = (np.cumsum(sizes) - sizes) // bytes_max
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(connections)]
    for low, high in itertools.pairwise(bounds):
        if low < high:
            yield connections[low:high]


def continued_connections(
    plan: RunPlan, now: dict[str, list[pa.Table]]
) -> Iterator[tuple[str, pa.Table]]:
    """(table or OPEN_CONNECTIONS, rows) of connections that go on from run to run: the rows of this
    run with what messages and handshakes told the runs before. Counts are whole already."""
    schema = FIXED_TABLES["connections"]
    files = plan.before.connection_files if plan.before else ()
    earlier = pa.concat_tables(
        [schema.empty_table(), *(pq.read_table(path, schema=schema) for path in files)]
    )
    seen = [schema.empty_table()["connection_id"]]
    for name, target in ((OPEN_CONNECTIONS, OPEN_CONNECTIONS), (ENDED_CONNECTIONS, "connections")):
        for table in now.get(name, ()):
            place = pc.index_in(table["connection_id"], earlier["connection_id"])
            before = earlier.take(place)
            table = plain(table, schema)
            pairs = zip(table.columns, before.columns, strict=True)
            table = pa.table([_either(*pair) for pair in pairs], schema=schema)
            seen.append(table["connection_id"])
            yield target, table
    known = pa.chunked_array([chunk for column in seen for chunk in column.chunks], pa.int64())
    others = earlier.filter(pc.invert(pc.is_in(earlier["connection_id"], value_set=known)))
    if others.num_rows:
        yield OPEN_CONNECTIONS, others


def _either(now: pa.ChunkedArray, before: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The values of this run; those of the runs before for null, and before those of a list."""
    if not pa.types.is_list(now.type):
        return pc.coalesce(now, before)
    lists = zip(before.to_pylist(), now.to_pylist(), strict=True)
    both = [list(dict.fromkeys([*(one or ()), *(two or ())])) for one, two in lists]
    return pa.array(both, now.type)


# -- events and counts ----------------------------------------------------------------------


def event_pieces(path: str, key_count: int) -> Iterator[Packed]:
    """Yield the events of a file of EVENT_FILES, by key of this run."""
    collector = Collector(key_count)
    for name, table in unpack(list(read_state(path))).items():
        collector.add(name, table)
    yield from collector.packed()


def merged(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the `state` of all results of a run."""
    state_of_run: dict[str, Any] = {}
    used, files = NamesUsed(), []
    for state in states:
        files += state.get("files", ())
        used.merge(NamesUsed.from_json(state.get("names_used", {})))
        state_of_run |= state
    return state_of_run | {"files": files, "names_used": used.to_json()}
