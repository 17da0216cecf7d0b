"""A table set on disk: staged files become visible together, `_kdissect.json` last.

The manifest names every file that counts. A new set is staged beside the old one; committing
moves its files under fresh names, replaces the manifest in one rename, and only then removes what
the old manifest listed. A run that fails removes its own staging and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kdissect.errors import CaptureError, OutputError
from kdissect.pipeline.sink import COMPRESSION, COMPRESSION_LEVEL, STAGING, StagedFile
from kdissect.tables.schemas import FIXED_TABLES, FORMAT_VERSION, fixed_tables

MANIFEST = "_kdissect.json"


def check_out(out: str, overwrite: bool) -> None:
    """Raise OutputError unless a new table set may be written to `out`."""
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{out}: is a file; --out names a folder")
    if (path / MANIFEST).exists():
        if not overwrite:
            raise OutputError(f"{out}: holds a table set already; add --overwrite to replace it")
    elif path.is_dir() and any(entry.name != STAGING for entry in path.iterdir()):
        raise OutputError(f"{out}: is a folder with other files; name a new or an empty one")
    place = path
    while not place.exists():
        place = place.parent
    try:
        # asking for permissions is not enough: some file systems refuse even root
        os.rmdir(tempfile.mkdtemp(prefix=".kdissect-", dir=place))
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({place}: {error.strerror})") from error


@contextmanager
def staging(out: str) -> Iterator[str]:
    """A run's id; whatever it staged is gone afterwards, also when it failed."""
    run_id = uuid.uuid4().hex[:12]
    created = not Path(out).exists()
    try:
        (Path(out) / STAGING / run_id).mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        yield run_id
    finally:
        root = Path(out) / STAGING
        shutil.rmtree(root / run_id, ignore_errors=True)
        for folder in (root, Path(out)) if created else (root,):
            try:
                folder.rmdir()
            except OSError:
                break  # not empty: the results, or another run


def commit(out: str, run_id: str, files: list[StagedFile], manifest: dict[str, Any]) -> None:
    """Move the staged files into place and publish them by writing the manifest.

    `manifest` gets `format_version` and `tables` here; fixed tables without rows get an empty
    file, so that every reader finds their schema.
    """
    root = Path(out)
    old = read_manifest(out) if (root / MANIFEST).exists() else None
    tables: dict[str, dict[str, Any]] = {name: {"rows": 0, "files": []} for name in FIXED_TABLES}
    for number, file in enumerate(sorted(files, key=lambda file: (file.table, file.path))):
        entry = tables.setdefault(file.table, {"rows": 0, "files": []})
        name = f"{file.table}/part-{number:05d}-{run_id}.parquet"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(root / STAGING / run_id / file.path, root / name)
        entry["rows"] += file.row_count
        entry["files"].append(name)
    for table, schema in fixed_tables(manifest.get("options", {}).get("decode_values")).items():
        if not tables[table]["files"]:
            name = f"{table}/part-00000-{run_id}.parquet"
            (root / table).mkdir(parents=True, exist_ok=True)
            _write_empty(root / name, schema)
            tables[table]["files"].append(name)
    document = {"format_version": FORMAT_VERSION, **manifest, "tables": tables}
    temporary = root / STAGING / run_id / MANIFEST
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(temporary, root / MANIFEST)
    if old is not None:
        _remove_files(root, old, keep=tables)


def _write_empty(path: Path, schema: pa.Schema) -> None:
    pq.write_table(
        schema.empty_table(),
        path,
        compression=COMPRESSION,
        compression_level=COMPRESSION_LEVEL,
        store_schema=False,
    )


def _remove_files(root: Path, old: dict[str, Any], keep: dict[str, Any]) -> None:
    kept = {name for entry in keep.values() for name in entry["files"]}
    for entry in old["tables"].values():
        for name in entry["files"]:
            if name not in kept:
                (root / name).unlink(missing_ok=True)
    for folder in sorted(root.rglob("*"), reverse=True):
        if folder.is_dir():
            try:
                folder.rmdir()
            except OSError:
                continue  # holds files that count


def read_manifest(out: str) -> dict[str, Any]:
    """The manifest of a table set; CaptureError where there is none or it is not readable."""
    path = Path(out) / MANIFEST
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise CaptureError(f"{out}: no table set ({MANIFEST} is missing)") from None
    except NotADirectoryError:
        raise CaptureError(f"{out}: is a file; a table set is a folder") from None
    except (OSError, ValueError) as error:
        raise CaptureError(f"{path}: not readable ({error})") from error
    if not isinstance(document, dict) or "tables" not in document:
        raise CaptureError(f"{path}: is no manifest of a table set")
    if document.get("format_version", 0) > FORMAT_VERSION:
        raise CaptureError(
            f"{out}: written by a newer kdissect (format_version "
            f"{document['format_version']}); upgrade kdissect to read it"
        )
    return document
