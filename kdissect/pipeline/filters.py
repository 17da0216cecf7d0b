"""Filters that several verbs share: hosts, times, name patterns, and the connection limit.

Hosts are chosen among segments: a connection is wanted as a whole, or not at all. Times are chosen
among exchanges, after everything was assembled, so that a request within the range keeps a response
behind it and no stream starts in the middle. Packets are counted in `captures` all the same.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.capture.scan import ScanResult
from kdissect.capture.segments import FRAGMENT_PART, SegmentBatch

NOT_FOLLOWED = "connection_limit"  # in captures.ignored_reasons

_RFC3339 = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[Tt ](\d\d:\d\d)(:\d\d)?(?:\.(\d{1,9}))?)?\s*([Zz]|[+-]\d\d:?\d\d)?"
)
_EPOCH = re.compile(r"(\d{1,10})(?:\.(\d{1,9}))?")


def time_ns(value: str | float | datetime) -> int:
    """Nanoseconds since 1970 of a time as users give it.

    Text is RFC 3339 ("2026-11-21T07:30:00.5Z"; a date alone is its first moment; without a zone it
    is UTC) or seconds since 1970 ("1763710200.25"). Raises ValueError for anything else.
    """
    if isinstance(value, datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        whole = aware.replace(microsecond=0)
        return int(whole.timestamp()) * 10**9 + aware.microsecond * 1000
    text = str(value) if isinstance(value, str) else format(value, ".9f")
    if epoch := _EPOCH.fullmatch(text.strip()):
        return int(epoch[1]) * 10**9 + int((epoch[2] or "").ljust(9, "0"))
    match = _RFC3339.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is no time: give RFC 3339 (2026-11-21T07:30:00Z) or seconds since 1970"
        )
    day, minute, second, fraction, zone = match.groups()
    zone = "+00:00" if zone is None or zone in "Zz" else zone
    try:
        moment = datetime.fromisoformat(f"{day}T{minute or '00:00'}{second or ':00'}{zone}")
    except ValueError as error:
        raise ValueError(f"{text!r} is no time: {error}") from None
    return int(moment.timestamp()) * 10**9 + int((fraction or "").ljust(9, "0"))


def host_bytes(host: str) -> bytes:
    """The 16 bytes that ENDPOINTS hold of an address. Raises ValueError for what is none."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{host!r} is no IP address") from None
    if address.version == 4:
        return b"\0" * 10 + b"\xff\xff" + address.packed
    return address.packed


def of_hosts(result: ScanResult, hosts: Sequence[str]) -> ScanResult:
    """The result with the segments of connections that one of the hosts takes part in."""
    if not hosts:
        return result
    endpoints = result.batch.endpoints
    is_wanted = np.zeros(len(endpoints), np.bool_)
    for host in hosts:
        address = np.frombuffer(host_bytes(host), np.uint8)
        for end in ("ip_a", "ip_b"):
            is_wanted |= (endpoints[end] == address).all(axis=1)
    segments = result.batch.segments
    kept = segments[is_wanted[segments["endpoints"]]]
    kept["endpoints"] = (np.cumsum(is_wanted) - 1)[kept["endpoints"]]
    return replace(result, batch=SegmentBatch(endpoints[is_wanted], kept))


def is_within(times: npt.NDArray[Any], first: int | None, last: int | None) -> Any:
    """bool[n]: the times int64[n] in [first, last); None is no bound."""
    within = np.ones(len(times), np.bool_)
    if first is not None:
        within &= times >= first
    if last is not None:
        within &= times < last
    return within


def exchanges_within(exchanges: npt.NDArray[Any], first: int | None, last: int | None) -> Any:
    """bool[n]: exchanges in [first, last); one is where its first captured byte is."""
    asked = exchanges["request"]["size"] >= 0
    time = np.where(asked, exchanges["request"]["time_ns"], exchanges["response"]["time_ns"])
    return is_within(time, first, last)


def connections_within(connections: npt.NDArray[Any], first: int | None, last: int | None) -> Any:
    """bool[n]: connections that overlap [first, last)."""
    overlaps = np.ones(len(connections), np.bool_)
    if first is not None:
        overlaps &= connections["last_time_ns"] >= first
    if last is not None:
        overlaps &= connections["first_time_ns"] < last
    return overlaps


def anomalies_within(
    anomalies: npt.NDArray[Any], with_exchange: Any, overlaps: npt.NDArray[np.bool_]
) -> Any:
    """bool[n]: anomalies stay with their exchange, or else with their connection."""
    at = anomalies["connection"]
    with_connection = at < 0
    with_connection[at >= 0] = overlaps[at[at >= 0]]
    return np.where(anomalies["exchange_id"] != 0, with_exchange, with_connection)


def bools(mask: Any) -> npt.NDArray[np.bool_]:
    """A mask of Arrow as array; null is False."""
    return np.asarray(pc.fill_null(mask, False), np.bool_)


def fits(name: str | None, patterns: Iterable[str]) -> bool:
    """Whether a name is one of the patterns, in any case; * and ? fit anything. None never does."""
    if name is None:
        return False
    folded = name.casefold()
    # brackets are no pattern of ours
    return any(fnmatchcase(folded, pattern.casefold().replace("[", "[[]")) for pattern in patterns)


def like(column: pa.ChunkedArray, patterns: Sequence[str]) -> Any:
    """bool[n]: text that one of the patterns fits; each distinct text is looked at once."""
    encoded = column.combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], pa.string())
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    found = [fits(name, patterns) for name in encoded.dictionary.to_pylist()]
    return pa.array(found, pa.bool_()).take(encoded.indices).fill_null(False)


def any_like(column: pa.ChunkedArray, patterns: Sequence[str]) -> Any:
    """bool[n]: lists with a text that one of the patterns fits."""
    lists = column.combine_chunks()
    flat = lists.flatten()
    parents = pc.list_parent_indices(lists).to_numpy()
    found = np.zeros(len(lists), np.bool_)
    if len(flat):
        found[parents[bools(like(pa.chunked_array([flat]), patterns))]] = True
    return pa.array(found)


@dataclass(frozen=True, slots=True)
class SelectedConnections:
    """batch: what is left; given_up: packets of the others by source; pair_count: how many pairs of
    endpoints these were."""

    batch: SegmentBatch
    given_up: dict[int, int]
    pair_count: int


def follow(batch: SegmentBatch, limit: int) -> SelectedConnections:
    """At most `limit` pairs of endpoints: those with payload before others, the earliest first.

    So a flood of SYNs takes no place from connections that say something. The choice depends on the
    segments alone, not on the splits they came from.
    """
    count = len(batch.endpoints)
    if count <= limit:
        return SelectedConnections(batch, {}, 0)
    segments = batch.segments
    pair = segments["endpoints"]
    has_payload = np.zeros(count, np.bool_)
    has_payload[pair[segments["length"] > 0]] = True
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, pair, segments["time_ns"])
    words = np.frombuffer(batch.endpoints.tobytes(), ">u8").reshape(count, -1)
    order = np.lexsort((*words.T[::-1], first, ~has_payload))
    is_followed = np.zeros(count, np.bool_)
    is_followed[order[:limit]] = True
    kept = is_followed[pair]
    gone = segments[~kept]
    counted = gone["source"][gone["ip_id"] & FRAGMENT_PART == 0]
    sources, packets = np.unique(counted, return_counts=True)
    left = segments[kept]
    left["endpoints"] = (np.cumsum(is_followed) - 1)[left["endpoints"]]
    return SelectedConnections(
        SegmentBatch(batch.endpoints[is_followed], left),
        dict(zip(sources.tolist(), packets.tolist(), strict=True)),
        count - limit,
    )
