"""A section of the page: what kdissect says of each source, beside the truth of its logs."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from kdissect import Tables
from lab.truth import logged
from lab.truth.captures import log_of, read_capture
from tests.builders.captures import lose_packets

RIGHT, WRONG, UNDECIDED = "right", "wrong", "undecided"
LOST = 0.02  # the share of the packets that is removed
Judged = tuple[Counter[str], list[str]]
"""Counts by column, and a line for each answer that is wrong."""
Damages = Sequence[tuple[str, Sequence[Callable[[Path, Path], object]]]]
"""The prefix of columns, and functions that write a damaged capture; their counts are added."""


WHOLE: Damages = (("", (shutil.copyfile,)),)
WITH_LOSS: Damages = (*WHOLE, ("with loss: ", (partial(lose_packets, share=LOST),)))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown of a table; all columns but the first have numbers."""
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, cells))} |" for cells in rows)])


def captures_with_logs(captures: Path) -> Iterable[tuple[str, Path]]:
    """(name, capture) of those with a request log."""
    for path in sorted(captures.glob("*/*.pcap")):
        if log_of(path).is_file():
            yield f"{path.parent.name}/{path.stem}", path


def recordings(_: Path) -> Iterable[tuple[str, Path]]:
    """(name, capture) of the recordings of groups, with ``server.log`` beside each."""
    return ((path.name, path / "capture.pcap") for path in logged.made())


@dataclass(frozen=True)
class Section:
    """compare(name, tables, capture) judges a source. columns: of its counts, beside `wrong`."""

    title: str
    text: str
    compare: Callable[[str, Tables, Path], Judged]
    sources: Callable[[Path], Iterable[tuple[str, Path]]] = captures_with_logs
    columns: tuple[str, ...] = (RIGHT, UNDECIDED)
    damages: Damages = WITH_LOSS

    def page(self, captures: Path) -> str:
        columns = [*self.columns, WRONG]
        totals = {prefix: Counter[str]() for prefix, _ in self.damages}
        lines, faults = [], []
        for name, path in self.sources(captures):
            cells: list[object] = [name]
            for prefix, damages in self.damages:
                counts = Counter[str]()
                for damage in damages:
                    with TemporaryDirectory() as folder:
                        capture = Path(folder, path.name)
                        damage(path, capture)
                        found, wrong = self.compare(name, read_capture(capture, path), path)
                    counts += found
                    counts[WRONG] += len(wrong)
                    faults += [f"{name}: {line}" for line in wrong]
                totals[prefix] += counts
                cells += [counts[column] for column in columns]
            lines.append(cells)
        lines.append(["all", *(one[column] for one in totals.values() for column in columns)])
        is_lossy = self.damages is WITH_LOSS
        loss = f" The same with {LOST:.0%} of the packets removed." if is_lossy else ""
        heads = ["", *(f"{prefix}{column}" for prefix, _ in self.damages for column in columns)]
        return "\n".join(
            [
                f"## {self.title}\n\n{self.text}{loss}\n",
                *([f"Wrong: {'; '.join(faults)}.\n"] if faults else []),
                table(heads, lines),
            ]
        )
