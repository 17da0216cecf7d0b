"""Finds chosen packets of a capture: position, time and link type.

It walks over the records of a split as `scan` does, without reading the packets.
"""

from __future__ import annotations

import numpy as np

from kdissect.arrays import Indices, Rows
from kdissect.capture.mapped_files import Sources
from kdissect.capture.packet_reader import CURSOR, STEP_PACKET, Reading, step
from kdissect.capture.splits import Split
from kdissect.jit import kernel


@kernel
def _pick(reading: Reading, wanted: Indices, found: Rows) -> int:
    """Walk until the last of `wanted` (ascending numbers) is found; returns how many were found."""
    row = 0
    while row < len(wanted) and step(reading) == STEP_PACKET:
        if reading.cursor["number"] == wanted[row]:
            found[row] = reading.cursor
            row += 1
    return row


def pick(split: Split, sources: Sources, wanted: Indices) -> tuple[Rows, Indices]:
    """(CURSOR[n] after each packet, link types int64[n]) of the packets `wanted` (ascending
    numbers) that are in the split.

    The link type is -1 if the capture does not describe the interface. Raises CaptureError if the
    file cannot be opened.
    """
    within = wanted[(wanted > split.number_before) & (wanted <= split.last_number)]
    found = np.zeros(len(within), CURSOR)
    reading = split.reading(sources.data(split.source))
    count = _pick(reading, within, found)
    assert count == len(within), (count, len(within), split)
    link_types = np.append(reading.interfaces["link_type"], -1)[np.maximum(found["interface"], -1)]
    return found, link_types
