"""Infer API and version of responses whose request was not captured.

A response contains neither. Candidates are all definitions that decode it to its last byte, with
error codes that Kafka has and a plausible throttle time. Candidates that the same connection
requested elsewhere are preferred. If more than one API remains, nothing is inferred. If several
versions of one API remain, the newest is taken, on a connection without requests the one of another
response; `confidence` is one divided by their number.
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
_SIZE_MAX = 4 << 20  # bytes; larger ones are tried only with APIs that their connection uses
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
        & (exchanges["api_key"] == NO_API)
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
    small = rows[response["size"][rows] <= _SIZE_MAX]
    first = small[:_TRIED_MAX]
    candidates = _candidates(assembly, sources, first, everything)
    _decide(exchanges, first, candidates, requested)
    inferred = exchanges[first]
    inferred = inferred[inferred["api_key"] != NO_API]
    used |= set(zip(inferred["api_key"].tolist(), inferred["api_version"].tolist(), strict=True))
    rest = np.setdiff1d(rows, first)
    if len(rest) and used:
        _decide(exchanges, rest, _candidates(assembly, sources, rest, used), requested)


def _decide(
    exchanges: Rows, rows: Indices, candidates: list[set[Pair]], requested: dict[int, set[Pair]]
) -> None:
    """Set API and version of each response whose possible pairs all belong to one API.

    The pairs of the connection's captured requests choose. Without any, a version that another
    response of the connection was given chooses among versions of one API; the second turn is for
    responses before that one.
    """
    inferred: dict[int, set[Pair]] = defaultdict(set)
    for turn in range(2):
        for row, pairs in zip(rows.tolist(), candidates, strict=True):
            if not pairs or exchanges["api_key"][row] != NO_API:
                continue
            connection = int(exchanges["connection"][row])
            is_one_api = len({key for key, _ in pairs}) == 1
            # another response helps choose a version, not an API
            here = inferred[connection] if is_one_api else set()
            fitting = pairs & requested.get(connection, here)
            long_enough = exchanges["response"]["size"][row] >= _SIZE_MIN
            chosen = fitting if fitting else pairs if long_enough and turn == 0 else set()
            if len({key for key, _ in chosen}) != 1:
                continue
            key, version = max(chosen)
            exchanges["api_key"][row], exchanges["api_version"][row] = key, version
            alike = (
                chosen if connection in requested else {pair for pair in pairs if pair[0] == key}
            )
            exchanges["confidence"][row] = 1 / len(alike)
            inferred[connection].add((key, version))


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
