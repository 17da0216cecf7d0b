"""TLS conversations by OpenSSL (Python's `ssl`) in memory, as transcripts with their key log."""

import datetime
import ipaddress
import re
import ssl
import struct
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding

from kdissect.capture.mapped_files import Sources
from kdissect.kafka.assembly import Assembly
from kdissect.tls.key_log import expand_label
from tests.builders.certificates import certificate, key_pem, name
from tests.builders.frames import request, response
from tests.builders.talks import BROKER, CLIENT, Playbook

SERVER_NAME = "broker.example"


@cache
def _certificate(common_name: str) -> bytes:
    """A self-signed certificate and its key, as PEM."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    names = x509.SubjectAlternativeName(
        [x509.DNSName(f"alt.{common_name}"), x509.IPAddress(ipaddress.ip_address("10.0.0.9"))]
    )
    signed = certificate(
        name(common_name),
        key,
        (start, start + datetime.timedelta(days=36500)),
        names,
        x509.BasicConstraints(ca=True, path_length=None),
    )
    return signed.public_bytes(Encoding.PEM) + key_pem(key)


class Parties:
    """A client's and a broker's settings; several conversations may share them."""

    def __init__(
        self, folder: Path, version: str, ciphers: str | None = None, *, is_mutual: bool = False
    ) -> None:
        self.log = folder / "key.log"
        self.broker = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context, owner in ((self.broker, SERVER_NAME), (self.client, "alice")):
            chosen = getattr(ssl.TLSVersion, version)
            context.minimum_version = context.maximum_version = chosen
            if ciphers and version == "TLSv1_2":
                context.set_ciphers(ciphers)
            path = folder / f"{owner}.pem"
            path.write_bytes(_certificate(owner))
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


class TlsTalk:
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

    def exchange(self, number: int) -> None:
        self.say(CLIENT, request(number))
        self.say(BROKER, response(number))

    def playbook(self, book: Playbook | None = None, size: int = 1400) -> Playbook:
        """The transcript in segments of at most `size` bytes."""
        book = book or Playbook().syn()
        for side, data in self.steps:
            book.send(side, data, size)
        return book


SECRET_EXCHANGES = 12


def secret_talk(parties: Parties, session: Any = None, count: int = SECRET_EXCHANGES) -> TlsTalk:
    """Requests and responses of all sizes: several in a record, and records in a row."""
    talk = TlsTalk(parties, session)
    for number in range(count):
        size = (5, 100, 2000, 40_000)[number % 4]
        talk.say(CLIENT, request(number, body=bytes([number]) * size))
        talk.say(BROKER, response(number, body=bytes([100 + number]) * (50_000 - size)))
    return talk


def frame_bytes(assembly: Assembly, side: Any) -> bytes:
    """The decrypted bytes of one side of an exchange, without its size."""
    extents = assembly.extents[side["extent_start"] :][: side["extent_count"]]
    rows = extents[extents["source"] >= 0]
    return Sources([]).carrying(assembly.carried.data).gather(rows).tobytes()


class Sealer:
    """Writes records of TLS 1.3 (AES-GCM) with the keys of a key log."""

    def __init__(self, log: bytes, label: bytes, number: int) -> None:
        found = re.search(rb"(?m)^" + label + rb" \w+ (\w+)", log)
        assert found is not None
        self.secret = bytes.fromhex(found[1].decode())
        self.number = number

    def seal(self, content: bytes, kind: int = 23, padding: int = 0) -> bytes:
        inner = content + bytes([kind]) + bytes(padding)
        header = b"\x17\x03\x03" + struct.pack(">H", len(inner) + 16)
        iv = int.from_bytes(expand_label(self.secret, b"iv", 12, "sha384"), "big")
        key = expand_label(self.secret, b"key", 32, "sha384")
        nonce = (iv ^ self.number).to_bytes(12, "big")
        self.number += 1
        return header + AESGCM(key).encrypt(nonce, inner, header)

    def update(self) -> bytes:
        message = self.seal(b"\x18\0\0\x01\0", 22)
        self.secret = expand_label(self.secret, b"traffic upd", len(self.secret), "sha384")
        self.number = 0
        return message
