"""Infer API and version of responses whose request was not captured.

A response contains neither. Candidates are all definitions that decode it to its last byte, with
error codes that Kafka has and a plausible throttle time. Candidates that the same connection
requested elsewhere are preferred. If more than one API remains, nothing is inferred. If several
versions of one API remain, the newest is taken. `confidence` is one divided by the number of these
versions and of all candidates of other APIs, plus one if not all definitions were tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set as AbstractSet

import numpy as np

from kdissect.arrays import Indices, Rows, read_only
from kdissect.capture.mapped_files import Sources
from kdissect.kafka import response_bodies
from kdissect.kafka.assembly import NO_API, Assembly
from kdissect.kafka.response_bodies import PAIR, Pair, every_response
from kdissect.protocol.model import RESPONSE
from kdissect.tables.message_chunk import FrameBuffer, chunks

# responses of a bucket tried with every definition; later ones only with those found
_TRIED_MAX = 2048
_SIZE_MIN = 20  # bytes of a response without other evidence: shorter ones match by chance
# bytes; larger ones are tried only with pairs that were requested or inferred in the bucket
_TRIED_SIZE_MAX = 4 << 20
CHUNK_BYTES = 1 << 20
_ROWS_AT_ONCE = 1 << 15  # exchanges whose requests are looked at together


def infer(assembly: Assembly, sources: Sources) -> None:
    """Set api_key, api_version and confidence of responses without a request, if they are clear."""
    exchanges = assembly.exchanges
    response = exchanges["response"]
    rows = np.flatnonzero(
        (exchanges["request"]["size"] < 0)
        & (response["is_whole"] != 0)
        & (exchanges["is_sasl_token"] == 0)
        & (response["size"] >= 8)
    )
    if not len(rows):
        return
    requested: dict[int, set[Pair]] = defaultdict(set)
    for start in range(0, len(exchanges), _ROWS_AT_ONCE):
        some = exchanges[start : start + _ROWS_AT_ONCE]
        some = some[(some["request"]["size"] >= 0) & (some["is_sasl_token"] == 0)]
        columns = [some[name].astype(np.int64) for name in ("connection", "api_key", "api_version")]
        for connection, key, version in np.unique(np.stack(columns, 1), axis=0).tolist():
            requested[connection].add((key, version))
    everything = every_response()
    used = set().union(*requested.values()) & everything
    small = rows[response["size"][rows] <= _TRIED_SIZE_MAX]
    first = small[:_TRIED_MAX]
    candidates = _candidates(assembly, sources, first, everything)
    _decide(exchanges, first, candidates, requested)
    inferred = exchanges[first]
    inferred = inferred[inferred["api_key"] != NO_API]
    used |= set(zip(inferred["api_key"].tolist(), inferred["api_version"].tolist(), strict=True))
    rest = np.setdiff1d(rows, first)
    if len(rest) and used:
        candidates = _candidates(assembly, sources, rest, used)
        _decide(exchanges, rest, candidates, requested, untried_count=1)


def _decide(
    exchanges: Rows,
    rows: Indices,
    candidates: list[set[Pair]],
    requested: dict[int, set[Pair]],
    untried_count: int = 0,
) -> None:
    """Set API, version and confidence of each response whose API is clear.

    untried_count: of pairs that were not tried and may fit as well.
    """
    for row, pairs in zip(rows.tolist(), candidates, strict=True):
        connection, size = exchanges["connection"][row], exchanges["response"]["size"][row]
        chosen = _of_one_api(pairs, requested.get(int(connection), set()), int(size))
        if chosen:
            key, version = max(chosen)
            exchanges["api_key"][row], exchanges["api_version"][row] = key, version
            others = sum(other != key for other, _ in pairs) + untried_count
            exchanges["confidence"][row] = 1 / (len(chosen) + others)


def _of_one_api(pairs: set[Pair], requested: set[Pair], size: int) -> set[Pair]:
    """The pairs of the only API that a response can have; empty if there are more, or none.

    The pairs that its connection requested decide. Without any, a short response decides nothing.
    """
    chosen = pairs & requested or (pairs if size >= _SIZE_MIN else set())
    return chosen if len({key for key, _ in chosen}) == 1 else set()


def _candidates(
    assembly: Assembly, sources: Sources, rows: Indices, pairs: AbstractSet[Pair]
) -> list[set[Pair]]:
    """The (api key, version) pairs of each row whose definition decodes its response to the end."""
    found: list[set[Pair]] = [set() for _ in rows]
    sizes = assembly.exchanges["response"]["size"][rows]
    ordered = sorted(pairs)
    decoder = response_bodies.new_decoder({key for key, _ in pairs})
    for part in chunks(np.arange(len(rows)), sizes, CHUNK_BYTES):
        frames = FrameBuffer.gather(assembly, sources, rows[part], (RESPONSE,))
        start = np.ascontiguousarray(frames.start[:, RESPONSE])
        end = np.ascontiguousarray(frames.end[:, RESPONSE])
        fitting = np.zeros(len(part) * len(ordered), np.bool_)
        response_bodies.try_all(
            np.array(ordered, PAIR), read_only(frames.buf), start, end, decoder, fitting
        )
        for frame, pair in np.argwhere(fitting.reshape(len(part), -1)).tolist():
            found[part[frame]].add(ordered[pair])
    return found
