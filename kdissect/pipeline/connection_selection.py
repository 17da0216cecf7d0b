"""Which connections of a bucket are followed, where there are more than the limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdissect.capture.segments import FRAGMENT_PART, SegmentBatch

REASON = "connection_limit"  # in captures.ignored_reasons


@dataclass(frozen=True, slots=True)
class SelectedConnections:
    """batch: what is left; given_up: packets of the others by source; pair_count: how many pairs of
    endpoints these were."""

    batch: SegmentBatch
    given_up: dict[int, int]
    pair_count: int


def follow(batch: SegmentBatch, limit: int) -> SelectedConnections:
    """At most `limit` pairs of endpoints: those with payload before others, the earliest first.

    So a flood of SYNs takes no place from connections that say something. The choice depends on the
    segments alone, not on the splits they came from.
    """
    count = len(batch.endpoints)
    if count <= limit:
        return SelectedConnections(batch, {}, 0)
    segments = batch.segments
    pair = segments["endpoints"]
    has_payload = np.zeros(count, np.bool_)
    has_payload[pair[segments["length"] > 0]] = True
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, pair, segments["time_ns"])
    words = np.frombuffer(batch.endpoints.tobytes(), ">u8").reshape(count, -1)
    order = np.lexsort((*words.T[::-1], first, ~has_payload))
    is_followed = np.zeros(count, np.bool_)
    is_followed[order[:limit]] = True
    kept = is_followed[pair]
    gone = segments[~kept]
    counted = gone["source"][gone["ip_id"] & FRAGMENT_PART == 0]
    sources, packets = np.unique(counted, return_counts=True)
    left = segments[kept]
    left["endpoints"] = (np.cumsum(is_followed) - 1)[left["endpoints"]]
    return SelectedConnections(
        SegmentBatch(batch.endpoints[is_followed], left),
        dict(zip(sources.tolist(), packets.tolist(), strict=True)),
        count - limit,
    )
