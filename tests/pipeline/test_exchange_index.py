"""Assemblies that are cut, packed and joined have every row and its references."""

from pathlib import Path
from typing import Any

import numpy as np

from kdissect.capture.mapped_files import CARRIED_FROM, Sources
from kdissect.capture.scratch import Scratch, Written
from kdissect.capture.segments import ENDPOINTS
from kdissect.kafka.assembly import ANOMALY, CONNECTION, EXCHANGE, EXTENT, Assembly
from kdissect.pipeline import exchange_index
from kdissect.tcp.connection_ids import connection_ids, exchange_ids
from tests.builders.frames import request, response
from tests.builders.talks import BROKER, CLIENT
from tests.builders.tls_talk import Parties, TlsTalk, frame_bytes


def assembly(seed: int) -> Assembly:
    random = np.random.default_rng(seed)
    endpoints = np.zeros(4, ENDPOINTS)
    endpoints["port_a"] = random.integers(1, 60000, 4)
    connections = np.zeros(6, CONNECTION)
    connections["connection_id"] = random.integers(1, 2**62, 6)
    connections["endpoints"] = random.integers(0, 4, 6)
    exchanges = np.zeros(20, EXCHANGE)
    exchanges["connection"] = random.integers(0, 6, 20)
    extents = np.zeros(200, EXTENT)
    extents["pos"] = np.arange(200)
    for side in exchange_index.SIDES:
        exchanges[side]["size"] = random.integers(-1, 9, 20)
        exchanges[side]["pos"] = random.integers(0, 2**40, 20)
        exchanges[side]["extent_count"] = random.integers(0, 4, 20)
        exchanges[side]["extent_start"] = random.integers(0, 190, 20)
    exchanges["exchange_id"] = exchange_ids(exchanges, connections["connection_id"])
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


def test_ids_are_not_packed() -> None:
    """Exchanges like the ones before them cost less than the eight random bytes of their ids."""
    exchanges = np.zeros(1000, EXCHANGE)
    exchanges["request"]["pos"] = 40 * np.arange(1000)
    connections = np.zeros(1, CONNECTION)
    exchanges["exchange_id"] = exchange_ids(exchanges, connections["connection_id"])
    none = np.zeros(0, EXTENT), np.zeros(0, ANOMALY)
    packed = exchange_index.to_bytes(
        Assembly(np.zeros(1, ENDPOINTS), connections, exchanges, *none)
    )
    assert len(packed) < 4 * len(exchanges)
    assert exchange_index.from_bytes(packed).exchanges.tobytes() == exchanges.tobytes()


def test_ids_that_follow_from_the_rows_are_not_packed() -> None:
    """Others are."""
    connections = np.zeros(1000, CONNECTION)
    connections["first_time_ns"] = 1000 * np.arange(1000)
    endpoints = np.zeros(1, ENDPOINTS)
    exchanges, extents, anomalies = np.zeros(0, EXCHANGE), np.zeros(0, EXTENT), np.zeros(0, ANOMALY)
    sizes = []
    for number in range(2):
        times, pair = connections["first_time_ns"], connections["endpoints"]
        connections["connection_id"] = connection_ids(endpoints, pair, times * (1 - number))
        whole = Assembly(endpoints, connections, exchanges, extents, anomalies)
        data = exchange_index.to_bytes(whole)
        assert exchange_index.from_bytes(data).connections.tobytes() == connections.tobytes()
        sizes.append(len(data))
    assert sizes[0] < 4 * 1000 < 8 * 1000 < sizes[1]


# -- decrypted bytes ------------------------------------------------------------------------


def _frames(assembly: Assembly) -> list[bytes]:
    return [
        frame_bytes(assembly, row[side])
        for row in assembly.exchanges
        for side in exchange_index.SIDES
    ]


def test_slices_contain_their_decrypted_bytes(tmp_path: Path) -> None:
    """Decrypted frames survive a split into three packed slices, and their joining."""
    parties = Parties(tmp_path, "TLSv1_3")
    talk = TlsTalk(parties)
    for number in range(20):
        talk.say(CLIENT, request(number, body=bytes([number]) * 1000 * number))
        talk.say(BROKER, response(number, body=bytes([0, number]) * 1000))
    whole = talk.playbook().run(parties.key_log())
    assert (whole.extents["pos"] >= CARRIED_FROM).all()
    rows = np.random.default_rng(1).permutation(20)
    parts = [
        exchange_index.from_bytes(exchange_index.to_bytes(exchange_index.take(whole, some)))
        for some in np.array_split(rows, 3)
    ]
    again = exchange_index.concat(parts)
    expected = _frames(whole)
    assert _frames(again) == [expected[2 * row + side] for row in rows for side in (0, 1)]
    assert len(again.carried.data) == sum(map(len, expected))
    place: Any = exchange_index.places(whole.exchanges, whole.extents, whole.carried)
    assert (place["source"] == 0).all()
    assert (np.diff(place["pos"]) > 0).all()


def test_empty_slices_can_be_joined() -> None:
    """A packed empty slice can be joined with an unpacked one."""
    plain = exchange_index.concat([])
    packed = exchange_index.from_bytes(exchange_index.to_bytes(plain))
    both = exchange_index.concat([packed, plain])
    assert not len(both.carried.data)


def test_carried_bytes_have_places(tmp_path: Path) -> None:
    """Extents read carried bytes of any source by positions after those of files."""
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    spool = Written(np.uint8, Scratch(in_files=True))
    parts = [np.frombuffer(part, np.uint8) for part in (b"xyz", b"", b"12")]
    assert [spool.append(part) for part in parts] == [0, 3, 3]
    sources = Sources([str(path)])
    more = sources.carrying(spool.array())
    extents = np.zeros(2, EXTENT)
    extents["source"], extents["length"] = [7, 0], [3, 2]
    extents["pos"] = [CARRIED_FROM + 2, 1]
    assert more.gather(extents).tobytes() == b"z12bc"
    assert len(sources) == 1
    assert not len(Written(np.uint8, Scratch(in_files=True)).array())
