"""Cipher suites of TLS: code points (IANA's registry), and the ciphers that the names stand for."""

from __future__ import annotations

from dataclasses import dataclass

_NAMES = """
0005 RSA_WITH_RC4_128_SHA
000A RSA_WITH_3DES_EDE_CBC_SHA
002F RSA_WITH_AES_128_CBC_SHA
0033 DHE_RSA_WITH_AES_128_CBC_SHA
0035 RSA_WITH_AES_256_CBC_SHA
0039 DHE_RSA_WITH_AES_256_CBC_SHA
003C RSA_WITH_AES_128_CBC_SHA256
003D RSA_WITH_AES_256_CBC_SHA256
0067 DHE_RSA_WITH_AES_128_CBC_SHA256
006B DHE_RSA_WITH_AES_256_CBC_SHA256
009C RSA_WITH_AES_128_GCM_SHA256
009D RSA_WITH_AES_256_GCM_SHA384
009E DHE_RSA_WITH_AES_128_GCM_SHA256
009F DHE_RSA_WITH_AES_256_GCM_SHA384
00A8 PSK_WITH_AES_128_GCM_SHA256
00A9 PSK_WITH_AES_256_GCM_SHA384
1301 AES_128_GCM_SHA256
1302 AES_256_GCM_SHA384
1303 CHACHA20_POLY1305_SHA256
1304 AES_128_CCM_SHA256
1305 AES_128_CCM_8_SHA256
C009 ECDHE_ECDSA_WITH_AES_128_CBC_SHA
C00A ECDHE_ECDSA_WITH_AES_256_CBC_SHA
C013 ECDHE_RSA_WITH_AES_128_CBC_SHA
C014 ECDHE_RSA_WITH_AES_256_CBC_SHA
C023 ECDHE_ECDSA_WITH_AES_128_CBC_SHA256
C024 ECDHE_ECDSA_WITH_AES_256_CBC_SHA384
C027 ECDHE_RSA_WITH_AES_128_CBC_SHA256
C028 ECDHE_RSA_WITH_AES_256_CBC_SHA384
C02B ECDHE_ECDSA_WITH_AES_128_GCM_SHA256
C02C ECDHE_ECDSA_WITH_AES_256_GCM_SHA384
C02F ECDHE_RSA_WITH_AES_128_GCM_SHA256
C030 ECDHE_RSA_WITH_AES_256_GCM_SHA384
C09C RSA_WITH_AES_128_CCM
C09D RSA_WITH_AES_256_CCM
C09E DHE_RSA_WITH_AES_128_CCM
C09F DHE_RSA_WITH_AES_256_CCM
C0A0 RSA_WITH_AES_128_CCM_8
C0A1 RSA_WITH_AES_256_CCM_8
C0A2 DHE_RSA_WITH_AES_128_CCM_8
C0A3 DHE_RSA_WITH_AES_256_CCM_8
C0AC ECDHE_ECDSA_WITH_AES_128_CCM
C0AD ECDHE_ECDSA_WITH_AES_256_CCM
C0AE ECDHE_ECDSA_WITH_AES_128_CCM_8
C0AF ECDHE_ECDSA_WITH_AES_256_CCM_8
CCA8 ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256
CCA9 ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256
CCAA DHE_RSA_WITH_CHACHA20_POLY1305_SHA256
"""

NAMES = {int(code, 16): f"TLS_{name}" for code, name in map(str.split, _NAMES.split("\n")[1:-1])}


@dataclass(frozen=True, slots=True)
class Suite:
    """mode: gcm, ccm, chacha or cbc. hash_name: of the key schedule. mac: of records (cbc only).

    is_13: a suite of TLS 1.3, which names no key exchange.
    """

    name: str
    mode: str
    key_size: int
    hash_name: str
    mac: str
    tag_size: int
    is_13: bool


def suite_name(code: int) -> str:
    """IANA's name, else the code point as 0xABCD."""
    return NAMES.get(code, f"0x{code:04X}")


def suite_of(code: int) -> Suite | None:
    """The suite, or None if it is unknown or kdissect cannot decrypt its records."""
    name = NAMES.get(code)
    if name is None:
        return None
    cipher = name.removeprefix("TLS_").rpartition("WITH_")[2]
    is_13 = "_WITH_" not in name
    hash_name = "sha384" if cipher.endswith("SHA384") else "sha256"
    if cipher.startswith("CHACHA20"):
        return Suite(name, "chacha", 32, hash_name, "", 16, is_13)
    if not cipher.startswith("AES_"):
        return None
    key_size = int(cipher[4:7]) // 8
    if "_GCM" in cipher:
        return Suite(name, "gcm", key_size, hash_name, "", 16, is_13)
    if "_CCM" in cipher:
        return Suite(name, "ccm", key_size, hash_name, "", 8 if "CCM_8" in cipher else 16, is_13)
    mac = {"SHA": "sha1", "SHA256": "sha256", "SHA384": "sha384"}[cipher.rpartition("_")[2]]
    return Suite(name, "cbc", key_size, hash_name, mac, 0, is_13)
