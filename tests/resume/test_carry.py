"""Connections over several windows: when exchanges finish, and how limits act."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kdissect
from kdissect.capture import windows
from kdissect.capture.windows import WindowReader
from kdissect.kafka.assembly import PairStatus
from kdissect.kafka.options import StreamOptions
from kdissect.resume import continued
from kdissect.resume.carry import CompletedExchanges, ConnectionCarry
from kdissect.resume.next_window import CarryLimits

CLIENT, BROKER = b"\x0a\0\0\1", b"\x0a\0\0\2"
SYN, FIN, RST, ACK, PUSH = 2, 1, 4, 16, 24
SECOND = 1_000_000
FILE_HEADER = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 262144, 101)
Packet = tuple[int, bytes]  # time in us, IP packet


def frame(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def request(number: int, key: int = 3, api_version: int = 0, body: bytes = bytes(4)) -> bytes:
    return frame(struct.pack(">hhih", key, api_version, number, 3) + b"app" + body)


def response(number: int, size: int = 8) -> bytes:
    return frame(struct.pack(">i", number) + bytes(size))


def produce(number: int, acks: int, size: int = 0) -> bytes:
    return request(number, 0, 2, struct.pack(">hii", acks, 1000, 0) + bytes(size))


class Talk:
    """Packets of a connection, as both ends send them."""

    def __init__(self, port: int = 40000, start: int = 1000, opened: bool = True) -> None:
        self.port, self.time = port, start
        self.next = [5000, 9_000_000]
        self.packets: list[Packet] = []
        if opened:
            self._put(0, SYN)
            self.next[0] += 1
            self._put(1, SYN | ACK)
            self.next[1] += 1

    def _put(self, side: int, flags: int, data: bytes = b"", keep: bool = True) -> None:
        ends = [(CLIENT, self.port), (BROKER, 9092)]
        (source, source_port), (target, target_port) = ends[side], ends[1 - side]
        ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 40 + len(data), 0, 0, 64, 6, 0, source, target)
        tcp = struct.pack(
            ">HHIIBBHHH", source_port, target_port, self.next[side] % 2**32,
            self.next[1 - side] % 2**32, 0x50, flags, 1000, 0, 0,
        )  # fmt: skip
        if keep:
            self.packets.append((self.time, ip + tcp + data))
        self.time += 100

    def ask(self, data: bytes, size: int = 1400, keep: bool = True) -> None:
        self._send(0, data, size, keep)

    def answer(self, data: bytes, size: int = 1400, keep: bool = True) -> None:
        self._send(1, data, size, keep)

    def _send(self, side: int, data: bytes, size: int, keep: bool) -> None:
        for at in range(0, len(data), size):
            part = data[at : at + size]
            self._put(side, PUSH, part, keep)
            self.next[side] += len(part)

    def acknowledge(self, side: int) -> None:
        self._put(side, ACK)

    def close(self, flags: int = FIN | ACK) -> None:
        for side in (0, 1):
            self._put(side, flags)
            self.next[side] += 1


class Run:
    """Windows of one packet or more, and the exchanges that each one finishes."""

    def __init__(self, path: Path, limits: CarryLimits | None = None) -> None:
        self.path = path
        self.resumed = ConnectionCarry(StreamOptions(), limits=limits)
        self.found: list[list[tuple[int, str]]] = []  # per window: (correlation id, status)
        self.sizes: dict[int, set[tuple[int, int]]] = {}  # by id: of request and response
        self.queued_us: dict[int, int] = {}  # by id; -1 unknown

    def packets(self, packets: list[Packet]) -> list[list[tuple[int, str]]]:
        parts = [FILE_HEADER]
        for time, data in packets:
            parts.append(struct.pack("<IIII", time // SECOND, time % SECOND, len(data), len(data)))
            parts.append(data)
        self.path.write_bytes(b"".join(parts))
        paths = [str(self.path)]
        reader = WindowReader(paths[0], 0, paths)
        last = None
        for last in reader.windows():
            finished = self.resumed.add(last, paths)
            self.found.append(self.rows(finished) if finished else [])
        if last is not None:
            self.found.append(
                [row for some in self.resumed.finish(last, paths) for row in self.rows(some)]
            )
        return self.found

    def rows(self, finished: CompletedExchanges) -> list[tuple[int, str]]:
        exchanges = finished.assembly.exchanges[finished.rows]
        for row in exchanges:
            both = int(row["request"]["size"]), int(row["response"]["size"])
            self.sizes.setdefault(int(row["correlation_id"]), set()).add(both)
            queued = int(row["queued_ns"])
            self.queued_us[int(row["correlation_id"])] = queued if queued < 0 else queued // 1000
        return [
            (int(row["correlation_id"]), PairStatus(row["status"]).name.lower())
            for row in exchanges
        ]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Every packet is a window."""
    monkeypatch.setattr(windows, "WINDOW_BYTES_MIN", 40)
    monkeypatch.setattr(windows, "WINDOW_BYTES_MAX", 40)
    return Run(tmp_path / "talk.pcap")


def flat(found: list[list[tuple[int, str]]]) -> list[tuple[int, str]]:
    return [row for some in found for row in some]


def test_each_exchange_with_its_answer(run: Run) -> None:
    """In the very window of the answer's last byte, once."""
    talk = Talk()
    for number in range(5):
        talk.ask(request(number))
        talk.answer(response(number))
    found = run.packets(talk.packets)
    assert flat(found) == [(number, "paired") for number in range(5)]
    assert [len(some) for some in found[:-1]].count(1) == 5
    assert found[-1] == []


def test_a_request_is_queued_until_the_response_before_has_ended(run: Run) -> None:
    """Each in a window of its own, as in one run over all: the connection's state has that end."""
    talk = Talk()
    talk.ask(request(0))
    talk.answer(response(0))
    talk.ask(request(1))  # at 1400 us
    talk.ask(request(2))
    talk.ask(produce(3, 0))  # has no response
    talk.ask(request(4))
    talk.ask(request(5))
    talk.time += 1000
    talk.answer(response(1, 2000))  # of two packets, at 2900 and 3000 us
    talk.answer(response(2))
    talk.answer(response(4), keep=False)
    talk.answer(response(5))  # response bytes before it are missing
    talk.time += 5000
    talk.ask(request(6))  # after all responses
    talk.answer(response(6))
    talk.ask(request(7))
    talk.close()
    run.packets(talk.packets)
    sent = {1: 1400, 2: 1500}
    assert run.queued_us[0] == run.queued_us[1] == run.queued_us[6] == 0
    assert run.queued_us[2] == 3000 - sent[2]
    assert run.queued_us[5] == -1
    whole = kdissect.read(run.path).exchanges.to_arrow().to_pylist()
    both = {row["correlation_id"]: row for row in whole if row["latency_ms"] is not None}
    assert both.keys() == {0, 1, 2, 5, 6}
    for number, row in both.items():
        expected = None if run.queued_us[number] < 0 else run.queued_us[number] / 1000
        assert row["queued_ms"] == expected
        service = None if expected is None else pytest.approx(row["latency_ms"] - expected)
        assert row["service_ms"] == service
    assert both[1]["download_ms"] == 0.1
    assert both[1]["upload_ms"] == 0
    assert {row["correlation_id"]: row["queued_ms"] for row in whole}[7] is None


def test_a_response_without_its_request_keeps_the_next_one_waiting(run: Run) -> None:
    """A request queues until the response to one that the capture lacks (pipelining)."""
    talk = Talk()
    for number in range(3):
        talk.ask(request(number))
        talk.answer(response(number))
    talk.ask(request(3), keep=False)
    talk.ask(request(4))  # at 1900 us
    talk.answer(response(3))
    talk.time += 2000
    talk.answer(response(4))
    run.packets(talk.packets)
    rows = kdissect.read(run.path).exchanges.to_arrow().to_pylist()
    assert {row["correlation_id"]: row["queued_ms"] for row in rows}[4] == 0.1
    assert run.queued_us[4] == 100


def test_ids_that_begin_again_after_a_lost_answer(run: Run) -> None:
    """The first answer with id 1 was lost; the second one is the second request's."""
    talk = Talk()
    for number in (3, 1, 2, 4):
        talk.ask(request(number))
        talk.answer(response(number), keep=number != 1)
        talk.time += 20_000
    talk.ask(request(1, body=bytes(9)))
    talk.answer(response(1, 30))
    talk.close()
    found = sorted(flat(run.packets(talk.packets)))
    assert found == [
        (1, "paired"), (1, "response_missing"), (2, "paired"), (3, "paired"), (4, "paired")
    ]  # fmt: skip
    assert run.sizes[1] == {(22, 34), (17, -1)}


def test_an_answered_request_that_is_carried_takes_no_other_answer(run: Run) -> None:
    """Behind one that waits in order: its answer came before the window, its id comes again."""
    talk = Talk()
    for number in (1, 2, 3):
        talk.ask(request(number))
    talk.answer(response(2))
    talk.answer(response(3))
    talk.ask(request(2, body=bytes(9)))
    talk.answer(response(2, 30))
    talk.answer(response(1))
    found = sorted(flat(run.packets(talk.packets)))
    assert found == [(1, "paired"), (2, "paired"), (2, "paired"), (3, "paired")]
    assert run.sizes[2] == {(17, 12), (22, 34)}


def test_tokens_are_found_after_a_gap_in_any_window(run: Run) -> None:
    """The handshake is finished and gone when the first token, which is lost, is passed."""
    talk = Talk()
    talk.ask(request(0, 17, 0, b"\0\x0dSCRAM-SHA-256"))
    talk.answer(frame(struct.pack(">ihih", 0, 0, 1, 13) + b"SCRAM-SHA-256"))
    talk.ask(frame(b"n,,n=user,r=nonce"), keep=False)
    talk.answer(frame(b"r=nonce,s=salt,i=4096"), keep=False)
    talk.time += 20_000
    talk.ask(frame(b"c=biws,r=nonce,p=proof"))
    talk.answer(frame(b"v=signature"))
    talk.ask(request(1))
    talk.answer(response(1))
    assert sorted(flat(run.packets(talk.packets))) == [(-1, "paired"), (0, "paired"), (1, "paired")]
    assert run.sizes[-1] == {(22, 11)}


def test_many_in_flight_and_acks_0(run: Run) -> None:
    """Pipelined requests wait for their answers; one that wants none waits for those before it."""
    talk = Talk()
    talk.ask(request(1))
    talk.answer(response(1))
    for number in range(2, 6):
        talk.ask(request(number))
    talk.ask(produce(6, 0))
    for number in range(2, 6):
        talk.answer(response(number))
    found = flat(run.packets(talk.packets))
    assert found == [*((number, "paired") for number in range(1, 6)), (6, "no_response_expected")]


def test_a_frame_of_many_windows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte in small segments is looked at when it is whole, and in linear time."""
    talk = Talk()
    talk.ask(request(1))
    talk.answer(response(1))
    talk.ask(produce(2, 1, size=1 << 20))
    talk.answer(response(2))
    calls = []
    usual = continued.assemble_streams
    monkeypatch.setattr(
        continued, "assemble_streams", lambda *args: (calls.append(1), usual(*args))[1]
    )
    assert flat(run.packets(talk.packets)) == [(1, "paired"), (2, "paired")]
    assert len(calls) < 300  # of 753 packets: most only put their bytes aside


def test_a_hole_is_waited_for(run: Run) -> None:
    """A segment that was lost on its way and comes again gives all exchanges."""
    talk = Talk()
    for number in (1, 2):
        talk.ask(request(number))
        talk.answer(response(number))
    talk.ask(request(3))
    lost = talk.next[1]
    talk.answer(response(3), keep=False)
    talk.ask(request(4))
    talk.answer(response(4))
    after = talk.next[1]
    talk.next[1] = lost
    talk.answer(response(3))
    talk.next[1] = after
    found = flat(run.packets(talk.packets))
    assert found == [(number, "paired") for number in (1, 2, 3, 4)]


def test_a_hole_that_was_acknowledged_is_given_up(run: Run) -> None:
    """After an acknowledged gap the following frames are shown without waiting."""
    talk = Talk()
    for number in (1, 2):
        talk.ask(request(number))
        talk.answer(response(number))
    talk.ask(request(3))
    talk.answer(response(3), keep=False)
    for number in range(4, 8):
        talk.ask(request(number))
        talk.answer(response(number))
        talk.acknowledge(0)
        talk.time += 20_000
    found = run.packets(talk.packets)
    assert (4, "paired") in flat(found[:-1])
    assert (7, "paired") in flat(found)
    assert (3, "response_missing") in flat(found)


def test_a_closed_connection_is_over_after_a_moment(run: Run) -> None:
    """Its open requests come when others go on for a second; a reused port begins anew."""
    talk, other = Talk(40000), Talk(40001, start=10_000)
    talk.ask(request(1))
    talk.answer(response(1))
    talk.ask(request(2))
    talk.close()
    for number in range(3):
        other.ask(request(10 + number))
        other.answer(response(10 + number))
        other.time += SECOND
    again = Talk(40000, start=talk.time + 5 * SECOND)
    again.next = [777_000_000, 888_000_000]
    again.packets.clear()
    again._put(0, SYN)
    again.next[0] += 1
    again._put(1, SYN | ACK)
    again.next[1] += 1
    again.ask(request(1))
    again.answer(response(1))
    found = run.packets(
        sorted(talk.packets + other.packets + again.packets, key=lambda one: one[0])
    )
    rows_found = flat(found[:-1])
    assert rows_found.count((1, "paired")) == 2
    assert (2, "connection_closed") in rows_found
    assert len(rows_found) == 6


def test_requests_alone(run: Run) -> None:
    """Requests of one captured direction are shown after a limit."""
    talk = Talk()
    for number in range(200):
        talk.ask(request(number))
    found = run.packets(talk.packets)
    assert flat(found) == [(number, "response_missing") for number in range(200)]
    assert len(flat(found[:-1])) > 100


def test_the_quietest_connections_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open exchanges beyond the limit are shown and counted."""
    monkeypatch.setattr(windows, "WINDOW_BYTES_MIN", 400)
    monkeypatch.setattr(windows, "WINDOW_BYTES_MAX", 400)
    run = Run(tmp_path / "many.pcap", CarryLimits(connection_max=16))
    packets: list[Packet] = []
    for number in range(100):
        talk = Talk(20000 + number, start=1000 * number)
        talk.ask(request(1))
        talk.answer(response(1))
        talk.ask(request(2))
        packets += talk.packets
    found = flat(run.packets(packets))
    assert found.count((1, "paired")) == 100
    assert found.count((2, "response_missing")) == 100
    assert run.resumed.counts.given_up > 50
    assert len(run.resumed._open) <= 17


def test_bytes_of_all_connections_have_a_limit(tmp_path: Path) -> None:
    """Open frames beyond it are finished as they are."""
    run = Run(tmp_path / "large.pcap", CarryLimits(carried_max=1 << 20))
    packets: list[Packet] = []
    for number in range(40):
        talk = Talk(20000 + number, start=1_000_000 * number)
        talk.ask(request(1))
        talk.answer(response(1))
        talk.ask(produce(2, 1, size=200_000)[:150_000])
        packets += talk.packets
    found = flat(run.packets(packets))
    assert found.count((1, "paired")) == 40
    assert found.count((2, "response_missing")) == 40
    assert run.resumed.counts.given_up > 10


def test_other_traffic_is_left_alone(run: Run) -> None:
    """A connection that speaks something else is carried a little, then not at all."""
    talk = Talk()
    noise = np.random.default_rng(5).integers(0, 256, 400_000, np.uint8).tobytes()
    talk.ask(b"\xff" + noise)
    found = run.packets(talk.packets)
    assert flat(found) == []
    assert run.resumed.counts.kafka == 0
    assert not any(one.parts for one in run.resumed.connections())
