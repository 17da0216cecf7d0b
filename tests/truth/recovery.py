"""Counts frames that are found again in damaged captures, and false ones.

    python -m tests.truth.recovery [--seeds 3] [--all] [--damage NAME] [--report FILE] [CAPTURE ...]

Packets are taken out of a capture's index of segments, and the rest is assembled. A frame is
*intact* when every packet with a byte of it is still there; *false* when no frame of the whole
capture has its connection, direction, correlation id and size. An exchange with both sides that
was not one in the whole capture is a *wrong pair*. A share below what is asked for is marked with
an exclamation mark; that, a false frame or a wrong pair makes the exit code 1.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.inputs import find_captures
from kdissect.capture.mapped_files import Sources
from kdissect.capture.scan import scan
from kdissect.capture.segments import SegmentBatch
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import planned
from kdissect.protocol.model import SIDES
from tests.builders.assembling import assemble
from tests.kafka.conversations import check_accounts
from tests.material import CAPTURES

NAMES = (
    "java_latest/java_latest", "cluster/cluster", "perf/perf_small", "other_clients/librdkafka",
    "other_clients/sarama", "transactions/transactions", "share_streams/share",
)  # fmt: skip
DAMAGED = ("shapes", "tls")  # what is missing in the first already; no frames in the other
PACKETS_MAX = 40_000  # of a long capture the first ones

Keep = Callable[[Any, np.random.Generator], npt.NDArray[np.bool_]]


def loss(share: float, burst: int = 1) -> Keep:
    """Packets lost at random, in bursts of `burst` on average."""

    def keep(segments: Any, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
        count = len(segments)
        kept = np.ones(count, bool)
        for start in np.flatnonzero(rng.random(count) < share / burst):
            length = 1 if burst == 1 else int(rng.geometric(1 / burst))
            kept[start : start + length] = False
        return kept

    return keep


def late_start(segments: Any, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """A start at any packet of the first 90 %."""
    return np.arange(len(segments)) >= int(rng.uniform(0, 0.9) * len(segments))


@dataclass(frozen=True)
class Scenario:
    """asked: the share of the intact frames that must be found, in percent."""

    name: str
    keep: Keep
    asked: float
    side: int | None = None  # the only direction that was captured


SCENARIOS = (
    Scenario("0.1 % lost", loss(0.001), 99.5),
    Scenario("0.1 % lost in bursts", loss(0.001, 5), 99.5),
    Scenario("1 % lost", loss(0.01), 99.5),
    Scenario("1 % lost in bursts", loss(0.01, 5), 99.5),
    Scenario("5 % lost", loss(0.05), 98),
    Scenario("5 % lost in bursts", loss(0.05, 5), 98),
    Scenario("start at any packet", late_start, 98),
    Scenario("requests alone", loss(0), 98, 0),
    Scenario("requests alone, 1 % lost", loss(0.01), 98, 0),
    Scenario("requests alone, 5 % lost", loss(0.05), 98, 0),
    Scenario("requests alone, start at any packet", late_start, 98, 0),
    Scenario("responses alone", loss(0), 95, 1),
    Scenario("responses alone, 1 % lost", loss(0.01), 95, 1),
    Scenario("responses alone, 5 % lost", loss(0.05), 95, 1),
    Scenario("responses alone, start at any packet", late_start, 95, 1),
)


@dataclass(frozen=True)
class Whole:
    """A capture and what is in it when nothing is missing."""

    sources: Sources
    batch: SegmentBatch
    assembly: Assembly
    keys: tuple[list[Any], list[Any]]
    first: tuple[Any, Any]  # per side and frame: the rows of its segments, as one flat list
    pairs: set[Any]
    broker_side: npt.NDArray[np.int64]  # per endpoint pair


Count = tuple[Counter[str], list[Any]]
"""Numbers of intact, found and false frames, and of wrong pairs; and some false ones."""


def _keys(assembly: Assembly, side: int) -> tuple[Any, list[Any]]:
    """Exchanges with that side, and the identity of each frame."""
    exchanges = assembly.exchanges
    rows = np.flatnonzero(exchanges[SIDES[side]]["size"] >= 0)
    some = exchanges[rows]
    connections = assembly.connections[some["connection"]]
    ends = assembly.endpoints[connections["endpoints"]]
    names = np.frombuffer(ends.tobytes(), f"V{ends.itemsize}") if len(ends) else []
    sender = connections["client_side"] ^ side
    sizes, ids = some[SIDES[side]]["size"], some["correlation_id"]
    listed = zip(names, sender.tolist(), ids.tolist(), sizes.tolist(), strict=True)
    return rows, [(bytes(name), *rest) for name, *rest in listed]


def _pairs(assembly: Assembly) -> list[Any]:
    exchanges = assembly.exchanges
    some = exchanges[(exchanges["request"]["size"] >= 0) & (exchanges["response"]["size"] >= 0)]
    ends = assembly.endpoints[assembly.connections[some["connection"]]["endpoints"]]
    return [
        (end.tobytes(), *rest)
        for end, *rest in zip(
            ends, some["correlation_id"].tolist(), some["request"]["size"].tolist(),
            some["response"]["size"].tolist(), some["api_key"].tolist(), strict=True
        )
    ]  # fmt: skip


def read_whole(path: Path) -> Whole:
    with planned(find_captures([path]), Options(split_bytes=1 << 30)) as plan:
        sources = plan.sources()
    batch = SegmentBatch.concat([scan(split, sources).batch for split in plan.splits])
    batch = SegmentBatch(batch.endpoints, batch.segments[:PACKETS_MAX])
    assembly = assemble(batch, sources)
    starts = batch.segments["pos"].astype(np.int64)  # one file: rising
    packets = batch.segments["packet"]
    keys, needed = [], []
    for side in (0, 1):
        rows, names = _keys(assembly, side)
        column = assembly.exchanges[SIDES[side]][rows]
        wanted = []
        for frame in column:
            extents = assembly.extents[frame["extent_start"] :][: frame["extent_count"]]
            segments = np.searchsorted(starts, extents["pos"], side="right") - 1
            first = np.searchsorted(packets, frame["packet"])
            complete = bool(frame["is_whole"])
            wanted.append(np.unique(np.append(segments, first)) if complete else None)
        keys.append(names)
        needed.append(wanted)
    broker_side = np.full(len(batch.endpoints), -1, np.int64)
    connections = assembly.connections
    broker_side[connections["endpoints"]] = 1 - connections["client_side"].astype(np.int64)
    return Whole(
        sources, batch, assembly, (keys[0], keys[1]), (needed[0], needed[1]),
        set(_pairs(assembly)), broker_side,
    )  # fmt: skip


def count(whole: Whole, scenario: Scenario, seed: int) -> Count:
    segments = whole.batch.segments
    kept = scenario.keep(segments, np.random.default_rng(seed))
    sides = (0, 1) if scenario.side is None else (scenario.side,)
    if scenario.side is not None:
        from_broker = segments["side"] == whole.broker_side[segments["endpoints"]]
        kept = kept & (from_broker == (scenario.side == 1))
    rest = SegmentBatch(whole.batch.endpoints, segments[kept])
    assembly = assemble(rest, whole.sources)
    check_accounts(assembly)
    numbers: Counter[str] = Counter()
    examples: list[Any] = []
    for side in (0, 1):
        here = Counter(_keys(assembly, side)[1])
        false = here - Counter(whole.keys[side] if side in sides else ())
        numbers["false"] += false.total()
        examples += list(false)[:3]
        frames = zip(whole.keys[side], whole.first[side], strict=True) if side in sides else ()
        intact = Counter(key for key, rows in frames if rows is not None and kept[rows].all())
        numbers["intact"] += intact.total()
        numbers["found"] += intact.total() - (intact - here).total()
    numbers["wrong_pairs"] = sum(pair not in whole.pairs for pair in _pairs(assembly))
    return numbers, examples


def counts(whole: Whole, scenario: Scenario, seeds: Iterable[int]) -> Count:
    """The counts of several damages of a kind together."""
    parts = [count(whole, scenario, seed) for seed in seeds]
    examples = [one for _, some in parts for one in some]
    return sum((numbers for numbers, _ in parts), Counter()), examples


def table(
    paths: list[Path], seeds: int, scenarios: Sequence[Scenario]
) -> Iterator[tuple[str, Scenario, Count]]:
    for path in paths:
        whole = read_whole(path)
        for scenario in scenarios:
            yield path.stem, scenario, counts(whole, scenario, range(seeds))


def pivot(found: dict[str, dict[str, Counter[str]]]) -> str:
    """Markdown: a row per capture, a column per damage with the share of intact frames found."""
    total: dict[str, Counter[str]] = {}
    for row in found.values():
        for damage, numbers in row.items():
            total[damage] = total.get(damage, Counter()) + numbers
    heads = [
        damage.replace(" lost", "").replace("in ", "").replace("start at any packet", "any start")
        for damage in total
    ]
    heads = ["capture", *(head.rpartition(", ")[2] for head in heads), "false", "wrong pairs"]
    lines = [f"| {' | '.join(heads)} |", f"|---{'|---:' * (len(heads) - 1)}|"]
    for name, row in {**found, "all": total}.items():
        cells = [_share(numbers, 3 if name == "all" else 2) for numbers in row.values()]
        sums = [str(sum(one[kind] for one in row.values())) for kind in ("false", "wrong_pairs")]
        lines.append(f"| {' | '.join([name, *cells, *sums])} |")
    return "\n".join(lines) + "\n"


def _share(numbers: Counter[str], digits: int) -> str:
    is_all = numbers["found"] == numbers["intact"]
    return "100" if is_all else f"{100 * numbers['found'] / numbers['intact']:.{digits}f}"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("captures", nargs="*", type=Path)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--all", action="store_true", help="every plain capture of the material")
    options.add_argument("--damage", action="append", metavar="NAME", help="only this damage")
    options.add_argument("--report", type=Path, help="write the shares as one table into this file")
    chosen = options.parse_args()
    scenarios = [each for each in SCENARIOS if not chosen.damage or each.name in chosen.damage]
    paths = chosen.captures or [CAPTURES / f"{name}.pcap" for name in NAMES]
    if chosen.all:
        paths = sorted(path for path in CAPTURES.rglob("*.pcap") if path.parent.name not in DAMAGED)
    print("| capture | damage | intact | found | share | false | wrong pairs |")
    print("|---|---|---:|---:|---:|---:|---:|")
    bad = 0
    found: dict[str, dict[str, Counter[str]]] = {}
    for name, damage, (numbers, examples) in table(paths, chosen.seeds, scenarios):
        found.setdefault(name, {})[damage.name] = numbers
        share = 100 * numbers["found"] / max(1, numbers["intact"])
        is_low = share < damage.asked and numbers["intact"] > 0
        print(
            f"| {name} | {damage.name} | {numbers['intact']} | {numbers['found']} | "
            f"{share:.2f} %{' !' if is_low else ''} | {numbers['false']} | "
            f"{numbers['wrong_pairs']} |",
            flush=True,
        )
        for example in examples[:2]:
            print("false:", example, file=sys.stderr)
        bad += numbers["false"] + numbers["wrong_pairs"] + is_low
    if chosen.report:
        chosen.report.write_text(pivot(found))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
