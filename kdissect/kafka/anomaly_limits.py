"""Limits the number of anomalies that a stream lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.kafka.assembly import Anomaly
from kdissect.kafka.frame_tables import BAD_SIZE
from kdissect.kafka.options import StreamOptions

_SIZES_END = 2**31  # Kafka's sizes are int32, so a larger one is no size prefix


def bounded(anomalies: npt.NDArray[np.void], options: StreamOptions) -> npt.NDArray[np.void]:
    """The anomalies of a batch, sorted by connection, direction and position, within the limits.

    Of a direction's gaps, the first `gaps_max` are kept; one more row covers the rest, and a LIMIT
    row says so. The same holds for its unframed byte ranges. A size prefix beyond `frame_size_max`
    adds a LIMIT row, unless it is text.
    """
    kind = anomalies["kind"]
    parts = [anomalies]
    unframed = kind == Anomaly.UNFRAMED_BYTES
    beyond = (anomalies["b"] > options.frame_size_max) & (anomalies["b"] < _SIZES_END)
    beyond &= ~_is_text(anomalies["b"])
    rows = anomalies[unframed & (anomalies["a"] == BAD_SIZE) & beyond].copy()
    if len(rows):
        rows["a"] = rows["b"]
        parts.append(_limit_rows(rows, rows["a"], options.frame_size_max, 0))
    for one in (Anomaly.GAP, Anomaly.UNFRAMED_BYTES):
        if int((kind == one).sum()) > options.gaps_max:
            parts = _listed(parts, one, options.gaps_max)
    if len(parts) == 1:
        return anomalies
    made = np.concatenate(parts)
    order = np.lexsort((made["kind"], made["pos"], made["direction"], made["connection"]))
    return made[order]


def _is_text(sizes: Any) -> Any:
    """bool[n]: whether the four bytes of a size are printable, as in other protocols."""
    letters = [(sizes >> shift) & 255 for shift in (24, 16, 8, 0)]
    return np.all([(letter >= 32) & (letter < 127) for letter in letters], axis=0)


def _limit_rows(rows: Any, a: Any, limit: int, byte_count: Any) -> Any:
    rows["kind"] = Anomaly.LIMIT
    rows["a"], rows["b"], rows["byte_count"] = a, limit, byte_count
    rows["extent_count"] = 0
    return rows


def _listed(parts: list[Any], kind: Anomaly, most: int) -> list[Any]:
    """parts[0] with at most `most` rows of a kind per direction, and rows that cover the others."""
    anomalies = parts[0]
    places = np.flatnonzero(anomalies["kind"] == kind)
    rows = anomalies[places]
    stream = rows["connection"].astype(np.int64) * 2 + rows["direction"]
    starts = np.flatnonzero(np.diff(stream, prepend=-1))
    rank = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
    behind = rank >= most
    if not behind.any():
        return parts
    first = places[rank == most]
    covering = anomalies[first].copy()
    group = np.cumsum(rank[behind] == most) - 1
    byte_count = np.zeros(len(first), np.int64)
    np.add.at(byte_count, group, rows["byte_count"][behind])
    covering["byte_count"] = byte_count
    covering["extent_count"] = 0
    limit_rows = _limit_rows(covering.copy(), most + np.bincount(group), most, byte_count)
    left = np.ones(len(anomalies), np.bool_)
    left[places[behind]] = False
    return [anomalies[left], *parts[1:], covering, limit_rows]
