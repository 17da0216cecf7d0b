"""The saved state of a table set, from which a later `--append` continues; files in `_state/`.

`append` describes the whole.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kdissect.capture.segments import ENDPOINTS, SegmentBatch
from kdissect.errors import CaptureError
from kdissect.kafka.assembly import Anomaly, Assembly, Certificate, TlsFacts
from kdissect.pipeline.facts import CaptureFacts, NamesUsed
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.table_writer import STAGING
from kdissect.resume.carry import AppendedWindow, no_segments
from kdissect.resume.connection_state import ConnectionState, pack_states, unpack_states
from kdissect.stories.events import Collector, Packed, unpack
from kdissect.tables.arrow_arrays import Ints
from kdissect.tables.connections import ConnectionFacts

STATE_FOLDER = "_state"  # readers of tables skip folders with a leading underscore
OPEN_FILES, EVENT_FILES, KNOWN_FILE = (
    f"{STATE_FOLDER}/open",
    f"{STATE_FOLDER}/events",
    f"{STATE_FOLDER}/known",
)
PART_BYTES = 32 << 20  # bytes of states packed together
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


def write_connections(files: StateFiles, states: Sequence[ConnectionState]) -> dict[str, Any]:
    """Write a file of OPEN_FILES; returns the fields of its StagedFile."""
    return files.write(OPEN_FILES, (pack_states(some) for some in _in_pieces(states, PART_BYTES)))


def connection_pieces(
    path: str, bucket_of: Callable[[SegmentBatch, int], Ints], bucket_count: int, bytes_max: int
) -> Iterator[tuple[int, bytes]]:
    """Yield (bucket of this run, packed states) from a file of OPEN_FILES."""
    for data in read_state(path):
        try:
            states = unpack_states(data)
        except ValueError as error:
            raise CaptureError(f"{path}: not readable ({error})") from error
        endpoints = np.frombuffer(b"".join(state.endpoints for state in states), ENDPOINTS)
        key = bucket_of(SegmentBatch(endpoints, no_segments().segments), bucket_count)
        for bucket in np.unique(key).tolist():
            in_bucket = [states[row] for row in np.flatnonzero(key == bucket).tolist()]
            for some in _in_pieces(in_bucket, bytes_max):
                yield bucket, pack_states(some)


def _in_pieces(
    states: Sequence[ConnectionState], bytes_max: int
) -> Iterator[Sequence[ConnectionState]]:
    sizes = np.array([state.size + 1024 for state in states], np.int64)
    number = (np.cumsum(sizes) - sizes) // bytes_max
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(states)]
    for low, high in itertools.pairwise(bounds):
        if low < high:
            yield states[low:high]


def add_earlier_facts(appended: AppendedWindow, facts: ConnectionFacts) -> None:
    """Add facts that earlier runs found about the connections; earlier values come first."""
    tls = appended.assembly.tls
    for row, (
        ids,
        software,
        mechanism,
        principal,
        earlier_tls,
        _,
    ) in appended.earlier_facts.items():
        now = facts.client_ids.get(row, [])
        if ids or now:
            facts.client_ids[row] = [*ids, *(text for text in now if text not in ids)]
        if software is not None:
            facts.software[row] = (software[0], software[1])
        if mechanism is not None:
            facts.mechanism[row] = mechanism
        if principal is not None:
            facts.principal[row] = principal
        if earlier_tls is not None:
            version, sni, cipher, *certificates, request_alert, response_alert = earlier_tls
            one, two = map(_certificate, certificates)
            earlier = TlsFacts(version, sni, cipher, one, two, request_alert, response_alert)
            tls.setdefault(row, earlier)


def _certificate(saved: Any) -> Certificate | None:
    if saved is None:
        return None
    subject, issuer, not_before, not_after, names = saved
    return Certificate(subject, issuer, not_before, not_after, tuple(names))


def requests_seen(appended: AppendedWindow) -> Ints:
    """int64[n, 3]: distinct (connection, api key, api version) of requests, also of earlier
    runs."""
    exchanges = appended.assembly.exchanges
    requests = exchanges[(exchanges["request"]["size"] >= 0) & (exchanges["is_sasl_token"] == 0)]
    columns = [requests[name].astype(np.int64) for name in ("connection", "api_key", "api_version")]
    seen = [np.stack(columns, 1)]
    for row, facts in appended.earlier_facts.items():
        if facts[5]:
            seen.append(np.array([[row, key, version] for key, version in facts[5]], np.int64))
    return np.unique(np.concatenate(seen), axis=0)


def keep_facts(appended: AppendedWindow, facts: ConnectionFacts, seen: Ints) -> None:
    """Store facts of the open connections in their states. seen: result of `requests_seen`."""
    bounds = np.searchsorted(seen[:, 0], np.arange(len(appended.assembly.connections) + 1))
    for row, state in appended.states.items():
        tls = appended.assembly.tls.get(row)
        state.facts = [
            facts.client_ids.get(row, []),
            facts.software.get(row),
            facts.mechanism.get(row),
            facts.principal.get(row),
            None if tls is None else astuple(tls),
            seen[bounds[row] : bounds[row + 1], 1:].tolist(),
        ]


# -- events and counts ----------------------------------------------------------------------


def event_pieces(path: str, key_count: int) -> Iterator[Packed]:
    """Yield the events of a file of EVENT_FILES, by key of this run."""
    collector = Collector(key_count)
    for name, table in unpack(list(read_state(path))).items():
        collector.add(name, table)
    yield from collector.packed()


def run_state(plan: RunPlan, stats: list[dict[str, Any]], facts: CaptureFacts) -> dict[str, Any]:
    """The state built from the stats of all buckets and splits, for the first slot's RESULT."""
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
        for source, count in entry.get("duplicates", {}).items():
            duplicates = counts[int(source)].setdefault("duplicates", {})
            duplicates[source] = duplicates.get(source, 0) + count
    return {
        "reason": next((entry["reason"] for entry in stats if entry.get("reason")), None),
        "files": [file for entry in stats for file in entry.get("files", ())],
        "stats": sorted(counts.values(), key=lambda one: one["source"]),
        "facts": facts.to_bytes().decode(),
    }


def merged(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the `state` of all results of a run."""
    state_of_run: dict[str, Any] = {}
    used = NamesUsed()
    for state in states:
        files = [*state_of_run.get("files", ()), *state.get("files", ())]
        counts = {name: state_of_run.get(name, 0) + state.get(name, 0) for name in EXCEPTIONS}
        used.merge(NamesUsed.from_json(state.get("names_used", {})))
        state_of_run |= {**state, "reason": state_of_run.get("reason") or state.get("reason")}
        state_of_run |= {"files": files, **counts}
    return state_of_run | {"names_used": used.to_json()}


# Counts of differences between an append and one run over all captures, and the text for each.
EXCEPTIONS = {
    "late_packets": "packets came when the rows that they belong to were complete",
    "late_names": "names of topics or users became known that earlier rows lack",
    "carry_limits": "connections go on that a limit of the saved state ended, or for which there "
    "are no TLS secrets any more",
}


def exceptions_of(assembly: Assembly, late_count: int) -> dict[str, int]:
    """Counts of EXCEPTIONS in an assembly's anomalies. late_count: packets without a connection."""
    anomalies = assembly.anomalies
    late = anomalies["a"][anomalies["kind"] == Anomaly.LATE_PACKETS]
    limits = int((anomalies["kind"] == Anomaly.CARRY_LIMIT).sum())
    return {"late_packets": int(late.sum()) + late_count, "carry_limits": limits}
