"""Captures of one exchange over many connections hold each of them whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kdissect
from bench.crowd import connections_of, crowd, heartbeat, large_fetch


@pytest.mark.parametrize("is_large", [False, True])
def test_every_exchange_is_there(tmp_path: Path, is_large: bool) -> None:
    """A crowd's capture has each exchange on its connection, in order, without anomalies."""
    path = tmp_path / "crowd.pcap"
    connection = connections_of(40, 4, 0.5)
    exchange = large_fetch() if is_large else heartbeat()
    crowd(path, exchange, connection)
    tables = kdissect.read(path)
    found = tables.exchanges.to_pandas()
    assert len(found) == 40
    assert set(found["status"]) == {"paired"}
    sizes = found.groupby("connection_id").size()
    assert sorted(sizes) == sorted(np.bincount(connection))
    for _, rows in found.sort_values("request_time").groupby("connection_id"):
        assert rows["correlation_id"].tolist() == list(range(len(rows)))
    assert tables.anomalies.num_rows == 0
    assert tables.records.num_rows == (40 * 1200 if is_large else 0)


def test_the_first_connection_has_its_share() -> None:
    """The first of 100 connections gets the wanted 90 % of the exchanges."""
    connection = connections_of(10_000, 100, 0.9)
    assert 0.88 < (connection == 0).mean() < 0.92
    assert len(np.unique(connection)) == 100
