"""Segments as the batch that reassembly takes, and captures in memory."""

from collections.abc import Sequence

import numpy as np

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import ENDPOINTS, SEGMENT, SegmentBatch
from tests.oracles.link_layers import scan_capture
from tests.oracles.segments import Segment

_FIELDS = ("time_ns", "side", "flags", "seq", "ack", "ip_id", "marks", "window", "length")


def in_memory(*contents: bytes) -> Sources:
    """Captures in memory, as `assemble` wants its sources."""
    arrays = {number: np.array(bytearray(data), np.uint8) for number, data in enumerate(contents)}
    return Sources([f"made-{number}" for number in arrays], arrays=arrays)


def batch_of(segments: Sequence[Segment], first: int = 0) -> tuple[SegmentBatch, Sources]:
    """Rows of the segments, numbered from `first` on, and the bytes that they point at."""
    rows = np.zeros(len(segments), SEGMENT)
    data = b"\0"
    for number, segment in enumerate(segments):
        for name in _FIELDS:
            rows[name][number] = getattr(segment, name)
        if segment.is_syn and segment.options is not None:
            data += segment.options
            rows["option_words"][number] = len(segment.options) // 4 + 1
        rows["pos"][number], rows["captured"][number] = len(data), len(segment.payload)
        rows["packet"][number] = first + number + 1
        data += segment.payload
    return SegmentBatch(np.zeros(1, ENDPOINTS), rows), in_memory(data)


def batch_of_capture(data: bytes) -> tuple[SegmentBatch, Sources]:
    """The segments of one connection, as the oracle finds them in a capture, and the capture."""
    found, _ = scan_capture(data)
    rows = np.zeros(len(found), SEGMENT)
    for name in set(SEGMENT.names or ()) & set(found[0]._fields if found else ()) - {"endpoints"}:
        rows[name] = [getattr(segment, name) for segment in found]
    endpoints = np.zeros(1, ENDPOINTS)
    for ip_a, port_a, ip_b, port_b, _ in {segment.endpoints for segment in found}:
        endpoints["ip_a"], endpoints["ip_b"] = list(ip_a), list(ip_b)
        endpoints["port_a"], endpoints["port_b"] = port_a, port_b
    return SegmentBatch(endpoints, rows), in_memory(data)
