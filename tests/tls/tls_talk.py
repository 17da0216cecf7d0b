"""TLS conversations by OpenSSL (Python's `ssl`) in memory, as transcripts with their key log."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.kafka.playbook import BROKER, CLIENT, Playbook

SERVER_NAME = "broker.example"


@cache
def _certificate(common_name: str) -> bytes:
    """A self-signed certificate and its key, as PEM."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=36500))
        .add_extension(
            x509.SubjectAlternativeName(
                [
                    x509.DNSName(f"alt.{common_name}"),
                    x509.IPAddress(ipaddress.ip_address("10.0.0.9")),
                ]
            ),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return built.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


class Parties:
    """A client's and a broker's settings; several conversations may share them."""

    def __init__(
        self, folder: Path, version: str, ciphers: str | None = None, *, is_mutual: bool = False
    ) -> None:
        self.log = folder / "key.log"
        self.broker = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context, name in ((self.broker, SERVER_NAME), (self.client, "alice")):
            chosen = getattr(ssl.TLSVersion, version)
            context.minimum_version = context.maximum_version = chosen
            if ciphers and version == "TLSv1_2":
                context.set_ciphers(ciphers)
            path = folder / f"{name}.pem"
            path.write_bytes(_certificate(name))
            if context is self.broker or is_mutual:
                context.load_cert_chain(path)
        self.client.check_hostname = False
        self.client.load_verify_locations(folder / f"{SERVER_NAME}.pem")
        if is_mutual:
            self.broker.verify_mode = ssl.CERT_REQUIRED
            self.broker.load_verify_locations(folder / "alice.pem")
        self.client.keylog_filename = str(self.log)

    def key_log(self) -> bytes:
        return self.log.read_bytes()


class Talk:
    """One conversation; `steps` are (sender, bytes on the wire) in order."""

    def __init__(self, parties: Parties, session: ssl.SSLSession | None = None) -> None:
        self.steps: list[tuple[int, bytes]] = []
        self._bios = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
        client_in, client_out = self._bios[CLIENT]
        broker_in, broker_out = self._bios[BROKER]
        self.client = parties.client.wrap_bio(
            client_in, client_out, server_hostname=SERVER_NAME, session=session
        )
        self.broker = parties.broker.wrap_bio(broker_in, broker_out, server_side=True)
        self._ends = [self.client, self.broker]
        self._shake_hands()

    def _shake_hands(self) -> None:
        done = [False, False]
        while not all(done):
            for side in (CLIENT, BROKER):
                if not done[side]:
                    try:
                        self._ends[side].do_handshake()
                        done[side] = True
                    except ssl.SSLWantReadError:
                        pass
                self._carry(side)

    def _carry(self, side: int) -> bytes:
        data = self._bios[side][1].read()
        if data:
            self.steps.append((side, data))
            self._bios[1 - side][0].write(data)
        return data

    def say(self, side: int, payload: bytes) -> bytes:
        """Send application data; the bytes on the wire."""
        self._ends[side].write(payload)
        sent = self._carry(side)
        left = len(payload)
        while left:
            left -= len(self._ends[1 - side].read(left))
        return sent

    def playbook(self, book: Playbook | None = None, size: int = 1400) -> Playbook:
        """The transcript in segments of at most `size` bytes."""
        book = book or Playbook().syn()
        for side, data in self.steps:
            for start in range(0, len(data), size):
                part = data[start : start + size]
                book = book >> part if side == CLIENT else book << part
        return book
