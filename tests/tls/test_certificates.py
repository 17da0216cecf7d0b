"""Certificates of handshakes: fields that OpenSSL wrote, and bytes that are no certificate."""

import random
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from kdissect.tls.certificates import read_certificate
from tests.builders.certificates import certificate, name

# RFC 5280, 4.1.2.5: the end of a certificate without an end
_NO_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def _der(begin: datetime, end: datetime) -> bytes:
    """A certificate of a broker, signed by another name."""
    key = ec.generate_private_key(ec.SECP256R1())
    owner = name("broker-1", "Shop, \u202e Inc.")
    signed = certificate(owner, key, (begin, end), issuer=name("Shop CA"))
    return signed.public_bytes(Encoding.DER)


def test_the_fields_of_a_certificate() -> None:
    """Names are RFC 4514 text, times are seconds since 1970."""
    begin, end = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 12, 1, 8, 30, tzinfo=UTC)
    found = read_certificate(_der(begin, end))
    assert found is not None
    assert found.subject == "O=Shop\\, \u202e Inc.,CN=broker-1"
    assert found.issuer == "CN=Shop CA"
    assert (found.not_before, found.not_after) == (begin.timestamp(), end.timestamp())
    assert found.names == ("broker-1",)


def test_a_certificate_without_an_end() -> None:
    """The largest time of X.509 fits."""
    found = read_certificate(_der(datetime(1950, 1, 1, tzinfo=UTC), _NO_END))
    assert found is not None
    assert found.not_before == -631_152_000
    assert found.not_after == _NO_END.timestamp()


def test_damaged_certificates_raise_nothing() -> None:
    """Cut and changed bytes give a certificate with fewer fields, or none."""
    whole = _der(datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC))
    for size in range(len(whole)):
        assert read_certificate(whole[:size]) is None
    rng = random.Random(5)
    for _ in range(1000):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        found = read_certificate(bytes(changed))
        if found is not None and found.not_after is not None:
            assert -62_135_596_800 <= found.not_after <= _NO_END.timestamp()
