"""Saved replay files: a workload as text lines, small enough to lie in a repository.

Format, version 1
-----------------
gzip (RFC 1952, without name and time, so that equal workloads give equal files) of UTF-8 lines,
each a JSON object; plain text is read too.

Line 1, the header: ``{"kdissect": "replay", "format_version": 1, "notes": [...]}``.

Then each connection has a line, ``{"connection": [client ip, port, broker ip, port], "id": ...,
"start_ns": ..., "end_ns": ...}``. Ids and times are strings, because they exceed 2^53. ``tls`` is
there if the connection used it, ``principal`` if it is known.

The lines of its exchanges follow, in the order of their requests: ``{"id", "api": [key, version],
"at": [request, request end, response, response end], "request", "response"}``.

- ``at``: nanoseconds from the connection's start, null if unknown
- ``request``, ``response``: frames in base64, without their size prefix
- ``request_missing``, ``response_missing``: why there is no such frame
- ``no_response``: marks Produce with acks 0
- ``packets`` ([request, response]) and ``capture``: where the frames are in the capture

Traffic among brokers is left out, and so is SASL, which is never replayed and full of secrets.
A request with secrets is left out, since it would not work without them. In a response they are
replaced; the comparison recognises the replacement.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from copy import copy
from pathlib import Path
from typing import Any
from uuid import UUID

from kdissect.codec.redaction import redact_frame
from kdissect.errors import CaptureError
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import RESPONSE, SIDES
from kdissect.replay.model import Connection, Exchange, Workload
from kdissect.replay.workload import messages
from kdissect.tables.topics import METADATA_TOPIC

_FORMAT_VERSION = 1
_METADATA_ID = UUID(int=1)  # of the metadata log in every cluster (KIP-516)
_GZIP = b"\x1f\x8b"
# Frames of heartbeats and empty fetches shrink to a hundredth; a file that grows more is a bomb.
_RATIO_MAX, _FREE_SIZE = 300, 64 << 20
_MARK = b'{"kdissect": "replay"'
_DAMAGES = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, zlib.error)
_REQUEST_HELD = "it holds secrets, which are redacted"
_TIMES = ("request_time_ns", "request_end_time_ns", "response_time_ns", "response_end_time_ns")


def is_saved(path: str) -> bool:
    """Return whether a file is a saved replay, by its first bytes."""
    with Path(path).open("rb") as stream:
        start = stream.read(len(_MARK))
        if not start.startswith(_GZIP):
            return start == _MARK
        stream.seek(0)
        try:
            with gzip.open(stream, "rb") as plain:
                return plain.read(len(_MARK)) == _MARK
        except (OSError, EOFError):
            return False


def save(workload: Workload, path: str) -> dict[str, int]:
    """Write a workload; gives counts: connections, exchanges, left_out, redacted.

    Raises OSError where the file cannot be written.
    """
    lines: list[str] = []
    counts = {"connections": 0, "exchanges": 0, "left_out": 0, "redacted": 0}
    for connection in workload.connections:
        kept = [each for each in connection.exchanges if _is_kept(each)]
        counts["left_out"] += len(connection.exchanges) - len(kept)
        if not kept:
            continue
        counts["connections"] += 1
        lines.append(_text(_connection_line(connection)))
        for exchange in kept:
            counts["exchanges"] += 1
            shown = without_secrets(exchange)
            counts["redacted"] += shown is not exchange
            lines.append(_text(_exchange_line(shown, connection.start_time_ns)))
    header = {"kdissect": "replay", "format_version": _FORMAT_VERSION, "notes": workload.notes}
    data = "\n".join([json.dumps(header), *lines, ""]).encode()
    if not path.endswith((".json", ".jsonl")):
        data = gzip.compress(data, 9, mtime=0)
    Path(path).write_bytes(data)
    return counts


def _is_kept(exchange: Exchange) -> bool:
    is_sasl = exchange.api_key in messages.TARGET_OWN_APIS or exchange.api_key == messages.NO_API
    return not exchange.internal_reason and not is_sasl


def without_secrets(exchange: Exchange) -> Exchange:
    """The exchange itself if it has nothing to hide, else a copy."""
    changed = exchange
    for number, side in enumerate(SIDES):
        frame = getattr(exchange, side)
        if frame is None:
            continue
        shown = redact_frame(frame, exchange.api_key, exchange.api_version, number)
        if number == RESPONSE and _reads_metadata_log(exchange):
            shown = None
        if shown is frame:
            continue
        if changed is exchange:
            changed = copy(exchange)
        if side == "request" or shown is None:
            shown = None
            setattr(changed, f"{side}_missing", _REQUEST_HELD)
        setattr(changed, side, shown)
    return changed


def _reads_metadata_log(exchange: Exchange) -> bool:
    """Return whether the response holds records of the metadata log, which holds credentials."""
    if exchange.api_key not in (ApiKey.FETCH, ApiKey.FETCH_SNAPSHOT):
        return False
    asked = messages.entries(messages.request_body(exchange).get("topics"))
    is_asked = any(each.get("topic_id") == _METADATA_ID for each in asked)
    return is_asked or METADATA_TOPIC.encode() in (exchange.response or b"")


def _text(line: dict[str, Any]) -> str:
    """A line without the values that say nothing."""
    return json.dumps({name: value for name, value in line.items() if value})


def _connection_line(connection: Connection) -> dict[str, Any]:
    return {
        "connection": [*connection.client, *connection.broker],
        "id": str(connection.connection_id),
        "start_ns": str(connection.start_time_ns),
        "end_ns": str(connection.end_time_ns),
        "tls": connection.is_tls,
        "principal": connection.principal,
    }


def _exchange_line(exchange: Exchange, start_ns: int) -> dict[str, Any]:
    times = [getattr(exchange, name) for name in _TIMES]
    return {
        "id": str(exchange.exchange_id),
        "api": [exchange.api_key, exchange.api_version],
        "at": [None if time < 0 else time - start_ns for time in times],
        "packets": [exchange.request_packet, exchange.response_packet],
        "capture": Path(exchange.capture).name,
        "no_response": not exchange.expects_response,
        "request": base64.b64encode(exchange.request or b"").decode(),
        "request_missing": exchange.request_missing,
        "response": base64.b64encode(exchange.response or b"").decode(),
        "response_missing": exchange.response_missing,
    }


def read_connections(path: str) -> tuple[list[Connection], list[str]]:
    """The connections of a saved file, and its notes.

    Raises CaptureError where it is damaged.
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
                connections.append(_read_connection(line))
            else:
                connections[-1].exchanges.append(
                    _read_exchange(line, connections[-1].start_time_ns)
                )
    except CaptureError:
        raise
    except _DAMAGES as error:
        raise CaptureError(f"{path}:{number}: no saved replay can be read there: {error}") from None
    return connections, list(header.get("notes", []))


def _read_text(path: str) -> bytes:
    """The bytes of a file, unpacked. Raises CaptureError if they are far too many for its size."""
    with Path(path).open("rb") as file:
        if file.read(len(_GZIP)) != _GZIP:
            return Path(path).read_bytes()
        file.seek(0)
        size_max = max(_FREE_SIZE, _RATIO_MAX * Path(path).stat().st_size)
        with gzip.open(file, "rb") as plain:
            data = plain.read(size_max + 1)
    if len(data) > size_max:
        raise CaptureError(f"{path}: it unpacks to more than {size_max} bytes, which no replay has")
    return data


def _read_connection(line: dict[str, Any]) -> Connection:
    client_ip, client_port, broker_ip, broker_port = line["connection"]
    return Connection(
        connection_id=int(line["id"]),
        number=-1,
        client=(str(client_ip), int(client_port)),
        broker=(str(broker_ip), int(broker_port)),
        start_time_ns=int(line["start_ns"]),
        end_time_ns=int(line["end_ns"]),
        is_tls=bool(line.get("tls")),
        principal=line.get("principal", ""),
    )


def _read_exchange(line: dict[str, Any], start_ns: int) -> Exchange:
    api_key, api_version = (int(number) for number in line["api"])
    times = [-1 if time is None else start_ns + int(time) for time in line["at"]]
    request, response = (
        base64.b64decode(line[name], validate=True) if name in line else None
        for name in ("request", "response")
    )
    if request is not None and messages.api_of(request) != (api_key, api_version):
        raise ValueError(f"the request of exchange {line['id']} is of another API")
    packets = line.get("packets", [-1, -1])
    return Exchange(
        exchange_id=int(line["id"]),
        connection=-1,
        index=-1,
        api_key=api_key,
        api_version=api_version,
        client_id=None if request is None else messages.client_id_of(request),
        request=request,
        response=response,
        request_time_ns=times[0],
        request_end_time_ns=times[1],
        response_time_ns=times[2],
        response_end_time_ns=times[3],
        expects_response=not line.get("no_response", False),
        request_missing=str(line.get("request_missing", "")),
        response_missing=str(line.get("response_missing", "")),
        request_packet=int(packets[0]),
        response_packet=int(packets[1]),
        capture=str(line.get("capture", "")),
    )
