"""What messages tell about the whole input: topics, brokers, owners of tokens, clients.

It is collected from the assembly before the decode step, because a name that comes late applies to
earlier rows as well. Only messages that can hold such facts are read: whole ones of the APIs in
`_messages`, Envelopes, and fetches of the metadata log.

A client that authenticates with a delegation token sends the token id as its SCRAM user (KIP-48).
A broker logs the token's owner then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa

from kdissect.arrays import Indices, take
from kdissect.capture.mapped_files import Sources
from kdissect.codec.sasl_tokens import read_token
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.brokers import (
    ROLE_REQUESTS,
    ROLE_RESPONSES,
    ListedBroker,
    NodeRole,
    SeenBrokers,
)
from kdissect.pipeline.task_table import Share, TaskTable
from kdissect.pipeline.topic_messages import (
    add_bound,
    add_from_envelopes,
    add_from_metadata_log,
    add_named,
    binding_structs,
)
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.tables.connections import ConnectionClients
from kdissect.tables.message_chunk import FrameBuffer, chunks, client_ids
from kdissect.tables.topics import SeenTopics, TopicNames

_CLIENT_REQUESTS = frozenset((ApiKey.SASL_HANDSHAKE, ApiKey.API_VERSIONS, ApiKey.SASL_AUTHENTICATE))
_TOKEN_RESPONSES = frozenset((ApiKey.CREATE_DELEGATION_TOKEN, ApiKey.DESCRIBE_DELEGATION_TOKEN))
_TOKEN_MAX = 1 << 16  # bytes of a SASL token without Kafka header
# bytes of a request header up to the end of its client id: of nearly all, and the most
_SHORT_HEADER, _LONG_HEADER = 10 + 64, 10 + 32767


class KnownNames(NamedTuple):
    """What the decode step needs of a `Cluster`. owners: by token id."""

    topics: TopicNames
    owners: Mapping[str, str]

    def for_tasks(self, share: Share) -> TaskTable:
        """A table of one row, for `of_task`."""
        document = json.dumps([self.topics.of_id, self.topics.id_of, self.owners])
        return share("names", pa.table({"document": [document]}))

    @staticmethod
    def of_task(table: TaskTable) -> KnownNames:
        of_id, id_of, owners = json.loads(table.read()["document"][0].as_py())
        return KnownNames(TopicNames(of_id, id_of), owners)


@dataclass(slots=True)
class Cluster:
    """Topics, brokers, and the owner of each delegation token id."""

    topics: SeenTopics = field(default_factory=SeenTopics)
    brokers: SeenBrokers = field(default_factory=SeenBrokers)
    owners: dict[str, str] = field(default_factory=dict)

    def merge(self, other: Cluster) -> None:
        self.topics.merge(other.topics)
        self.brokers.merge(other.brokers)
        for token_id, owner in other.owners.items():
            self.add_owner(token_id, owner)

    def add_owner(self, token_id: str, owner: str) -> None:
        # the smaller of two owners, whatever the order
        self.owners[token_id] = min(owner, self.owners.get(token_id, owner))

    def parts(self, count: int) -> list[Cluster]:
        """The facts in `count` parts; equal topics and tokens of all clusters are in equal ones."""
        found = [Cluster() for _ in range(count)]
        found[0].brokers = self.brokers
        for topic, seen in self.topics.first.items():
            found[crc32(topic[0].encode()) % count].topics.first[topic] = seen
        for token_id, owner in self.owners.items():
            found[crc32(token_id.encode()) % count].owners[token_id] = owner
        return found

    def known_names(self) -> KnownNames:
        return KnownNames(self.topics.names(), self.owners)

    def to_bytes(self) -> bytes:
        parts = [
            [[*key, *seen] for key, seen in self.topics.first.items()],
            *(sorted(part, key=repr) for part in (self.brokers.listed, self.brokers.roles)),
            sorted(self.brokers.listeners),
            sorted(self.owners.items()),
        ]
        return json.dumps(parts).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Cluster:
        topics, listed, roles, listeners, owners = json.loads(data)
        first = {(name, topic_id): (time_ns, api) for name, topic_id, time_ns, api in topics}
        brokers = SeenBrokers(
            set(map(ListedBroker._make, listed)),
            set(map(NodeRole._make, roles)),
            {(ip, port) for ip, port in listeners},
        )
        return Cluster(SeenTopics(first), brokers, dict(owners))


@cache
def _messages() -> frozenset[tuple[int, int]]:
    """(api key, side) of the messages that `learn` reads."""
    requests = ROLE_REQUESTS | _CLIENT_REQUESTS
    responses = ROLE_RESPONSES | _TOKEN_RESPONSES
    return (
        frozenset(binding_structs())
        | {(key, REQUEST) for key in requests}
        | {(key, RESPONSE) for key in responses}
    )


def learn(
    cluster: Cluster, clients: ConnectionClients, assembly: Assembly, sources: Sources
) -> None:
    """Add what all exchanges of an assembly tell of the cluster, and of connections' clients."""
    _add_client_ids(clients, assembly, sources)
    _read_all(cluster, clients, assembly, sources, _messages())
    _add_raw_token_users(clients, assembly, sources)


def learn_topics(assembly: Assembly, sources: Sources) -> SeenTopics:
    """Collect topic names and ids only, as `learn` does."""
    cluster = Cluster()
    _read_all(cluster, ConnectionClients(), assembly, sources, binding_structs().keys())
    return cluster.topics


def _read_all(
    cluster: Cluster,
    clients: ConnectionClients,
    assembly: Assembly,
    sources: Sources,
    messages: Set[tuple[int, int]],
) -> None:
    """messages: (api key, side) of those that are read."""
    exchanges = assembly.exchanges
    for side in (REQUEST, RESPONSE):
        keys = [key for key, of in messages if of == side]
        column = exchanges[SIDES[side]]
        rows = np.flatnonzero(np.isin(exchanges["api_key"], keys) & (column["is_whole"] != 0))
        for chunk in chunks(rows, column["size"]):
            frames = FrameBuffer.gather(assembly, sources, chunk, (side,))
            for api_key in np.unique(exchanges["api_key"][chunk]).tolist():
                _read(cluster, clients, frames, api_key, side)
    add_from_envelopes(cluster.topics, assembly, sources)
    add_from_metadata_log(cluster.topics, assembly, sources)


def _read(
    cluster: Cluster, clients: ConnectionClients, frames: FrameBuffer, api_key: int, side: int
) -> None:
    """Read the messages of one API and side."""
    chosen = frames.readable(api_key, side)
    if not len(chosen):
        return
    decoded = frames.decode(api_key, side, chosen)
    exchanges = take(frames.exchanges, chosen)
    time_ns = exchanges[SIDES[side]]["time_ns"]
    if (api_key, side) in binding_structs():
        add_bound(cluster.topics, api_key, side, decoded.body, time_ns)
    if (api_key, side) == (ApiKey.METADATA, RESPONSE):
        add_named(cluster.topics, decoded.body, time_ns)
    if api_key in (ROLE_REQUESTS, ROLE_RESPONSES)[side]:
        cluster.brokers.add(api_key, side, decoded.body)
    if side == RESPONSE and api_key in _TOKEN_RESPONSES:
        for token_id, owner in _token_owners(api_key, decoded.body):
            cluster.add_owner(token_id, owner)
    if side == REQUEST and api_key in _CLIENT_REQUESTS:
        _add_clients(clients, api_key, decoded.body, exchanges["connection"])


# -- clients of connections -----------------------------------------------------------------


def _add_clients(
    clients: ConnectionClients, api_key: int, body: pa.StructArray, connection: Indices
) -> None:
    """Add client software, SASL mechanism and user of each connection, from its first such
    messages. api_key: of _CLIENT_REQUESTS."""
    for row, value in zip(connection.tolist(), body.to_pylist(), strict=True):
        if value is None:
            continue
        if api_key == ApiKey.API_VERSIONS:
            if value["client_software_name"] is not None:
                software = (value["client_software_name"], value["client_software_version"])
                clients.software.setdefault(row, software)
        elif api_key == ApiKey.SASL_HANDSHAKE:
            clients.mechanism.setdefault(row, value["mechanism"])
        else:
            _add_user(clients.principal, row, value["auth_bytes"] or b"")


def _add_user(principals: dict[int, str], row: int, token: bytes) -> None:
    if row not in principals and (user := principal_of(token)) is not None:
        principals[row] = user


def principal_of(token: bytes) -> str | None:
    """The user in a client's first SASL token, as Kafka's principal ("User:alice"); None without
    one: the authentication id of PLAIN and SCRAM, the `sub` claim of OAUTHBEARER's JWT."""
    fields = read_token(token, REQUEST) or {}
    claims = {claim["name"]: claim["value"] for claim in fields.get("claims") or ()}
    user = fields.get("authcid") or claims.get("sub")
    return f"User:{user}" if user else None


def _add_raw_token_users(clients: ConnectionClients, assembly: Assembly, sources: Sources) -> None:
    """Add the users in SASL tokens without Kafka headers, to which SaslHandshake v0 leads."""
    exchanges = assembly.exchanges
    request = exchanges["request"]
    is_whole = (request["is_whole"] != 0) & (request["size"] < _TOKEN_MAX)
    rows = np.flatnonzero((exchanges["is_sasl_token"] != 0) & is_whole)
    for chunk in chunks(rows, request["size"]):
        frames = FrameBuffer.gather(assembly, sources, chunk, (REQUEST,))
        bounds = frames.start[:, REQUEST].tolist(), frames.end[:, REQUEST].tolist()
        for row, start, end in zip(exchanges["connection"][chunk].tolist(), *bounds, strict=True):
            _add_user(clients.principal, row, frames.buf[start:end].tobytes())


def _token_owners(api_key: int, body: pa.StructArray) -> Iterator[tuple[str, str]]:
    """(token id, owner such as "User:alice") from responses of _TOKEN_RESPONSES (KIP-48)."""
    is_single = api_key == ApiKey.CREATE_DELEGATION_TOKEN
    for row in (body if is_single else body.field("tokens").flatten()).to_pylist():
        if row is not None and row["token_id"] and row["principal_name"]:
            yield row["token_id"], f"{row['principal_type']}:{row['principal_name']}"


def with_owners(connections: pa.Table, owners: Mapping[str, str]) -> pa.Table:
    """`connections` with token owners as principals. owners: by token id."""
    if not owners:
        return connections
    at = connections.schema.get_field_index("principal")
    mechanisms = connections["sasl_mechanism"].to_pylist()
    principals = [
        owners.get((principal or "").removeprefix("User:"), principal)
        if (mechanism or "").startswith("SCRAM")
        else principal
        for principal, mechanism in zip(
            connections["principal"].to_pylist(), mechanisms, strict=True
        )
    ]
    column = pa.array(principals, pa.string())
    return connections.set_column(at, connections.schema.field(at), column)


def _add_client_ids(clients: ConnectionClients, assembly: Assembly, sources: Sources) -> None:
    """Add the client ids of each connection that are new, in order of appearance."""
    exchanges = assembly.exchanges
    size = exchanges["request"]["size"]
    rows = np.flatnonzero((size >= 10) & (exchanges["api_key"] >= 0))
    found: list[tuple[int, int, str]] = []
    for prefix in (_SHORT_HEADER, _LONG_HEADER):
        left = [rows[:0]]
        for chunk in chunks(rows, np.minimum(size, prefix)):
            frames = FrameBuffer.gather(assembly, sources, chunk, (REQUEST,), prefix)
            texts = client_ids(frames)
            columns = {"connection": exchanges["connection"][chunk], "id": texts, "row": chunk}
            named = pa.table(columns).filter(texts.is_valid())
            distinct = named.group_by(["connection", "id"], use_threads=False)
            firsts = distinct.aggregate([("row", "min")])
            found += zip(
                *(firsts[name].to_pylist() for name in ("row_min", "connection", "id")), strict=True
            )
            left.append(chunk[texts.is_null().to_numpy(zero_copy_only=False)])
        rows = np.concatenate(left)
    for _, connection, text in sorted(found):
        names = clients.client_ids.setdefault(connection, [])
        if text not in names:
            names.append(text)
