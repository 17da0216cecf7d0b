"""The loop that benchmarks compare with decodes every message and record of a capture."""

from pathlib import Path

import pytest

import kdissect
from bench.loop import Stream, classes, read


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def test_segments_in_any_order_and_twice() -> None:
    """Around the end of the sequence space; a gap gives nothing more."""
    data = b"".join(frame(bytes([n]) * (n + 1)) for n in range(40))
    parts = [(at, data[at : at + 7]) for at in range(0, len(data), 7)]
    parts[3], parts[4] = parts[4], parts[3]
    parts.insert(9, parts[6])
    stream = Stream(2**32 - 100)
    found = []
    for at, payload in parts:
        stream.add((2**32 - 100 + at) % 2**32, payload)
        found += list(stream.frames())
    assert found == [bytes([n]) * (n + 1) for n in range(40)]
    assert not stream.is_lost
    stream.add((2**32 - 100 + len(data) + 9) % 2**32, b"x" * 50)
    assert list(stream.frames()) == []


@pytest.mark.peer
def test_every_message_is_counted(captures: Path) -> None:
    """Known or not: as many as kdissect has, nearly all of them decoded."""
    path = captures / "java_2_0_1.pcap"
    with path.open("rb") as file:
        counts = read(file, frozenset({9092, 9093}))
    table = kdissect.read(path).exchanges.to_arrow(columns=["request_size", "response_size"])
    messages = sum(len(column) - column.null_count for column in table.columns)
    assert counts["messages"] + counts["unknown"] == messages
    assert counts["messages"] > 0.9 * messages
    assert not counts["failed"]
    assert len(classes()) > 60
