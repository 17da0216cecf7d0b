"""One connection to the target: frames out, frames in, TLS and SASL underneath, time limits.

A `Link` is an asyncio protocol, not a stream: a frame costs one callback and no task, which is
what lets one core drive thousands of connections. `connect` opens one, logs in, and hands it over;
everything that can go wrong there is a `ConnectFailed` with one readable clause.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.errors import DecodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import ANONYMOUS_PRINCIPAL
from kdissect.replay.target.auth import LoginFailed, Sasl, TlsOptions

ANSWER_SIZE_MAX = 1 << 30  # a broker's own limits are far below
WRITE_BUFFER_HIGH = 1 << 20  # bytes waiting in one connection before it counts as slow
CLIENT_ID = "kdissect"
_SIZE = struct.Struct(">i")
_REAUTHENTICATE_AT = 0.8  # of a session's lifetime; Java clients use 0.85 to 0.95


L = TypeVar("L", bound="Link")


class ConnectFailed(Exception):
    """No connection, or none that may be used. `kind`: unreachable, tls, login, timeout."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Access:
    """TLS, SASL and time limits (seconds) of all connections to a target."""

    tls: TlsOptions | None = None
    sasl: Sasl | None = None
    connect_timeout: float = 10.0

    @property
    def principal(self) -> str:
        """Kafka's default principal; "" if a token or a certificate names it."""
        if self.sasl is not None:
            return f"User:{self.sasl.user}" if self.sasl.user else ""
        return "" if self.tls is not None and self.tls.cert is not None else ANONYMOUS_PRINCIPAL


class Link(asyncio.Protocol):
    """Frames over one connection.

    on_frame: called with each frame that arrives (without its size).
    on_lost: called once with a clause, when the connection ends without `close`.
    on_writable: called when a full write buffer has drained.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.on_frame: Callable[[bytes], None] = _ignore
        self.on_lost: Callable[[str], None] = _ignore
        self.on_writable: Callable[[], None] = _nothing
        self.is_full = False
        self.lost: str | None = None
        self.session_lifetime_ms = 0
        self._ends: list[tuple[str, int]] = []
        self._buffer = bytearray()
        self._is_closing = False

    # -- asyncio's callbacks ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_HIGH)
        self.transport = transport
        ends = [transport.get_extra_info(name) for name in ("sockname", "peername")]
        if None in ends:  # the peer has reset the connection, the socket is no longer connected
            self.lost = os.strerror(errno.ECONNRESET).lower()
        else:
            self._ends = [(str(end[0]), int(end[1])) for end in ends]

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("closed by the target" if exc is None else reason_of(exc))

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.on_writable()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        if not buffer and len(data) > 4:
            size = _SIZE.unpack_from(data)[0]
            if size == len(data) - 4:  # the common case: one whole frame
                self.on_frame(data[4:])
                return
        buffer += data
        pos, end = 0, len(buffer)
        while end - pos >= 4:
            size = _SIZE.unpack_from(buffer, pos)[0]
            if size < 4 or size > ANSWER_SIZE_MAX:
                self.fail(f"the target's bytes are no Kafka answer (size {size})")
                return
            if end - pos - 4 < size:
                break
            frame = bytes(memoryview(buffer)[pos + 4 : pos + 4 + size])
            pos += 4 + size
            self.on_frame(frame)
            if self.lost is not None:
                return
        if pos:
            del buffer[:pos]

    # -- what others call -------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        """Append a frame to the send buffer. While `is_full`, callers have to wait before more."""
        assert self.transport is not None
        self.transport.write(_SIZE.pack(len(frame)) + frame)

    def close(self) -> None:
        """End the connection once the send buffer is written; `on_lost` is not called."""
        self._is_closing = True
        if self.transport is not None:
            self.transport.close()

    def fail(self, reason: str) -> None:
        """End the connection at once; `on_lost` is called with the reason."""
        if self.transport is not None:
            self.transport.abort()
        self._lose(reason)

    def addresses(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Ours and the target's, as (host, port)."""
        ours, theirs = self._ends
        return ours, theirs

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = reason
            self._buffer.clear()
            if not self._is_closing:
                self.on_lost(reason)

    async def ask(self, message: Message) -> Message:
        """Send one message of our own and wait for its answer; nothing else may be under way.

        Raises ConnectFailed.
        """
        data = await self.ask_frame(encode_message(message))
        try:
            return decode_message(
                data, side="response", api_key=message.api_key, api_version=message.api_version
            )
        except DecodeError as error:
            raise ConnectFailed("unreachable", f"the answer is no Kafka: {error}") from None

    async def ask_frame(self, frame: bytes) -> bytes:
        """Send a frame and wait for the next one that comes; nothing else may be under way.

        Raises ConnectFailed.
        """
        arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def take(answer: bytes) -> None:
            if not arrived.done():
                arrived.set_result(answer)

        def lost(reason: str) -> None:
            if not arrived.done():
                arrived.set_exception(ConnectFailed("unreachable", reason))

        before = self.on_frame, self.on_lost
        self.on_frame, self.on_lost = take, lost
        try:
            if self.lost is not None:
                raise ConnectFailed("unreachable", self.lost)
            self.send(frame)
            return await arrived
        finally:
            self.on_frame, self.on_lost = before

    async def log_in(self, sasl: Sasl) -> None:
        """SaslHandshake and SaslAuthenticate (KIP-152). Raises ConnectFailed."""
        try:
            answer = await self.ask(
                request(ApiKey.SASL_HANDSHAKE, 1, {"mechanism": sasl.mechanism})
            )
        except ConnectFailed as error:
            raise ConnectFailed(
                "login",
                f"the target ended the connection at SaslHandshake ({error}); "
                "is SASL asked for on this port?",
            ) from None
        if answer.body["error_code"]:
            offered = ", ".join(answer.body["mechanisms"]) or "none"
            raise ConnectFailed("login", f"SASL {sasl.mechanism} is not offered (only: {offered})")
        tokens = sasl.tokens()
        try:
            token = next(tokens)
            while True:
                reply = await self.ask(request(ApiKey.SASL_AUTHENTICATE, 1, {"auth_bytes": token}))
                if reply.body["error_code"]:
                    said = reply.body["error_message"] or f"error {reply.body['error_code']}"
                    raise ConnectFailed("login", f"SASL {sasl.mechanism} was refused: {said}")
                self.session_lifetime_ms = reply.body["session_lifetime_ms"]
                token = tokens.send(reply.body["auth_bytes"])
        except StopIteration:
            return
        except LoginFailed as error:
            raise ConnectFailed("login", str(error)) from None

    @property
    def relogin_s(self) -> float | None:
        """After how many seconds the target wants a new login (KIP-368); None: never."""
        life = self.session_lifetime_ms
        return life / 1000 * _REAUTHENTICATE_AT if life > 0 else None


def request(api_key: int, api_version: int, body: dict[str, object]) -> Message:
    """A request of our own; its correlation id does not matter, nothing else is under way."""
    header = {"correlation_id": 0, "client_id": CLIENT_ID}
    return Message(api_key, api_version, "request", header, dict(body))


async def connect(host: str, port: int, access: Access) -> Link:
    """A connection that is ready for requests. Raises ConnectFailed."""
    return await connect_as(Link, host, port, access)


async def connect_as(make: type[L], host: str, port: int, access: Access) -> L:
    """The same, as a kind of Link of the caller's own."""
    loop = asyncio.get_running_loop()
    context = access.tls.context() if access.tls else None
    name = host if access.tls else None
    link: L | None = None
    try:
        async with asyncio.timeout(access.connect_timeout):
            _, link = await loop.create_connection(
                make, host, port, ssl=context, server_hostname=name
            )
            if access.sasl is not None:
                await link.log_in(access.sasl)
            if link.lost is not None:
                raise ConnectFailed("unreachable", link.lost)
            return link
    except TimeoutError:
        kind, reason = "timeout", f"no answer within {access.connect_timeout:g} s"
    except ssl.SSLError as error:
        kind, reason = "tls", f"TLS: {reason_of(error)}"
    except ConnectFailed:
        if link is not None:
            link.close()
        raise
    except OSError as error:
        kind, reason = "unreachable", reason_of(error)
        if context is not None and isinstance(error, ConnectionResetError):
            kind, reason = "tls", "the connection ended during the TLS handshake; is TLS spoken?"
    if link is not None:
        link.close()
    raise ConnectFailed(kind, reason)


def reason_of(error: BaseException) -> str:
    """One clause, without a class name where the system has words for it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate cannot be trusted ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        text = (error.reason or str(error)).lower().replace("_", " ")
        if " alert " in f" {text} ":
            return f"the target refused with {text}; does it want a client's certificate?"
        return f"{text}; is TLS spoken on this port?" if "wrong version" in text else text
    if isinstance(error, socket.gaierror):
        return f"the host's name has no address ({(error.strerror or str(error)).lower()})"
    if isinstance(error, OSError):
        # asyncio words these errors itself; if it tried several addresses, take the last error
        numbers = re.findall(r"\[Errno (\d+)\]", str(error))
        number = int(numbers[-1]) if numbers else error.errno
        return os.strerror(number).lower() if number else str(error) or type(error).__name__
    return str(error) or type(error).__name__


def allow_many_files() -> None:
    """Raise the limit of open connections to the system's maximum; Windows has no such limit."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _ignore(_: object) -> None:
    pass


def _nothing() -> None:
    pass
