"""Exchange indexes (`Assembly`): split by position, packed to bytes for a shuffle, concatenated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kdissect.arrays import (
    Bytes,
    Ids,
    Indices,
    Ints,
    Rows,
    copied,
    gather_ranges,
    joined,
    renumbered,
)
from kdissect.arrays import take as rows_of
from kdissect.capture.mapped_files import CARRIED_FROM, Sources
from kdissect.capture.segments import ENDPOINTS
from kdissect.kafka.assembly import ANOMALY, CONNECTION, EXCHANGE, EXTENT, Assembly, Carried
from kdissect.packing import pack, unpack
from kdissect.protocol.model import SIDES
from kdissect.tcp.connection_ids import connection_ids, exchange_ids

_KINDS = (ENDPOINTS, CONNECTION, EXCHANGE, EXTENT, ANOMALY)
_GROWING_OF_SIDE = ("time_ns", "end_time_ns", "pos", "packet", "extent_start")
_EMPTY = [np.zeros(0, kind) for kind in _KINDS]
NO_EXCHANGES = Assembly(_EMPTY[0], _EMPTY[1], _EMPTY[2], _EMPTY[3], _EMPTY[4])


def take(assembly: Assembly, rows: Indices) -> Assembly:
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


def _take_carried(data: Bytes, extents: Rows) -> Bytes:
    """The carried bytes of these extents; the extents are changed to their new positions."""
    rows = np.flatnonzero(extents["pos"] >= CARRIED_FROM)
    taken = Sources([]).carrying(data).gather(extents[rows])
    length = extents["length"][rows]
    extents["pos"][rows] = CARRIED_FROM + np.cumsum(length) - length
    return taken


def concat(parts: list[Assembly]) -> Assembly:
    """One assembly with the rows of all parts. Connections are renumbered, not merged."""
    parts = [NO_EXCHANGES, *parts]
    exchange_counts = [len(part.exchanges) for part in parts]
    extent_counts = [len(part.extents) for part in parts]
    connection_counts = [len(part.connections) for part in parts]
    endpoints = joined([part.endpoints for part in parts])
    connections = joined([part.connections for part in parts])
    connections["endpoints"] += _shifts([len(part.endpoints) for part in parts], connection_counts)
    exchanges = joined([part.exchanges for part in parts])
    exchanges["connection"] += _shifts(connection_counts, exchange_counts)
    for side in SIDES:
        exchanges[side]["extent_start"] += _shifts(extent_counts, exchange_counts)
    extents = joined([part.extents for part in parts])
    is_carried = extents["pos"] >= CARRIED_FROM
    shifts = _shifts([len(part.carried.data) for part in parts], extent_counts)
    extents["pos"][is_carried] += shifts[is_carried]
    carried = Carried(np.concatenate([part.carried.data for part in parts]))
    none = np.zeros(0, ANOMALY)
    return Assembly(endpoints, connections, exchanges, extents, none, carried=carried)


def _shifts(sizes: list[int], counts: list[int]) -> Indices:
    """int64: by how much the references of all parts' rows move. sizes: of the tables that they
    refer to, by part. counts: rows of each part."""
    return np.repeat(np.cumsum(sizes) - sizes, counts)


def to_bytes(assembly: Assembly) -> bytes:
    """Pack an assembly for a shuffle, without its anomalies, and without ids, which are random
    bytes that `from_bytes` makes again. What grows from row to row travels as the distance to the
    row before."""
    exchanges, connections = copied(assembly.exchanges), copied(assembly.connections)
    extents = copied(assembly.extents)
    exchanges["exchange_id"] = 0
    connections["connection_id"] -= _first_ids(assembly.endpoints, connections)
    for column in _growing(connections, exchanges, extents):
        column[:] = np.diff(column, prepend=0)
    return pack([assembly.endpoints, connections, exchanges, extents, assembly.carried.data])


def _growing(connections: Rows, exchanges: Rows, extents: Rows) -> list[Ints]:
    """Views of the columns whose values mostly grow from row to row."""
    sides = [exchanges[side][name] for side in SIDES for name in _GROWING_OF_SIDE]
    return [connections["first_time_ns"], connections["last_time_ns"], *sides, extents["pos"]]


def _first_ids(endpoints: Rows, connections: Rows) -> Ids:
    """The ids of connections, as far as their own rows show them."""
    return connection_ids(endpoints, connections["endpoints"], connections["first_time_ns"])


def parts(assembly: Assembly, slot: Indices, row_bytes_max: int) -> Iterator[tuple[int, Assembly]]:
    """Yield (slot, some exchanges) by slot int64[n], each at most about `row_bytes_max` bytes."""
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
            yield int(slot[rows[0]]), take(assembly, part)


def from_bytes(data: bytes) -> Assembly:
    """Unpack the assembly that `to_bytes` packed."""
    arrays = unpack(data, (*_KINDS[:4], np.dtype(np.uint8)))
    endpoints, connections, exchanges, extents, carried = arrays
    for column in _growing(connections, exchanges, extents):
        np.cumsum(column, out=column)
    connections["connection_id"] += _first_ids(endpoints, connections)
    exchanges["exchange_id"] = exchange_ids(exchanges, connections["connection_id"])
    return Assembly(
        endpoints, connections, exchanges, extents, np.zeros(0, ANOMALY), carried=Carried(carried)
    )


def places(exchanges: Rows, extents: Rows, carried: Carried) -> Rows:
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
