"""Connections over several windows: when exchanges finish, and how limits act."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kdissect
from kdissect.resume.carry import CarryLimits
from tests.builders.captures import Packet
from tests.builders.frames import framed, produce, request, response
from tests.builders.talks import ACK, FIN, SYN, Talk
from tests.resume.window_run import Run, flat

SECOND = 1_000_000


@pytest.fixture
def run(tmp_path: Path, window_bytes: Callable[[int], None]) -> Run:
    """Every packet is a window."""
    window_bytes(40)
    return Run(tmp_path / "talk.pcap")


@pytest.fixture
def talk() -> Talk:
    return Talk()


def test_each_exchange_with_its_answer(talk: Talk, run: Run) -> None:
    """In the very window of the answer's last byte, once."""
    for number in range(5):
        talk.exchange(number)
    found = run.packets(talk.packets)
    assert flat(found) == [(number, "paired") for number in range(5)]
    assert [len(some) for some in found[:-1]].count(1) == 5
    assert found[-1] == []


def test_a_clock_that_steps_back_loses_nothing(talk: Talk, run: Run) -> None:
    """A packet with a time before the connection is one of it: no capture comes late here."""
    talk.time = 100 * SECOND
    talk.exchange(0)
    talk.time -= 10 * SECOND
    for number in (1, 2):
        talk.exchange(number)
    assert flat(run.packets(talk.packets)) == [(number, "paired") for number in range(3)]


def test_a_request_is_queued_until_the_response_before_has_ended(talk: Talk, run: Run) -> None:
    """Each in a window of its own, as in one run over all: the connection's state has that end."""
    talk.exchange(0)
    talk.ask(request(1))  # at 1400 us
    talk.ask(request(2))
    talk.ask(produce(3, 0))  # has no response
    talk.ask(request(4))
    talk.ask(request(5))
    talk.time += 1000
    talk.answer(response(1, bytes(2000)))  # of two packets, at 2900 and 3000 us
    talk.answer(response(2))
    talk.answer(response(4), keep=False)
    talk.answer(response(5))  # response bytes before it are missing
    talk.time += 5000
    talk.exchange(6)  # after all responses
    talk.ask(request(7))
    talk.close()
    run.packets(talk.packets)
    sent = {1: 1400, 2: 1500}
    assert run.queued_us[0] == run.queued_us[1] == run.queued_us[6] == 0
    assert run.queued_us[2] == 3000 - sent[2]
    assert run.queued_us[5] == -1
    whole = kdissect.read(run.path).exchanges.to_pylist()
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


def test_a_response_without_its_request_keeps_the_next_one_waiting(talk: Talk, run: Run) -> None:
    """A request queues until the response to one that the capture lacks (pipelining)."""
    for number in range(3):
        talk.exchange(number)
    talk.ask(request(3), keep=False)
    talk.ask(request(4))  # at 1900 us
    talk.answer(response(3))
    talk.time += 2000
    talk.answer(response(4))
    run.packets(talk.packets)
    rows = kdissect.read(run.path).exchanges.to_pylist()
    assert {row["correlation_id"]: row["queued_ms"] for row in rows}[4] == 0.1
    assert run.queued_us[4] == 100


def test_ids_that_begin_again_after_a_lost_answer(talk: Talk, run: Run) -> None:
    """The first answer with id 1 was lost; the second one is the second request's."""
    for number in (3, 1, 2, 4):
        talk.exchange(number, keep=number != 1)
        talk.time += 20_000
    talk.ask(request(1, body=bytes(9)))
    talk.answer(response(1, bytes(30)))
    talk.close()
    found = sorted(flat(run.packets(talk.packets)))
    assert found == [
        (1, "paired"), (1, "response_missing"), (2, "paired"), (3, "paired"), (4, "paired")
    ]  # fmt: skip
    assert run.sizes[1] == {(25, 34), (20, -1)}


def test_an_answered_request_that_is_carried_takes_no_other_answer(talk: Talk, run: Run) -> None:
    """Behind one that waits in order: its answer came before the window, its id comes again."""
    for number in (1, 2, 3):
        talk.ask(request(number))
    talk.answer(response(2))
    talk.answer(response(3))
    talk.ask(request(2, body=bytes(9)))
    talk.answer(response(2, bytes(30)))
    talk.answer(response(1))
    found = sorted(flat(run.packets(talk.packets)))
    assert found == [(1, "paired"), (2, "paired"), (2, "paired"), (3, "paired")]
    assert run.sizes[2] == {(20, 16), (25, 34)}


def test_tokens_are_found_after_a_gap_in_any_window(talk: Talk, run: Run) -> None:
    """The handshake is finished and gone when the first token, which is lost, is passed."""
    talk.ask(request(0, 17, 0, body=b"\0\x0dSCRAM-SHA-256"))
    talk.answer(framed(struct.pack(">ihih", 0, 0, 1, 13) + b"SCRAM-SHA-256"))
    talk.ask(framed(b"n,,n=user,r=nonce"), keep=False)
    talk.answer(framed(b"r=nonce,s=salt,i=4096"), keep=False)
    talk.time += 20_000
    talk.ask(framed(b"c=biws,r=nonce,p=proof"))
    talk.answer(framed(b"v=signature"))
    talk.exchange(1)
    assert sorted(flat(run.packets(talk.packets))) == [(-1, "paired"), (0, "paired"), (1, "paired")]
    assert run.sizes[-1] == {(22, 11)}


def test_tokens_without_requests_are_found_in_any_window(talk: Talk, run: Run) -> None:
    """The lists before them, which have no request either, were complete in an earlier window."""
    talk.answer(response(0, struct.pack(">hi9h", 0, 3, 0, 0, 9, 1, 0, 12, 3, 0, 12)))
    talk.answer(framed(struct.pack(">ihih", 1, 0, 1, 13) + b"SCRAM-SHA-256"))
    for token in (b"r=nonce,s=salt,i=4096", b"v=signature"):
        talk.answer(framed(token))
    for number in (2, 3, 4):
        talk.answer(response(number))
    found = [number for number, _ in flat(run.packets(talk.packets))]
    assert found == [0, 1, -1, -1, 2, 3, 4]


def test_many_in_flight_and_acks_0(talk: Talk, run: Run) -> None:
    """Pipelined requests wait for their answers; one that wants none waits for those before it."""
    talk.exchange(1)
    for number in range(2, 6):
        talk.ask(request(number))
    talk.ask(produce(6, 0))
    for number in range(2, 6):
        talk.answer(response(number))
    found = flat(run.packets(talk.packets))
    assert found == [*((number, "paired") for number in range(1, 6)), (6, "no_response_expected")]


def test_a_frame_of_many_windows(talk: Talk, run: Run) -> None:
    """A large frame in small segments is complete with its last one."""
    talk.exchange(1)
    talk.send(0, produce(2, 1, room=1 << 18), 4000)
    talk.answer(response(2))
    assert flat(run.packets(talk.packets)) == [(1, "paired"), (2, "paired")]


def test_a_gap_is_waited_for(talk: Talk, run: Run) -> None:
    """A segment that was lost on its way and comes again gives all exchanges."""
    for number in (1, 2):
        talk.exchange(number)
    talk.ask(request(3))
    lost = talk.next[1]
    talk.answer(response(3), keep=False)
    talk.exchange(4)
    after = talk.next[1]
    talk.next[1] = lost
    talk.answer(response(3))
    talk.next[1] = after
    found = flat(run.packets(talk.packets))
    assert found == [(number, "paired") for number in (1, 2, 3, 4)]


def test_a_gap_that_was_acknowledged_is_given_up(talk: Talk, run: Run) -> None:
    """After an acknowledged gap the following frames are shown without waiting."""
    for number in (1, 2):
        talk.exchange(number)
    talk.exchange(3, keep=False)
    for number in range(4, 8):
        talk.exchange(number)
        talk.acknowledge(0)
        talk.time += 20_000
    found = run.packets(talk.packets)
    assert (4, "paired") in flat(found[:-1])
    assert (7, "paired") in flat(found)
    assert (3, "response_missing") in flat(found)


def test_an_acknowledged_gap_needs_no_later_packet_of_its_connection(run: Run) -> None:
    """Others go on for a second: the exchange behind the gap comes then."""
    talk, other = Talk(40000), Talk(40001, start=10_000)
    talk.exchange(1)
    talk.exchange(2, keep=False)
    talk.exchange(3)
    talk.acknowledge(0)
    for number in range(3):
        other.exchange(10 + number)
        other.time += SECOND // 2
    found = run.packets(sorted(talk.packets + other.packets, key=lambda one: one.time_ns))
    assert (3, "paired") in flat(found[:-1])


def test_a_closed_connection_is_over_after_a_moment(run: Run) -> None:
    """Its open requests come when others go on for a second; a reused port begins anew."""
    talk, other = Talk(40000), Talk(40001, start=10_000)
    talk.exchange(1)
    talk.ask(request(2))
    talk.close()
    for number in range(3):
        other.exchange(10 + number)
        other.time += SECOND
    again = Talk(40000, start=talk.time + 5 * SECOND)
    again.next = [777_000_000, 888_000_000]
    again.packets.clear()
    again.put(0, SYN)
    again.put(1, SYN | ACK)
    again.exchange(1)
    found = run.packets(
        sorted(talk.packets + other.packets + again.packets, key=lambda one: one.time_ns)
    )
    rows_found = flat(found[:-1])
    assert rows_found.count((1, "paired")) == 2
    assert (2, "connection_closed") in rows_found
    assert len(rows_found) == 6


def test_an_answer_and_an_end_are_waited_for_ten_minutes(run: Run) -> None:
    """A request without an answer holds later exchanges back until then. A connection that one side
    has closed, or that no data came on, is over."""
    talk, half = Talk(40000), Talk(40001, start=10_000)
    empty, other = Talk(40002, start=20_000), Talk(40003, start=30_000)
    talk.exchange(1)
    talk.ask(request(2))
    talk.exchange(3)
    half.exchange(4)
    half.ask(request(5))
    half.put(0, FIN | ACK)
    for number in range(3):
        other.exchange(10 + number)
        other.time += (590, 20, 1)[number] * SECOND
    packets = [each for one in (talk, half, empty, other) for each in one.packets]
    found = run.packets(sorted(packets, key=lambda one: one.time_ns))
    rows_found = flat(found[:-1])
    at = rows_found.index((11, "paired"))
    assert {*rows_found[:at]} == {(number, "paired") for number in (1, 4, 10)}
    late = {*rows_found[at:]}
    assert {(2, "response_missing"), (3, "paired"), (5, "connection_closed")} < late


def test_requests_alone(talk: Talk, run: Run) -> None:
    """Requests of one captured direction are shown after a limit."""
    for number in range(200):
        talk.ask(request(number))
    found = run.packets(talk.packets)
    assert flat(found) == [(number, "response_missing") for number in range(200)]
    assert len(flat(found[:-1])) > 100


def open_at_the_end(run: Run, count: int, frame: bytes, step_us: int) -> None:
    """Connections that begin one after the other, each with an open exchange: all are shown."""
    packets: list[Packet] = []
    for number in range(count):
        talk = Talk(20000 + number, start=step_us * number)
        talk.exchange(1)
        talk.ask(frame)
        packets += talk.packets
    found = flat(run.packets(packets))
    assert found.count((1, "paired")) == count
    assert found.count((2, "response_missing")) == count


def test_the_quietest_connections_make_room(
    tmp_path: Path, window_bytes: Callable[[int], None]
) -> None:
    """Open exchanges beyond the limit are shown and counted."""
    window_bytes(400)
    run = Run(tmp_path / "many.pcap", CarryLimits(connection_max=16))
    open_at_the_end(run, 100, request(2), 1000)
    assert run.resumed.counts.given_up > 50
    assert len(run.resumed._open) <= 17


def test_bytes_of_all_connections_have_a_limit(tmp_path: Path) -> None:
    """Open frames beyond it are finished as they are."""
    run = Run(tmp_path / "large.pcap", CarryLimits(carried_max=1 << 20))
    open_at_the_end(run, 40, produce(2, 1, room=200_000)[:150_000], 1_000_000)
    assert run.resumed.counts.given_up > 10


def test_other_traffic_is_left_alone(talk: Talk, run: Run) -> None:
    """A connection that speaks something else is carried a little, then not at all."""
    noise = np.random.default_rng(5).integers(0, 256, 400_000, np.uint8).tobytes()
    talk.send(0, b"\xff" + noise, 20_000)
    found = run.packets(talk.packets)
    assert flat(found) == []
    assert run.resumed.counts.kafka == 0
    assert not any(len(one.segments) for one in run.resumed.connections())
