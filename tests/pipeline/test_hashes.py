"""Sizes and hashes of the input files in the manifest."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import kdissect
from tests.conftest import CAPTURES


def test_inputs_have_the_hashes_of_the_named_files(tmp_path: Path) -> None:
    """Of a compressed file the hash is that of its own bytes; other files have one, too."""
    data = (CAPTURES / "java_2_0_1.pcap").read_bytes()
    contents = {"a.pcap": data, "b.pcap.gz": gzip.compress(data), "notes.txt": b"no capture"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    inputs = kdissect.read(tmp_path, split_bytes=50_000).manifest["inputs"]
    expected = {
        str(tmp_path / name): (len(content), hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
    assert {item["path"]: (item["size"], item["sha256"]) for item in inputs} == expected
    assert [item["is_capture"] for item in inputs] == [True, True, False]
