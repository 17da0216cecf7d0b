"""Finds chosen packets of a capture: position, time and link type.

It walks over the records of a split as `scan` does, without reading the packets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.arrays import Rows
from kdissect.capture.mapped_files import Sources
from kdissect.capture.packet_reader import PACKET, SECRET, STEP_PACKET, step
from kdissect.capture.splits import Split
from kdissect.jit import kernel


@kernel
def _pick(
    buf: Any, cursor: Any, interfaces: Any, packet: Any, no_secrets: Any, first_packet: Any,
    wanted: Any, found: Any,
) -> Any:  # fmt: skip
    """Walk until the last of `wanted` (ascending numbers) is found; returns how many were found."""
    passed = 0
    row = 0
    while row < len(wanted) and step(buf, cursor, interfaces, no_secrets, packet) == STEP_PACKET:
        if first_packet + passed + cursor["other_count"] == wanted[row]:
            found[row] = packet
            row += 1
        passed += 1
    return row


def pick(
    split: Split, sources: Sources, wanted: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], Rows, npt.NDArray[np.int64]]:
    """(numbers int64[n], PACKET[n], link types int64[n]) of the packets `wanted` (ascending
    numbers) that are in the split.

    The link type is -1 if the capture does not describe the interface. Raises CaptureError if the
    file cannot be opened.
    """
    behind = split.first_packet + split.packet_count + split.other_count
    within = wanted[(wanted >= split.first_packet) & (wanted < behind)]
    found = np.zeros(len(within), PACKET)
    buf = sources.data(split.source)
    cursor, interfaces = split.reading()
    cursor["end"] = min(split.end, len(buf))
    packet, no_secrets = np.zeros(1, PACKET)[0], np.zeros(0, SECRET)
    count = _pick(buf, cursor, interfaces, packet, no_secrets, split.first_packet, within, found)
    assert count == len(within), (count, len(within), split)
    link_types = np.append(interfaces["link_type"], -1)[np.maximum(found["interface"], -1)]
    return within, found, link_types
