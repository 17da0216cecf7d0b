"""Reads X.509 certificates (RFC 5280) from TLS handshakes: names, issuer, validity.

A certificate comes from a capture, so each of its fields may be invalid. Such a field is None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from kdissect.tls.handshake import Certificate

NAMES_MAX = 64  # names of a certificate that are listed

# Exceptions of the library for invalid certificates, at loading or at access.
_BAD_CERTIFICATE = (
    *(ValueError, TypeError, OverflowError, UnsupportedAlgorithm),
    *(x509.InvalidVersion, x509.ExtensionNotFound, x509.DuplicateExtension),
    *(x509.UnsupportedGeneralNameType, x509.AttributeNotFound),
    KeyError,  # of names of an unknown ASN.1 type, in older releases of the library
)
Value = TypeVar("Value")


@lru_cache(64)  # brokers send the same one to all their clients
def read_certificate(der: bytes) -> Certificate | None:
    """Return the fields of a certificate in DER; None for other bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd but readable certificates
        loaded = _valid(lambda: x509.load_der_x509_certificate(der))
        if loaded is None:
            return None
        return Certificate(
            _valid(lambda: _clean(loaded.subject.rfc4514_string())),
            _valid(lambda: _clean(loaded.issuer.rfc4514_string())),
            _valid(lambda: int(loaded.not_valid_before_utc.timestamp())),
            _valid(lambda: int(loaded.not_valid_after_utc.timestamp())),
            _names(loaded),
        )


def _valid(read: Callable[[], Value]) -> Value | None:
    """Return a value of the library; None if the certificate is invalid there."""
    try:
        return read()
    except _BAD_CERTIFICATE:
        return None


def _names(loaded: x509.Certificate) -> tuple[str, ...]:
    """Common names, then alternative DNS names and addresses, each once."""
    names: list[str] = []
    try:
        for attribute in loaded.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME):
            names.append(str(attribute.value))
        alternative = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names += alternative.get_values_for_type(x509.DNSName)
        names += [str(ip) for ip in alternative.get_values_for_type(x509.IPAddress)]
    except _BAD_CERTIFICATE:
        pass
    return tuple(dict.fromkeys(map(_clean, names[:NAMES_MAX])))


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
