"""X.509 certificates and their keys, as PEM."""

from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import NameOID


def name(common: str, organization: str | None = None) -> x509.Name:
    """A name of a certificate."""
    parts = {NameOID.COMMON_NAME: common, NameOID.ORGANIZATION_NAME: organization}
    return x509.Name([x509.NameAttribute(oid, text) for oid, text in parts.items() if text])


def certificate(
    subject: x509.Name,
    key: CertificateIssuerPrivateKeyTypes,
    valid: tuple[datetime, datetime],
    *extensions: x509.ExtensionType,
    issuer: x509.Name | None = None,
    issuer_key: CertificateIssuerPrivateKeyTypes | None = None,
) -> x509.Certificate:
    """A certificate of `key`, self-signed without an issuer. valid: its begin and end."""
    builder = x509.CertificateBuilder(
        issuer or subject, subject, key.public_key(), x509.random_serial_number(), *valid
    )
    for extension in extensions:
        is_critical = isinstance(extension, x509.BasicConstraints)
        builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(issuer_key or key, hashes.SHA256())


def key_pem(key: CertificateIssuerPrivateKeyTypes) -> bytes:
    """A private key without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
