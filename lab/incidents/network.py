"""A relay between clients and a broker that delays, drops, resets, slows down or refuses."""

import ctypes
import socket
import struct
import threading
import time
from contextlib import suppress

from tests.broker.kafka_broker import free_ports

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux, which the socket module does not name
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST (tcp(7))


def drop_segments(sock: socket.socket) -> None:
    """Let the kernel drop all further segments of a socket: no ACK, no RST, as behind a firewall.

    The filter is the BPF program `ret 0`. A capture sees the segments before the filter.
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    header = struct.pack("HxxxxxxQ", 1, ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, header)


def reset(sock: socket.socket) -> None:
    """Close a connection with RST."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    _shut(sock)


def _shut(sock: socket.socket) -> None:
    """Close a socket that another thread may read from."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RD)
    sock.close()


class Relay:
    """Forwards connections of a loopback port to a broker.

    receive_buffer: SO_RCVBUF of the clients' connections; a small one has a small window.
    bytes_per_second: limit for requests. reset_idle_s: a request after that idle time is
    answered with RST.
    """

    def __init__(
        self, *, receive_buffer: int = 0, bytes_per_second: int = 0, reset_idle_s: float = 0
    ) -> None:
        self.port = free_ports(1)[0]
        self.receive_buffer, self.bytes_per_second = receive_buffer, bytes_per_second
        self.reset_idle_s = reset_idle_s
        self.is_holding = False
        self.is_swallowing = False
        self.upstream = 0
        self._listener: socket.socket | None = None
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._dropped: list[tuple[socket.socket, socket.socket]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def open(self, upstream: int = 0) -> None:
        """Listen, and forward to a port of this host."""
        self.upstream = upstream or self.upstream
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.receive_buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(128)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def refuse(self) -> None:
        """Close the port and reset its connections."""
        self._stop_listening()
        self.reset_all()

    def reset_all(self) -> None:
        """Close all connections with RST."""
        for down, up in self._take():
            reset(down)
            reset(up)

    def drop_all(self) -> None:
        """Forward nothing more of the open connections, without a word to either side."""
        for down, up in self._take():
            drop_segments(down)
            drop_segments(up)
            self._dropped.append((down, up))

    def drop_connects(self) -> None:
        """Answer no SYN any more."""
        assert self._listener is not None
        drop_segments(self._listener)

    def close(self) -> None:
        self._stop_listening()
        self.reset_all()

    def _take(self) -> list[tuple[socket.socket, socket.socket]]:
        pairs, self._pairs = self._pairs, []
        return pairs

    def _stop_listening(self) -> None:
        if self._listener is not None:
            _shut(self._listener)
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                down, _ = listener.accept()
                up = self._connect(down)
                for sock in (down, up):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pairs.append((down, up))
                for target in (self._requests, self._responses):
                    threading.Thread(target=target, args=(down, up), daemon=True).start()

    def _connect(self, down: socket.socket) -> socket.socket:
        """The connection to the broker for a client's connection."""
        return socket.create_connection(("127.0.0.1", self.upstream))

    def _requests(self, down: socket.socket, up: socket.socket) -> None:
        last = time.monotonic()
        with suppress(OSError):
            while data := down.recv(4096 if self.bytes_per_second else 65536):
                if self.reset_idle_s and time.monotonic() - last > self.reset_idle_s:
                    reset(down)
                    break
                last = time.monotonic()
                if self.bytes_per_second:
                    time.sleep(len(data) / self.bytes_per_second)
                up.sendall(data)
        end(up)

    def _responses(self, down: socket.socket, up: socket.socket) -> None:
        with suppress(OSError):
            while data := up.recv(65536):
                while self.is_holding:
                    time.sleep(0.01)
                if self.is_swallowing:
                    continue
                down.sendall(data)
        end(down)


def end(sock: socket.socket) -> None:
    """Send FIN."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
