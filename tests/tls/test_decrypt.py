"""TLS by OpenSSL decrypts to the sent bytes, with and without a key log, whole and damaged."""

import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdissect.kafka.assembly import Anomaly, Assembly, PairStatus, Protocol
from kdissect.tls.ciphers import Tls13
from kdissect.tls.handshake import Certificate
from tests.builders.frames import request, response
from tests.builders.talks import ACK, BROKER, CLIENT, FIN, Gap, Playbook
from tests.builders.tls_talk import (
    SECRET_EXCHANGES,
    SERVER_NAME,
    Parties,
    Sealer,
    TlsTalk,
    frame_bytes,
    secret_talk,
)
from tests.kafka.conversations import check_accounts

TLS_12_CIPHERS = [
    *("ECDHE-RSA-AES128-GCM-SHA256", "ECDHE-RSA-AES256-GCM-SHA384"),
    *("ECDHE-RSA-CHACHA20-POLY1305", "AES128-GCM-SHA256", "AES128-SHA", "AES256-SHA256"),
    *("ECDHE-RSA-AES256-SHA384", "AES128-CCM", "AES256-CCM8"),
]
CIPHER_NAMES = {
    "ECDHE-RSA-AES128-GCM-SHA256": "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "ECDHE-RSA-CHACHA20-POLY1305": "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    "AES256-SHA256": "TLS_RSA_WITH_AES_256_CBC_SHA256",
    "AES128-SHA": "TLS_RSA_WITH_AES_128_CBC_SHA",
    "AES256-CCM8": "TLS_RSA_WITH_AES_256_CCM_8",
}
# As `tls_talk` made it: self-signed, valid from 2020-01-01 for 36,500 days.
BROKER_CERTIFICATE = Certificate(
    f"CN={SERVER_NAME}",
    f"CN={SERVER_NAME}",
    1_577_836_800,
    1_577_836_800 + 36_500 * 86_400,
    (SERVER_NAME, f"alt.{SERVER_NAME}", "10.0.0.9"),
)


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return Parties(tmp_path, "TLSv1_3")


def _answer(number: int) -> bytes:
    """A Metadata response of version 1 with one topic."""
    name = bytes([97 + number % 26]) * (number * 7 % 900)
    return response(number, bytes(8) + struct.pack(">ihh", 1, 0, len(name)) + name + bytes(5))


def _check_all(assembly: Assembly) -> None:
    rows = assembly.exchanges
    assert rows["correlation_id"].tolist() == list(range(SECRET_EXCHANGES))
    assert (rows["status"] == PairStatus.PAIRED).all()
    for number, row in enumerate(rows):
        size = (5, 100, 2000, 40_000)[number % 4]
        asked = request(number, body=bytes([number]) * size)
        answered = response(number, body=bytes([100 + number]) * (50_000 - size))
        assert frame_bytes(assembly, row["request"]) == asked[4:]
        assert frame_bytes(assembly, row["response"]) == answered[4:]
    (connection,) = assembly.connections
    assert connection["is_tls"]
    assert connection["protocol"] == Protocol.KAFKA
    for counts in connection["direction"]:
        assert counts["framed_byte_count"] == counts["byte_count"]
        assert counts["unframed_byte_count"] == 0
    assert not len(assembly.anomalies)


@pytest.mark.parametrize("ciphers", TLS_12_CIPHERS)
def test_tls_12_decrypts(tmp_path: Path, ciphers: str) -> None:
    """Each kind of TLS 1.2 cipher is decrypted, with the handshake's facts."""
    parties = Parties(tmp_path, "TLSv1_2", ciphers + ":@SECLEVEL=0")
    talk = secret_talk(parties)
    name = talk.client.cipher()[0]
    assembly = (talk.playbook() >> (FIN | ACK)).run(parties.key_log())
    _check_all(assembly)
    (facts,) = assembly.tls.values()
    assert facts.version == "TLSv1.2"
    assert facts.sni == SERVER_NAME
    assert facts.cipher == CIPHER_NAMES.get(name, facts.cipher)
    assert facts.broker_certificate == BROKER_CERTIFICATE
    assert facts.client_certificate is None


def test_a_warning_before_the_hello_of_the_broker(tmp_path: Path) -> None:
    """A server that does not know the name in the client's hello may say so, and go on."""
    parties = Parties(tmp_path, "TLSv1_2", TLS_12_CIPHERS[0])
    talk = secret_talk(parties)
    first = next(at for at, (side, _) in enumerate(talk.steps) if side == BROKER)
    talk.steps[first] = (BROKER, bytes.fromhex("15030300020170") + talk.steps[first][1])
    assembly = (talk.playbook() >> (FIN | ACK)).run(parties.key_log())
    _check_all(assembly)
    (facts,) = assembly.tls.values()
    assert facts.version == "TLSv1.2"


@pytest.mark.parametrize("size", [211, 999, 65_000])
def test_tls_13_decrypts(parties: Parties, size: int) -> None:
    """Records cut anywhere, and several in a segment."""
    assembly = secret_talk(parties).playbook(size=size).run(parties.key_log())
    _check_all(assembly)
    (facts,) = assembly.tls.values()
    assert facts.version == "TLSv1.3"
    assert facts.cipher == "TLS_AES_256_GCM_SHA384"
    assert facts.broker_certificate == BROKER_CERTIFICATE


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_resumed_sessions_decrypt(tmp_path: Path, version: str) -> None:
    """An abbreviated handshake of 1.2, a pre-shared key of 1.3."""
    parties = Parties(tmp_path, version)
    first = secret_talk(parties)
    second = secret_talk(parties, first.client.session)
    assert second.client.session_reused
    _check_all(second.playbook().run(parties.key_log()))


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_mutual_tls_tells_the_client(tmp_path: Path, version: str) -> None:
    """The client certificate's subject is in the facts."""
    parties = Parties(tmp_path, version, is_mutual=True)
    assembly = secret_talk(parties).playbook().run(parties.key_log())
    _check_all(assembly)
    certificate = assembly.tls[0].client_certificate
    assert certificate is not None
    assert (certificate.subject, certificate.issuer) == ("CN=alice", "CN=alice")


def test_without_keys_the_connection_has_the_facts_of_its_handshake(tmp_path: Path) -> None:
    """The connection is TLS, with its facts and without frames."""
    parties = Parties(tmp_path, "TLSv1_2", is_mutual=True)
    assembly = secret_talk(parties).playbook().run()
    assert not len(assembly.exchanges)
    assert not len(assembly.anomalies)
    (connection,) = assembly.connections
    assert connection["is_tls"]
    assert connection["protocol"] == Protocol.TLS
    assert connection["direction"]["framed_byte_count"].tolist() == [0, 0]
    assert assembly.tls[0].sni == SERVER_NAME
    certificate = assembly.tls[0].client_certificate
    assert certificate is not None
    assert (certificate.subject, certificate.issuer) == ("CN=alice", "CN=alice")


def test_a_key_log_of_other_connections_says_so(parties: Parties) -> None:
    """An anomaly separates missing secrets from wrong ones."""
    talk = secret_talk(parties)
    log = re.sub(rb"(?m)^(\w+ )([0-9a-f]{4})", rb"\g<1>0000", parties.key_log())
    (anomaly,) = talk.playbook().run(log).anomalies
    assert (anomaly["kind"], anomaly["reason"]) == (Anomaly.NOT_DECRYPTED, 1)
    wrong = re.sub(rb"(?m) [0-9a-f]{4}(?=[0-9a-f]*\r?$)", b" 0000", parties.key_log())
    (anomaly,) = talk.playbook().run(wrong).anomalies
    assert (anomaly["kind"], anomaly["reason"]) == (Anomaly.NOT_DECRYPTED, 3)


def test_a_key_log_of_one_side_says_so(parties: Parties) -> None:
    """That side is read, and the anomaly tells why there is nothing of the other."""
    playbook = secret_talk(parties).playbook()
    assembly = playbook.run(re.sub(rb"(?m)^SERVER_.*$", b"", parties.key_log()))
    assert len(assembly.exchanges)
    assert (assembly.exchanges["request"]["size"] > 0).all()
    found = assembly.anomalies[assembly.anomalies["kind"] == Anomaly.NOT_DECRYPTED]
    assert found["reason"].tolist() == [4]


def test_lines_of_half_bytes_are_passed_over(parties: Parties) -> None:
    """A session id with an odd number of digits makes no line of a key log."""
    talk = secret_talk(parties)
    odd = b"RSA Session-ID:abc Master-Key:" + b"0" * 96 + b"\n"
    _check_all(talk.playbook().run(odd + parties.key_log()))


def test_a_key_log_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Some editors write one, in front of the first line."""
    parties = Parties(tmp_path, "TLSv1_2", TLS_12_CIPHERS[0])
    talk = secret_talk(parties)
    lines = [line for line in parties.key_log().splitlines() if not line.startswith(b"#")]
    _check_all(talk.playbook().run(b"\xef\xbb\xbf" + b"\n".join(lines)))


def test_traffic_secrets_alone_are_enough(parties: Parties) -> None:
    """Java agents write only these: which records are the handshake's is found out."""
    talk = secret_talk(parties)
    lines = parties.key_log().splitlines(keepends=True)
    log = b"".join(line for line in lines if b"HANDSHAKE" not in line)
    assert len(log) < len(parties.key_log())
    _check_all(talk.playbook().run(log))


def test_the_client_is_who_said_hello(parties: Parties) -> None:
    """Without the SYN and against the ports."""
    talk = secret_talk(parties)
    for log in ((), (parties.key_log(),)):
        book = talk.playbook(Playbook(ports=(443, 9092)))
        (connection,) = book.run(*log).connections
        assert connection["client_side"] == 0


# -- key updates ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_lost", [False, True])
def test_key_updates_are_followed(parties: Parties, is_lost: bool) -> None:
    """Also when the record of the update itself is lost."""
    talk = TlsTalk(parties)
    book = talk.playbook()
    sealer = Sealer(parties.key_log(), b"CLIENT_TRAFFIC_SECRET_0", 0)
    for number in range(6):
        book = book >> sealer.seal(request(number), padding=number % 3)
        book.send(CLIENT, sealer.update(), keep=not is_lost or number != 3)
    assembly = book.run(parties.key_log())
    assert assembly.exchanges["correlation_id"].tolist() == list(range(6))


# -- damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "ciphers"),
    [("TLSv1_3", None), ("TLSv1_2", "ECDHE-RSA-AES128-GCM-SHA256"), ("TLSv1_2", "AES128-SHA")],
)
def test_a_lost_segment_loses_the_frames_of_its_records(
    tmp_path: Path, version: str, ciphers: str | None
) -> None:
    """Small frames, one to a record: few more than the lost are missed."""
    parties = Parties(tmp_path, version, ciphers and ciphers + ":@SECLEVEL=0")
    talk = TlsTalk(parties)
    start = len(talk.steps)
    for number in range(300):
        talk.say(CLIENT, request(number, body=bytes([number & 255]) * (number % 50)))
        talk.say(BROKER, _answer(number))
    rng = random.Random(5)
    lost = {at for at in range(start, len(talk.steps)) if rng.random() < 0.04}
    book = Playbook().syn()
    for at, (side, data) in enumerate(talk.steps):
        book.send(side, data, keep=at not in lost)
    assembly = book.run(parties.key_log())
    rows = assembly.exchanges
    whole = rows[(rows["request"]["is_whole"] != 0) & (rows["request"]["size"] >= 0)]
    sent = {at for at in range(300) if start + 2 * at not in lost}
    assert set(whole["correlation_id"].tolist()) == sent
    for row in whole:
        number = int(row["correlation_id"])
        wanted = request(number, body=bytes([number & 255]) * (number % 50))
        assert frame_bytes(assembly, row["request"]) == wanted[4:]
    answered = rows[(rows["response"]["is_whole"] != 0) & (rows["response"]["size"] >= 0)]
    came = {at for at in range(300) if start + 2 * at + 1 not in lost}
    found = set(answered["correlation_id"].tolist())
    assert found <= came
    assert len(found) >= 0.95 * len(came)
    for row in answered:
        number = int(row["correlation_id"])
        wanted = _answer(number)
        assert frame_bytes(assembly, row["response"]) == wanted[4:]
    check_accounts(assembly)


def test_a_segment_in_the_middle_of_large_records(parties: Parties) -> None:
    """Frames over several records of 16 kB: those that the lost bytes do not touch are there."""
    talk = TlsTalk(parties)
    book = talk.playbook()
    for number in range(20):
        data = talk.say(CLIENT, request(number, body=bytes([number]) * 50_000))
        for at, start in enumerate(range(0, len(data), 1400)):
            is_lost = number in (4, 11, 12) and at == 13 + number
            book.send(CLIENT, data[start : start + 1400], keep=not is_lost)
    rows = book.run(parties.key_log()).exchanges
    assert rows["correlation_id"].tolist() == list(range(20))
    whole = rows["correlation_id"][rows["request"]["is_whole"] != 0].tolist()
    assert whole == [n for n in range(20) if n not in (4, 11, 12)]
    sides = rows["request"]
    assert (sides["size"] == len(request(0, body=bytes(50_000))) - 4).all()


def test_positions_are_those_of_the_ciphertext(parties: Parties) -> None:
    """The positions of frames are those of their TLS records."""
    talk = TlsTalk(parties)
    expected = []
    for number in range(3):
        before = sum(len(data) for side, data in talk.steps if side == CLIENT)
        first, second = request(2 * number), request(2 * number + 1)
        talk.say(CLIENT, first + second)
        expected += [before + 5, before + 5 + len(first)]
    rows = talk.playbook().run(parties.key_log()).exchanges
    assert rows["request"]["pos"].tolist() == expected
    assert len(set(rows["exchange_id"].tolist())) == 6


def test_hostile_bytes_are_survived(tmp_path: Path) -> None:
    """Whatever is changed, cut, doubled or swapped: accounts add up, and no frame that was not."""
    rng = random.Random(11)
    talks = []
    for number, (version, ciphers) in enumerate(
        [("TLSv1_3", None), ("TLSv1_2", "AES128-SHA:@SECLEVEL=0"), ("TLSv1_2", None)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        parties = Parties(folder, version, ciphers)
        talks.append((secret_talk(parties, count=6), parties.key_log()))
    for round_number in range(30):
        talk, log = talks[round_number % 3]
        book = Playbook().syn()
        for side, data in talk.steps:
            for start in range(0, len(data), 700):
                part = bytearray(data[start : start + 700])
                chance = rng.random()
                if chance < 0.05:
                    part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
                elif chance < 0.08:
                    part[: rng.randrange(len(part))] = rng.randbytes(rng.randrange(20))
                elif chance < 0.1:
                    book.next[side] += len(part)
                    continue
                elif chance < 0.11:
                    part += struct.pack(">BHH", rng.randrange(19, 25), 0x303, rng.randrange(65536))
                book.send(side, bytes(part))
        assembly = book.run(log, rng.randbytes(100))
        check_accounts(assembly)
        for row in assembly.exchanges:
            if row["request"]["is_whole"]:
                number = int(row["correlation_id"])
                size = (5, 100, 2000, 40_000)[number % 4]
                asked = request(number, body=bytes([number]) * size)
                assert frame_bytes(assembly, row["request"]) == asked[4:]


def test_random_handshakes_are_survived() -> None:
    """Random bytes after a hello, wrong lengths and wrong certificates crash nothing."""
    rng = random.Random(3)
    for _ in range(150):
        book = Playbook().syn()
        for kind, side in ((1, CLIENT), (2, BROKER), (11, BROKER), (11, CLIENT), (16, CLIENT)):
            body = bytes(rng.choices([0, 0, 1, 2, 3, 32, 43, 255], k=rng.randrange(120)))
            if rng.random() < 0.5:
                body = b"\x03\x03" + bytes(32) + b"\0" + body
            size = len(body) + rng.choice([0, 0, 0, 1, -1, 1000])
            message = bytes([kind]) + max(0, size).to_bytes(3, "big") + body
            record = b"\x16\x03\x03" + struct.pack(">H", len(message)) + message
            book.send(side, record)
        assembly = book.run(b"CLIENT_RANDOM " + b"0" * 64 + b" " + b"0" * 96)
        assert not len(assembly.exchanges)


def test_many_gaps_cost_linear_time(parties: Parties) -> None:
    """Every other record lost and the rest damaged: the search for numbers has a budget."""
    talk = TlsTalk(parties)
    book = talk.playbook()
    sealer = Sealer(parties.key_log(), b"CLIENT_TRAFFIC_SECRET_0", 0)
    book = book >> sealer.seal(request(0))
    for _ in range(1500):
        book.next[CLIENT] += 3000
        damaged = bytearray(sealer.seal(bytes(1000)))
        damaged[500] ^= 1
        book = book >> bytes(damaged)
    assembly = book.run(parties.key_log())
    assert assembly.exchanges["correlation_id"].tolist() == [0]
    check_accounts(assembly)
    assert np.count_nonzero(assembly.anomalies["kind"] == Anomaly.GAP) == 1500


def test_bytes_that_were_not_captured_buy_no_search(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gap may be as large as a sender claims; the search costs as the captured bytes."""
    trials = 0
    opened = Tls13.open

    def counted(self: Tls13, *of: Any) -> tuple[int, bytes] | None:
        nonlocal trials
        trials += 1
        return opened(self, *of)

    monkeypatch.setattr(Tls13, "open", counted)
    book = TlsTalk(parties).playbook()
    sealer = Sealer(parties.key_log(), b"CLIENT_TRAFFIC_SECRET_0", 0)
    book = book >> sealer.seal(request(0)) >> Gap(1 << 22) >> sealer.seal(bytes(9))[:-1] + b"!"
    assert book.run(parties.key_log()).exchanges["correlation_id"].tolist() == [0]
    assert trials < 5000
