"""Requests without a response, checked against captures before packets were removed."""

from pathlib import Path
from typing import Any

import pytest

import kdissect
from kdissect.api import Tables
from kdissect.sql import Database
from kdissect.sql.requests import unanswered
from tests.builders.captures import lose_packets, split_capture
from tests.builders.tables import SECOND_US, at, connection, exchange
from tests.builders.tables import tables as made
from tests.cases import cases

KEY = ("client_port", "correlation_id", "api_key", "request_time_ns")


def judged(tables: Tables) -> dict[int, bool]:
    names = ("captures", "exchanges", "connections", "anomalies")
    with Database({name: tables[name].dataset for name in names}) as database:
        rows = database.rows(unanswered())
    return {row["exchange_id"]: row["may_be_lost"] for row in rows}


def statuses(tables: Tables) -> dict[tuple[object, ...], tuple[int, str]]:
    rows = tables.exchanges.to_arrow(["exchange_id", "status", *KEY]).to_pylist()
    return {tuple(row[name] for name in KEY): (row["exchange_id"], row["status"]) for row in rows}


@pytest.mark.parametrize("name", ["sarama.pcap.gz", "java_2_0_1.pcap", "librdkafka.pcap"])
@cases("seed", [1], heavy=[2, 3])
def test_answers_that_were_lost(name: str, seed: int, captures: Path, tmp_path: Path) -> None:
    """Two percent of the packets are gone. An answer among them is never called missing."""
    before = statuses(kdissect.read(captures / name))
    tables = kdissect.read(lose_packets(captures / name, tmp_path / "lost.pcap", 0.02, seed))
    may_be_lost = judged(tables)
    there = {ident: before.get(key) for key, (ident, _) in statuses(tables).items()}
    answered = [ident for ident in may_be_lost if (there[ident] or (0, ""))[1] == "paired"]
    assert answered
    assert all(may_be_lost[ident] for ident in answered)


def test_a_capture_that_ends_before_an_answer(
    captures: Path, librdkafka: Tables, tmp_path: Path
) -> None:
    """A client closes its side during a long poll. The capture ends before the broker's answer."""
    head, packets = split_capture((captures / "librdkafka.pcap").read_bytes())
    (tmp_path / "cut.pcap").write_bytes(head + b"".join(packets[: len(packets) * 3 // 4]))
    before = statuses(librdkafka)
    tables = kdissect.read(tmp_path / "cut.pcap")
    may_be_lost = judged(tables)
    there = {ident: before[key][1] for key, (ident, _) in statuses(tables).items()}
    assert [there[ident] for ident, lost in may_be_lost.items() if not lost] == [
        "connection_closed"
    ]


def test_answers_that_never_came(librdkafka: Tables) -> None:
    """librdkafka closes connections while it waits for Metadata: no byte is missing there."""
    assert list(judged(librdkafka).values()) == [False, False]


def made_set(gaps: list[int], files: dict[int, tuple[int, int]], **closed: object) -> Tables:
    """Files with their seconds, of which some have a gap. A client at 10.0.0.1 sends a request to
    10.0.0.9 in second 1, which file 7 has, and the connection ends in second 3."""
    return made(
        captures=[
            {"capture_id": ident, "first_time": at(first), "last_time": at(last)}
            for ident, (first, last) in files.items()
        ],
        exchanges=[
            exchange(1, at_us=SECOND_US, status="connection_closed", request_pos=0),
            exchange(2, connection_id=2, client_ip="10.0.0.2", request_capture_id=8),
        ],
        connections=[connection(1, first_time=at(1), last_time=at(3), **closed)],
        anomalies=[
            {"kind": "gap", "connection_id": 2, "capture_id": ident, "pos": 0, "byte_count": 9}
            for ident in gaps
        ],
    )


@pytest.mark.parametrize(
    ("gaps", "files", "closed", "may_be_lost"),
    [
        # packets are missing elsewhere in the file; before a FIN of the broker none is
        ([7], {7: (0, 9)}, ("broker", "fin", True), False),
        ([7], {7: (0, 9)}, ("client", "fin", True), True),
        ([7], {7: (0, 9)}, ("broker", "rst", True), True),
        # a broker may answer after the client's FIN; the capture goes on without loss
        ([], {7: (0, 9)}, ("client", "fin", True), False),
        ([], {7: (0, 9)}, ("client", "fin", False), True),
        ([], {7: (0, 20)}, ("client", "fin", False), False),
        # a file of a later time, of another host, and the next part of a rotated one lack packets
        ([8], {7: (0, 9), 8: (10, 20)}, ("client", "fin", True), False),
        ([8], {7: (0, 9), 8: (2, 20)}, ("client", "fin", True), False),
        ([8], {7: (0, 2), 8: (3, 20)}, ("client", "fin", True), True),
    ],
)
def test_where_an_answer_may_be_lost(
    gaps: list[int], files: dict[int, Any], closed: tuple[str, str, bool], may_be_lost: bool
) -> None:
    """The request without a response is in file 7. closed: by whom, how, and whether the broker's
    direction has ended."""
    how = dict(zip(("closed_by", "close_reason", "response_ended"), closed, strict=True))
    assert judged(made_set(gaps, files, **how))[1] == may_be_lost


def test_loss_in_one_of_two_recordings(captures: Path, tmp_path: Path) -> None:
    """A lossy recording of another time leaves the requests of a whole one decided."""
    whole = captures / "librdkafka.pcap"
    lossy = lose_packets(captures / "sarama.pcap.gz", tmp_path / "lossy.pcap", 0.02)
    alone, both = judged(kdissect.read(whole)), judged(kdissect.read([whole, lossy]))
    assert {ident: both[ident] for ident in alone} == alone
    assert any(both.values())
