"""Decoded messages of a workload, and what is asked of each API everywhere in replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kdissect.codec.message import Message
from kdissect.codec.message_codec import read_int16, read_string
from kdissect.codec.message_forms import decode_alike
from kdissect.errors import DecodeError
from kdissect.protocol import catalog
from kdissect.replay.model import ADMIN, GROUPS, PRODUCE, READ, TRANSACTIONS, Exchange

NO_API = -1  # a raw SASL token, or a response that says nothing of its request
SASL_TOKEN = "SaslToken"
_NO_CLIENT_ID = b"\x00\x07\x00\x00"  # ControlledShutdown v0

PRODUCE_API, FETCH, LIST_OFFSETS, METADATA = 0, 1, 2, 3
OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR, JOIN_GROUP, HEARTBEAT = 8, 9, 10, 11, 12
LEAVE_GROUP, SYNC_GROUP, DESCRIBE_GROUPS, LIST_GROUPS, SASL_HANDSHAKE = 13, 14, 15, 16, 17
API_VERSIONS, CREATE_TOPICS, DELETE_TOPICS, DELETE_RECORDS, INIT_PRODUCER_ID = 18, 19, 20, 21, 22
OFFSET_FOR_LEADER_EPOCH, ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN = 23, 24, 25, 26
WRITE_TXN_MARKERS, TXN_OFFSET_COMMIT, DESCRIBE_ACLS, CREATE_ACLS, DELETE_ACLS = 27, 28, 29, 30, 31
DESCRIBE_CONFIGS, ALTER_CONFIGS, ALTER_REPLICA_LOG_DIRS, DESCRIBE_LOG_DIRS = 32, 33, 34, 35
SASL_AUTHENTICATE, CREATE_PARTITIONS, CREATE_DELEGATION_TOKEN = 36, 37, 38
RENEW_DELEGATION_TOKEN, EXPIRE_DELEGATION_TOKEN, DESCRIBE_DELEGATION_TOKEN = 39, 40, 41
DELETE_GROUPS, ELECT_LEADERS, INCREMENTAL_ALTER_CONFIGS = 42, 43, 44
ALTER_PARTITION_REASSIGNMENTS, LIST_PARTITION_REASSIGNMENTS, OFFSET_DELETE = 45, 46, 47
DESCRIBE_CLIENT_QUOTAS, ALTER_CLIENT_QUOTAS = 48, 49
DESCRIBE_USER_SCRAM_CREDENTIALS, ALTER_USER_SCRAM_CREDENTIALS = 50, 51
DESCRIBE_QUORUM, UPDATE_FEATURES, ENVELOPE, DESCRIBE_CLUSTER, DESCRIBE_PRODUCERS = (
    55,
    57,
    58,
    60,
    61,
)
UNREGISTER_BROKER, DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS = 64, 65, 66
CONSUMER_GROUP_HEARTBEAT, CONSUMER_GROUP_DESCRIBE = 68, 69
GET_TELEMETRY_SUBSCRIPTIONS, PUSH_TELEMETRY, LIST_CONFIG_RESOURCES = 71, 72, 74
DESCRIBE_TOPIC_PARTITIONS, SHARE_GROUP_HEARTBEAT, SHARE_GROUP_DESCRIBE = 75, 76, 77
SHARE_FETCH, SHARE_ACKNOWLEDGE, ADD_RAFT_VOTER, REMOVE_RAFT_VOTER = 78, 79, 80, 81
STREAMS_GROUP_HEARTBEAT, STREAMS_GROUP_DESCRIBE = 88, 89
DESCRIBE_SHARE_GROUP_OFFSETS, ALTER_SHARE_GROUP_OFFSETS, DELETE_SHARE_GROUP_OFFSETS = 90, 91, 92

# Requests that only brokers and controllers send; never replayed. Admin clients can send
# WriteTxnMarkers (abortTransaction), but its producer ids and epochs are a coordinator's.
INTERNAL_APIS = frozenset(
    {4, 5, 6, 7, 27, 52, 53, 54, 56, 58, 59, 62, 63, 67, 70, 73, 80, 81, 82, 83, 84, 85, 86, 87}
)
# Of these, the ones whose connection is a broker's as a whole: a client may be behind the others.
INTERNAL_CONNECTION_APIS = INTERNAL_APIS - {80, 81}
# Only a controller's own listener is asked these.
CONTROLLER_LISTENER_APIS = frozenset({52, 53, 54, 59, 62, 63, 70, 82})
# The target's own conversation: the runner authenticates with the target's options.
TARGET_OWN_APIS = frozenset({SASL_HANDSHAKE, SASL_AUTHENTICATE})

_CLASS_APIS = {
    PRODUCE: (PRODUCE_API,),
    GROUPS: (
        OFFSET_COMMIT, JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP,
        CONSUMER_GROUP_HEARTBEAT, SHARE_GROUP_HEARTBEAT, SHARE_FETCH, SHARE_ACKNOWLEDGE,
        STREAMS_GROUP_HEARTBEAT,
    ),
    TRANSACTIONS: (
        INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN, TXN_OFFSET_COMMIT,
    ),
    READ: (
        FETCH, LIST_OFFSETS, METADATA, OFFSET_FETCH, FIND_COORDINATOR, DESCRIBE_GROUPS, LIST_GROUPS,
        API_VERSIONS, OFFSET_FOR_LEADER_EPOCH, DESCRIBE_ACLS, DESCRIBE_CONFIGS, DESCRIBE_LOG_DIRS,
        DESCRIBE_DELEGATION_TOKEN, LIST_PARTITION_REASSIGNMENTS, DESCRIBE_CLIENT_QUOTAS,
        DESCRIBE_USER_SCRAM_CREDENTIALS, DESCRIBE_QUORUM, DESCRIBE_CLUSTER, DESCRIBE_PRODUCERS,
        DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS, CONSUMER_GROUP_DESCRIBE,
        GET_TELEMETRY_SUBSCRIPTIONS, LIST_CONFIG_RESOURCES, DESCRIBE_TOPIC_PARTITIONS,
        SHARE_GROUP_DESCRIBE, STREAMS_GROUP_DESCRIBE, DESCRIBE_SHARE_GROUP_OFFSETS,
    ),
}  # fmt: skip
_CLASS_OF = {key: name for name, keys in _CLASS_APIS.items() for key in keys}
# The answer may wait for what others send.
BLOCKING_APIS = frozenset({FETCH, JOIN_GROUP, SYNC_GROUP, SHARE_FETCH})


# Errors that say "not yet" or "not here": a client asks again, so does a replay.
# (19, too few replicas, is also how Produce tells that a transaction cannot be verified yet.)
REFUSED = frozenset({5, 6, 14, 15, 16, 19, 41, 51, 72, 74, 75, 76})
NO_TOPIC = frozenset({3, 100, 103})  # when the target has just made it
TRANSIENT = REFUSED | NO_TOPIC | {9, 56}
# Of a Fetch: session id not found, wrong epoch, a topic id changed; a client opens another session.
SESSION_LOST = frozenset({70, 71, 106})
OUT_OF_SEQUENCE = 45  # of a Produce: batches before it did not come


def step_class(api_key: int) -> str:
    """Class of an API: everything that changes something and is in no other class is admin."""
    return _CLASS_OF.get(api_key, ADMIN)


def api_name(api_key: int) -> str:
    if api_key == NO_API:
        return SASL_TOKEN
    try:
        return catalog.api(api_key).name
    except ValueError:
        return f"Api{api_key}"


def request_of(exchange: Exchange) -> Message | None:
    """The decoded request; None where it is not there, or cannot be decoded."""
    return _decoded(exchange, exchange.request, "request")


def response_of(exchange: Exchange) -> Message | None:
    """The decoded captured response; None where it is not there, or cannot be decoded."""
    return _decoded(exchange, exchange.response, "response")


def _decoded(exchange: Exchange, frame: bytes | None, side: str) -> Message | None:
    if frame is None or exchange.api_key == NO_API:
        return None
    try:
        return decode_alike(
            frame, side=side, api_key=exchange.api_key, api_version=exchange.api_version
        )
    except (DecodeError, ValueError):
        return None


def expects_response(api_key: int, frame: bytes | None) -> bool:
    """False for a Produce with acks 0, whatever its version."""
    if api_key != PRODUCE_API or frame is None:
        return True
    try:
        api_version = read_int16(frame, 2)[0]
        body = decode_alike(frame, side="request", api_key=api_key, api_version=api_version).body
    except (DecodeError, ValueError):
        return True
    return bool(body["acks"] != 0)


def header_of(frame: bytes) -> tuple[int, int, int]:
    """(api_key, api_version, correlation_id) of a request's frame. Raises DecodeError."""
    api_key, pos = read_int16(frame, 0)
    api_version, pos = read_int16(frame, pos)
    if len(frame) < 8:
        raise DecodeError("bytes end inside a request's header", pos=pos)
    return api_key, api_version, int.from_bytes(frame[4:8], "big", signed=True)


def client_id_of(frame: bytes) -> str | None:
    """The client id of a request's header; None where it is null, or is not there."""
    if frame[:4] == _NO_CLIENT_ID:
        return None
    try:
        return read_string(frame, 8, True)[0]
    except DecodeError:
        return None


def entries(value: Any) -> list[Any]:
    """An array's elements; those of null are none."""
    return value if isinstance(value, list) else []


def error_codes(value: Any) -> Iterator[int]:
    """Every error code of a body, zero included, in wire order."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, int) and name.endswith("error_code"):
                yield inner
            elif isinstance(inner, (dict, list)):
                yield from error_codes(inner)
    elif isinstance(value, list):
        for each in value:
            yield from error_codes(each)
