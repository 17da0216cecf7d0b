"""A replay against a fresh real broker or cluster, by the command line, and what it said."""

import multiprocessing
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.replay.captures import Recorded
from tests.broker.kafka_broker import Broker, start_cluster
from tests.broker.replaying import EVERYTHING, Replayed, replay

TIMEOUT_S = 1800.0
VERDICTS = ("same", "tolerated", "different", "error", "skipped")
_NO_FINDING = re.compile(r"(API|skipped|note:|Verdicts:|Differences |Changes |\d+ requests )")


def findings(done: Replayed) -> list[str]:
    """What the terminal lists as different, best first: a line each, with its indented lines."""
    found: list[str] = []
    is_after_table = False
    for line in done.output.splitlines():
        # the table of APIs ends at the first line that is not of one
        is_after_table |= bool(found) or ":" in line or not re.match(r"\S+\s+.*\s\S+$", line)
        if not is_after_table or not line.strip() or _NO_FINDING.match(line):
            continue
        if line.startswith("    ") and found:
            found[-1] += " | " + line.strip()
        else:
            found.append(line.strip())
    return found


def found_at_the_end(done: Replayed) -> int:
    """Findings about the state after the run: records or commits that are missing, and so on."""
    return len(done.summary.get("findings", ()))


def run(
    path: Path,
    address: str,
    *options: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Replayed:
    """Replay a capture with everything allowed, and read what the command wrote."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "replay.jsonl")
        env = {"COLUMNS": "100000", **(env or {})}
        return replay(path, address, lines, *EVERYTHING, *options, timeout=timeout_s, env=env)


@contextmanager
def target(kafka_version: str, node_count: int = 1, **options: Any) -> Iterator[list[Broker]]:
    """The nodes of a fresh cluster, which ends with the block. options: as for `start_cluster`."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = start_cluster(Path(folder), node_count, kafka_version=kafka_version, **options)
        try:
            yield nodes
        finally:
            for node in nodes:
                node.stop()


def run_recorded(
    recorded: Recorded, kafka_version: str, *options: str, node_count: int = 1
) -> Replayed:
    """A capture of `lab.replay.captures` on a fresh target with the settings of its broker."""
    with target(kafka_version, node_count, **recorded.broker()) as (first, *_):
        return run(
            recorded.path,
            first.address_of(recorded.listener),
            *recorded.options(),
            *options,
            env=recorded.login(),
        )


def _burn() -> None:
    while True:
        pass


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep some processes at work beside the block."""
    loops = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(count)]
    for each in loops:
        each.start()
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.join()


def show(
    begin: Sequence[object], done: Replayed, widths: Sequence[int], lines: int, *end: object
) -> None:
    """Print a row of a gate's table, and the first findings below it."""
    counts = [done.verdicts[verdict] for verdict in VERDICTS]
    row = (*begin, done.status, *counts, found_at_the_end(done), f"{done.seconds:.1f}", *end)
    print(cells(row, widths), flush=True)
    errors = done.errors.splitlines()[-2:] if lines else []
    for line in [*findings(done)[:lines], *errors]:
        print(f"    {line[:300]}", flush=True)


def cells(values: Sequence[object], widths: Sequence[int]) -> str:
    """A line of a table, in columns."""
    pairs = zip(values, widths, strict=True)
    return " ".join(
        f"{value!s:{'<' if n == 0 else '>'}{width}}" for n, (value, width) in enumerate(pairs)
    )
