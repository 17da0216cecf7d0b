"""The figures of sections beside the same figures counted another way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdissect
from kdissect import charts
from kdissect.api import Tables
from kdissect.protocol.error_codes import error_name
from kdissect.report import Report
from kdissect.report import document as page
from kdissect.report.sections import errors, latency
from kdissect.sql import Database, requests
from tests.builders.captures import lose_packets
from tests.builders.tables import exchange, tables
from tests.cases import cases
from tests.conftest import CAPTURES
from tests.material import CAPTURES as SHARED
from tests.material import needed
from tests.report.documents import OPTIONS, document_of, prepared


@pytest.fixture(scope="module")
def database(librdkafka: Tables) -> Iterator[Database]:
    """The tables with the requests of a report."""
    with prepared(librdkafka) as opened:
        yield opened


def test_every_exchange_is_counted_once(document: dict[str, Any], librdkafka: Tables) -> None:
    """Sums over APIs, clients, brokers and time equal the rows of the table."""
    total = librdkafka.exchanges.num_rows
    assert document["overview"]["exchanges"] == total
    for name in ("apis", "clients", "brokers"):
        assert sum(row["exchanges"] for row in document["latency"][name]["rows"]) == total
    assert sum(row["exchanges"] for row in document["clients"]["rows"]) == total
    series = document["traffic"]["exchanges"]
    shown = sum(series["rate"]) * document["traffic"]["slice_ms"] / 1000
    assert round(shown) == total


def test_lost_answers_are_no_errors(captures: Path, tmp_path: Path) -> None:
    """Of a capture without two percent of its packets: requests that cannot be judged are counted,
    and none of them is without an answer."""
    path = lose_packets(captures / "java_2_0_1.pcap", tmp_path / "lost.pcap", 0.02)
    document = document_of(kdissect.read(path))
    overview = document["overview"]
    assert overview["unjudged"] > 3
    assert (overview["response_missing"], overview["connection_closed"]) == (0, 0)
    assert document["errors"]["unanswered"]["total"] == 0
    assert sum(row["unanswered"] for row in document["clients"]["rows"]) == 0
    texts = " ".join(incident["text"] for incident in document["incidents"])
    assert f"{overview['unjudged']} requests without an answer could not be judged" in texts
    assert "every request answered" not in document["clear"]


def test_waiting_adds_up(document: dict[str, Any]) -> None:
    """Responses, long polls and waits for groups make up all paired exchanges."""
    kinds = ("answers", "long_polls", "group_waits")
    answered = document["overview"]["paired"]
    rows = document["latency"]["apis"]["rows"]
    assert sum(row[kind] for row in rows for kind in kinds) == answered
    assert sum(document["latency"]["histogram"]["count"]) == answered


def test_where_the_time_of_answers_went(document: dict[str, Any], database: Database) -> None:
    """The parts of the latency, by API, add up to those of the table."""
    rows = document["latency"]["apis"]["rows"]
    for span in ("upload_ms", "queued_ms", "service_ms", "download_ms"):
        spent = database.value(f"SELECT sum({span}) FROM exchanges WHERE wait = 'answer'")
        assert sum(row[span] or 0 for row in rows) == pytest.approx(spent)
    assert sum(row["queued_ms"] or 0 for row in rows) > 0


def test_percentiles_are_those_of_answers(document: dict[str, Any], database: Database) -> None:
    """NumPy's quantiles of service_ms, without long polls."""
    for row in document["latency"]["apis"]["rows"]:
        values = database.table(
            "SELECT service_ms FROM requests WHERE api = ? AND wait = 'answer'", [row["api"]]
        )["service_ms"].to_numpy()
        assert len(values) == row["answers"]
        if len(values):
            expected = np.quantile(values, [0.5, 0.95, 0.99, 1.0])
            assert [row["p50"], row["p95"], row["p99"], row["max"]] == pytest.approx(expected)


def test_percentiles_of_very_many_are_near(
    document: dict[str, Any], librdkafka: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond EXACT_MAX they are t-digests; the order of things stays."""
    monkeypatch.setattr(requests, "EXACT_MAX", 10)
    with prepared(librdkafka) as database:
        near = latency.collect(database, OPTIONS)
    exact = {row["api"]: row for row in document["latency"]["apis"]["rows"]}
    for row in near["apis"]["rows"]:
        if row["answers"] >= 20:
            assert row["p50"] == pytest.approx(exact[row["api"]]["p50"], rel=0.25)
            assert row["max"] == exact[row["api"]]["max"]


def test_topics_move_the_bytes_of_their_batches(
    document: dict[str, Any], librdkafka: Tables
) -> None:
    """Bytes by topic equal the sums over whole data batches."""
    batches = librdkafka.record_batches.to_pandas()
    batches = batches[~batches["is_partial"].fillna(False) & ~batches["is_control"].fillna(False)]
    by = batches.groupby(["topic", batches["source"] == "produce"])["size"].sum()
    for row in document["topics"]["topics"]["rows"]:
        assert row["write_bytes"] == by.get((row["topic"], True), 0)
        assert row["read_bytes"] + row["replicate_bytes"] == by.get((row["topic"], False), 0)


def test_groups_have_all_events(document: dict[str, Any], librdkafka: Tables) -> None:
    """Events and rebalances of all groups equal those of group_events."""
    rows = document["groups"]["groups"]["rows"]
    assert sum(row["events"] for row in rows) == librdkafka.group_events.num_rows
    rebalances = [
        event
        for event in librdkafka.group_events.to_arrow(["event"])["event"].to_pylist()
        if event == "rebalance"
    ]
    assert document["groups"]["rebalances"]["total"] == len(rebalances) > 0


def test_a_story_has_the_events_up_to_its_end(document: dict[str, Any]) -> None:
    """A rebalance lists its own events only."""
    stories = [s for each in document["groups"]["timelines"] for s in each["stories"]]
    assert stories
    for story in stories:
        assert story["events"], story["detail"]
        assert {event["event"] for event in story["events"]}.isdisjoint({"rebalance", "stable"})


def test_transactions_by_outcome(document: dict[str, Any], librdkafka: Tables) -> None:
    """Counts by outcome equal those of the table."""
    outcomes = librdkafka.transactions.to_pandas()["outcome"].value_counts().to_dict()
    assert {r["outcome"]: r["count"] for r in document["transactions"]["outcomes"]} == outcomes
    assert outcomes


@cases(
    "capture",
    [
        *(CAPTURES / name for name in ("librdkafka.pcap", "java_2_0_1.pcap", "sarama.pcap.gz")),
        *(SHARED / name for name in ("admin/admin.pcap", "share_streams/share.pcap")),
    ],
    heavy=[SHARED / name / f"{name}.pcap" for name in ("java_latest", "transactions", "cluster")],
    ids=lambda path: path.stem,
)
def test_every_error_code_has_its_place(capture: Path) -> None:
    """Error codes in messages are those of `exchanges`, row by row, each with its field."""
    needed(capture)
    with prepared(kdissect.read(capture)) as database:
        errors.prepare(database)
        told = database.rows(
            "SELECT exchange_id, list_sort(error_codes) AS codes FROM requests "
            "WHERE has_error ORDER BY ALL"
        )
        found = database.rows(
            "SELECT exchange_id, list_sort(list(DISTINCT code)) AS codes FROM errors "
            "GROUP BY exchange_id ORDER BY ALL"
        )
        lost = database.value("SELECT count(*) FROM errors WHERE place IS NULL")
        names = database.rows("SELECT DISTINCT code, error FROM errors")
    print(f"{capture.name}: {len(found)} answers with errors")
    assert found == told
    assert lost == 0
    assert all(row["error"] == error_name(row["code"]) for row in names)


def test_an_error_in_a_partition_says_which() -> None:
    """The row names the field, the topic, the partition and the packet."""
    capture = needed(SHARED / "java_latest" / "java_latest.pcap")
    with prepared(kdissect.read(capture)) as database:
        errors.prepare(database)
        rows = errors.collect(database, OPTIONS)["places"]["rows"]
    (row,) = [r for r in rows if r["error"] == "OFFSET_OUT_OF_RANGE" and r["api"] == "Fetch"]
    assert row["path"] == "responses[0].partitions[0].error_code"
    assert (row["topic"], row["partitions"]) == ("events-zstd", [0])
    assert row["packet"]


def test_an_empty_table_set_has_a_report(empty_report: Report) -> None:
    """It has no incidents."""
    document = empty_report.document
    assert document["overview"]["exchanges"] == 0
    assert document["incidents"] == []


def test_responses_alone_have_a_report() -> None:
    """A capture of one direction: no request times, no client ids."""
    row = exchange(1, status="request_missing", client_id=None)
    asked = ("request_time", "request_end_time", "request_time_ns")
    row |= dict.fromkeys((*asked, "latency_ms", "service_ms", "wait"))
    document = document_of(tables(exchanges=[row]))
    assert document["overview"]["request_missing"] == 1
    assert document["latency"]["all"]["count"] == 0


@pytest.mark.parametrize(
    ("span_s", "width_ms"),
    [(0, 1), (0.2, 1), (1, 5), (60, 500), (3600, 15_000), (86_400, 600_000), (3e8, 1_250_000_000)],
)
def test_slices_are_round_and_few(span_s: float, width_ms: int) -> None:
    """The width of a slice is a round time, and there are at most SLICES_MAX."""
    width = charts.slice_width_us(int(span_s * 1e6))
    assert width == width_ms * 1000
    assert span_s * 1e6 <= width * charts.SLICES_MAX


def test_each_column_has_one_meaning() -> None:
    """A table repeats no entry of the shared columns, and shows the columns that it declares."""
    for name, declared in page._DECLARED.items():
        for key, entry in declared.items():
            assert entry != page._SHARED.get(key), (name, key)
            if isinstance(entry, list):
                assert key in declared["columns"].replace("*", "").split(), (name, key)
