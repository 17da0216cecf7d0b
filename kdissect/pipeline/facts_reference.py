"""The readable definition of the kernel of `facts`."""

from __future__ import annotations

FNV_BASIS, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3  # of 64 bits


def client_id(extent: bytes | None) -> tuple[int, int]:
    """(FNV-1a digest as int64, length) of the client id in a request's first extent.

    The length is -1 for null, -2 where the extent (None: missing) does not hold all of the id; the
    digest of both is 0.
    """
    if extent is None or len(extent) < 10:
        return 0, -2
    size = int.from_bytes(extent[8:10], "big", signed=True)
    if size < 0:
        return 0, -1
    if len(extent) < 10 + size:
        return 0, -2
    digest = FNV_BASIS
    for byte in extent[10 : 10 + size]:
        digest = (digest ^ byte) * FNV_PRIME % 2**64
    return digest - 2**64 if digest >> 63 else digest, size
