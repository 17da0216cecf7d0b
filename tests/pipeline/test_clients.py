"""Digests of client IDs are FNV-1a of the header's client ID."""

import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kdissect.pipeline.clients import _client_id_kernel

# From the test vectors of draft-eastlake-fnv, 64 bits.
PUBLISHED = {
    b"": 0xCBF29CE484222325,
    b"a": 0xAF63DC4C8601EC8C,
    b"foobar": 0x85944171F73967E8,
}


def header(client_id: bytes, length: int | None = None) -> bytes:
    length = len(client_id) if length is None else length
    return struct.pack(">hhih", 3, 1, 7, length) + client_id


def digests(extents: list[bytes]) -> list[tuple[int, int]]:
    """(digest, length) of the client id in each request's first extent."""
    data = np.frombuffer(b"".join(extents) + b"\0", np.uint8)
    sizes = np.array([len(one) for one in extents], np.int64)
    digest, length = np.zeros(len(extents), np.int64), np.zeros(len(extents), np.int64)
    address = np.uint64(data.ctypes.data) + (np.cumsum(sizes) - sizes).astype(np.uint64)
    _client_id_kernel(address, sizes, digest, length)
    return list(zip(digest.tolist(), length.tolist(), strict=True))


def test_digests_are_the_published_ones() -> None:
    """The kernel's digests are the published values of FNV-1a."""
    found = digests([header(name) for name in PUBLISHED])
    assert [(digest % 2**64, length) for digest, length in found] == [
        (digest, len(name)) for name, digest in PUBLISHED.items()
    ]


def test_null_and_cut_client_ids_have_no_digest() -> None:
    """A null client ID has length -1, and one that is cut has -2."""
    cut = header(b"orders")[:-1]
    assert digests([header(b"", -1), header(b"", -32768), cut, cut[:9], b""]) == [
        (0, -1), (0, -1), (0, -2), (0, -2), (0, -2),
    ]  # fmt: skip


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=9)), max_size=6))
def test_digests_are_of_the_client_id_alone(names: list[tuple[bytes, bytes]]) -> None:
    """Bytes before and after the client ID change no digest."""
    found = digests([header(name) + behind for name, behind in names])
    assert found == [digests([header(name)])[0] for name, _ in names]
