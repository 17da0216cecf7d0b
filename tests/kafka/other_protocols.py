"""Conversations of protocols that are not Kafka, with random contents."""

import random
import struct
from pathlib import Path
from typing import Any

import kdissect
from tests.builders.captures import Packet, write_packets

Talk = list[tuple[int, bytes]]


def read_packets(packets: list[Packet], folder: Path) -> Any:
    """The tables of these packets."""
    return kdissect.read(write_packets(folder / "made.pcap", packets))


def sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def http(choose: random.Random) -> Talk:
    talk: Talk = []
    for number in range(12):
        head = f"GET /orders/{number} HTTP/1.1\r\nHost: shop\r\nAccept: */*\r\n\r\n".encode()
        body = choose.randbytes(choose.randint(0, 900))
        answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        talk += [(0, head), (1, answer)]
    return talk


def _http2(kind: int, stream: int, data: bytes, flags: int = 0) -> bytes:
    return (
        struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data
    )


def grpc(choose: random.Random) -> Talk:
    """HTTP/2 with messages of a flag and a four-byte size."""
    talk: Talk = [
        (0, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _http2(4, 0, b"\0\3\0\0\0\x64")),
        (1, _http2(4, 0, b"") + _http2(4, 0, b"", 1)),
    ]
    for number in range(12):
        data = b"\0" + sized(b"\x0a" + choose.randbytes(choose.randint(3, 300)))
        ask = _http2(1, 2 * number + 1, choose.randbytes(30), 4) + _http2(
            0, 2 * number + 1, data, 1
        )
        talk += [(0, ask), (1, _http2(1, 2 * number + 1, b"\x88", 4) + ask)]
    return talk


def zookeeper(choose: random.Random) -> Talk:
    password = choose.randbytes(16)
    ask = struct.pack(">iqiq", 0, 0, 18000, 0) + struct.pack(">i", 16) + bytes(16) + b"\0"
    told = struct.pack(">iiq", 0, 18000, 0x100001) + struct.pack(">i", 16) + password + b"\0"
    talk: Talk = [(0, sized(ask)), (1, sized(told))]
    for xid in range(1, 40):
        path = f"/brokers/topics/t{xid}".encode()
        if xid % 5 == 0:
            talk += [(0, sized(struct.pack(">ii", -2, 11)))]
            talk += [(1, sized(struct.pack(">iqi", -2, 77 + xid, 0)))]
            continue
        talk += [(0, sized(struct.pack(">ii", xid, 4) + sized(path) + b"\0"))]
        body = sized(b'{"version":1}') + bytes(68)
        talk += [(1, sized(struct.pack(">iqi", xid, 77 + xid, 0) + body))]
    return talk


def postgres(choose: random.Random) -> Talk:
    def message(kind: bytes, data: bytes) -> bytes:
        return kind + struct.pack(">I", 4 + len(data)) + data

    start = struct.pack(">II", 8 + 16, 196608) + b"user\0me\0db\0x\0\0\0"
    talk: Talk = [(0, start), (1, message(b"R", bytes(4)) + message(b"Z", b"I"))]
    for number in range(20):
        row = struct.pack(">h", 2) + sized(str(number).encode()) + sized(choose.randbytes(20))
        talk += [(0, message(b"Q", b"select * from t where id = 1\0"))]
        talk += [(1, message(b"D", row) * 3 + message(b"C", b"SELECT 3\0") + message(b"Z", b"I"))]
    return talk


def thrift(choose: random.Random) -> Talk:
    """Framed and binary: size, version and type, method name, sequence id, fields."""
    talk: Talk = []
    for number in range(1, 30):
        name = choose.choice((b"getOrders", b"ping", b"putRow"))
        body = b"\x0b\0\1" + sized(b"orders") + b"\x08\0\2" + struct.pack(">i", number) + b"\0"
        for side, kind in ((0, 1), (1, 2)):
            head = struct.pack(">HH", 0x8001, kind) + sized(name) + struct.pack(">i", number)
            talk.append((side, sized(head + body)))
    return talk


def smb(choose: random.Random) -> Talk:
    """Direct TCP transport: a zero byte and three bytes of length."""
    talk: Talk = []
    for number in range(25):
        for side in (0, 1):
            head = b"\xfeSMB" + struct.pack("<HHIHHIIQ", 64, 1, 0, 5, 1, side, 0, number)
            talk.append((side, sized(head + bytes(32) + choose.randbytes(choose.randint(8, 200)))))
    return talk


def tls(choose: random.Random) -> Talk:
    def record(kind: int, data: bytes) -> bytes:
        return struct.pack(">BHH", kind, 0x0303, len(data)) + data

    hello = b"\1" + struct.pack(">I", 200)[1:] + b"\3\3" + choose.randbytes(198)
    talk: Talk = [(0, record(22, hello)), (1, record(22, b"\2" + hello[1:]))]
    for _ in range(20):
        talk += [(side, record(23, choose.randbytes(choose.randint(30, 900)))) for side in (0, 1)]
    return talk


def noise(choose: random.Random) -> Talk:
    return [(n % 2, choose.randbytes(choose.randint(1, 1200))) for n in range(40)]


def zeros(choose: random.Random) -> Talk:
    """Mostly zero bytes and small numbers, as in many binary formats."""
    return [
        (n % 2, bytes(choose.choice((0, 0, 0, 0, 0, 1, 2, 4, 16)) for _ in range(600)))
        for n in range(40)
    ]


def sized_noise(choose: random.Random) -> Talk:
    return [(n % 2, sized(choose.randbytes(choose.randint(8, 500)))) for n in range(60)]


def sized_counter(choose: random.Random) -> Talk:
    """Size, message type, counter, text: as near to Kafka as others come."""
    talk: Talk = []
    for number in range(40):
        text = f"user={number} action=login".encode()
        talk += [(0, sized(struct.pack(">HHI", 700, 1, number) + sized(text)))]
        talk += [(1, sized(struct.pack(">HHI", 701, 1, number) + sized(b"ok")))]
    return talk


def redis(choose: random.Random) -> Talk:
    return [(0, b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n"), (1, b"$-1\r\n")] * 20


def mongo(choose: random.Random) -> Talk:
    """Little-endian length, ids, opcode."""
    talk: Talk = []
    for number in range(30):
        body = bytes(4) + b"\0" + struct.pack("<I", 30) + b"\x02find\0\5\0\0\0rows\0" + bytes(9)
        for side in (0, 1):
            head = struct.pack("<4I", 16 + len(body), number, number * side, 2013)
            talk.append((side, head + body))
    return talk


def mysql(choose: random.Random) -> Talk:
    talk: Talk = [(1, b"\x4a\0\0\0\x0a8.0.36\0" + bytes(65))]
    for _ in range(20):
        query = b"\3select 1"
        talk += [(0, struct.pack("<I", len(query)) + query)]
        talk += [(1, b"\1\0\0\1\1\x17\0\0\2\3def\0\0\0\0011\0\x0c\x3f\0\1\0\0\0\x08\x81\0\0\0\0")]
    return talk


def smpp(choose: random.Random) -> Talk:
    """A size that counts itself, command, status, number: Produce without a client id, almost."""
    bind = choose.choice((1, 2, 9))
    first = choose.choice((0, 1, 65_536))

    def unit(command: int, number: int, body: bytes = b"") -> bytes:
        return struct.pack(">4I", 16 + len(body), command, 0, number) + body

    talk: Talk = [
        (0, unit(bind, first, b"station\0secret\0SMPP\0" + bytes([0x34, 1, 1, 0]))),
        (1, unit(bind | 1 << 31, first, b"centre\0")),
    ]
    for number in range(first + 1, first + 30):
        text = choose.randbytes(choose.randint(1, 140))
        body = b"\0\1\x0012345\0\1\x0067890\0" + bytes(9) + bytes([len(text)]) + text
        command = choose.choice((4, 5, 21, 3))
        talk += [(0, unit(command, number, b"" if command == 21 else body))]
        talk += [(1, unit(command | 1 << 31, number, b"" if command == 21 else b"id\0"))]
    return talk


def pulsar(choose: random.Random) -> Talk:
    """Two sizes, then a message of Protocol Buffers."""
    talk: Talk = []
    for number in range(30):
        for side in (0, 1):
            command = b"\x08" + bytes([choose.randint(2, 40)]) + choose.randbytes(12)[: number + 3]
            talk.append((side, sized(sized(command) + choose.randbytes(choose.choice((0, 90))))))
    return talk


def rocketmq(choose: random.Random) -> Talk:
    """A size, the size of a header in JSON, the header, a body."""
    talk: Talk = []
    for number in range(30):
        head = b'{"code":%d,"flag":%d,"opaque":%d}'
        body = choose.randbytes(choose.choice((0, 8, 300)))
        for side in (0, 1):
            talk.append((side, sized(sized(head % (310 * (1 - side), side, number)) + body)))
    return talk


def openwire(choose: random.Random) -> Talk:
    """A size, a type of one byte, a number."""
    talk: Talk = [(0, sized(b"\1ActiveMQ\0\0\0\x0c")), (1, sized(b"\1ActiveMQ\0\0\0\x0c"))]
    for number in range(30):
        command = struct.pack(">BIB", choose.choice((5, 10, 22)), number, 1) + choose.randbytes(40)
        talk += [(0, sized(command)), (1, sized(struct.pack(">BIBI", 30, number, 0, number)))]
    return talk


def hadoop(choose: random.Random) -> Talk:
    """A preface, then sizes and messages of Protocol Buffers with sizes of their own."""
    talk: Talk = [(0, b"hrpc\x09\0\0")]
    for number in range(30):
        head = b"\x08\2\x10\0\x18" + bytes([2 * number % 128]) + b"\x22\x10" + choose.randbytes(16)
        ask = bytes([len(head)]) + head + b"\x0f" + choose.randbytes(15)
        answer = b"\x08" + bytes([2 * number % 128]) + b"\x10\0\x18\x09"
        talk += [(0, sized(ask)), (1, sized(bytes([len(answer)]) + answer + choose.randbytes(30)))]
    return talk


PROTOCOLS = {
    http: "http", grpc: "http2", zookeeper: "zookeeper", postgres: "other", thrift: "other",
    smb: "other", tls: "tls", noise: "other", zeros: "other", sized_noise: "other",
    sized_counter: "other", redis: "other", mongo: "other", mysql: "other",
    smpp: "other", pulsar: "other", rocketmq: "other", openwire: "other", hadoop: "other",
}  # fmt: skip
