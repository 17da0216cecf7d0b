"""Conversations written as transcripts, with the frames that each must give."""

import struct

import numpy as np
import pytest

from kdissect.capture.segments import ENDPOINTS, SegmentBatch
from kdissect.kafka import frame_tables
from kdissect.kafka.assembly import Anomaly, Protocol
from kdissect.kafka.options import StreamOptions
from kdissect.tcp.columns import CloseReason
from tests.builders.assembling import assemble
from tests.builders.frames import framed, produce, request, response
from tests.builders.segments import in_memory
from tests.builders.talks import ACK, BROKER, CLIENT, FIN, RST, SYN, Gap, Playbook


def kinds(book: Playbook) -> list[Anomaly]:
    return [Anomaly(int(row["kind"])) for row in book.run().anomalies]


def test_a_request_and_its_response() -> None:
    """One exchange is paired; its connection has the handshake's round trip and the client."""
    book = Playbook().syn() >> request(7) << response(7)
    assert book.exchanges() == [(7, "paired")]
    connection = book.run().connections[0]
    assert connection["protocol"] == Protocol.KAFKA
    assert connection["client_side"] == CLIENT
    assert connection["handshake_seen"]
    assert connection["handshake_rtt_ns"] == 2_000_000


def test_a_queue_behind_a_lost_response_is_unknown() -> None:
    """If the stream of responses begins with a gap, an earlier response may be in it."""
    lost = Gap(len(response(1)))
    book = Playbook().syn() >> request(1) + request(2) << lost << response(2)
    assert list(book.run().exchanges["queued_ns"]) == [0, -1]
    middle = Playbook() >> request(1) << response(1)  # without a gap, nothing came before
    assert list(middle.run().exchanges["queued_ns"]) == [0]
    inside = Playbook() << response(6, bytes(90))[20:] >> request(7) << response(7) >> request(8)
    inside = inside << response(8)
    assert list(inside.run().exchanges["queued_ns"]) == [-1, 0]


def test_equal_ids_pair_in_order() -> None:
    """Requests with the same correlation id take the responses in their order."""
    book = Playbook().syn() >> request(0) >> request(0) << response(0, b"\0\0\1") << response(0)
    sizes = book.run().exchanges["response"]["size"]
    assert list(sizes) == [7, 16]


def test_ids_wrap() -> None:
    """Correlation ids continue after 2^31 - 1 with -2^31."""
    book = Playbook().syn()
    for number in (2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1):
        book = book >> request(number) << response(number)
    assert [status for _, status in book.exchanges()] == ["paired"] * 4


@pytest.mark.parametrize("api_version", [0, 2, 3, 8, 9, 13])
def test_acks_0_expects_no_response(api_version: int) -> None:
    """At any version of Produce; acks=1 in between is answered."""
    book = Playbook().syn() >> produce(1, 0, api_version) >> produce(2, 1, api_version)
    book = book >> produce(3, 0, api_version) << response(2)
    assert book.exchanges() == [
        (1, "no_response_expected"), (2, "paired"), (3, "no_response_expected"),
    ]  # fmt: skip


def test_an_answer_to_acks_0_is_taken() -> None:
    """A Produce with acks 0 is paired if a response comes all the same."""
    book = Playbook().syn() >> produce(1, 0) << response(1)
    assert book.exchanges() == [(1, "paired")]


def test_requests_without_a_response() -> None:
    """The end of the capture, a FIN, an RST, and a gap where the answer was."""
    book = Playbook().syn() >> request(1) << response(1) >> request(2)
    assert book.exchanges()[1] == (2, "response_missing")
    assert (book << (FIN | ACK)).exchanges()[1] == (2, "connection_closed")
    book = Playbook().syn() >> request(1) >> request(2) << Gap(len(response(1))) << response(2)
    book = book >> (FIN | ACK)
    assert book.exchanges() == [(1, "response_missing"), (2, "paired")]
    book = Playbook().syn() >> request(1) << RST
    assert book.exchanges() == [(1, "connection_closed")]
    assert book.run().connections["close_reason"][0] == CloseReason.RST


def test_late_second_and_unasked_responses() -> None:
    """A late response is paired; a second or unasked one has no request and an anomaly."""
    book = Playbook().syn() >> request(1) >> request(2) << response(2) << response(1)
    assert book.exchanges() == [(1, "paired"), (2, "paired")]
    assert kinds(book) == [Anomaly.OUT_OF_ORDER_RESPONSE]
    late = book.run().anomalies[0]
    assert (late["number"], late["other"]) == (1, 2)
    book = book << response(2)
    assert book.exchanges()[2] == (2, "request_missing")
    assert Anomaly.DUPLICATE_RESPONSE in kinds(book)
    book = Playbook().syn() >> request(1) << response(1) << response(99)
    assert book.exchanges() == [(1, "paired"), (99, "request_missing")]
    assert kinds(book) == [Anomaly.RESPONSE_WITHOUT_REQUEST]


def test_a_clock_that_steps_back_parts_no_pair() -> None:
    """In one capture the order of the packets tells which response belongs to a request."""
    book = Playbook().syn() >> request(1) << response(1) >> request(2)
    book.time -= 3_600_000_000
    book = book << response(2) >> request(3) << response(3)
    assert book.exchanges() == [(1, "paired"), (2, "paired"), (3, "paired")]
    assert kinds(book) == [Anomaly.NEGATIVE_LATENCY]


def test_a_frame_ends_with_the_packet_that_completes_it() -> None:
    """A segment that was lost before the tap comes last; the broker had to wait for it."""
    whole = request(1, body=bytes(300))
    book = Playbook().syn() >> whole[:100] >> Gap(100) >> whole[200:]
    book.time += 300_000
    book.segment(CLIENT, whole[100:200], 100) << response(1)
    (row,) = book.run().exchanges
    assert row["request"]["end_time_ns"] == row["response"]["time_ns"] - 1_000_000


@pytest.mark.parametrize("client_id", ["", None])
def test_new_versions_without_client_id(client_id: str | None) -> None:
    """Of a version that nobody knows yet; two in a row confirm each other."""
    book = Playbook().syn() >> request(1) << response(1)
    for number in (2, 3, 4):
        book = book >> request(number, 1, 99, client_id) << response(number)
    assert [status for _, status in book.exchanges()] == ["paired"] * 4
    assert not kinds(book)


@pytest.mark.parametrize("old", [5000, 700_000_000, 3_000_000_000])
def test_an_answer_from_an_earlier_connection(old: int) -> None:
    """RFC 5961, 4.2: a broker that still has the old connection of a client's ports answers its SYN
    with that one's numbers. The client resets it, and sends the SYN again."""
    book = Playbook(isn=(100_000_000, 7000))
    book.next = [100_000_000, 3_000_000]
    book = book >> SYN
    book.next[CLIENT] = old
    book = book << ACK >> RST
    book = book.syn() >> request(1) << response(1) >> request(2)
    assert book.exchanges() == [(1, "paired"), (2, "response_missing")]
    assert book.run().connections["close_reason"].tolist() == [CloseReason.CAPTURE_END]
    assert not kinds(book)


def test_an_rst_outside_the_window_is_ignored() -> None:
    """RFC 5961, 3.2: the receiver goes on, and so does the connection."""
    book = Playbook().syn() >> request(1) << response(1)
    book.segment(BROKER, b"", 1 << 25, RST) >> request(2)
    assert book.exchanges() == [(1, "paired"), (2, "response_missing")]
    assert book.run().connections["close_reason"][0] == CloseReason.CAPTURE_END


def test_a_gap_inside_a_frame_ends_nothing() -> None:
    """Missing bytes inside a frame make it partial; later frames are paired."""
    whole = request(2, body=b"x" * 400)
    book = Playbook().syn() >> request(1) << response(1)
    book = book >> whole[:100] >> Gap(200) >> whole[300:] >> request(3)
    book = book << response(2) << response(3)
    assert [status for _, status in book.exchanges()] == ["paired"] * 3
    rows = book.run().exchanges
    assert list(rows["request"]["is_whole"]) == [1, 0, 1]
    assert kinds(book) == [Anomaly.PARTIAL_FRAME, Anomaly.GAP]
    side = rows[1]["request"]
    extents = book.run().extents[side["extent_start"] :][: side["extent_count"]]
    assert [int(length) for length in extents["length"]] == [96, 200, len(whole) - 300]
    assert list(extents["source"]) == [0, -1, 0]


def test_a_gap_over_a_prefix_costs_one_frame() -> None:
    """The frame with the missing size prefix is lost; framing resumes at the next one."""
    whole = request(2, body=b"x" * 400)
    book = Playbook().syn() >> request(1) >> Gap(50) >> whole[50:] >> request(3) >> request(4)
    book = book << response(1) << response(2) << response(3) << response(4)
    assert book.exchanges() == [  # in order of the first byte of each
        (1, "paired"), (3, "paired"), (4, "paired"), (2, "request_missing"),
    ]  # fmt: skip
    counts = book.run().connections["direction"][0, 0]
    assert counts["unframed_byte_count"] == len(whole) - 50
    assert counts["missing_byte_count"] == 50


def test_a_record_batch_is_no_response() -> None:
    """Behind a lost prefix: batch length and leader epoch read like size and correlation id."""
    batch = struct.pack(">qiib", 0, 41, 3, 2) + bytes(36)
    fetch = response(2, bytes(60) + batch)
    book = Playbook().syn() >> request(1) << response(1) >> request(2) >> request(3)
    book = book << Gap(20) << fetch[20:] << response(3)
    assert book.exchanges() == [(1, "paired"), (2, "response_missing"), (3, "paired")]


def test_a_start_in_the_middle() -> None:
    """The first bytes are the end of a frame; an answer to an earlier request comes first."""
    book = Playbook(isn=(2**32 - 30, 5)) >> request(40, body=b"y" * 90)[60:]
    book = book << response(39) >> request(41) >> request(42) << response(40) << response(41)
    book = book << response(42)
    assert book.exchanges() == [
        (39, "request_missing"), (41, "paired"), (42, "paired"), (40, "request_missing"),
    ]  # fmt: skip
    assert book.run().connections["client_side"][0] == CLIENT


def test_the_end_of_an_answer_makes_no_client() -> None:
    """Version ranges that begin like a large request, a gap, then both sides as they should be."""
    book = Playbook() << b"\0\1\0\0" + b"\0\x0c\0\3\0\0\0\x0c" << Gap(12)
    book = book >> b"cut" >> request(3) >> request(4) << response(3) << response(4)
    assert book.run().connections["client_side"][0] == CLIENT
    assert book.exchanges() == [(3, "paired"), (4, "paired")]


def test_sasl_handshake_v0_is_followed_by_tokens() -> None:
    """After SaslHandshake v0 the next frames are tokens without a header."""
    book = Playbook().syn() >> request(1, 17, 0, body=b"\0\5PLAIN") << response(1)
    book = book >> framed(b"\0user\0secret") << framed(b"") >> request(2) << response(2)
    assert book.exchanges() == [(1, "paired"), (-1, "paired"), (2, "paired")]
    rows = book.run().exchanges
    assert list(rows["is_sasl_token"]) == [0, 1, 0]
    assert list(rows["api_key"]) == [17, -1, 3]


def test_a_first_frame_that_is_no_request_is_a_gssapi_token() -> None:
    """Raw GSSAPI tokens before the first request pair with each other."""
    book = Playbook().syn() >> framed(b"\x60\x82" + b"g" * 70) << framed(b"\x6f" + b"h" * 30)
    book = book >> request(1) << response(1)
    assert book.exchanges() == [(-1, "paired"), (1, "paired")]


def test_a_size_that_cannot_be() -> None:
    """Bytes with an impossible size prefix are unframed; later requests are found again."""
    book = Playbook().syn() >> request(1) << response(1) >> b"GET / HTTP/1.1\r\n\r\n"
    assert book.exchanges() == [(1, "paired")]
    assert kinds(book) == [Anomaly.UNFRAMED_BYTES]
    assert book.run().anomalies["number"][0] == int.from_bytes(b"GET ", "big")
    assert book.run().anomalies["reason"][0] == frame_tables.NO_FRAME
    book = book >> request(2) >> request(3) << response(2) << response(3)
    assert [number for number, _ in book.exchanges()] == [1, 2, 3]


def test_a_frame_cut_by_the_end() -> None:
    """A frame that the capture's end cuts is partial if its header is whole, else unframed."""
    book = Playbook().syn() >> request(1) << response(1)[:8]
    assert book.exchanges() == [(1, "paired")]
    assert kinds(book) == [Anomaly.PARTIAL_FRAME]
    book = Playbook().syn() >> request(1) << response(1) >> request(2)[:10]
    assert book.exchanges() == [(1, "paired")]
    assert kinds(book) == [Anomaly.UNFRAMED_BYTES]
    assert book.run().anomalies["reason"][0] == frame_tables.HEADER_MISSING
    book = Playbook().syn() >> request(1) << response(1) >> request(2)[:12]
    assert book.exchanges() == [(1, "paired"), (2, "response_missing")]


def test_retransmissions_and_conflicts() -> None:
    """Retransmitted bytes count once; other bytes in the same place are an anomaly."""
    one, two = request(1), request(2)
    book = Playbook().syn() >> one >> two
    book = book.segment(CLIENT, one, 0).segment(CLIENT, b"XX" + two[2:], len(one)) << response(1)
    counts = book.run().connections["direction"][0, 0]
    assert counts["retransmitted_segment_count"] == 2
    assert counts["byte_count"] == len(one) + len(two)
    assert kinds(book) == [Anomaly.OVERLAP_CONFLICT]
    assert book.run().anomalies["byte_count"][0] == 2
    assert [number for number, _ in book.exchanges()] == [1, 2]


def test_a_keep_alive_probe_is_no_data() -> None:
    """A probe of one old byte (RFC 9293, 3.8.4) is no retransmission and no conflict."""
    one = request(1)
    book = Playbook().syn() >> one
    book = book.segment(CLIENT, b"\0", len(one) - 1, ACK) << response(1)
    assert kinds(book) == []
    assert book.run().connections["direction"][0, 0]["retransmitted_segment_count"] == 0


def test_data_on_fin_and_rst() -> None:
    """A response in the segment with FIN or RST is paired."""
    for flags in (ACK | FIN, ACK | RST):
        book = Playbook().syn() >> request(1)
        book = book.segment(BROKER, response(1), 0, flags)
        assert book.exchanges() == [(1, "paired")]


def test_a_reused_port_is_another_connection() -> None:
    """A new SYN, or a jump of the sequence numbers, begins another connection."""
    book = Playbook().syn() >> request(1)
    again = Playbook(isn=(900_000_000, 5_000_000))
    again.time = book.time
    again = again.syn() >> request(1) << response(1)
    book.packets += again.packets
    assert book.exchanges() == [(1, "connection_closed"), (1, "paired")]
    found = book.run()
    assert found.connections["close_reason"][0] == CloseReason.REUSED
    assert len(set(found.connections["connection_id"])) == 2
    # Without the SYN the jump of the sequence numbers tells.
    book = Playbook() >> request(1) << response(1)
    again = Playbook(isn=(3_000_000_000, 3_000_000_000)) >> request(5) << response(5)
    book.packets += again.packets
    assert len(book.run().connections) == 2


def test_the_same_packet_twice_counts_once() -> None:
    """Packets that were captured twice are counted as duplicates, and give one exchange."""
    book = Playbook().syn() >> request(1) << response(1)
    batch, memory = book.batch()
    twice = np.repeat(batch.segments, 2)
    twice["packet"] = np.arange(1, len(twice) + 1)
    found = assemble(SegmentBatch(batch.endpoints, twice), memory)
    assert len(found.exchanges) == 1
    counts = found.connections["direction"][0]
    assert counts["duplicate_segment_count"].sum() == len(batch.segments)
    assert counts["segment_count"].sum() == len(batch.segments)
    assert list(found.duplicate_packets) == [len(batch.segments)]


@pytest.mark.parametrize(
    ("first", "protocol"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", Protocol.HTTP),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Protocol.HTTP2),
        (b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00", Protocol.TLS),
        (framed(struct.pack(">iqiqi", 0, 0, 30000, 0, 16) + bytes(17)), Protocol.ZOOKEEPER),
        (framed(struct.pack(">iii", 5, 4, 8) + b"/brokers\0"), Protocol.ZOOKEEPER),
        (b"\x0a\x0b\x0c hello", Protocol.OTHER),
        (b"", Protocol.NONE),
    ],
)
def test_other_protocols(first: bytes, protocol: Protocol) -> None:
    """Named, counted as unframed, and without any anomaly."""
    found = (Playbook().syn() >> first >> b"more").run() if first else Playbook().syn().run()
    assert found.connections["protocol"][0] == protocol
    assert len(found.anomalies) == len(found.exchanges) == 0
    counts = found.connections["direction"][0, 0]
    assert counts["unframed_byte_count"] == counts["byte_count"]


def test_an_id_that_begins_like_a_path_is_none() -> None:
    """A count and an id (KIP-858) stand where a request to ZooKeeper has its path."""
    body = struct.pack(">ii", 0, 3) + b"/(\x80M" + bytes(12)
    found = (Playbook().syn() >> request(0) << framed(struct.pack(">i", 0) + body)).run()
    assert found.connections["protocol"][0] == Protocol.KAFKA
    assert len(found.exchanges) == 1


def test_a_port_hint_adds_certainty_only() -> None:
    """--port makes undecided bytes Kafka; it does not overrule HTTP."""
    book = Playbook().syn() >> b"\xff\xff\xff\xff"
    assert book.run().connections["protocol"][0] == Protocol.OTHER
    book.options = StreamOptions(ports=(9092,))
    assert book.run().connections["protocol"][0] == Protocol.KAFKA
    assert kinds(book) == [Anomaly.UNFRAMED_BYTES]
    book = Playbook().syn() >> b"GET / HTTP/1.1\r\n\r\n"
    book.options = StreamOptions(ports=(9092,))
    assert book.run().connections["protocol"][0] == Protocol.HTTP


def test_a_batch_that_points_outside_is_refused() -> None:
    """Segments with a position or number outside of their arrays raise ValueError."""
    batch, memory = (Playbook().syn() >> request(1)).batch()
    for field, number in (("pos", 2**40), ("source", 5), ("endpoints", 9), ("captured", -1)):
        segments = batch.segments.copy()
        segments[field][-1] = number
        with pytest.raises(ValueError, match=r"batch|extents"):
            assemble(SegmentBatch(batch.endpoints, segments), memory)


def test_nothing_at_all() -> None:
    """An empty batch gives no connection."""
    none = SegmentBatch(np.zeros(0, ENDPOINTS), Playbook().batch()[0].segments)
    assert len(assemble(none, in_memory(b"")).connections) == 0


def test_ids_do_not_depend_on_the_rest_of_the_batch() -> None:
    """Ids of connections and exchanges stay if other connections are in the batch."""
    one = Playbook().syn() >> request(1) << response(1)
    alone = one.run()
    batch, memory = one.batch()
    other = Playbook(ports=(1, 2)).syn().batch()[0]
    both = SegmentBatch.concat([SegmentBatch(other.endpoints, other.segments), batch])
    found = assemble(both, memory)
    assert set(alone.exchanges["exchange_id"]) == set(found.exchanges["exchange_id"])
    assert set(alone.connections["connection_id"]) <= set(found.connections["connection_id"])
    assert (found.exchanges["exchange_id"] > 0).all()


def test_a_syn_after_its_answer_belongs_to_it() -> None:
    """A SYN that was captured after its SYN-ACK begins no second connection."""
    book = Playbook().syn() >> request(1) << response(1)
    book.packets[:2] = reversed(book.packets[:2])
    found = book.run()
    assert len(found.connections) == 1
    assert book.packets[1].flags == SYN


@pytest.mark.parametrize("correlation_id", [0, 7])
def test_a_record_set_behind_a_gap_is_no_response(correlation_id: int) -> None:
    """The header of a Fetch response is lost. Behind it, a size and a base offset of 0 look like a
    response with id 0, and the record set ends where the response ends."""
    records = struct.pack(">qi", 0, 1000) + bytes(1000)
    body = struct.pack(">iih", 1, 0, 0) + bytes(20) + struct.pack(">i", len(records))
    book = Playbook().syn() >> request(0, 1, 0) << response(0, body + records)
    book = book >> request(correlation_id, 1, 0) << Gap(8 + len(body) - 4)
    book = book << struct.pack(">i", len(records)) + records
    assert book.exchanges()[1] == (correlation_id, "response_missing")


def test_a_fitting_end_makes_no_response() -> None:
    """The end of a lost response resembles a response, and its end is a boundary."""
    book = Playbook().syn()
    for number in (1, 2, 3, 4, 5):
        book = book >> request(number, 1, 0)
        if number == 3:
            book = book << Gap(100) << bytes(50) + framed(struct.pack(">iq", -1, 0))
        book = book << response(number, struct.pack(">i", 0))
    assert [row[0] for row in book.exchanges()] == [1, 2, 3, 4, 5]
