"""The capture's times beside the broker's own."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kdissect.errors import CaptureError
from kdissect.report.sections import broker_log
from tests.builders.tables import exchange, tables
from tests.report.documents import OPTIONS, prepared


def test_kafkas_own_log_lines_are_read(tmp_path: Path) -> None:
    """The layout of kafka.network.RequestChannel's lines since KIP-673, plain and compressed."""
    said = {
        "isForwarded": False,
        "requestHeader": {
            "requestApiKey": 3,
            "requestApiVersion": 12,
            "correlationId": 1,
            "clientId": "app",
            "requestApiKeyName": "METADATA",
        },
        "request": {},
        "response": {},
        "connection": "10.0.0.9:9092-10.0.0.1:50000-0",
        "totalTimeMs": 2.5,
    }
    newer = {**said, "connection": "[::1]:9092-[::ffff:10.0.0.1]:50000-0-12"}
    forwarded = {**said, "isForwarded": True}
    lines = [
        "starting",
        "{broken",
        *(
            f"[t] DEBUG Completed request:{json.dumps(each)} (x)"[:-4]
            for each in (said, newer, forwarded)
        ),
    ]
    text = "\n".join(lines) + "\n"
    plain, packed = tmp_path / "request.log", tmp_path / "request.log.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    expected = [("10.0.0.1", 50000, 1, 3, 2.5)] * 2
    assert list(broker_log.read_log(str(plain))) == expected
    assert list(broker_log.read_log(str(packed))) == expected


def test_a_correlation_id_that_comes_again_is_matched_in_order(tmp_path: Path) -> None:
    """Two entries with one correlation ID match two exchanges in order of time."""
    log = tmp_path / "log.jsonl"
    entry = {"client": ["10.0.0.1", 50000], "correlation_id": 1, "api_key": 3}
    log.write_text("".join(json.dumps({**entry, "total_time_ms": t}) + "\n" for t in (1.5, 30)))
    made = tables(
        exchanges=[
            exchange(1, correlation_id=1, latency_us=1600),
            exchange(2, correlation_id=1, at_us=5000, latency_us=31_000),
        ]
    )
    with prepared(made) as database:
        found = broker_log.collect(database, replace(OPTIONS, broker_logs=(str(log),)))
        rows = database.rows("FROM broker_times ORDER BY latency_ms")
    assert found is not None
    assert found["matched"] == 2
    assert [row["total_time_ms"] for row in rows] == [1.5, 30]


@pytest.mark.parametrize("text", ["", "nothing of it\n", '{"a": 1}\n', '["x"]\n'])
def test_a_file_that_is_no_log_is_refused(text: str, tmp_path: Path) -> None:
    """A file without one line of a request log is an error."""
    path = tmp_path / "some.log"
    path.write_text(text)
    with pytest.raises(CaptureError, match="no line of a request log"):
        list(broker_log.read_log(str(path)))
