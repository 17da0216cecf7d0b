"""Digests of client ids: the kernel against its definition."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kdissect.pipeline.facts import _client_id_kernel
from kdissect.pipeline.facts_reference import client_id

requests = st.one_of(
    st.none(),
    st.binary(max_size=14),
    st.tuples(st.integers(-1, 20), st.binary(max_size=20)).map(
        lambda told: struct.pack(">hhih", 3, 1, 7, told[0]) + told[1]
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(requests, max_size=6))
def test_kernel_and_definition_agree(extents: list[bytes | None]) -> None:
    data = np.frombuffer(b"".join(one or b"" for one in extents) + b"\0", np.uint8)
    sizes = np.array([len(one or b"") for one in extents], np.int64)
    digest, length = np.zeros(len(extents), np.int64), np.zeros(len(extents), np.int64)
    address = np.uint64(data.ctypes.data) + (np.cumsum(sizes) - sizes).astype(np.uint64)
    _client_id_kernel(address, sizes, digest, length)
    found = list(zip(digest.tolist(), length.tolist(), strict=True))
    assert found == [client_id(one) for one in extents]
