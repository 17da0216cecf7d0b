"""Removes secrets from a saved replay."""

from __future__ import annotations

from copy import copy

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.errors import DecodeError, EncodeError
from kdissect.replay.model import Exchange
from kdissect.replay.workload.messages import NO_API
from kdissect.tables.redaction import ALWAYS_HIDDEN, CONFIGS, TEXT, holders, is_sensitive_name

_REQUEST_HELD = "it holds secrets, which are redacted"


def without_secrets(exchange: Exchange) -> Exchange:
    """The exchange itself if it has nothing to hide, else a copy.

    A request with secrets is left out, since it would not work without them. A response keeps its
    other fields; the comparison recognises the value that replaces a secret.
    """
    changed = exchange
    for number, side in enumerate(("request", "response")):
        frame = getattr(changed, side)
        if frame is None or exchange.api_key == NO_API or not _may_hide(exchange.api_key, number):
            continue
        hidden, is_changed = _without_secrets(exchange, frame, side, number)
        if not is_changed:
            continue
        if changed is exchange:
            changed = copy(exchange)
        setattr(changed, side, None if side == "request" else hidden)
        if side == "request" or hidden is None:
            setattr(changed, f"{side}_missing", _REQUEST_HELD)
    return changed


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
