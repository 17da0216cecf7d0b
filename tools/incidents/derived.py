"""Incidents of the capture itself: made from the recording of a healthy scene."""

from __future__ import annotations

from datetime import UTC, datetime

from tools.incidents.groups import group_sessions
from tools.incidents.packets import Packet, read_packets, write_packets
from tools.incidents.scene import CAPTURE, Scene


def packets_lost(scene: Scene) -> None:
    """Packets that tcpdump did not write: of half a second, two of three are missing."""
    group_sessions(scene)
    header, packets = read_packets(scene.capture)
    first = packets[len(packets) // 2][0]
    last = first + scene.pick(500_000, 900_000)
    kept: list[Packet] = []
    lost: list[Packet] = []
    for number, packet in enumerate(packets):
        is_lost = first <= packet[0] < last and number % 3 != scene.pick(0, 1)
        (lost if is_lost else kept).append(packet)
    write_packets(scene.capture, header, kept)
    scene.happened("capture_loss", CAPTURE, _time(lost[0][0]), _time(lost[-1][0]))


def clock_stepped(scene: Scene) -> None:
    """The clock of the capturing host steps back in the middle of the capture."""
    group_sessions(scene)
    header, packets = read_packets(scene.capture)
    middle = len(packets) // 2
    step = scene.pick(5_000_000, 2_000_000)
    stepped = packets[:middle] + [(micros - step, data) for micros, data in packets[middle:]]
    write_packets(scene.capture, header, stepped)
    before, after = stepped[middle - 1][0], stepped[middle][0]
    scene.happened("clock_step", CAPTURE, _time(before), _time(after))


def _time(micros: int) -> datetime:
    return datetime.fromtimestamp(micros / 1e6, UTC)
