"""Roles of clients (producer, consumer, group member, ...), and the APIs that each needs.

A client that shows a role but did not send an API that the role needs has not proved that it works.
For example, a consumer that joins its group and never fetches may lack a Fetch version. Only APIs
that every such client sends count as needed. ListOffsets does not: a consumer that resumes from
committed offsets never sends it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from kdissect.protocol.api_keys import ApiKey

CONSUMER_PROTOCOL = "consumer"  # protocol_type of consumers; Connect workers have another


@dataclass(frozen=True)
class ClientRole:
    """A client that sends one of `shown_by` will also send all of `needs`."""

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
            ApiKey.TXN_OFFSET_COMMIT
        }
    ),
    (
        ApiKey.METADATA, ApiKey.FIND_COORDINATOR, ApiKey.INIT_PRODUCER_ID, ApiKey.PRODUCE,
        ApiKey.END_TXN
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

# Consumers send these; administrators and monitors send them beside other requests.
_OFFSET_APIS = frozenset(
    {
        ApiKey.LIST_OFFSETS, ApiKey.OFFSET_COMMIT, ApiKey.OFFSET_FETCH,
        ApiKey.OFFSET_FOR_LEADER_EPOCH
    }
)  # fmt: skip
# Clients of all roles send these, so they indicate none. LeaveGroup also removes others (KIP-345).
_COMMON_APIS = frozenset(
    {
        ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE, ApiKey.METADATA,
        ApiKey.FIND_COORDINATOR, ApiKey.LEAVE_GROUP, ApiKey.GET_TELEMETRY_SUBSCRIPTIONS,
        ApiKey.PUSH_TELEMETRY
    }
)  # fmt: skip


def find_roles(api_keys: Set[int], protocol_types: Set[str]) -> list[ClientRole]:
    """The roles of a client, from the APIs that it sends and the groups that it joins."""
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
    """API key -> role that needs it; None if no role was seen, so that it may be needed."""
    return {
        int(key): role.name if roles else None
        for role in reversed(roles or [_PRODUCER, _GROUP_CONSUMER])
        for key in role.needs
    }
