"""What a run keeps for `--append`, as its steps see it: files of the state, lanes of rows.

See `append` for the whole, `stream.rejoined` for what is kept of connections and why.
"""

from __future__ import annotations

import json
import os
import struct
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SegmentBatch
from kdissect.errors import CaptureError
from kdissect.kafka.assembly import CARRIED, Assembly, Carried, TlsFacts
from kdissect.pipeline.decoder import SECRET_APIS
from kdissect.pipeline.late import Late
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.table_writer import STAGING
from kdissect.resume.rejoined import FINAL, OPEN, Keeper, Kept, Rejoined, joined_batch, rejoin
from kdissect.resume.tails import Keeping, Open
from kdissect.stories.events import Collector, Packed, unpack
from kdissect.tables.connections import ConnectionFacts

if TYPE_CHECKING:
    from kdissect.pipeline.facts import Facts
    from kdissect.pipeline.options import Options

STATE = "_state"  # tables skip folders that begin so
OPEN_FILES, EVENT_FILES, KNOWN_FILE = f"{STATE}/open", f"{STATE}/events", f"{STATE}/known"
_MAGIC = b"kdissect state 1\n"


@dataclass(frozen=True, slots=True)
class StateFiles:
    """Where the tasks of a run leave files of the state; picklable."""

    out: str
    run_id: str

    def write(self, kind: str, parts: Iterable[bytes]) -> dict[str, Any]:
        """A file of OPEN_FILES, EVENT_FILES or KNOWN_FILE; what a StagedFile says of it.

        Nobody else may read it: it holds bytes of the captures as they are.
        """
        name = f"state-{uuid.uuid4().hex}"
        path = Path(self.out) / STAGING / self.run_id / name
        size = 0
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_MAGIC)
            for part in parts:
                packed = pa.compress(part, codec="zstd", asbytes=True)
                file.write(struct.pack("<QQ", len(part), len(packed)))
                file.write(packed)
            size = file.tell()
        return {"table": kind, "path": name, "row_count": 0, "byte_count": size}


def read_state(path: str) -> Iterator[bytes]:
    """The parts of a file of the state. Raises CaptureError for a file that is none, or is cut."""
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


class Lane(NamedTuple):
    """Rows that are final, or those that are not. exchanges: which they are, of the assembly's;
    its anomalies are those of the lane. connections: bool by row."""

    is_final: bool
    exchanges: npt.NDArray[np.int64]
    assembly: Assembly
    connections: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Bucket:
    """The connections of a bucket, those that go on and new ones.

    kept None: nothing is kept (yet), because of `reason`. unfit: why the rows are not what one run
    over all would give.
    """

    assembly: Assembly
    sources: Sources
    run: Rejoined
    unfit: str | None
    kept: Kept | None = None
    reason: str | None = None
    keeper: Keeper | None = None  # while it is found out

    def sort_out(self, options: Options, end_ns: int) -> None:
        """Find out which exchanges are final; end_ns: of the latest packet of all captures."""
        if options.keylog and bool(self.assembly.connections["is_tls"].any()):
            self.reason = "TLS connections are decrypted from their beginning on"
            return
        secret = frozenset() if options.reveal_secrets else SECRET_APIS
        keeping = replace(Keeping(end_ns, secret_apis=secret), **KEEPING)
        self.keeper = Keeper(self.run, self.sources, options.stream_options, keeping)

    def surely_final(self) -> npt.NDArray[np.bool_]:
        """By exchange: it has rows, and they are final whatever is kept."""
        if self.keeper is None:
            return ~self.run.is_shown
        return self.keeper.is_done & ~self.run.is_shown

    def keep(self) -> None:
        """Find out what goes on. Before anything is inferred: a later run compares the rows."""
        if self.keeper is None:
            return
        self.kept = self.keeper.kept()
        if self.kept is None:
            self.reason = "more is open than can be kept"
        elif self.kept.is_secret:
            self.reason = "a message with secrets is not complete at the end"
        self.keeper = None

    def lanes(self) -> list[Lane]:
        if self.kept is None:
            every = np.ones(len(self.assembly.connections), np.bool_)
            return [Lane(True, np.flatnonzero(~self.run.is_shown), self.assembly, every)]
        return [
            Lane(
                lane == FINAL,
                np.flatnonzero(self.kept.exchanges == lane),
                replace(
                    self.assembly, anomalies=self.assembly.anomalies[self.kept.anomalies == lane]
                ),
                self.kept.connections == lane,
            )
            for lane in (FINAL, OPEN)
        ]


def is_small(batch: SegmentBatch, options: Options) -> bool:
    """Whether a bucket is small enough to be kept open: all of it is assembled in memory."""
    few = len(batch.endpoints) <= options.limits.connections
    return few and len(batch.segments) <= SEGMENTS_MAX


def reopened(plan: RunPlan, sources: Sources, batches: list[SegmentBatch], before: Open) -> Bucket:
    """Assemble a bucket; `batches` is emptied."""
    options = plan.options.stream_options
    old_count = plan.before.captures if plan.before else 0
    if old_count:
        sources = sources.standing_in(old_count, before.data)
    batch, pairs, at = joined_batch(before, batches)
    batches.clear()
    sources = sources.staged(batch.segments)
    run = rejoin(before, batch, pairs, at, sources, options, plan.key_logs(sources), old_count)
    if len(run.assembly.carried.data):
        sources = sources.carrying(run.assembly.carried.data)
    unfit = run.unfit
    if len(pairs) > plan.options.limits.connections:
        unfit = "there are more connections than the limit"
    return Bucket(run.assembly, sources, run, unfit)


SEGMENTS_MAX = 1_000_000  # of a bucket
KEEPING: dict[str, Any] = {}  # other values of `Keeping`, for tests


def carried(plan: RunPlan, assembly: Assembly, sources: Sources) -> Assembly:
    """The assembly with bytes that were kept as carried ones, which later tasks have not else.

    They come behind those that it carries already.
    """
    old_count = plan.before.captures if plan.before else 0
    extents = assembly.extents
    rows = np.flatnonzero((extents["source"] >= 0) & (extents["source"] < old_count))
    if not len(rows):
        return assembly
    extents = extents.copy()
    data = sources.gather(extents[rows]).copy()
    length = extents["length"][rows]
    known = assembly.carried
    extents["pos"][rows] = len(known.data) + np.cumsum(length) - length
    extents["source"][rows] = len(plan.paths)
    extents["transform"][rows] = CARRIED
    data = np.concatenate([known.data, data])
    more = Carried(len(plan.paths), data, known.start, known.file_source, known.file_pos)
    return replace(assembly, extents=extents, carried=more)


# -- facts of connections -------------------------------------------------------------------


def add_facts(run: Rejoined, facts: ConnectionFacts) -> None:
    """What was told of connections before; it came first."""
    for row, told in run.facts.items():
        ids, software, mechanism, principal, tls = told
        now = facts.client_ids.get(row, [])
        if ids or now:
            facts.client_ids[row] = [*ids, *(text for text in now if text not in ids)]
        if software is not None:
            facts.software[row] = (software[0], software[1])
        if mechanism is not None:
            facts.mechanism[row] = mechanism
        if principal is not None:
            facts.principal[row] = principal
        if tls is not None and run.is_cut[row]:  # else the handshake is here again
            version, sni, cipher, names, subject = tls
            run.assembly.tls[row] = TlsFacts(version, sni, cipher, tuple(names), subject)


def facts_of(run: Rejoined, kept: Kept, facts: ConnectionFacts) -> dict[int, Any]:
    """`Open.facts`: what is known by now of the connections that are kept."""

    def told(connection: int) -> list[Any]:
        tls = run.assembly.tls.get(connection)
        return [
            facts.client_ids.get(connection, []),
            facts.software.get(connection),
            facts.mechanism.get(connection),
            facts.principal.get(connection),
            None if tls is None else astuple(tls),
        ]

    return {row: [told(connection) for connection in some] for row, some in kept.told.items()}


# -- rows of the state ----------------------------------------------------------------------


def open_pieces(
    path: str, bucket_of: Any, bucket_count: int, bytes_max: int
) -> Iterator[tuple[int, bytes]]:
    """What a file of OPEN_FILES keeps, by bucket of this run."""
    for data in read_state(path):
        some = Open.from_bytes(data)
        key = bucket_of(SegmentBatch(some.endpoints, some.segments), bucket_count)
        for bucket, part in some.by_key(key, bytes_max):
            yield bucket, part.to_bytes()


def event_pieces(path: str, key_count: int) -> Iterator[Packed]:
    """The events of a file of EVENT_FILES, by key of this run."""
    collector = Collector(key_count)
    for name, table in unpack(list(read_state(path))).items():
        collector.add(name, table)
    yield from collector.packed()


# -- what the driver gets -------------------------------------------------------------------


def told(bucket: Bucket, facts: ConnectionFacts, files: StateFiles | None) -> dict[str, Any]:
    """Entries of a bucket's STATS; writes what is kept of it."""
    entry: dict[str, Any] = {"unfit": bucket.unfit, "reason": bucket.reason}
    if bucket.kept is not None and files is not None:
        again = replace(bucket.kept.open, facts=facts_of(bucket.run, bucket.kept, facts))
        entry["files"] = [files.write(OPEN_FILES, [again.to_bytes()])]
        counts = enumerate(bucket.kept.duplicates.tolist())
        entry["settled"] = {str(source): count for source, count in counts if count}
    return entry


def gathered(plan: RunPlan, stats: list[dict[str, Any]], facts: Facts) -> dict[str, Any]:
    """What the entries of all buckets and splits say of the state, for the first slot's RESULT."""
    if not plan.keeps:
        return {}
    before = json.loads(plan.before.stats) if plan.before else []
    counts = {entry["source"]: dict(entry) for entry in before}
    for entry in stats:
        if "source" in entry:
            one = counts.setdefault(
                entry["source"],
                {"source": entry["source"], "packet_count": 0, "tcp_packet_count": 0,
                 "ignored": {}},
            )  # fmt: skip
            for name in ("packet_count", "tcp_packet_count"):
                one[name] += entry[name]
            for reason, count in entry["ignored"].items():
                one["ignored"][reason] = one["ignored"].get(reason, 0) + count
    for entry in stats:
        for source, count in entry.get("settled", {}).items():
            settled = counts[int(source)].setdefault("duplicates", {})
            settled[source] = settled.get(source, 0) + count
    return {
        "unfit": next((entry["unfit"] for entry in stats if entry.get("unfit")), None),
        "reason": next((entry["reason"] for entry in stats if entry.get("reason")), None),
        "files": [file for entry in stats for file in entry.get("files", ())],
        "stats": sorted(counts.values(), key=lambda one: one["source"]),
        "facts": facts.to_bytes().decode(),
    }


def merged(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The `state` of all results of a run as one."""
    found: dict[str, Any] = {}
    late = Late()
    for state in states:
        files = [*found.get("files", ()), *state.get("files", ())]
        why = {name: found.get(name) or state.get(name) for name in ("unfit", "reason")}
        found |= state | why
        found["files"] = files
        late.merge(Late.from_json(state))
    return found | late.to_json()
