"""Damaged captures give no false row, and lose only damaged frames."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from kdissect.protocol.model import SIDES
from tests.material import CAPTURES, needs_material
from tests.truth import packets
from tests.truth.material import SHAPES_BASE, read, shapes
from tests.truth.rows import Row

pytestmark = needs_material

# Of the frames that no lost packet touches: how many may be lost all the same.
LOSS_ALLOWED = {
    "cut.pcap": 0.0,
    "snap128.pcap": 0.0,
    "drop1pct.pcap": 0.005,
    "midstream.pcap": 0.02,
}
every_damage = pytest.mark.parametrize("shape", sorted(LOSS_ALLOWED))

Frame = tuple[int, int, str, int, int]
"""client port, broker port, side, correlation id, size: no two of librdkafka.pcap are equal"""


def _frames(rows: list[Row]) -> dict[Frame, Row]:
    found: dict[Frame, Row] = {}
    for row in rows:
        for side in SIDES:
            if row[f"{side}_size"] is not None:
                ports = row["client_port"], row["broker_port"]
                frame = (*ports, side, row["correlation_id"], row[f"{side}_size"])
                assert frame not in found, frame
                found[frame] = row
    return found


def _lost_packets(shape: str) -> set[int]:
    """Packets of librdkafka.pcap that are not in the shape, by the list of changes."""
    entry = shapes()[shape]
    if "dropped" in entry:
        return set(entry["dropped"])
    total = SHAPES_BASE.check["packets"]
    if shape == "midstream.pcap":
        return set(range(1, total - entry["packets"] + 1))
    if shape == "cut.pcap":
        return set(range(int(re.search(r"packet (\d+)", entry["what"])[1]), total + 1))
    return set()


def _touched(lost: set[int]) -> dict[tuple[int, int, str], list[tuple[int, int]]]:
    """Stream positions of the payload of lost packets, by client port, broker port and side."""
    spans: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    for (client, broker), connections in packets.streams(SHAPES_BASE.path).items():
        (connection,) = connections
        for packet in packets.tcp_packets(SHAPES_BASE.path):
            if packet.number in lost and {packet.source, packet.destination} == {client, broker}:
                side = int(packet.source == broker)
                start = connection[side].pos_of(packet)
                span = start, start + len(packet.payload)
                spans.setdefault((client[1], broker[1], SIDES[side]), []).append(span)
    return spans


@every_damage
def test_damage_makes_no_false_frame(shape: str) -> None:
    """Every request and response is one of the whole capture, of the same API and client."""
    whole = _frames(SHAPES_BASE.rows("exchanges"))
    for frame, row in _frames(
        read(CAPTURES / "shapes" / shape).exchanges.to_arrow().to_pylist()
    ).items():
        assert frame in whole, row
        for column in ("api_key", "api_version", "client_id", "client_ip", "broker_ip"):
            told = row[column] is not None and row["status"] != "request_missing"
            assert not told or row[column] == whole[frame][column], (column, row)


@every_damage
def test_only_frames_with_damaged_packets_are_lost(shape: str, say: Callable[[str], None]) -> None:
    """Nearly all frames without a damaged packet are found."""
    whole = _frames(SHAPES_BASE.rows("exchanges"))
    found = _frames(read(CAPTURES / "shapes" / shape).exchanges.to_arrow().to_pylist())
    touched = _touched(_lost_packets(shape))

    def is_touched(frame: Frame) -> bool:
        client_port, broker_port, side, _, size = frame
        start = whole[frame][f"{side}_pos"]
        spans = touched.get((client_port, broker_port, side), ())
        return any(a < start + 4 + size and start < b for a, b in spans)

    untouched = {frame for frame in whole if not is_touched(frame)}
    lost = untouched - found.keys()
    say(
        f"{shape}: {len(found)} of {len(whole)} frames found; of {len(untouched)} that the damage "
        f"did not touch {len(lost)} are lost"
    )
    assert len(lost) <= LOSS_ALLOWED[shape] * len(untouched), sorted(lost)


@every_damage
def test_whole_messages_have_the_same_bodies(shape: str) -> None:
    """Requests and responses with all their bytes have the bodies that the whole capture has."""
    damaged = read(CAPTURES / "shapes" / shape)
    ours, theirs = SHAPES_BASE.rows("exchanges"), damaged.exchanges.to_arrow().to_pylist()
    whole = _frames(ours)
    compared = 0
    for frame, row in _frames(theirs).items():
        side = frame[2]
        if row[f"{side}_decode_status"] != "ok" or row["status"] == "request_missing":
            continue
        if row["api_name"] == "Envelope" and row["request_decode_status"] != "ok":
            continue  # what its inner response is, only the inner request tells
        name = f"apis/{row['api_name']}"
        body = _bodies(damaged, name)[row["exchange_id"]][side]
        assert body == _bodies(SHAPES_BASE.tables, name)[whole[frame]["exchange_id"]][side], row
        compared += 1
    assert compared > (0 if shape == "snap128.pcap" else 300)


@functools.cache
def _bodies(tables: Any, name: str) -> dict[int, Row]:
    """Rows of an API by exchange; the table sets live as long as the session."""
    return {row["exchange_id"]: row for row in tables[name].to_arrow().to_pylist()}
