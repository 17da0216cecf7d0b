"""A walk by pieces over an object gives the splits of one walk over the file."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.capture import object_bytes, object_splits, object_store
from kdissect.capture.boundary_search import guess_record
from kdissect.capture.inputs import InputFile, detect_format
from kdissect.capture.mapped_files import Sources
from kdissect.capture.object_bytes import Version
from kdissect.capture.scan import scan
from kdissect.capture.segments import SEGMENT
from kdissect.capture.splits import Splits, plan_splits
from kdissect.errors import EnvironmentFailed
from tests.builders.captures import Blocks, pcap
from tests.builders.packets import ethernet, ipv4, tcp
from tests.capture.scanned import ignored_of, segments_of
from tests.conftest import CAPTURES

URL = "far://bucket/object"
GOLDEN = Path(__file__).parents[1] / "golden" / "capture"


class Object:
    """A file of pyarrow's: bytes, noting the ranges of them that are read."""

    def __init__(self, content: bytes, asked: list[tuple[int, int]]) -> None:
        self.content = content
        self.asked = asked

    def size(self) -> int:
        return len(self.content)

    def metadata(self) -> dict[str, bytes]:
        return {"ETag": b'"tag"'}

    def read_at(self, count: int, pos: int) -> bytes:
        self.asked.append((pos, count))
        return self.content[pos : pos + count]


Put = Callable[[bytes], list[tuple[int, int]]]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Put:
    """A function that puts bytes at URL; few small blocks stay in memory at a time."""
    monkeypatch.setattr(object_bytes, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(object_bytes, "BUDGET_BYTES", 4 * 4096)

    def make(content: bytes) -> list[tuple[int, int]]:
        asked: list[tuple[int, int]] = []
        monkeypatch.setattr(
            object_store, "opened", lambda url: object_store.ObjectFile(url, Object(content, asked))
        )
        return asked

    return make


def described(plan: Splits) -> tuple[object, ...]:
    """The facts of splits, without their sources."""
    results = [scan(split, plan.sources, plan.fragments) for split in plan.splits]
    numbers = [split.first_packet for split in plan.splits]
    assert numbers == sorted(numbers)
    faults = [fault for result in results for fault in result.fragment_faults]
    infos = [replace(info, path="") for info in plan.captures]
    segments = segments_of(results)
    payload = [
        data for result in results for data in plan.sources.payload(result.batch.segments, 1 << 20)
    ]
    return infos, segments, ignored_of(results), faults, b"".join(payload)


def check(content: bytes, split_bytes: int, folder: Path) -> list[object_splits.Piece]:
    """Compare with the walk over a file; the pieces that were walked. `content` was put."""
    path = folder / "local"
    path.write_bytes(content)
    form = detect_format(content[:4])
    walked: list[object_splits.Piece] = []

    def run(pieces: list[object_splits.Piece]) -> list[object_splits.Walked]:
        walked.extend(pieces)
        walks = [object_splits.walk_piece(piece) for piece in pickle.loads(pickle.dumps(pieces))]
        return pickle.loads(pickle.dumps(walks))

    there = InputFile(URL, form, "none", len(content), data_path=URL, tag="tag")
    here = InputFile(str(path), form, "none", len(content), data_path=str(path))
    walks = object_splits.walk_all([there], split_bytes, 1000, run)
    found = described(plan_splits([there], split_bytes, 1000, walks))
    assert found == described(plan_splits([here], 1 << 30, 1000))
    return walked


@pytest.mark.parametrize("split_bytes", [10_000, 65_536, 1 << 30])
@pytest.mark.parametrize(
    "path",
    [
        CAPTURES / "librdkafka.pcap",
        CAPTURES / "java_0_10_2_2.pcap",
        GOLDEN / "blocks.pcapng",
        GOLDEN / "first_packets.pcap",
    ],
    ids=lambda path: path.name,
)
def test_captures_by_pieces(put: Put, path: Path, split_bytes: int, tmp_path: Path) -> None:
    """The splits equal those of one walk, and no piece is walked twice."""
    content = path.read_bytes()
    put(content)
    walked = check(content, split_bytes, tmp_path)
    # guesses are right in what nobody made to mislead: nothing is walked twice
    assert len(walked) <= -(-len(content) // split_bytes) + 1


def test_a_cut_capture_says_the_same(put: Put, tmp_path: Path) -> None:
    """Captures that end inside a header or a packet have the same error."""
    content = (CAPTURES / "librdkafka.pcap").read_bytes()
    for size in (100_000, 20, 24, 30, 99_990):
        put(content[:size])
        check(content[:size], 20_000, tmp_path)


def records(count: int, payload: int = 400) -> list[bytes]:
    """Packets of one connection."""
    return [
        ethernet(ipv4(tcp(bytes([number % 251]) * payload, seq=number * payload)))
        for number in range(count)
    ]


def test_interfaces_in_the_middle_are_learned(put: Put, tmp_path: Path) -> None:
    """A second interface, and a section of the other byte order, count from their packets on."""
    little, big = Blocks(), Blocks(little=False)
    packets = records(120)
    content = b"".join(
        [
            little.section(),
            little.interface(),
            *(little.enhanced(packet, 10**15 + n) for n, packet in enumerate(packets[:40])),
            little.interface(resolution=9),
            little.secrets(b"CLIENT_RANDOM"),
            *(little.enhanced(packet, 10**18 + n, 1) for n, packet in enumerate(packets[40:80])),
            big.section(),
            big.interface(resolution=3),
            *(big.enhanced(packet, 10**12 + n) for n, packet in enumerate(packets[80:])),
        ]
    )
    put(content)
    walked = check(content, 5000, tmp_path)
    assert len(walked) <= 4 * -(-len(content) // 5000)


def test_packets_without_a_time(put: Put, tmp_path: Path) -> None:
    """Simple packet blocks have the time of the packet before, however far back it is."""
    blocks = Blocks()
    packets = records(60)
    content = b"".join(
        [
            blocks.section(),
            blocks.interface(),
            blocks.enhanced(packets[0], 10**15),
            *(blocks.simple(packet) for packet in packets[1:]),
        ]
    )
    put(content)
    check(content, 3000, tmp_path)


def test_a_capture_of_captures_misleads_nobody(put: Put, tmp_path: Path) -> None:
    """Payload that is a capture itself: guesses in it do not meet with where records end."""
    inner = pcap(records(30))
    packets = [ethernet(ipv4(tcp(inner, seq=n * len(inner)))) for n in range(6)]
    for content in (
        pcap(packets),
        b"".join(
            [Blocks().section(), Blocks().interface(), *(Blocks().enhanced(p) for p in packets)]
        ),
    ):
        put(content)
        walked = check(content, 4000, tmp_path)
        assert sum(piece.stop - piece.begin for piece in walked) < 5 * len(content)


blocks_drawn = st.lists(
    st.one_of(
        st.tuples(st.just("enhanced"), st.integers(0, 2000), st.integers(0, 2)),
        st.tuples(st.just("simple"), st.integers(0, 500), st.just(0)),
        st.tuples(st.just("interface"), st.sampled_from([0, 3, 6, 9]), st.just(0)),
        st.tuples(st.just("section"), st.booleans(), st.just(0)),
        st.tuples(st.just("secrets"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("other"), st.integers(0, 5000), st.just(0)),
    ),
    max_size=40,
)


@given(drawn=blocks_drawn, split_bytes=st.integers(50, 9000), cut=st.integers(0, 200))
def test_any_blocks_by_any_pieces(
    drawn: list[tuple[str, int, int]],
    split_bytes: int,
    cut: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Random blocks in pieces of any size give the splits of one walk."""
    blocks = Blocks()
    parts = [blocks.section()]
    packet = ethernet(ipv4(tcp(b"x" * 60)))
    for number, (kind, size, interface) in enumerate(drawn):
        if kind == "enhanced":
            parts.append(blocks.enhanced(packet + bytes(size), 10**15 + number, interface))
        elif kind == "simple":
            parts.append(blocks.simple(packet + b"\x06" * size))
        elif kind == "interface":
            parts.append(blocks.interface(resolution=size or None))
        elif kind == "section":
            blocks = Blocks(bool(size))
            parts.append(blocks.section())
        elif kind == "secrets":
            parts.append(blocks.secrets(b"s" * size))
        else:
            parts.append(blocks.block(0x0BAD, b"\x01" * size))
    content = b"".join(parts)
    content = content[: max(4, len(content) - cut)] if cut % 3 == 0 else content
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_bytes, "BLOCK_BYTES", 4096)
        patch.setattr(object_bytes, "BUDGET_BYTES", 2 * 4096)
        patch.setattr(object_store, "opened", lambda url: Object(content, []))
        check(content, split_bytes, tmp_path_factory.mktemp("far"))


def test_a_record_is_guessed_among_payload() -> None:
    """From any position the guess is the next record's start."""
    content = np.frombuffer(pcap(records(200)), np.uint8)
    interfaces = np.array([1, 65535, 6, 0])
    for start in (24, 25, 480, 7_000, 33_333):
        found = guess_record(content[start:], True, False, interfaces, 1_700_000_000 * 10**9)
        assert (start + found - 24) % (16 + 454) == 0
        assert 0 <= found < 470
    assert guess_record(content[:10], True, False, interfaces, None) == -1
    assert guess_record(np.zeros(5000, np.uint8), True, False, interfaces, 10**18) == -1


def test_few_bytes_are_held(put: Put) -> None:
    """Scattered ranges are read in blocks, within the budget."""
    content = bytes(range(256)) * 400
    asked = put(content)
    sources = Sources([URL], [Version(len(content), "tag")])
    some = np.zeros(60, [("pos", "<i8"), ("length", "<i8"), ("source", "<i4")])
    some["pos"] = np.arange(60) * 1700 + 3
    some["length"] = np.arange(60) * 11
    expected = b"".join(content[pos : pos + length] for pos, length, _ in some.tolist())
    assert sources.gather(some).tobytes() == expected
    assert (
        sources._ranged[0].resident_bytes <= 5 * 4096
    )  # the last extent counts with its first block
    assert sum(count for _, count in asked) < len(content) + 4096
    again = pickle.loads(pickle.dumps(sources))
    assert again.part(0, 5000, 5010).tobytes() == content[5000:5010]
    assert again.sizes.tolist() == [len(content)]


def test_an_object_that_changes(put: Put) -> None:
    """Another tag or size ends the run with both sizes."""
    put(b"0123456789" * 1000)
    for version in (Version(10_000, "other"), Version(20_000, "tag")):
        with pytest.raises(EnvironmentFailed, match=r"changed.* while it was read"):
            Sources([URL], [version]).part(0, 0, 10)
    sources = Sources([URL], [Version(10_000, "tag")])
    assert sources.part(0, 0, 3).tobytes() == b"012"
    sources._ranged[0]._file._file.content = b"short"
    with pytest.raises(EnvironmentFailed, match="changed from 10000 to 4096 bytes"):
        sources.part(0, 5000, 5003)


def test_a_range_that_cannot_be_read(put: Put) -> None:
    """EnvironmentFailed has the store's message in one line."""
    put(b"0123456789" * 1000)
    sources = Sources([URL], [Version(10_000, "tag")])
    sources.part(0, 0, 3)

    def fail(count: int, pos: int) -> bytes:
        raise OSError("AWS Error INTERNAL_FAILURE\nmore of it")

    sources._ranged[0]._file._file.read_at = fail
    message = r"far://bucket/object: bytes 4096 to 8192 cannot be read: AWS Error INTERNAL_FAILURE$"
    with pytest.raises(EnvironmentFailed, match=message):
        sources.part(0, 5000, 5003)


def test_sources_hold_what_others_fetched(put: Put, tmp_path: Path) -> None:
    """Payload that came with its segments is read without asking the store."""
    content = bytes(range(200)) * 40
    asked = put(content)
    sources = Sources([URL], [Version(len(content), "tag")])
    segments = np.zeros(3, SEGMENT)
    segments["pos"], segments["captured"] = [100, 7000, 50], [20, 30, 10]
    payload = b"".join(sources.payload(segments, 25))
    asked.clear()
    held = Sources([URL], [Version(len(content), "tag")]).holding(
        [segments[:1], segments[1:]], np.frombuffer(payload, np.uint8)
    )
    extents = np.zeros(3, [("pos", "<i8"), ("length", "<i8"), ("source", "<i4")])
    extents["pos"], extents["length"] = [105, 50, 7029], [5, 10, 1]
    assert held.gather(extents).tobytes() == content[105:110] + content[50:60] + content[7029:7030]
    assert not asked
    with pytest.raises(ValueError, match="are not those of the segments"):
        held.holding([segments], np.zeros(5, np.uint8))
