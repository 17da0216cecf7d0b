"""`show` as one loop: read, list, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kdissect.pipeline.plan import capture_id
from kdissect.pipeline.options import Options
from kdissect.show import json_lines
from kdissect.show.filters import Filters
from kdissect.show.lines import LineMaker
from kdissect.show.listing import Listed, Lister
from kdissect.show.reading import Reading

Write = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Style:
    """How exchanges are shown: as_json; tree: the decoded messages; raw: with their bytes; records:
    those of produced and fetched batches; colour: for a terminal."""

    as_json: bool = False
    tree: bool = False
    raw: bool = False
    records: bool = False
    colour: bool = False

    @property
    def detail(self) -> str:
        return "records" if self.records else "frames" if self.tree or self.raw else ""


def show(
    paths: Sequence[str],
    options: Options,
    filters: Filters,
    style: Style,
    write: Write,
    note: Callable[[str], None],
) -> Reading:
    """Write the exchanges of the captures that pass, as they are completed."""
    reading = Reading(paths, options, note)
    ids = [capture_id(path) for path in reading.paths]
    lister = Lister(options, ids, filters, style.detail)
    shower = _Shower(style, options, write)
    for finished in reading:
        for listed in lister.listed(finished):
            shower.show(listed)
    return reading


class _Shower:
    def __init__(self, style: Style, options: Options, write: Write) -> None:
        self._style, self._options, self._write = style, options, write
        self._lines = LineMaker(style.colour)

    def show(self, listed: Listed) -> None:
        style = self._style
        if not style.detail:
            make = json_lines.block if style.as_json else self._lines.block
            self._write(make(listed.table))
            return
        raise NotImplementedError
