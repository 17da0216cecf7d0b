"""Chains of answers as plain Python over a stream: the definition of `lone.chains`."""

from __future__ import annotations

from kdissect.kafka.evidence_reference import response_header, rises
from kdissect.kafka.frame_search import STEP_MAX
from kdissect.kafka.response_only import FRAMES_READ, ID_MAX
from kdissect.tcp.pieces_reference import PlainStream


def chain(stream: PlainStream, limit: int) -> list[int]:
    """The position behind each of the first frames that are there whole and may be answers."""
    ends: list[int] = []
    pos = 0
    last: int | None = None
    while pos < stream.end and stream.byte(pos) is not None:
        plausible, size, correlation = response_header(stream, pos, limit)
        if correlation is not None:
            plausible = plausible and correlation < ID_MAX
            if last is not None:
                plausible = plausible and rises(correlation, last, STEP_MAX)
        if not plausible:
            return []
        if size is None or correlation is None or len(ends) == FRAMES_READ:
            break
        end = pos + 4 + size
        if stream.bytes_at(pos, 4 + size) is None:
            break
        ends.append(end)
        pos, last = end, correlation
    return ends
