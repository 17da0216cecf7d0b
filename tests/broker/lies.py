"""Lies about a broker's answers, for a proxy: each changes one field, or record data, of one API.

A response is decoded, changed and encoded by kio, which shares no code with kdissect. Which lies
there are is read from the answers of an honest run: every field with a value that can be another
one. A lie is in each answer that has such a value, or in the first one only. Some lies are about
the connection: it is cut instead of an answer, the answer is swallowed, or it comes too late.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import importlib
import io
import re
import struct
import types
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import crc32c
from kio.schema import index
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from kdissect.replay.workload.messages import INTERNAL_APIS
from tests.broker.proxy import Proxy

ERROR = ErrorCode.unknown_server_error
_BATCH = struct.Struct(">qiibIhiqqqhii")
_CRC_FROM, _HEADER_SIZE = 21, 61
_CODECS, _CONTROL = 7, 32
_LONG = datetime.timedelta(seconds=30)
_DELAY_S = 12.0  # longer than a replay waits with `--timeout 10s`
CONNECTION = "connection"  # instead of a field's path
CUT, SWALLOWED, DELAYED = CONNECTION_KINDS = ("cut", "swallowed", "delayed")


@dataclasses.dataclass(frozen=True)
class Lie:
    """api: Kafka's name. path: of the field, as kio names it (``topics[].error_code``), or
    `CONNECTION`. kind: a key of `KINDS` or `RECORD_KINDS`, or one of `CONNECTION_KINDS`. is_once:
    in the first answer only."""

    api: str
    path: str
    kind: str
    is_once: bool = False

    def __str__(self) -> str:
        return f"{self.api} {self.path} {self.kind}{' once' if self.is_once else ''}"


# -- values ---------------------------------------------------------------------------------

Change = Callable[[Any], Any]  # raises ValueError where the value cannot be changed so


def _only(condition: bool, value: Any) -> Any:
    if not condition:
        raise ValueError
    return value


def _of(kind: type | tuple[type, ...], change: Change) -> Change:
    """For values of a type; `change` raises ValueError for some of them too."""

    def checked(value: Any) -> Any:
        is_other = kind is NUMBER and isinstance(value, bool | ErrorCode)
        return change(_only(isinstance(value, kind) and not is_other, value))

    return checked


def _with_last_bit_flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([each ^ 1 for each in data[-1:]])


NUMBER = (int, float)
KINDS: dict[str, Change] = {
    "null": lambda value: _only(value is not None, None),
    "error": lambda value: _only(value is ErrorCode.none, ERROR),
    "no error": _of(ErrorCode, lambda value: _only(value is not ErrorCode.none, ErrorCode.none)),
    "plus 1": _of(NUMBER, lambda value: value + 1),
    "plus 5000": _of(NUMBER, lambda value: value + 5000),
    "zero": _of(NUMBER, lambda value: _only(value > 0, 0)),
    "other text": _of(str, lambda value: _only(bool(value), f"{value}-x")),
    "no text": _of(str, lambda value: _only(bool(value), "")),
    "other id": _of(uuid.UUID, lambda _: uuid.UUID(int=77)),
    "flipped": _of(bool, lambda value: not value),
    "30 s": _of(
        (datetime.timedelta, datetime.datetime),
        lambda value: _LONG if isinstance(value, datetime.timedelta) else value + _LONG,
    ),
    "emptied": _of(tuple, lambda value: _only(len(value) > 0, ())),
    "shortened": _of(tuple, lambda value: _only(len(value) > 1, value[:-1])),
    "doubled": _of(tuple, lambda value: _only(len(value) > 0, (*value, *value[-1:]))),
    "other bytes": _of(bytes, lambda value: _only(len(value) > 4, _with_last_bit_flipped(value))),
}


# -- record data ------------------------------------------------------------------------------


def _batches(data: bytes) -> list[bytes]:
    found, pos = [], 0
    while pos + _HEADER_SIZE <= len(data):
        size = 12 + struct.unpack_from(">i", data, pos + 8)[0]
        if pos + size > len(data):
            break
        found.append(data[pos : pos + size])
        pos += size
    return _only(bool(found) and all(each[16] == 2 for each in found), found)


def _is_control(batch: bytes) -> bool:
    return bool(struct.unpack_from(">h", batch, 21)[0] & _CONTROL)


def _sealed(batch: bytearray) -> bytes:
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">I", batch, 17, crc32c.crc32c(bytes(batch[_CRC_FROM:])))
    return bytes(batch)


def _varint(data: bytes, pos: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), pos


def _records(batch: bytes) -> list[bytes]:
    """Each record with its length in front. ValueError if they are compressed or markers."""
    attributes = struct.unpack_from(">h", batch, 21)[0]
    _only(not attributes & (_CODECS | _CONTROL), None)
    found, pos = [], _HEADER_SIZE
    while pos < len(batch):
        size, begin = _varint(batch, pos)
        found.append(batch[pos : begin + size])
        pos = begin + size
    return found


def _with_records(batch: bytes, records: list[bytes]) -> bytes:
    made = bytearray(batch[:_HEADER_SIZE] + b"".join(records))
    struct.pack_into(">i", made, 57, len(records))
    return _sealed(made)


def _two_records_lost(data: bytes) -> bytes:
    """From the middle of each batch that has four."""
    found, made = _batches(data), []
    for batch in found:
        try:
            records = _records(batch)
            is_long = len(records) > 3
            made.append(_with_records(batch, [records[0], *records[3:]]) if is_long else batch)
        except ValueError:
            made.append(batch)
    return _only(made != found, b"".join(made))


def _value_changed(data: bytes) -> bytes:
    """The last byte of the first batch's last record."""
    first, *rest = _batches(data)
    _records(first)
    made = bytearray(first)
    made[-3] ^= 1
    return _sealed(made) + b"".join(rest)


def _header_changed(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        first, *rest = _batches(data)
        _only(not _is_control(first), None)
        made = bytearray(first)
        made[at] ^= 1
        return _sealed(made) + b"".join(rest)

    return change


def _wrong_crc(data: bytes) -> bytes:
    first, *rest = _batches(data)
    made = bytearray(first)
    made[17] ^= 1
    return bytes(made) + b"".join(rest)


def _lost(which: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        found = _batches(data)
        _only(len(found) > 1, None)
        found.pop(which)
        return b"".join(found)

    return change


def _markers_lost(data: bytes) -> bytes:
    found = _batches(data)
    kept = [each for each in found if not _is_control(each)]
    return _only(len(kept) < len(found), b"".join(kept))


def _swapped(data: bytes) -> bytes:
    first, second, *rest = _only(len(_batches(data)) > 1, _batches(data))
    return second + first + b"".join(rest)


RECORD_KINDS: dict[str, Callable[[bytes], bytes]] = {
    "two records lost": _two_records_lost,
    "value changed": _value_changed,
    "timestamp changed": _header_changed(34),
    "wrong CRC": _wrong_crc,
    "first batch lost": _lost(0),
    "last batch lost": _lost(-1),
    "middle batch lost": lambda data: _lost(1)(_only(len(_batches(data)) > 2, data)),
    "batch doubled": lambda data: data + _batches(data)[-1],
    "batches swapped": _swapped,
    "markers lost": _markers_lost,
    "all lost": lambda data: _only(bool(_batches(data)), b""),
}


# -- messages -----------------------------------------------------------------------------------


@cache
def _entity(api_key: int, api_version: int) -> Any:
    """kio's class of a response; None if kio has no such class."""
    name = index.api_key_map.get(api_key)
    try:
        module = importlib.import_module(f"kio.schema.{name}.v{api_version}.response")
    except (ModuleNotFoundError, TypeError):
        return None
    return getattr(module, f"{api_name(api_key)}Response", None)


@cache
def api_name(api_key: int) -> str:
    name = str(index.api_key_map[api_key])
    return re.sub(r"(?:^|_)(\w)", lambda found: found.group(1).upper(), name)


def _header_size(entity: Any) -> int:
    return 5 if entity.__header_schema__.__flexible__ else 4


def decode(frame: bytes, api_key: int, api_version: int) -> Any:
    """A response as kio reads it; None if it does not know the version or a value in it."""
    entity = _entity(api_key, api_version)
    if entity is None:
        return None
    try:
        body, _ = entity_reader(entity)(frame[_header_size(entity) :], 0)
    except Exception:  # kio's own errors have no common base that it exports
        return None
    return body


def encode(head: bytes, body: Any) -> bytes:
    buffer = io.BytesIO()
    entity_writer(type(body))(buffer, body)
    return head[: _header_size(type(body))] + buffer.getvalue()


def _kinds(value: Any, *, may_be_null: bool) -> Iterator[str]:
    for kind, change in KINDS.items():
        try:
            changed = change(value)
        except (ValueError, TypeError):
            continue
        if changed != value and (changed is not None or may_be_null):
            yield kind


def _may_be_null(one: dataclasses.Field[Any]) -> bool:
    """Return whether a field may be null. A null id is one of zeros, so "other id" is about it."""
    parts = one.type.__args__ if isinstance(one.type, types.UnionType) else ()
    return type(None) in parts and uuid.UUID not in parts


def lies_in(body: Any) -> set[tuple[str, str]]:
    """(path, kind) of all that can be another value in a response."""
    found: set[tuple[str, str]] = set()
    _collect(body, "", found)
    return found


def _collect(value: Any, path: str, found: set[tuple[str, str]]) -> None:
    if dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            inner = getattr(value, one.name)
            here = f"{path}.{one.name}".lstrip(".")
            if one.name == "records" and isinstance(inner, bytes):
                kinds = [kind for kind, change in RECORD_KINDS.items() if _can(change, inner)]
                found.update((here, kind) for kind in kinds)
                continue
            kinds = list(_kinds(inner, may_be_null=_may_be_null(one)))
            found.update((here, kind) for kind in kinds)
            _collect(inner, here, found)
    elif isinstance(value, tuple):
        for each in value:
            if not dataclasses.is_dataclass(each):
                found.update((f"{path}[]", kind) for kind in _kinds(each, may_be_null=False))
            _collect(each, f"{path}[]", found)


def _can(change: Callable[[bytes], bytes], data: bytes) -> bool:
    try:
        return change(data) != data
    except (ValueError, IndexError):
        return False


def alter(body: Any, path: str, kind: str) -> Any:
    """The response with the field changed in all its places; ValueError if there is none."""
    change: Change = RECORD_KINDS[kind] if kind in RECORD_KINDS else KINDS[kind]
    return _altered(body, path.split("."), change)


def _altered(body: Any, names: list[str], change: Change) -> Any:
    name, is_list = names[0].removesuffix("[]"), names[0].endswith("[]")
    value = getattr(body, name)
    if is_list:
        made, hits = [], 0
        for each in value or ():
            try:
                made.append(_altered(each, names[1:], change) if names[1:] else change(each))
                hits += 1
            except (ValueError, IndexError, TypeError):
                made.append(each)
        _only(bool(hits), None)
        new: Any = tuple(made)
    elif len(names) > 1:
        new = _altered(value, names[1:], change) if value is not None else _only(False, None)
    else:
        new = change(value)
        if new == value:
            raise ValueError
    return dataclasses.replace(body, **{name: new})


class LyingProxy(Proxy):
    """Changes answers by the given lies. counts: lie -> the number of changed answers. seen: API ->
    (path, kind) of the lies that its answers had room for, if `is_looking`."""

    def __init__(
        self, port: int, upstream: int, lies: list[Lie] | None = None, *, is_looking: bool = False
    ) -> None:
        super().__init__(port, upstream)
        self._lies: dict[str, list[Lie]] = defaultdict(list)
        for lie in lies or ():
            self._lies[lie.api].append(lie)
        self.counts: dict[Lie, int] = defaultdict(int)
        self.seen: dict[str, set[tuple[str, str]]] = defaultdict(set)
        self._is_looking = is_looking

    async def _answered(self, frame: bytes, api_key: int, api_version: int) -> bytes | None:
        """None if the answer is swallowed; ConnectionError if the connection is cut instead."""
        name = api_name(api_key) if api_key in index.api_key_map else ""
        for lie in self._lies[name]:
            if lie.path != CONNECTION or (lie.is_once and self.counts[lie]):
                continue
            self.counts[lie] += 1
            self.altered += 1
            if lie.kind == CUT:
                raise ConnectionError
            if lie.kind == SWALLOWED:
                return None
            await asyncio.sleep(_DELAY_S)
        return self._altered(frame, api_key, api_version)

    def _altered(self, frame: bytes, api_key: int, api_version: int) -> bytes:
        name = api_name(api_key) if api_key in index.api_key_map else ""
        if api_key in INTERNAL_APIS:
            return frame
        if not self._is_looking and name not in self._lies:
            return frame
        body = decode(frame, api_key, api_version)
        if body is None:
            return frame
        if self._is_looking:
            self.seen[name] |= lies_in(body) | {(CONNECTION, kind) for kind in CONNECTION_KINDS}
        for lie in self._lies[name]:
            if lie.path == CONNECTION or (lie.is_once and self.counts[lie]):
                continue
            try:
                body = alter(body, lie.path, lie.kind)
                frame = encode(frame, body)
            except (ValueError, AttributeError, TypeError, struct.error):
                continue  # not there, or no value that the field can have
            self.counts[lie] += 1
            self.altered += 1
        return frame
