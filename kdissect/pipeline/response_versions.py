"""What a response is whose request was not captured, by what its bytes can be.

A response says neither its API nor its version. Every definition that decodes it to its last byte,
with error codes that Kafka has, a throttle time that can be and text that is text, is a candidate.
Requests of the same connection decide first. Where more than one API is left nothing is said. Of
versions of one API that read alike, one that another response of the connection told counts, else
the newest, and `confidence` is one by their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.mapped_files import Sources
from kdissect.codec.response_detection import Pair, every_response, fits
from kdissect.kafka.assembly import NO_API, Assembly
from kdissect.pipeline.frame_buffer import FrameBuffer

_RESPONSE = 1
_TRIED_MAX = 2048  # responses of a bucket tried with every definition; later ones with those found
_SIZE_MIN = 20  # of a response that only its bytes speak for: shorter ones fit by chance
_SIZE_MAX = 4 << 20  # larger ones are tried with what their connection is known to use only
CHUNK_BYTES = 1 << 20


def infer(assembly: Assembly, sources: Sources, asked: npt.NDArray[np.int64] | None = None) -> None:
    """Fill api_key, api_version and confidence of exchanges without a request where it is clear.

    asked: int64[n, 3], connection, api key and api version of requests, where they are not in the
    assembly.
    """
    exchanges = assembly.exchanges
    response = exchanges["response"]
    rows = np.flatnonzero(
        (exchanges["request"]["size"] < 0)
        & (response["is_whole"] != 0)
        & (exchanges["is_sasl_token"] == 0)
        & (exchanges["api_key"] == NO_API)
        & (response["size"] >= 8)
    )
    if not len(rows):
        return
    if asked is None:
        some = exchanges[(exchanges["request"]["size"] >= 0) & (exchanges["is_sasl_token"] == 0)]
        columns = [some[name].astype(np.int64) for name in ("connection", "api_key", "api_version")]
        asked = np.unique(np.stack(columns, 1), axis=0)
    known: dict[int, set[Pair]] = defaultdict(set)
    for connection, key, version in asked.tolist():
        known[connection].add((key, version))
    everything = every_response()
    used = set().union(*known.values()) & everything
    small = rows[response["size"][rows] <= _SIZE_MAX]
    first = small[:_TRIED_MAX]
    found = _candidates(assembly, sources, first, everything)
    _decide(exchanges, first, found, known)
    learnt = exchanges[first]
    learnt = learnt[learnt["api_key"] != NO_API]
    used |= set(zip(learnt["api_key"].tolist(), learnt["api_version"].tolist(), strict=True))
    rest = np.setdiff1d(rows, first)
    if len(rest) and used:
        _decide(exchanges, rest, _candidates(assembly, sources, rest, used), known)


def _decide(
    exchanges: Any, rows: npt.NDArray[Any], found: list[set[Pair]], known: dict[int, set[Pair]]
) -> None:
    """Two turns: what is clear by itself or by requests, then what the clear ones make clear."""
    told: dict[int, set[Pair]] = defaultdict(set)
    for turn in range(2):
        for row, pairs in zip(rows.tolist(), found, strict=True):
            if not pairs or exchanges["api_key"][row] != NO_API:
                continue
            connection = int(exchanges["connection"][row])
            is_one_api = len({key for key, _ in pairs}) == 1
            here = told[connection] if is_one_api else set()  # others tell versions, no API
            fitting = pairs & known.get(connection, here)
            long_enough = exchanges["response"]["size"][row] >= _SIZE_MIN
            chosen = fitting if fitting else pairs if long_enough and turn == 0 else set()
            if len({key for key, _ in chosen}) != 1:
                continue
            key, version = max(chosen)
            exchanges["api_key"][row], exchanges["api_version"][row] = key, version
            alike = chosen if connection in known else {pair for pair in pairs if pair[0] == key}
            exchanges["confidence"][row] = 1 / len(alike)
            told[connection].add((key, version))


def _candidates(
    assembly: Assembly, sources: Sources, rows: npt.NDArray[Any], pairs: AbstractSet[Pair]
) -> list[set[Pair]]:
    """The pairs of each row whose definition reads its response to the end."""
    found: list[set[Pair]] = [set() for _ in rows]
    sizes = assembly.exchanges["response"]["size"][rows]
    number = (np.cumsum(sizes) - sizes) // CHUNK_BYTES
    for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(number)) + 1):
        if not len(part):
            continue
        frames = FrameBuffer.gather(assembly, sources, rows[part], (_RESPONSE,))
        start = np.ascontiguousarray(frames.start[:, _RESPONSE])
        end = np.ascontiguousarray(frames.end[:, _RESPONSE])
        for key, version in sorted(pairs):
            for at in part[fits(key, version, frames.buf, start, end)].tolist():
                found[at].add((key, version))
    return found
