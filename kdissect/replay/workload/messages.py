"""Decodes messages of a workload; has the lists of APIs and errors that all of replay uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from functools import lru_cache
from typing import Any
from uuid import UUID

from kdissect.codec.message import Message, decode_message
from kdissect.codec.message_codec import read_int16
from kdissect.errors import DecodeError
from kdissect.kafka.assembly import NO_API
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import SASL_TOKEN
from kdissect.protocol.error_codes import ErrorCode
from kdissect.protocol.model import Side
from kdissect.replay.model import Exchange, WorkloadFacts

Body = dict[str, Any]

_PARTITION_ARRAYS = ("partitions", "partition_data", "partition_responses")
_KEPT_SIZE_MAX = 4096  # bytes of a frame; larger ones have records, which would be there twice
_PARTITION_NUMBERS = ("partition_index", "index", "partition")

GROUP_KEY, TRANSACTION_KEY = 0, 1  # key types of FindCoordinator
EARLIEST, LATEST = -2, -1  # timestamps of ListOffsets
TOPIC_RESOURCE = 2  # resource type of configs
TOPIC_CONFIG = 1  # config_source: set on the topic itself


def apis(names: str) -> frozenset[int]:
    """The keys of APIs: ``"Produce Fetch"``."""
    return frozenset(catalog.api(name).key for name in names.split())


def codes(names: str) -> frozenset[int]:
    """Error codes: ``"NOT_COORDINATOR NOT_CONTROLLER"``."""
    return frozenset(ErrorCode[name] for name in names.split())


# Of these, only names that the run made itself go through without `--allow delete-existing`.
DELETING_APIS = apis("DeleteTopics DeleteRecords DeleteGroups OffsetDelete DeleteShareGroupOffsets")
# The target's own conversation: the runner authenticates with the target's options.
TARGET_OWN_APIS = apis("SaslHandshake SaslAuthenticate")
# Of members whose partitions the broker assigns (KIP-848, KIP-932, KIP-1071).
MEMBER_HEARTBEATS = apis("ConsumerGroupHeartbeat ShareGroupHeartbeat StreamsGroupHeartbeat")
# Their answers may wait for what others send.
BLOCKING_APIS = apis("Fetch JoinGroup SyncGroup ShareFetch")
SHARE_APIS = apis("ShareFetch ShareAcknowledge")  # in share sessions
# Of a topic in Metadata, if the request makes it.
NOT_MADE_YET = codes("UNKNOWN_TOPIC_OR_PARTITION LEADER_NOT_AVAILABLE")
# The client of a Fetch opens another session (KIP-227).
SESSION_LOST = codes(
    "FETCH_SESSION_ID_NOT_FOUND INVALID_FETCH_SESSION_EPOCH FETCH_SESSION_TOPIC_ID_ERROR"
)


def api_name(api_key: int) -> str:
    if api_key == NO_API:
        return SASL_TOKEN
    try:
        return catalog.api(api_key).name
    except ValueError:
        return f"Api{api_key}"


def request_of(exchange: Exchange) -> Message | None:
    """The decoded request; None if it was not captured or cannot be decoded. It is shared: do not
    change it."""
    return _captured(exchange, "request", exchange.request)


def response_of(exchange: Exchange) -> Message | None:
    """The same of the captured response."""
    return _captured(exchange, "response", exchange.response)


def _captured(exchange: Exchange, side: Side, frame: bytes | None) -> Message | None:
    """The decoded frame. All parts of a replay look at it, so a small one stays in the exchange."""
    if side in exchange.decoded:
        return exchange.decoded[side]
    message = decoded(frame, side, exchange.api_key, exchange.api_version)
    if frame is None or len(frame) <= _KEPT_SIZE_MAX:
        exchange.decoded[side] = message
    return message


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


def decoded(frame: bytes | None, side: Side, api_key: int, api_version: int) -> Message | None:
    """The decoded frame; None if there is none, or it cannot be decoded. It is shared: do not
    change it."""
    found = "" if frame is None else decoding(frame, side, api_key, api_version)
    return None if isinstance(found, str) else found


@lru_cache(8)  # several rules look at one message before the next comes
def decoding(frame: bytes, side: Side, api_key: int, api_version: int) -> Message | str:
    """The decoded frame, or why it cannot be decoded."""
    try:
        return decode_message(frame, side=side, api_key=api_key, api_version=api_version)
    except (DecodeError, ValueError) as error:
        return str(error)


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
            yield topic, partition_number(each), each


def partition_number(partition: Body) -> int:
    """The number in the struct of a partition."""
    return next(int(partition[name]) for name in _PARTITION_NUMBERS if name in partition)


class MessageTopics:
    """The captured names of topics in the messages of one side.

    `tables.topics.TopicNames` does that for columns of id texts. This one reads struct after
    struct, while the target teaches ids during the run.

    by_id: names there, by the ids of topics. captured: the captured name for one of that side.
    """

    def __init__(
        self, by_id: MutableMapping[UUID, str], captured: Callable[[str], str] = lambda name: name
    ) -> None:
        self.by_id, self._captured = by_id, captured

    def name(self, name: str | None, topic_id: UUID | None) -> str:
        """The captured name of a topic that a message names or identifies; an unknown id as
        text."""
        if not name and topic_id is not None and topic_id.int:
            name = self.by_id.get(topic_id)
            if name is None:
                return str(topic_id)
        return self._captured(name or "")

    def of(self, topic: Body) -> str:
        """The name of a topic's struct."""
        return self.name(topic.get("name") or topic.get("topic"), topic.get("topic_id"))

    def logs(self, body: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], Body]]:
        """(the topic's name, number) of each of `partitions`, and its struct."""
        for topic, number, partition in partitions(body):
            yield (self.of(topic), number), partition


def captured_topics(facts: WorkloadFacts) -> MessageTopics:
    """The names of topics in captured messages."""
    topics = facts.topics.values()
    return MessageTopics({UUID(each): topic.name for topic in topics for each in topic.topic_ids})


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

_EVERY = " ".join(each.name for each in catalog.apis().values())
_REJOINING = "SyncGroup OffsetCommit OffsetFetch"
_OF_TOPICS = "CreateTopics DeleteTopics CreatePartitions"
_NO_TOPIC = "UNKNOWN_TOPIC_OR_PARTITION UNKNOWN_TOPIC_ID INCONSISTENT_TOPIC_ID"
# Error codes, the APIs whose clients repeat the request, and those where it has had no effect, so
# that the plan leaves it out.
_TRANSIENT = (
    # a leader, a coordinator or the controller is another one, or is not ready
    (
        "LEADER_NOT_AVAILABLE NOT_LEADER_OR_FOLLOWER COORDINATOR_LOAD_IN_PROGRESS "
        "COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR NOT_CONTROLLER LISTENER_NOT_FOUND "
        "FENCED_LEADER_EPOCH UNKNOWN_LEADER_EPOCH OFFSET_NOT_AVAILABLE",
        _EVERY,
        _EVERY,
    ),
    # Produce also returns the first if a transaction cannot be verified yet (KIP-890)
    ("NOT_ENOUGH_REPLICAS CONCURRENT_TRANSACTIONS", _EVERY, _EVERY),
    ("REPLICA_NOT_AVAILABLE KAFKA_STORAGE_ERROR", _EVERY, ""),
    # a topic or partition that was just made; in the capture it may never have been there
    (_NO_TOPIC, _EVERY, ""),
    # a group has another generation by now, or will have one
    ("REBALANCE_IN_PROGRESS STALE_MEMBER_EPOCH", _REJOINING, "OffsetCommit"),
    ("ILLEGAL_GENERATION", _REJOINING, ""),
    # the coordinator has forgotten the id of a member, and gives it another one (KIP-394)
    ("UNKNOWN_MEMBER_ID MEMBER_ID_REQUIRED", "JoinGroup", ""),
    # batches before it are sent again themselves
    ("OUT_OF_ORDER_SEQUENCE_NUMBER", "Produce", ""),
    # a transaction has not ended yet (KIP-447)
    ("UNSTABLE_OFFSET_COMMIT", "OffsetFetch", ""),
    # KIP-599; a push of telemetry before its interval is over (KIP-714)
    (
        "THROTTLING_QUOTA_EXCEEDED",
        f"{_OF_TOPICS} GetTelemetrySubscriptions PushTelemetry",
        _OF_TOPICS,
    ),
)
_REPEATED = {code: apis(again) for names, again, _ in _TRANSIENT for code in codes(names)}
_REFUSED = {code: apis(refused) for names, _, refused in _TRANSIENT for code in codes(names)}
NO_TOPIC = codes(_NO_TOPIC)
# a member joins again before, or gets another epoch with a heartbeat (KIP-848)
REJOINING_APIS = apis(_REJOINING)


def is_transient(api_key: int, code: int) -> bool:
    """Return whether clients send a request of this API again after this code."""
    return api_key in _REPEATED.get(code, ())


def are_refusals(api_key: int, found: Collection[int]) -> bool:
    """Return whether an answer with these codes means that the request has had no effect."""
    return bool(found) and all(api_key in _REFUSED.get(code, ()) for code in found)
