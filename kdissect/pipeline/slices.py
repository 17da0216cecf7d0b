"""Assemblies in pieces: the index of exchanges cut by place, packed to bytes, put together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kdissect.capture.index import ENDPOINTS
from kdissect.stream.index import ANOMALY, CONNECTION, EXCHANGE, EXTENT, Assembly

SIDES = ("request", "response")
_KINDS = (ENDPOINTS, CONNECTION, EXCHANGE, EXTENT, ANOMALY)


def gather_ranges(
    start: npt.NDArray[np.int64], count: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(indices of all ranges one after the other, new start of each range)."""
    ends = np.cumsum(count)
    new_start = ends - count
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(start - new_start, count) + np.arange(total), new_start


def take(assembly: Assembly, rows: npt.NDArray[np.int64]) -> Assembly:
    """The exchanges `rows` with the connections and extents they use (no anomalies)."""
    exchanges = assembly.exchanges[rows]
    used, connection = np.unique(exchanges["connection"], return_inverse=True)
    connections = assembly.connections[used]
    pairs, endpoints = np.unique(connections["endpoints"], return_inverse=True)
    connections["endpoints"] = endpoints
    exchanges["connection"] = connection
    extents = []
    base = 0
    for side in SIDES:
        start = exchanges[side]["extent_start"].astype(np.int64)
        count = exchanges[side]["extent_count"].astype(np.int64)
        indices, new_start = gather_ranges(start, count)
        extents.append(assembly.extents[indices])
        exchanges[side]["extent_start"] = new_start + base
        base += len(indices)
    return Assembly(
        assembly.endpoints[pairs],
        connections,
        exchanges,
        np.concatenate(extents),
        np.zeros(0, ANOMALY),
    )


def concat(parts: list[Assembly]) -> Assembly:
    """One assembly with the rows of all; connections are not merged, only renumbered."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        empty = [np.zeros(0, kind) for kind in _KINDS]
        return Assembly(empty[0], empty[1], empty[2], empty[3], empty[4])
    endpoints, connections, exchanges, extents = [], [], [], []
    endpoint_base = connection_base = extent_base = 0
    for part in parts:
        connection = part.connections.copy()
        connection["endpoints"] += endpoint_base
        exchange = part.exchanges.copy()
        exchange["connection"] += connection_base
        for side in SIDES:
            exchange[side]["extent_start"] += extent_base
        endpoints.append(part.endpoints)
        connections.append(connection)
        exchanges.append(exchange)
        extents.append(part.extents)
        endpoint_base += len(part.endpoints)
        connection_base += len(part.connections)
        extent_base += len(part.extents)
    return Assembly(
        np.concatenate(endpoints),
        np.concatenate(connections),
        np.concatenate(exchanges),
        np.concatenate(extents),
        np.zeros(0, ANOMALY),
    )


def to_bytes(assembly: Assembly) -> bytes:
    """Everything but the anomalies, packed for a shuffle."""
    arrays = (assembly.endpoints, assembly.connections, assembly.exchanges, assembly.extents)
    counts = np.array([len(array) for array in arrays], "<i8")
    return b"".join([counts.tobytes(), *(array.tobytes() for array in arrays)])


def from_bytes(data: bytes) -> Assembly:
    """What `to_bytes` packed; the arrays are copies and may be changed."""
    counts = np.frombuffer(data, "<i8", 4)
    arrays = []
    pos = counts.nbytes
    for kind, count in zip(_KINDS, counts, strict=False):
        array = np.frombuffer(data, kind, int(count), pos).copy()
        pos += array.nbytes
        arrays.append(array)
    return Assembly(arrays[0], arrays[1], arrays[2], arrays[3], np.zeros(0, ANOMALY))


def places(exchanges: npt.NDArray[np.void], extents: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Of each exchange the extent with its first captured byte (source -1 where there is none)."""
    asked = exchanges["request"]["size"] >= 0
    start = np.where(
        asked, exchanges["request"]["extent_start"], exchanges["response"]["extent_start"]
    )
    count = np.where(
        asked, exchanges["request"]["extent_count"], exchanges["response"]["extent_count"]
    )
    nowhere = np.zeros(1, EXTENT)
    nowhere["source"] = -1
    padded = np.concatenate([extents, nowhere])
    return padded[np.where(count > 0, start, len(extents))]
