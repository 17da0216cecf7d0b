"""Rows are the same when assembling reads copies of its segments instead of mapped captures."""

from __future__ import annotations

from pathlib import Path

import pytest

import kdissect
from kdissect.capture import mapped_files, resident

CAPTURES = Path(__file__).parents[2] / "captures"


@pytest.mark.parametrize("name", ["librdkafka.pcap", "java_2_0_1.pcap"])
def test_rows_are_the_same_from_copied_segments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small windows of mapped files, and copies of segments, change no table."""
    expected = kdissect.read(CAPTURES / name)
    monkeypatch.setattr(resident, "WATCHED_SIZE_MIN", 0)
    monkeypatch.setattr(mapped_files, "WINDOW_BYTES", 1 << 12)
    found = kdissect.read(CAPTURES / name)
    assert found.names == expected.names
    for table in expected.names:
        assert found[table].to_arrow().equals(expected[table].to_arrow()), table
