"""Assemblies that are cut, packed and joined have every row and its references."""

import numpy as np

from kdissect.capture.segments import ENDPOINTS
from kdissect.kafka.assembly import ANOMALY, CONNECTION, EXCHANGE, EXTENT, Assembly
from kdissect.pipeline import exchange_index


def assembly(seed: int, count: int = 20) -> Assembly:
    random = np.random.default_rng(seed)
    endpoints = np.zeros(4, ENDPOINTS)
    endpoints["port_a"] = random.integers(1, 60000, 4)
    connections = np.zeros(6, CONNECTION)
    connections["connection_id"] = random.integers(1, 2**62, 6)
    connections["endpoints"] = random.integers(0, 4, 6)
    exchanges = np.zeros(count, EXCHANGE)
    exchanges["exchange_id"] = random.integers(1, 2**62, count)
    exchanges["connection"] = random.integers(0, 6, count)
    extents = np.zeros(200, EXTENT)
    extents["pos"] = np.arange(200)
    for side in exchange_index.SIDES:
        exchanges[side]["extent_count"] = random.integers(0, 4, count)
        exchanges[side]["extent_start"] = random.integers(0, 190, count)
    return Assembly(endpoints, connections, exchanges, extents, np.zeros(0, ANOMALY))


def exchange_facts(given: Assembly) -> list[tuple[object, ...]]:
    """Every exchange with the rows that it refers to, in order."""
    rows = []
    for exchange in given.exchanges:
        connection = given.connections[exchange["connection"]]
        extents = []
        for side in exchange_index.SIDES:
            start, count = int(exchange[side]["extent_start"]), int(exchange[side]["extent_count"])
            extents.append(given.extents["pos"][start : start + count].tolist())
        rows.append(
            (
                int(exchange["exchange_id"]),
                int(connection["connection_id"]),
                int(given.endpoints[connection["endpoints"]]["port_a"]),
                extents,
            )
        )
    return rows


def test_a_slice_keeps_its_references() -> None:
    """Rows taken in any order lead to the same connections and extents."""
    whole = assembly(1)
    rows = np.array([3, 1, 17, 3])
    expected = exchange_facts(whole)
    assert exchange_facts(exchange_index.take(whole, rows)) == [expected[row] for row in rows]


def test_packing_and_joining_loses_nothing() -> None:
    """bytes and back, several parts in one: the rows are those of the parts."""
    parts = [exchange_index.take(assembly(seed), np.arange(5 + seed)) for seed in range(3)]
    packed = [exchange_index.from_bytes(exchange_index.to_bytes(part)) for part in parts]
    assert exchange_facts(exchange_index.concat(packed)) == [
        row for part in parts for row in exchange_facts(part)
    ]
    assert len(exchange_index.concat([]).exchanges) == 0
