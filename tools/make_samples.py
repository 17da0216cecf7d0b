"""Write `kdissect/samples`: small captures that `python -m kdissect.compile` reads.

Together they reach the kernels: plain and TLS connections, records of old and new formats, IP
fragments, segments that overlap, names that are not UTF-8, one direction only, many endpoints.
Made from the captures in `captures/`.

    python -m tools.make_samples
"""

from collections.abc import Iterator
from pathlib import Path

from tests.builders.captures import Packet, pcap_bytes, read_packets
from tests.capture.fragmenting import ipv4_fragments

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "kdissect" / "samples"
TLS_PACKETS = 120
OLD_PACKETS = 300
ENDPOINTS = 300  # of more connections than a table of them has room for at first


def _cut_up(packets: list[Packet]) -> Iterator[Packet]:
    """Every fifth segment in IP fragments, every seventh twice and then shorter."""
    for number, packet in enumerate(packets):
        size = len(packet.payload)
        if number % 7 == 0 and size > 20:
            yield packet.with_payload(packet.payload[: size // 2])
            yield packet.with_payload(packet.payload[size // 4 :]).put(
                packet.tcp_pos + 4, (packet.seq + size // 4).to_bytes(4, "big")
            )
        yield from ipv4_fragments(packet, 64) if number % 5 == 0 else [packet]


def main() -> None:
    SAMPLES.mkdir(exist_ok=True)
    plain = read_packets(ROOT / "captures" / "kafkajs.pcap.gz")
    named = [
        packet.with_payload(packet.payload.replace(b"kafkajs", b"kafk\xffjs"))
        if packet.is_tcp and len(packet.payload) < 400
        else packet
        for packet in plain
    ]
    crowd = [
        packet.put(packet.tcp_pos, port.to_bytes(2, "big"))
        for packet in plain[:1]
        for port in range(20_000, 20_000 + ENDPOINTS)
    ]
    answers = [packet for packet in plain if packet.is_tcp and packet.source[1] < packet.target[1]]
    old = read_packets(ROOT / "captures" / "java_0_10_2_2.pcap")[:OLD_PACKETS]
    (SAMPLES / "plain.pcap").write_bytes(pcap_bytes(plain))
    (SAMPLES / "old.pcap").write_bytes(pcap_bytes(old))
    (SAMPLES / "damaged.pcap").write_bytes(pcap_bytes([*_cut_up(named), *crowd]))
    (SAMPLES / "answers.pcap").write_bytes(pcap_bytes(answers))
    encrypted = read_packets(ROOT / "captures" / "tls13.pcap.gz")[:TLS_PACKETS]
    (SAMPLES / "tls.pcap").write_bytes(pcap_bytes(encrypted))
    (SAMPLES / "tls.keylog").write_bytes((ROOT / "captures" / "tls13.keylog").read_bytes())


if __name__ == "__main__":
    main()
