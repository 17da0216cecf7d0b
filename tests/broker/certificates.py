"""An authority and certificates for brokers and clients on loopback, as PEM files."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pem:
    """Files: the certificate, its key, and both in one (as Kafka's PEM key stores want it)."""

    cert: Path
    key: Path
    store: Path


class Authority:
    """Signs certificates; its own is in `cert`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        signed = (
            _certificate(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.cert = folder / f"{name}.pem"
        self.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, host: str | None = None, ends: datetime | None = None) -> Pem:
        """For a host (an address), or for a client; without an end it is valid for two days."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _certificate(_name(name), self._name, key, ends)
        if host is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))])
            builder = builder.add_extension(names, critical=False)
        cert = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        text = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        pem = Pem(*(self.folder / f"{name}-{kind}.pem" for kind in ("cert", "key", "store")))
        pem.cert.write_bytes(cert)
        pem.key.write_bytes(text)
        pem.store.write_bytes(text + cert)
        return pem


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    ends: datetime | None = None,
) -> x509.CertificateBuilder:
    ends = ends or datetime.now(UTC) + timedelta(days=2)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(ends, datetime.now(UTC)) - timedelta(hours=1))
        .not_valid_after(ends)
    )
