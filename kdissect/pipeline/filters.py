"""Filters that several verbs share: hosts, times, name patterns, and the connection limit.

Hosts filter segments, so a connection is taken as a whole or not at all. Times filter exchanges
after assembly: a request in the range keeps a later response, and no stream starts in the middle.
`captures` counts all packets in any case.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Bools, Ints
from kdissect.capture.segments import FRAGMENT_PART, SegmentBatch
from kdissect.kafka.assembly import Assembly

NOT_FOLLOWED = "connection_limit"  # in captures.ignored_reasons

_EPOCH = re.compile(r"(\d{1,10})(?:\.(\d{1,9}))?")


Time: TypeAlias = str | float | date | np.datetime64  # as users write it, see `time_ns`


def time_ns(value: Time) -> int:
    """Convert a time as users write it to nanoseconds since 1970.

    Text is RFC 3339 ("2026-11-21T07:30:00.5Z"; a date alone means its start; without a zone, UTC)
    or seconds since 1970 ("1763710200.25"). Objects without a zone are in UTC as well. Raises
    ValueError for anything else.
    """
    if isinstance(value, datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        whole = aware.replace(microsecond=0)
        below_us = getattr(aware, "nanosecond", 0)  # of pandas
        return int(whole.timestamp()) * 10**9 + aware.microsecond * 1000 + below_us
    # a float's shortest digits are the time that the user wrote; more of them may be a later one
    text = f"{Decimal(str(value)):.9f}" if isinstance(value, float) else str(value)
    if epoch := _EPOCH.fullmatch(text.strip()):
        return int(epoch[1]) * 10**9 + int((epoch[2] or "").ljust(9, "0"))
    for kind in (pa.timestamp("ns", "UTC"), pa.timestamp("ns")):
        with suppress(pa.ArrowInvalid):
            return int(pa.scalar(text.strip().upper()).cast(kind).value)
    raise ValueError(
        f"{text!r} is no time: give RFC 3339 (2026-11-21T07:30:00Z) or seconds since 1970"
    )


def host_bytes(host: str) -> bytes:
    """The 16 bytes of an IP address in ENDPOINTS. Raises ValueError if `host` is no address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{host!r} is no IP address") from None
    if address.version == 4:
        return b"\0" * 10 + b"\xff\xff" + address.packed
    return address.packed


def of_hosts(batch: SegmentBatch, hosts: Sequence[str]) -> SegmentBatch:
    """Only the connections from or to one of the hosts; all if there are no hosts."""
    if not hosts:
        return batch
    endpoints, segments = batch.endpoints, batch.segments
    is_wanted = np.zeros(len(endpoints), np.bool_)
    for host in hosts:
        address = np.frombuffer(host_bytes(host), np.uint8)
        for end in ("ip_a", "ip_b"):
            is_wanted |= (endpoints[end] == address).all(axis=1)
    kept = segments[is_wanted[segments["endpoints"]]]
    kept["endpoints"] = (np.cumsum(is_wanted) - 1)[kept["endpoints"]]
    return SegmentBatch(endpoints[is_wanted], kept)


def is_within(times: Ints, first: int | None, last: int | None) -> Bools:
    """bool[n]: which of the times int64[n] are in [first, last); None means no bound."""
    within = np.ones(len(times), np.bool_)
    if first is not None:
        within &= times >= first
    if last is not None:
        within &= times < last
    return within


def within(assembly: Assembly, first: int | None, last: int | None) -> tuple[Assembly, Bools]:
    """(the exchanges that begin in [first, last) with their anomalies; bool[connections]: it
    overlaps that time).

    Of anomalies without an exchange, those of a connection that does not overlap are left out.
    """
    connections, exchanges, anomalies = assembly.connections, assembly.exchanges, assembly.anomalies
    if first is None and last is None:
        return assembly, np.ones(len(connections), np.bool_)
    has_request = exchanges["request"]["size"] >= 0
    time = np.where(has_request, exchanges["request"]["time_ns"], exchanges["response"]["time_ns"])
    exchanges = exchanges[is_within(time, first, last)]
    overlaps = is_within(connections["last_time_ns"], first, None)
    overlaps &= is_within(connections["first_time_ns"], None, last)
    has_exchange = np.isin(anomalies["exchange_id"], exchanges["exchange_id"])
    at = anomalies["connection"]
    with_connection = (at < 0) | np.append(overlaps, True)[at]
    stays = np.where(anomalies["exchange_id"] != 0, has_exchange, with_connection)
    return replace(assembly, exchanges=exchanges, anomalies=anomalies[stays]), overlaps


def bools(mask: pa.ChunkedArray) -> Bools:
    """An Arrow mask as a NumPy array; null becomes False."""
    return np.asarray(pc.fill_null(mask, False), np.bool_)


def fits(name: str | None, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns: case-insensitive, with * and ? as
    wildcards.

    None never matches.
    """
    if name is None:
        return False
    folded = name.casefold()
    # fnmatch would read brackets as a character class
    return any(fnmatchcase(folded, pattern.casefold().replace("[", "[[]")) for pattern in patterns)


def like(column: pa.ChunkedArray, patterns: Sequence[str]) -> pa.BooleanArray:
    """bool[n]: texts that match one of the patterns; each distinct text is tested once."""
    encoded = column.combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], pa.string())
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    matches = [fits(name, patterns) for name in encoded.dictionary.to_pylist()]
    return pa.array(matches, pa.bool_()).take(encoded.indices).fill_null(False)


def any_like(column: pa.ChunkedArray, patterns: Sequence[str]) -> pa.BooleanArray:
    """bool[n]: lists with at least one text that matches one of the patterns."""
    lists = column.combine_chunks()
    return any_of(lists, like(pa.chunked_array([lists.flatten()]), patterns))


def any_of(lists: pa.ListArray, matches: pa.BooleanArray) -> pa.BooleanArray:
    """bool[n]: lists with at least one element that matches. matches: of all elements."""
    found = np.zeros(len(lists), np.bool_)
    found[pc.list_parent_indices(lists).to_numpy()[bools(matches)]] = True
    return pa.array(found)


def follow(batch: SegmentBatch, limit: int) -> tuple[SegmentBatch, dict[int, int]]:
    """(segments of at most `limit` pairs of endpoints: those with payload first, then the earliest;
    packets of the others by source number).

    So a flood of SYNs cannot displace connections with payload. The choice depends on the segments
    alone, not on the splits that they came from.
    """
    count = len(batch.endpoints)
    if count <= limit:
        return batch, {}
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
    counted = gone["source"][gone["marks"] & FRAGMENT_PART == 0]
    sources, packets = np.unique(counted, return_counts=True)
    left = segments[kept]
    left["endpoints"] = (np.cumsum(is_followed) - 1)[left["endpoints"]]
    given_up = dict(zip(sources.tolist(), packets.tolist(), strict=True))
    return SegmentBatch(batch.endpoints[is_followed], left), given_up
