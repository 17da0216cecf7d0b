"""Roles of clients (producer, consumer, group member, ...), and the APIs that each needs.

A client that shows a role but did not send an API that the role needs has not proved that it works.
For example, a consumer that joins its group and never fetches may lack a Fetch version. Only APIs
that every such client sends count as needed. ListOffsets does not: a consumer that resumes from
committed offsets never sends it.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from kdissect.protocol.api_keys import ApiKey

CONSUMER_PROTOCOL = "consumer"  # protocol_type of consumers; Connect workers have another


class ClientRole(NamedTuple):
    """A client that sends one of `shown_by` will also send all of `needs`."""

    name: str
    shown_by: frozenset[int]
    needs: tuple[int, ...]


def _keys(names: str) -> tuple[int, ...]:
    """Return the keys of some APIs."""
    return tuple(int(ApiKey[name]) for name in names.split())


def _role(name: str, shown_by: str, needs: str) -> ClientRole:
    return ClientRole(name, frozenset(_keys(shown_by)), _keys(needs))


_MEMBERSHIP = "JOIN_GROUP SYNC_GROUP HEARTBEAT"
_READS_IN_GROUP = "METADATA FETCH OFFSET_FETCH OFFSET_COMMIT"
_PRODUCER = _role("producer", "PRODUCE INIT_PRODUCER_ID", "METADATA PRODUCE")
_CONSUMER = _role("consumer", "FETCH", "METADATA FETCH")
_MEMBER = _role("group member", _MEMBERSHIP, f"FIND_COORDINATOR {_MEMBERSHIP}")
_GROUP_CONSUMER = _role("consumer in a group", _MEMBERSHIP, _READS_IN_GROUP)
_ROLES = (
    _PRODUCER,
    _role(
        "transactional producer",
        "ADD_PARTITIONS_TO_TXN ADD_OFFSETS_TO_TXN END_TXN TXN_OFFSET_COMMIT",
        "METADATA FIND_COORDINATOR INIT_PRODUCER_ID PRODUCE END_TXN",
    ),
    _CONSUMER,
    _MEMBER,
    _role(
        "consumer of the KIP-848 protocol",
        "CONSUMER_GROUP_HEARTBEAT",
        f"CONSUMER_GROUP_HEARTBEAT {_READS_IN_GROUP}",
    ),
    _role(
        "share consumer",
        "SHARE_GROUP_HEARTBEAT SHARE_FETCH SHARE_ACKNOWLEDGE",
        "METADATA SHARE_GROUP_HEARTBEAT SHARE_FETCH",
    ),
    _role(
        "streams group member",
        "STREAMS_GROUP_HEARTBEAT",
        f"STREAMS_GROUP_HEARTBEAT {_READS_IN_GROUP}",
    ),
)
_ADMINISTRATOR = ClientRole("administrator", frozenset(), ())

# Consumers send these; administrators and monitors send them beside other requests.
_OFFSET_APIS = frozenset(_keys("LIST_OFFSETS OFFSET_COMMIT OFFSET_FETCH OFFSET_FOR_LEADER_EPOCH"))
# Clients of all roles send these, so they indicate none. LeaveGroup also removes others (KIP-345).
_COMMON_APIS = frozenset(
    _keys(
        "API_VERSIONS SASL_HANDSHAKE SASL_AUTHENTICATE METADATA FIND_COORDINATOR LEAVE_GROUP "
        "GET_TELEMETRY_SUBSCRIPTIONS PUSH_TELEMETRY"
    )
)


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
        key: role.name if roles else None
        for role in reversed(roles or [_PRODUCER, _GROUP_CONSUMER])
        for key in role.needs
    }
