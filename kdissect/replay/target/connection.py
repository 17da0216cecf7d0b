"""Connections to the target: frames out, frames in, TLS and SASL underneath, time limits.

A `Link` is an asyncio protocol, not a stream: a frame costs one callback. `connect` opens one, logs
in, and hands it over. `Connections` has those of a run. Everything that can go wrong is a
`ConnectFailed` with one readable clause.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import re
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.errors import DecodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import ANONYMOUS_PRINCIPAL
from kdissect.replay.target.auth import LoginFailed, Sasl, TlsOptions, tls_context

ANSWER_SIZE_MAX = 1 << 30  # a broker's own limits are far below
WRITE_BUFFER_HIGH = 1 << 20  # bytes waiting in one connection before it counts as slow
CLIENT_ID = "kdissect"
_SIZE = struct.Struct(">i")
_REAUTHENTICATE_AT = 0.8  # of a session's lifetime; Java clients use 0.85 to 0.95
CONNECTS_AT_ONCE = 40  # Kafka's default backlog is 50; a SYN that is dropped costs a second
RECONNECT_PAUSES_S = (0.05, 0.1, 0.25, 0.5, 1.0, 1.0)


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


class Answer(NamedTuple):
    """A response's frame, and when its last byte came (`time.monotonic_ns`)."""

    frame: bytes
    at_ns: int


class Link(asyncio.Protocol):
    """Frames over one connection: requests go out at once, their answers come in the same order.

    number: among the connections of a run. pending: correlation id and answer to come of each
    request that is not answered, in order. lost: why the connection has ended, or None. opened_ns,
    lost_ns: when, by `time.monotonic_ns`; -1 not yet.
    """

    def __init__(self) -> None:
        self.number = -1
        self.transport: asyncio.Transport | None = None
        self.pending: deque[tuple[int, asyncio.Future[Answer]]] = deque()
        self.lost: str | None = None
        self.opened_ns, self.lost_ns = time.monotonic_ns(), -1
        self._login_due_ns = 0  # 0: never
        self._correlation_id = 0
        self._ends: tuple[tuple[str, int], ...] = ()
        self._buffer = bytearray()
        self._is_writable = asyncio.Event()
        self._is_writable.set()

    # -- asyncio's callbacks ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_HIGH)
        self.transport = transport
        ends = [transport.get_extra_info(name) for name in ("sockname", "peername")]
        if None in ends:  # the peer has reset the connection, the socket is no longer connected
            self.lost = os.strerror(errno.ECONNRESET).lower()
        else:
            self._ends = tuple((str(end[0]), int(end[1])) for end in ends)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("closed by the target" if exc is None else reason_of(exc))

    def pause_writing(self) -> None:
        self._is_writable.clear()

    def resume_writing(self) -> None:
        self._is_writable.set()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        pos, end = 0, len(buffer)
        while end - pos >= 4 and self.lost is None:
            size = _SIZE.unpack_from(buffer, pos)[0]
            if size < 4 or size > ANSWER_SIZE_MAX:
                self.fail(f"the target's bytes are no Kafka answer (size {size})")
                return
            if end - pos - 4 < size:
                break
            frame = bytes(memoryview(buffer)[pos + 4 : pos + 4 + size])
            pos += 4 + size
            self._arrived(frame)
        if pos:
            del buffer[:pos]

    def _arrived(self, frame: bytes) -> None:
        """Kafka answers in order on a connection: a frame belongs to the first pending request."""
        if not self.pending:
            self.fail("an answer came that nothing had asked for")
            return
        found, (wanted, answer) = int.from_bytes(frame[:4], "big"), self.pending[0]
        if found != wanted:
            self.fail(f"an answer has correlation id {found} where {wanted} was due")
            return
        self.pending.popleft()
        if not answer.done():
            answer.set_result(Answer(frame, time.monotonic_ns()))

    # -- what others call -------------------------------------------------------------------

    def send(self, frame: bytes) -> bytes:
        """Append a request to the send buffer; return it with its correlation id.

        Callers await `writable` before.
        """
        assert self.transport is not None
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        frame = frame[:4] + self._correlation_id.to_bytes(4, "big") + frame[8:]
        self.transport.write(_SIZE.pack(len(frame)) + frame)
        return frame

    def post(self, frame: bytes, limit_s: float = math.inf) -> tuple[bytes, asyncio.Future[Answer]]:
        """Send a request; return it as it went out, and its answer to come.

        The future fails with ConnectFailed if the connection ends before, or if `limit_s` pass,
        which ends the connection.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        if self.lost is not None:
            answer.set_exception(ConnectFailed("unreachable", self.lost))
            return frame, answer
        sent = self.send(frame)
        self.pending.append((self._correlation_id, answer))
        if limit_s < math.inf:
            loop.call_later(limit_s, self._overdue, answer, limit_s)
        return sent, answer

    async def writable(self) -> None:
        """Wait until the send buffer has room."""
        await self._is_writable.wait()

    def _overdue(self, answer: asyncio.Future[Answer], limit_s: float) -> None:
        """End the connection if the time for an answer is over. The answers to earlier requests are
        due before it."""
        if answer.done():
            return
        if self.pending[0][1] is not answer:
            asyncio.get_running_loop().call_later(limit_s, self._overdue, answer, limit_s)
            return
        answer.set_exception(ConnectFailed("timeout", f"no answer within {limit_s:g} s"))
        self.fail("the connection was given up: an earlier answer did not come")

    def close(self, reason: str = "closed") -> None:
        """End the connection once the send buffer is written."""
        if self.transport is not None:
            self.transport.close()
        self._lose(reason)

    def fail(self, reason: str) -> None:
        """End the connection at once."""
        if self.transport is not None:
            self.transport.abort()
        self._lose(reason)

    def addresses(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Ours and the target's, as (host, port)."""
        return self._ends[0], self._ends[1]

    def _lose(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost, self.lost_ns = reason, time.monotonic_ns()
        self._buffer.clear()
        self._is_writable.set()
        while self.pending:
            _, answer = self.pending.popleft()
            if not answer.done():
                answer.set_exception(ConnectFailed("unreachable", reason))

    async def ask(self, message: Message) -> Message:
        """Send one message of our own and wait for its answer. Raises ConnectFailed."""
        answer = await self.post(encode_message(message))[1]
        try:
            key, version = message.api_key, message.api_version
            return decode_message(answer.frame, side="response", api_key=key, api_version=version)
        except DecodeError as error:
            raise ConnectFailed("unreachable", f"the answer is no Kafka: {error}") from None

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
                due_ns = int(reply.body["session_lifetime_ms"] * 1e6 * _REAUTHENTICATE_AT)
                self._login_due_ns = time.monotonic_ns() + due_ns if due_ns else 0
                token = tokens.send(reply.body["auth_bytes"])
        except StopIteration:
            return
        except LoginFailed as error:
            raise ConnectFailed("login", str(error)) from None

    @property
    def is_login_due(self) -> bool:
        """Return whether most of the session's lifetime is over, if it has one (KIP-368)."""
        return 0 < self._login_due_ns <= time.monotonic_ns()


def request(api_key: int, api_version: int, body: Mapping[str, object]) -> Message:
    """A request of our own; the connection sets its correlation id."""
    header = {"correlation_id": 0, "client_id": CLIENT_ID}
    return Message(api_key, api_version, "request", header, dict(body))


async def connect(host: str, port: int, access: Access) -> Link:
    """A connection that is ready for requests. Raises ConnectFailed."""
    loop = asyncio.get_running_loop()
    context = tls_context(access.tls) if access.tls else None
    name = host if access.tls else None
    link: Link | None = None
    try:
        async with asyncio.timeout(access.connect_timeout):
            _, link = await loop.create_connection(
                Link, host, port, ssl=context, server_hostname=name
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


Links = dict[int | None, Link]
"""Connections to nodes of the target; None: to the address that the user gave."""


class Connections:
    """The connections of a run to its target.

    address: of a node. opened: all of them, in order of their numbers. live: those that are open.
    reconnects: connections that were opened again.
    """

    def __init__(self, address: Callable[[int | None], tuple[str, int]], access: Access) -> None:
        self._address, self._access = address, access
        self._slots = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self.opened: list[Link] = []
        self.reconnects = 0

    @property
    def live(self) -> list[Link]:
        return [link for link in self.opened if link.lost is None]

    async def of(self, links: Links, node_id: int | None) -> Link:
        """The connection of `links` to a node, opened or logged in again if it has to be.

        Raises ConnectFailed.
        """
        link = links.get(node_id)
        if link is None or link.lost is not None:
            self.reconnects += link is not None
            link = links[node_id] = await self._open(node_id)
            link.number = len(self.opened)
            self.opened.append(link)
        elif link.is_login_due:
            await self._log_in_again(link)
        await link.writable()
        return link

    async def _open(self, node_id: int | None) -> Link:
        """Try for a while."""
        host, port = self._address(node_id)
        pauses = list(RECONNECT_PAUSES_S)
        while True:
            try:
                async with self._slots:
                    return await connect(host, port, self._access)
            except ConnectFailed as error:
                if error.kind in ("tls", "login") or not pauses:
                    reason = f"no connection to {host}:{port}: {error}"
                    raise ConnectFailed(error.kind, reason) from None
                await asyncio.sleep(pauses.pop(0))

    async def _log_in_again(self, link: Link) -> None:
        """KIP-368: a session's time is up; a new login over the same connection."""
        assert self._access.sasl is not None
        while link.pending:
            await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(self._access.connect_timeout):
                await link.log_in(self._access.sasl)
        except (ConnectFailed, TimeoutError) as error:
            link.fail(f"the new login failed: {error}")


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
