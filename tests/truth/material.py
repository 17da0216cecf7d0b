"""Where the captures with ground truth lie, what their manifests say, and reading each once.

The captures are not part of this repository: they lie beside it, in `../shared`. Every test that
needs them skips, with the reason printed, where they are missing.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kdissect

SHARED = Path(__file__).resolve().parents[3] / "shared"
ROW_TABLES_KEPT = 64  # a capture has about forty
CAPTURES = SHARED / "captures"
DEFINITIONS = SHARED / "kafka" / "definitions"

needs_material = pytest.mark.skipif(
    not CAPTURES.is_dir() or not DEFINITIONS.is_dir(),
    reason="the captures with ground truth (../shared beside the repository) are not here",
)


@dataclass(frozen=True)
class Capture:
    """One capture with a manifest; `name` is the folder and the stem, as in the README."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> Path:
        return CAPTURES / f"{self.name}.pcap"

    @property
    def request_log_path(self) -> Path:
        return CAPTURES / f"{self.name}.requests.jsonl.gz"

    @property
    def produced_path(self) -> Path:
        return CAPTURES / f"{self.name}.produced.jsonl.gz"

    @property
    def is_tls(self) -> bool:
        return self.name.startswith("tls/")

    @property
    def manifest(self) -> dict[str, Any]:
        return _json(CAPTURES / f"{self.name}.json")

    @property
    def check(self) -> dict[str, Any]:
        """The independent count of the capture and of its request log."""
        return self.manifest["check"]

    @property
    def tables(self) -> Any:
        return read(self.path)

    def rows(self, table: str) -> list[dict[str, Any]]:
        return rows(self.tables, table)


@functools.cache
def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def shapes() -> dict[str, dict[str, Any]]:
    """File name under shapes/ -> what was done to librdkafka.pcap to make it."""
    path = CAPTURES / "shapes" / "shapes.json"
    return _json(path)["files"] if path.is_file() else {}


def _all_captures() -> list[Capture]:
    stems = sorted(path.relative_to(CAPTURES) for path in CAPTURES.glob("*/*.pcap"))
    captures = [Capture(str(stem.with_suffix(""))) for stem in stems]
    return [c for c in captures if (CAPTURES / f"{c.name}.json").is_file()]


ALL = _all_captures()
LOGGED = [c for c in ALL if c.request_log_path.is_file()]
CHECKED = [c for c in LOGGED if not c.is_tls]  # the independent check has no keys
PRODUCED = [c for c in ALL if c.produced_path.is_file()]
SHAPES_BASE = Capture("other_clients/librdkafka")


def each(name: str, things: list[Any]) -> pytest.MarkDecorator:
    """A test for each of them; all tests of a module for one come together, and its rows go."""
    return pytest.mark.parametrize(name, things, ids=str, scope="module")


@functools.cache
def read(*paths: Path) -> Any:
    """The tables of captures, read in process once per test session, nothing redacted.

    TLS is decrypted where a key log lies beside the capture.
    """
    names = [str(path) for path in paths]
    key_logs = [log for path in paths if (log := path.with_suffix(".keylog")).is_file()]
    return kdissect.read(
        names[0] if len(names) == 1 else names, reveal_secrets=True, keylog=key_logs
    )


@functools.lru_cache(maxsize=ROW_TABLES_KEPT)
def rows(tables: Any, table: str) -> list[dict[str, Any]]:
    """A table (`exchanges`, `apis/Fetch`) as Python rows; empty where it is not."""
    return tables[table].to_arrow().to_pylist() if table in tables.names else []
