"""Fatal alerts in handshakes of OpenSSL, which the tables name."""

import ssl
from pathlib import Path
from typing import Any

import pytest

from tests.builders.talks import BROKER, CLIENT, Playbook
from tests.builders.tls_talk import SERVER_NAME, Parties, TlsTalk, secret_talk


def _client(version: str) -> ssl.SSLContext:
    """A client of one version that trusts no authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = getattr(ssl.TLSVersion, version)
    return context


def _failed_handshake(client_context: ssl.SSLContext, parties: Parties) -> Playbook:
    """The segments of a handshake that one side ends with an alert."""
    bios = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
    client = client_context.wrap_bio(*bios[CLIENT], server_hostname=SERVER_NAME)
    broker = parties.broker.wrap_bio(*bios[BROKER], server_side=True)
    book = Playbook().syn()
    failures = 0
    for _ in range(4):
        for side, end in ((CLIENT, client), (BROKER, broker)):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                failures += 1
            data = bios[side][1].read()
            if data:
                bios[1 - side][0].write(data)
                book.send(side, data)
    assert failures
    return book


def _alerts(book: Playbook) -> tuple[str | None, str | None]:
    (facts,) = book.run().tls.values()
    return facts.request_alert, facts.response_alert


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_a_client_that_does_not_trust_the_certificate(tmp_path: Path, version: str) -> None:
    """OpenSSL refuses a self-signed certificate, with an alert in the clear."""
    book = _failed_handshake(_client(version), Parties(tmp_path, version))
    assert _alerts(book) == ("unknown_ca", None)


@pytest.mark.parametrize(("size", "alert"), [(2 + 1 + 16, "encrypted"), (36 + 1 + 16, None)])
def test_an_encrypted_record_with_the_size_of_an_alert(
    tmp_path: Path, size: int, alert: str | None
) -> None:
    """A client may encrypt the alert of TLS 1.3; the smallest Finished has 36 bytes."""
    hello, flight = (data for _, data in TlsTalk(Parties(tmp_path, "TLSv1_3")).steps[:2])
    change = bytes.fromhex("140303000101")
    record = bytes.fromhex("170303") + size.to_bytes(2) + bytes(size)
    book = (Playbook().syn() >> hello) << flight
    assert _alerts(book >> change + record) == (alert, None)


def test_a_broker_without_a_common_version(tmp_path: Path) -> None:
    """The broker speaks TLS 1.3 only, and its alert is in the clear."""
    book = _failed_handshake(_client("TLSv1_2"), Parties(tmp_path, "TLSv1_3"))
    assert _alerts(book) == (None, "protocol_version")


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_a_session_that_succeeds_has_no_alert(tmp_path: Path, version: str) -> None:
    """Neither application data nor the alerts of a close count."""
    talk: Any = secret_talk(Parties(tmp_path, version))
    assert _alerts(talk.playbook()) == (None, None)
