"""Incidents of the capture itself: made from the recording of a healthy scene."""

from __future__ import annotations

from datetime import UTC, datetime

from lab.incidents.groups import group_sessions
from lab.incidents.packets import Packet, read_packets, write_packets
from lab.incidents.scene import Scene
from tests.incidents.recorded import CAPTURE


def packets_lost(scene: Scene) -> None:
    """Packets that tcpdump did not write: of half a second, two of three are missing."""
    group_sessions(scene)
    lose_packets(scene, scene.pick(500_000, 900_000), 3)


def lose_packets(scene: Scene, micros: int, each: int) -> None:
    """Remove packets from the middle of the capture for some time, but keep each third, ..."""
    header, packets = read_packets(scene.capture)
    first = packets[len(packets) // 2][0]
    kept: list[Packet] = []
    lost: list[Packet] = []
    for number, packet in enumerate(packets):
        is_lost = first <= packet[0] < first + micros and number % each != scene.pick(0, 1)
        (lost if is_lost else kept).append(packet)
    write_packets(scene.capture, header, kept)
    scene.happened("capture_loss", CAPTURE, _time(lost[0][0]), _time(lost[-1][0]))


def clock_stepped(scene: Scene) -> None:
    """The clock of the capturing host steps back in the middle of the capture."""
    group_sessions(scene)
    step_clock(scene, scene.pick(-5_000_000, -2_000_000))


def step_clock(scene: Scene, micros: int) -> None:
    """Add some time to all packets from the middle of the capture on."""
    header, packets = read_packets(scene.capture)
    middle = len(packets) // 2
    stepped = packets[:middle] + [(time + micros, data) for time, data in packets[middle:]]
    write_packets(scene.capture, header, stepped)
    before, after = stepped[middle - 1][0], stepped[middle][0]
    scene.happened("clock_step", CAPTURE, _time(before), _time(after))


def _time(micros: int) -> datetime:
    return datetime.fromtimestamp(micros / 1e6, UTC)
