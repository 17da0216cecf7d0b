"""Rows of `connections`, and the endpoint columns that `exchanges` shares with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.kafka.assembly import Certificate, CloseReason, Protocol, TlsFacts
from kdissect.protocol.model import SIDES
from kdissect.tables.arrow_arrays import ints, ip_text, labels, names_of, table_of, times_from_ns
from kdissect.tables.schemas import CONNECTIONS, COUNTERS, TIME
from kdissect.tables.tcp_columns import tcp_columns
from kdissect.tcp.facts import TcpFacts

_NO_CERTIFICATE = Certificate()


@dataclass(slots=True)
class ConnectionFacts:
    """Facts about connections from decoded messages; keys are rows of the connections array."""

    client_ids: dict[int, list[str]] = field(default_factory=dict)
    software: dict[int, tuple[str, str]] = field(default_factory=dict)
    mechanism: dict[int, str] = field(default_factory=dict)
    principal: dict[int, str] = field(default_factory=dict)

    def add(self, later: ConnectionFacts) -> None:
        """Add facts of later messages; earlier values stay."""
        for row, names in later.client_ids.items():
            client_ids = self.client_ids.setdefault(row, [])
            client_ids += [name for name in names if name not in client_ids]
        self.software = later.software | self.software
        self.mechanism = later.mechanism | self.mechanism
        self.principal = later.principal | self.principal


@dataclass(frozen=True, slots=True)
class EndpointColumns:
    """Client and broker addresses of connections, one row each."""

    client_ip: pa.Array
    client_port: npt.NDArray[np.uint16]
    broker_ip: pa.Array
    broker_port: npt.NDArray[np.uint16]


def endpoint_columns(
    endpoints: npt.NDArray[np.void], connections: npt.NDArray[np.void]
) -> EndpointColumns:
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


def broker_texts(endpoints: npt.NDArray[np.void], connections: npt.NDArray[np.void]) -> pa.Array:
    """string[connections]: the broker's address and port, separated by a space."""
    where = endpoint_columns(endpoints, connections)
    port = pa.array(where.broker_port).cast(pa.string())
    return pc.binary_join_element_wise(where.broker_ip.cast(pa.string()), port, " ")


def _texts(facts: dict[int, str], count: int) -> pa.Array:
    return pa.array([facts.get(row) for row in range(count)], pa.string())


def _tls_columns(tls: dict[int, TlsFacts], count: int) -> dict[str, pa.Array]:
    nothing = TlsFacts()
    rows = [tls.get(row, nothing) for row in range(count)] if tls else [nothing] * count
    brokers = [row.broker_certificate or _NO_CERTIFICATE for row in rows]
    clients = [row.client_certificate or _NO_CERTIFICATE for row in rows]
    return {
        "tls_version": pa.array([row.version for row in rows], pa.string()),
        "tls_sni": pa.array([row.sni for row in rows], pa.string()),
        "tls_cipher": pa.array([row.cipher for row in rows], pa.string()),
        "tls_certificate_names": pa.array(
            [list(certificate.names) for certificate in brokers], pa.list_(pa.string())
        ),
        **_certificate_columns("tls_certificate", brokers),
        **_certificate_columns("tls_client", clients),
        "request_tls_alert": pa.array([row.request_alert for row in rows], pa.string()),
        "response_tls_alert": pa.array([row.response_alert for row in rows], pa.string()),
    }


def _certificate_columns(prefix: str, certificates: list[Certificate]) -> dict[str, pa.Array]:
    seconds = pa.timestamp("s", tz="UTC")
    not_before = pa.array([certificate.not_before for certificate in certificates], seconds)
    not_after = pa.array([certificate.not_after for certificate in certificates], seconds)
    return {
        f"{prefix}_subject": pa.array([one.subject for one in certificates], pa.string()),
        f"{prefix}_issuer": pa.array([one.issuer for one in certificates], pa.string()),
        f"{prefix}_not_before": not_before.cast(TIME),
        f"{prefix}_not_after": not_after.cast(TIME),
    }


def connections_table(
    endpoints: npt.NDArray[np.void],
    connections: npt.NDArray[np.void],
    facts: ConnectionFacts,
    tls: dict[int, TlsFacts],
    tcp: TcpFacts,
) -> pa.Table:
    """`connections` for CONNECTION rows; facts, tls and tcp are keyed by row."""
    count = len(connections)
    where = endpoint_columns(endpoints, connections)
    rtt_ns = connections["handshake_rtt_ns"]
    software = [facts.software.get(row, (None, None)) for row in range(count)]
    client_ids = [facts.client_ids.get(row, []) for row in range(count)]
    columns = {
        "connection_id": ints(connections["connection_id"], pa.int64()),
        "client_ip": where.client_ip,
        "client_port": ints(where.client_port.astype(np.int32), pa.int32()),
        "broker_ip": where.broker_ip,
        "broker_port": ints(where.broker_port.astype(np.int32), pa.int32()),
        "first_time": times_from_ns(connections["first_time_ns"]),
        "last_time": times_from_ns(connections["last_time_ns"]),
        "handshake_seen": pa.array(connections["handshake_seen"] != 0),
        "handshake_rtt_ms": pa.array(rtt_ns / 1e6, pa.float64(), mask=rtt_ns < 0),
        "close_reason": labels(connections["close_reason"], names_of(CloseReason)),
        "is_kafka": pa.array(connections["protocol"] == Protocol.KAFKA),
        "is_tls": pa.array(connections["is_tls"] != 0),
        "protocol": labels(connections["protocol"], names_of(Protocol)),
        **_tls_columns(tls, count),
        "sasl_mechanism": _texts(facts.mechanism, count),
        "principal": _texts(facts.principal, count),
        "client_software_name": pa.array([name for name, _ in software], pa.string()),
        "client_software_version": pa.array([release for _, release in software], pa.string()),
        "client_ids": pa.array(client_ids, pa.list_(pa.string())),
        **tcp_columns(connections, tcp),
    }
    for direction, side in enumerate(SIDES):
        for name in COUNTERS:
            counter = connections["direction"][name][:, direction]
            columns[f"{side}_{name}"] = ints(counter, pa.int64())
    return table_of(columns, CONNECTIONS)
