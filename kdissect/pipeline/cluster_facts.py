"""Facts about the cluster in single messages: roles of nodes, owners of delegation tokens.

The roles are those of KRaft's ``process.roles``. A node is a broker if Metadata or DescribeCluster
sends clients to it, or if it registers as one. A node is a controller if it registers as one, votes
in the quorum or leads it, or asks brokers to change their partitions. With ZooKeeper the controller
is one of the brokers.

A broker forwards some requests to the controller inside an Envelope (KIP-590); the responses come
back inside one too. If clients use TLS, a capture may show a CreateTopics only there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.capture.mapped_files import Sources
from kdissect.codec.json_values import jsonable
from kdissect.codec.message import Message, decode_message
from kdissect.errors import DecodeError
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.frame_buffer import FrameBuffer
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE

BROKER_ROLE, CONTROLLER = "broker", "controller"
CONTROLLER_ENDPOINTS = 2  # DescribeCluster's endpoint_type (KIP-919)

# Requests that name their sender in a top-level field. Only a controller sends LeaderAndIsr (4),
# StopReplica (5) and UpdateMetadata (6).
_BY_FIELD = {
    4: ("controller_id", CONTROLLER),
    5: ("controller_id", CONTROLLER),
    6: ("controller_id", CONTROLLER),
    62: ("broker_id", BROKER_ROLE),
    63: ("broker_id", BROKER_ROLE),
    70: ("controller_id", CONTROLLER),
}
ROLE_REQUESTS = frozenset((*_BY_FIELD, ApiKey.BEGIN_QUORUM_EPOCH))
ROLE_RESPONSES = frozenset((ApiKey.METADATA, ApiKey.DESCRIBE_QUORUM, ApiKey.DESCRIBE_CLUSTER))
TOKEN_RESPONSES = frozenset((ApiKey.CREATE_DELEGATION_TOKEN, ApiKey.DESCRIBE_DELEGATION_TOKEN))

NodeRole = tuple[int, str, str | None]  # node_id, role, cluster_id if the message has it
AddTopic = Callable[[str, str, int, str], None]  # name, id, time in ns, API


def roles(api_key: int, side: int, body: pa.StructArray) -> Iterator[NodeRole]:
    """Roles of nodes, from messages of ROLE_REQUESTS (side 0) or ROLE_RESPONSES (side 1)."""
    if side == REQUEST and api_key in _BY_FIELD:
        name, role = _BY_FIELD[api_key]
        nodes: Iterable[int | None] = pc.unique(body.field(name)).to_pylist()
        yield from ((node, role, None) for node in nodes if node is not None and node >= 0)
    elif api_key in (ApiKey.METADATA, ApiKey.DESCRIBE_CLUSTER):
        yield from _listed(api_key, body)
    elif api_key == ApiKey.DESCRIBE_QUORUM:
        voters = _nested(body, "topics", "partitions", "current_voters").field("replica_id")
        yield from ((node, CONTROLLER, None) for node in pc.unique(voters).to_pylist())
    elif api_key == ApiKey.BEGIN_QUORUM_EPOCH:
        leaders = _nested(body, "topics", "partitions").field("leader_id")
        for node in pc.unique(leaders).to_pylist() + pc.unique(body.field("voter_id")).to_pylist():
            if node is not None and node >= 0:
                yield node, CONTROLLER, None


def _listed(api_key: int, body: pa.StructArray) -> Iterator[NodeRole]:
    brokers = body.field("brokers")
    flat = brokers.flatten()
    if not len(flat):
        return
    parents = pc.list_parent_indices(brokers)
    role = pa.array([BROKER_ROLE] * len(flat))
    if api_key == ApiKey.DESCRIBE_CLUSTER:
        kind = pc.fill_null(body.field("endpoint_type"), 0).take(parents)
        role = pc.if_else(pc.equal(kind, CONTROLLER_ENDPOINTS), CONTROLLER, BROKER_ROLE)
    name = "broker_id" if api_key == ApiKey.DESCRIBE_CLUSTER else "node_id"
    rows = pa.table(
        {"node": flat.field(name), "role": role, "cluster": body.field("cluster_id").take(parents)}
    )
    for row in rows.group_by(rows.column_names, use_threads=False).aggregate([]).to_pylist():
        yield row["node"], row["role"], row["cluster"]


def _nested(body: pa.StructArray, *names: str) -> pa.StructArray:
    """The innermost structs of nested lists of structs, flattened."""
    for name in names:
        body = body.field(name).flatten()
    return body


def roles_by_node(
    node_roles: set[NodeRole], clusters: set[str | None]
) -> dict[tuple[int, str | None], Any]:
    """(node, cluster id) -> sorted roles.

    A message without a cluster id counts for every cluster if the captures show only one.
    """
    role_names: dict[tuple[int, str | None], set[str]] = {}
    is_one = len(clusters - {None}) <= 1
    for node, role, cluster in node_roles:
        for cluster_id in clusters if is_one else {cluster}:
            role_names.setdefault((node, cluster_id), set()).add(role)
    return {key: sorted(names) for key, names in role_names.items()}


def token_owners(api_key: int, body: pa.StructArray) -> Iterator[tuple[str, str]]:
    """(token id, owner such as "User:alice") from responses of TOKEN_RESPONSES (KIP-48)."""
    rows = (
        body.to_pylist()
        if api_key == ApiKey.CREATE_DELEGATION_TOKEN
        else body.field("tokens").flatten().to_pylist()
    )
    for row in rows:
        if row is not None and row["token_id"] and row["principal_name"]:
            yield row["token_id"], f"{row['principal_type']}:{row['principal_name']}"


# -- Envelopes ------------------------------------------------------------------------------


def learn_envelopes(
    assembly: Assembly,
    sources: Sources,
    topic_messages: frozenset[tuple[int, int]],
    add_topic: AddTopic,
) -> None:
    """Pass the name and id of every topic inside Envelopes to `add_topic`.

    topic_messages: (api key, side) of messages that hold both a name and an id.
    """
    exchanges = assembly.exchanges
    rows = np.flatnonzero(
        (exchanges["api_key"] == ApiKey.ENVELOPE)
        & (exchanges["request"]["is_whole"] != 0)
        & (exchanges["response"]["is_whole"] != 0)
    )
    for start in range(0, len(rows), _ENVELOPES):
        _read(
            FrameBuffer.gather(assembly, sources, rows[start : start + _ENVELOPES]),
            topic_messages,
            add_topic,
        )


_ENVELOPES = 256  # at a time; an administrator's requests


def _read(
    frames: FrameBuffer, topic_messages: frozenset[tuple[int, int]], add_topic: AddTopic
) -> None:
    whole = [frames.readable(ApiKey.ENVELOPE, side) for side in (REQUEST, RESPONSE)]
    chosen = np.intersect1d(whole[REQUEST], whole[RESPONSE], assume_unique=True)
    if not len(chosen):
        return
    bodies = [frames.decode(ApiKey.ENVELOPE, side, chosen).body for side in (REQUEST, RESPONSE)]
    request_data, response_data = bodies[0].field("request_data"), bodies[1].field("response_data")
    for at, row in enumerate(chosen.tolist()):
        pair = _inner(request_data[at].as_py(), response_data[at].as_py(), topic_messages)
        for side, message in enumerate(pair):
            if message is None or (message.api_key, side) not in topic_messages:
                continue
            column = frames.exchanges[row]["request" if side == REQUEST else "response"]
            for name, topic_id in _topics(message.body):
                add_topic(name, topic_id, int(column["time_ns"]), message.api_name)


def _inner(
    request_data: bytes | None,
    response_data: bytes | None,
    topic_messages: frozenset[tuple[int, int]],
) -> tuple[Message | None, Message | None]:
    """The request and response inside an Envelope; None if one does not decode or is not in
    `topic_messages`."""
    if not request_data or len(request_data) < 4:
        return None, None
    key = int.from_bytes(request_data[:2], "big", signed=True)
    if not {(key, REQUEST), (key, RESPONSE)} & topic_messages or key not in catalog.apis():
        return None, None
    request = response = None
    version = int.from_bytes(request_data[2:4], "big", signed=True)
    try:
        if (key, REQUEST) in topic_messages:
            request = decode_message(request_data, side="request")
        if (key, RESPONSE) in topic_messages and response_data:
            response = decode_message(
                response_data, side="response", api_key=key, api_version=version
            )
    except DecodeError:
        return None, None
    return request, response


def _topics(value: Any) -> Iterator[tuple[str, str]]:
    """(name, id text) of each struct that has both."""
    if isinstance(value, list):
        for item in value:
            yield from _topics(item)
    elif isinstance(value, dict):
        ident = value.get("topic_id")
        name = value.get("name", value.get("topic_name", value.get("topic")))
        if ident is not None and ident.int and isinstance(name, str) and name:
            text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            yield text, str(jsonable(ident))
        for item in value.values():
            yield from _topics(item)
