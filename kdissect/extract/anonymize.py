"""Replaces names in messages: everything that describes people, places or data.

By default every string, id and byte of a message is replaced. The tables below list the fields that
stay, since their values belong to Kafka and not to its users: protocols, assignors, mechanisms,
features, names of settings, states. Numbers stay. Secret bytes become ``[redacted]``, as in tables.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from ipaddress import ip_address
from typing import Any

from kdissect.codec import message_codec
from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.codec.message_codec import UNKNOWN_TAGS
from kdissect.codec.record_batches import decode_record_set
from kdissect.codec.record_encoder import encode_entry
from kdissect.codec.redaction import SECRET_FIELDS, TEXT, is_secret
from kdissect.errors import DecodeError, EncodeError
from kdissect.extract.pseudonyms import Pseudonyms
from kdissect.protocol import catalog
from kdissect.protocol.layout import Layout, layout
from kdissect.protocol.model import Field, Side, Type

_KEPT = frozenset(
    {
        "client_software_name", "client_software_version", "protocol_type", "protocol_name",
        "assignor_name", "server_assignor", "mechanism", "mechanisms", "feature", "group_state",
        "group_type", "transaction_state", "state_filters", "states_filter", "types_filter",
        "unknown_state_filters", "configuration_keys", "entity_type", "owner_principal_type",
        "principal_type", "token_requester_principal_type", "listener", "documentation",
        "requested_metrics"
    }
)  # fmt: skip
# Fields called `name` or `key` that stay, by the struct that holds them.
_KEPT_IN = frozenset(
    {
        ("protocols", "name"), ("configs", "name"), ("synonyms", "name"), ("topic_configs", "key"),
        ("features", "name"), ("finalized_features", "name"), ("supported_features", "name"),
        ("listeners", "name"), ("leader_endpoints", "name"), ("ops", "key"), ("values", "key")
    }
)  # fmt: skip
_VALUES = frozenset({("configs", "value"), ("synonyms", "value"), ("topic_configs", "value")})
_BY_NUMBER = (4, 8)  # types of configured resources that a number names: broker, broker logger
_HOSTS = frozenset({"host", "host_name", "v0_host", "client_host"})
_KINDS = {
    "topicName": "topic", "groupId": "group", "transactionalId": "transactional-id",
    "topic": "topic", "topics": "topic", "topic_name": "topic", "group_id": "group",
    "client_id": "client", "member_id": "member", "leader": "member", "group_instance_id":
    "instance", "instance_id": "instance", "rack": "rack", "rack_id": "rack", "cluster_id":
    "cluster", "user": "user", "principal": "principal", "principal_name": "principal",
    "log_dir": "directory", "path": "directory", "error_message": "text", "reason": "text",
}  # fmt: skip
# Fields of bytes that hold a struct after its int16 version.
_VERSIONED = {
    "metadata": "ConsumerProtocolSubscription",
    "member_metadata": "ConsumerProtocolSubscription",
    "assignment": "ConsumerProtocolAssignment",
    "member_assignment": "ConsumerProtocolAssignment",
    "request_principal": "DefaultPrincipalData",
}


class Anonymizer:
    """Rewrites frames with pseudonyms; a name has the same pseudonym in all frames."""

    def __init__(self) -> None:
        self.names = Pseudonyms()

    def frame(
        self, data: bytes, side: Side, api_key: int | None = None, api_version: int | None = None
    ) -> bytes:
        """Return a frame (without its size prefix) with its names replaced.

        side: "request" or "response". A response needs `api_key` and `api_version`. Raises
        DecodeError or EncodeError if the frame cannot be decoded or encoded again.
        """
        message = decode_message(data, side=side, api_key=api_key, api_version=api_version)
        return encode_message(self.message(message))

    def message(self, message: Message) -> Message:
        """Return a copy of the message with its names replaced."""
        header, body = deepcopy(message.header), deepcopy(message.body)
        if header.get("client_id"):
            header["client_id"] = self.names.name("client", header["client_id"])
        self._hide_tags(header)
        definition = catalog.api(message.api_key).side(message.side)
        self._struct(layout(definition, message.api_version), body, "")
        return Message(message.api_key, message.api_version, message.side, header, body)

    def _struct(self, of: Layout, values: dict[str, Any], parent: str) -> None:
        """Replace values in place; `parent` names the field that holds the struct."""
        self._hide_tags(values)
        for slot in of.by_name.values():
            value = values.get(slot.name)
            if value is None:
                continue
            if slot.inner is not None:
                for struct in value if isinstance(value, list) else [value]:
                    if struct is not None:
                        self._struct(slot.inner, struct, slot.name)
                continue
            replace = self._replacement(slot.field, parent, values)
            if replace is None:
                continue
            if slot.field.is_array:
                values[slot.name] = [None if one is None else replace(one) for one in value]
            else:
                values[slot.name] = replace(value)
        if "metrics" in values and "compression_type" in values:
            # pushed client metrics (KIP-714) are emptied, and so need no compression
            values["metrics"], values["compression_type"] = b"", 0

    def _hide_tags(self, values: dict[str, Any]) -> None:
        tags = values.get(UNKNOWN_TAGS)
        if tags:
            values[UNKNOWN_TAGS] = {tag: self.names.data(data) for tag, data in tags.items()}

    def _replacement(
        self, field: Field, parent: str, values: dict[str, Any]
    ) -> Callable[[Any], Any] | None:
        """Return the function that replaces a value of a field; None if the value stays. values: of
        the struct that has the field."""
        name = field.name
        if field.type is Type.UUID:
            return self.names.uuid
        if field.type is Type.RECORDS:
            return self.records
        if field.type is Type.BYTES:
            return self._bytes(name)
        if field.type is not Type.STRING:
            return None
        if is_secret(name, values):
            return lambda text: text and TEXT
        if not field.entity:
            if name in _KEPT or (parent, name) in _KEPT_IN:
                return None
            if (parent, name) in _VALUES:
                return self.names.value
            if name in _HOSTS or name.endswith("_host"):
                return self.names.host
            if name == "resource_name" and values.get("resource_type") in _BY_NUMBER:
                return self._node
            if name in ("resource_name", "entity_name", "match"):
                return self._resource
        kind = _KINDS.get(field.entity) or _KINDS.get(name) or "name"
        return lambda text: self.names.name(kind, text)

    def _node(self, text: str) -> str:
        """Keep a broker's number."""
        return text if text.isdigit() else self._resource(text)

    def _resource(self, text: str) -> str:
        """Replace a resource's name; "*" stays."""
        return text if text == "*" else self.names.name("resource", text)

    def _bytes(self, name: str) -> Callable[[bytes], bytes]:
        if name in _VERSIONED:
            return lambda data: self._versioned(_VERSIONED[name], data)
        if name == "client_host_address":
            return self._packed_address
        if name == "request_data":
            return self._inner_request
        if name == "response_data":  # of an unknown API
            return lambda _: b""
        if name in SECRET_FIELDS:
            return lambda data: TEXT.encode() if data else data
        return self.names.data

    def _packed_address(self, data: bytes) -> bytes:
        if len(data) not in (4, 16):
            return self.names.data(data)
        return ip_address(self.names.address(str(ip_address(data)))).packed

    def _versioned(self, name: str, data: bytes) -> bytes:
        """Replace names in a struct after its int16 version; any other bytes become empty."""
        definition = catalog.definition(name)
        if len(data) < 2:
            return b""
        written_version = int.from_bytes(data[:2], "big")
        version = min(written_version, definition.versions.last)
        try:
            values, _ = message_codec.decode(definition, version, data, 2)
            self._struct(layout(definition, version), values, "")
            if values.get("user_data"):
                values["user_data"] = b""
            return version.to_bytes(2, "big") + message_codec.encode(definition, version, values)
        except (DecodeError, EncodeError, ValueError):
            return b""

    def _inner_request(self, data: bytes) -> bytes:
        """Replace names in a request inside an Envelope; any other bytes become empty."""
        try:
            return self.frame(data, "request")
        except (DecodeError, EncodeError, ValueError):
            return b""

    def records(self, data: bytes) -> bytes:
        """Return a record set with keys, values and headers replaced by noise of their length.

        Control batches (transaction markers) stay. Batches that cannot be read or are cut off are
        dropped.
        """
        decoded = decode_record_set(data)
        damaged = set(decoded.faults["batch_index"].tolist())
        by_batch: dict[int, list[dict[str, Any]]] = {}
        for record in decoded.records:
            by_batch.setdefault(record["batch_index"], []).append(record)
        out = bytearray()
        for batch in decoded.batches:
            index = batch["batch_index"]
            if batch["is_partial"] or index in damaged or batch["magic"] not in (0, 1, 2):
                continue
            records = by_batch.get(index, [])
            if not batch["is_control"]:
                records = [self._record(record) for record in records]
            if records or batch["magic"] == 2:
                out += encode_entry(batch, records)
        return bytes(out)

    def _record(self, record: dict[str, Any]) -> dict[str, Any]:
        def noise(value: bytes | None) -> bytes | None:
            return None if value is None else self.names.data(value)

        headers = [
            {"key": self.names.name("header", _text(one["key"])), "value": noise(one["value"])}
            for one in record["headers"] or ()
        ]
        return record | {
            "key": noise(record["key"]),
            "value": noise(record["value"]),
            "headers": headers,
        }


def _text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode("utf-8", "surrogateescape")
