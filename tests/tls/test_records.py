"""TLS records in pieces of streams; key logs, keys and suites."""

import random
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kdissect.tls.cipher_suites import suite_name, suite_of
from kdissect.tls.key_log import expand_label, holds_secrets, is_blank, prf, read_secrets
from kdissect.tls.records import LOST, walk_records
from tests.builders.pieces import MadePieces, cuts, lost

BODIES = st.tuples(st.sampled_from([1, 2, 24, 60]), st.integers(0, 2**32)).map(
    lambda drawn: random.Random(drawn[1]).randbytes(drawn[0])
)
RECORDS = st.tuples(st.sampled_from([20, 21, 22, 23]), st.sampled_from([1, 3]), BODIES)


@given(st.lists(RECORDS, min_size=1, max_size=8), cuts, lost, st.booleans())
def test_records_are_found_however_they_are_cut(
    said: list[tuple[int, int, bytes]], cuts: list[int], lost: list[bool], has_origin: bool
) -> None:
    """Every whole record is found, and no other, in any segments and with gaps."""
    data = b""
    sent = {}
    for kind, minor, body in said:
        sent[len(data)] = kind, 5 + len(body)
        data += struct.pack(">BBBH", kind, 3, minor, len(body)) + body
    made = MadePieces(data, cuts, lost)
    rows = walk_records(made.pieces, made.sides, 0, np.array([has_origin], np.uint8))
    there = [byte is not None for byte in made.there]
    here = int(rows[0]["pos"]) if len(rows) else 0
    for row in rows:
        pos, size = int(row["pos"]), int(row["size"])
        assert pos == here  # records and lost stretches leave nothing out
        assert row["kind"] == LOST or (row["kind"], size) == sent[pos]
        assert row["captured"] == sum(there[pos : pos + size])
        inside = [n for n, (a, b) in enumerate(made.spans) if a < pos + size and b > pos]
        assert (row["first"], row["last"]) == ((inside[0], inside[-1]) if inside else (-1, -1))
        here += size
    assert here >= len(there)
    whole = {pos for pos, (_, size) in sent.items() if sum(there[pos : pos + size]) == size}
    assert whole <= {int(row["pos"]) for row in rows if row["kind"] != LOST}


def test_key_logs_are_read_as_they_are_found() -> None:
    """Key logs may have comments, any line ends, upper case and unknown lines."""
    random, session = bytes(range(32)), b"\xaa" * 32
    master = b"\xcc" * 48
    text = b"\r\n".join(
        [
            b"# a comment",
            b"CLIENT_RANDOM " + random.hex().encode() + b" " + master.hex().upper().encode(),
            b"CLIENT_RANDOM " + random.hex().encode() + b" " + b"00" * 48,
            b"RSA Session-ID:" + session.hex().encode() + b" Master-Key:" + master.hex().encode(),
            b"EXPORTER_SECRET " + random.hex().encode() + b" " + b"11" * 32,
            b"CLIENT_RANDOM " + b"zz" * 32 + b" " + b"00" * 48,
            b"  SERVER_TRAFFIC_SECRET_0 " + random.hex().encode() + b" " + b"22" * 48 + b"  ",
            b"CLIENT_HANDSHAKE_TRAFFIC_SECRET " + b"33" * 32 + b" " + b"22" * 48,
            b"\xff\xfe\0garbage",
        ]
    )
    assert holds_secrets(text)
    assert read_secrets([b"", text], {random, session}) == {
        ("CLIENT_RANDOM", random): master,
        ("SESSION", session): master,
        ("SERVER_TRAFFIC_SECRET_0", random): b"\x22" * 48,
    }
    assert read_secrets([text], set()) == {}
    assert not holds_secrets(b"# nothing\n\n")
    assert is_blank(b"# nothing\n\r\n  \n")
    assert not is_blank(b"# nothing\nsomething\n")


def test_the_key_schedules_give_published_values() -> None:
    """RFC 8448 section 3 for TLS 1.3; for 1.2 the vector of the IETF's TLS list (P_SHA256)."""
    secret = bytes.fromhex("a11af9f05531f856ad47116b45a950328204b4f44bfb6b3a4b4f1f3fcb631643")
    key = expand_label(secret, b"key", 16, "sha256")
    assert key.hex() == "9f02283b6c9c07efc26bb9f2ac92e356"
    assert expand_label(secret, b"iv", 12, "sha256").hex() == "cf782b88dd83549aadf1e984"
    made = prf(
        bytes.fromhex("9bbe436ba940f017b17652849a71db35"),
        b"test label",
        bytes.fromhex("a0ba9f936cda311827a6f796ffd5198c"),
        100,
        "sha256",
    )
    assert made.hex().startswith("e3f229ba727be17b8d122620557cd453c2aab21d07c3d495329b52d4e61edb5a")
    assert len(made) == 100


def test_suites_are_named_and_understood() -> None:
    """Cipher suites have their IANA names and parameters; unknown ones have none."""
    assert suite_name(0x1301) == "TLS_AES_128_GCM_SHA256"
    assert suite_name(0xC030) == "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384"
    assert suite_name(0x4A4A) == "0x4A4A"
    assert suite_of(0x0005) is None
    cbc = suite_of(0xC028)
    assert cbc is not None
    assert (cbc.mode, cbc.key_size, cbc.hash_name, cbc.mac) == ("cbc", 32, "sha384", "sha384")
    short = suite_of(0x1305)
    assert short is not None
    assert (short.mode, short.tag_size, short.is_13) == ("ccm", 8, True)
