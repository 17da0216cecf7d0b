"""Hashes of the input files in the manifest, also of those that were hashed ahead."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import kdissect
from kdissect.capture.inputs import find_captures
from kdissect.pipeline.plan import hash_ahead

CAPTURES = Path(__file__).parents[2] / "captures"


def _manifest_hashes(path: Path) -> list[tuple[int, str]]:
    return [(one["size"], one["sha256"]) for one in kdissect.read(path).manifest["inputs"]]


def _expected_hashes(path: Path) -> list[tuple[int, str]]:
    data = path.read_bytes()
    return [(len(data), hashlib.sha256(data).hexdigest())]


def test_hashes_made_ahead_are_those_of_the_file(tmp_path: Path) -> None:
    """The same either way; a file that changed since is hashed again, another one is no matter."""
    path = tmp_path / "a.pcap"
    shutil.copy(CAPTURES / "librdkafka.pcap", path)
    assert _manifest_hashes(path) == _expected_hashes(path)
    hash_ahead(find_captures([str(path)]))
    assert _manifest_hashes(path) == _expected_hashes(path)
    hash_ahead(find_captures([str(path)]))
    shutil.copy(CAPTURES / "java_2_0_1.pcap", path)
    assert _manifest_hashes(path) == _expected_hashes(path)
    hash_ahead(find_captures([str(path)]))
    assert _manifest_hashes(CAPTURES / "librdkafka.pcap") == _expected_hashes(
        CAPTURES / "librdkafka.pcap"
    )
