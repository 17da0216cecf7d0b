"""Connections to the target: frames out, frames in, TLS and SASL underneath, time limits.

`connect` opens a `Link`, logs in, and hands it over. `Connections` has those of a run. Everything
that can go wrong is a `ConnectFailed` with one readable clause.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.errors import DecodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import ANONYMOUS_PRINCIPAL, Attempt
from kdissect.replay.target.auth import LoginFailed, Sasl, TlsOptions, tls_context

ANSWER_SIZE_MAX = 1 << 30  # a broker's own limits are far below
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


@dataclass(slots=True)
class LinkRecord:
    """A connection to the target: its addresses and times, in ns since the run's start.

    attempts: the requests of a run that went over it, also those of the replay's own to members of
    groups.
    """

    ours: tuple[str, int]
    theirs: tuple[str, int]
    opened_ns: int
    closed_ns: int = -1
    attempts: list[Attempt] = field(default_factory=list)


class Posted(NamedTuple):
    """A request on its way. answered: done when the attempt has its answer."""

    attempt: Attempt
    answered: asyncio.Future[None]


class Link:
    """Frames over one connection: requests go out at once, their answers come in the same order.

    ends: ours and the target's, as sockets name them. now: the clock of all its times.
    pending: the requests that are not answered, in order. lost: why the connection has ended, or
    None.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: Sequence[tuple[str, int]],
        now: Callable[[], int],
    ) -> None:
        ours, theirs = ((str(end[0]), int(end[1])) for end in ends)
        self.record = LinkRecord(ours, theirs, now())
        self.pending: deque[Posted] = deque()
        self.lost: str | None = None
        self._reader, self._writer, self._now = reader, writer, now
        self._login_due_ns = 0  # 0: never
        self._correlation_id = 0
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Take answers until the connection ends."""
        try:
            while self.lost is None:
                size = _SIZE.unpack(await self._reader.readexactly(_SIZE.size))[0]
                if size < 4 or size > ANSWER_SIZE_MAX:
                    self.fail(f"the target's bytes are no Kafka answer (size {size})")
                else:
                    self._arrived(await self._reader.readexactly(size))
        except asyncio.IncompleteReadError:
            self.fail("closed by the target")
        except OSError as error:
            self.fail(reason_of(error))

    def _arrived(self, frame: bytes) -> None:
        """Kafka answers in order on a connection: a frame belongs to the first pending request."""
        if not self.pending:
            self.fail("an answer came that nothing had asked for")
            return
        attempt, answered = self.pending[0]
        found, wanted = (int.from_bytes(each, "big") for each in (frame[:4], attempt.sent[4:8]))
        if found != wanted:
            self.fail(f"an answer has correlation id {found} where {wanted} was due")
            return
        self.pending.popleft()
        attempt.answer, attempt.answered_ns = frame, self._now()
        if not answered.done():
            answered.set_result(None)

    def send(self, frame: bytes) -> Attempt:
        """Append a request to the send buffer, with its correlation id.

        Callers await `writable` before.
        """
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        frame = frame[:4] + self._correlation_id.to_bytes(4, "big") + frame[8:]
        self._writer.write(_SIZE.pack(len(frame)) + frame)
        self.record.attempts.append(Attempt(frame, self._now()))
        return self.record.attempts[-1]

    def post(self, frame: bytes, limit_s: float = math.inf) -> Posted:
        """Send a request that is to be answered.

        `answered` fails with ConnectFailed if the connection ends before, or if `limit_s` pass,
        which ends the connection.
        """
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[None] = loop.create_future()
        if self.lost is not None:
            answered.set_exception(ConnectFailed("unreachable", self.lost))
            return Posted(Attempt(frame, self._now()), answered)
        posted = Posted(self.send(frame), answered)
        self.pending.append(posted)
        if limit_s < math.inf:
            loop.call_later(limit_s, self._overdue, posted, limit_s)
        return posted

    async def writable(self) -> None:
        """Wait until the send buffer has room."""
        with suppress(OSError):  # of a connection that ends, which the next request shows
            await self._writer.drain()

    def _overdue(self, posted: Posted, limit_s: float) -> None:
        """End the connection if the time for an answer is over. The answers to earlier requests are
        due before it."""
        if posted.answered.done():
            return
        if self.pending[0] is not posted:
            asyncio.get_running_loop().call_later(limit_s, self._overdue, posted, limit_s)
            return
        posted.answered.set_exception(ConnectFailed("timeout", f"no answer within {limit_s:g} s"))
        self.fail("the connection was given up: an earlier answer did not come")

    def close(self, reason: str = "closed") -> None:
        """End the connection once the send buffer is written."""
        self._writer.close()
        self._lose(reason)

    def fail(self, reason: str) -> None:
        """End the connection at once."""
        self._writer.transport.abort()
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost, self.record.closed_ns = reason, self._now()
        while self.pending:
            answered = self.pending.popleft().answered
            if not answered.done():
                answered.set_exception(ConnectFailed("unreachable", reason))

    async def ask(self, message: Message) -> Message:
        """Send one message of our own and wait for its answer. Raises ConnectFailed."""
        attempt, answered = self.post(encode_message(message))
        # it may hold a password, and is no request of a run
        self.record.attempts = [each for each in self.record.attempts if each is not attempt]
        await answered
        try:
            key, version = message.api_key, message.api_version
            return decode_message(attempt.answer, side="response", api_key=key, api_version=version)
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


async def connect(
    host: str, port: int, access: Access, now: Callable[[], int] = time.monotonic_ns
) -> Link:
    """A connection that is ready for requests. Raises ConnectFailed."""
    context = tls_context(access.tls) if access.tls else None
    name = host if access.tls else None
    link: Link | None = None
    try:
        async with asyncio.timeout(access.connect_timeout):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=context, server_hostname=name
            )
            ends = [writer.get_extra_info(end) for end in ("sockname", "peername")]
            if None in ends:  # the peer has reset the connection: it is none any more
                raise ConnectFailed("unreachable", os.strerror(errno.ECONNRESET).lower())
            link = Link(reader, writer, ends, now)
            if access.sasl is not None:
                await link.log_in(access.sasl)
            if link.lost is not None:
                raise ConnectFailed("unreachable", link.lost)
            return link
    except ConnectFailed as error:
        failed = error
    except TimeoutError:
        failed = ConnectFailed("timeout", f"no answer within {access.connect_timeout:g} s")
    except ssl.SSLError as error:
        failed = ConnectFailed("tls", f"TLS: {reason_of(error)}")
    except OSError as error:
        failed = ConnectFailed("unreachable", reason_of(error))
        if context is not None and isinstance(error, ConnectionResetError):
            reason = "the connection ended during the TLS handshake; is TLS spoken?"
            failed = ConnectFailed("tls", reason)
    if link is not None:
        link.close()
    raise failed


Links = dict[int | None, Link]
"""Connections to nodes of the target; None: to the address that the user gave."""


class Connections:
    """The connections of a run to its target.

    address: of a node. now: the run's clock. opened: all of them.
    reconnects: connections that were opened again.
    """

    def __init__(
        self,
        address: Callable[[int | None], tuple[str, int]],
        access: Access,
        now: Callable[[], int],
    ) -> None:
        self._address, self._access, self._now = address, access, now
        self._slots = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self.opened: list[Link] = []
        self.reconnects = 0

    async def of(self, links: Links, node_id: int | None) -> Link:
        """The connection of `links` to a node, opened or logged in again if it has to be.

        Raises ConnectFailed.
        """
        link = links.get(node_id)
        if link is None or link.lost is not None:
            self.reconnects += link is not None
            link = links[node_id] = await self._open(node_id)
            self.opened.append(link)
        elif link.is_login_due:
            await self._log_in_again(link)
        await link.writable()
        return link

    async def _open(self, node_id: int | None) -> Link:
        """Try for a while, but begin no try after the time limit of one connection."""
        host, port = self._address(node_id)
        pauses, end_s = list(RECONNECT_PAUSES_S), time.monotonic() + self._access.connect_timeout
        while True:
            try:
                async with self._slots:
                    return await connect(host, port, self._access, self._now)
            except ConnectFailed as error:
                is_late = not pauses or time.monotonic() + pauses[0] >= end_s
                if error.kind in ("tls", "login") or is_late:
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
