"""Findings are ranked by lost time, and routine behaviour is no finding."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from kdissect.kafka.assembly import DIRECTION
from kdissect.protocol.api_keys import ApiKey
from kdissect.report import collect
from kdissect.report.database import ReportDatabase
from kdissect.report.findings import _rank
from kdissect.report.page import _tiles
from tests.builders.tables import Row, exchange, tables

_COUNTS = {f"{side}_{name}": 0 for side in ("request", "response") for name in DIRECTION.names}
_KAFKA = _COUNTS | {
    "connection_id": 1, "is_kafka": True, "is_tls": False, "protocol": "kafka",
    "client_ip": "10.0.0.1", "client_port": 50000, "broker_ip": "10.0.0.9", "broker_port": 9092,
    "request_byte_count": 100, "request_framed_byte_count": 100,
}  # fmt: skip


def _document(*exchanges: Row, connections: tuple[Row, ...] = (_KAFKA,)) -> dict[str, Any]:
    made = tables(exchanges=exchanges, connections=connections)
    with ReportDatabase(made) as database:
        return collect(database)


def _found(*exchanges: Row) -> list[dict[str, Any]]:
    return _document(*exchanges)["findings"]["findings"]


def _answers(
    first: int, client: str, api: str, latency_us: int, count: int = 30, every_us: int = 1000
) -> list[Row]:
    return [
        exchange(
            first + n, at_us=n * every_us, client_id=client, api_name=api, latency_us=latency_us
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("api_key", "api", "api_version", "is_finding"),
    [
        (ApiKey.PRODUCE, "Produce", 2, True),
        (ApiKey.SHARE_GROUP_HEARTBEAT, "ShareGroupHeartbeat", 1, False),
    ],
)
def test_readiness_is_about_what_a_release_no_longer_takes(
    api_key: ApiKey, api: str, api_version: int, is_finding: bool
) -> None:
    """Both clients would break on 4.0; the second needs what 4.0 does not have yet."""
    request = exchange(
        1, api_key=int(api_key), api_name=api, api_version=api_version, request_pos=0,
        version_source="request_header",
    )  # fmt: skip
    document = _document(request, connections=({**_KAFKA, "handshake_seen": True},))
    assert document["readiness"]["counts"]["breaks"] == 1
    sections = [finding["section"] for finding in document["findings"]["findings"]]
    assert ("readiness" in sections) is is_finding


def test_a_client_that_is_slower_than_others_at_the_same_api() -> None:
    """The only finding is the client that is slower at an API of several clients."""
    found = _found(
        *_answers(100, "a", "Produce", 5_000),
        *_answers(200, "b", "Produce", 6_000),
        *_answers(300, "c", "Produce", 4_000),
        *_answers(400, "d", "Produce", 65_000, every_us=200_000),
        *_answers(500, "e", "CreateTopics", 90_000),
    )
    (slow,) = found
    assert (slow["section"], slow["whom"]) == ("latency", "d @ 10.0.0.1")
    assert slow["title"] == "Produce is slow for d @ 10.0.0.1"
    usual = (5 + 6) / 2  # median of the clients' p95
    assert slow["time_lost_ms"] == pytest.approx(30 * (65 - usual))
    assert slow["cost"] == "1.78 s lost, 30 requests"
    assert slow["exchange_ids"] == [str(400 + n) for n in range(5)]
    assert slow["packets"][0] == 800
    assert slow["since"] == "2026-09-21T14:13:20Z"
    command = shlex.split(slow["next_command"])
    assert command[:2] == ["kdissect", "show"]
    assert command[3:] == ["--api", "Produce", "--client", "d", "--slow", "6ms"]


def test_a_few_slow_answers_do_not_make_a_slow_client() -> None:
    """One moment is one event, and of many clients one has the slowest answers."""
    rows: list[Row] = []
    seldom, in_one_moment = [n * 200_000 for n in range(3)], [n * 1000 for n in range(15)]
    for first, api, times in ((0, "Produce", seldom), (1000, "Metadata", in_one_moment)):
        for n in range(6):
            rows += _answers(first + 100 * n, f"c{n}", api, 5_000)
        rows += _answers(first + 950, "slow", api, 5_000)
        rows += [
            exchange(first + 900 + n, at_us=at, client_id="slow", api_name=api, latency_us=90_000)
            for n, at in enumerate(times)
        ]
    assert _found(*rows) == []


def test_that_some_api_is_the_slowest_is_no_news() -> None:
    """Ordinary latency has no finding."""
    assert _found(*_answers(1, "a", "Produce", 18_000), *_answers(50, "a", "Metadata", 900)) == []


def test_an_api_that_takes_long_for_all() -> None:
    """The finding has the percentile and the time lost."""
    (found,) = _found(*_answers(1, "a", "Produce", 400_000), *_answers(50, "b", "Metadata", 900))
    assert found["title"] == "Produce takes long: p95 400 ms"
    assert found["time_lost_ms"] == pytest.approx(30 * 300)


def test_findings_are_in_order_of_cost() -> None:
    """Requests that failed for good, then lost time, then requests that were hit."""
    failed: Row = {"api_name": "Fetch", "error_code": 1, "error_codes": [1]}
    again: Row = {"api_name": "Produce", "error_code": 6, "error_codes": [6]}
    routine: Row = {"api_name": "JoinGroup", "error_code": 79, "error_codes": [79], "wait": "group"}
    document = _document(
        *_answers(1, "a", "CreateTopics", 1_500_000),
        *(exchange(100 + n, **again) for n in range(4)),
        *(exchange(200 + n, **failed) for n in range(2)),
        exchange(300, **routine),
    )
    found = document["findings"]["findings"]
    assert [row["level"] for row in found] == ["bad", "warn", "warn"]
    assert [row["title"] for row in found] == [
        "OFFSET_OUT_OF_RANGE in Fetch",
        "CreateTopics takes long: p95 1.50 s",
        "NOT_LEADER_OR_FOLLOWER in Produce",
    ]
    assert [row["request_count"] for row in found] == [2, 30, 4]
    # one figure for errors, wherever the page says it
    assert document["overview"]["failed"] == document["errors"]["exchanges"] == 6
    assert sum(row["errors"] for row in document["latency"]["apis"]["rows"]) == 6
    assert sum(row["errors"] for row in document["clients"]["rows"]) == 6
    assert document["errors"]["routine"] == 1
    assert {tile["label"]: tile["value"] for tile in _tiles(document)}["Errors"] == "6"


def test_only_an_incident_for_information_comes_after_worse_findings() -> None:
    """Other incidents are first, and findings of a level are in order of the time lost."""
    made = [
        {"kind": kind, "level": level, "time_lost_ms": ms, "request_count": None}
        for kind, level, ms in (
            (None, "info", 9.0), (None, "bad", None), ("leader_change", "info", 10.0),
            ("throttled", "warn", 1.0),
        )
    ]  # fmt: skip
    assert [(row["kind"], row["level"]) for row in sorted(made, key=_rank)] == [
        ("throttled", "warn"),
        (None, "bad"),
        ("leader_change", "info"),
        (None, "info"),
    ]


def test_a_connection_in_one_direction_is_no_clear_capture() -> None:
    """Without responses nothing is known of errors."""
    half = _KAFKA | {"request_segment_count": 9}
    whole = half | {"connection_id": 2, "response_segment_count": 9}
    row = exchange(1, latency_us=None)
    document = _document(row, connections=(half, whole))
    (found,) = document["findings"]["findings"]
    assert (found["level"], found["title"]) == ("bad", "1 connection captured in one direction")
    assert document["findings"]["clear"] == []


def test_an_open_transaction_may_still_commit() -> None:
    """It is counted apart from those that did not commit."""
    rows = [
        {"transactional_id": "t", "outcome": outcome, "exchange_ids": [1], "partitions": []}
        for outcome in ("commit", "abort", "open", "open")
    ]
    with ReportDatabase(tables(exchanges=[exchange(1)], transactions=rows)) as database:
        found = collect(database)["findings"]["findings"]
    titles = [row["title"] for row in found if row["section"] == "transactions"]
    assert titles == [
        "1 of 4 transactions did not commit",
        "2 of 4 transactions had no end in the capture",
    ]


def test_an_error_that_ends_soon_is_an_info() -> None:
    """The client's next success within a second ends it; without one, or later, it is a warning."""

    def asked(number: int, api: str, at_ms: int, client: str, error: int = 0) -> Row:
        codes = [error] if error else []
        return exchange(
            number, at_us=at_ms * 1000, client_id=client, api_name=api,
            error_code=error, error_codes=codes, latency_us=2_000,
        )  # fmt: skip

    rows: list[Row] = []
    for first, api in ((10, "FindCoordinator"), (20, "OffsetFetch"), (30, "OffsetCommit")):
        rows += [asked(first + n, api, 20 * n, "a", 15 if n < 2 else 0) for n in range(3)]
    rows += [asked(25, "OffsetFetch", 100, "b", 15), asked(26, "OffsetFetch", 1400, "b")]
    rows += [asked(35, "OffsetCommit", 100, "b", 15)]
    by_api = {row["title"].rpartition(" ")[2]: row for row in _found(*rows)}
    soon, late, never = (by_api[api] for api in ("FindCoordinator", "OffsetFetch", "OffsetCommit"))
    assert len(by_api) == 3
    assert (soon["level"], soon["title"]) == (
        "info",
        "COORDINATOR_NOT_AVAILABLE in FindCoordinator",
    )
    assert soon["time_lost_ms"] == pytest.approx(42)
    assert "within 42.0 ms" in soon["text"]
    assert (late["level"], late["time_lost_ms"]) == ("warn", pytest.approx(42 + 1302))
    assert (never["level"], never["time_lost_ms"]) == ("warn", None)


def test_an_error_that_a_broker_tries_again_until_it_succeeds() -> None:
    """DUPLICATE_BROKER_REGISTRATION is permanent by its code; it ends with the old session."""
    rows = [
        exchange(n, at_us=n * 1_000_000, api_name="BrokerRegistration", api_key=62,
                 error_code=code, error_codes=[code] if code else [], latency_us=2_000)
        for n, code in ((1, 101), (2, 101), (3, 0))
    ]  # fmt: skip
    (found,) = _found(*rows)
    assert found["level"] == "warn"
    assert "A request without it followed within 2.00 s" in found["text"]


def test_tls_that_was_not_decrypted_is_no_full_capture() -> None:
    """The share that was read is a warning."""
    closed = _COUNTS | {"is_kafka": False, "is_tls": True, "protocol": "tls"}
    others = tuple(closed | {"connection_id": n, "request_byte_count": 450} for n in (2, 3))
    document = _document(exchange(1), connections=(_KAFKA, *others))
    read = next(tile for tile in _tiles(document) if tile["label"] == "Read")
    assert (read["value"], read["level"]) == ("10.0 %", "warn")
    assert read["note"] == "2 TLS connections not decrypted"
    assert document["findings"]["clear"] == []
    (found,) = document["findings"]["findings"]
    assert found["title"] == "2 TLS connections not decrypted"


def test_a_refused_tls_handshake_has_nothing_to_decrypt() -> None:
    """The broker closed without a ServerHello, so that a key log would not help."""
    tls = _COUNTS | {"is_kafka": False, "is_tls": True, "protocol": "tls"}
    refused = tls | {"connection_id": 2, "request_byte_count": 450, "response_segment_count": 3}
    unread = refused | {"connection_id": 3, "tls_cipher": "TLS_AES_256_GCM_SHA384"}
    document = _document(exchange(1), connections=(_KAFKA, refused, unread))
    assert document["overview"]["read"]["unread_tls_connections"] == 1


def test_figures_agree_on_the_page(document: dict[str, Any]) -> None:
    """Tiles and tables show the same numbers."""
    tiles = {tile["label"]: tile for tile in _tiles(document)}
    assert all(tile["help"] for tile in tiles.values())
    (kafka,) = (row for row in document["overview"]["protocols"] if row["protocol"] == "kafka")
    read = document["overview"]["read"]
    assert read["request_bytes"] + read["response_bytes"] == kafka["bytes"]
    assert tiles["Topics"]["value"] == str(document["topics"]["topics"]["total"])
    assert tiles["Read"]["value"] == "100 %"
    for found in document["findings"]["findings"]:
        assert found["next_command"]
        assert found["exchange_ids"]
        assert found["since"]
