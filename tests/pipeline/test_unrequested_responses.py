"""Responses without a captured request: their bytes decide API and version."""

from collections import Counter
from pathlib import Path

import kdissect
from tests.builders.captures import read_packets, write_packets
from tests.builders.messages import exchange, write_capture
from tests.cases import cases
from tests.conftest import CAPTURES


@cases("name", ["librdkafka.pcap"], heavy=["java_2_0_1.pcap", "sarama.pcap.gz"])
def test_responses_alone(name: str, tmp_path: Path) -> None:
    """No API is wrong; a version that is sure is right; every response stays a row."""
    whole = kdissect.read(CAPTURES / name).exchanges.to_pylist()
    truth = {
        (row["client_port"], row["correlation_id"], row["response_size"]): row
        for row in whole
        if row["response_size"] is not None
    }
    brokers = {row["broker_port"] for row in whole}
    packets = [p for p in read_packets(CAPTURES / name) if p.is_tcp and p.source[1] in brokers]
    path = write_packets(tmp_path / "responses.pcap", packets)
    counts: Counter[str] = Counter()
    for row in kdissect.read(path).exchanges.to_pylist():
        if row["response_size"] is None:
            continue  # what one broker asked another
        of = truth[row["client_port"], row["correlation_id"], row["response_size"]]
        if row["version_source"] == "unknown":
            assert row["api_key"] is None
            assert row["version_confidence"] == 0
            counts["unknown"] += 1
            continue
        assert row["version_source"] == "inferred"
        assert row["response_decode_status"] == "ok"
        assert row["api_name"] == of["api_name"], (row, of)
        is_right = row["api_version"] == of["api_version"]
        assert is_right or row["version_confidence"] < 1, (row, of)
        counts["right" if is_right else "another version that reads alike"] += 1
    print(name, dict(counts))
    assert counts["right"]
    assert counts.total() > 0.95 * len(truth)


def test_a_response_that_other_apis_also_fit_is_not_sure(tmp_path: Path) -> None:
    """EndTxn and AddOffsetsToTxn answer with the same bytes. Requests of one are no proof."""
    end_txn, add_offsets_to_txn = 26, 25
    messages = [exchange(1, end_txn, 3, {}, {}), exchange(2, add_offsets_to_txn, 3, {}, {})]
    path = write_capture(tmp_path / "lost.pcap", messages, lost=[(1, 0)])
    (alone,) = [
        row
        for row in kdissect.read(path).exchanges.to_pylist()
        if row["status"] == "request_missing"
    ]
    assert alone["version_source"] == "inferred"
    assert alone["version_confidence"] < 0.5
