"""Parts of a capture that were not read, and figures of a whole capture."""

import pytest

from tests.builders.tables import Row, at, connection, exchange, expect, found

_HALF = {"request_segment_count": 9, "request_byte_count": 900}
_TLS = {"is_kafka": False, "is_tls": True, "protocol": "tls", "request_byte_count": 450}


@pytest.mark.parametrize(
    ("connections", "severity", "text"),
    [
        ([connection(1, **_HALF), connection(2, **_HALF, response_segment_count=9)], "warn",
         "1 connection captured in one direction"),
        ([connection(1), connection(2, **_TLS), connection(3, **_TLS)], "info",
         "2 connections with TLS that was not decrypted"),
        ([connection(1, is_kafka=False, protocol="http")], "info",
         "1 connection without any Kafka traffic"),
    ],
)  # fmt: skip
def test_connections_that_were_not_read(connections: list[Row], severity: str, text: str) -> None:
    """Each reason is an incident of the capture, with the number of connections."""
    (unread,) = found(connections=connections)
    expect(unread, "capture_unread", severity, subject="trace.pcap")
    assert unread["text"].startswith(text)


def test_a_refused_tls_handshake_has_nothing_to_decrypt() -> None:
    """The broker closed without a ServerHello, so that a key log would not help."""
    refused = connection(2, **_TLS, response_segment_count=3)
    assert found(connections=[connection(1), refused]) == []


def test_a_file_that_ends_in_a_packet() -> None:
    """The incident has the reader's error."""
    capture = {"capture_id": 7, "path": "cut.pcap", "format": "pcap", "first_time": at(0),
               "last_time": at(9), "error": "ends within a packet"}  # fmt: skip
    (unread,) = found(captures=[capture], connections=[connection()])
    assert (unread["severity"], unread["subject"]) == ("warn", "cut.pcap")
    assert "ends within a packet" in unread["text"]


def test_transactions_that_did_not_commit() -> None:
    """One incident for all of them, apart from those that may still commit."""
    rows = [
        {"transactional_id": "t", "outcome": outcome, "exchange_ids": [1], "partitions": [],
         "begin_time": at(1), "end_time": at(2)}
        for outcome in ("commit", "abort", "open", "open")
    ]  # fmt: skip
    (failed,) = found(exchanges=[exchange(1)], connections=[connection()], transactions=rows)
    assert (failed["kind"], failed["subject"]) == ("failed_transactions", "t")
    assert failed["text"] == (
        "No commit was captured of 3 of 4 transactions: 1 aborted, 2 without an end in the capture."
    )


def test_segments_that_were_sent_again() -> None:
    """A share of one per cent or more is an incident, which names the worst connection."""
    counts = {"request_segment_count": 900, "response_segment_count": 100}
    again = connection(2, request_retransmitted_segment_count=20, **counts)
    (lossy,) = found(connections=[connection(1, **counts), again])
    assert (lossy["kind"], lossy["evidence"]["connection_ids"]) == ("retransmissions", [2])
    assert "20 segments (1.00 %) were sent again, 20 of them on 10.0.0.1:50002" in lossy["text"]
    half = {**counts, "request_retransmitted_segment_count": 10}
    alike = [connection(n, **half) for n in (1, 2)]
    assert found(connections=alike) == found(connections=alike[::-1])
    few = again | {"request_retransmitted_segment_count": 19}
    assert found(connections=[connection(1, **counts), few]) == []


def test_batches_of_single_records() -> None:
    """A thousand small batches, or a megabyte without compression."""
    small = [
        {"exchange_id": 1, "source": "produce", "batch_index": n, "record_count": 1, "size": 70,
         "codec": "zstd"}
        for n in range(1000)
    ]  # fmt: skip
    plain = [{**small[0], "record_count": 500, "size": 1_000_000, "codec": "none"}]
    for batches, text in ((small, "1,000 batches have 1.00 records"), (plain, "1.00 MB of 1.00")):
        (wasteful,) = found(
            exchanges=[exchange(1, api_name="Produce")],
            connections=[connection()],
            record_batches=batches,
        )
        assert (wasteful["kind"], wasteful["subject"]) == ("inefficient_batches", "app @ 10.0.0.1")
        assert text in wasteful["text"]


def test_data_that_breaks_the_protocol() -> None:
    """Serious anomalies other than missing bytes, which are another kind."""
    broken = {"kind": "malformed", "severity": "error", "connection_id": 1, "exchange_id": 1}
    rows = [broken, broken, broken | {"severity": "info"}]
    (malformed,) = found(exchanges=[exchange(1)], connections=[connection()], anomalies=rows)
    expect(malformed, "malformed_data", text="2 serious anomalies: malformed.")


def test_a_group_that_stood_still() -> None:
    """Rebalances of three seconds or more."""
    event: Row = {"group_id": "g", "group_type": "classic", "event": "rebalance", "exchange_id": 1}
    rows = [event | {"time": at(n), "duration_ms": ms} for n, ms in ((1, 2999.0), (10, 4000.0))]
    nameless = [row | {"group_id": ""} for row in rows]
    (still,) = found(exchanges=[exchange(1)], connections=[connection()], group_events=nameless)
    assert still["subject"] == "(none)"
    (still,) = found(exchanges=[exchange(1)], connections=[connection()], group_events=rows)
    assert (still["kind"], still["subject"], still["time_lost_ms"]) == ("long_rebalance", "g", 4000)
    # members of the new protocol read on while an epoch reaches them (KIP-848)
    newer = [row | {"group_type": "consumer"} for row in rows]
    assert found(exchanges=[exchange(1)], connections=[connection()], group_events=newer) == []
