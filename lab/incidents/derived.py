"""Incidents of the capture itself: made from the recording of a healthy scene."""

from dataclasses import replace
from datetime import UTC, datetime

from lab.incidents.groups import group_sessions
from lab.incidents.scene import Scene
from tests.builders.captures import Packet, pcap_bytes, read_packets
from tests.incidents.recorded import CAPTURE


def packets_lost(scene: Scene) -> None:
    """Packets that tcpdump did not write: of half a second, two of three are missing."""
    group_sessions(scene)
    lose_packets(scene, scene.pick(500_000, 900_000), 3)


def lose_packets(scene: Scene, micros: int, each: int) -> None:
    """Remove packets from the middle of the capture for some time, but keep each third, ..."""
    packets = read_packets(scene.capture)
    first = packets[len(packets) // 2].time_ns
    kept: list[Packet] = []
    lost: list[Packet] = []
    for number, packet in enumerate(packets):
        is_then = first <= packet.time_ns < first + 1000 * micros
        is_lost = is_then and number % each != scene.pick(0, 1)
        (lost if is_lost else kept).append(packet)
    scene.capture.write_bytes(pcap_bytes(kept))
    scene.happened("capture_loss", CAPTURE, _time(lost[0]), _time(lost[-1]))


def clock_stepped(scene: Scene) -> None:
    """The clock of the capturing host steps back in the middle of the capture."""
    group_sessions(scene)
    step_clock(scene, scene.pick(-5_000_000, -2_000_000))


def step_clock(scene: Scene, micros: int) -> None:
    """Add some time to all packets from the middle of the capture on."""
    packets = read_packets(scene.capture)
    middle = len(packets) // 2
    packets[middle:] = [
        replace(packet, time_ns=packet.time_ns + 1000 * micros) for packet in packets[middle:]
    ]
    scene.capture.write_bytes(pcap_bytes(packets))
    scene.happened("clock_step", CAPTURE, _time(packets[middle - 1]), _time(packets[middle]))


def _time(packet: Packet) -> datetime:
    return datetime.fromtimestamp(packet.time_ns / 1e9, UTC)
