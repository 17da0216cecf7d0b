"""pcap and pcapng records: kernels against the oracles, formats by hand, damage of every kind."""

import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.capture import packet_reader, windows
from kdissect.capture.inputs import find_captures
from kdissect.capture.segments import FRAGMENT_PART
from kdissect.jit import JIT_ENABLED
from tests.builders.captures import Blocks, pcap
from tests.builders.packets import ethernet, ipv4, ipv6, tcp, udp
from tests.capture.scanned import ignored_of, read, segments_of, write
from tests.conftest import CAPTURES
from tests.material import CAPTURES as SHARED
from tests.oracles import packets as oracle
from tests.oracles.link_layers import scan_capture


def check_like_oracle(folder: Path, data: bytes, split_bytes: int = 1 << 30) -> None:
    """Kernels and oracles agree on the packets, segments, ending and secrets of these bytes."""
    info, splits, results, _ = read(write(folder, data), split_bytes)
    reading = oracle.read_capture(data)
    segments, ignored = scan_capture(data)
    times = [packet.time_ns for packet in reading.packets]
    assert info.packet_count == len(reading.packets)
    assert info.first_time_ns == (min(times) if times else None)
    assert info.last_time_ns == (max(times) if times else None)
    assert info.byte_count == sum(packet.captured for packet in reading.packets)
    cut = sum(packet.captured < packet.length for packet in reading.packets)
    assert info.truncated_packet_count == cut
    assert info.secrets == tuple(reading.secrets)
    has_error = reading.ending != "end" or len(data) < 24
    assert (info.error is not None) == has_error
    if has_error:
        assert (info.error_pos, info.error_packet) == (reading.pos, reading.number + 1)
    # the oracle knows no fragments; damage makes some, whose bytes are rows of their own
    found = [row for row in segments_of(results) if not row.marks & FRAGMENT_PART]
    assert found == segments
    assert ignored_of(results) == ignored
    assert sum(result.packet_count for result in results) == info.packet_count
    if splits:
        assert splits[0].number_before < reading.packets[0].number
        assert splits[-1].end == reading.pos
        for before, after in pairwise(splits):
            assert before.end == after.pos
            assert before.last_number == after.number_before
            assert after.pos - before.pos >= split_bytes


def _plain_to_ns(high: int, low: int, resolution: int, offset_s: int) -> int:
    return packet_reader.to_ns(high, low, resolution, offset_s)


# Not cached on disk: the cache would remember by which name pytest imported this module.
_to_ns = numba.njit(error_model="numpy")(_plain_to_ns) if JIT_ENABLED else _plain_to_ns


@given(
    st.integers(0, 2**64 - 1) | st.integers(0, 2**21).map(lambda n: 2**64 - 1 - n),
    st.integers(0, 255),
    st.integers(-(2**63), 2**63 - 1) | st.just(0),
)
def test_any_time_stays_in_range(ticks: int, resolution: int, offset_s: int) -> None:
    """The kernel's time equals the oracle's for any resolution and offset."""
    expected = oracle.to_ns(ticks, resolution, offset_s)
    assert _to_ns(ticks >> 32, ticks & 0xFFFFFFFF, resolution, offset_s) == expected


@pytest.mark.parametrize(
    ("ticks", "resolution", "offset_s", "time_ns"),
    [
        (1_700_000_000_123_456, 6, 0, 1_700_000_000_123_456_000),
        (1_700_000_000_123_456_789, 9, 0, 1_700_000_000_123_456_789),
        (17_000_000_001_234_567_891, 10, 0, 1_700_000_000_123_456_789),
        (5_000_000_000_007, 12, 1_700_000_000, 1_700_000_005_000_000_000),
        (1_700_000_000, 0, -3600, 1_699_996_400_000_000_000),
        (3 << 19, 128 | 20, 0, 1_500_000_000),
        (1_700_000_000 << 32 | 1 << 31, 128 | 32, 0, 1_700_000_000_500_000_000),
        (2**64 - 1, 0, 0, 2**63 - 1),
        (0, 6, -(2**63), -(2**63)),
    ],
)
def test_times_by_hand(ticks: int, resolution: int, offset_s: int, time_ns: int) -> None:
    """Times whose result is known, at the ends of the range."""
    assert _to_ns(ticks >> 32, ticks & 0xFFFFFFFF, resolution, offset_s) == time_ns
    assert oracle.to_ns(ticks, resolution, offset_s) == time_ns


PACKETS = [
    ethernet(ipv4(tcp(b"hello"))),
    ethernet(ipv6(tcp(b"", flags=2)), 0x86DD),
    ethernet(ipv4(tcp(b"answer", ports=(9092, 40000)), addresses=("10.0.0.2", "10.0.0.1"))),
    ethernet(udp(b"no", 53)),
    ethernet(bytes(28), 0x0806),
]


@pytest.mark.parametrize("little", [True, False])
@pytest.mark.parametrize("nano", [True, False])
def test_pcap_byte_orders_and_resolutions(tmp_path: Path, little: bool, nano: bool) -> None:
    """Both byte orders, micro- and nanoseconds."""
    times = [(1_700_000_000, 5), (4_294_967_295, 999_999), (0, 4_294_967_295)]
    data = pcap(PACKETS[:3], little=little, nano=nano, times=times)
    check_like_oracle(tmp_path, data)
    _, _, results, _ = read(write(tmp_path, data))
    scale = 1 if nano else 1000
    expected = [seconds * 10**9 + fraction * scale for seconds, fraction in times]
    assert results[0].batch.segments["time_ns"].tolist() == expected


@pytest.mark.parametrize("is_pcapng", [False, True])
def test_cut_at_every_length(tmp_path: Path, is_pcapng: bool) -> None:
    """Every whole packet is found, and the rest is an error that names its place."""
    blocks = Blocks()
    packed = [blocks.enhanced(packet) for packet in PACKETS[:3]]
    head = blocks.section() + blocks.interface() if is_pcapng else pcap([])
    records = packed if is_pcapng else [pcap([packet])[24:] for packet in PACKETS[:3]]
    data = head + b"".join(records)
    ends = np.cumsum([len(head), *map(len, records)]).tolist()
    for size in range(4, len(data) + 1):
        check_like_oracle(tmp_path, data[:size])
        info, *_ = read(write(tmp_path, data[:size]))
        count = max(sum(end <= size for end in ends) - 1, 0)
        assert info.packet_count == count
        is_aligned = size in ends or (is_pcapng and size == len(blocks.section()))
        assert (info.error is None) == is_aligned


def make_pcapng() -> bytes:
    """Two sections of both byte orders, several interfaces, all kinds of blocks."""
    little, big = Blocks(True), Blocks(False)
    raw = ipv4(tcp(b"raw", seq=9))
    return b"".join(
        [
            little.section(), little.interface(resolution=9, offset_s=-5),
            little.block(4, b"names"), little.enhanced(PACKETS[0], 1_700_000_000_000_000_001),
            little.interface(101, snap_length=30),
            little.enhanced(raw, 1_700_000_000_000_000, interface=1, length=len(raw) + 5),
            little.simple(PACKETS[1]), little.secrets(b"CLIENT_RANDOM 00 11"),
            little.enhanced(PACKETS[2], 5, kind=2), little.block(0x0BAD, bytes(31)),
            little.enhanced(PACKETS[0], 5, interface=7), little.enhanced(b"", captured=100),
            little.block(6, bytes(8)), little.block(5, bytes(20)),
            big.section(), big.simple(PACKETS[0]),
            big.interface(101, snap_length=43, resolution=128 | 10),
            big.interface(), big.simple(raw), big.enhanced(raw, 1 << 20),
            big.enhanced(PACKETS[2], 10**15, interface=1), big.secrets(b"more"),
        ]
    )  # fmt: skip


def test_pcapng_by_hand(tmp_path: Path) -> None:
    """Sections, interfaces, all kinds of packet blocks, and secrets."""
    data = make_pcapng()
    check_like_oracle(tmp_path, data)
    info, _, results, _ = read(write(tmp_path, data))
    assert info.error is None
    assert info.link_types == ("ethernet", "raw")
    expected = [b"CLIENT_RANDOM 00 11", b"more"]
    assert [data[pos : pos + size] for _, pos, size in info.secrets] == expected
    segments = segments_of(results)
    assert [(s.packet, s.time_ns, s.captured, s.length) for s in segments] == [
        (1, 1_699_999_995_000_000_001, 5, 5),
        (2, 1_700_000_000_000_000_000, 3, 3),
        (3, 1_700_000_000_000_000_000, 0, 0),  # a simple block has the time before
        (4, -4_999_999_995, 6, 6),
        (10, -4_999_999_995, 3, 3),  # behind a custom block, which Wireshark numbers too
        (11, 1_024_000_000_000, 3, 3),
        (12, 1_000_000_000_000_000_000, 6, 6),
    ]
    assert ignored_of(results) == {"unknown_interface": 2, "malformed_block": 2}


SHAPES = sorted((SHARED / "shapes").glob("*.pcap*"))


@pytest.mark.parametrize(
    "path", [CAPTURES / "librdkafka.pcap", *SHAPES], ids=lambda path: path.name
)
def test_captures_of_other_programs_read_like_the_oracle(path: Path, tmp_path: Path) -> None:
    """What tcpdump, dumpcap and editcap wrote, whole and in splits."""
    file = find_captures([path])[0]
    *_, sources = read(file, folder=tmp_path)
    plain = sources.data(0).tobytes()
    for split_bytes in (1 << 30, 50_000):
        check_like_oracle(tmp_path, plain, split_bytes)


def make_numbered() -> bytes:
    """A pcapng file with blocks that Wireshark numbers, and blocks that it does not."""
    blocks = Blocks()
    event = struct.pack("<HQQIHI", 1, 1000, 5, 30, 3, 2) + bytes(20)
    others = [
        blocks.block(9, b"MESSAGE=a line of the journal\n"), blocks.block(0x40000BAD, bytes(8)),
        blocks.block(0x0BAD, bytes(31)), blocks.block(0x204, event), blocks.block(0x216, event),
        blocks.block(0x221, event),
    ]  # fmt: skip
    ignored = [blocks.block(kind, bytes(32)) for kind in (7, 0x101, 0x208, 0x217, 0x222)]
    parts = [blocks.section(), others[0], blocks.interface()]
    for packet, between in zip(PACKETS * 4, [*others, *ignored, *others] * 2, strict=False):
        parts += [between, blocks.enhanced(packet), between]
    return b"".join(parts)


@pytest.mark.parametrize("split_bytes", [1, 150, 400, 1 << 20])
def test_numbers_of_blocks_that_are_no_packets(
    tmp_path: Path, window_bytes: Callable[[int], None], split_bytes: int
) -> None:
    """Splits and windows number packets as Wireshark does; only packets are counted."""
    data = make_numbered()
    check_like_oracle(tmp_path, data, split_bytes)
    path = write(tmp_path, data)
    info, _, results, _ = read(path, split_bytes)
    numbers = [segment.packet for segment in segments_of(results)]
    everything = [packet.number for packet in oracle.read_capture(data).packets]
    assert everything[:8] == [3, 6, 9, 12, 15, 18, 20, 21]
    assert numbers[:5] == [3, 6, 9, 18, 20]  # the fourth and fifth packets are no TCP
    assert info.packet_count == len(everything)
    window_bytes(max(split_bytes, 40))
    reader = windows.WindowReader(path.path, 0, [path.path])
    shown = [part.batch.segments["packet"].copy() for part in reader.windows()]
    assert np.concatenate(shown).tolist() == numbers
    assert reader.packet_count == len(everything)


@pytest.mark.parametrize("split_bytes", [1, 60, 100, 250, 1000])
def test_splits_do_not_change_segments(tmp_path: Path, split_bytes: int) -> None:
    """Splits of any size give the segments of the oracle."""
    check_like_oracle(tmp_path, make_pcapng(), split_bytes)
    check_like_oracle(tmp_path, pcap(PACKETS * 10), split_bytes)


def test_many_interfaces(tmp_path: Path) -> None:
    """Tables grow; a split knows the interfaces before it."""
    blocks = Blocks()
    data = blocks.section()
    for number in range(300):
        data += blocks.interface(101 if number % 2 else 1) + blocks.secrets(b"secret")
        packet = ipv4(tcp(b"x", seq=number))
        packet = packet if number % 2 else ethernet(packet)
        data += blocks.enhanced(packet, interface=number)
    for split_bytes in (1, 5000, 1 << 30):
        check_like_oracle(tmp_path, data, split_bytes)
        info, *_ = read(write(tmp_path, data), split_bytes)
        assert (info.packet_count, len(info.secrets)) == (300, 300)


@pytest.mark.parametrize(
    ("pos", "value", "reason"),
    [
        (4, 8, "block length is impossible"),
        (4, 2**32 - 1, "needs 4294967296 bytes"),
        (28 + 4, 24, "two lengths"),
        (8, 0x01020304, "no byte order mark"),
        (12, 9, "unknown format version"),
    ],
)
def test_bad_blocks_stop_with_their_place(
    tmp_path: Path, pos: int, value: int, reason: str
) -> None:
    """A wrong length ends the capture with its position."""
    blocks = Blocks()
    data = bytearray(blocks.section() + blocks.enhanced(PACKETS[0]))
    second = blocks.section() + blocks.interface()
    target = bytearray(second)
    struct.pack_into("<I", target, pos, value)
    info, *_ = read(write(tmp_path, bytes(data + target)))
    assert info.packet_count == 1
    assert info.error_packet == 2
    assert info.error is not None
    assert reason in info.error
    assert f"packet 2 at byte {info.error_pos}" in info.error


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (bytes(40), "only zeros"),
        (struct.pack("<4I", 1, 0, 2**18 + 1, 60) + bytes(2**19), "length is impossible"),
    ],
)
def test_bad_pcap_records_stop_with_their_place(tmp_path: Path, damage: bytes, reason: str) -> None:
    """A tail of zeros gives no packets of 1970, and a wrong length swallows none."""
    data = pcap(PACKETS[:2])
    check_like_oracle(tmp_path, data + damage)
    info, *_ = read(write(tmp_path, data + damage))
    assert (info.packet_count, info.error_packet, info.error_pos) == (2, 3, len(data))
    assert info.error is not None
    assert reason in info.error


@given(st.data())
def test_flipped_bytes_read_like_the_oracle(tmp_path: Path, data: st.DataObject) -> None:
    """Damage in any place: no crash, and both readers say the same."""
    whole = data.draw(st.sampled_from([make_pcapng(), pcap(PACKETS), pcap(PACKETS, little=False)]))
    made = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        pos = data.draw(st.integers(4, len(made) - 1))
        made[pos] = data.draw(st.sampled_from([0, 1, 6, 255]) | st.integers(0, 255))
    check_like_oracle(tmp_path, bytes(made), data.draw(st.sampled_from([1, 100, 1 << 30])))


@given(
    st.lists(st.tuples(st.binary(max_size=60), st.integers(0, 2**32 - 1)), max_size=12),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 1, 12, 101, 108, 113, 228, 276, 9999]),
)
def test_any_pcap_reads_like_the_oracle(
    tmp_path: Path, packets: list[tuple[bytes, int]], little: bool, nano: bool, link_type: int
) -> None:
    """Random packets and lengths, read in small splits."""
    made = pcap([packet for packet, _ in packets], little=little, nano=nano, link_type=link_type,
                lengths=[length for _, length in packets])  # fmt: skip
    check_like_oracle(tmp_path, made, 40)
