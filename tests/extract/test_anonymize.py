"""kdissect extract --anonymize: nothing of the names is left, and everything decodes as it did."""

import re
from pathlib import Path

import pyarrow.compute as pc

import kdissect
from kdissect.extract import extract
from kdissect.extract.anonymize import Anonymizer
from kdissect.extract.pseudonyms import Pseudonyms
from kdissect.pipeline.options import Options
from kdissect.pipeline.selection import Selection
from tests.builders.captures import write_packets
from tests.builders.talks import Talk
from tests.cases import cases
from tests.conftest import CAPTURES
from tests.material import CAPTURES as SHARED
from tests.material import needed

ALIKE = ("api_name", "api_version", "correlation_id", "status", "error_codes", "latency_ms",
         "throttle_time_ms", "request_decode_status", "response_decode_status")  # fmt: skip


def _retold(path: Path, out: Path, **options: object) -> kdissect.Tables:
    done = extract([path], out, Selection(), Options(payload="none", **options), anonymize=True)
    assert done.packets
    return kdissect.read(out)


def _rows(tables: kdissect.Tables, columns: tuple[str, ...] = ALIKE) -> list[tuple]:
    # a frame that is cut is not told again
    whole = ~pc.field("decode_status").isin(["partial"])
    rows = tables.exchanges.to_arrow(list(columns), whole).to_pylist()
    return sorted(tuple(str(value) for value in row.values()) for row in rows)


def _names(tables: kdissect.Tables) -> set[str]:
    exchanges = tables.exchanges.to_pandas()
    names = set(exchanges.client_id.dropna()) | set(exchanges.group_id.dropna())
    names |= set(exchanges.transactional_id.dropna()) | set(exchanges.topics.explode().dropna())
    names |= set(tables.group_events.to_pandas().member_id.dropna())
    connections = tables.connections.to_pandas()
    told = connections.client_software_name, connections.client_software_version
    software = " ".join(text for column in told for text in column.dropna())
    return {name for name in names if len(name) > 5 and name not in software}


# record batches of today, and message sets
@cases("name", ["librdkafka.pcap", "java_0_10_2_2.pcap"], heavy=["java_2_0_1.pcap"])
def test_the_same_conversations_with_other_names(tmp_path, name):
    """Rows, counts and checksums stay; only names change."""
    path, out = CAPTURES / name, tmp_path / "out.pcapng"
    before, after = kdissect.read(path), _retold(path, out)
    assert _rows(after) == _rows(before)
    for table in ("records", "group_events", "transactions", "connections"):
        assert after[table].num_rows == before[table].num_rows, table
    batches = after.record_batches.to_pandas()
    assert batches.crc_ok.all()
    originals = before.record_batches.to_pandas()
    originals = originals[~originals.is_partial].astype(
        {"record_count": batches.record_count.dtype}
    )
    columns = ["magic", "codec", "record_count", "base_offset", "partition"]
    assert sorted(map(str, batches[columns].values.tolist())) == sorted(
        map(str, originals[columns].values.tolist())
    )
    sizes = [
        sorted(tables.records.to_pandas()[["key", "value"]].map(
            lambda data: -1 if data is None else len(data)).values.tolist())
        for tables in (before, after)
    ]  # fmt: skip
    assert sizes[0] == sizes[1]
    data = out.read_bytes()
    names = _names(before)
    assert len(names) > 8
    assert not [text for text in names if text.encode() in data]
    values = {value for value in before.records.to_pandas().value.dropna() if len(value) > 12}
    assert values
    assert not any(value in data for value in values)
    assert b"127.0.0.1" not in data
    assert re.fullmatch(r"10\.0\.0\.\d", str(after.connections.to_arrow()["client_ip"][0]))


@cases(
    "name",
    ["sasl/sasl", "sasl/sasl_handshake_v0", "admin/admin", "shapes/ipv6"],
    heavy=["share_streams/streams", "transactions/transactions", "zookeeper/zk_3_9_1_ibp_2_4"],
)
def test_every_kind_of_traffic_decodes_as_it_did(tmp_path, name):
    """Only cut frames are lost."""
    path = needed(SHARED / f"{name}.pcap")
    before, after = kdissect.read(path, payload="none"), _retold(path, tmp_path / "out.pcapng")
    found = set(_rows(after))
    lost = [row for row in _rows(before) if row not in found]
    cut = before.exchanges.to_pandas().response_decode_status.eq("partial").sum()
    assert len(lost) <= cut, lost[:3]
    bad = after.anomalies.to_pandas()
    assert set(bad[bad.severity == "error"].kind) <= set(before.anomalies.to_pandas().kind)
    data = (tmp_path / "out.pcapng").read_bytes()
    assert not [text for text in _names(before) if text.encode() in data]


def test_encrypted_exchanges_are_written_as_plaintext(tmp_path):
    """Decrypted connections are written as plain text."""
    path, keys = needed(SHARED / "tls" / "tls12.pcap"), SHARED / "tls" / "tls12.keylog"
    before = kdissect.read(path, keylog=keys, payload="none")
    after = _retold(path, tmp_path / "out.pcapng", keylog=(str(keys),))
    assert _rows(after) == _rows(before)
    assert not any(after.connections.to_arrow()["is_tls"].to_pylist())


def test_a_port_that_a_client_uses_again(tmp_path):
    """Both connections are told, and neither is taken for a copy of the other."""
    talk = Talk(start=1_700_000_000_000_000)
    for _ in range(2):
        for number in range(3):
            talk.exchange(number)
        talk.close()
        talk.time += 2_000_000
        talk.next = [number + 10**6 for number in talk.next]
        talk.open()
    path = write_packets(tmp_path / "again.pcap", talk.packets)
    before = kdissect.read(path)
    after = _retold(path, tmp_path / "out.pcapng")
    assert _rows(after) == _rows(before)
    assert len(before.exchanges) == len(after.exchanges) == 6


def test_a_text_has_one_pseudonym_wherever_it_comes():
    """Names, hosts and values have one pseudonym each."""
    names = Pseudonyms()
    first = names.name("topic", "orders")
    assert (first, names.name("resource", "orders")) == ("topic-1", "topic-1")
    assert names.name("topic", "payments") == "topic-2"
    assert names.name("topic", "") == ""
    assert [names.host(text) for text in ("10.1.2.3", "/10.1.2.3", "kafka-1.corp", "::1")] == [
        "10.0.0.1", "/10.0.0.1", "host-1", "fd00::1",
    ]  # fmt: skip
    assert [names.value(text) for text in ("604800000", "true", "-1", "/var/lib")] == [
        "604800000", "true", "-1", "value-1",
    ]  # fmt: skip
    assert names.data(b"abc") == names.data(b"abc") != names.data(b"abd")
    assert [len(names.data(bytes(size))) for size in (0, 1, 2, 33)] == [0, 1, 2, 33]


def test_secrets_are_redacted_in_the_copy():
    """The copy has no token; the original stays."""
    message = kdissect.Message(36, 2, "request", {"client_id": "c"}, {"auth_bytes": b"\0u\0pw"})
    told = Anonymizer().message(message)
    assert told.body["auth_bytes"] == b"[redacted]"
    assert told.header["client_id"] == "client-1"
    assert message.body["auth_bytes"] == b"\0u\0pw"


def test_numbers_that_are_secrets_or_names() -> None:
    """A number stays as a broker's or as a setting's; not as a password, nor as a topic."""
    topic, broker = (
        {
            "resource_type": kind,
            "resource_name": "4155551234",
            "configs": [
                {"name": name, "value": "86753090"} for name in ("ssl.key.password", "retention.ms")
            ],
        }
        for kind in (2, 4)
    )
    message = kdissect.Message(44, 1, "request", body={"resources": [topic, broker]})
    told = Anonymizer().message(message).body["resources"]
    assert [each["resource_name"] for each in told] == ["resource-1", "4155551234"]
    for each in told:
        assert [config["value"] for config in each["configs"]] == ["[redacted]", "86753090"]
