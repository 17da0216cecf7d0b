"""Columns of `connections` about TCP: handshake, receive windows, round-trip times, closing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from kdissect.arrays import Bools, Ints, Rows, TimesNs
from kdissect.protocol.model import SIDES
from kdissect.tables.arrow_arrays import ip_text, labels
from kdissect.tables.schemas import CONNECTIONS, table_of
from kdissect.tcp.measurements import NO_TIME, UNKNOWN, TcpFacts

SCALE_MAX = 14
_CLOSERS = ("client", "broker")


def tcp_columns(connections: Rows, tcp: TcpFacts) -> dict[str, Any]:
    """The TCP columns of CONNECTION rows by name, for `schemas.table_of`."""
    client_side = connections["client_side"].astype(np.int64)
    last_time = connections["last_time_ns"]
    rows = 2 * np.arange(len(connections))
    sides = [tcp.sides[rows + (client_side ^ direction)] for direction in (0, 1)]
    facts = tcp.connections
    closer = facts["closed_by"] ^ client_side
    idle_ns, idle_since = _longest_idle(facts, last_time)
    columns = {
        "proxied_from": _proxied_from(facts),
        "proxy_byte_count": facts["proxy_byte_count"],
        "closed_by": labels(np.maximum(closer, 0), _CLOSERS, facts["closed_by"] >= 0),
        "syn_count": sides[0]["syn_count"],
        "unanswered_syn_count": sides[0]["unanswered_syn_count"],
        "refused": facts["is_refused"] != 0,
        "idle_ms_max": idle_ns / 1e6,
        "idle_start_time": (idle_since, idle_since != NO_TIME),
    }
    for name, own, peer in zip(SIDES, sides, reversed(sides), strict=True):
        for column, values in _side_columns(own, peer, last_time).items():
            columns[f"{name}_{column}"] = values
    return columns


def tcp_table(connections: Rows, tcp: TcpFacts) -> pa.Table:
    """`connections` for CONNECTION rows, with connection_id and the TCP columns only."""
    columns = {"connection_id": connections["connection_id"], **tcp_columns(connections, tcp)}
    schema = pa.schema([field for field in CONNECTIONS if field.name in columns])
    return table_of(schema, columns)


def _proxied_from(facts: Rows) -> list[str | None]:
    texts: list[str | None] = [None] * len(facts)
    for row in np.flatnonzero(facts["is_proxied"]).tolist():
        texts[row] = f"{ip_text(facts['proxied_ip'][row].tobytes())} {facts['proxied_port'][row]}"
    return texts


def _longest_idle(facts: Rows, last_time: TimesNs) -> tuple[TimesNs, TimesNs]:
    """(ns, begin) of the longest idle time, which the connection's last packet may end."""
    active_time = facts["active_time"]
    at_end = np.where(active_time == NO_TIME, 0, last_time - active_time)
    is_longer = at_end > facts["idle_ns"]
    return (
        np.where(is_longer, at_end, facts["idle_ns"]),
        np.where(is_longer, active_time, facts["idle_since"]),
    )


def _side_columns(own: Rows, peer: Rows, last_time: TimesNs) -> dict[str, Any]:
    has_options = own["has_options"] != 0
    has_zero_window = own["zero_window_since"] != NO_TIME
    open_ns = np.where(has_zero_window, last_time - own["zero_window_since"], 0)
    return {
        "syn_seen": has_options,
        "mss": (own["mss"], own["mss"] != UNKNOWN),
        "window_scale": (own["window_scale"], own["window_scale"] != UNKNOWN),
        "sack_permitted": (own["sack_permitted"] != 0, has_options),
        "window_max": _largest_window(own, peer),
        "zero_window_count": own["zero_window_count"],
        "zero_window_ms": (own["zero_window_ns"] + np.maximum(open_ns, 0)) / 1e6,
        "rtt_ms_p50": (own["rtt_p50_ns"] / 1e6, own["rtt_p50_ns"] != UNKNOWN),
        "rtt_ms_p99": (own["rtt_p99_ns"] / 1e6, own["rtt_p99_ns"] != UNKNOWN),
        "last_time": (own["data_time"], own["data_time"] != NO_TIME),
        "ended": own["has_ended"] != 0,
    }


def _largest_window(own: Rows, peer: Rows) -> tuple[Ints, Bools]:
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
