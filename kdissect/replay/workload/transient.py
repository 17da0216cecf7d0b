"""Error codes that mean "not yet" or "not here": Kafka's clients send the request again after them.

One table serves the plan, which leaves out what the captured broker refused so, since the client
has sent it again, and the run, which sends a request again if the target refuses it so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode

_FETCHES = frozenset({ApiKey.FETCH})
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
    # a client opens another fetch session (KIP-227)
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND: Transient(_FETCHES, _NONE),
    ErrorCode.INVALID_FETCH_SESSION_EPOCH: Transient(_FETCHES, _NONE),
    ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR: Transient(_FETCHES, _NONE),
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
SESSION_LOST = frozenset(code for code, row in TRANSIENT.items() if row.apis == _FETCHES)


def is_transient(api_key: int, code: int) -> bool:
    """Return whether clients send a request of this API again after this code."""
    row = TRANSIENT.get(code)
    return row is not None and (row.apis is None or api_key in row.apis)


def are_refusals(api_key: int, codes: Iterable[int]) -> bool:
    """Return whether an answer with these codes means that the request has had no effect."""
    codes = list(codes)
    return bool(codes) and all(_is_refusal(api_key, code) for code in codes)


def _is_refusal(api_key: int, code: int) -> bool:
    row = TRANSIENT.get(code)
    return row is not None and (row.refused_apis is None or api_key in row.refused_apis)
