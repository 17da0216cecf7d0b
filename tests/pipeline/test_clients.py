"""The client ids of a connection."""

from pathlib import Path

import kdissect
from kdissect import Message, encode_message
from tests.builders.messages import exchange, write_capture

HEARTBEAT = 12


def test_client_ids_are_in_order_of_appearance(tmp_path: Path) -> None:
    """Each once, short or long, without the requests that have none."""
    names = ["b", "x" * 3000, None, "a", "b", "", "x" * 3000, "y" * 65]
    exchanges = []
    for number, name in enumerate(names):
        _, response = exchange(number, HEARTBEAT, 1, {}, {})
        header = {"correlation_id": number, "client_id": name}
        exchanges.append((encode_message(Message(HEARTBEAT, 1, "request", header, {})), response))
    tables = kdissect.read(write_capture(tmp_path / "ids.pcap", exchanges))
    (row,) = tables.connections.to_pylist()
    assert row["client_ids"] == ["b", "x" * 3000, "a", "", "y" * 65]
