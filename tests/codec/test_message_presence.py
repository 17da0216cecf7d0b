"""What stands before a nullable struct: the column kernel reads it as the plain decoder does."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import numpy as np
import pytest

from kdissect.codec import message_codec
from kdissect.codec.internal_records import definition_plan
from kdissect.codec.message_columns import decode_plan
from kdissect.errors import DecodeError
from kdissect.protocol.grammar import parse
from kdissect.protocol.model import Definition
from kdissect.status import REASONS, Status
from tests.codec.message_vectors import uuid_text

LAYOUT = """data Sample: versions 0-1, flexible 1+

fields
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
"""
BYTES = [bytes([value]) for value in (0, 1, 2, 5, 0x7F, 0x80, 0x81, 0xFE, 0xFF)]
UVARINTS = [*BYTES, b"\x80\x00", b"\x81\x01", b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\x1f"]


@pytest.fixture(scope="module")
def sample() -> Definition:
    (parsed,) = parse(LAYOUT, "sample.kdef")
    assert isinstance(parsed, Definition)
    return parsed


def full(version: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "before": 7,
        "plain": {"name": "ab", "id": UUID(int=5)},
        "list": [{"inner": {"number": 3}}, {"inner": None}],
    }
    if version:
        values["tagged"] = {"text": "t", "numbers": [1, 2]}
    return values


def as_columns(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_columns(one) for key, one in value.items() if not key.startswith("_")}
    if isinstance(value, list):
        return [as_columns(one) for one in value]
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return uuid_text(value) if isinstance(value, UUID) else value


def agree(definition: Definition, version: int, frames: list[bytes]) -> tuple[int, int]:
    """Decode all frames by kernel and reference; give how many decoded and how many did not."""
    buf = np.frombuffer(b"".join(frames) or b"\0", np.uint8)
    end = np.cumsum([len(frame) for frame in frames])
    start = end - [len(frame) for frame in frames]
    versions = np.full(len(frames), version, np.int16)
    columns = decode_plan(definition_plan(definition), buf, start, end, versions)
    counts = [0, 0]
    for at, frame in enumerate(frames):
        where = f"v{version} {frame.hex()}"
        error: DecodeError | None = None
        try:
            values, pos = message_codec.decode(definition, version, frame)
        except DecodeError as caught:
            error = caught
        if error is not None:
            counts[1] += 1
            assert REASONS[Status(int(columns.status[at]))] == error.reason, where
            assert int(columns.error_pos[at]) == error.pos, where
            assert columns.error_path(at) == error.path, where
            continue
        counts[0] += 1
        assert columns.status[at] == Status.OK, where
        assert columns.surplus[at] == len(frame) - pos, where
        row = columns.body[at].as_py()
        known = {name: one for name, one in row.items() if name in values}
        assert known == as_columns(values), where
    return counts[0], counts[1]


@pytest.mark.parametrize("version", [0, 1])
def test_every_presence_byte_and_every_cut(sample: Definition, version: int) -> None:
    """Not only 1 and -1: any byte that is not negative says that the struct follows."""
    whole = message_codec.encode(sample, version, full(version))
    frames = [whole[:1] + presence + whole[2:] for presence in BYTES]
    frames += [whole[:1] + presence for presence in BYTES]
    frames += [whole[:at] for at in range(len(whole) + 1)]
    frames += [whole[:at] + b + whole[at + 1 :] for at in range(len(whole)) for b in BYTES]
    decoded, failed = agree(sample, version, frames)
    assert decoded > 20
    assert failed > 20


def test_a_tagged_presence_is_an_unsigned_varint(sample: Definition) -> None:
    """0 is null, all others say that the struct follows; a field that is null takes one byte."""
    inner = b"\x02t\x03\x00\x01\x00\x02\x00"
    frames = []
    for presence in UVARINTS:
        for body in (b"", inner, inner + b"x", inner[:-1]):
            data = presence + body
            frames.append(b"\x07\xff\x01\x01\x00" + bytes([len(data)]) + data)
    decoded, _ = agree(sample, 1, frames)
    # null and nothing else, twice; a struct behind 1, 2, 5, 127, 129 and 2^32 - 1
    assert decoded == 8


def test_a_member_of_the_new_group_protocol_says_null_in_one_byte() -> None:
    """ConsumerGroupMemberMetadataValue.classic_member_metadata, as brokers write it."""
    from kdissect.protocol import catalog

    definition = catalog.definition("ConsumerGroupMemberMetadataValue")
    null = message_codec.encode(definition, 0, {"client_id": "c", "classic_member_metadata": None})
    there = {"session_timeout_ms": 9, "supported_protocols": [{"name": "range", "metadata": b"m"}]}
    some = message_codec.encode(definition, 0, {"classic_member_metadata": there})
    assert null.endswith(b"\x01\x00\x01\x00")
    cuts = [some[:at] for at in range(len(some))]
    decoded, failed = agree(definition, 0, [null, some, *cuts])
    assert (decoded, failed) == (2, len(cuts))
