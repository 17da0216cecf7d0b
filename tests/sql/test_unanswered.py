"""Requests without a response, checked against captures before packets were removed."""

import gzip
from pathlib import Path

import pytest

import kdissect
from kdissect.api import Tables
from kdissect.sql import Database
from kdissect.sql.unanswered import unanswered
from tests.damage import lose_packets
from tests.report.made import exchange
from tests.report.made import tables as made

KEY = ("client_port", "correlation_id", "api_key", "request_time_ns")


def judged(tables: Tables) -> dict[int, bool]:
    names = ("exchanges", "connections", "anomalies")
    with Database({name: tables[name].dataset for name in names}) as database:
        rows = database.rows(unanswered())
    return {row["exchange_id"]: row["may_be_lost"] for row in rows}


def statuses(tables: Tables) -> dict[tuple[object, ...], tuple[int, str]]:
    rows = tables.exchanges.to_arrow(["exchange_id", "status", *KEY]).to_pylist()
    return {tuple(row[name] for name in KEY): (row["exchange_id"], row["status"]) for row in rows}


@pytest.mark.parametrize("name", ["sarama.pcap.gz", "java_2_0_1.pcap", "librdkafka.pcap"])
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in (2, 3))]
)
def test_answers_that_were_lost(name: str, seed: int, captures: Path, tmp_path: Path) -> None:
    """Two percent of the packets are gone. An answer among them is never called missing."""
    data = (captures / name).read_bytes()
    data = gzip.decompress(data) if name.endswith(".gz") else data
    lose_packets(data, tmp_path / "lost.pcap", 0.02, seed)
    before = statuses(kdissect.read(captures / name))
    tables = kdissect.read(tmp_path / "lost.pcap")
    may_be_lost = judged(tables)
    there = {ident: before.get(key) for key, (ident, _) in statuses(tables).items()}
    answered = [ident for ident in may_be_lost if (there[ident] or (0, ""))[1] == "paired"]
    assert answered
    assert all(may_be_lost[ident] for ident in answered)


def test_answers_that_never_came(captures: Path) -> None:
    """librdkafka closes connections while it waits for Metadata: no byte is missing there."""
    tables = kdissect.read(captures / "librdkafka.pcap")
    assert list(judged(tables).values()) == [False, False]


@pytest.mark.parametrize(
    ("closed_by", "close_reason", "may_be_lost"),
    [("broker", "fin", False), ("client", "fin", True), ("broker", "rst", True)],
)
def test_a_fin_of_the_broker_ends_its_answers(
    closed_by: str, close_reason: str, may_be_lost: bool
) -> None:
    """Packets are missing elsewhere; before a FIN of the broker none is."""
    closed = {"closed_by": closed_by, "close_reason": close_reason, "handshake_seen": True}
    tables = made(
        exchanges=[exchange(1, status="connection_closed", response_pos=None, request_pos=0)],
        connections=[{"connection_id": 1, **closed}],
        anomalies=[
            {"kind": "gap", "connection_id": 2, "direction": "request", "pos": 0, "byte_count": 9}
        ],
    )
    assert judged(tables) == {1: may_be_lost}
