"""Exchange indexes (`Assembly`): split by position, packed to bytes for a shuffle, concatenated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kdissect.arrays import copied, gather_ranges, joined, renumbered
from kdissect.arrays import take as rows_of
from kdissect.capture.mapped_files import CARRIED_FROM, Sources
from kdissect.capture.segments import ENDPOINTS
from kdissect.kafka.assembly import ANOMALY, CONNECTION, EXCHANGE, EXTENT, Assembly, Carried
from kdissect.packing import pack, unpack
from kdissect.protocol.model import SIDES

_KINDS = (ENDPOINTS, CONNECTION, EXCHANGE, EXTENT, ANOMALY)


def take(assembly: Assembly, rows: npt.NDArray[np.int64]) -> Assembly:
    """The exchanges `rows`, with the connections, extents and carried bytes that they use.

    Anomalies and TLS facts are left out: they were written to tables before.
    """
    exchanges = rows_of(assembly.exchanges, rows)
    used, connection = renumbered(exchanges["connection"], len(assembly.connections))
    connections = assembly.connections[used]
    pairs, endpoints = renumbered(connections["endpoints"], len(assembly.endpoints))
    connections["endpoints"] = endpoints
    exchanges["connection"] = connection
    parts, base = [], 0
    for side in SIDES:
        start = exchanges[side]["extent_start"].astype(np.int64)
        count = exchanges[side]["extent_count"].astype(np.int64)
        indices, new_start = gather_ranges(start, count)
        parts.append(rows_of(assembly.extents, indices))
        exchanges[side]["extent_start"] = new_start + base
        base += len(indices)
    chosen = joined(parts)
    return Assembly(
        assembly.endpoints[pairs],
        connections,
        exchanges,
        chosen,
        np.zeros(0, ANOMALY),
        carried=Carried(_take_carried(assembly.carried.data, chosen)),
    )


def _take_carried(
    data: npt.NDArray[np.uint8], extents: npt.NDArray[np.void]
) -> npt.NDArray[np.uint8]:
    """The carried bytes of these extents; the extents are changed to their new positions."""
    rows = np.flatnonzero(extents["pos"] >= CARRIED_FROM)
    taken = Sources([]).carrying(data).gather(extents[rows])
    length = extents["length"][rows]
    extents["pos"][rows] = CARRIED_FROM + np.cumsum(length) - length
    return taken


def concat(parts: list[Assembly]) -> Assembly:
    """One assembly with the rows of all parts. Connections are renumbered, not merged."""
    if not parts:
        empty = [np.zeros(0, kind) for kind in _KINDS]
        return Assembly(empty[0], empty[1], empty[2], empty[3], empty[4])
    endpoints, connections, exchanges, extents = [], [], [], []
    endpoint_base = connection_base = extent_base = carried_base = 0
    for part in parts:
        connection = copied(part.connections)
        connection["endpoints"] += endpoint_base
        exchange = copied(part.exchanges)
        exchange["connection"] += connection_base
        for side in SIDES:
            exchange[side]["extent_start"] += extent_base
        endpoints.append(part.endpoints)
        connections.append(connection)
        exchanges.append(exchange)
        moved = part.extents
        if len(part.carried.data):
            moved = copied(moved)
            moved["pos"][moved["pos"] >= CARRIED_FROM] += carried_base
        extents.append(moved)
        carried_base += len(part.carried.data)
        endpoint_base += len(part.endpoints)
        connection_base += len(part.connections)
        extent_base += len(part.extents)
    return Assembly(
        joined(endpoints),
        joined(connections),
        joined(exchanges),
        joined(extents),
        np.zeros(0, ANOMALY),
        carried=Carried(np.concatenate([part.carried.data for part in parts])),
    )


def to_bytes(assembly: Assembly) -> bytes:
    """Pack an assembly, without its anomalies, for a shuffle."""
    arrays = (assembly.endpoints, assembly.connections, assembly.exchanges, assembly.extents)
    return pack([*arrays, assembly.carried.data])


def packed_parts(
    assembly: Assembly, slot: npt.NDArray[np.int64], row_bytes_max: int
) -> Iterator[tuple[int, bytes]]:
    """Yield (slot, packed exchanges) by slot int64[n], each at most about `row_bytes_max` bytes."""
    exchanges = assembly.exchanges
    if not len(exchanges):
        return
    cost = np.full(len(exchanges), exchanges.itemsize)
    for side in SIDES:
        cost += exchanges[side]["extent_count"] * EXTENT.itemsize
        if len(assembly.carried.data):
            cost += np.maximum(exchanges[side]["size"], 0)
    order = np.argsort(slot, kind="stable")
    bounds = np.flatnonzero(np.diff(slot[order])) + 1
    for rows in np.split(order, bounds):
        number = np.cumsum(cost[rows]) // row_bytes_max
        for part in np.split(rows, np.flatnonzero(np.diff(number)) + 1):
            yield int(slot[rows[0]]), to_bytes(take(assembly, part))


def from_bytes(data: bytes) -> Assembly:
    """Unpack the assembly that `to_bytes` packed."""
    arrays = unpack(data, (*_KINDS[:4], np.dtype(np.uint8)))
    endpoints, connections, exchanges, extents, carried = arrays
    return Assembly(
        endpoints, connections, exchanges, extents, np.zeros(0, ANOMALY), carried=Carried(carried)
    )


def places(
    exchanges: npt.NDArray[np.void], extents: npt.NDArray[np.void], carried: Carried
) -> npt.NDArray[np.void]:
    """EXTENT[n]: the extent of each exchange's first captured byte; source -1 if it has none.

    For decrypted bytes it is the extent in the file that they came from, for other carried ones
    position 0.
    """
    has_request = exchanges["request"]["size"] >= 0
    start, count = (
        np.where(has_request, exchanges["request"][name], exchanges["response"][name])
        for name in ("extent_start", "extent_count")
    )
    first = np.zeros(len(exchanges), EXTENT)
    first["source"] = -1
    has_bytes = np.flatnonzero(count > 0)
    first[has_bytes] = rows_of(extents, start[has_bytes])
    rows = np.flatnonzero(first["pos"] >= CARRIED_FROM)
    record = np.searchsorted(carried.start, first["pos"][rows] - CARRIED_FROM, "right") - 1
    first["pos"][rows] = np.append(carried.file_pos, 0)[record]
    return first
