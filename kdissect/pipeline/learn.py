"""What messages tell about the whole input: topics, brokers, owners of tokens, clients.

It is collected from the assembly before the decode step, because a name that comes late applies to
earlier rows as well. Only messages that can hold such facts are read; the definitions say which.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from kdissect.arrays import take
from kdissect.capture.mapped_files import Sources
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.brokers import (
    ROLE_REQUESTS,
    ROLE_RESPONSES,
    ListedBroker,
    NodeRole,
    SeenBrokers,
)
from kdissect.pipeline.clients import (
    CLIENT_REQUESTS,
    TOKEN_RESPONSES,
    add_client_ids,
    add_clients,
    raw_token_users,
    token_owners,
)
from kdissect.pipeline.frame_buffer import FrameBuffer, chunks
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
from kdissect.tables.topics import SeenTopics


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


@dataclass(slots=True)
class Learnt:
    """What some exchanges tell.

    cluster: about the whole input. clients: by connection row. token_users: by connection row,
    from SASL tokens without Kafka headers; they count if no other message names a user.
    """

    cluster: Cluster = field(default_factory=Cluster)
    clients: ConnectionClients = field(default_factory=ConnectionClients)
    token_users: dict[int, str] = field(default_factory=dict)

    def add(self, later: Learnt) -> None:
        """Add what later exchanges of the same connections tell."""
        self.cluster.merge(later.cluster)
        self.clients.add(later.clients)
        self.token_users = later.token_users | self.token_users

    def finish(self, assembly: Assembly) -> None:
        """Add what the assembly's connections tell, after all its exchanges were read."""
        self.clients.principal = self.token_users | self.clients.principal
        self.cluster.brokers.add_listeners(assembly)


@cache
def _messages() -> frozenset[tuple[int, int]]:
    """(api key, side) of the messages that `learn` reads."""
    requests = ROLE_REQUESTS | CLIENT_REQUESTS
    responses = ROLE_RESPONSES | TOKEN_RESPONSES
    return (
        frozenset(binding_structs())
        | {(key, REQUEST) for key in requests}
        | {(key, RESPONSE) for key in responses}
    )


def learn(assembly: Assembly, sources: Sources, chunk_bytes: int) -> Learnt:
    """Collect what all exchanges of an assembly tell."""
    learnt = Learnt()
    add_client_ids(learnt.clients, assembly, sources)
    learnt.token_users = raw_token_users(assembly, sources)
    _read_all(learnt, assembly, sources, chunk_bytes, _messages())
    return learnt


def learn_topics(assembly: Assembly, sources: Sources, chunk_bytes: int) -> SeenTopics:
    """Collect topic names and ids only, as `learn` does."""
    learnt = Learnt()
    _read_all(learnt, assembly, sources, chunk_bytes, frozenset(binding_structs()))
    return learnt.cluster.topics


def _read_all(
    learnt: Learnt,
    assembly: Assembly,
    sources: Sources,
    chunk_bytes: int,
    messages: frozenset[tuple[int, int]],
) -> None:
    exchanges = assembly.exchanges
    for side in (REQUEST, RESPONSE):
        keys = [key for key, of in messages if of == side]
        column = exchanges[SIDES[side]]
        rows = np.flatnonzero(np.isin(exchanges["api_key"], keys) & (column["is_whole"] != 0))
        for chunk in chunks(rows, column["size"], chunk_bytes):
            frames = FrameBuffer.gather(assembly, sources, chunk, (side,))
            for api_key in np.unique(exchanges["api_key"][chunk]).tolist():
                _read(learnt, frames, api_key, side)
    add_from_envelopes(learnt.cluster.topics, assembly, sources, chunk_bytes)
    add_from_metadata_log(learnt.cluster.topics, assembly, sources, chunk_bytes)


def _read(learnt: Learnt, frames: FrameBuffer, api_key: int, side: int) -> None:
    """Read the messages of one API and side."""
    chosen = frames.readable(api_key, side)
    if not len(chosen):
        return
    decoded = frames.decode(api_key, side, chosen)
    exchanges = take(frames.exchanges, chosen)
    time_ns = exchanges[SIDES[side]]["time_ns"]
    cluster = learnt.cluster
    if (api_key, side) in binding_structs():
        add_bound(cluster.topics, api_key, side, decoded.body, time_ns)
    if (api_key, side) == (ApiKey.METADATA, RESPONSE):
        add_named(cluster.topics, decoded.body, time_ns)
    if api_key in (ROLE_REQUESTS, ROLE_RESPONSES)[side]:
        cluster.brokers.add(api_key, side, decoded.body)
    if side == RESPONSE and api_key in TOKEN_RESPONSES:
        for token_id, owner in token_owners(api_key, decoded.body):
            cluster.add_owner(token_id, owner)
    if side == REQUEST and api_key in CLIENT_REQUESTS:
        add_clients(learnt.clients, api_key, decoded.body, exchanges["connection"])
