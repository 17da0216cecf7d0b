"""``--append``: add new captures to an existing table set.

Theory of operation
-------------------
A run with ``--append`` or ``--keep-state`` saves the state that the next append needs, unless
`state_unavailable_reason` names an obstacle. The state consists of tables in ``_state/`` that the
manifest lists apart: ``open`` has the open connections (`resume.open_connection`) with their rows
so far; ``known`` one row of facts about topics and brokers, ids of the captures, and names that
rows lack; the others the events of groups, producers and fetch sessions.

A row of `exchanges` belongs to the run whose packets complete the exchange and those before it on
its connection, and never changes. What becomes of a request that is open at the end of a run:

    the run saves no state      a row without response
    the run saves state         no row; it prints how many are open
        an append follows       that run goes on with it: the request is open in its captures
        none follows            never a row

A run that saves state gives some connections up, as `resume.carry` describes, and so does
`assemble` those of a large bucket without saved state (SEGMENTS_MAX). Their open requests are rows
without response. A bucket with saved state is assembled in memory, however large it is.

Late bytes of rows that are written are counted, not repaired (`saved_state.COUNTS`). Rows go to two
kinds of files. *Final* files are never replaced by an append. The others are written anew by each
append, which drops the earlier ones (`table_writer.REWRITTEN`): the rows of connections that may
continue, the tables built from all events (groups, transactions, fetch sessions), `topics` and
`brokers`. So the cost of an append is that of the new captures, of the open connections, and of
reading the events once.

The steps are those of any run. The plan lists the captures of the set first but does not read them.
Each file of open connections is a task of the scan, which sends every connection to its bucket. A
bucket is one window of `resume.carry`. Bytes from captures that this run does not read travel with
their exchanges (`kafka.assembly.Carried`).

``--read-again`` reads all captures of the set: its rows are exactly those of one run over all. It
saves no state without ``--keep-state``.

If a set has no usable state, its captures are read again and must still be in place; the manifest's
`append.read_again` gives the reason.

If a run fails, the old set stays valid: `table_set.commit` replaces the manifest last, and files
that both manifests list do not move.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect import __version__
from kdissect.capture.inputs import STDIN, UNSEEN, InputFile, describe, find_captures
from kdissect.capture.object_store import is_remote
from kdissect.errors import CaptureError, OutputError
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import Before, Runner, RunPlan, hashed, planned
from kdissect.pipeline.run_tables import RunSummary
from kdissect.pipeline.saved_state import COUNTS, read_state
from kdissect.pipeline.set_folder import SetFolder
from kdissect.pipeline.step_rows import STATE, STATE_KNOWN, STATE_OPEN
from kdissect.pipeline.table_set import MANIFEST, absolute, dataset, has_set, read_manifest
from kdissect.stories.events import SCHEMAS

DISORDER_NS = 100_000_000  # a new capture may begin this long before the end of the set

# Options that change the rows. The others change how the work is done, or only add information.
_SAME = (
    *("reveal_secrets", "payload", "decode_values", "partition_by"),
    *("hosts", "time_from_ns", "time_to_ns", "limits"),
)


def extended(
    out: str, paths: Sequence[str], options: Options, reason: str = ""
) -> tuple[list[str], Options]:
    """(captures of the set at `out` followed by the new ones, the options merged from both).

    Without a set at `out`: the new captures alone. reason: why the old captures must be read again;
    it becomes part of the error. Raises CaptureError if a capture of the set is gone or was
    replaced, OutputError if the set was made with other options.
    """
    if not has_set(out):
        return list(paths), options
    manifest = read_manifest(out)
    before = manifest["options"]
    _check_same(out, before, options)
    written = SetFolder(out).written_time(MANIFEST)
    kept = [
        str(item["path"])
        for item in manifest["inputs"]
        if _is_there(out, item, written, f"; it must be read again: {reason}" if reason else "")
    ]
    ports = dict.fromkeys([*before["ports"], *options.ports])
    keylog = dict.fromkeys([*before["keylog"], *options.keylog])
    if options.keylog:  # a key log named now may replace one that is gone
        keylog = {path: None for path in keylog if path in options.keylog or os.path.isfile(path)}
    return (
        [*kept, *(path for path in paths if path not in kept)],
        replace(options, ports=tuple(ports), keylog=tuple(keylog)),
    )


def _is_there(out: str, item: dict[str, Any], written: float, why: str) -> bool:
    """Return whether a capture can be read again; a file that was no capture is not.

    written: when the set was, in s since 1970. why: the end of an error. Raises CaptureError if it
    is gone, or has lost the bytes that were read.
    """
    if not item["is_capture"]:
        return False
    if is_remote(item["path"]):
        return True  # checked when it is opened
    path = Path(item["path"])
    if not path.is_file():
        raise CaptureError(f"{path}: the tables in {out} were made from it, and it is gone{why}")
    state = path.stat()
    if state.st_size < item["size"]:
        raise CaptureError(
            f"{path}: the tables in {out} were made from it when it had {item['size']} bytes; "
            f"it has {state.st_size} now{why}"
        )
    is_new = state.st_mtime > written or state.st_size > item["size"]
    if is_new and item["sha256"] not in (None, hashed(str(path), item["size"])):
        raise CaptureError(
            f"{path}: the tables in {out} were made from other bytes of that name{why}"
        )
    return True


def _check_same(out: str, before: dict[str, Any], options: Options) -> None:
    now = options.to_json()
    for name in _SAME:
        if before.get(name) != now[name]:
            raise OutputError(
                f"{out}: was made with {name} = {before.get(name)!r}, not {now[name]!r}; "
                "--append needs the same"
            )


# -- appending by state ----------------------------------------------------------------------


class ReadAgainError(Exception):
    """All captures of the set must be read again; the message gives the reason."""


@dataclass(slots=True)
class AppendPlan:
    """An existing set, its saved state, and the inputs that are new to it.

    notes: on named files that are left out.
    """

    manifest: dict[str, Any]
    before: Before
    options: Options
    inputs: list[InputFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def final(self) -> dict[str, dict[str, Any]]:
        """By table: row count and files that no append replaces."""
        tables: dict[str, dict[str, Any]] = self.manifest["state"]["final"]
        return tables


def append_plan(
    out: str, paths: Sequence[str], options: Options, read_again: bool = False
) -> AppendPlan | None:
    """Return the plan of an append to the set at `out` from its saved state; None without a set.

    Raises ReadAgainError if the captures of the set must be read again, or `read_again` is set;
    CaptureError if a named file is missing or no capture; OutputError if the set was made with
    other options.
    """
    if not has_set(out):
        return None
    manifest = read_manifest(out)
    before = manifest["options"]
    _check_same(out, before, options)
    if read_again:
        raise ReadAgainError("--read-again")
    state = manifest.get("state") or {"missing": "it was written without --keep-state"}
    if "missing" in state:
        raise ReadAgainError(state["missing"])
    if manifest.get("program_version") != __version__:
        raise ReadAgainError("another version of kdissect wrote the set")
    if set(options.ports) - set(before["ports"]) or set(options.keylog) - set(before["keylog"]):
        raise ReadAgainError("there are new port hints or key logs")
    if any(path == STDIN for path in paths):
        raise ReadAgainError("the new captures come from standard input")
    names = [name for entry in state["tables"].values() for name in entry["files"]]
    for name, is_there in zip(names, SetFolder(out).has(names), strict=True):
        if not is_there:
            raise ReadAgainError(f"{os.path.join(out, name)} is gone")
    files = {
        table: [os.path.join(absolute(out), name) for name in entry["files"]]
        for table, entry in state["tables"].items()
    }
    (path,) = files[STATE_KNOWN]
    known = json.loads(read_state(path)["document"][0].as_py())
    append = AppendPlan(
        manifest,
        Before(
            known=known,
            open_files=tuple(files.get(STATE_OPEN, ())),
            event_files=tuple(
                path for name in SCHEMAS for path in files.get(f"{STATE}/{name}", ())
            ),
            capture_count=len(known["capture_ids"]),
            byte_count=manifest["totals"]["bytes"],
        ),
        replace(
            options,
            ports=tuple(before["ports"]),
            # a connection without its key log is cut and counted (`carry_limits` in COUNTS)
            keylog=tuple(path for path in before["keylog"] if os.path.isfile(path)),
        ),
    )
    listed = {
        name: item
        for item in manifest["inputs"]
        if item["is_capture"]
        for name in (item["path"], item.get("real_path", os.path.realpath(item["path"])))
    }
    for item in find_captures(list(paths)):
        if item.format == UNSEEN:
            item = describe(item.path)
        earlier = listed.get(item.path) or listed.get(os.path.realpath(item.path))
        if earlier is None:
            append.inputs.append(item)
        elif not is_the_same(item, earlier, known["changed_ns"]):
            raise ReadAgainError(f"{item.path} is not what it was")
        else:
            append.notes.append(f"{item.path}: is in {out} already; left out")
    append.inputs, notes = captures_of(append.inputs)
    append.notes += notes
    return append


def captures_of(inputs: list[InputFile]) -> tuple[list[InputFile], list[str]]:
    """The inputs without those that are no captures, and a note on each of these.

    A set with state lists none of them: it cannot replace their rows once they have packets.
    """
    others = [item for item in inputs if item.format == "unknown"]
    kept = [item for item in inputs if item.format != "unknown"]
    return kept, [f"{item.path}: {item.error}; left out" for item in others]


def is_the_same(item: InputFile, listed: dict[str, Any], changed_ns: dict[str, int]) -> bool:
    """Return whether an input still has the bytes that were read: a file by size and time of
    change, or by its hash; an object by the store's tag."""
    if is_remote(item.path):
        return item.tag == listed["etag"]
    state = os.stat(item.path)
    if state.st_size != listed["size"]:
        return False
    is_unchanged = state.st_mtime_ns == changed_ns.get(item.path)
    return is_unchanged or hashed(item.path, state.st_size) == listed["sha256"]


@contextmanager
def planned_append(
    append: AppendPlan, spool_dir: str | None, in_tasks: Runner | None
) -> Iterator[RunPlan]:
    """The plan of a run over the new inputs. in_tasks: as for `planned`.

    Raises ReadAgainError if they begin before the set ends, or have IP fragments or secrets of TLS.
    """
    with planned(append.inputs, append.options, spool_dir, in_tasks) as plan:
        times = [info.first_time_ns for info in plan.captures if info.first_time_ns is not None]
        if times and min(times) < append.before.known["end_ns"] - DISORDER_NS:
            raise ReadAgainError("the new captures begin before the end of those in the set")
        if plan.has_fragments:
            raise ReadAgainError("the new captures have IP fragments")
        if any(info.secrets for info in plan.captures):
            raise ReadAgainError("the new captures hold secrets of TLS")
        yield after_set(plan, append)


def after_set(plan: RunPlan, append: AppendPlan) -> RunPlan:
    """The plan with room for the captures of the set. No step reads those captures."""
    count = append.before.capture_count
    earlier = np.array(append.before.known["capture_ids"], np.int64)
    nothing = InputFile(os.devnull, "unknown", data_path=os.devnull)
    return replace(
        plan,
        files=(*[nothing] * count, *plan.files),
        sizes=np.append(np.zeros(count, np.int64), plan.sizes),
        captures=tuple(
            replace(info, source=info.source + count) if info.source >= 0 else info
            for info in plan.captures
        ),
        capture_ids=np.append(earlier, plan.capture_ids),
        end_ns=max(append.before.known["end_ns"], plan.end_ns),
        splits=tuple(replace(split, source=split.source + count) for split in plan.splits),
        keeps=True,
        before=append.before,
    )


# -- what a run leaves ----------------------------------------------------------------------


def state_unavailable_reason(options: Options, plan: RunPlan) -> str | None:
    """Return why a run cannot save its state; None if it can."""
    if options.time_from_ns is not None or options.time_to_ns is not None:
        return "the set is of a range of times"
    if options.payload != "full":
        return "a state would hold records as captured, but --payload limits their values"
    if plan.has_fragments:
        return "the captures have IP fragments"
    if any(info.secrets for info in plan.captures):
        return "the captures hold secrets of TLS"
    return None


def state_to_save(plan: RunPlan, summary: RunSummary, append: AppendPlan | None) -> pa.Table:
    """The row of STATE_KNOWN of a run that saved state.

    capture_ids: of all captures of the set. facts: packed `Cluster`. end_ns: time of the latest
    packet. changed_ns: times of change of local captures. names_used: `NamesUsed`.
    """
    known = append.before.known if append else {"names_used": [], "changed_ns": {}}
    used = {(kind, name) for kind, name in [*known["names_used"], *summary.names_used]}
    document = {
        "capture_ids": plan.capture_ids[: len(plan.sizes)].tolist(),
        "facts": summary.facts.to_bytes().decode(),
        "end_ns": plan.end_ns,
        "changed_ns": known["changed_ns"] | _changed_ns(plan),
        "names_used": sorted(used),
    }
    return pa.table({"document": [json.dumps(document)]})


def _changed_ns(plan: RunPlan) -> dict[str, int]:
    """Times of change (ns since 1970) of the captures that this run read, for local files."""
    paths = [info.path for info in plan.captures if os.path.isfile(info.path)]
    return {path: os.stat(path).st_mtime_ns for path in paths}


def count_notes(counts: dict[str, int]) -> list[str]:
    """One note per kind of COUNTS."""
    return [f"{counts[name]:,} {text}" for name, text in COUNTS.items() if counts.get(name)]


def late_secrets_note(out: str, plan: RunPlan, append: AppendPlan) -> list[str]:
    """A note if a key log has changed and connections of the set at `out` were not decrypted."""
    if not set(plan.key_log_hashes) - set(append.manifest.get("key_logs", plan.key_log_hashes)):
        return []
    connections = dataset(out, append.manifest["tables"]["connections"]["files"])
    count = connections.count_rows(filter=pc.field("protocol") == "tls")
    text = "connections were not decrypted, and a key log has changed since: --read-again uses it"
    return [f"{count:,} {text}"] if count else []


def unread(out: str, inputs: list[InputFile]) -> list[InputFile]:
    """The inputs whose paths are not listed in the set at `out`."""
    listed = {item["path"] for item in read_manifest(out)["inputs"]} if has_set(out) else set()
    return [item for item in inputs if item.path not in listed]
