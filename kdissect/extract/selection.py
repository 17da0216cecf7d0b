"""Keeps the rows of `exchanges` and `connections` whose packets are extracted."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from kdissect.pipeline.selection import Selection
from kdissect.tables.arrow_arrays import plain
from kdissect.tables.schemas import FIXED_TABLES

_KEPT = (
    "exchange_id", "connection_id", "client_ip", "client_port", "broker_ip", "broker_port",
    "api_name", "api_version", "correlation_id", "client_id", "request_capture_id",
    "response_capture_id", "request_packet", "response_packet", "latency_ms", "status",
    "decode_status", "error_name", "topics", "group_id", "transactional_id",
)  # fmt: skip


@dataclass(slots=True)
class Chosen:
    """A sink of the pipeline that keeps the selected rows only."""

    selection: Selection
    exchanges: list[pa.Table] = field(default_factory=list)
    connections: list[pa.Table] = field(default_factory=list)

    def __call__(self, name: str, table: pa.Table) -> None:
        if name == "exchanges":
            wanted = plain(table, FIXED_TABLES[name])
            rows = self.selection.of_table(wanted)
            kept = wanted if rows is None else wanted.take(pa.array(rows))
            self.exchanges.append(kept.select(list(_KEPT)))
        elif name == "connections":
            columns = ["connection_id", "client_ip", "client_port", "broker_ip", "broker_port"]
            wanted = plain(table, FIXED_TABLES[name]).select([*columns, "is_tls", "protocol"])
            self.connections.append(wanted.filter(self.selection.of_connections(wanted)))
