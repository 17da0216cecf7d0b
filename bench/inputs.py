"""The captures that benchmarks read, and where copies and outputs of theirs lie meanwhile."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.measure import ROOT
from bench.multiply import multiply
from bench.synthesise import (
    Recipe,
    connections_of,
    crowd,
    heartbeat,
    large_fetch,
    offset_fetch,
    synthesise,
)
from kdissect.codec.compression import CODEC_NAMES

PERF = Path(os.environ.get("KDISSECT_MATERIAL", ROOT.parent / "shared")) / "captures" / "perf"
WORK = ROOT / "out" / "bench"
ONE_CODEC_RECORDS, ONE_CODEC_BATCH = 24_000, 40
START_UP = ROOT / "captures" / "librdkafka.pcap"


@dataclass(frozen=True, slots=True)
class Input:
    """A capture to measure with: `name` is what results call it."""

    name: str
    title: str
    path: Path
    note: str = ""


def made(name: str, write: Callable[[Path], object]) -> Path:
    """The file of a name under out/bench, written once."""
    path = WORK / name
    if not path.exists():
        WORK.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        write(part)
        part.rename(path)
    return path


def record_heavy() -> Input:
    """Four producers (lz4, gzip, snappy, none) and a consumer of it all."""
    path = PERF / "perf_tshark.pcap"
    title = "record-heavy"
    if path.exists():
        return Input("records", title, path)
    return Input("records", title, ROOT / "captures" / "java_2_0_1.pcap", _absent(path))


def message_heavy() -> Input:
    """Hundreds of connections with tiny messages."""
    path = PERF / "perf_small.pcap"
    title = "message-heavy"
    if path.exists():
        return Input("messages", title, path)
    return Input("messages", title, START_UP, _absent(path))


def five_codecs() -> Input:
    """A hand-made conversation of large batches in every codec, zstd too."""
    recipes = [Recipe(codec) for codec in CODEC_NAMES]
    path = made("codecs.pcap", lambda part: synthesise(part, recipes))
    return Input("codecs", "record-heavy, all five codecs", path)


def one_codec(codec: str, magic: int = 2) -> Input:
    """The same conversation in one codec and magic, in batches of about 16 kB as Java's are."""
    recipe = Recipe(codec, magic, ONE_CODEC_RECORDS, ONE_CODEC_BATCH)
    path = made(f"{codec}-m{magic}.pcap", lambda part: synthesise(part, [recipe]))
    return Input(path.stem, f"{codec}, magic {magic}", path)


@dataclass(frozen=True, slots=True)
class Shape:
    """The layout of a made capture's exchanges in connections."""

    name: str
    title: str
    is_large: bool
    exchange_count: int
    connection_count: int
    share: float = 0.0  # of the exchanges that are the first connection's


def shapes(quick: bool) -> list[Shape]:
    """Pairs of the same bytes, spread over many connections and 90 % in one; and short ones."""
    part = 4 if quick else 1
    found = []
    for is_large, count, what in (
        (True, 1600 // part, "large fetches"),
        (False, 1_000_000 // part, "tiny requests"),
    ):
        found += [
            Shape(f"{what}, many", f"{what}, 100 connections", is_large, count, 100),
            Shape(f"{what}, one", f"{what}, 90 % in one connection", is_large, count, 100, 0.9),
        ]
    count = 100_000 // part
    found.append(Shape("short", f"{count} short connections", False, 3 * count, count))
    return found


def shaped(shape: Shape) -> Path:
    """The capture of a shape, written once."""
    kind = "fetches" if shape.is_large else "requests"
    chosen = connections_of(shape.exchange_count, shape.connection_count, shape.share)
    return made(
        f"{kind}-{shape.exchange_count}-{shape.connection_count}-{shape.share:.0%}.pcap",
        lambda part: crowd(part, large_fetch() if shape.is_large else heartbeat(), chosen),
    )


def small_requests(count: int, connections: int, per_second: int = 25_000) -> Input:
    """OffsetFetch requests over connections, each sent after the response to the one before."""
    chosen, gap_us = connections_of(count, connections, 0), 1_000_000 // per_second // 2
    path = made(
        f"offsets-{count}-{connections}-{per_second}.pcap",
        lambda part: crowd(part, offset_fetch(), chosen, gap_us),
    )
    return Input(path.stem, f"{connections} connections", path)


def _absent(path: Path) -> str:
    return f"{path.name} is not on this machine: a small capture of this repository instead"


def copies_of(source: Input, copies: int) -> Path:
    """That many copies of a capture, kept under out/bench."""
    name = f"{source.path.stem}-{copies}.pcap"
    return made(name, lambda part: multiply(source.path, part, copies))
