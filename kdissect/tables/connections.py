"""Rows of `connections`: TLS, and TCP's handshake, windows, round-trip times, closing.

`exchanges` shares the columns of endpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kdissect.arrays import Bools, Ints, Rows, TimesNs
from kdissect.kafka.assembly import DIRECTION, Protocol
from kdissect.protocol.model import SIDES
from kdissect.tables.arrow_arrays import TIME_TYPE, ip_text, labels, names_of
from kdissect.tables.schemas import CONNECTIONS, Column, table_of
from kdissect.tcp.columns import CloseReason
from kdissect.tcp.measurements import NO_TIME, UNKNOWN, TcpFacts
from kdissect.tls.handshake import Certificate, TlsFacts

_NO_CERTIFICATE = Certificate()
SCALE_MAX = 14
_CLOSERS = ("client", "broker")


@dataclass(slots=True)
class ConnectionClients:
    """Clients of connections, from decoded messages; keys are rows of the connections array."""

    client_ids: dict[int, list[str]] = field(default_factory=dict)
    software: dict[int, tuple[str, str]] = field(default_factory=dict)
    mechanism: dict[int, str] = field(default_factory=dict)
    principal: dict[int, str] = field(default_factory=dict)


class EndpointColumns(NamedTuple):
    """Client and broker addresses of connections, one row each."""

    client_ip: pa.Array
    client_port: Ints
    broker_ip: pa.Array
    broker_port: Ints


def endpoint_columns(endpoints: Rows, connections: Rows) -> EndpointColumns:
    """Addresses per connection; `ip` columns are dictionaries of canonical text."""
    pair = endpoints[connections["endpoints"]]
    b_is_client = connections["client_side"] == 1
    addresses = np.concatenate([pair["ip_a"], pair["ip_b"]]) if len(pair) else np.zeros((0, 16))
    raw = np.ascontiguousarray(addresses, np.uint8).view("V16").ravel()
    distinct, codes = np.unique(raw, return_inverse=True)
    texts = [ip_text(value.tobytes()) for value in distinct]
    a, b = codes[: len(pair)], codes[len(pair) :]
    return EndpointColumns(
        labels(np.where(b_is_client, b, a), texts),
        np.where(b_is_client, pair["port_b"], pair["port_a"]),
        labels(np.where(b_is_client, a, b), texts),
        np.where(b_is_client, pair["port_a"], pair["port_b"]),
    )


def _tls_columns(tls: dict[int, TlsFacts], count: int) -> dict[str, Column]:
    nothing = TlsFacts()
    rows = [tls.get(row, nothing) for row in range(count)]
    columns: dict[str, Column] = {
        "tls_version": [row.version for row in rows],
        "tls_sni": [row.sni for row in rows],
        "tls_cipher": [row.cipher for row in rows],
        "request_tls_alert": [row.request_alert for row in rows],
        "response_tls_alert": [row.response_alert for row in rows],
    }
    brokers = [row.broker_certificate or _NO_CERTIFICATE for row in rows]
    clients = [row.client_certificate or _NO_CERTIFICATE for row in rows]
    columns["tls_certificate_names"] = [list(one.names) for one in brokers]
    for prefix, certificates in (("tls_certificate", brokers), ("tls_client", clients)):
        columns[f"{prefix}_subject"] = [one.subject for one in certificates]
        columns[f"{prefix}_issuer"] = [one.issuer for one in certificates]
        columns[f"{prefix}_not_before"] = _seconds([one.not_before for one in certificates])
        columns[f"{prefix}_not_after"] = _seconds([one.not_after for one in certificates])
    return columns


def _seconds(times: list[int | None]) -> pa.Array:
    return pa.array(times, pa.timestamp("s", tz="UTC")).cast(TIME_TYPE)


def connections_table(
    endpoints: Rows,
    connections: Rows,
    clients: ConnectionClients,
    tls: dict[int, TlsFacts],
    tcp: TcpFacts,
) -> pa.Table:
    """`connections` for CONNECTION rows; clients, tls and tcp are keyed by row."""
    rows = range(len(connections))
    where = endpoint_columns(endpoints, connections)
    rtt_ns = connections["handshake_rtt_ns"]
    software = [clients.software.get(row, (None, None)) for row in rows]
    columns: dict[str, Column] = {
        "connection_id": connections["connection_id"],
        "client_ip": where.client_ip,
        "client_port": where.client_port,
        "broker_ip": where.broker_ip,
        "broker_port": where.broker_port,
        "first_time": connections["first_time_ns"],
        "last_time": connections["last_time_ns"],
        "handshake_seen": connections["handshake_seen"] != 0,
        "handshake_rtt_ms": (rtt_ns / 1e6, rtt_ns >= 0),
        "close_reason": labels(connections["close_reason"], names_of(CloseReason)),
        "is_kafka": connections["protocol"] == Protocol.KAFKA,
        "is_tls": connections["is_tls"] != 0,
        "protocol": labels(connections["protocol"], names_of(Protocol)),
        "sasl_mechanism": [clients.mechanism.get(row) for row in rows],
        "principal": [clients.principal.get(row) for row in rows],
        "client_software_name": [name for name, _ in software],
        "client_software_version": [release for _, release in software],
        "client_ids": [clients.client_ids.get(row, []) for row in rows],
        **_tls_columns(tls, len(connections)),
        **_tcp_columns(connections, tcp),
    }
    for direction, side in enumerate(SIDES):
        for name in DIRECTION.fields or ():
            columns[f"{side}_{name}"] = connections["direction"][name][:, direction]
    return table_of(CONNECTIONS, columns)


# -- TCP ------------------------------------------------------------------------------------


def _tcp_columns(connections: Rows, tcp: TcpFacts) -> dict[str, Column]:
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
    columns = {"connection_id": connections["connection_id"], **_tcp_columns(connections, tcp)}
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


def _side_columns(own: Rows, peer: Rows, last_time: TimesNs) -> dict[str, Column]:
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
