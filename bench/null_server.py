"""A server that answers every Kafka request at once, as a capture does: what clients can do alone.

One process, one epoll loop, no asyncio: its cost a request is a few microseconds, so that what a
client reaches against it is the client's own limit. A request of the capture gets the captured
response to it. For others, ApiVersions lists every API that is known here, Metadata has one node
(itself) and the requested topics with one partition, ListOffsets answers 0.
"""

import gc
import select
import socket
import struct
import sys
from collections import deque
from typing import Any

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.protocol import catalog
from kdissect.replay.workload.source import load_workload

_LIST_OFFSETS, _METADATA, _API_VERSIONS = 2, 3, 18


def _topic(name: str) -> dict[str, Any]:
    partition = {"partition_index": 0, "leader_id": 1, "replica_nodes": [1], "isr_nodes": [1]}
    return {"name": name, "partitions": [partition]}


def captured_responses(capture: str) -> dict[bytes, deque[bytes]]:
    """A request without its correlation id -> the responses to it in their order, b"" for none."""
    found: dict[bytes, deque[bytes]] = {}
    for exchange in sorted(load_workload([capture]).exchanges(), key=lambda it: it.request_time_ns):
        request = exchange.request
        if request is not None and (exchange.response or not exchange.expects_response):
            key = request[:4] + request[8:]
            found.setdefault(key, deque()).append(exchange.response or b"")
    return found


class NullServer:
    """Listens on a free port of the loopback interface. captured: see `captured_responses`."""

    def __init__(self, captured: dict[bytes, deque[bytes]]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port = self.listener.getsockname()[1]
        self.captured = captured
        self._answers: dict[bytes, bytes] = {}

    def answer(self, frame: bytes) -> bytes:
        """With its size prefix; b"" where none is due."""
        left = self.captured.get(frame[:4] + frame[8:])
        if left:
            found = left.popleft() if len(left) > 1 else left[0]  # the last one again and again
            return len(found).to_bytes(4, "big") + frame[4:8] + found[4:] if found else b""
        key = frame[:4]
        kept = self._answers.get(key)
        if kept is None:
            kept = self._make(frame)
            if frame[:2] not in (b"\0\2", b"\0\3"):  # these name what the request names
                self._answers[key] = kept
        return kept[:4] + frame[4:8] + kept[8:]

    def _make(self, frame: bytes) -> bytes:
        api_key, api_version = struct.unpack_from(">hh", frame)
        body: dict[str, Any] = {}
        if api_key == _API_VERSIONS:
            body["api_keys"] = [
                {"api_key": key, "min_version": first, "max_version": last}
                for key, api in catalog.apis().items()
                for first, last in [tuple(api.request.versions)]
            ]
            if api_version not in catalog.api(api_key).request.versions:
                api_version = 0
        elif api_key == _METADATA:
            asked = decode_message(frame, side="request").body["topics"]
            names = [each["name"] for each in asked or ()]
            body["brokers"] = [{"node_id": 1, "host": "127.0.0.1", "port": self.port}]
            body["topics"] = [_topic(name) for name in names]
        elif api_key == _LIST_OFFSETS:
            asked = decode_message(frame, side="request").body["topics"]
            body["topics"] = [
                {"name": each["name"], "partitions": [
                    {"partition_index": one["partition_index"], "offset": 0}
                    for one in each["partitions"]
                ]}
                for each in asked
            ]  # fmt: skip
        data = encode_message(Message(api_key, api_version, "response", {}, body))
        return len(data).to_bytes(4, "big") + data

    def serve(self) -> None:
        """Until the process is ended."""
        poll = select.epoll()
        poll.register(self.listener, select.EPOLLIN)
        clients: dict[int, tuple[socket.socket, bytearray]] = {}
        listening = self.listener.fileno()
        while True:
            for number, _ in poll.poll():
                if number == listening:
                    client, _ = self.listener.accept()
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    clients[client.fileno()] = client, bytearray()
                    poll.register(client, select.EPOLLIN)
                    continue
                client, waiting = clients[number]
                try:
                    data = client.recv(1 << 18)
                    if data:
                        waiting += data
                        client.sendall(self._take(waiting))
                except OSError:
                    data = b""
                if not data:
                    poll.unregister(number)
                    client.close()
                    del clients[number]

    def _take(self, waiting: bytearray) -> bytes:
        """The answers to the whole frames that came."""
        answers, pos = [], 0
        while len(waiting) - pos >= 12:
            size = int.from_bytes(waiting[pos : pos + 4], "big")
            if len(waiting) - pos - 4 < size:
                break
            answers.append(self.answer(bytes(waiting[pos + 4 : pos + 4 + size])))
            pos += 4 + size
        del waiting[:pos]
        return b"".join(answers)


def main() -> None:
    """Command: python -m bench.null_server CAPTURE; prints its port."""
    server = NullServer(captured_responses(sys.argv[1]))
    gc.freeze()
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    server.serve()


if __name__ == "__main__":
    main()
