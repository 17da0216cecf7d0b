"""A bucket that goes on: its exchanges learnt from and packed while it is found out what is kept.

What is kept (`kept.Bucket.keep`) and what the exchanges tell do not depend on each other, and most
exchanges are final whatever is kept, so they can be packed at once. Of a giant connection, for
which other cores wait, a thread does all this beside the one that keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from kdissect.arrays import copied, take
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.facts import Learnt, learn
from kdissect.pipeline.kept import Bucket, Lane
from kdissect.pipeline.options import Options
from kdissect.pipeline.response_versions import infer
from kdissect.pipeline.segment_buffer import PART_ROWS, in_turn

Packed = list[tuple[int, bytes]]  # (slot, bytes) in order
Pack = Callable[[Assembly, bool], Packed]  # of some exchanges; whether they are final


def learnt_and_packed(
    opened: Bucket, options: Options, end_ns: int, pack: Pack, threads: int
) -> tuple[Learnt, dict[int, Packed]]:
    """What the exchanges tell, and the parts of PART_ROWS exchanges that are packed by now, by
    their first row. Finds out what goes on of the bucket, then infers what it can of the rows."""
    sources = opened.sources.beside()
    exchanges = opened.assembly.exchanges
    if threads == 1:
        opened.sort_out(options, end_ns)
        opened.keep()
        infer(opened.assembly, sources)
        return learn(opened.assembly, sources, options.chunk_bytes), {}
    if (exchanges["request"]["size"] < 0).any():
        # what is kept is compared as it is before anything is inferred
        exchanges = copied(exchanges)
    own = replace(opened.assembly, exchanges=exchanges)

    def learnt() -> Learnt:
        infer(own, sources)
        return learn(own, sources, options.chunk_bytes)

    def packed(first: int) -> Packed:
        return pack(replace(own, exchanges=exchanges[first : first + PART_ROWS]), True)

    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(learnt)
        opened.sort_out(options, end_ns)
        is_final = opened.surely_final()
        early = {
            first: pool.submit(packed, first)
            for first in range(0, len(exchanges), PART_ROWS)
            if is_final[first : first + PART_ROWS].all()
        }
        opened.keep()
        opened.assembly = own
        return told.result(), {first: part.result() for first, part in early.items()}


def lane_parts(
    lane: Lane, early: dict[int, Packed], pack: Pack, threads: int
) -> Iterator[tuple[int, bytes]]:
    """The exchanges of a lane, packed. early: of `learnt_and_packed`."""
    exchanges = lane.assembly.exchanges

    def packed(first: int) -> Packed:
        if lane.is_final and first in early:
            return early.pop(first)
        low, high = np.searchsorted(lane.exchanges, (first, first + PART_ROWS))
        some = take(exchanges, lane.exchanges[low:high])
        return pack(replace(lane.assembly, exchanges=some), lane.is_final) if len(some) else []

    for part in in_turn(packed, range(0, len(exchanges), PART_ROWS), threads):
        yield from part
