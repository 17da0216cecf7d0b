"""An authority and certificates for brokers and clients on loopback, as PEM files."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from tests.builders.certificates import certificate, key_pem, name


@dataclass(frozen=True)
class Pem:
    """Files: the certificate, its key, and both in one (as Kafka's PEM key stores want it)."""

    cert: Path
    key: Path
    store: Path


class Authority:
    """Signs certificates; its own is in `cert`."""

    def __init__(self, folder: Path, common_name: str = "authority") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = name(common_name)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        signed = certificate(self._name, self._key, _validity(None), constraints)
        self.cert = folder / f"{common_name}.pem"
        self.cert.write_bytes(signed.public_bytes(Encoding.PEM))

    def issue(self, common_name: str, host: str | None = None, ends: datetime | None = None) -> Pem:
        """For a host (an address), or for a client; without an end it is valid for two days."""
        key = ec.generate_private_key(ec.SECP256R1())
        hosts = [x509.IPAddress(ip_address(host))] if host else []
        extensions = [x509.SubjectAlternativeName(hosts)] if hosts else []
        signed = certificate(
            name(common_name),
            key,
            _validity(ends),
            *extensions,
            issuer=self._name,
            issuer_key=self._key,
        )
        cert = signed.public_bytes(Encoding.PEM)
        pem = Pem(*(self.folder / f"{common_name}-{kind}.pem" for kind in ("cert", "key", "store")))
        pem.cert.write_bytes(cert)
        pem.key.write_bytes(key_pem(key))
        pem.store.write_bytes(key_pem(key) + cert)
        return pem


def _validity(ends: datetime | None) -> tuple[datetime, datetime]:
    ends = ends or datetime.now(UTC) + timedelta(days=2)
    return min(ends, datetime.now(UTC)) - timedelta(hours=1), ends
