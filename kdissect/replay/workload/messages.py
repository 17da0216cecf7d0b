"""Decodes messages of a workload; has the lists of APIs and errors that all of replay uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from kdissect.codec.message import Message, decode_message
from kdissect.codec.message_codec import read_int16
from kdissect.errors import DecodeError
from kdissect.kafka.assembly import NO_API
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import Exchange, WorkloadFacts

Body = dict[str, Any]

_SASL_TOKEN = "SaslToken"
_PARTITION_ARRAYS = ("partitions", "partition_data", "partition_responses")
_PARTITION_NUMBERS = ("partition_index", "index", "partition")

GROUP_KEY, TRANSACTION_KEY = 0, 1  # key types of FindCoordinator
EARLIEST, LATEST = -2, -1  # timestamps of ListOffsets
TOPIC_RESOURCE = 2  # resource type of configs
TOPIC_CONFIG = 1  # config_source: set on the topic itself


# Of these, only names that the run made itself go through without `--allow delete-existing`.
DELETING_APIS = frozenset(
    {
        ApiKey.DELETE_TOPICS, ApiKey.DELETE_RECORDS, ApiKey.DELETE_GROUPS, ApiKey.OFFSET_DELETE,
        ApiKey.DELETE_SHARE_GROUP_OFFSETS,
    }
)  # fmt: skip
# The target's own conversation: the runner authenticates with the target's options.
TARGET_OWN_APIS = frozenset({ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE})

# Of a topic in Metadata, if the request makes it.
NOT_MADE_YET = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.LEADER_NOT_AVAILABLE})
# Of members whose partitions the broker assigns (KIP-848, KIP-932, KIP-1071).
MEMBER_HEARTBEATS = frozenset(
    {ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.STREAMS_GROUP_HEARTBEAT}
)
SHARE_APIS = frozenset({ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE})  # in share sessions


def api_name(api_key: int) -> str:
    if api_key == NO_API:
        return _SASL_TOKEN
    try:
        return catalog.api(api_key).name
    except ValueError:
        return f"Api{api_key}"


def request_of(exchange: Exchange) -> Message | None:
    """The decoded request; None if it was not captured or cannot be decoded. It is shared: do not
    change it."""
    return _message(exchange, exchange.request, "request")


def response_of(exchange: Exchange) -> Message | None:
    """The same of the captured response."""
    return _message(exchange, exchange.response, "response")


def _message(exchange: Exchange, frame: bytes | None, side: str) -> Message | None:
    if frame is None or exchange.api_key == NO_API:
        return None
    return decoded(frame, side, exchange.api_key, exchange.api_version)


def bodies(exchange: Exchange) -> tuple[Body, Body]:
    """The bodies of the captured request and response; empty if one was not captured, or cannot be
    decoded. They are shared: do not change them."""
    return request_body(exchange), response_body(exchange)


def request_body(exchange: Exchange) -> Body:
    request = request_of(exchange)
    return {} if request is None else request.body


def response_body(exchange: Exchange) -> Body:
    response = response_of(exchange)
    return {} if response is None else response.body


def member_of(exchange: Exchange) -> tuple[str, str]:
    """The group and member id of a member's request; older brokers choose the id of one that joins,
    so that only the response has it. Both are "" if the request has none."""
    request, response = bodies(exchange)
    groups = request.get("groups")  # of an OffsetFetch
    named = groups[0] if groups and isinstance(groups[0], dict) else request
    return named.get("group_id", ""), named.get("member_id") or response.get("member_id") or ""


@lru_cache(8)  # several rules look at one message before the next comes
def decoded(frame: bytes, side: str, api_key: int, api_version: int) -> Message | None:
    """The decoded frame; None if it cannot be decoded. It is shared: do not change it."""
    try:
        return decode_message(frame, side=side, api_key=api_key, api_version=api_version)
    except (DecodeError, ValueError):
        return None


def api_of(frame: bytes) -> tuple[int, int]:
    """(api_key, api_version) of a request's frame. Raises DecodeError."""
    return read_int16(frame, 0)[0], read_int16(frame, 2)[0]


def entries(value: Any) -> list[Any]:
    """An array's elements; those of null are none."""
    return value if isinstance(value, list) else []


def partitions(body: Mapping[str, Any]) -> Iterator[tuple[Body, int, Body]]:
    """(the topic's struct, number, own struct) of each partition in a message about records or
    offsets."""
    topics = body.get("topic_data") or body.get("responses") or body.get("topics")
    for topic in entries(topics):
        found = next((topic[name] for name in _PARTITION_ARRAYS if name in topic), ())
        for each in found or ():
            yield topic, next(each[name] for name in _PARTITION_NUMBERS if name in each), each


class TopicNames(ABC):
    """The captured names of topics in the messages of one side."""

    @abstractmethod
    def name(self, name: str | None, topic_id: UUID | None) -> str:
        """The captured name of a topic that a message names or identifies; an unknown id as
        text."""

    def of(self, topic: Body) -> str:
        """The name of a topic's struct."""
        return self.name(topic.get("name") or topic.get("topic"), topic.get("topic_id"))

    def logs(self, body: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], Body]]:
        """(the topic's name, number) of each of `partitions`, and its struct."""
        for topic, number, partition in partitions(body):
            yield (self.of(topic), number), partition


class CapturedTopics(TopicNames, dict[UUID, str]):
    """In captured messages: the names of topics by their ids."""

    def __init__(self, facts: WorkloadFacts) -> None:
        topics = facts.topics.values()
        super().__init__((UUID(each), topic.name) for topic in topics for each in topic.topic_ids)

    def name(self, name: str | None, topic_id: UUID | None) -> str:
        if name or topic_id is None or topic_id.int == 0:
            return name or ""
        return self.get(topic_id, str(topic_id))


def errors(body: Body, *around: Body) -> Iterator[tuple[tuple[Body, ...], str, int]]:
    """(the structs around it from the body on, its field, the code) of every error code of a body,
    zero included, in wire order."""
    for name, inner in body.items():
        if isinstance(inner, int) and name.endswith("error_code"):
            yield (*around, body), name, inner
        for each in inner if isinstance(inner, list) else [inner]:
            if isinstance(each, dict):
                yield from errors(each, *around, body)


def error_codes(body: Body) -> list[int]:
    return [code for _, _, code in errors(body)]


# -- errors after which clients send a request again ----------------------------------------------
#
# They mean "not yet" or "not here". One table serves the plan, which leaves out what the captured
# broker refused so, since the client has sent it again, and the run, which sends a request again if
# the target refuses it so.

_COMMITS = frozenset({ApiKey.OFFSET_COMMIT})
# a member joins again before, or gets another epoch with a heartbeat (KIP-848)
REJOINING_APIS = frozenset({ApiKey.SYNC_GROUP, ApiKey.OFFSET_COMMIT, ApiKey.OFFSET_FETCH})
_TOPIC_APIS = frozenset({ApiKey.CREATE_TOPICS, ApiKey.DELETE_TOPICS, ApiKey.CREATE_PARTITIONS})
_TELEMETRY_APIS = frozenset({ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY})


class Transient(NamedTuple):
    """apis: those whose clients repeat the request; None: all. refused_apis: those where it has had
    no effect, so that the plan leaves it out; None: all."""

    apis: frozenset[int] | None = None
    refused_apis: frozenset[int] | None = None


_NONE: frozenset[int] = frozenset()
_EVERYWHERE, _NEVER_LEFT_OUT = Transient(), Transient(None, _NONE)
TRANSIENT: dict[int, Transient] = {
    # a leader, a coordinator or the controller is another one, or is not ready
    ErrorCode.LEADER_NOT_AVAILABLE: _EVERYWHERE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: _EVERYWHERE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: _EVERYWHERE,
    ErrorCode.COORDINATOR_NOT_AVAILABLE: _EVERYWHERE,
    ErrorCode.NOT_COORDINATOR: _EVERYWHERE,
    ErrorCode.NOT_CONTROLLER: _EVERYWHERE,
    ErrorCode.LISTENER_NOT_FOUND: _EVERYWHERE,
    ErrorCode.FENCED_LEADER_EPOCH: _EVERYWHERE,
    ErrorCode.UNKNOWN_LEADER_EPOCH: _EVERYWHERE,
    ErrorCode.OFFSET_NOT_AVAILABLE: _EVERYWHERE,
    # Produce also returns it if a transaction cannot be verified yet (KIP-890)
    ErrorCode.NOT_ENOUGH_REPLICAS: _EVERYWHERE,
    ErrorCode.CONCURRENT_TRANSACTIONS: _EVERYWHERE,
    ErrorCode.REPLICA_NOT_AVAILABLE: _NEVER_LEFT_OUT,
    ErrorCode.KAFKA_STORAGE_ERROR: _NEVER_LEFT_OUT,
    # a topic or partition that was just made; in the capture it may never have been there
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: _NEVER_LEFT_OUT,
    ErrorCode.UNKNOWN_TOPIC_ID: _NEVER_LEFT_OUT,
    ErrorCode.INCONSISTENT_TOPIC_ID: _NEVER_LEFT_OUT,
    # a group has another generation by now, or will have one
    ErrorCode.REBALANCE_IN_PROGRESS: Transient(REJOINING_APIS, _COMMITS),
    ErrorCode.ILLEGAL_GENERATION: Transient(REJOINING_APIS, _NONE),
    ErrorCode.STALE_MEMBER_EPOCH: Transient(REJOINING_APIS, _COMMITS),
    # batches before it are sent again themselves
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER: Transient(frozenset({ApiKey.PRODUCE}), _NONE),
    # a transaction has not ended yet (KIP-447)
    ErrorCode.UNSTABLE_OFFSET_COMMIT: Transient(frozenset({ApiKey.OFFSET_FETCH}), _NONE),
    # KIP-599; a push of telemetry before its interval is over (KIP-714)
    ErrorCode.THROTTLING_QUOTA_EXCEEDED: Transient(_TOPIC_APIS | _TELEMETRY_APIS, _TOPIC_APIS),
}  # fmt: skip
NO_TOPIC = frozenset(
    {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INCONSISTENT_TOPIC_ID,
    }
)  # fmt: skip
# The client of a Fetch opens another session (KIP-227).
SESSION_LOST = frozenset(
    {
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND, ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
    }
)  # fmt: skip


def is_transient(api_key: int, code: int) -> bool:
    """Return whether clients send a request of this API again after this code."""
    row = TRANSIENT.get(code)
    return row is not None and (row.apis is None or api_key in row.apis)


def are_refusals(api_key: int, codes: Collection[int]) -> bool:
    """Return whether an answer with these codes means that the request has had no effect."""
    rows = [TRANSIENT.get(code) for code in codes]
    return bool(rows) and all(
        row is not None and (row.refused_apis is None or api_key in row.refused_apis)
        for row in rows
    )
