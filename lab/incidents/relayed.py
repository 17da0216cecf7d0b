"""Sessions through relays that read what they forward: Kafka requests, or PROXY headers."""

import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import datetime

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.protocol.error_codes import ErrorCode
from lab.incidents.clients import KAFKA_PYTHON, LIBRDKAFKA, create_topic, producer, producing
from lab.incidents.network import Relay, end
from lab.incidents.scene import Scene, now, wait_until

_PRODUCE = 0
_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_PROXY_TCP4, _LOCAL = b"\x21\x11", b"\x20\x00"  # version and command, family and transport


class RefusingRelay(Relay):
    """A relay that answers a Produce request itself, with NOT_LEADER_OR_FOLLOWER.

    The broker never gets that request. Its answer waits for `delay_s`, and so do the responses
    after it, because a broker answers in order.
    """

    delay_s = 0.1
    refuses_next = False

    def _requests(self, down: socket.socket, up: socket.socket) -> None:
        stream = down.makefile("rb")
        with suppress(OSError):
            while prefix := stream.read(4):
                frame = stream.read(int.from_bytes(prefix, "big"))
                if self.refuses_next and frame[:2] == _PRODUCE.to_bytes(2, "big"):
                    self.refuses_next, self.is_holding = False, True
                    threading.Timer(self.delay_s, self._refuse, (down, frame)).start()
                else:
                    up.sendall(prefix + frame)
        end(up)

    def _refuse(self, down: socket.socket, frame: bytes) -> None:
        request = decode_message(frame, side="request")
        topics = [
            {
                **{key: topic[key] for key in ("name", "topic_id") if key in topic},
                "partition_responses": [
                    {
                        "index": partition["index"],
                        "error_code": int(ErrorCode.NOT_LEADER_OR_FOLLOWER),
                        "base_offset": -1,
                    }
                    for partition in topic["partition_data"]
                ],
            }
            for topic in request.body["topic_data"]
        ]
        header = {"correlation_id": request.header["correlation_id"]}
        body = {"responses": topics}
        response = Message(_PRODUCE, request.api_version, "response", header, body)
        data = encode_message(response)
        down.sendall(len(data).to_bytes(4, "big") + data)
        self.is_holding = False


class ProxySender(Relay):
    """A load balancer: it adds a PROXY header with the client's address to each connection.

    Its own address is 127.0.0.2, and its ports are those of the clients, so that a capture after
    it proves which client each header must name.
    """

    version = 1

    def _connect(self, down: socket.socket) -> socket.socket:
        client_ip, client_port = down.getpeername()
        up = socket.socket()
        up.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        up.bind(("127.0.0.2", client_port))
        up.connect(("127.0.0.1", self.upstream))
        if self.version == 1:
            up.sendall(f"PROXY TCP4 {client_ip} 127.0.0.1 {client_port} {self.port}\r\n".encode())
        else:
            addresses = socket.inet_aton(client_ip) + socket.inet_aton("127.0.0.1")
            ports = struct.pack(">HH", client_port, self.port)
            up.sendall(_SIGNATURE + _PROXY_TCP4 + struct.pack(">H", 12) + addresses + ports)
        return up

    def check_health(self) -> None:
        """Connect as the balancer itself: its header names no client."""
        with socket.create_connection(("127.0.0.1", self.upstream)) as up:
            up.sendall(_SIGNATURE + _LOCAL + struct.pack(">H", 0))
            time.sleep(0.1)


class ProxyReceiver(Relay):
    """A relay that removes the PROXY header, because Apache Kafka's brokers do not read it."""

    def _connect(self, down: socket.socket) -> socket.socket:
        stream = down.makefile("rb", buffering=0)
        header = stream.read(len(_SIGNATURE)) or b""
        if header == _SIGNATURE:
            (size,) = struct.unpack(">2xH", stream.read(4) or bytes(4))
            stream.read(size)
        else:
            while header and not header.endswith(b"\r\n"):
                header += stream.read(1) or b"\r\n"
        return super()._connect(down)


def records_overtaken(scene: Scene) -> None:
    """A producer without idempotence has two requests in flight, and the first one fails."""
    relay = RefusingRelay()
    scene.start_behind(relay)
    create_topic(relay.address)
    delivered: dict[str, datetime] = {}

    def write(name: str) -> None:
        def note(*_: object) -> None:
            delivered.setdefault(name, now())

        for line in range(scene.pick(5, 12)):
            one.produce("orders", f"{name} {line}", on_delivery=note)

    def overtake(name: str) -> None:
        relay.refuses_next = True
        write(f"first {name}")
        wait_until(lambda: one.poll(0.001) >= 0 and not relay.refuses_next)
        write(f"second {name}")
        wait_until(lambda: one.poll(0.001) >= 0 and f"first {name}" in delivered)
        assert delivered[f"second {name}"] < delivered[f"first {name}"]

    with scene.recording(relay.port):
        one = producer(
            relay.address,
            client_id="shop",
            enable_idempotence=False,
            linger_ms=5,
            max_in_flight_requests_per_connection=5,
            retry_backoff_ms=scene.pick(50, 200),
        )
        for number in range(10):
            write(f"order {number}")
            one.flush(30)
        for name in scene.pick(("a",), ("a", "b", "c")):
            overtake(name)
            time.sleep(0.5)
        write("last")
        one.flush(30)
    late = [time for name, time in delivered.items() if name.startswith("first")]
    scene.happened("out_of_order_records", "orders-0", min(late), max(late))


def clients_proxied(scene: Scene) -> None:
    """Healthy: clients of load balancers that send PROXY headers of versions 1 and 2."""
    receivers, senders = [ProxyReceiver(), ProxyReceiver()], [ProxySender(), ProxySender()]
    for relay in (*receivers, *senders):
        scene.stack.callback(relay.close)
    names = ("PLAINTEXT", "SECOND")
    addresses = [sender.address for sender in senders]
    advertised = [f"{name}://{address}" for name, address in zip(names, addresses, strict=True)]
    broker = scene.broker(
        {"advertised.listeners": ",".join(advertised)}, listeners={"SECOND": "PLAINTEXT"}
    )
    for version, (name, receiver, sender) in enumerate(
        zip(names, receivers, senders, strict=True), start=1
    ):
        sender.version = version
        receiver.open(broker.ports[name])
        sender.open(receiver.port)
    create_topic(addresses[0])
    libraries = scene.pick((LIBRDKAFKA, KAFKA_PYTHON), (KAFKA_PYTHON, LIBRDKAFKA))
    with (
        scene.recording(*(receiver.port for receiver in receivers)),
        producing(libraries[0], addresses[0], "shop", 20),
        producing(libraries[1], addresses[1], "web", 20),
    ):
        senders[1].check_health()
        time.sleep(scene.pick(3, 6))
