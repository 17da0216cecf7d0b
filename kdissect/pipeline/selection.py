"""`Selection`: which exchanges a verb works on, for the verbs that filter them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Bools, Indices
from kdissect.errors import QueryError
from kdissect.interrupts import interrupts
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.filters import any_like, bools, fits, host_bytes, is_within, like
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import SASL_TOKEN
from kdissect.tables.arrow_arrays import ip_text
from kdissect.tables.connections import endpoint_columns
from kdissect.tables.exchanges import service_ns

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s|m|min|h|d)?")
_UNITS_MS = {
    "ns": 1e-6,
    "us": 1e-3,
    "µs": 1e-3,
    "ms": 1.0,
    "s": 1e3,
    "m": 6e4,
    "min": 6e4,
    "h": 3.6e6,
    "d": 8.64e7,
}


def duration_ms(text: str) -> float:
    """Milliseconds of "50ms", "1.5 s" or "200us"; a bare number is milliseconds.

    Raises ValueError for any other text.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no duration: give 50ms, 1.5s or 200us")
    return float(match[1]) * _UNITS_MS[match[2] or "ms"]


def api_keys(name: str) -> frozenset[int]:
    """Keys of the APIs that a name or number means; -1 stands for SASL tokens without Kafka
    headers.

    A name matches in any case, by a unique beginning, or with * and ?. Raises ValueError, with
    similar names, if no API matches.
    """
    keys = {api.name: key for key, api in catalog.apis().items()} | {SASL_TOKEN: -1}
    text = name.strip().lower()
    if re.fullmatch(r"\d{1,5}", text) and int(text) < 2**15:
        return frozenset({int(text)})
    if matching := {key for known, key in keys.items() if fits(known.lower(), (text,))}:
        return frozenset(matching)
    begun = sorted(known for known in keys if text and known.lower().startswith(text))
    if len(begun) > 1:
        raise ValueError(f"{name!r} may be {', '.join(begun)}")
    if not begun:
        catalog.api(name)  # raises an error with similar names
    return frozenset({keys[begun[0]]})


@dataclass(frozen=True, slots=True)
class ConnectionName:
    """A connection by its id, or by the address and port of one of its ends."""

    connection_id: int | None = None
    address: bytes | None = None  # 16 bytes; IPv4 as ::ffff:a.b.c.d
    port: int | None = None

    @staticmethod
    def of(text: str) -> ConnectionName:
        """Parse a connection id or IP:PORT. Raises ValueError for any other text."""
        bare = text.strip()
        host, colon, port = bare.rpartition(":")
        if colon and port.isdigit() and 0 < int(port) < 65536:
            if host:
                return ConnectionName(address=host_bytes(host.strip("[]")), port=int(port))
        elif bare.isdigit() and int(bare) < 2**63:
            return ConnectionName(connection_id=int(bare))
        raise ValueError(f"{text!r} is neither a connection id nor IP:PORT")

    def __str__(self) -> str:
        if self.address is None:
            return str(self.connection_id)
        host = ip_text(self.address)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


@dataclass(slots=True)
class Selection:
    """Conditions on an exchange; an empty selection passes every exchange.

    Values of one filter are alternatives; all filters must hold.
    apis: keys, -1 for SASL tokens without Kafka headers.
    clients, topics, groups: names in any case, or patterns with * and ?. A client may also be an IP
    address or IP:PORT, a group also a transactional id.
    hosts: IP addresses of either end.
    time_from_ns, time_to_ns: ns since 1970; the first byte lies in [from, to).
    errors: the response has an error code other than 0. slow_ms: smallest `service_ms`.
    connections, exchanges: by name and by id. where: an SQL expression on the columns of
    `exchanges`.
    """

    apis: frozenset[int] = frozenset()
    clients: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    time_from_ns: int | None = None
    time_to_ns: int | None = None
    errors: bool = False
    slow_ms: float | None = None
    connections: tuple[ConnectionName, ...] = ()
    exchanges: tuple[int, ...] = ()
    where: str | None = None
    _sql: Where | None = field(default=None, init=False, compare=False)

    def __str__(self) -> str:
        """Return the conditions, or "all connections"."""
        parts = []
        for condition in fields(self):
            value = getattr(self, condition.name)
            if condition.compare and value not in (None, False, (), frozenset()):
                values = value if isinstance(value, tuple | frozenset) else (value,)
                name, shown = condition.name, ", ".join(map(str, values))
                if name.startswith("time_"):
                    name = name.removeprefix("time_").removesuffix("_ns")
                    shown = f"{np.datetime64(value, 'ns')}Z"
                elif name == "apis":
                    known = catalog.apis()
                    shown = ", ".join(
                        known[key].name if key in known else str(key) for key in values
                    )
                parts.append(f"{name} {shown}")
        return "; ".join(parts) or "all connections"

    @classmethod
    def written(cls, manifest: Mapping[str, Any]) -> list[Selection]:
        """Return the choices of exchanges with which the sets of a manifest were written."""
        return [
            cls(
                hosts=tuple(options.get("hosts", ())),
                time_from_ns=options.get("time_from_ns"),
                time_to_ns=options.get("time_to_ns"),
            )
            for options in manifest.get("options_of_sets", [manifest.get("options", {})])
        ]

    @property
    def is_empty(self) -> bool:
        return self == Selection()

    @property
    def is_of_connections(self) -> bool:
        """Return whether the selection takes whole connections only."""
        return replace(self, hosts=(), connections=()).is_empty

    @property
    def columns(self) -> list[str] | None:
        """The columns of `exchanges` that `of_table` reads; None for all."""
        return list(_READ) if self.where is None else None

    def of_index(self, assembly: Assembly) -> Indices:
        """Rows of the assembly's exchanges that may pass, before anything is decoded.

        This only saves decoding: `of_table` makes the final choice.
        """
        exchanges = assembly.exchanges
        request, response = exchanges["request"], exchanges["response"]
        has_request = request["size"] >= 0
        kept = np.ones(len(exchanges), np.bool_)
        if self.apis:
            is_token = exchanges["is_sasl_token"] != 0
            key = exchanges["api_key"].astype(np.int64)
            kept &= np.where(is_token, -1 in self.apis, np.isin(key, list(self.apis - {-1})))
        if self.slow_ms is not None:
            service, is_known = service_ns(exchanges)
            kept &= is_known & (service >= self.slow_ms * 1e6)
        if self.time_from_ns is not None or self.time_to_ns is not None:
            time = np.where(has_request, request["time_ns"], response["time_ns"])
            kept &= is_within(time, self.time_from_ns, self.time_to_ns)
        if self.hosts or self.connections:
            where = endpoint_columns(assembly.endpoints, assembly.connections)
            ids = assembly.connections["connection_id"].astype(np.int64)
            connections = pa.table({"connection_id": ids, **where._asdict()})
            kept &= self.of_connections(connections)[exchanges["connection"]]
        return np.flatnonzero(kept)

    def of_table(self, table: pa.Table) -> Indices | None:
        """int64[n]: rows of `exchanges` that pass; None for all. Raises QueryError."""
        masks = list(self._masks(table))
        rows = np.flatnonzero(np.logical_and.reduce(masks)) if masks else None
        if self.where is not None:
            self._sql = self._sql or Where(self.where)
            chosen = self._sql.rows(table if rows is None else table.take(pa.array(rows)))
            rows = chosen if rows is None else rows[chosen]
        return rows

    def _masks(self, table: pa.Table) -> Iterator[Bools]:
        if self.exchanges:
            yield _is_in(table["exchange_id"], self.exchanges)
        if self.hosts or self.connections:
            yield self.of_connections(table)
        if self.apis:
            is_token = np.full(table.num_rows, -1 in self.apis)
            is_token &= bools(pc.equal(_text(table["api_name"]), SASL_TOKEN))
            yield _is_in(table["api_key"], self.apis - {-1}) | is_token
        if self.time_from_ns is not None or self.time_to_ns is not None:
            time = pc.coalesce(table["request_time_ns"], table["response_time_ns"])
            yield is_within(time.to_numpy(), self.time_from_ns, self.time_to_ns)
        if self.slow_ms is not None:
            yield bools(pc.greater_equal(table["service_ms"], self.slow_ms))
        if self.errors:
            yield bools(pc.greater(pc.list_value_length(table["error_codes"]), 0))
        if self.clients:
            yield bools(like(table["client_id"], self.clients)) | self._by_address(table)
        if self.groups:
            names = ("group_id", "transactional_id")
            group, transaction = (bools(like(table[name], self.groups)) for name in names)
            yield group | transaction
        if self.topics:
            yield bools(any_like(table["topics"], self.topics))

    def of_connections(self, table: pa.Table) -> Bools:
        """bool[n]: rows of `connections` or `exchanges` that pass `hosts` and `connections`."""
        kept = np.ones(table.num_rows, np.bool_)
        if self.hosts:
            addresses = [ip_text(host_bytes(host)) for host in self.hosts]
            kept &= _is_in(_text(table["client_ip"]), addresses) | _is_in(
                _text(table["broker_ip"]), addresses
            )
        if self.connections:
            ids = [name.connection_id for name in self.connections if name.address is None]
            named = _is_in(table["connection_id"], ids)
            for name in self.connections:
                if name.address is not None:
                    named |= _is_end(table, "client", name) | _is_end(table, "broker", name)
            kept &= named
        return kept

    def _by_address(self, table: pa.Table) -> Bools:
        """bool[n]: exchanges whose client has one of the given addresses, or addresses and
        ports."""
        matches = np.zeros(table.num_rows, np.bool_)
        for client in self.clients:
            try:
                matches |= bools(pc.equal(_text(table["client_ip"]), ip_text(host_bytes(client))))
                continue
            except ValueError:
                pass
            try:
                end = ConnectionName.of(client)
            except ValueError:
                continue
            if end.address is not None:
                matches |= _is_end(table, "client", end)
        return matches


_READ = (
    *("exchange_id", "connection_id", "client_ip", "client_port", "broker_ip", "broker_port"),
    *("api_key", "api_name", "client_id", "request_time_ns", "response_time_ns", "service_ms"),
    *("error_codes", "topics", "group_id", "transactional_id"),
)


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string())


def _is_in(column: pa.ChunkedArray, values: Collection[int | str | None]) -> Bools:
    return bools(pc.is_in(column, value_set=pa.array(values, column.type)))


def _is_end(table: pa.Table, end: str, name: ConnectionName) -> Bools:
    assert name.address is not None
    is_address = bools(pc.equal(_text(table[f"{end}_ip"]), ip_text(name.address)))
    return is_address & bools(pc.equal(table[f"{end}_port"], name.port))


class Where:
    """An SQL expression that is applied to one batch of rows after the other.

    DuckDB can read the rows only: no files, no network, no settings.
    """

    def __init__(self, expression: str) -> None:
        import duckdb

        self._errors = duckdb.Error
        self._expression = expression
        self._connection: DuckDBPyConnection = duckdb.connect(
            ":memory:", config={"enable_external_access": "false", "threads": "1"}
        )
        self._connection.execute("SET TimeZone='UTC'")
        self._connection.execute("SET lock_configuration=true")

    def rows(self, table: pa.Table) -> Indices:
        """int64[n]: rows for which the expression is true. Raises QueryError."""
        number = pa.array(np.arange(table.num_rows, dtype=np.int64))
        numbered = table.append_column("_row", number)
        try:
            with interrupts():
                relation = self._connection.from_arrow(numbered).filter(self._expression)
                numbers = relation.project("_row").fetchnumpy()["_row"]
        except self._errors as error:
            reason = str(error).splitlines()[0]
            raise QueryError(f"--where {self._expression}: {reason}") from None
        return np.sort(np.asarray(numbers, np.int64))
