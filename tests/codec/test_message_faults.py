"""The kernel and the plain-Python decoder agree on whole, cut and damaged messages.

Values where a message decodes; status, position and path where it does not.
"""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.codec import message_codec
from kdissect.codec.message_columns import MessageColumns, decode_columns
from kdissect.errors import DecodeError
from kdissect.protocol import catalog
from kdissect.protocol.model import SIDES
from kdissect.status import REASONS, Status
from tests.codec.message_vectors import batch, message_vectors, same, unknown_tags_of

STATUS_OF = {reason: status for status, reason in REASONS.items()}


def as_vector(value: Any) -> Any:
    """A decoded value in the vectors' notation, strings as tables show them."""
    if isinstance(value, dict):
        return {
            name if isinstance(name, str) else str(name): as_vector(one)
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [as_vector(one) for one in value]
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, UUID):
        return {"$uuid": str(value)}
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return value


Expected = dict[str, Any] | tuple[Status, int, str]


def expected_of(key: int, side: str, api_version: int, frame: bytes) -> Expected:
    """Header, body and surplus of a frame, or (status, pos, path) of its fault."""
    api = catalog.api(key)
    if side == "request":
        header, header_version = catalog.REQUEST_HEADER, api.request_header_version(api_version)
    else:
        header, header_version = catalog.RESPONSE_HEADER, api.response_header_version(api_version)
    try:
        head, pos = message_codec.decode(header, header_version, frame)
    except DecodeError as error:
        path = f"header.{error.path}".removesuffix(".")
        return STATUS_OF[error.reason], error.pos, path
    try:
        body, pos = message_codec.decode(api.side(side), api_version, frame, pos)
    except DecodeError as error:
        return STATUS_OF[error.reason], error.pos, error.path
    return {"header": as_vector(head), "body": as_vector(body), "surplus": len(frame) - pos}


def java_int(tag: int) -> int:
    """A tag as the int32 of its column."""
    return tag - (1 << 32) if tag >= 1 << 31 else tag


def check(
    key: int, side: str, cases: list[tuple[int, bytes]], columns: MessageColumns
) -> dict[Status, int]:
    """Compare every message of a batch; returns how often each status came."""
    met: dict[Status, int] = {}
    fields = catalog.api(key).side(side).fields
    bodies, tags = columns.body.to_pylist(), columns.unknown_tags.to_pylist()
    for at, (api_version, frame) in enumerate(cases):
        where = f"{catalog.api(key).name} v{api_version} {side} {frame.hex()}"
        expected = expected_of(key, side, api_version, frame)
        status = Status(int(columns.status[at]))
        met[status] = met.get(status, 0) + 1
        if isinstance(expected, tuple):
            got = status, int(columns.error_pos[at]), columns.error_path(at)
            assert got == expected, where
            assert bodies[at] is None
            assert tags[at] is None
            continue
        assert status == Status.OK, (where, status, columns.error_path(at))
        same(expected["body"], bodies[at], fields, where)
        assert columns.surplus[at] == expected["surplus"], where
        found = [(tag["path"], tag["tag"], tag["data"]) for tag in tags[at] or ()]
        known = [(path, java_int(tag), data) for path, tag, data in unknown_tags_of(expected)]
        assert sorted(found) == sorted(known), where
    return met


def compare(key: int, side: str, cases: list[tuple[int, bytes]]) -> dict[Status, int]:
    buf, start, end = batch([frame for _, frame in cases])
    versions = np.array([api_version for api_version, _ in cases], np.int16)
    return check(key, side, cases, decode_columns(key, side, buf, start, end, versions))


def damaged(frame: bytes, chance: random.Random) -> bytes:
    """One byte changed, with a liking for those that lengths are made of."""
    at = chance.randrange(len(frame))
    byte = chance.choice((0, 1, 2, 3, 0x7F, 0x80, 0xFE, 0xFF, chance.randrange(256)))
    return frame[:at] + bytes((byte,)) + frame[at + 1 :]


def report(met: dict[Status, int], more: dict[Status, int]) -> None:
    for status, count in more.items():
        met[status] = met.get(status, 0) + count


def test_cut_and_damaged_vectors() -> None:
    """Of every third short vector a cut, two damaged copies, and one with a tail."""
    chance = random.Random(8)  # meets every status below
    met: dict[Status, int] = {}
    for (key, side), vectors in message_vectors().items():
        cases = []
        for vector in vectors[::3]:
            frame, api_version = vector["frame"], vector["api_version"]
            if len(frame) > 2000:
                continue
            cases.append((api_version, frame[: chance.randrange(len(frame))]))
            cases += [(api_version, damaged(frame, chance)) for _ in range(2)]
            cases.append((api_version, frame + b"\0\1"))
        report(met, compare(key, side, cases))
    print(f"compared {sum(met.values())} messages: {met}")
    assert set(met) == {
        Status.OK,
        Status.TRUNCATED,
        Status.VARINT_OVERFLOW,
        Status.NEGATIVE_LENGTH,
        Status.COUNT_IMPOSSIBLE,
        Status.DUPLICATE_TAG,
        Status.TAG_SIZE_MISMATCH,
    }


@pytest.mark.parametrize(
    ("key", "side"), [(0, "request"), (1, "response"), (3, "response"), (18, "response"),
                      (68, "response"), (75, "response"), (88, "request")]
)  # fmt: skip
def test_cut_at_every_length(key: int, side: str) -> None:
    """No shorter frame decodes, and both decoders give the same fault."""
    vectors = [one for one in message_vectors()[key, side] if 20 < len(one["frame"]) < 400][-3:]
    for vector in vectors:
        frame = vector["frame"]
        cases = [(vector["api_version"], frame[:size]) for size in range(len(frame))]
        met = compare(key, side, cases)
        assert Status.OK not in met


@pytest.mark.heavy
def test_every_cut_and_much_damage() -> None:
    """All vectors below 600 bytes at every length, and with 60 damages each."""
    chance = random.Random(2)
    met: dict[Status, int] = {}
    for (key, side), vectors in message_vectors().items():
        for vector in vectors:
            frame, api_version = vector["frame"], vector["api_version"]
            if len(frame) > 600:
                continue
            cases = [(api_version, frame[:size]) for size in range(len(frame))]
            cases += [(api_version, damaged(frame, chance)) for _ in range(60)]
            report(met, compare(key, side, cases))
    print(f"compared {sum(met.values())} messages: {met}")


PAIRS = [
    (key, side, api_version)
    for key in catalog.apis()
    for side in SIDES
    for api_version in range(catalog.api(key).side(side).versions.last + 1)
    if api_version in catalog.api(key).side(side).versions
]


@given(
    st.sampled_from(PAIRS),
    st.lists(
        st.one_of(
            st.sampled_from([b"\0", b"\1", b"\2", b"\xff", b"\0\0\0\1", b"\0\1", b"\0\0\0\0"]),
            st.binary(max_size=12),
        ),
        max_size=30,
    ),
)
def test_any_bytes(pair: tuple[int, str, int], parts: list[bytes]) -> None:
    """Random bytes have the same values or fault in both decoders."""
    key, side, api_version = pair
    compare(key, side, [(api_version, b"".join(parts))])


def tagged_field(tag: int, data: bytes) -> bytes:
    out = bytearray()
    message_codec.write_uvarint(out, tag)
    message_codec.write_uvarint(out, len(data))
    return bytes(out) + data


# ApiVersions response v3: correlation id, error code, no api keys, throttle time; then its tags.
API_VERSIONS = b"\0\0\0\1" + b"\0\0" + b"\1" + b"\0\0\0\0"
EPOCH = 1  # finalized_features_epoch, int64


@pytest.mark.parametrize(
    ("tags", "status", "pos", "path"),
    [
        (b"\0", Status.OK, 0, ""),
        (b"\1" + tagged_field(EPOCH, b"\0" * 8), Status.OK, 0, ""),
        (b"\1" + tagged_field(EPOCH, b"\0" * 7), Status.TRUNCATED, 14, "finalized_features_epoch"),
        (b"\1" + tagged_field(EPOCH, b"\0" * 9), Status.TAG_SIZE_MISMATCH, 22,
         "finalized_features_epoch"),
        (b"\2" + tagged_field(EPOCH, b"\0" * 8) * 2, Status.DUPLICATE_TAG, 22, ""),
        (b"\2" + tagged_field(9, b"") + tagged_field(8, b""), Status.DUPLICATE_TAG, 14, ""),
        (b"\2" + tagged_field(9, b""), Status.COUNT_IMPOSSIBLE, 11, ""),
        (b"\1" + b"\x09\x05abcd", Status.TRUNCATED, 13, ""),
        (b"\xff\xff\xff\xff\x1f", Status.VARINT_OVERFLOW, 11, ""),
        (b"\x80\x80\x80\x80\x80\x00", Status.VARINT_OVERFLOW, 11, ""),
        (b"\x80", Status.TRUNCATED, 11, ""),
        (b"\1" + tagged_field(0xFFFFFFFF, b"x"), Status.OK, 0, ""),
    ],
)  # fmt: skip
def test_tag_sections(tags: bytes, status: Status, pos: int, path: str) -> None:
    """Faults of tagged fields have their position and path (KIP-482)."""
    frame = API_VERSIONS + tags
    buf, start, end = batch([frame])
    columns = decode_columns(18, "response", buf, start, end, np.array([3], np.int16))
    assert (columns.status[0], columns.error_pos[0]) == (status, pos)
    assert columns.error_path(0) == path
    check(18, "response", [(3, frame)], columns)


@pytest.mark.parametrize("count", [1, 2**16, 2**31 - 1, -(2**31), -2])
def test_counts_beyond_the_bytes_take_no_memory(count: int) -> None:
    """A count is compared with the bytes left before anything is made room for."""
    frame = (
        b"\0\2\0\0\0\0\0\1\xff\xff" + b"\xff\xff\xff\xff" + count.to_bytes(4, "big", signed=True)
    )
    met = compare(2, "request", [(0, frame)])
    wanted = Status.COUNT_IMPOSSIBLE if count > 0 else Status.NEGATIVE_LENGTH
    assert met == {wanted: 1}


def test_many_failures_leave_their_neighbours_alone() -> None:
    """Broken messages change no row of the good ones between them."""
    chance = random.Random(3)
    for key, side in ((1, "response"), (9, "response"), (75, "response")):
        vectors = [one for one in message_vectors()[key, side] if len(one["frame"]) < 3000]
        frames, versions, good = [], [], []
        for vector in vectors * 5:
            frame = vector["frame"]
            frames += [frame, frame[: chance.randrange(len(frame))], damaged(frame, chance)]
            versions += [vector["api_version"]] * 3
            good += [True, False, False]
        buf, start, end = batch(frames)
        kept = np.array(good)
        api_version = np.array(versions, np.int16)
        mixed = decode_columns(key, side, buf, start, end, api_version)
        alone = decode_columns(key, side, buf, start[kept], end[kept], api_version[kept])
        assert not mixed.status[kept].any()
        assert mixed.body.take(np.flatnonzero(kept)).equals(alone.body)
        assert mixed.unknown_tags.take(np.flatnonzero(kept)).equals(alone.unknown_tags)
        marks = mixed.marks[kept[mixed.marks["row"]]]
        for name in ("role", "value", "length"):
            assert (marks[name] == alone.marks[name]).all()


def test_a_section_full_of_unknown_tags() -> None:
    """Tags cost time and memory by their number, and keep their order."""
    number = 50_000
    section = bytearray()
    message_codec.write_uvarint(section, number)
    for tag in range(20, 20 + number):
        section += tagged_field(tag, b"")
    buf, start, end = batch([API_VERSIONS + bytes(section)])
    columns = decode_columns(18, "response", buf, start, end, np.array([3], np.int16))
    assert not columns.status.any()
    tags = columns.unknown_tags.flatten()
    assert tags.field("tag").to_pylist() == list(range(20, 20 + number))
    assert set(tags.field("path").to_pylist()) == {""}


def test_names_by_the_million() -> None:
    """A million empty names, whole and cut, give their rows without marks."""
    number = 1_000_000
    head = bytearray(b"\0\x2a\0\2\0\0\0\1\xff\xff\0")
    message_codec.write_uvarint(head, number + 1)
    whole = bytes(head) + b"\1" * number + b"\0"
    buf, start, end = batch([whole, whole[:-2]])
    columns = decode_columns(42, "request", buf, start, end, np.array([2, 2], np.int16))
    assert columns.status.tolist() == [Status.OK, Status.COUNT_IMPOSSIBLE]
    assert len(columns.body.field("groups_names").flatten()) == number
    assert len(columns.marks) == 0
