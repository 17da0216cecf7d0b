"""-v, -x and --records: everything is there, nothing that must not be."""

import json
import re
from pathlib import Path

import pytest

import kdissect
from kdissect.codec.message import decode_message
from kdissect.pipeline.selection import Selection, api_keys
from kdissect.show.loop import Style
from tests.builders.captures import write_packets
from tests.builders.showing import shown
from tests.builders.talks import proxied
from tests.conftest import CAPTURES

TREE, RAW = Style(tree=True), Style(raw=True)
HIDDEN = -1  # how many bytes a secret has is not said
WHOLE = Style(tree=True, raw=True, records=True)


def leaves(value: object) -> int:
    """Values that a tree shows: those of structs and of lists of structs."""
    if isinstance(value, dict):
        return sum(leaves(each) for each in value.values()) if value else 0
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return sum(leaves(each) for each in value)
    return 1


def test_a_tree_has_every_field(captures: Path) -> None:
    """The tree has the names and values of `decode_message`."""
    path = captures / "librdkafka.pcap"
    chosen = Selection(apis=api_keys("FindCoordinator"), clients=("rd-c0",))
    lines = shown(path, TREE, chosen)
    data = path.read_bytes()
    at = data.index(b"\x00\x05rd-c0\x00\x0ard-classic\x00") - 8
    frame = data[at : at + 28]
    message = decode_message(frame, side="request")
    first = lines[1 : next(at for at, line in enumerate(lines) if "response:" in line)]
    for name, value in {**message.header, **message.body}.items():
        shown_value = json.dumps(value)
        assert any(line.endswith(f"{name}: {shown_value}") for line in first), name


@pytest.mark.parametrize("name", ["java_0_10_2_2.pcap", "java_2_0_1.pcap"])
def test_bytes_are_all_there(name: str) -> None:
    """Beside the fields stand the positions of a message without a gap, up to its size."""
    size = at = None
    seen = 0
    for line in shown(CAPTURES / name, RAW):
        head = re.match(r"  (?:request|response): (\d+) bytes", line)
        row = re.match(r"  ([0-9a-f]{6})  ((?:[0-9a-f]{2} )+)", line)
        more = re.match(r"  ([0-9a-f]{6})  … (\d+) more bytes", line)
        hidden = re.match(r"  ([0-9a-f]{6})  \[redacted\]", line)
        if head or not line.startswith("  "):
            assert at in (size, HIDDEN)
            size, at = (int(head[1]), 0) if head else (None, None)
            seen += head is not None
        elif row:
            assert at in (int(row[1], 16), HIDDEN), line
            at = int(row[1], 16) + len(row[2].split())
        elif hidden:
            assert int(hidden[1], 16) == at
            at = HIDDEN
        elif more:
            assert int(more[1], 16) == at
            at += int(more[2])
    assert at in (size, HIDDEN)
    assert seen > 300


def test_a_broken_message_is_shown_up_to_its_fault(captures: Path, tmp_path: Path) -> None:
    """A broken message shows its fields before the fault, the reason, and the bytes after it."""
    data = bytearray((captures / "librdkafka.pcap").read_bytes())
    at = data.index(b"\x00\x0ard-classic\x00\x00\x17\x70")
    data[at : at + 2] = b"\x7f\xff"  # the length of a JoinGroup's group id
    path = tmp_path / "broken.pcap"
    path.write_bytes(data)
    for style in (TREE, RAW):
        text = "\n".join(shown(path, style, Selection(apis=api_keys("JoinGroup"))))
        assert "(malformed)" in text
        assert "cannot be read from byte" in text
        assert "client_id" in text


def test_records_are_those_of_read(captures: Path) -> None:
    """As many as the table has, with their values; and in JSON all of their columns."""
    path = captures / "librdkafka.pcap"
    table = kdissect.read(path).records.to_arrow()
    rows = [json.loads(line) for line in shown(path, Style(as_json=True, records=True))]
    found = [record for row in rows for record in row["records"]]
    assert len(found) == table.num_rows
    assert set(found[0]) == set(table.column_names) - {"exchange_id"}
    lines = shown(path, Style(records=True))
    assert sum(line.startswith("    ") for line in lines) == table.num_rows
    assert any('"tx 0 0"' in line for line in lines)
    none = shown(path, Style(records=True), payload="none")
    assert not any('"tx 0 0"' in line for line in none)


def test_payload_none_hides_records_beside_fields(captures: Path) -> None:
    """-x shows no bytes of records then."""
    chosen = Selection(apis=api_keys("Produce"))
    path = captures / "librdkafka.pcap"
    assert any(
        "records:" in line and "[redacted]" in line
        for line in shown(path, RAW, chosen, payload="none")
    )
    assert not any("records:" in line and "[redacted]" in line for line in shown(path, RAW, chosen))


def test_a_connection_is_described_once(tmp_path: Path) -> None:
    """With its first exchange stand the client before a proxy, SYN options and round trips."""
    packets = proxied(b"PROXY TCP4 192.0.2.7 10.0.0.2 41000 9092\r\n")
    path = write_packets(tmp_path / "proxied.pcap", packets)
    lines = [line for line in shown(path, TREE) if line.startswith("  connection: ")]
    no_options = "no MSS, no window scaling, no SACK"
    expected = f"proxied from 192.0.2.7 41000; client {no_options}; broker {no_options}"
    (line,) = lines
    assert line.startswith(f"  connection: {expected}; client's RTT p50 ")
    assert line.count("RTT p50 ") == 2  # both sides sent data that the other one acknowledged


def test_syns_that_were_not_captured(librdkafka: kdissect.Tables, tmp_path: Path) -> None:
    """Without its SYN, nothing is said of a side's options; with it they are in the line."""
    lines = [line for line in shown(CAPTURES / "librdkafka.pcap", TREE) if "connection: " in line]
    table = librdkafka.connections.to_arrow()
    assert len(lines) == sum(table["is_kafka"].to_pylist())
    assert "client MSS 1460, window scale 10, SACK" in lines[0]
    path = write_packets(tmp_path / "midstream.pcap", proxied(b"PROXY UNKNOWN\r\n")[2:])
    (line,) = [line for line in shown(path, TREE) if "connection: " in line]
    assert line.startswith("  connection: client's SYN unknown; broker's SYN unknown; ")
    assert "MSS" not in line
