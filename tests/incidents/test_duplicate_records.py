"""Batches that were written twice are proven by offsets, on recorded captures."""

from __future__ import annotations

from datetime import datetime

import pytest

import kdissect
from tests.conftest import CAPTURES


@pytest.mark.parametrize(
    "name",
    ["retries_duplicate", pytest.param("retries_duplicate_plain", marks=pytest.mark.heavy)],
)
def test_offsets_of_both_copies(name: str) -> None:
    """Ten records lie at offset 30; the copy has the offset that the broker gave the last one."""
    (found,) = kdissect.read(CAPTURES / "incidents" / f"{name}.pcap.gz").incidents().to_pylist()
    again = 50 if name == "retries_duplicate" else 40
    assert "wrote 10 records to orders-0 twice: at offset 30," in found["text"]
    assert f"again at offset {again} " in found["text"]
    assert found["start_time"] < found["end_time"] < datetime.now(found["end_time"].tzinfo)
