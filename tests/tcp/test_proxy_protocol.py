"""PROXY protocol headers before Kafka and TLS: their clients, and the exchanges after them."""

import functools
import ipaddress
import itertools
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kdissect
from kdissect.accounts import check
from kdissect.kafka.assembly import Anomaly, Assembly, Protocol
from kdissect.tcp.proxy_protocol import HeaderFault, ProxyHeader, parse_header
from tests.builders.captures import write_packets
from tests.builders.frames import request, response
from tests.builders.tables import all_rows
from tests.builders.talks import CLIENT, Gap, Playbook, proxied
from tests.builders.tls_talk import Parties, TlsTalk
from tests.cases import cases
from tests.resume.window_run import Run, flat

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
LINE = b"PROXY TCP4 192.0.2.7 10.0.0.2 41000 9092\r\n"
V4 = ipaddress.ip_address("192.0.2.7").packed
V6 = ipaddress.ip_address("2001:db8::7").packed


def binary(
    command: int = 0x21, family: int = 0x11, body: bytes | None = None, extra: bytes = b""
) -> bytes:
    """A header of version 2; `extra` are its TLVs."""
    if body is None:
        body = V4 + bytes([10, 0, 0, 2]) + struct.pack(">HH", 41000, 9092)
    size = struct.pack(">H", len(body) + len(extra))
    return SIGNATURE + bytes([command, family]) + size + body + extra


V6_BODY = V6 + bytes(16) + struct.pack(">HH", 41000, 9092)
TLVS = b"\x04\0\x05hello" + b"\x20\0\x02ab"
WITH_ADDRESS = {
    "line": LINE,
    "line of IPv6": b"PROXY TCP6 2001:db8::7 ::1 41000 9092\r\n",
    "binary": binary(),
    "binary with TLVs": binary(extra=TLVS),
    "binary of IPv6": binary(family=0x21, body=V6_BODY),
    "binary, larger than a segment": binary(extra=b"\xee\x0f\xa0" + bytes(4000)),
}
WITHOUT_ADDRESS = {
    "unknown": b"PROXY UNKNOWN\r\n",
    "unknown with more": b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\n",
    "local": binary(0x20),
    "local without addresses": binary(0x20, 0, b""),
    "unspecified": binary(family=0, body=b""),
    "unix socket": binary(family=0x31, body=bytes(216)),
    "datagram": binary(family=0x12),
}
MALFORMED = {
    "no address": b"PROXY TCP4 192.0.2.300 10.0.0.2 1 2\r\n",
    "a port that is too large": b"PROXY TCP4 192.0.2.7 10.0.0.2 70000 9092\r\n",
    "a port with a sign": b"PROXY TCP4 192.0.2.7 10.0.0.2 +1 9092\r\n",
    "two fields": b"PROXY TCP4 192.0.2.7\r\n",
    "a field too many": b"PROXY TCP4 192.0.2.7 10.0.0.2 1 2 3\r\n",
    "addresses of the other family": b"PROXY TCP6 192.0.2.7 10.0.0.2 1 2\r\n",
    "not ASCII": b"PROXY TCP4 192.0.2.\xff 10.0.0.2 1 2\r\n",
    "no family": b"PROXY \r\n",
    "addresses that are cut": binary(body=V4),
    "unknown command": binary(0x2F),
    "unknown family": binary(family=0x41),
}


HEADERS = WITH_ADDRESS | WITHOUT_ADDRESS | MALFORMED


def shown(header: ProxyHeader) -> str | None:
    if header.client is None:
        return None
    address, port = header.client
    ip = ipaddress.IPv6Address(address)
    return f"{ip.ipv4_mapped or ip} {port}"


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_has_its_size_its_client_and_its_fault(name: str) -> None:
    """TLVs count to the header and say nothing more. Health checks of the proxy, and families that
    are not IP, name no client. The end of a malformed header may be known all the same."""
    data = HEADERS[name]
    header = parse_header((data + b"more")[:107], len(data) + 4)
    assert header is not None
    client = f"{'2001:db8::7' if 'IPv6' in name else '192.0.2.7'} 41000"
    assert shown(header) == (client if name in WITH_ADDRESS else None)
    fault = HeaderFault.ADDRESSES if name in MALFORMED else None
    assert (header.size, header.fault) == (len(data), fault)


def test_a_header_without_an_end_has_a_fault() -> None:
    """A line of 107 bytes has its end within them; only version 2 has the binary signature."""
    line = b"PROXY TCP6 " + b"f" * 200
    assert parse_header(line[:106], 106) is None
    assert parse_header(line[:107], 211) == ProxyHeader(0, fault=HeaderFault.NO_LINE_END)
    version_3 = ProxyHeader(0, fault=HeaderFault.VERSION)
    assert parse_header(binary(0x31), 28) == version_3


@given(st.binary(max_size=107), st.sampled_from((b"", b"PROXY ", b"PROXY TCP4 ", SIGNATURE)))
def test_any_bytes_make_no_header_longer_than_their_stream(data: bytes, start: bytes) -> None:
    """No input fails, and no header is longer than its stream."""
    data = (start + data)[:107]
    header = parse_header(data, len(data))
    assert header is None or header.size <= len(data)


# -- in streams ------------------------------------------------------------------------------


def conversation(book: Playbook) -> Playbook:
    for number in range(3):
        book = book >> request(number) << response(number)
    return book


def found(assembly: Assembly) -> list[tuple[int, ...]]:
    """Ids, positions and sizes of the exchanges."""
    return [
        (
            int(row["exchange_id"]), int(row["correlation_id"]), int(row["status"]),
            *(int(row[side][name]) for side in ("request", "response") for name in ("pos", "size")),
        )
        for row in assembly.exchanges
    ]  # fmt: skip


def counts(assembly: Assembly) -> dict[str, int]:
    row = assembly.connections[0]["direction"][0]
    return {name: int(row[f"{name}_byte_count"]) for name in ("framed", "unframed", "missing")}


@functools.cache
def plain() -> Assembly:
    """The conversation without a header."""
    return conversation(Playbook().syn()).run()


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("has_syn", [True, False])
def test_kafka_behind_a_header(name: str, has_syn: bool) -> None:
    """The exchanges are those of the stream without the header, whose bytes are framed."""
    header = HEADERS[name]
    book = Playbook().syn() if has_syn else Playbook()
    assembly = conversation(book >> header).run()
    if has_syn:
        assert found(assembly) == found(plain())
    assert assembly.connections["protocol"].tolist() == [Protocol.KAFKA]
    framed = counts(plain())["framed"] + len(header)
    assert counts(assembly) == {"framed": framed, "unframed": 0, "missing": 0}
    facts = assembly.tcp.connections[0]
    assert bool(facts["is_proxied"]) == (name in WITH_ADDRESS)
    assert facts["proxy_byte_count"] == len(header)
    kinds = [Anomaly.PROXY_HEADER] if name in MALFORMED else []
    assert assembly.anomalies["kind"].tolist() == kinds


@given(st.sampled_from(sorted(WITH_ADDRESS)), st.data())
def test_segments_of_any_size_and_order(name: str, data: st.DataObject) -> None:
    """The header may be in any segments, with the first request or not, in any order."""
    header = WITH_ADDRESS[name]
    first = header + request(0)
    cuts = data.draw(st.lists(st.integers(1, len(first) - 1), max_size=5, unique=True))
    bounds = [0, *sorted(cuts), len(first)]
    parts = [(low, first[low:high]) for low, high in itertools.pairwise(bounds)]
    random.Random(data.draw(st.integers(0, 99))).shuffle(parts)
    book = Playbook().syn()
    for pos, part in [*parts, *data.draw(st.lists(st.sampled_from(parts), max_size=2))]:
        book.segment(CLIENT, part, pos)
    book.next[CLIENT] += len(first)
    book = book << response(0)
    for number in (1, 2):
        book = book >> request(number) << response(number)
    assembly = book.run()
    assert found(assembly) == found(plain())
    assert assembly.tcp.connections["is_proxied"].tolist() == [1]
    assert counts(assembly)["unframed"] == 0


def test_a_signature_elsewhere_is_no_header() -> None:
    """A signature of the broker, one later in the stream, and one that the capture cut."""
    of_broker = conversation(Playbook().syn() << binary())
    later = conversation(Playbook().syn() >> request(9) << response(9) >> binary())
    cut = conversation(Playbook().syn() >> binary()[:20] >> Gap(8))
    for book in (of_broker, later, cut):
        assembly = book.run()
        assert assembly.tcp.connections["proxy_byte_count"].tolist() == [0]
        assert len(assembly.exchanges) >= 3
        assert Anomaly.PROXY_HEADER not in assembly.anomalies["kind"]


def test_a_header_alone_is_no_kafka() -> None:
    """A health check that sends a header and closes the connection."""
    assembly = (Playbook().syn() >> LINE).run()
    assert not len(assembly.exchanges)
    assert not len(assembly.anomalies)
    assert counts(assembly)["framed"] == len(LINE)


def test_tls_behind_a_header(tmp_path: Path) -> None:
    """Decrypted with a key log, and without: the header is framed, the address known."""
    parties = Parties(tmp_path, "TLSv1_3")
    talk = TlsTalk(parties)
    for number in range(3):
        talk.exchange(number)
    for header in (b"", LINE, binary(extra=TLVS)):
        book = Playbook().syn()
        opened = talk.playbook(book >> header if header else book).run(parties.key_log())
        assert [int(row["correlation_id"]) for row in opened.exchanges] == [0, 1, 2]
        assert opened.connections["is_tls"].tolist() == [1]
        assert opened.tcp.connections["is_proxied"].tolist() == [int(bool(header))]
        if not header:
            expected, size = found(opened), counts(opened)["framed"]
        assert found(opened) == expected
        assert counts(opened)["framed"] == size + len(header)
        closed = talk.playbook(Playbook().syn() >> header).run()
        assert closed.connections["protocol"].tolist() == [Protocol.TLS]


# -- over cuts -------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [LINE, binary(extra=TLVS), MALFORMED["two fields"]])
def test_windows_of_a_packet(
    header: bytes, tmp_path: Path, window_bytes: Callable[[int], None]
) -> None:
    """`show` and streams see the same exchanges, each once."""
    window_bytes(40)
    run = Run(tmp_path / "talk.pcap")
    assert flat(run.packets(proxied(header))) == [(at, "paired") for at in range(4)]


@cases("header", [LINE], heavy=[MALFORMED["two fields"]])
def test_appended_captures(header: bytes, tmp_path: Path, in_process: None) -> None:
    """Cut after every third packet, a set has the rows of one run, and its accounts are even."""
    some = proxied(header)
    whole = kdissect.read(write_packets(tmp_path / "whole.pcap", some))
    (connection,) = whole.connections.to_pylist()
    assert connection["proxied_from"] == ("192.0.2.7 41000" if header == LINE else None)
    assert connection["proxy_byte_count"] == len(header)
    assert not check(whole)["faults"]
    for place in range(1, len(some), 3):
        folder = tmp_path / str(place)
        folder.mkdir()
        first = write_packets(folder / "a.pcap", some[:place])
        second = write_packets(folder / "b.pcap", some[place:])
        expected = all_rows(kdissect.read([first, second]))
        kdissect.dissect(None, first, folder / "out", keep_state=True)
        tables = kdissect.dissect(None, second, folder / "out", append=True)
        assert tables.manifest["append"] == {"read_again": None}
        assert all_rows(tables) == expected
        (connection,) = tables.connections.to_pylist()
        assert connection["proxy_byte_count"] == len(header)


def test_recorded_headers_of_both_versions(captures: Path) -> None:
    """The recording's load balancers connect from 127.0.0.2, with the port of each client."""
    tables = kdissect.read(captures / "incidents" / "clients_proxied.pcap.gz")
    connections = tables["connections"].dataset.to_table().to_pylist()
    clients = [row for row in connections if row["is_kafka"]]
    assert {row["proxy_byte_count"] > 28 for row in clients} == {False, True}
    for row in clients:
        assert row["client_ip"] == "127.0.0.2"
        assert row["proxied_from"] == f"127.0.0.1 {row['client_port']}"
    checks = [row for row in connections if not row["is_kafka"]]
    assert [row["proxied_from"] for row in checks] == [None]
