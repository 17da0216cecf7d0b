"""Ids of connections and exchanges: positive 63-bit hashes that do not depend on the run.

A connection's id is made from its endpoints and the time of its first packet. An exchange's id is
made from its connection, a direction and a stream position. So ids are the same however the
captures are split or rotated.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kdissect.arrays import Ids, Indices, Rows, TimesNs
from kdissect.capture.segments import ENDPOINTS
from kdissect.protocol.model import REQUEST, RESPONSE

Hashes = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mixed(state: Hashes, word: npt.ArrayLike) -> Hashes:
    """Add one 64-bit word to each hash: the finalizer of SplitMix64 (Steele) over their sum."""
    value = state + np.asarray(word).astype(np.uint64) + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


def positive(hashes: Hashes) -> Ids:
    """int64 in 1 .. 2^63 - 1; never 0, which means "none"."""
    ids = (hashes >> np.uint64(1)).astype(np.int64)
    return np.maximum(ids, 1)


def connection_ids(endpoints: Rows, pair: Indices, first_time_ns: TimesNs) -> Ids:
    """int64[n]: ids of connections, from their row of `endpoints`, ascending, and first time (ns).
    Where two connections of the same endpoints begin at the same time, they are numbered."""
    same = (np.diff(pair, prepend=-1) == 0) & (np.diff(first_time_ns, prepend=-1) == 0)
    row = np.arange(len(pair))
    number = row - np.maximum.accumulate(np.where(same, 0, row))
    words = np.frombuffer(endpoints.tobytes(), "<u8").reshape(-1, ENDPOINTS.itemsize // 8)
    state = np.zeros(len(endpoints), np.uint64)
    for column in range(words.shape[1]):
        state = mixed(state, words[:, column])
    return positive(mixed(mixed(state[pair], first_time_ns), number))


def exchange_ids(exchanges: Rows, connection_ids: Ids) -> Ids:
    """int64[n]: ids of EXCHANGE rows, from connection id, and direction and position of the first
    side. connection_ids: int64, by row of the connection."""
    asked = exchanges["request"]["size"] >= 0
    direction = np.where(asked, REQUEST, RESPONSE)
    pos = np.where(asked, exchanges["request"]["pos"], exchanges["response"]["pos"])
    state = connection_ids[exchanges["connection"]].astype(np.uint64)
    return positive(mixed(mixed(state, direction), pos))
