"""Decodes and encodes one message: `Message`, `decode_message`, `encode_message`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kdissect.codec import message_codec
from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.protocol.model import Api, Definition, Side
from kdissect.status import REASONS, Status


@dataclass
class Message:
    """A request or a response.

    api_key, api_version: of the message. api_name: Kafka's name of the API, without
    Request/Response.
    side: "request" or "response".
    header, body: dicts; `message_codec` has the types of values. Missing fields get their defaults
    (in the header, the API's key and version); unknown ones raise ValueError.
    surplus: bytes after a complete message in its frame; they are encoded again after it.
    """

    api_key: int
    api_version: int
    side: str
    header: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    surplus: bytes = b""

    def __post_init__(self) -> None:
        definition, header_definition, header_version = definitions_of(
            catalog.api(self.api_key), self.api_version, self.side
        )
        header: dict[str, Any] = dict(self.header)
        if self.side == "request":
            header.setdefault("request_api_key", self.api_key)
            header.setdefault("request_api_version", self.api_version)
            stated = (header["request_api_key"], header["request_api_version"])
            if stated != (self.api_key, self.api_version):
                raise ValueError(
                    f"header says api {stated[0]} v{stated[1]}, "
                    f"not api {self.api_key} v{self.api_version}"
                )
        with _named(self):
            self.header = message_codec.complete(header_definition, header_version, header)
            self.body = message_codec.complete(definition, self.api_version, self.body)

    @property
    def api_name(self) -> str:
        return catalog.api(self.api_key).name


@contextmanager
def _named(message: Message) -> Iterator[None]:
    """Add the message's name to errors of encoding."""
    try:
        yield
    except EncodeError as error:
        error.what = f"{message.api_name} v{message.api_version} {message.side}"
        raise


def definitions_of(api: Api, api_version: int, side: str) -> tuple[Definition, Definition, int]:
    """(body definition, header definition, header version). Raises ValueError for an unknown
    version."""
    definition = api.side(side)
    if api_version not in definition.versions:
        first, last = definition.versions
        raise ValueError(f"{api.name} has no version {api_version}; known are {first} to {last}")
    if side == "request":
        return definition, catalog.REQUEST_HEADER, api.request_header_version(api_version)
    return definition, catalog.RESPONSE_HEADER, api.response_header_version(api_version)


def decode_message(
    data: bytes | bytearray | memoryview,
    *,
    side: Side,
    api_key: int | None = None,
    api_version: int | None = None,
) -> Message:
    """Decode one frame, given without its size prefix.

    A request's header contains API and version. A response needs both from its request. An
    ApiVersions response with error 35 is returned as api_version 0, whatever was requested
    (KIP-511: a broker that does not know the requested version answers in the oldest one).

    Raises DecodeError with ``.path``, ``.pos`` (in `data`) and ``.reason``; ValueError if the
    arguments do not determine the message.
    """
    if side == "request":
        key, version = _request_identity(data)
        for name, given, found in (("key", api_key, key), ("version", api_version, version)):
            if given is not None and given != found:
                raise ValueError(f"api_{name} is {given}, but the request's header says {found}")
    elif side == "response":
        if api_key is None or api_version is None:
            raise ValueError("a response needs the api_key and api_version of its request")
        key, version = api_key, api_version
    else:
        raise ValueError(f"side must be 'request' or 'response', not {side!r}")
    try:
        api = catalog.api(key)
    except ValueError:
        raise DecodeError(REASONS[Status.UNKNOWN_API], message=f"api {key}") from None
    is_answer = key == ApiKey.API_VERSIONS and side == "response"
    if is_answer and _error_code(data) == ErrorCode.UNSUPPORTED_VERSION:
        version = 0
    if version not in api.side(side).versions:
        raise DecodeError(
            REASONS[Status.UNKNOWN_VERSION],
            pos=2 if side == "request" else 0,
            message=f"{api.name} v{version} {side}",
        )
    return _decode(api, version, side, data)


def _request_identity(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    try:
        key, pos = message_codec.read_int16(data, 0)
        version, _ = message_codec.read_int16(data, pos)
    except DecodeError as error:
        path = "request_api_key" if error.pos == 0 else "request_api_version"
        raise DecodeError(error.reason, path=path, pos=error.pos, message="RequestHeader") from None
    return key, version


def _decode(api: Api, version: int, side: str, data: bytes | bytearray | memoryview) -> Message:
    definition, header_definition, header_version = definitions_of(api, version, side)
    header, pos = message_codec.decode(header_definition, header_version, data)
    body, pos = message_codec.decode(definition, version, data, pos)
    # without __init__, because decoded values are complete already
    message = object.__new__(Message)
    message.api_key, message.api_version, message.side = api.key, version, side
    message.header, message.body, message.surplus = header, body, bytes(data[pos:])
    return message


def _error_code(data: bytes | bytearray | memoryview) -> int:
    """The first field of an ApiVersions response, after its correlation id."""
    return int.from_bytes(data[4:6], "big") if len(data) >= 6 else 0


def encode_message(message: Message) -> bytes:
    """The frame of a message without its size prefix: header, body, surplus.

    The bytes equal those of Kafka's own writer. Raises EncodeError with ``.path``.
    """
    definition, header_definition, header_version = definitions_of(
        catalog.api(message.api_key), message.api_version, message.side
    )
    with _named(message):
        header = message_codec.encode(header_definition, header_version, message.header)
        body = message_codec.encode(definition, message.api_version, message.body)
    return header + body + message.surplus
