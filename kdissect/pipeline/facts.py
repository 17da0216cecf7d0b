"""Facts about the whole capture that a few messages hold: topics, brokers, clients, principals.

They are collected from the assembly before the decode step, because a fact that comes late applies
to earlier rows as well. Only messages that can hold such facts are read; the definitions say which.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import take
from kdissect.capture.mapped_files import Sources
from kdissect.codec.message_columns import MessageColumns
from kdissect.jit import kernel, load_u8, load_u16
from kdissect.kafka.assembly import Assembly, Protocol
from kdissect.pipeline.cluster_facts import (
    ROLE_REQUESTS,
    ROLE_RESPONSES,
    TOKEN_RESPONSES,
    NodeRole,
    learn_envelopes,
    roles,
    roles_by_node,
    token_owners,
)
from kdissect.pipeline.frame_buffer import FrameBuffer, chunks
from kdissect.pipeline.metadata_log import learn_metadata
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role, role_of
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES, Definition, Field
from kdissect.tables.arrow_arrays import strings, uuid_texts
from kdissect.tables.connections import ConnectionFacts, endpoint_columns
from kdissect.tables.message_facts import METADATA_TOPIC, METADATA_TOPIC_ID, ZERO_UUID_TEXT
from kdissect.tables.schemas import BROKERS, TOPICS, table_of

BrokerKey = tuple[int, str, int, str | None, str | None]  # node_id, host, port, rack, cluster_id


@dataclass(slots=True)
class CaptureFacts:
    """topics: (name, id text or "") -> (first time in ns, API of the message).

    listeners: IP address and port of the broker's end of each Kafka connection.
    roles: of nodes, one entry per role and message kind. owners: owner by delegation token id.
    """

    topics: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    brokers: set[BrokerKey] = field(default_factory=set)
    listeners: set[tuple[str, int]] = field(default_factory=set)
    roles: set[NodeRole] = field(default_factory=set)
    owners: dict[str, str] = field(default_factory=dict)

    def add_topic(self, name: str, topic_id: str, time_ns: int, source: str) -> None:
        known = self.topics.get((name, topic_id))
        if known is None or (time_ns, source) < known:
            self.topics[name, topic_id] = (time_ns, source)

    def merge(self, other: CaptureFacts) -> None:
        for (name, topic_id), (time_ns, source) in other.topics.items():
            self.add_topic(name, topic_id, time_ns, source)
        self.brokers |= other.brokers
        self.listeners |= other.listeners
        self.roles |= other.roles
        self.add_owners(other.owners.items())

    def add_owners(self, owners: Iterable[tuple[str, str]]) -> None:
        for token_id, owner in owners:  # the smaller of two owners, whatever the order
            self.owners[token_id] = min(owner, self.owners.get(token_id, owner))

    def to_bytes(self) -> bytes:
        topics = [[*key, *value] for key, value in self.topics.items()]
        brokers = sorted(self.brokers, key=repr)
        roles = sorted(self.roles, key=repr)
        listeners = sorted(self.listeners)
        return json.dumps([topics, brokers, listeners, roles, sorted(self.owners.items())]).encode()

    @staticmethod
    def from_bytes(data: bytes) -> CaptureFacts:
        topics, brokers, listeners, roles, owners = json.loads(data)
        return CaptureFacts(
            {(name, ident): (time_ns, source) for name, ident, time_ns, source in topics},
            {tuple(row) for row in brokers},
            {(ip, port) for ip, port in listeners},
            {tuple(row) for row in roles},
            dict(owners),
        )

    def names_by_id(self) -> dict[str, str]:
        """topic id text -> name; the earliest name if a capture has two for an id.

        The metadata log's topic id is fixed in Kafka, so it is always included.
        """
        order = sorted(self.topics.items(), key=lambda item: (item[1], item[0]), reverse=True)
        names = {ident: name for (name, ident), _ in order if ident not in ("", ZERO_UUID_TEXT)}
        return {METADATA_TOPIC_ID: METADATA_TOPIC, **names}

    def ids_by_name(self) -> dict[str, str]:
        """name -> topic id text, for names with exactly one id (a recreated topic has several)."""
        ids_of: dict[str, set[str]] = {}
        for name, ident in self.topics:
            if ident not in ("", ZERO_UUID_TEXT):
                ids_of.setdefault(name, set()).add(ident)
        unique_ids = {name: next(iter(ids)) for name, ids in ids_of.items() if len(ids) == 1}
        return {METADATA_TOPIC: METADATA_TOPIC_ID, **unique_ids}


@dataclass(slots=True)
class NamesUsed:
    """Names in final rows that a later message may complete.

    ids: topic ids without a known name. names: topics whose records came by name, without an id.
    users: SCRAM users, which may be ids of delegation tokens.
    """

    ids: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    users: set[str] = field(default_factory=set)

    def add_users(self, connections: pa.Table) -> None:
        """Add the SCRAM users in rows of `connections`."""
        is_scram = pc.fill_null(pc.starts_with(connections["sasl_mechanism"], "SCRAM"), False)
        principals = connections["principal"].filter(is_scram).unique().to_pylist()
        self.users.update(user.removeprefix("User:") for user in principals if user is not None)

    def merge(self, other: NamesUsed) -> None:
        self.ids |= other.ids
        self.names |= other.names
        self.users |= other.users

    def to_json(self) -> dict[str, list[str]]:
        return {name: sorted(getattr(self, name)) for name in ("ids", "names", "users")}

    @staticmethod
    def from_json(document: dict[str, Any]) -> NamesUsed:
        return NamesUsed(**{name: set(values) for name, values in document.items()})

    def late(self, before: CaptureFacts, after: CaptureFacts) -> list[str]:
        """Names that `after` knows and that rows written with the facts `before` lack."""
        old, new = before.names_by_id(), after.names_by_id()
        late_names = [
            new.get(ident, ident) for ident in self.ids if old.get(ident) != new.get(ident)
        ]
        late_names += [old[ident] for ident in old if old[ident] != new.get(ident)]
        old, new = before.ids_by_name(), after.ids_by_name()
        late_names += [name for name in self.names if old.get(name) != new.get(name)]
        owners = before.owners, after.owners
        late_names += [user for user in self.users if owners[0].get(user) != owners[1].get(user)]
        return sorted(set(late_names))


def _binds(definition: Definition) -> bool:
    """Return whether any version of the definition has a struct with both a topic's name and its
    id."""

    def roles(fields: tuple[Field, ...], api_version: int) -> bool:
        here = [item for item in fields if api_version in item.versions]
        found = {role_of(-1, item) for item in here if not item.is_array}
        if {Role.TOPIC_NAME, Role.TOPIC_ID} <= found:
            return True
        return any(roles(item.fields, api_version) for item in here)

    versions = range(definition.versions.first, definition.versions.last + 1)
    return any(roles(definition.fields, api_version) for api_version in versions)


@cache
def topic_messages() -> frozenset[tuple[int, int]]:
    """(api key, side) of messages that hold a topic's name beside its id."""
    return frozenset(
        (key, side)
        for key, api in catalog.apis().items()
        for side, definition in enumerate((api.request, api.response))
        if _binds(definition)
    )


@cache
def _fact_apis() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(keys of APIs whose requests are read here, keys of APIs whose responses are)."""
    request = {key for key, side in topic_messages() if side == REQUEST}
    response = {key for key, side in topic_messages() if side == RESPONSE}
    request |= {
        ApiKey.SASL_HANDSHAKE,
        ApiKey.API_VERSIONS,
        ApiKey.SASL_AUTHENTICATE,
        *ROLE_REQUESTS,
    }
    response |= {ApiKey.METADATA, ApiKey.DESCRIBE_CLUSTER, *ROLE_RESPONSES, *TOKEN_RESPONSES}
    return np.array(sorted(request)), np.array(sorted(response))


@dataclass(slots=True)
class Learnt:
    """Facts found in exchanges.

    facts: about the whole capture. connections: by connection row. tokens: principals of SASL
    tokens without Kafka headers; they apply if no other message names a principal.
    """

    facts: CaptureFacts = field(default_factory=CaptureFacts)
    connections: ConnectionFacts = field(default_factory=ConnectionFacts)
    tokens: ConnectionFacts = field(default_factory=ConnectionFacts)

    def add(self, later: Learnt) -> None:
        """Add the facts of later exchanges of the same connections."""
        self.facts.merge(later.facts)
        self.connections.add(later.connections)
        self.tokens.add(later.tokens)

    def finish(self, assembly: Assembly) -> None:
        """Add the facts of the assembly's connections, after all its exchanges were read."""
        self.connections.add(self.tokens)
        kafka = assembly.connections[assembly.connections["protocol"] == Protocol.KAFKA]
        where = endpoint_columns(assembly.endpoints, kafka)
        ends = zip(where.broker_ip.to_pylist(), where.broker_port.tolist(), strict=True)
        self.facts.listeners = set(ends)


def learn(assembly: Assembly, sources: Sources, chunk_bytes: int) -> Learnt:
    """Collect the facts of all exchanges of an assembly."""
    learnt = Learnt()
    facts, connection_facts = learnt.facts, learnt.connections
    _client_ids(assembly, sources, connection_facts)
    exchanges = assembly.exchanges
    for side, keys in enumerate(_fact_apis()):
        column = exchanges[SIDES[side]]
        rows = np.flatnonzero(np.isin(exchanges["api_key"], keys) & (column["is_whole"] != 0))
        for chunk in chunks(rows, column["size"], chunk_bytes):
            frames = FrameBuffer.gather(assembly, sources, chunk, (side,))
            for api_key in np.unique(exchanges["api_key"][chunk]):
                _read(frames, int(api_key), side, facts, connection_facts)
    _raw_tokens(assembly, sources, learnt.tokens)
    learn_metadata(assembly, sources, chunk_bytes, facts.add_topic)
    learn_envelopes(assembly, sources, topic_messages(), facts.add_topic)
    return learnt


def learn_topics(assembly: Assembly, sources: Sources, chunk_bytes: int) -> CaptureFacts:
    """Collect topic names and ids only, as `learn` does."""
    facts = CaptureFacts()
    exchanges = assembly.exchanges
    for side in (REQUEST, RESPONSE):
        keys = [key for key, api_side in topic_messages() if api_side == side]
        column = exchanges[SIDES[side]]
        rows = np.flatnonzero(np.isin(exchanges["api_key"], keys) & (column["is_whole"] != 0))
        for chunk in chunks(rows, column["size"], chunk_bytes):
            frames = FrameBuffer.gather(assembly, sources, chunk, (side,))
            for api_key in np.unique(exchanges["api_key"][chunk]).tolist():
                chosen = frames.readable(api_key, side)
                if len(chosen):
                    decoded = frames.decode(api_key, side, chosen)
                    time_ns = frames.exchanges[SIDES[side]]["time_ns"][chosen]
                    name = catalog.api(api_key).name
                    _topic_facts(frames.buf, decoded, time_ns, name, facts)
    learn_metadata(assembly, sources, chunk_bytes, facts.add_topic)
    learn_envelopes(assembly, sources, topic_messages(), facts.add_topic)
    return facts


def _read(
    frames: FrameBuffer,
    api_key: int,
    side: int,
    facts: CaptureFacts,
    connection_facts: ConnectionFacts,
) -> None:
    chosen = frames.readable(api_key, side)
    if not len(chosen):
        return
    decoded = frames.decode(api_key, side, chosen)
    exchanges = take(frames.exchanges, chosen)
    if (api_key, side) in topic_messages():
        time_ns = exchanges[SIDES[side]]["time_ns"]
        _topic_facts(frames.buf, decoded, time_ns, catalog.api(api_key).name, facts)
    if side == RESPONSE and api_key == ApiKey.METADATA:
        _topic_names(decoded.body, exchanges["response"]["time_ns"], facts)
    if side == RESPONSE and api_key in (ApiKey.METADATA, ApiKey.DESCRIBE_CLUSTER):
        _broker_facts(decoded.body, facts)
    if api_key in (ROLE_RESPONSES if side == RESPONSE else ROLE_REQUESTS):
        facts.roles.update(roles(api_key, side, decoded.body))
    if side == RESPONSE and api_key in TOKEN_RESPONSES:
        facts.add_owners(token_owners(api_key, decoded.body))
    if side == REQUEST and api_key in (
        ApiKey.SASL_HANDSHAKE,
        ApiKey.API_VERSIONS,
        ApiKey.SASL_AUTHENTICATE,
    ):
        _connection_facts(api_key, decoded.body, exchanges["connection"], connection_facts)


def _topic_facts(
    buf: npt.NDArray[np.uint8],
    decoded: MessageColumns,
    time_ns: Any,
    api_name: str,
    facts: CaptureFacts,
) -> None:
    marks = decoded.marks
    # A request may name a topic by id alone, with a null name.
    named = (marks["a"] & 0x7FFFFFFF) > 0
    marks = marks[(marks["role"] == Role.TOPIC_BINDING) & named]
    if not len(marks):
        return
    names, _ = strings(buf, marks["a"] >> 31, marks["a"] & 0x7FFFFFFF)
    ids = uuid_texts(np.ascontiguousarray(buf[marks["b"][:, None] + np.arange(16)]))
    bindings = pa.table({"name": names, "id": ids, "time_ns": time_ns[marks["row"]]})
    grouped = bindings.group_by(["name", "id"], use_threads=False).aggregate([("time_ns", "min")])
    for row in grouped.to_pylist():
        if row["id"] != ZERO_UUID_TEXT:
            facts.add_topic(row["name"], row["id"], row["time_ns_min"], api_name)


def _topic_names(body: pa.StructArray, time_ns: Any, facts: CaptureFacts) -> None:
    """Topic names in Metadata responses that have no topic id: before v10, or from older
    brokers."""
    topics = body.field("topics")
    flat = topics.flatten()
    if not len(flat):
        return
    names = [flat.type[i].name for i in range(flat.type.num_fields)]
    name, topic_id, error = (
        flat.field(names.index(column)) for column in ("name", "topic_id", "error_code")
    )
    without_id = pc.or_kleene(pc.is_null(topic_id), pc.equal(topic_id, ZERO_UUID_TEXT))
    exists = pc.and_(pc.equal(error, 0), pc.fill_null(pc.not_equal(name, ""), False))
    parents = pc.list_parent_indices(topics).to_numpy()
    rows = pa.table({"name": name, "time_ns": time_ns[parents]}).filter(pc.and_(without_id, exists))
    grouped = rows.group_by("name", use_threads=False).aggregate([("time_ns", "min")])
    for row in grouped.to_pylist():
        facts.add_topic(row["name"], "", row["time_ns_min"], "Metadata")


def _broker_facts(body: pa.StructArray, facts: CaptureFacts) -> None:
    brokers = body.field("brokers")
    cluster = body.field("cluster_id")
    flat = brokers.flatten()
    if not len(flat):
        return
    parents = pc.list_parent_indices(brokers)
    names = [flat.type[i].name for i in range(flat.type.num_fields)]
    node = flat.field(names.index("node_id") if "node_id" in names else names.index("broker_id"))
    rows = pa.table(
        {
            "node": node,
            "host": flat.field(names.index("host")),
            "port": flat.field(names.index("port")),
            "rack": flat.field(names.index("rack")),
            "cluster": cluster.take(parents),
        }
    )
    for row in rows.group_by(rows.column_names, use_threads=False).aggregate([]).to_pylist():
        facts.brokers.add((row["node"], row["host"], row["port"], row["rack"], row["cluster"]))


TOKENS_READ = 8  # per connection; one of the first two holds the user name


def _connection_facts(
    api_key: int, body: pa.StructArray, connection: Any, facts: ConnectionFacts
) -> None:
    """Client software, SASL mechanism and user of each connection, from its first such messages."""
    _, first = np.unique(connection, return_index=True)
    if api_key == ApiKey.API_VERSIONS:
        named = np.flatnonzero(body.field("client_software_name").is_valid())
        _, first = np.unique(connection[named], return_index=True)
        first = named[first]
    elif api_key == ApiKey.SASL_AUTHENTICATE:
        order = np.argsort(connection, kind="stable")
        rank = np.arange(len(order)) - np.searchsorted(connection[order], connection[order])
        first = np.sort(order[rank < TOKENS_READ])
    for row, value in zip(
        connection[first].tolist(), body.take(pa.array(first)).to_pylist(), strict=True
    ):
        if value is None:
            continue
        if api_key == ApiKey.API_VERSIONS:
            software = (value["client_software_name"], value["client_software_version"])
            facts.software.setdefault(row, software)
        elif api_key == ApiKey.SASL_HANDSHAKE:
            facts.mechanism.setdefault(row, value["mechanism"])
        else:
            _principal(row, value["auth_bytes"] or b"", facts)


_SCRAM_USER = re.compile(rb"^[nyp][^,]*,[^,]*,n=([^,]*),")
_BEARER = re.compile(rb"auth=Bearer ([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.", re.IGNORECASE)


def principal_of(token: bytes) -> str | None:
    """The user in a client's first SASL token, as Kafka's principal ("User:alice"); None without
    one.

    PLAIN (RFC 4616): authzid NUL authcid NUL password. SCRAM (RFC 5802): the n= attribute.
    OAUTHBEARER (RFC 7628): the `sub` claim of the JWT.
    """
    scram = _SCRAM_USER.match(token)
    if scram:
        # RFC 5802: a user name writes "," as =2C and "=" as =3D.
        user = scram[1].replace(b"=2C", b",").replace(b"=3D", b"=")
        return "User:" + user.decode("utf-8", "replace")
    bearer = _BEARER.search(token)
    if bearer:
        try:
            raw = base64.urlsafe_b64decode(bearer[2] + b"=" * (-len(bearer[2]) % 4))
            subject = json.loads(raw).get("sub")
        except (ValueError, binascii.Error, AttributeError):
            return None
        return f"User:{subject}" if isinstance(subject, str) else None
    parts = token.split(b"\0")
    if len(parts) == 3 and parts[1]:
        return "User:" + parts[1].decode("utf-8", "replace")
    return None


def _principal(row: int, token: bytes, facts: ConnectionFacts) -> None:
    user = principal_of(token)
    if user is not None and row not in facts.principal:
        facts.principal[row] = user


def _raw_tokens(assembly: Assembly, sources: Sources, facts: ConnectionFacts) -> None:
    """Principals in SASL tokens without Kafka headers, which SaslHandshake v0 leads to."""
    exchanges = assembly.exchanges
    rows = np.flatnonzero(
        (exchanges["is_sasl_token"] != 0)
        & (exchanges["request"]["is_whole"] != 0)
        & (exchanges["request"]["size"] < 65536)
    )
    if not len(rows):
        return
    frames = FrameBuffer.gather(assembly, sources, rows, (REQUEST,))
    for row, start, end in zip(
        exchanges["connection"][rows].tolist(),
        frames.start[:, REQUEST].tolist(),
        frames.end[:, REQUEST].tolist(),
        strict=True,
    ):
        _principal(row, frames.buf[start:end].tobytes(), facts)


@kernel
def _client_id_kernel(
    address: npt.NDArray[np.uint64],
    available: npt.NDArray[np.int64],
    digest: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
) -> None:
    """FNV-1a digest and length of each request's client id; length -1 for null, -2 for unreadable.

    A client id is unreadable here if the header is not within the `available` bytes of the first
    extent at `address`. This is rare: the header is split between two segments.
    """
    for row in range(address.size):
        length[row] = -2
        if available[row] < 10:
            continue
        # Request header v1: int16 api_key, int16 api_version, int32 correlation_id, then client_id
        # as int16 length and text. Header v2 keeps that encoding.
        size = load_u16(address[row] + np.uint64(8))
        if size > 32767:
            length[row] = -1
            continue
        if available[row] < 10 + size:
            continue
        value = np.int64(-3750763034362895579)
        for k in range(size):
            byte = load_u8(address[row] + np.uint64(10 + k))
            value = (value ^ byte) * np.int64(1099511628211)
        digest[row] = value
        length[row] = size


def _first_of_each(*columns: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Index of the first row of each distinct combination of column values.

    Most neighbours are equal, so runs are merged before sorting.
    """
    differs = np.ones(len(columns[0]), bool)
    differs[1:] = False
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    runs = np.flatnonzero(differs)
    order = runs[np.lexsort([column[runs] for column in columns])]
    differs = np.ones(len(order), bool)
    differs[1:] = False
    for column in columns:
        ordered = column[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    return order[differs]


def _client_ids(assembly: Assembly, sources: Sources, facts: ConnectionFacts) -> None:
    """Distinct client ids of each connection, in order of appearance."""
    exchanges, extents = assembly.exchanges, assembly.extents
    request = exchanges["request"]
    rows = np.flatnonzero(
        (request["size"] >= 10)
        & (exchanges["api_key"] >= 0)
        & (exchanges["is_sasl_token"] == 0)
        # ControlledShutdown v0 has request header v0, without client id
        & ~((exchanges["api_key"] == 7) & (exchanges["api_version"] == 0))
    )
    if not len(rows):
        return
    digest = np.zeros(len(rows), np.int64)
    length = np.zeros(len(rows), np.int64)
    has_bytes = request["extent_count"][rows] > 0
    first = extents[request["extent_start"][rows[has_bytes]]]
    available = np.zeros(len(rows), np.int64)
    available[has_bytes] = np.where(first["source"] < 0, 0, first["length"])
    address = np.zeros(len(rows), np.uint64)
    address[has_bytes] = sources.addresses(first["source"], first["pos"], first["length"])
    _client_id_kernel(address, available, digest, length)
    connection = exchanges["connection"][rows]
    far = length == -2
    digest[far] = rows[far]  # unreadable ones are all looked at below
    index = _first_of_each(connection, length, digest)
    index = np.sort(index[length[index] != -1])
    frames = FrameBuffer.gather(assembly, sources, rows[index], (REQUEST,), prefix=10 + 32767)
    for at, row in enumerate(connection[index].tolist()):
        start, end = int(frames.start[at, REQUEST]), int(frames.end[at, REQUEST])
        if end - start < 10:
            continue
        size = int.from_bytes(frames.buf[start + 8 : start + 10].tobytes(), "big", signed=True)
        if not 0 <= size <= end - start - 10:
            continue
        text = frames.buf[start + 10 : start + 10 + size].tobytes().decode("utf-8", "replace")
        client_ids = facts.client_ids.setdefault(row, [])
        if text not in client_ids:
            client_ids.append(text)


def topics_table(facts: CaptureFacts) -> pa.Table:
    """Rows of `topics`, sorted by the time of the first message with the name."""
    with_id = {name for name, ident in facts.topics if ident}
    rows = sorted(
        (*value, *key) for key, value in facts.topics.items() if key[1] or key[0] not in with_id
    )
    columns = {
        "topic": [row[2] for row in rows],
        "topic_id": [row[3] or None for row in rows],
        "first_time": np.array([row[0] for row in rows], np.int64),
        "source": [row[1] for row in rows],
    }
    return table_of(TOPICS, columns)


def brokers_table(facts: CaptureFacts) -> pa.Table:
    """Rows of `brokers`; `ip` if the host is an address, or if `_addresses` can resolve its
    name."""
    rows = sorted(facts.brokers, key=lambda row: tuple("" if v is None else str(v) for v in row))
    addresses = _addresses(facts)
    roles_of = roles_by_node(facts.roles, {row[4] for row in rows})
    columns = {
        "node_id": [row[0] for row in rows],
        "host": [row[1] for row in rows],
        "port": [row[2] for row in rows],
        "rack": [row[3] for row in rows],
        "cluster_id": [row[4] for row in rows],
        "ip": [addresses.get(row[1]) for row in rows],
        "roles": [roles_of.get((row[0], row[4]), []) for row in rows],
    }
    return table_of(BROKERS, columns)


def _addresses(facts: CaptureFacts) -> dict[str, str]:
    """host -> IP address.

    A host name is resolved if its port is unambiguous: one host name and one address of Kafka
    connections use that port. Addresses of brokers that Metadata lists by address are left out.
    """
    addresses: dict[str, str] = {}
    names: dict[int, set[str]] = {}  # port -> hosts that are names
    for _, host, port, _, _ in facts.brokers:
        try:
            addresses[host] = str(ipaddress.ip_address(host))
        except ValueError:
            names.setdefault(port, set()).add(host)
    taken = {(addresses[host], port) for _, host, port, _, _ in facts.brokers if host in addresses}
    ips: dict[int, set[str]] = {}
    for ip, port in facts.listeners - taken:
        ips.setdefault(port, set()).add(ip)
    resolved: dict[str, set[str]] = {}
    for port, hosts in names.items():
        if len(hosts) == 1 and len(ips.get(port, ())) == 1:
            resolved.setdefault(next(iter(hosts)), set()).update(ips[port])
    addresses.update({host: next(iter(some)) for host, some in resolved.items() if len(some) == 1})
    return addresses


def with_owners(connections: pa.Table, facts: CaptureFacts) -> pa.Table:
    """`connections` with token owners as principals, as a broker logs them.

    A client that authenticates with a delegation token sends the token id as its SCRAM user
    (KIP-48).
    """
    if not facts.owners:
        return connections
    at = connections.schema.get_field_index("principal")
    mechanisms = connections["sasl_mechanism"].to_pylist()
    principals = [
        facts.owners.get((principal or "").removeprefix("User:"), principal)
        if (mechanism or "").startswith("SCRAM")
        else principal
        for principal, mechanism in zip(
            connections["principal"].to_pylist(), mechanisms, strict=True
        )
    ]
    return connections.set_column(
        at, connections.schema.field(at), pa.array(principals, pa.string())
    )
