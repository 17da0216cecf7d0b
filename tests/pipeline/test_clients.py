"""The client ids of a connection."""

from pathlib import Path
from typing import Any

import pytest

import kdissect
from kdissect.pipeline.learn import Cluster, learn
from kdissect.tables.connections import ConnectionClients
from kdissect.tables.message_chunk import CHUNK_BYTES, FrameBuffer
from tests.builders.frames import framed, produce, request, response
from tests.builders.messages import request_frame, response_frame, write_capture
from tests.builders.talks import Playbook

HEARTBEAT = 12


def test_client_ids_are_in_order_of_appearance(tmp_path: Path) -> None:
    """Each once, short or long, without the requests that have none."""
    names = ["b", "x" * 3000, None, "a", "b", "", "x" * 3000, "y" * 65]
    exchanges = [
        (request_frame(HEARTBEAT, 1, number, name), response_frame(HEARTBEAT, 1, number))
        for number, name in enumerate(names)
    ]
    tables = kdissect.read(write_capture(tmp_path / "ids.pcap", exchanges))
    (row,) = tables.connections.to_pylist()
    assert row["client_ids"] == ["b", "x" * 3000, "a", "", "y" * 65]


@pytest.mark.parametrize("kind", ["no client id", "tokens"])
def test_memory_for_clients_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large requests without a client id, or large tokens, are read some at a time."""
    book, count, size = Playbook().syn(), 400, 60_000
    if kind == "tokens":
        book.ask(request(0, 17, 0, body=b"\0\5PLAIN"))
        book.answer(response(0, b"\0\0\0\0\0\1\0\5PLAIN"))
    for number in range(1, count):
        if kind == "tokens":
            book.send(0, framed(b"\0user\0" + bytes(size)), 60_100)
            book.send(1, framed(b"more"))
        else:
            book.send(0, produce(number, -1, 7, None, size), 60_100)
            book.send(1, response(number))
    assembly, (_, sources) = book.run(), book.batch()
    gathered, gather = [], FrameBuffer.gather

    def counted(*args: Any) -> FrameBuffer:
        frames = gather(*args)
        gathered.append(len(frames.buf))
        return frames

    monkeypatch.setattr(FrameBuffer, "gather", counted)
    learn(Cluster(), ConnectionClients(), assembly, sources)
    assert len(assembly.exchanges) >= count - 1
    assert 0 < max(gathered) <= CHUNK_BYTES + size
