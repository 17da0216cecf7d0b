"""Internal topics, control records and topic names, through captures."""

from pathlib import Path
from uuid import UUID

import pytest

import kdissect
from kdissect.codec.compression import Codec, compress
from kdissect.codec.record_encoder import encode_message, encode_messages
from tests.builders.messages import (
    batch,
    exchange,
    fetch,
    metadata_record,
    snapshot_piece,
    write_capture,
)
from tests.builders.tables import kinds, rows
from tests.codec.vectors import LOGS, check_row, internal_vectors

METADATA_ID = UUID(int=1)
ORDERS_ID = UUID("6ec0a6cc-6ac1-44b6-8f1b-3c1e6b0f0001")
ORDERS_TEXT = "bsCmzGrBRLaPGzweaw8AAQ"


@pytest.mark.parametrize("kind", LOGS)
def test_vectors_through_a_capture(tmp_path: Path, kind: str) -> None:
    """Every record of Kafka's own writers, several to a batch, some batches compressed."""
    vectors = internal_vectors()[kind]
    topic = LOGS[kind][1]
    pairs = [(vector["key"], vector["value"]) for vector in vectors]
    exchanges = []
    for at in range(0, len(pairs), 20):
        codec = ("none", "zstd", "lz4")[at // 20 % 3]
        data = batch(pairs[at : at + 20], at, codec=codec, is_control=kind == "control_record")
        exchanges.append(fetch(at, topic, [data]))
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", exchanges), reveal_secrets=True)
    assert kinds(tables) == []
    assert len(tables.records) == len(vectors)
    of_offset = {
        row["offset"]: (name, row)
        for name in tables.names
        if name.startswith("internal/")
        for row in rows(tables, name)
    }
    assert sorted(of_offset) == list(range(len(vectors)))
    for at, vector in enumerate(vectors):
        name, row = of_offset[at]
        assert name == f"internal/{vector['name']}"
        assert (row["topic"], row["partition"], row["record_index"]) == (topic, 0, at % 20)
        check_row(vector, row)
    sent = [(row["key"], row["value"]) for row in rows(tables, "records")]
    assert sent == pairs


def test_malformed_ones_are_anomalies_and_records(tmp_path: Path) -> None:
    """Good records have rows; bad ones have anomalies and stay in `records`."""
    key = b"\0\x01\0\x01g\0\x01t\0\0\0\x07"
    good = b"\0\0" + bytes(8) + b"\0\0" + bytes(8)
    pairs = [(key, good), (key, good[:-1]), (key, None), (b"\0\x63", b"x"), (key, good[:5])]
    path = write_capture(tmp_path / "made.pcap", [fetch(1, "__consumer_offsets", [batch(pairs)])])
    tables = kdissect.read(path)
    commits = rows(tables, "internal/OffsetCommit")
    assert [row["offset"] for row in commits] == [0, 2]
    assert [row["value_version"] for row in commits] == [0, None]
    assert commits[1]["value"] is None
    assert commits[0]["key"] == {"group": "g", "topic": "t", "partition": 7}
    assert len(tables.records) == len(pairs)
    assert kinds(tables) == ["malformed_records", "unknown_version"]
    malformed = next(row for row in rows(tables, "anomalies") if row["kind"] != "unknown_version")
    assert malformed["detail"].startswith("record batch 0, record 1: OffsetCommitValue > commit_t")
    assert malformed["detail"].endswith("(so are 1 more of it)")
    assert malformed["data"] == good[:-1]
    assert malformed["direction"] == "response"


def test_other_topics_have_no_internal_tables(tmp_path: Path) -> None:
    """A topic with a similar name is an ordinary one."""
    data = batch([(b"\0\x01\0\0\0\0\0\0\0\0", b"\0\0")])
    path = write_capture(tmp_path / "made.pcap", [fetch(1, "consumer_offsets", [data])])
    tables = kdissect.read(path)
    assert not [name for name in tables.names if name.startswith("internal/")]
    assert kinds(tables) == []


def test_topics_named_in_the_metadata_log_only(tmp_path: Path) -> None:
    """A later raft fetch names the topic of an earlier fetch by id; its own topic has a name."""
    told = batch([(None, metadata_record("TopicRecord", name="orders", topic_id=ORDERS_ID))])
    exchanges = [
        fetch(1, ORDERS_ID, [batch([(b"k", b"v")])], version=17),
        fetch(2, METADATA_ID, [told], version=17),
    ]
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", exchanges))
    assert [(row["topic"], row["topic_id"], row["source"]) for row in rows(tables, "records")] == [
        ("orders", ORDERS_TEXT, "fetch"),
        ("__cluster_metadata", "AAAAAAAAAAAAAAAAAAAAAQ", "raft_fetch"),
    ]
    assert [(row["topic"], row["topic_id"], row["source"]) for row in rows(tables, "topics")] == [
        ("orders", ORDERS_TEXT, "Fetch")
    ]
    expected = [["orders"], ["__cluster_metadata"]]
    assert [row["topics"] for row in rows(tables, "exchanges")] == expected
    (topic,) = rows(tables, "internal/TopicRecord")
    assert topic["value"] == {"name": "orders", "topic_id": ORDERS_TEXT}


def test_topic_records_of_other_topics_tell_nothing(tmp_path: Path) -> None:
    """Only the metadata log names topics."""
    told = batch([(None, metadata_record("TopicRecord", name="orders", topic_id=ORDERS_ID))])
    path = write_capture(tmp_path / "made.pcap", [fetch(1, "__cluster_metadata_", [told])])
    tables = kdissect.read(path)
    assert rows(tables, "topics") == []
    assert not [name for name in tables.names if name.startswith("internal/")]


def test_secrets_of_the_metadata_log(tmp_path: Path) -> None:
    """Credentials and sensitive configs are redacted, in cut records, too."""
    values = [
        metadata_record("UserScramCredentialRecord", name="eve", mechanism=1, salt=b"salt",
                 stored_key=b"stored", server_key=b"server", iterations=4096),
        metadata_record("ConfigRecord", resource_type=4, resource_name="1",
                 name="ssl.keystore.password", value="hunter2"),
        metadata_record("ConfigRecord", resource_type=2, resource_name="orders",
                 name="retention.ms", value="1000"),
        metadata_record("UserScramCredentialRecord", name="eve", salt=b"hunter2")[:-3],
    ]  # fmt: skip
    data = batch([(None, value) for value in values])
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    exchanges = [fetch(1, METADATA_ID, [data, damaged], version=17)]
    path = write_capture(tmp_path / "made.pcap", exchanges)
    tables = kdissect.read(path)
    scram = rows(tables, "internal/UserScramCredentialRecord")[0]["value"]
    assert scram["name"] == "eve"
    assert scram["salt"] == scram["stored_key"] == scram["server_key"] == b"[redacted]"
    configs = [row["value"]["value"] for row in rows(tables, "internal/ConfigRecord")[:2]]
    assert configs == ["[redacted]", "1000"]
    shown = [row["value"] for row in rows(tables, "records")[:4]]
    assert shown == [b"[redacted]", b"[redacted]", values[2], b"[redacted]"]
    for name in tables.names:
        assert "hunter2" not in repr(rows(tables, name)), name
        assert "stored'" not in repr(rows(tables, name)), name
    open_tables = kdissect.read(path, reveal_secrets=True)
    assert [row["value"] for row in rows(open_tables, "records")[:4]] == values
    assert rows(open_tables, "internal/UserScramCredentialRecord")[0]["value"]["salt"] == b"salt"


@pytest.mark.parametrize("api", ["Fetch", "FetchSnapshot"])
def test_secrets_of_the_metadata_log_in_what_is_not_read(tmp_path: Path, api: str) -> None:
    """Of messages that are cut or of no known version, and of records of no known frame or type."""
    value = metadata_record("UserScramCredentialRecord", name="eve", stored_key=b"hunter2")
    read = batch(
        [(None, each + value[1:]) for each in (b"\1", b"\2")] + [(None, b"\1\x7e" + value)]
    )
    request, response = (
        snapshot_piece(1, 0, len(read), read)
        if api == "FetchSnapshot"
        else fetch(1, METADATA_ID, [read], version=17)
    )
    newer = request[:2] + b"\0\x63" + request[4:]
    for pair in ((request, response), (request, response[:-1]), (newer, response)):
        path = write_capture(tmp_path / "made.pcap", [pair])
        tables = kdissect.read(path)
        assert len(tables.anomalies)
        for name in tables.names:
            assert "hunter2" not in repr(rows(tables, name)), name
        assert "hunter2" in repr(rows(kdissect.read(path, reveal_secrets=True), "anomalies"))


def test_wrong_crcs_are_anomalies(tmp_path: Path) -> None:
    """Those of a batch, of a message, and of a message inside a compressed one."""
    record = {"offset": 0, "timestamp_ms": 5, "key": b"k", "value": b"v"}
    damaged = bytearray(encode_messages([record], 1))
    damaged[12] ^= 1  # its own CRC
    wrapper = encode_message(
        record | {"key": None, "value": compress(Codec.GZIP, bytes(damaged))}, 1, int(Codec.GZIP)
    )
    wrong = bytearray(batch([(b"k", b"v")]))
    wrong[17] ^= 1
    for at, data in enumerate((bytes(wrong), bytes(damaged), wrapper)):
        path = write_capture(tmp_path / "made.pcap", [fetch(at, "orders", [data], version=4)])
        tables = kdissect.read(path)
        assert kinds(tables) == ["wrong_crc"]
        assert len(tables.records) == 1


def test_control_records_of_any_topic(tmp_path: Path) -> None:
    """A marker has its table row; unknown types stay in `records`."""
    pairs = [(b"\0\0\0\x01", b"\0\0\0\0\0\x07"), (b"\0\0\0\x63", b"?"), (b"\0", b"")]
    data = batch(pairs, is_control=True, is_transactional=True)
    path = write_capture(tmp_path / "made.pcap", [fetch(1, "orders", [data])])
    tables = kdissect.read(path)
    (marker,) = rows(tables, "internal/EndTxnMarker")
    assert (marker["topic"], marker["key"]) == ("orders", {"type": 1})
    assert marker["value"] == {"coordinator_epoch": 7}
    types = [row["control_type"] for row in rows(tables, "records")]
    assert types == ["COMMIT", "UNKNOWN", "UNKNOWN"]
    assert kinds(tables) == []


def test_produced_to_internal_topics(tmp_path: Path) -> None:
    """Produced records have the offsets of the response."""
    key = b"\0\0\0\x02tx"
    value = b"\0\0" + bytes(8) + b"\0\0" + bytes(4) + b"\0" + bytes(4) + bytes(16)
    given = {"name": "__transaction_state", "partition_data": [{"index": 3, "records":
             batch([(key, value), (key, None)])}]}  # fmt: skip
    answer = {"name": "__transaction_state",
              "partition_responses": [{"index": 3, "base_offset": 500}]}  # fmt: skip
    one = exchange(1, 0, 9, {"acks": 1, "topic_data": [given]}, {"responses": [answer]})
    tables = kdissect.read(write_capture(tmp_path / "made.pcap", [one]))
    logged = rows(tables, "internal/TransactionLog")
    assert [(row["offset"], row["partition"]) for row in logged] == [(500, 3), (501, 3)]
    assert logged[0]["key"] == {"transactional_id": "tx"}
    assert logged[1]["value"] is None


def test_offsets_behind_a_produced_batch_that_is_not_read(tmp_path: Path) -> None:
    """How many records the batch has is not known, and so no offset behind it."""
    one, two = (
        encode_messages(
            [{"offset": 0, "timestamp_ms": 5, "key": None, "value": value}], 1, codec="gzip"
        )
        for value in (b"a", b"b")
    )
    unread = bytearray(one)
    unread[45] ^= 0xFF
    for first, offsets in ((one, [100, 101]), (bytes(unread), [None])):
        given = {"name": "t", "partition_data": [{"index": 0, "records": first + two}]}
        answer = {"name": "t", "partition_responses": [{"index": 0, "base_offset": 100}]}
        pair = exchange(1, 0, 2, {"acks": 1, "topic_data": [given]}, {"responses": [answer]})
        tables = kdissect.read(write_capture(tmp_path / "made.pcap", [pair]))
        assert [row["offset"] for row in rows(tables, "records")] == offsets
