"""What a client does (produce, consume, join a group, ...), and which APIs that needs.

A client that shows a role without an API that the role needs has not shown that it works: a
consumer that joins its group and never fetches may lack a Fetch version that its broker takes.
Only APIs that every such client sends are needed. ListOffsets, for one, is not: a consumer that
resumes from committed offsets goes without it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from kdissect.protocol.api_keys import ApiKey

CONSUMER_PROTOCOL = "consumer"  # the protocol_type of consumers; Connect's workers have another


@dataclass(frozen=True)
class ClientRole:
    """A client that sends one of `shown_by` sends all of `needs` sooner or later."""

    name: str
    shown_by: frozenset[ApiKey]
    needs: tuple[ApiKey, ...]


_PRODUCER = ClientRole(
    "producer",
    frozenset({ApiKey.PRODUCE, ApiKey.INIT_PRODUCER_ID}),
    (ApiKey.METADATA, ApiKey.PRODUCE),
)
_TRANSACTIONAL_PRODUCER = ClientRole(
    "transactional producer",
    frozenset(
        {
            ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.END_TXN,
            ApiKey.TXN_OFFSET_COMMIT,
        }
    ),
    (
        ApiKey.METADATA, ApiKey.FIND_COORDINATOR, ApiKey.INIT_PRODUCER_ID, ApiKey.PRODUCE,
        ApiKey.END_TXN,
    ),
)  # fmt: skip
_CONSUMER = ClientRole("consumer", frozenset({ApiKey.FETCH}), (ApiKey.METADATA, ApiKey.FETCH))
_MEMBER = ClientRole(
    "group member",
    frozenset({ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT}),
    (ApiKey.FIND_COORDINATOR, ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT),
)
_GROUP_CONSUMER = ClientRole(
    "consumer in a group",
    _MEMBER.shown_by,
    (*_CONSUMER.needs, ApiKey.OFFSET_FETCH, ApiKey.OFFSET_COMMIT),
)
_ROLES = (
    _PRODUCER,
    _TRANSACTIONAL_PRODUCER,
    _CONSUMER,
    _MEMBER,
    ClientRole(
        "consumer of the KIP-848 protocol",
        frozenset({ApiKey.CONSUMER_GROUP_HEARTBEAT}),
        (ApiKey.CONSUMER_GROUP_HEARTBEAT, *_GROUP_CONSUMER.needs),
    ),
    ClientRole(
        "share consumer",
        frozenset({ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE}),
        (ApiKey.METADATA, ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.SHARE_FETCH),
    ),
    ClientRole(
        "streams group member",
        frozenset({ApiKey.STREAMS_GROUP_HEARTBEAT}),
        (ApiKey.STREAMS_GROUP_HEARTBEAT, *_GROUP_CONSUMER.needs),
    ),
)
_ADMINISTRATOR = ClientRole("administrator", frozenset(), ())

# Consumers send these, and so do administrators and monitors beside requests of their own.
_OFFSET_APIS = frozenset(
    {
        ApiKey.LIST_OFFSETS, ApiKey.OFFSET_COMMIT, ApiKey.OFFSET_FETCH,
        ApiKey.OFFSET_FOR_LEADER_EPOCH,
    }
)  # fmt: skip
# Clients of all roles send these, so they show none. LeaveGroup also removes others (KIP-345).
_COMMON_APIS = frozenset(
    {
        ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE, ApiKey.METADATA,
        ApiKey.FIND_COORDINATOR, ApiKey.LEAVE_GROUP, ApiKey.GET_TELEMETRY_SUBSCRIPTIONS,
        ApiKey.PUSH_TELEMETRY,
    }
)  # fmt: skip


def find_roles(api_keys: Set[int], protocol_types: Set[str]) -> list[ClientRole]:
    """The roles of a client by the APIs that it sends and the groups that it joins."""
    roles = [role for role in _ROLES if role.shown_by & api_keys]
    if _MEMBER in roles and (not protocol_types or CONSUMER_PROTOCOL in protocol_types):
        roles.append(_GROUP_CONSUMER)
    others = api_keys - _COMMON_APIS - _OFFSET_APIS
    if others - {key for role in _ROLES for key in (*role.shown_by, *role.needs)}:
        roles.append(_ADMINISTRATOR)
    elif _OFFSET_APIS & api_keys and _CONSUMER not in roles:
        roles.append(_CONSUMER)
    return roles


def needed_apis(roles: list[ClientRole]) -> dict[int, str | None]:
    """API key to the role that needs it; None: no role was seen, and it may turn out to need it."""
    return {
        int(key): role.name if roles else None
        for role in reversed(roles or [_PRODUCER, _GROUP_CONSUMER])
        for key in role.needs
    }
