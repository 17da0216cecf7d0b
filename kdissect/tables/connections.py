"""Rows of `connections`, and the endpoint columns that `exchanges` shares with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Ints, Rows
from kdissect.kafka.assembly import DIRECTION, Protocol
from kdissect.protocol.model import SIDES
from kdissect.tables.arrow_arrays import TIME_TYPE, ip_text, labels, names_of
from kdissect.tables.schemas import CONNECTIONS, table_of
from kdissect.tables.tcp_columns import tcp_columns
from kdissect.tcp.columns import CloseReason
from kdissect.tcp.measurements import TcpFacts
from kdissect.tls.handshake import Certificate, TlsFacts

_NO_CERTIFICATE = Certificate()


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


def broker_texts(endpoints: Rows, connections: Rows) -> pa.Array:
    """string[connections]: the broker's address and port, separated by a space."""
    where = endpoint_columns(endpoints, connections)
    port = pa.array(where.broker_port).cast(pa.string())
    return pc.binary_join_element_wise(where.broker_ip.cast(pa.string()), port, " ")


def _tls_columns(tls: dict[int, TlsFacts], count: int) -> dict[str, Any]:
    nothing = TlsFacts()
    rows = [tls.get(row, nothing) for row in range(count)]
    columns: dict[str, Any] = {
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
    columns = {
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
        **tcp_columns(connections, tcp),
    }
    for direction, side in enumerate(SIDES):
        for name in DIRECTION.fields or ():
            columns[f"{side}_{name}"] = connections["direction"][name][:, direction]
    return table_of(CONNECTIONS, columns)
