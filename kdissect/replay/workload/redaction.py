"""Removes secrets, and record data if the user wants that, from a saved replay."""

from __future__ import annotations

from copy import copy
from typing import Any

import xxhash

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.codec.record_codec import decode_record_set, encode_entry
from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange
from kdissect.replay.workload.messages import NO_API, entries
from kdissect.tables.redaction import ALWAYS_HIDDEN, CONFIGS, TEXT, holders, is_sensitive_name

_REQUEST_HELD = "it holds secrets, which are redacted"


class Redaction:
    """Makes copies of exchanges without secrets, and without record data unless payload is full."""

    def __init__(self, payload: str = "full", reveal_secrets: bool = False) -> None:
        self.payload = payload
        self.reveal_secrets = reveal_secrets

    def apply(self, exchange: Exchange) -> Exchange:
        """The exchange itself if it has nothing to hide, else a copy.

        A request with secrets is left out, since it would not work without them. A response keeps
        its other fields; the comparison recognises the value that replaces a secret.
        """
        changed = exchange
        if not self.reveal_secrets and exchange.api_key != NO_API:
            for number, side in enumerate(("request", "response")):
                frame = getattr(changed, side)
                if frame is None or not _may_hide(exchange.api_key, number):
                    continue
                hidden, is_changed = _without_secrets(exchange, frame, side, number)
                if not is_changed:
                    continue
                if changed is exchange:
                    changed = copy(exchange)
                setattr(changed, side, None if side == "request" else hidden)
                if side == "request" or hidden is None:
                    setattr(changed, f"{side}_missing", _REQUEST_HELD)
        if self.payload != "full" and exchange.api_key in (
            ApiKey.PRODUCE,
            ApiKey.FETCH,
            ApiKey.SHARE_FETCH,
        ):
            side = "request" if exchange.api_key == ApiKey.PRODUCE else "response"
            frame = getattr(changed, side)
            if frame is not None:
                hidden = self._without_payload(exchange, frame, side)
                missing = "" if hidden is not None else "its records cannot be read to be hidden"
                if changed is exchange:
                    changed = copy(exchange)
                setattr(changed, side, hidden)
                setattr(changed, f"{side}_missing", missing)
        return changed

    def _without_payload(self, exchange: Exchange, frame: bytes, side: str) -> bytes | None:
        message = _decoded(exchange, frame, side)
        if message is None:
            return None
        for topic in entries(message.body.get("topic_data") or message.body.get("responses")):
            for partition in entries(topic.get("partition_data") or topic.get("partitions")):
                if partition.get("records"):
                    hidden = self._hide_records(partition["records"])
                    if hidden is None:
                        return None
                    partition["records"] = hidden
        return encode_message(message)

    def _hide_records(self, data: bytes) -> bytes | None:
        """The record set with hidden keys and values; None where it cannot be read."""
        record_set = decode_record_set(data)
        if record_set.faults:
            return None
        out = bytearray()
        for batch in record_set.batches:
            if batch["is_partial"]:
                continue
            records = [
                one for one in record_set.records if one["batch_index"] == batch["batch_index"]
            ]
            if not batch["is_control"]:
                records = [self._hide_record(record) for record in records]
            out += encode_entry(batch, records)
        return bytes(out)

    def _hide_record(self, record: dict[str, Any]) -> dict[str, Any]:
        key, value, headers = record["key"], record["value"], record["headers"]
        if self.payload == "hash":
            hide: Any = _hash
        else:
            hide = _nothing
        return {
            **record,
            "key": key if self.payload == "keys" else hide(key),
            "value": hide(value),
            "headers": [{"key": one["key"], "value": hide(one["value"])} for one in headers],
        }


def _hash(value: bytes | None) -> bytes | None:
    return None if value is None else xxhash.xxh3_64_hexdigest(value).encode()


def _nothing(value: bytes | None) -> bytes | None:
    return None


def _may_hide(api_key: int, side: int) -> bool:
    return (api_key, side) in ALWAYS_HIDDEN or (api_key, side) in CONFIGS


def _without_secrets(
    exchange: Exchange, frame: bytes, side: str, number: int
) -> tuple[bytes | None, bool]:
    """(the frame with its secrets replaced, whether there was one); None: it cannot be read."""
    message = _decoded(exchange, frame, side)
    if message is None:
        return None, True
    hidden = 0
    for path in ALWAYS_HIDDEN.get((exchange.api_key, number), ()):
        *outer, name = path.split(".")
        for holder in holders(message.body, outer):
            value = holder.get(name)
            if value:
                holder[name] = TEXT.encode() if isinstance(value, bytes) else TEXT
                hidden += 1
    for path, name, value_name, flag in CONFIGS.get((exchange.api_key, number), ()):
        for entry in holders(message.body, path.split(".")):
            sensitive = is_sensitive_name(entry.get(name) or "") or bool(flag and entry.get(flag))
            if sensitive and entry.get(value_name) is not None:
                entry[value_name] = TEXT
                hidden += 1
    if not hidden:
        return frame, False
    try:
        return encode_message(message), True
    except EncodeError:
        return None, True


def _decoded(exchange: Exchange, frame: bytes, side: str) -> Message | None:
    try:
        return decode_message(
            frame, side=side, api_key=exchange.api_key, api_version=exchange.api_version
        )
    except (DecodeError, ValueError):
        return None
