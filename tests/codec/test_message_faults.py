"""The kernel and the plain-Python decoder agree on whole, cut and damaged messages.

Values where a message decodes; status, position and path where it does not.
"""

import random
from collections import Counter
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.codec import message_codec
from kdissect.codec.embedded_structs import definition_plan
from kdissect.codec.message_columns import MessageColumns, decode_columns
from kdissect.errors import DecodeError
from kdissect.protocol import catalog
from kdissect.protocol.column_plan import plan
from kdissect.protocol.model import SIDES, Definition, Field
from kdissect.status import REASONS, Status
from tests.codec.definitions import SHAPE, of
from tests.codec.vectors import batch, message_vectors, same, tags_of_message, to_json

STATUS_OF = {reason: status for status, reason in REASONS.items()}

Expected = dict[str, Any] | tuple[Status, int, str]
"""Header, body and surplus of a frame, or status, position and path of its fault."""


def plain(definition: Definition, version: int, frame: bytes, pos: int = 0) -> Expected:
    try:
        body, pos = message_codec.decode(definition, version, frame, pos)
    except DecodeError as error:
        return STATUS_OF[error.reason], error.pos, error.path
    return {"header": {}, "body": to_json(body), "surplus": len(frame) - pos}


def plain_message(key: int, side: str, api_version: int, frame: bytes) -> Expected:
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
    found = plain(api.side(side), api_version, frame, pos)
    return found | {"header": to_json(head)} if isinstance(found, dict) else found


def java_int(tag: int) -> int:
    """A tag as the int32 of its column."""
    return tag - (1 << 32) if tag >= 1 << 31 else tag


def check(
    fields: tuple[Field, ...], expected: list[Expected], columns: MessageColumns, where: str
) -> Counter[Status]:
    """Compare every message of a batch; returns how often each status came."""
    met: Counter[Status] = Counter()
    bodies, tags = columns.body.to_pylist(), columns.unknown_tags.to_pylist()
    for at, one in enumerate(expected):
        status = Status(int(columns.status[at]))
        met[status] += 1
        if isinstance(one, tuple):
            assert (status, int(columns.error_pos[at]), columns.error_path(at)) == one, (where, at)
            assert bodies[at] is None
            assert tags[at] is None
            continue
        assert status == Status.OK, (where, at, status, columns.error_path(at))
        same(one["body"], bodies[at], fields, f"{where} {at}")
        assert columns.surplus[at] == one["surplus"], (where, at)
        found = [(tag["path"], tag["tag"], tag["data"]) for tag in tags[at] or ()]
        known = [(path, java_int(tag), data) for path, tag, data in tags_of_message(one)]
        assert sorted(found) == sorted(known), (where, at)
    return met


def compare(key: int, side: str, cases: list[tuple[int, bytes]]) -> Counter[Status]:
    """Decode versions and frames of an API's side both ways."""
    versions = np.array([api_version for api_version, _ in cases], np.int16)
    columns = decode_columns(plan(key, side), *batch([frame for _, frame in cases]), versions)
    expected = [plain_message(key, side, *case) for case in cases]
    fields = catalog.api(key).side(side).fields
    return check(fields, expected, columns, f"{catalog.api(key).name} {side} {cases!r}")


def compare_structs(
    definition: Definition, version: int, frames: list[bytes]
) -> tuple[Counter[Status], list[Expected]]:
    """Decode structs of one version both ways; returns also what the plain decoder found."""
    versions = np.full(len(frames), version, np.int16)
    columns = decode_columns(definition_plan(definition), *batch(frames), versions)
    expected = [plain(definition, version, frame) for frame in frames]
    where = f"{definition.name} v{version} {frames!r}"
    return check(definition.fields, expected, columns, where), expected


def damaged(frame: bytes, chance: random.Random) -> bytes:
    """One byte changed, with a liking for those that lengths are made of."""
    at = chance.randrange(len(frame))
    byte = chance.choice((0, 1, 2, 3, 0x7F, 0x80, 0xFE, 0xFF, chance.randrange(256)))
    return frame[:at] + bytes((byte,)) + frame[at + 1 :]


def test_cut_and_damaged_vectors() -> None:
    """Of every third short vector a cut, two damaged copies, and one with a tail."""
    chance = random.Random(8)  # meets every status below
    met: Counter[Status] = Counter()
    for (key, side), vectors in message_vectors().items():
        cases = []
        for vector in vectors[::3]:
            frame, api_version = vector["frame"], vector["api_version"]
            if len(frame) > 2000:
                continue
            cases.append((api_version, frame[: chance.randrange(len(frame))]))
            cases += [(api_version, damaged(frame, chance)) for _ in range(2)]
            cases.append((api_version, frame + b"\0\1"))
        met += compare(key, side, cases)
    print(f"compared {sum(met.values())} messages: {met}")
    sizes = {Status.OK, Status.TRUNCATED, Status.NEGATIVE_LENGTH, Status.VARINT_OVERFLOW}
    counts = {Status.COUNT_IMPOSSIBLE, Status.DUPLICATE_TAG, Status.TAG_SIZE_MISMATCH}
    assert set(met) == sizes | counts


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
    met: Counter[Status] = Counter()
    for (key, side), vectors in message_vectors().items():
        for vector in vectors:
            frame, api_version = vector["frame"], vector["api_version"]
            if len(frame) > 600:
                continue
            cases = [(api_version, frame[:size]) for size in range(len(frame))]
            cases += [(api_version, damaged(frame, chance)) for _ in range(60)]
            met += compare(key, side, cases)
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


@pytest.mark.parametrize(
    ("version", "data", "path", "pos", "reason"),
    [
        (0, "0000", "id", 0, Status.TRUNCATED),
        (0, "00000001 ffffffff", "names", 4, Status.NEGATIVE_LENGTH),
        (0, "00000001 80000000", "names", 4, Status.NEGATIVE_LENGTH),
        (0, "00000001 00000003 0000", "names", 4, Status.COUNT_IMPOSSIBLE),
        (0, "00000001 7fffffff 0000", "names", 4, Status.COUNT_IMPOSSIBLE),
        (0, "00000001 00000002 000161 0009", "names[1]", 11, Status.TRUNCATED),
        (0, "00000001 00000001 ffff", "names[0]", 8, Status.NEGATIVE_LENGTH),
        (0, "00000001 00000000 fffffffe", "topics", 8, Status.NEGATIVE_LENGTH),
        (0, "00000001 00000000 00000001 0001610000", "topics", 8, Status.COUNT_IMPOSSIBLE),
        (0, "00000001 00000000 00000001 0000 00000001 0000", "topics[0].parts", 14,
         Status.COUNT_IMPOSSIBLE),
        (0, "00000001 00000000 00000001 0009 00000001", "topics[0].name", 12, Status.TRUNCATED),
        (0, "00000001 00000000 ffffffff 01 00000000", "cursor.at", 13, Status.TRUNCATED),
        (0, "00000001 00000000 ffffffff", "cursor", 12, Status.TRUNCATED),
        (1, "00000001 01 00 ff ffffffff7f", "", 7, Status.VARINT_OVERFLOW),
        (1, "00000001 ffffffff0f" + "00" * 50, "names", 4, Status.COUNT_IMPOSSIBLE),
        (1, "00000001 8080808010", "names", 4, Status.VARINT_OVERFLOW),
        (1, "00000001 8080808080", "names", 4, Status.VARINT_OVERFLOW),
        (1, "00000001 ffffffffff", "names", 4, Status.VARINT_OVERFLOW),
        (1, "00000001 80", "names", 4, Status.TRUNCATED),
        (1, "00000001 02 80808080ff", "names[0]", 5, Status.VARINT_OVERFLOW),
        (1, "00000001 01 00 ff", "", 7, Status.TRUNCATED),
        (1, "00000001 01 00 ff 02 00 00", "", 7, Status.COUNT_IMPOSSIBLE),
        (1, "00000001 01 00 ff 02 0600 0600", "", 10, Status.DUPLICATE_TAG),
        (1, "00000001 01 00 ff 02 0700 0600", "", 10, Status.DUPLICATE_TAG),
        (1, "00000001 01 00 ff 01 0903 00", "", 9, Status.TRUNCATED),
        (1, "00000001 01 00 ff 01 0509 0001000200", "", 9, Status.TRUNCATED),
        (1, "00000001 01 00 ff 01 0506 0001 0002 00 00", "late", 15, Status.TAG_SIZE_MISMATCH),
        (1, "00000001 01 00 ff 01 0503 0001 0002 00 00", "late.y", 12, Status.TRUNCATED),
        (1, "00000001 01 00 ff 01 0504 0001 0002 00 00", "late", 14, Status.TRUNCATED),
        (1, "00000001 01 02 01 01 01 03 02 7fff", "topics[0].extra", 11, Status.TRUNCATED),
        (1, "00000001 01 02 01 01 01 03 05 7fffffff", "topics[0]", 10, Status.TRUNCATED),
    ],
)  # fmt: skip
def test_a_fault_is_named_where_it_starts(
    version: int, data: str, path: str, pos: int, reason: Status
) -> None:
    """Both decoders give the path of the field, the position and the reason."""
    _, expected = compare_structs(of(SHAPE), version, [bytes.fromhex(data)])
    assert expected == [(reason, pos, path)]


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
        mixed = decode_columns(plan(key, side), buf, start, end, api_version)
        alone = decode_columns(plan(key, side), buf, start[kept], end[kept], api_version[kept])
        assert not mixed.status[kept].any()
        assert mixed.body.take(np.flatnonzero(kept)).equals(alone.body)
        assert mixed.unknown_tags.take(np.flatnonzero(kept)).equals(alone.unknown_tags)
        marks = mixed.marks[kept[mixed.marks["row"]]]
        for name in ("role", "value", "length"):
            assert (marks[name] == alone.marks[name]).all()


def tagged_field(tag: int, data: bytes) -> bytes:
    out = bytearray()
    message_codec.write_uvarint(out, tag)
    message_codec.write_uvarint(out, len(data))
    return bytes(out) + data


# ApiVersions response v3: correlation id, error code, no api keys, throttle time; then its tags.
API_VERSIONS = b"\0\0\0\1" + b"\0\0" + b"\1" + b"\0\0\0\0"


def test_the_largest_tag_is_a_tag() -> None:
    """Tags are unsigned numbers of 32 bits (KIP-482)."""
    frame = API_VERSIONS + b"\1" + tagged_field(2**32 - 1, b"x")
    assert compare(18, "response", [(3, frame)]) == {Status.OK: 1}


def test_a_section_full_of_unknown_tags() -> None:
    """Tags cost time and memory by their number, and keep their order."""
    number = 50_000
    section = bytearray()
    message_codec.write_uvarint(section, number)
    for tag in range(20, 20 + number):
        section += tagged_field(tag, b"")
    buf, start, end = batch([API_VERSIONS + bytes(section)])
    columns = decode_columns(plan(18, "response"), buf, start, end, np.array([3], np.int16))
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
    columns = decode_columns(plan(42, "request"), buf, start, end, np.array([2, 2], np.int16))
    assert columns.status.tolist() == [Status.OK, Status.COUNT_IMPOSSIBLE]
    assert len(columns.body.field("groups_names").flatten()) == number
    assert len(columns.marks) == 0


# What stands before a nullable struct

NULLABLE = of("""\
  before: int8 0+
  plain: Inner? 0+ = null
    name: string 0+
    id: uuid 0+
  list: [Element] 0+
    inner: Inner2? 0+ = null
      number: int32 0+
  tagged: Inner3? 1+ tag 0 = null
    text: string 1+
    numbers: [int16] 1+
""")
BYTES = [bytes([value]) for value in (0, 1, 2, 5, 0x7F, 0x80, 0x81, 0xFE, 0xFF)]
UVARINTS = [*BYTES, b"\x80\x00", b"\x81\x01", b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\x1f"]


def full(version: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "before": 7,
        "plain": {"name": "ab", "id": UUID(int=5)},
        "list": [{"inner": {"number": 3}}, {"inner": None}],
    }
    if version:
        values["tagged"] = {"text": "t", "numbers": [1, 2]}
    return values


@pytest.mark.parametrize("version", [0, 1])
def test_every_presence_byte_and_every_cut(version: int) -> None:
    """Not only 1 and -1: any byte that is not negative says that the struct follows."""
    whole = message_codec.encode(NULLABLE, version, full(version))
    frames = [whole[:1] + presence + whole[2:] for presence in BYTES]
    frames += [whole[:1] + presence for presence in BYTES]
    frames += [whole[:at] for at in range(len(whole) + 1)]
    frames += [whole[:at] + b + whole[at + 1 :] for at in range(len(whole)) for b in BYTES]
    met, _ = compare_structs(NULLABLE, version, frames)
    assert 20 < met[Status.OK] < len(frames) - 20


def test_a_tagged_presence_is_an_unsigned_varint() -> None:
    """0 is null, all others say that the struct follows; a field that is null takes one byte."""
    inner = b"\x02t\x03\x00\x01\x00\x02\x00"
    frames = []
    for presence in UVARINTS:
        for body in (b"", inner, inner + b"x", inner[:-1]):
            data = presence + body
            frames.append(b"\x07\xff\x01\x01\x00" + bytes([len(data)]) + data)
    met, _ = compare_structs(NULLABLE, 1, frames)
    # null and nothing else, twice; a struct behind 1, 2, 5, 127, 129 and 2^32 - 1
    assert met[Status.OK] == 8
