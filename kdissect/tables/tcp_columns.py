"""Columns of `connections` about TCP: handshake, receive windows, round-trip times, closing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.protocol.model import SIDES
from kdissect.tables.arrow_arrays import ints, ip_text, labels, times_from_ns
from kdissect.tcp.facts import NO_TIME, UNKNOWN, TcpFacts

SCALE_MAX = 14
_CLOSERS = ("client", "broker")


def tcp_columns(connections: npt.NDArray[np.void], tcp: TcpFacts) -> dict[str, pa.Array]:
    """The TCP columns of CONNECTION rows, by name."""
    client_side = connections["client_side"].astype(np.int64)
    last_time = connections["last_time_ns"]
    rows = 2 * np.arange(len(connections))
    sides = [tcp.sides[rows + (client_side ^ direction)] for direction in (0, 1)]
    facts = tcp.connections
    closer = facts["closed_by"] ^ client_side
    idle_ns, idle_since = _longest_idle(facts, last_time)
    columns = {
        "proxied_from": _proxied_from(facts),
        "proxy_byte_count": ints(facts["proxy_byte_count"], pa.int64()),
        "closed_by": labels(np.maximum(closer, 0), _CLOSERS, facts["closed_by"] >= 0),
        "syn_count": ints(sides[0]["syn_count"], pa.int64()),
        "unanswered_syn_count": ints(sides[0]["unanswered_syn_count"], pa.int64()),
        "refused": pa.array(facts["is_refused"] != 0),
        "idle_ms_max": pa.array(idle_ns / 1e6),
        "idle_start_time": times_from_ns(idle_since, idle_since != NO_TIME),
    }
    for direction, name in enumerate(SIDES):
        own, peer = sides[direction], sides[1 - direction]
        for column, values in _side_columns(own, peer, last_time).items():
            columns[f"{name}_{column}"] = values
    return columns


def _proxied_from(facts: Any) -> pa.Array:
    texts: list[str | None] = [None] * len(facts)
    for row in np.flatnonzero(facts["is_proxied"]).tolist():
        texts[row] = f"{ip_text(facts['proxied_ip'][row].tobytes())} {facts['proxied_port'][row]}"
    return pa.array(texts, pa.string())


def _longest_idle(facts: Any, last_time: Any) -> tuple[Any, Any]:
    """(ns, begin) of the longest idle time, which the connection's last packet may end."""
    active_time = facts["active_time"]
    at_end = np.where(active_time == NO_TIME, 0, last_time - active_time)
    is_longer = at_end > facts["idle_ns"]
    return (
        np.where(is_longer, at_end, facts["idle_ns"]),
        np.where(is_longer, active_time, facts["idle_since"]),
    )


def _side_columns(own: Any, peer: Any, last_time: Any) -> dict[str, pa.Array]:
    has_options = own["has_options"] != 0
    has_zero_window = own["zero_window_since"] != NO_TIME
    open_ns = np.where(has_zero_window, last_time - own["zero_window_since"], 0)
    window, is_known = _largest_window(own, peer)
    return {
        "syn_seen": pa.array(has_options),
        "mss": ints(own["mss"], pa.int32(), own["mss"] != UNKNOWN),
        "window_scale": ints(own["window_scale"], pa.int32(), own["window_scale"] != UNKNOWN),
        "sack_permitted": pa.array(own["sack_permitted"] != 0, mask=~has_options),
        "window_max": ints(window, pa.int64(), is_known),
        "zero_window_count": ints(own["zero_window_count"], pa.int64()),
        "zero_window_ms": pa.array((own["zero_window_ns"] + np.maximum(open_ns, 0)) / 1e6),
        "rtt_ms_p50": pa.array(own["rtt_p50_ns"] / 1e6, mask=own["rtt_p50_ns"] == UNKNOWN),
        "rtt_ms_p99": pa.array(own["rtt_p99_ns"] / 1e6, mask=own["rtt_p99_ns"] == UNKNOWN),
        "last_time": times_from_ns(own["data_time"], own["data_time"] != NO_TIME),
        "ended": pa.array(own["has_ended"] != 0),
    }


def _largest_window(own: Any, peer: Any) -> tuple[Any, Any]:
    """(bytes of the largest receive window, whether it is known).

    RFC 7323, 2.2 and 2.3: windows are scaled only if both SYNs have the option, by a shift of at
    most 14. A SYN's own window is never scaled.
    """
    is_unscaled = np.zeros(len(own), np.bool_)
    for side in (own, peer):
        is_unscaled |= (side["has_options"] != 0) & (side["window_scale"] == UNKNOWN)
    is_scaled = (own["window_scale"] != UNKNOWN) & (peer["window_scale"] != UNKNOWN)
    shift = np.where(is_scaled, np.minimum(own["window_scale"], SCALE_MAX), 0).astype(np.int64)
    window = np.maximum(own["window_max"], 0) << shift
    largest = np.maximum(window, own["syn_window_max"])
    has_later = own["window_max"] != UNKNOWN
    is_known = is_unscaled | is_scaled | ~has_later
    return largest, is_known & (has_later | (own["syn_window_max"] != UNKNOWN))
