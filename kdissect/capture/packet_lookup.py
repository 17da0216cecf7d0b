"""Finds chosen packets of a capture: position, time and link type.

It walks over the records of a split as `scan` does, without reading the packets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.mapped_files import Sources
from kdissect.capture.packet_reader import (
    PACKET,
    SECRET,
    STEP_PACKET,
    step,
)
from kdissect.capture.splits import Split
from kdissect.jit import kernel

# Where a packet lies in its source. link_type -1: the capture does not describe its interface.
_PLACE = np.dtype(
    [
        ("packet", "<i8"),  # Wireshark's frame.number
        ("pos", "<i8"),  # of its first byte
        ("captured", "<i8"),
        ("length", "<i8"),
        ("time_ns", "<i8"),
        ("link_type", "<i8"),
    ]
)


@kernel
def _pick(
    buf: Any, cursor: Any, interfaces: Any, packet: Any, no_secrets: Any, first_packet: Any,
    wanted: Any, places: Any,
) -> Any:  # fmt: skip
    """Walk until the last of `wanted` (ascending numbers) is found; returns how many were found."""
    passed = 0
    row = 0
    while row < len(wanted):
        outcome = step(buf, cursor, interfaces, no_secrets, packet)
        if outcome != STEP_PACKET:
            break
        number = first_packet + passed + cursor["other_count"]
        passed += 1
        if number == wanted[row]:
            interface = packet["interface"]
            link_type = np.int64(-1)
            if interface >= 0:
                link_type = interfaces["link_type"][interface]
            places["packet"][row] = number
            places["pos"][row] = packet["data_pos"]
            places["captured"][row] = packet["captured"]
            places["length"][row] = packet["length"]
            places["time_ns"][row] = packet["time_ns"]
            places["link_type"][row] = link_type
            row += 1
    return row


def pick(split: Split, sources: Sources, wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """_PLACE[n] of the packets `wanted` (int64[n], ascending numbers) that are in the split.

    Raises CaptureError if its file cannot be opened.
    """
    behind = split.first_packet + split.packet_count + split.other_count
    within = wanted[(wanted >= split.first_packet) & (wanted < behind)]
    places = np.zeros(len(within), _PLACE)
    if not len(within):
        return places
    buf = sources.data(split.source)
    cursor, interfaces = split.reading()
    cursor["end"] = min(split.end, len(buf))
    packet, no_secrets = np.zeros(1, PACKET)[0], np.zeros(0, SECRET)
    count = _pick(buf, cursor, interfaces, packet, no_secrets, split.first_packet, within, places)
    assert count == len(within), (count, len(within), split)
    return places
