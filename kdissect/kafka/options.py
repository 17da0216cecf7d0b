"""Options of assembling, and a check of its input."""

from __future__ import annotations

from dataclasses import dataclass

from kdissect.capture.segments import SegmentBatch

# Default of Kafka's socket.request.max.bytes (100 MiB). A larger size is reported as an anomaly.
FRAME_SIZE_MAX = 104_857_600
CONNECTIONS_MAX = 500_000  # connections followed at once, those of a batch of segments
# Mirror ports and `-i any` deliver the second copy of a packet within this time.
DUPLICATE_WINDOW_NS = 10_000_000


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """ports: hints that a connection is Kafka. frame_size_max: bytes that a size prefix may
    claim. duplicate_window_ns: the second copy of a packet arrives within this time."""

    ports: tuple[int, ...] = ()
    frame_size_max: int = FRAME_SIZE_MAX
    duplicate_window_ns: int = DUPLICATE_WINDOW_NS


def check_batch(batch: SegmentBatch) -> None:
    """Raise ValueError if a segment refers outside the batch.

    `Sources.addresses` checks that the payload lies inside the captures. After both, kernels may
    read every captured byte without further bounds checks.
    """
    segments = batch.segments
    if not len(segments):
        return
    if segments["source"].min() < 0:
        raise ValueError("batch: a segment names no source")
    if segments["endpoints"].min() < 0 or segments["endpoints"].max() >= len(batch.endpoints):
        raise ValueError("batch: a segment names an endpoint pair that is not in the batch")
    if segments["side"].max() > 1:
        raise ValueError("batch: a segment's side is neither 0 nor 1")
    captured = segments["captured"]
    if captured.min() < 0 or (captured > segments["length"]).any():
        raise ValueError("batch: a segment has captured more than its length, or less than nothing")
