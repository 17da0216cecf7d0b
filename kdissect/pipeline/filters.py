"""What of the captures is wanted: hosts and times (`--host`, `--from`, `--to`).

Hosts are chosen among segments: a connection is wanted as a whole, or not at all. Times are chosen
among exchanges, after everything was assembled, so that a request within the range keeps a response
behind it and no stream starts in the middle. Packets are counted in `captures` all the same.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.scan import ScanResult
from kdissect.capture.segments import SegmentBatch

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
