"""Saved replay files: a workload as text lines, small enough to lie in a repository.

Format, version 1
-----------------
gzip (RFC 1952, without name and time, so that equal workloads give equal files) of UTF-8 lines,
each a JSON object.

Line 1, the header: ``{"kdissect": "replay", "format_version": 1, "notes": [...]}``.

Then each connection has a line, ``{"connection": {...}}``, and after it a line for each of its
exchanges, ``{"exchange": {...}}``, in the order of their requests. The objects have the fields of
`replay.model` that are not at their default: times in nanoseconds since 1970, frames in base64
without their size prefix. What a workload derives of them is left out.

Traffic among brokers is left out, and so is SASL, which is never replayed and full of secrets.
A request with secrets is left out, since it would not work without them. In a response they are
replaced; the comparison recognises the replacement.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints
from uuid import UUID

from kdissect.codec.internal_records import names_metadata_log
from kdissect.codec.redaction import redact_frame
from kdissect.errors import CaptureError
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.replay.model import Connection, Exchange, Workload
from kdissect.replay.workload import messages

_FORMAT_VERSION = 1
_METADATA_ID = UUID(int=1)  # of the metadata log in every cluster (KIP-516)
# Frames of heartbeats and empty fetches shrink to a hundredth; a file that grows more is a bomb.
_RATIO_MAX, _FREE_SIZE = 300, 64 << 20
_MARK = b'{"kdissect": "replay"'
_DAMAGES = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, zlib.error)
_SECRET = "it holds secrets, which are redacted"
# What a workload derives of the other fields.
_DERIVED = frozenset({"exchanges", "node_id", "connection", "index", "internal_reason", "decoded"})
_HINTS = {Connection: get_type_hints(Connection), Exchange: get_type_hints(Exchange)}


def is_saved(path: str) -> bool:
    """Return whether a file is a saved replay, by its first bytes."""
    try:
        with gzip.open(path) as plain:
            return plain.read(len(_MARK)) == _MARK
    except (OSError, EOFError, zlib.error):
        return False


def save(workload: Workload, path: str) -> dict[str, int]:
    """Write a workload; gives counts: exchanges, left_out, redacted.

    Raises OSError if the file cannot be written.
    """
    lines: list[str] = []
    counts = {"exchanges": 0, "left_out": 0, "redacted": 0}
    for connection in workload.connections:
        kept = [each for each in connection.exchanges if _is_kept(each)]
        counts["left_out"] += len(connection.exchanges) - len(kept)
        if not kept:
            continue
        lines.append(json.dumps({"connection": _row(connection)}))
        for exchange in kept:
            counts["exchanges"] += 1
            shown = without_secrets(exchange)
            counts["redacted"] += shown is not exchange
            shown = replace(shown, capture=Path(shown.capture).name)
            lines.append(json.dumps({"exchange": _row(shown)}))
    header = {"kdissect": "replay", "format_version": _FORMAT_VERSION, "notes": workload.notes}
    data = "\n".join([json.dumps(header), *lines, ""]).encode()
    Path(path).write_bytes(gzip.compress(data, 9, mtime=0))
    return counts


def _is_kept(exchange: Exchange) -> bool:
    is_sasl = exchange.api_key in messages.TARGET_OWN_APIS or exchange.api_key == messages.NO_API
    return not exchange.internal_reason and not is_sasl


def without_secrets(exchange: Exchange) -> Exchange:
    """The exchange itself if it has nothing to hide, else a copy."""
    key, version, shown = exchange.api_key, exchange.api_version, exchange
    request = exchange.request and redact_frame(exchange.request, key, version, REQUEST)
    response = exchange.response and redact_frame(exchange.response, key, version, RESPONSE)
    if _reads_metadata_log(exchange):
        response = None
    if request is not exchange.request:
        shown = replace(shown, request=None, request_missing=_SECRET)
    if response is not exchange.response:
        missing = _SECRET if response is None else ""
        shown = replace(shown, response=response, response_missing=missing)
    return shown


def _reads_metadata_log(exchange: Exchange) -> bool:
    """Return whether the response holds records of the metadata log, which holds credentials."""
    if exchange.api_key not in (ApiKey.FETCH, ApiKey.FETCH_SNAPSHOT):
        return False
    asked = messages.entries(messages.request_body(exchange).get("topics"))
    is_asked = any(each.get("topic_id") == _METADATA_ID for each in asked)
    return is_asked or names_metadata_log(exchange.response or b"")


def _row(value: Connection | Exchange) -> dict[str, object]:
    """The fields of a line that are not at their default."""
    return {
        each.name: base64.b64encode(found).decode() if isinstance(found, bytes) else found
        for each in fields(value)
        if each.name not in _DERIVED and (found := getattr(value, each.name)) != each.default
    }


def read_connections(path: str) -> tuple[list[Connection], list[str]]:
    """The connections of a saved file, and its notes.

    Raises CaptureError if it is damaged.
    """
    number = 1
    try:
        lines = _read_text(path).decode("utf-8").splitlines()
        header = json.loads(lines[0])
        if header.get("format_version") != _FORMAT_VERSION:
            raise CaptureError(
                f"{path}: a saved replay of format_version {header.get('format_version')}; this "
                f"kdissect reads {_FORMAT_VERSION}"
            )
        connections: list[Connection] = []
        for text in lines[1:]:
            number += 1
            line = json.loads(text)
            if "connection" in line:
                values = _values(Connection, line["connection"])
                connections.append(Connection(**values))
            else:
                connections[-1].exchanges.append(_exchange(_values(Exchange, line["exchange"])))
    except CaptureError:
        raise
    except _DAMAGES as error:
        raise CaptureError(f"{path}:{number}: no saved replay can be read there: {error}") from None
    return connections, list(header.get("notes", []))


def _read_text(path: str) -> bytes:
    """The bytes of a file, unpacked. Raises CaptureError if they are far too many for its size."""
    size_max = max(_FREE_SIZE, _RATIO_MAX * Path(path).stat().st_size)
    with gzip.open(path) as plain:
        data = plain.read(size_max + 1)
    if len(data) > size_max:
        raise CaptureError(f"{path}: it unpacks to more than {size_max} bytes, which no replay has")
    return data


def _values(kind: type[Connection | Exchange], row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line. Raises ValueError if one has another type."""
    values = {}
    for name, found in row.items():
        hint = _HINTS[kind][name]
        if hint == bytes | None and found is not None:
            found = base64.b64decode(found, validate=True)
        elif hint == tuple[str, int]:
            hint, found = tuple, (str(found[0]), int(found[1]))
        if name in _DERIVED or not isinstance(found, hint):
            raise ValueError(f"no {name} of this kind")
        values[name] = found
    return values


def _exchange(values: dict[str, Any]) -> Exchange:
    exchange = Exchange(connection=-1, index=-1, **values)
    if exchange.request is not None:
        if messages.api_of(exchange.request) != (exchange.api_key, exchange.api_version):
            raise ValueError(f"the request of exchange {exchange.exchange_id} is of another API")
    return exchange
