"""``--append``: a table set and the next captures become one set.

Theory of operation
-------------------
A run with ``--append`` or ``--keep-state`` leaves beside its tables the state that the next one
needs, in files of ``_state/`` that the manifest lists: the open connections
(`resume.connection_state`), events of groups, producers and fetch sessions, and one file with the
rest: facts of topics and brokers, counts of the captures, names that rows lack.

Rows come in two kinds of files. No append reads or replaces *final* ones. The others hold *open*
rows: connections that go on and exchanges that are not complete (made of the state), the stories of
groups, transactions and fetch sessions (made of all events), and `captures`, `topics` and
`brokers`. Each append writes them anew and drops the earlier ones. So an append costs what the new
captures cost, what was open, and one look at the events.

The steps are those of any run. The plan names the captures of the set first, without reading them.
The files of open connections are tasks of the scan, which sends each connection to its bucket. A
bucket is one window of `resume.carry`. Bytes that lie in no capture of this run travel with their
exchanges (`kafka.assembly.Carried`).

The rows are those of one run over all captures, except what `saved_state.EXCEPTIONS` names. Each
exception is counted in a row of `anomalies`, and printed.

A set without a usable state is read again, from captures that must be where they were, and
`read_again` of the manifest's `append` says why. ``--read-again`` always does.

A run that fails leaves the old set: `table_set.commit` replaces the manifest last, and files that
the new one lists too stay where they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kdissect import __version__
from kdissect.capture.inputs import STDIN, InputFile, find_captures
from kdissect.capture.ip_fragments import Joined
from kdissect.capture.object_store import is_remote
from kdissect.capture.segments import SegmentBatch
from kdissect.capture.splits import CaptureInfo
from kdissect.errors import CaptureError, OutputError
from kdissect.pipeline.facts import NamesUsed
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import capture_id, hashed, planned_inputs
from kdissect.pipeline.run_plan import Before, RunPlan
from kdissect.pipeline.saved_state import EXCEPTIONS, KNOWN_FILE, StateFiles, read_state
from kdissect.pipeline.table_set import absolute, has_set, read_manifest
from kdissect.pipeline.table_writer import StagedFile

STATE_VERSION = 3
DISORDER_NS = 100_000_000  # by which a capture may begin before the end of the one before it

# Options that say what is in the rows; the others say how the work is done, or only add certainty.
_SAME = ("reveal_secrets", "payload", "decode_values", "hosts", "time_from_ns", "time_to_ns",
         "limits")  # fmt: skip


def extended(
    out: str, paths: Sequence[str], options: Options, reason: str = ""
) -> tuple[list[str], Options]:
    """(the captures of the set at `out` and the new ones, options of both).

    Where there is no set yet, the new ones alone. Raises CaptureError for a capture of the set that
    is gone or was cut, OutputError where the set was made with other options. reason: why they are
    read again, for that error.
    """
    if not has_set(out):
        return list(paths), options
    manifest = read_manifest(out)
    before = manifest["options"]
    _check_same(out, before, options)
    kept = [str(item["path"]) for item in manifest["inputs"] if _is_there(out, item, reason)]
    ports = dict.fromkeys([*before.get("ports", ()), *options.ports])
    keylog = dict.fromkeys([*before.get("keylog", ()), *options.keylog])
    return (
        [*kept, *(path for path in paths if path not in kept)],
        replace(options, ports=tuple(ports), keylog=tuple(keylog)),
    )


def _is_there(out: str, item: dict[str, Any], reason: str) -> bool:
    """True for a capture that can be read again; False for what was no capture the first time."""
    if not item.get("is_capture", True):
        return False
    if is_remote(item["path"]):
        return True  # looked at when it is read
    path = Path(item["path"])
    why = f"; it must be read again: {reason}" if reason else ""
    if not path.is_file():
        raise CaptureError(f"{path}: the tables in {out} were made from it, and it is gone{why}")
    if path.stat().st_size < item["size"]:
        raise CaptureError(
            f"{path}: the tables in {out} were made from it when it had {item['size']} bytes; "
            f"it has {path.stat().st_size} now{why}"
        )
    return True


def _check_same(out: str, before: dict[str, Any], options: Options) -> None:
    now = options.to_json()
    for name in _SAME:
        if before.get(name, now[name]) != now[name]:
            raise OutputError(
                f"{out}: was made with {name} = {before[name]!r}, not {now[name]!r}; "
                "--append needs the same"
            )


# -- appending by state ----------------------------------------------------------------------


class ReadAgainError(Exception):
    """Why all captures of a set must be read again."""


@dataclass(slots=True)
class AppendPlan:
    """A set, and the inputs that are new to it (`known` ones are in it already).

    state: of the manifest; document: of its file of what was known.
    """

    manifest: dict[str, Any]
    state: dict[str, Any]
    document: dict[str, Any]
    before: Before
    options: Options
    inputs: list[InputFile]
    known: list[str] = field(default_factory=list)

    @property
    def final(self) -> dict[str, dict[str, Any]]:
        """By table: rows and files that stay."""
        found: dict[str, dict[str, Any]] = self.state["final"]
        return found


def append_plan(
    out: str, paths: Sequence[str], options: Options, read_again: bool = False
) -> AppendPlan | None:
    """How to append to the set at `out` by its state; None where there is no set.

    Raises ReadAgainError if its captures must be read again, or shall be (read_again), CaptureError
    for a named file that is missing or no capture, OutputError if the set was made with other
    options.
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
    if state["version"] != STATE_VERSION or manifest["program_version"] != __version__:
        raise ReadAgainError("another version of kdissect wrote the set")
    if set(options.ports) - set(before["ports"]) or set(options.keylog) - set(before["keylog"]):
        raise ReadAgainError("there are new port hints or key logs")
    if any(path == STDIN for path in paths):
        raise ReadAgainError("a stream can be read once only")
    if any(is_remote(path) for path in paths):
        raise ReadAgainError("the new captures are in an object store")
    root = Path(absolute(out))
    for name in (state["known"], *state["open"], *state["events"]):
        if not (root / name).is_file():
            raise ReadAgainError(f"{root / name} is gone")
    document = json.loads(next(read_state(str(root / state["known"]))))
    going = AppendPlan(
        manifest,
        state,
        document,
        Before(
            captures=len(document["captures"]),
            open_files=tuple(str(root / name) for name in state["open"]),
            event_files=tuple(str(root / name) for name in state["events"]),
            stats=json.dumps(document["stats"]).encode(),
            facts=document["facts"].encode(),
            names_used=json.dumps(document["names_used"]).encode(),
            end_ns=document["end_ns"],
            byte_count=document["byte_count"],
        ),
        replace(options, ports=tuple(before["ports"]), keylog=tuple(before["keylog"])),
        [],
    )
    listed = {item["path"]: item for item in manifest["inputs"]}
    for item in find_captures(list(paths)):
        if item.path not in listed:
            going.inputs.append(item)
        elif not is_the_same(item.path, listed[item.path], document["changed_ns"]):
            raise ReadAgainError(f"{item.path} is not what it was")
        else:
            going.known.append(item.path)
    return going


def is_the_same(path: str, known: dict[str, Any], changed_ns: dict[str, int]) -> bool:
    """Whether a file is as it was when it was read: by size and time of change, or its bytes."""
    if is_remote(path):
        return False
    found = os.stat(path)
    if found.st_size != known["size"]:
        return False
    return found.st_mtime_ns == changed_ns.get(path) or hashed(path).sha256 == known["sha256"]


@contextmanager
def planned_append(going: AppendPlan, parallelism: int, spool_dir: str | None) -> Iterator[RunPlan]:
    """The plan of a run over the new inputs; ReadAgainError where they do not come behind."""
    before = going.before
    with planned_inputs(going.inputs, going.options, parallelism, spool_dir) as plan:
        times = [info.first_time_ns for info in plan.captures if info.first_time_ns is not None]
        if times and min(times) < before.end_ns - DISORDER_NS:
            raise ReadAgainError("the new captures begin before the end of those in the set")
        yield after_set(plan, going)


def after_set(plan: RunPlan, going: AppendPlan) -> RunPlan:
    """The plan with the captures of the set before its own, which nothing reads."""
    count = going.before.captures
    new = [replace(info, source=info.source + count) for info in plan.captures if info.source >= 0]
    captures = (
        *(_info(told) for told in going.document["captures"]),
        *new,
        *(info for info in plan.captures if info.source < 0),
        *(_info(told) for told in going.document["unread"]),
    )
    return replace(
        plan,
        paths=(*[os.devnull] * count, *plan.paths),
        sizes=(*[0] * count, *plan.sizes),
        versions=(*[None] * count, *plan.versions),
        captures=captures,
        capture_ids=tuple(capture_id(info.path) for info in captures),
        splits=tuple(replace(split, source=split.source + count) for split in plan.splits),
        fragments=_moved(plan.fragments, count),
        keeps=True,
        before=going.before,
    )


def _moved(joined: Joined | None, count: int) -> Joined | None:
    """With sources behind `count` others."""
    if joined is None:
        return None
    segments, completed, faults = (
        joined.batch.segments.copy(), joined.completed.copy(), joined.faults.copy()
    )  # fmt: skip
    segments["source"] += count
    completed[:, 0] += count
    faults[:, 1] += count
    batch = SegmentBatch(joined.batch.endpoints, segments)
    return Joined(batch, completed, faults, joined.ignored_count)


def _info(told: dict[str, Any]) -> CaptureInfo:
    return CaptureInfo(**{**told, "link_types": tuple(told["link_types"]), "secrets": ()})


# -- what a run leaves ----------------------------------------------------------------------


def state_unavailable_reason(out: str, options: Options, plan: RunPlan) -> str | None:
    """Why a run keeps no state; None where it does."""
    if is_remote(out):
        return "the set is in an object store"
    if any(version is not None for version in plan.versions):
        return "its captures are in object stores"
    if options.time_from_ns is not None or options.time_to_ns is not None:
        return "the set is of a range of times"
    if options.payload != "full":
        return "what is shown of records is limited, and a state would hold them as captured"
    if plan.fragments is not None:
        return "the captures have IP fragments"
    if any(info.secrets for info in plan.captures):
        return "the captures hold secrets of TLS"
    return None


def state_to_save(
    plan: RunPlan, state: dict[str, Any], going: AppendPlan | None, files: StateFiles
) -> tuple[dict[str, Any], list[StagedFile]]:
    """(the manifest's `state`, files of it) of a run that kept what is needed."""
    reason = state.get("reason")
    if plan.fragments is not None or any(info.secrets for info in plan.captures):
        reason = "the captures have IP fragments or hold secrets of TLS"
    if reason:
        return {"missing": reason}, []
    used = NamesUsed.from_json(state["names_used"])
    changed = {}
    if going is not None:
        used.merge(NamesUsed.from_json(going.document["names_used"]))
        changed = going.document["changed_ns"]
    document = {
        "captures": [_told(info) for info in plan.captures if info.source >= 0],
        "unread": [_told(info) for info in plan.captures if info.source < 0],
        "stats": state["stats"],
        "facts": state["facts"],
        "end_ns": plan.end_ns,
        "byte_count": plan.byte_count + (plan.before.byte_count if plan.before else 0),
        "changed_ns": changed | _changed_ns(plan),
        "names_used": used.to_json(),
    }
    known = files.write(KNOWN_FILE, [json.dumps(document).encode()])
    staged = [StagedFile(**told) for told in [*state["files"], known]]
    events = going.state["events"] if going is not None else []
    return {"version": STATE_VERSION, "known": None, "open": [], "events": events}, staged


def _told(info: CaptureInfo) -> dict[str, Any]:
    return {**asdict(info), "secrets": ()}


def _changed_ns(plan: RunPlan) -> dict[str, int]:
    """Times of change of the captures that this run read, where they are files."""
    infos = plan.captures[plan.earlier_count :]
    return {
        info.path: os.stat(info.path).st_mtime_ns for info in infos if os.path.isfile(info.path)
    }


def exception_notes(state: dict[str, Any]) -> list[str]:
    """What a run could not make equal to one run over all captures."""
    counts = {name: state.get(name, 0) for name in EXCEPTIONS}
    return [f"{counts[name]:,} {EXCEPTIONS[name]}" for name in counts if counts[name]]


def unread(out: str, inputs: list[InputFile]) -> list[InputFile]:
    """The inputs that are not of the set at `out`, as far as their paths tell."""
    listed = {item["path"] for item in read_manifest(out)["inputs"]} if has_set(out) else set()
    return [item for item in inputs if item.path not in listed]
