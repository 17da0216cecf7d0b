"""Which exchanges and connections the user asked for."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.pipeline.filters import any_like, like
from kdissect.tables.arrow_arrays import plain
from kdissect.tables.schemas import FIXED_TABLES

_KEPT = (
    "exchange_id", "connection_id", "client_ip", "client_port", "broker_ip", "broker_port",
    "api_name", "api_version", "correlation_id", "client_id", "request_capture_id",
    "response_capture_id", "request_packet", "response_packet", "latency_ms", "status",
    "decode_status", "error_name", "topics", "group_id", "transactional_id",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """Values of one kind are alternatives; kinds that are given must all hold.

    exchanges: exchange_id. connections: connection_id, or "ip:port" of either end. clients: a
    client id, an address or "ip:port" of the client. topics, groups: names (group_id or
    transactional_id). In client ids and names * and ? fit anything. Hosts and times are chosen
    before (kdissect/pipeline/filters.py).
    """

    exchanges: tuple[int, ...] = ()
    connections: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def is_of_exchanges(self) -> bool:
        """True where single exchanges are asked for, not connections as a whole."""
        return bool(self.exchanges or self.clients or self.topics or self.groups)

    def exchange_mask(self, table: pa.Table) -> Any:
        """bool[n]: rows of `exchanges` that are asked for."""
        masks = []
        if self.exchanges:
            masks.append(_is_in(table["exchange_id"], self.exchanges))
        if self.connections:
            masks.append(self.connection_mask(table))
        if self.clients:
            mask = like(table["client_id"], self.clients)
            for ip, port in _places(self.clients):
                mask = pc.or_(mask, _is_place(table, "client", ip, port))
            masks.append(mask)
        if self.topics:
            masks.append(any_like(table["topics"], self.topics))
        if self.groups:
            mask = like(table["group_id"], self.groups)
            masks.append(pc.or_(mask, like(table["transactional_id"], self.groups)))
        chosen: Any = pa.array(np.ones(len(table), np.bool_))
        for mask in masks:
            chosen = pc.and_(chosen, mask)
        return chosen

    def connection_mask(self, table: pa.Table) -> Any:
        """bool[n]: rows (of `connections` or `exchanges`) whose connection is asked for."""
        ids = [int(text) for text in self.connections if text.lstrip("-").isdigit()]
        mask = _is_in(table["connection_id"], ids)
        for ip, port in _places(self.connections):
            for end in ("client", "broker"):
                mask = pc.or_(mask, _is_place(table, end, ip, port))
        return mask


def _is_in(column: Any, values: Sequence[Any]) -> Any:
    return pc.fill_null(pc.is_in(column, value_set=pa.array(values, column.type)), False)


def _is_place(table: pa.Table, end: str, ip: str, port: int | None) -> Any:
    mask = pc.equal(table[f"{end}_ip"], ip)
    return mask if port is None else pc.and_(mask, pc.equal(table[f"{end}_port"], port))


def _places(values: Sequence[str]) -> list[tuple[str, int | None]]:
    """(ip, port or None) of the values that are addresses, canonical as the tables have them."""
    found: list[tuple[str, int | None]] = []
    for value in values:
        for text, port in ((value, None), value.rpartition(":")[::2]):
            try:
                address = ipaddress.ip_address(text.strip("[]"))
            except ValueError:
                continue
            if port is None:
                found.append((str(address), None))
            elif port.isdigit() and int(port) < 65536 and (address.version == 4 or "[" in text):
                found.append((str(address), int(port)))
    return found


@dataclass(slots=True)
class Chosen:
    """A sink of the pipeline that keeps the rows asked for, and of the rest nothing."""

    choice: Choice
    exchanges: list[pa.Table] = field(default_factory=list)
    connections: list[pa.Table] = field(default_factory=list)

    def __call__(self, name: str, table: pa.Table) -> None:
        if name == "exchanges":
            wanted = plain(table, FIXED_TABLES[name]).select(list(_KEPT))
            self.exchanges.append(wanted.filter(self.choice.exchange_mask(wanted)))
        elif name == "connections":
            columns = ["connection_id", "client_ip", "client_port", "broker_ip", "broker_port"]
            wanted = plain(table, FIXED_TABLES[name]).select([*columns, "is_tls", "protocol"])
            if self.choice.connections:
                wanted = wanted.filter(self.choice.connection_mask(wanted))
            self.connections.append(wanted)
