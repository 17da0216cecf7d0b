"""Captures with ground truth: their files, their manifests, and reading each once.

Five captures ship with the project; their request logs, lists of produced records and manifests lie
in `captures/truth`. Many more lie in `tests.material.CAPTURES`; a test that
needs one of those skips if it is missing.
"""

import functools
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kdissect
from tests.cases import cases
from tests.material import ABSENT, CAPTURES, ROOT, key_log

ROW_TABLES_KEPT = 64  # a capture has about forty
SHIPPED = ROOT / "captures"
REQUEST_LOG, PRODUCED_LIST = "requests.jsonl.gz", "produced.jsonl.gz"
TRUTH = CAPTURES if CAPTURES.is_dir() else SHIPPED / "truth"  # manifests and logs


@dataclass(frozen=True)
class Capture:
    """One capture with a manifest; `name` is the folder and the stem, as in the README."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> Path:
        """The capture's file; the test skips if it is neither beside the project nor in it."""
        stem = self.name.rpartition("/")[2]
        shipped = (SHIPPED / f"{stem}.pcap", SHIPPED / f"{stem}.pcap.gz")
        for path in (CAPTURES / f"{self.name}.pcap", *shipped):
            if path.is_file():
                return path
        pytest.skip(ABSENT)

    def has(self, ending: str) -> bool:
        return (TRUTH / f"{self.name}.{ending}").is_file()

    def _truth(self, ending: str) -> Path:
        if not self.has(ending):
            pytest.skip(ABSENT)
        return TRUTH / f"{self.name}.{ending}"

    @property
    def request_log_path(self) -> Path:
        return self._truth(REQUEST_LOG)

    @property
    def produced_path(self) -> Path:
        return self._truth(PRODUCED_LIST)

    @property
    def is_tls(self) -> bool:
        return self.name.startswith("tls/")

    @property
    def manifest(self) -> dict[str, Any]:
        return _json(self._truth("json"))

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
    """File name under shapes/ -> changes of librdkafka.pcap that made it."""
    path = CAPTURES / "shapes" / "shapes.json"
    return _json(path)["files"] if path.is_file() else {}


def _all_captures() -> list[Capture]:
    manifests = sorted(path.relative_to(TRUTH) for path in TRUTH.glob("*/*.json"))
    captures = [Capture(str(path.with_suffix(""))) for path in manifests]
    return [c for c in captures if (CAPTURES / f"{c.name}.pcap").is_file() or TRUTH != CAPTURES]


ALL = _all_captures()
LOGGED = [c for c in ALL if c.has(REQUEST_LOG)]
JSON_LOGGED = [c for c in LOGGED if c.name != "zookeeper/zk_1_1_1"]  # its log is text
CHECKED = [c for c in LOGGED if not c.is_tls]  # the independent check has no keys
PRODUCED = [c for c in ALL if c.has(PRODUCED_LIST)]
SHAPES_BASE = Capture("other_clients/librdkafka")
# Large captures, and those whose clients, brokers and messages are also in other captures.
REPEATED = frozenset(
    (
        *("perf/perf_small", "perf/perf_tshark", "java_latest/java_latest", "tls/tls12"),
        *("transactions/transactions", "share_streams/streams", "version_sweep/sweep_4_3_1"),
        *("zookeeper/zk_3_9_1_ibp_2_4", "other_clients/kafka_python", "sasl/sasl"),
    )
)


def each(
    name: str, things: list[Any], repeated: Collection[str] = frozenset()
) -> pytest.MarkDecorator:
    """A test for each of them, heavy for those of `REPEATED` and of `repeated`.

    All tests of a module for one come together, then its rows go.
    """
    heavy = [
        thing
        for thing in things
        if str(thing) in repeated or str(thing).removesuffix(".pcap") in REPEATED
    ]
    return cases(name, things, heavy=heavy, ids=str, scope="module")


@functools.cache
def read(*paths: Path) -> Any:
    """The tables of captures, read in process once per test session, nothing redacted.

    TLS is decrypted where a key log lies beside the capture.
    """
    names = [str(path) for path in paths]
    key_logs = [log for path in paths for log in key_log(path)]
    return kdissect.read(
        names[0] if len(names) == 1 else names, reveal_secrets=True, keylog=key_logs
    )


@functools.lru_cache(maxsize=ROW_TABLES_KEPT)
def rows(tables: Any, table: str) -> list[dict[str, Any]]:
    """A table (`exchanges`, `apis/Fetch`) as Python rows; empty where it is not."""
    return tables[table].to_pylist() if table in tables.names else []
