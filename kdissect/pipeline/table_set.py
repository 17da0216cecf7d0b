"""A table set: files are staged, then published together by writing `_kdissect.json`.

The manifest names every file of the set. A run stages its files beside the old set. The commit
gives them their names, replaces the manifest, and only then removes files that the new manifest
does not list. A run that fails removes its own files only. `set_folder` has the place, its lock,
and what a killed run leaves.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from kdissect.capture.object_store import clause, is_remote
from kdissect.errors import CaptureError, EnvironmentFailed, OutputError
from kdissect.pipeline.set_folder import SetFolder, write_lock
from kdissect.pipeline.step_rows import STATE, STATE_KNOWN
from kdissect.pipeline.table_writer import StagedFile
from kdissect.tables.schemas import COUNTED_TABLES, FIXED_TABLES, FORMAT_VERSION, fixed_tables

MANIFEST = "_kdissect.json"
_NAMED_MAX = 8
Entries = dict[str, dict[str, Any]]  # by table: row count and files

# The shape of a manifest: the type or the shape of each key's value (`*`: of every other key's),
# and of a list's elements.
_ENTRIES = {"*": {"rows": int, "files": [str]}}
_SHAPE = {
    "options": {"ports": [int], "keylog": [str]},
    "inputs": [{"path": str, "size": int, "sha256": str | None, "is_capture": bool}],
    "totals": dict.fromkeys(("captures", "packets", "bytes", *COUNTED_TABLES), int),
    "timings": {"*": float | int},
    "tables": {**dict.fromkeys(FIXED_TABLES, _ENTRIES["*"]), **_ENTRIES},
}
_STATE_SHAPE = {"tables": {STATE_KNOWN: _ENTRIES["*"], **_ENTRIES}, "final": _ENTRIES}


class NoTableSetError(CaptureError):
    """There is no manifest: the path is a file, another folder, or does not exist."""


def check_out(out: str, overwrite: bool) -> None:
    """Raise OutputError unless a new table set may be written to the folder or URL `out` now."""
    with writing(out, overwrite):
        pass


@contextmanager
def writing(out: str, overwrite: bool) -> Iterator[None]:
    """Hold the lock of the set at `out`, and remove the leftovers of killed runs.

    Raises OutputError if there is a set and not `overwrite`, if `out` cannot be written, or if
    another run holds the lock.
    """
    if not out.strip():
        raise OutputError("out is empty; it names the folder for the tables")
    place = SetFolder(out)
    _check_place(place, overwrite)
    if place.is_remote:
        _remove_leftovers(place)
        with staging(out):  # a file can be written there
            pass
        yield
        return
    with write_lock(out) as is_held:
        # again, because another run may have written there before the lock was held
        _check_place(place, overwrite)
        if is_held:
            _remove_leftovers(place)
        yield


def _check_place(place: SetFolder, overwrite: bool) -> None:
    out = place.out
    try:
        if place.is_file():
            raise OutputError(f"{out}: is a file; tables need a folder")
        if place.has([MANIFEST])[0]:
            if not overwrite:
                raise OutputError(f"{out}: holds a table set already; overwrite replaces it")
        elif not place.is_free():
            raise OutputError(f"{out}: is a folder with other files; name a new or an empty one")
    except EnvironmentFailed as error:
        reason = str(error).partition(": ")[2]
        raise OutputError(f"{out}: cannot be written ({reason})") from None


def _remove_leftovers(place: SetFolder) -> None:
    try:
        listed = _listed(read_manifest(place.out)) if has_set(place.out) else set()
    except CaptureError:
        return  # without a manifest it is unknown which files belong to the set
    place.remove_unlisted(listed, is_alone=True)


@contextmanager
def staging(out: str) -> Iterator[str]:
    """Yield the id of a new run; its staged files are removed at the end, also after an error."""
    place, run_id, is_failed = SetFolder(out), uuid.uuid4().hex[:12], True
    try:
        place.begin(run_id)
        yield run_id
        is_failed = False
    finally:
        with suppress(EnvironmentFailed, CaptureError):  # files that stay are in no manifest
            listed = _listed(read_manifest(out)) if has_set(out) else set()
            place.end(run_id, listed, is_failed=is_failed)


def commit(
    out: str,
    run_id: str,
    files: list[StagedFile],
    manifest: dict[str, Any],
    kept: Entries | None = None,
) -> dict[str, Any]:
    """Publish the staged files, write the manifest and return it.

    After the manifest is written nothing can fail; files that cannot be removed stay until the next
    run. `manifest` gets `format_version`, `tables` and the counts of rows here. Fixed tables
    without rows get an empty file, so that every reader finds their schema. kept: row counts and
    files of the old set that stay in the new one. Tables of a saved state (`append`) are listed
    apart, with the files of all tables that the next append keeps.
    """
    place = SetFolder(out)
    tables: Entries = {name: {"rows": 0, "files": []} for name in FIXED_TABLES}
    final: Entries = {}
    for table, entry in (kept or {}).items():
        for entries in (tables, final):
            entries[table] = {"rows": entry["rows"], "files": list(entry["files"])}
    for file in sorted(files, key=lambda file: (file.table, file.path)):
        name = place.publish(file.path)
        for entries in (tables, final) if file.is_final else (tables,):
            entry = entries.setdefault(file.table, {"rows": 0, "files": []})
            entry["rows"] += file.row_count
            entry["files"].append(name)
    state = {name: tables.pop(name) for name in list(tables) if name.startswith(STATE)}
    if state:
        manifest = {**manifest, "state": {**manifest["state"], "tables": state, "final": final}}
    for name, schema in _empty_files(tables, run_id, manifest):
        buffer = pa.BufferOutputStream()
        pq.write_table(schema.empty_table(), buffer)
        place.write(name, buffer.getvalue().to_pybytes())
    counts = {name: tables[name]["rows"] for name in COUNTED_TABLES}
    totals = {**manifest.get("totals", {}), **counts}
    document = {"format_version": FORMAT_VERSION, **manifest, "totals": totals, "tables": tables}
    listed = _listed(document)
    # the manifest must not list a file that another run removed
    if not place.is_open(run_id) or not all(place.has(sorted(listed))):
        raise EnvironmentFailed(f"{out}: files of this run were removed by another one")
    text = (json.dumps(document, indent=1) + "\n").encode()
    staged = place.staged(run_id, "commit", MANIFEST)
    try:
        place.write(staged, text)
        place.publish(staged)
    except EnvironmentFailed:
        # the write may have succeeded although its response was lost
        if place.read(MANIFEST) != text:
            raise
    with suppress(EnvironmentFailed):
        place.remove_unlisted(listed, is_alone=False)
    return document


def _empty_files(
    tables: dict[str, dict[str, Any]], run_id: str, manifest: dict[str, Any]
) -> Iterator[tuple[str, pa.Schema]]:
    """(name, schema) of an empty file for each table without rows; also entered in `tables`."""
    for table, schema in fixed_tables(manifest.get("options", {}).get("decode_values")).items():
        if not tables[table]["files"]:
            name = f"{table}/part-00000-{run_id}.parquet"
            tables[table]["files"].append(name)
            yield name, schema


def _listed(document: dict[str, Any] | None) -> set[str]:
    """The files that a manifest lists, including those of the state."""
    if not document:
        return set()
    state = (document.get("state") or {}).get("tables", {})
    entries = [*document["tables"].values(), *state.values()]
    return {name for entry in entries for name in entry["files"]}


def has_set(out: str) -> bool:
    """Return whether there is a manifest of a table set at `out`."""
    return SetFolder(out).has([MANIFEST])[0]


def absolute(out: str) -> str:
    """`out` as an absolute path, or the URL unchanged."""
    return out if is_remote(out) else os.path.abspath(out)


def dataset(out: str, names: list[str]) -> pads.Dataset:
    """A table's files as a dataset. Raises CaptureError if one is missing or damaged."""
    place = SetFolder(out)
    for name, is_there in zip(names, place.has(names), strict=True):
        if not is_there:
            gone = f"{out.rstrip('/')}/{name}"
            raise CaptureError(f"{gone}: listed in the manifest, but not there")
    paths = [place.path(name) for name in names]
    try:
        return pads.dataset(paths, format="parquet", filesystem=place.store)
    except (pa.ArrowException, OSError) as error:
        is_store = place.is_remote and isinstance(error, OSError)
        failure = EnvironmentFailed if is_store else CaptureError
        raise failure(f"{out}: {clause(error)}") from error


def read_manifest(out: str) -> dict[str, Any]:
    """Read the manifest of a table set.

    Raises NoTableSetError if there is none, CaptureError if it is not valid.
    """
    place, path = SetFolder(out), f"{out.rstrip('/')}/{MANIFEST}"
    data = place.read(MANIFEST)
    if data is None and place.is_file():
        raise NoTableSetError(f"{out}: is a file; a table set is a folder")
    if data is None:
        raise NoTableSetError(f"{out}: no table set ({MANIFEST} is missing)")
    try:
        document = json.loads(data)
        version = document["format_version"]
    except (ValueError, TypeError, KeyError) as error:
        raise CaptureError(f"{path}: is no manifest of a table set ({error})") from error
    if version != FORMAT_VERSION:
        raise CaptureError(
            f"{out}: is a table set of format {version}, and this kdissect reads format "
            f"{FORMAT_VERSION}; dissect the captures again"
        )
    shape, state = _SHAPE, document.get("state")
    if state is not None:
        is_saved = not isinstance(state, dict) or "missing" not in state
        shape = {**_SHAPE, "state": _STATE_SHAPE if is_saved else {"missing": str}}
    if fault := next(_faults(document, shape, ""), None):
        raise CaptureError(f"{path}: is damaged at {fault[1:]}; dissect the captures again")
    return document


def _faults(value: object, shape: Any, place: str) -> Iterator[str]:
    """The places at which a JSON value has not the shape; `place` is its own."""
    if isinstance(shape, dict) and isinstance(value, dict):
        others = shape.get("*", object)
        for key in dict.fromkeys([*shape, *value]):
            if key != "*":
                yield from _faults(value.get(key, ...), shape.get(key, others), f"{place}.{key}")
    elif isinstance(shape, list) and isinstance(value, list):
        for number, element in enumerate(value):
            yield from _faults(element, shape[0], f"{place}[{number}]")
    elif isinstance(shape, dict | list) or not isinstance(value, shape):
        yield place


def reading_arguments(paths: Collection[str], manifest: dict[str, Any]) -> list[str]:
    """The arguments of a command that reads captures with the options of a manifest. Instead of
    many paths it has their folders."""
    if len(paths) > _NAMED_MAX:
        folders = (each if os.path.isdir(each) else os.path.dirname(each) for each in paths)
        paths = dict.fromkeys(each or "." for each in folders)
    options = manifest["options"]
    given = {"--port": options["ports"], "--keylog": options["keylog"]}
    words = (word for option, values in given.items() for one in values for word in (option, one))
    return [*paths, *map(str, words)]


def capture_paths(manifest: dict[str, Any]) -> dict[str, str]:
    """The paths of the captures of a set by what identifies each: sha256, store's tag, or path."""
    return {
        item["sha256"] or item.get("etag") or item["path"]: item["path"]
        for item in manifest["inputs"]
        if item["is_capture"]
    }
