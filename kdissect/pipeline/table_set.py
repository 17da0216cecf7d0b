"""A table set in a folder: files are staged, then published together by writing `_kdissect.json`.

The manifest names every file of the set. A run stages its files beside the old set. Committing
moves them to fresh names, replaces the manifest by one rename, and only then removes files that the
new manifest does not list. A run that fails removes its own staged files only. The next run removes
what a killed one left; it holds the set's lock meanwhile (`write_lock`). For a set at a URL of an
object store, which cannot rename, see `object_table_set`.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from kdissect.capture.object_store import is_remote
from kdissect.errors import CaptureError, EnvironmentFailed, OutputError
from kdissect.pipeline import object_table_set
from kdissect.pipeline.object_table_set import FOLDERS, is_by_a_run
from kdissect.pipeline.table_writer import COMPRESSION, COMPRESSION_LEVEL, STAGING, StagedFile
from kdissect.pipeline.write_lock import remove_staged, write_lock
from kdissect.tables.schemas import FIXED_TABLES, FORMAT_VERSION, fixed_tables

MANIFEST = "_kdissect.json"


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
    _check_place(out, overwrite)
    with write_lock(out) as is_held:
        # again, because another run may have written there before the lock was held
        _check_place(out, overwrite)
        if is_held:
            _remove_leftovers(out)
        yield


def _check_place(out: str, overwrite: bool) -> None:
    if is_remote(out):
        object_table_set.check(out, MANIFEST, overwrite)
        return
    if not out.strip():
        raise OutputError("--out is empty; it names the folder for the tables")
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{out}: is a file; --out names a folder")
    if (path / MANIFEST).exists():
        if not overwrite:
            raise OutputError(f"{out}: holds a table set already; add --overwrite to replace it")
    elif path.is_dir() and not _is_free(path):
        raise OutputError(f"{out}: is a folder with other files; name a new or an empty one")


def _is_free(root: Path) -> bool:
    """Return whether the folder holds only leftovers of killed runs."""
    return all(entry.name in FOLDERS for entry in root.iterdir()) and all(
        is_by_a_run(path.relative_to(root).as_posix()) for path in root.rglob("*") if path.is_file()
    )


def _remove_leftovers(out: str) -> None:
    try:
        listed = _listed(read_manifest(out)) if has_set(out) else set()
    except CaptureError:
        return  # without a manifest it is unknown which files belong to the set
    if is_remote(out):
        object_table_set.remove_unlisted(object_table_set.StoreFolder(out), listed)
    else:
        remove_staged(Path(out) / STAGING)
        _remove_unlisted(Path(out), listed)


@contextmanager
def staging(out: str) -> Iterator[str]:
    """Yield the id of a new run; its staged files are removed at the end, also after an error."""
    run_id = uuid.uuid4().hex[:12]
    if is_remote(out):
        object_table_set.begin(out, run_id)
        try:
            yield run_id
        except BaseException:
            with suppress(EnvironmentFailed):  # files that stay are in no manifest
                object_table_set.end(out, run_id, _listed(_document(out)), is_failed=True)
            raise
        with suppress(EnvironmentFailed):
            object_table_set.end(out, run_id, _listed(_document(out)))
        return
    root = Path(out) / STAGING
    try:
        (root / run_id).mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        yield run_id
    finally:
        shutil.rmtree(root / run_id, ignore_errors=True)
        with suppress(OSError):  # not empty while the lock is there
            root.rmdir()


Entries = dict[str, dict[str, Any]]  # by table: row count and files


def commit(
    out: str,
    run_id: str,
    files: list[StagedFile],
    manifest: dict[str, Any],
    kept: Entries | None = None,
) -> dict[str, Any]:
    """Move the staged files into place, write the manifest and return it.

    After the manifest is written nothing can fail; files that cannot be removed stay until the next
    run.
    `manifest` gets `format_version` and `tables` here. Fixed tables without rows get an empty file,
    so that every reader finds their schema. kept: row counts and files of the old set that stay in
    the new one. Files of "tables" with a leading underscore belong to the state, which `manifest`
    describes (`append`).
    """
    if is_remote(out):
        return _commit_far(out, run_id, files, manifest)
    root = Path(out)
    state = manifest.get("state", {})
    tables: Entries = {name: {"rows": 0, "files": []} for name in FIXED_TABLES}
    final: Entries = {}
    for table, entry in (kept or {}).items():
        for entries in (tables, final):
            entries[table] = {"rows": entry["rows"], "files": list(entry["files"])}
    for number, file in enumerate(sorted(files, key=lambda file: (file.table, file.path))):
        is_state = file.table.startswith("_")
        name = f"{file.table}/part-{number:05d}-{run_id}.parquet"
        if is_state:
            name = f"{file.table}-{number:05d}-{run_id}"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(root / STAGING / run_id / file.path, root / name)
        if is_state:
            _enter_state(state, file.table, name)
            continue
        for entries in (tables, final) if file.is_final else (tables,):
            entry = entries.setdefault(file.table, {"rows": 0, "files": []})
            entry["rows"] += file.row_count
            entry["files"].append(name)
    if "known" in state:
        state["final"] = final
    for name, schema in _empty_files(tables, run_id, manifest):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        _write_empty(root / name, schema)
    document = _document_of(tables, manifest)
    temporary = root / STAGING / run_id / MANIFEST
    temporary.write_text(_text(document))
    os.replace(temporary, root / MANIFEST)
    with suppress(OSError):
        _remove_unlisted(root, _listed(document))
    return document


def _enter_state(state: dict[str, Any], table: str, name: str) -> None:
    kind = table.rpartition("/")[2]
    if isinstance(state[kind], list):
        state[kind] = [*state[kind], name]
    else:
        state[kind] = name


def _commit_far(
    out: str, run_id: str, files: list[StagedFile], manifest: dict[str, Any]
) -> dict[str, Any]:
    """`commit` for an object store, in which files have their final names already."""
    place = object_table_set.StoreFolder(out)
    tables: dict[str, dict[str, Any]] = {name: {"rows": 0, "files": []} for name in FIXED_TABLES}
    for file in sorted(files, key=lambda file: (file.table, file.path)):
        entry = tables.setdefault(file.table, {"rows": 0, "files": []})
        entry["rows"] += file.row_count
        entry["files"].append(file.path)
    for name, schema in _empty_files(tables, run_id, manifest):
        buffer = pa.BufferOutputStream()
        _write_empty(buffer, schema)
        place.write(name, buffer.getvalue().to_pybytes())
    document = _document_of(tables, manifest)
    listed = _listed(document)
    # The manifest must not list a file that another run removed.
    if not object_table_set.is_open(place, run_id) or not all(place.has(sorted(listed))):
        raise EnvironmentFailed(f"{out}: files of this run were removed by another one")
    text = _text(document).encode()
    try:
        place.write(MANIFEST, text)
    except EnvironmentFailed:
        # the write may have succeeded although its response was lost
        if place.read(MANIFEST) != text:
            raise
    with suppress(EnvironmentFailed):
        object_table_set.remove_unlisted(place, listed)
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


def _document_of(tables: Entries, manifest: dict[str, Any]) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, **manifest, "tables": tables}


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def _listed(document: dict[str, Any] | None) -> set[str]:
    """The files that a manifest lists, including those of the state."""
    if not document:
        return set()
    state = document.get("state") or {}
    kept = [*state.get("open", ()), *state.get("events", ()), state.get("known")]
    tables = [name for entry in document["tables"].values() for name in entry["files"]]
    return {*tables, *(name for name in kept if name)}


def _write_empty(target: Any, schema: pa.Schema) -> None:
    pq.write_table(
        schema.empty_table(),
        target,
        compression=COMPRESSION,
        compression_level=COMPRESSION_LEVEL,
    )


def _remove_unlisted(root: Path, listed: set[str]) -> None:
    """Remove files of runs that are not `listed`, and empty folders; `_staging` stays."""
    for path in sorted(root.rglob("*"), reverse=True):
        name = path.relative_to(root).as_posix()
        if name.startswith(STAGING):
            continue
        if path.is_dir():
            with suppress(OSError):  # not empty
                path.rmdir()
        elif is_by_a_run(name) and name not in listed:
            path.unlink(missing_ok=True)


def has_set(out: str) -> bool:
    """Return whether there is a manifest of a table set at `out`."""
    if is_remote(out):
        return object_table_set.StoreFolder(out).read(MANIFEST) is not None
    return (Path(out) / MANIFEST).exists()


def absolute(out: str) -> str:
    """`out` as an absolute path, or the URL unchanged."""
    return out if is_remote(out) else os.path.abspath(out)


def dataset(out: str, names: list[str]) -> pads.Dataset:
    """The rows of a table's files as a dataset. Raises CaptureError if a file is missing."""
    files = [f"{out.rstrip('/')}/{name}" for name in names]
    if not is_remote(out):
        is_there = [os.path.exists(file) for file in files]
        # absolute, so that processes in other folders can open them
        paths = [os.path.abspath(file) for file in files]
        store = None
    else:
        place = object_table_set.StoreFolder(out)
        is_there = place.has(names)
        paths = [place.path(name) for name in names]
        store = place.store
    if not all(is_there):
        gone = files[is_there.index(False)]
        raise CaptureError(f"{gone}: listed in the manifest, but not there")
    return pads.dataset(paths, format="parquet", filesystem=store)


def _document(out: str) -> dict[str, Any] | None:
    """The manifest at a URL; None if there is no valid one."""
    try:
        return read_manifest(out)
    except CaptureError:
        return None


def _manifest_text(out: str) -> str:
    if not is_remote(out):
        return (Path(out) / MANIFEST).read_text()
    data = object_table_set.StoreFolder(out).read(MANIFEST)
    if data is None:
        raise FileNotFoundError
    return data.decode()


def read_manifest(out: str) -> dict[str, Any]:
    """Read the manifest of a table set.

    Raises NoTableSetError if there is none, CaptureError if it is not valid.
    """
    path = f"{out.rstrip('/')}/{MANIFEST}"
    try:
        document = json.loads(_manifest_text(out))
    except FileNotFoundError:
        raise NoTableSetError(f"{out}: no table set ({MANIFEST} is missing)") from None
    except NotADirectoryError:
        raise NoTableSetError(f"{out}: is a file; a table set is a folder") from None
    except (OSError, ValueError) as error:
        raise CaptureError(f"{path}: not readable ({error})") from error
    if not isinstance(document, dict) or "tables" not in document:
        raise CaptureError(f"{path}: is no manifest of a table set")
    if document.get("format_version") != FORMAT_VERSION:
        raise CaptureError(
            f"{out}: is a table set of format {document.get('format_version')}, and this kdissect "
            f"reads format {FORMAT_VERSION}; dissect the captures again"
        )
    return document
