"""Which exchanges are shown: filters by an exchange's index first, then by columns, then SQL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.errors import Error
from kdissect.interrupts import interrupts
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.filters import any_like, bools, fits, host_bytes, is_within, like
from kdissect.protocol import catalog
from kdissect.tables.arrow_arrays import ip_text
from kdissect.tables.waits import service_ns

SASL_TOKEN = "SaslToken"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s|m|min)?")
_UNITS_MS = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4, "min": 6e4}


def duration_ms(text: str) -> float:
    """Milliseconds of "50ms", "1.5 s", "200us"; a bare number is milliseconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no duration: give 50ms, 1.5s or 200us")
    return float(match[1]) * _UNITS_MS[match[2] or "ms"]


def api_keys(names: Sequence[str]) -> frozenset[int]:
    """Keys of APIs by name (any case, unique beginnings, * and ?) or key; -1 for raw SASL tokens.

    Raises ValueError, with names that come near, for a name that no API has.
    """
    found: set[int] = set()
    keys = {api.name: key for key, api in catalog.apis().items()} | {SASL_TOKEN: -1}
    for name in names:
        text = name.strip().lower()
        matching = {key for known, key in keys.items() if fits(known.lower(), (text,))}
        begun = sorted(known for known in keys if text and known.lower().startswith(text))
        if re.fullmatch(r"\d{1,5}", text):
            found.add(int(text))
        elif matching:
            found |= matching
        elif len(begun) == 1:
            found.add(keys[begun[0]])
        elif begun:
            raise ValueError(f"{name!r} may be {', '.join(begun)}")
        else:
            catalog.api(name)  # says which names are near
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class FollowedConnection:
    """--follow: a connection id, or one of its ends."""

    connection_id: int | None = None
    address: bytes | None = None  # of 16 bytes
    port: int | None = None

    @staticmethod
    def of(text: str) -> FollowedConnection:
        """Raises ValueError for what is neither an id nor IP:PORT."""
        bare = text.strip()
        host, colon, port = bare.rpartition(":")
        if colon and port.isdigit() and 0 < int(port) < 65536:
            if host:
                return FollowedConnection(address=host_bytes(host.strip("[]")), port=int(port))
        elif bare.isdigit() and int(bare) < 2**63:
            return FollowedConnection(connection_id=int(bare))
        raise ValueError(f"{text!r} is neither a connection id nor IP:PORT")


@dataclass(slots=True)
class Filters:
    """What must hold of an exchange; empty ones let everything through.

    clients, topics, groups: exact names, or patterns with * and ?; a client may be an address or
    IP:PORT too, a group a transactional id.
    time_from_ns, time_to_ns: of its first byte. slow_ms: least service time (`service_ms`). where:
    a SQL expression on the columns of `exchanges`.
    """

    apis: frozenset[int] = frozenset()
    clients: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    errors: bool = False
    slow_ms: float | None = None
    time_from_ns: int | None = None
    time_to_ns: int | None = None
    follow: FollowedConnection | None = None
    where: str | None = None
    _sql: Any = field(default=None, init=False)

    def of_index(self, assembly: Assembly) -> npt.NDArray[np.int64]:
        """Rows of the assembly's exchanges that may pass, before anything is decoded."""
        exchanges = assembly.exchanges
        request, response = exchanges["request"], exchanges["response"]
        asked, answered = request["size"] >= 0, response["size"] >= 0
        kept = np.ones(len(exchanges), np.bool_)
        if self.apis:
            is_token = exchanges["is_sasl_token"] != 0
            key = exchanges["api_key"].astype(np.int64)
            kept &= np.where(is_token, -1 in self.apis, np.isin(key, list(self.apis - {-1})))
        if self.slow_ms is not None:
            kept &= asked & answered & (service_ns(exchanges) >= self.slow_ms * 1e6)
        if self.time_from_ns is not None or self.time_to_ns is not None:
            time = np.where(asked, request["time_ns"], response["time_ns"])
            kept &= is_within(time, self.time_from_ns, self.time_to_ns)
        if self.hosts or self.follow is not None:
            kept &= self._of_connections(assembly)[exchanges["connection"]]
        return np.flatnonzero(kept)

    def _of_connections(self, assembly: Assembly) -> npt.NDArray[np.bool_]:
        connections = assembly.connections
        pair = assembly.endpoints[connections["endpoints"]]
        kept = np.ones(len(connections), np.bool_)
        if self.hosts:
            is_host = np.zeros(len(connections), np.bool_)
            for host in self.hosts:
                address = np.frombuffer(host_bytes(host), np.uint8)
                for end in ("ip_a", "ip_b"):
                    is_host |= (pair[end] == address).all(axis=1)
            kept &= is_host
        follow = self.follow
        if follow is not None and follow.connection_id is not None:
            kept &= connections["connection_id"] == follow.connection_id
        elif follow is not None and follow.address is not None:
            address = np.frombuffer(follow.address, np.uint8)
            is_end = np.zeros(len(connections), np.bool_)
            for end in ("a", "b"):
                is_end |= (pair[f"ip_{end}"] == address).all(axis=1) & (
                    pair[f"port_{end}"] == follow.port
                )
            kept &= is_end
        return kept

    def of_table(self, table: pa.Table) -> npt.NDArray[np.int64] | None:
        """Rows of `exchanges` that pass; None for all of them."""
        mask = None
        if self.errors:
            mask = pc.greater(pc.list_value_length(table["error_codes"]), 0)
        if self.clients:
            by_name = like(table["client_id"], self.clients)
            mask = _and(mask, pc.or_(by_name, self._by_address(table)))
        if self.groups:
            by_group = like(table["group_id"], self.groups)
            mask = _and(mask, pc.or_(by_group, like(table["transactional_id"], self.groups)))
        if self.topics:
            mask = _and(mask, any_like(table["topics"], self.topics))
        rows = None
        if mask is not None:
            rows = np.flatnonzero(bools(mask))
        if self.where is not None:
            some = table if rows is None else table.take(pa.array(rows))
            chosen = self._sql_rows(some)
            rows = chosen if rows is None else rows[chosen]
        return rows

    def _by_address(self, table: pa.Table) -> Any:
        """bool[n]: exchanges of a client whose address, or address and port, was asked for."""
        found = np.zeros(table.num_rows, np.bool_)
        for client in self.clients:
            try:
                end = FollowedConnection.of(client) if ":" in client.lstrip("[") else None
                address = end.address if end and end.address else host_bytes(client)
            except ValueError:
                try:
                    end, address = None, host_bytes(client)
                except ValueError:
                    continue
            here = pc.equal(table["client_ip"].cast(pa.string()), ip_text(address))
            if end is not None:
                here = pc.and_(here, pc.equal(table["client_port"], end.port))
            found |= bools(here)
        return pa.array(found)

    def _sql_rows(self, table: pa.Table) -> npt.NDArray[np.int64]:
        if self._sql is None:
            self._sql = Where(self.where or "true")
        found: npt.NDArray[np.int64] = self._sql.rows(table)
        return found


def _and(one: Any, two: Any) -> Any:
    return two if one is None else pc.and_kleene(one, two)


class WhereError(Error):
    """The expression cannot be read, or names a column that there is not."""


class Where:
    """An expression, applied to one batch of rows after the other.

    DuckDB sees the rows and nothing else: no file, no network, no setting.
    """

    def __init__(self, expression: str) -> None:
        import duckdb

        self._errors = duckdb.Error
        self._expression = expression
        self._connection: Any = duckdb.connect(
            ":memory:", config={"enable_external_access": "false", "threads": "1"}
        )
        self._connection.execute("SET TimeZone='UTC'")
        self._connection.execute("SET lock_configuration=true")

    def rows(self, table: pa.Table) -> npt.NDArray[np.int64]:
        """int64[n]: the rows for which the expression is true. Raises WhereError."""
        number = pa.array(np.arange(table.num_rows, dtype=np.int64))
        numbered = table.append_column("_row", number)
        try:
            with interrupts():
                relation = self._connection.from_arrow(numbered).filter(self._expression)
                found = relation.project("_row").fetchnumpy()["_row"]
        except self._errors as error:
            reason = str(error).splitlines()[0]
            raise WhereError(f"--where {self._expression}: {reason}") from None
        return np.sort(np.asarray(found, np.int64))
