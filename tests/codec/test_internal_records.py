"""Records of internal topics: Kafka's own, cut and damaged ones, embedded structs."""

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.codec import message_codec
from kdissect.codec.embedded_structs import Places, definition_plan, read_uvarints
from kdissect.codec.internal_records import LOG_OF_TOPIC, decode_internal
from kdissect.protocol import catalog
from kdissect.status import Status
from tests.codec.vectors import LOGS, internal_vectors, value_definition

CUT_MAX = 2000


def columns(vectors: list[dict[str, Any]]) -> tuple[pa.Array, pa.Array]:
    keys, values = ([vector[name] for vector in vectors] for name in ("key", "value"))
    return pa.array(keys, pa.binary()), pa.array(values, pa.binary())


def rows(log: str, vectors: list[dict[str, Any]]) -> tuple[dict[int, tuple[str, Any]], list[Any]]:
    """(decoded records by their place: name and values, faults)."""
    found: dict[int, tuple[str, Any]] = {}
    decoded, faults = decode_internal(log, *columns(vectors))
    for part in decoded:
        tags = part.value_unknown_tags.to_pylist()
        for at, row in enumerate(part.rows.tolist()):
            value = {
                "key_version": None if part.key_version is None else int(part.key_version[at]),
                "value_version": int(part.value_version[at]) if part.has_value[at] else None,
                "value": part.value[at].as_py(),
                "value_unknown_tags": tags[at],
            }
            if part.key is not None:
                value["key"] = part.key[at].as_py()
            assert row not in found
            found[row] = part.name, value
    return found, faults


@pytest.mark.parametrize("kind", [kind for kind in LOGS if kind != "control_record"])
def test_every_cut_is_a_fault(kind: str) -> None:
    """A record cut anywhere is in no table, unless the cut is at a tombstone's key end."""
    log = LOGS[kind][0]
    for vector in internal_vectors()[kind][::7]:
        if vector["value"] is None or len(vector["value"]) > CUT_MAX:
            continue
        cuts = [vector | {"value": vector["value"][:at]} for at in range(len(vector["value"]))]
        found, faults = rows(log, cuts)
        assert not found
        assert sorted(at for fault in faults for at in fault.rows.tolist()) == list(
            range(len(cuts))
        )
        assert all(fault.detail(0) for fault in faults)
        if vector["key"] is None:
            continue
        cuts = [vector | {"key": vector["key"][:at]} for at in range(len(vector["key"]))]
        found, faults = rows(log, cuts)
        assert not found
        assert {at for fault in faults for at in fault.rows.tolist()} == set(range(len(cuts)))


def test_unknown_types_and_versions_have_a_fault() -> None:
    """Unknown types and versions and cut bytes have a fault with the reason."""
    offset = b"\0\x01\0\0\0\0\0\0\0\0"
    cases = {
        (None, b"\0\0"): "the bytes end",
        (b"\0", b"\0\0"): "the bytes end",
        (b"\0\x63", b"\0\0"): "no definition for group record type 99",
        (b"\xff\xff", b"\0\0"): "no definition for group record type -1",
        (offset, b"\0\x63"): "no definition for OffsetCommitValue version 99",
        (offset, b"\x80\0"): "no definition for OffsetCommitValue version -32768",
        (offset, b"\0"): "OffsetCommitValue: the bytes end",
        (offset, b""): "OffsetCommitValue: the bytes end",
    }
    keys = pa.array([key for key, _ in cases], pa.binary())
    values = pa.array([value for _, value in cases], pa.binary())
    decoded, faults = decode_internal("group", keys, values)
    assert all(not len(part.rows) for part in decoded)
    told = {int(row): fault.detail(at) for fault in faults for at, row in enumerate(fault.rows)}
    assert len(told) == len(cases)
    for row, start in enumerate(cases.values()):
        assert start in told[row]


def test_metadata_frames_of_other_versions_have_a_fault() -> None:
    """Unknown frames, types and versions have a fault; empty values, too."""
    values = pa.array([b"\0\x02\0", b"\x02\x02\0", b"\x01\x63\0", b"\x01\x02\x07", None, b""])
    decoded, faults = decode_internal("metadata", pa.nulls(6, pa.binary()), values)
    assert all(not len(part.rows) for part in decoded)
    told = sorted(
        (int(row), fault.detail(at)) for fault in faults for at, row in enumerate(fault.rows)
    )
    assert [text for _, text in told] == [
        "no definition for metadata record frame version 0",
        "no definition for metadata record frame version 2",
        "no definition for metadata record type 99",
        "no definition for TopicRecord version 7",
        "metadata record: the bytes end inside the value",
        "metadata record: the bytes end inside the value",
    ]


def test_surplus_bytes_and_broken_text_have_a_fault() -> None:
    """The row stays, with a fault for the bytes after it or in it."""
    _, definition = catalog.records("metadata")[2]
    body = message_codec.encode(definition, 0, {"name": "orders"})
    wrong = body.replace(b"orders", b"\xff\xfeders")
    values = pa.array([b"\x01\x02\0" + body + b"xyz", b"\x01\x02\0" + wrong])
    decoded, faults = decode_internal("metadata", pa.nulls(2, pa.binary()), values)
    assert [row["name"] for row in decoded[0].value.to_pylist()] == ["orders", "��ders"]
    expected = {(Status.SIZE_MISMATCH, (0,)), (Status.INVALID_UTF8, (1,))}
    assert {(fault.status, tuple(fault.rows.tolist())) for fault in faults} == expected


@given(st.lists(st.binary(max_size=12), max_size=8), st.integers(1, 3))
def test_uvarints_are_those_of_the_reference(values: list[bytes], count: int) -> None:
    """Numbers and faults equal those of the plain decoder."""
    numbers, used, status = read_uvarints(Places.of(pa.array(values, pa.binary())), count)
    for row, data in enumerate(values):
        pos = 0
        expected = []
        try:
            for _ in range(count):
                value, pos = message_codec.read_uvarint(memoryview(data), pos)
                expected.append(value)
        except message_codec.DecodeError:
            assert status[row] != Status.OK
        else:
            assert status[row] == Status.OK
            assert [int(number[row]) for number in numbers] == expected
            assert used[row] == pos


@given(
    st.sampled_from(sorted(LOG_OF_TOPIC.values())),
    st.lists(
        st.tuples(st.none() | st.binary(max_size=40), st.none() | st.binary(max_size=60)),
        max_size=6,
    ),
)
def test_any_bytes_give_rows_or_faults(
    log: str, pairs: list[tuple[bytes | None, bytes | None]]
) -> None:
    """Each record has one row, or a fault with a text."""
    keys = pa.array(
        [key and b"\0" + bytes([key[0] % 24]) + key[1:] for key, _ in pairs], pa.binary()
    )
    values = pa.array([value for _, value in pairs], pa.binary())
    decoded, faults = decode_internal(log, keys, values)
    seen = [int(row) for part in decoded for row in part.rows]
    assert len(seen) == len(set(seen))
    told = {int(row) for fault in faults for row in fault.rows}
    assert set(seen) | told == set(range(len(pairs)))
    for fault in faults:
        assert all(fault.detail(at) for at in range(len(fault.rows)))


def _outcome(vector: dict[str, Any], value: bytes) -> tuple[bool, int] | None:
    """(decodes, bytes after it) of a coordinator's value, by the reference."""
    definition = value_definition(vector)
    version = int.from_bytes(value[:2], "big", signed=True)
    if len(value) < 2 or version not in definition.versions:
        return None
    try:
        _, pos = message_codec.decode(definition, version, value[2:])
    except message_codec.DecodeError:
        return None
    return True, len(value) - 2 - pos


@pytest.mark.parametrize("kind", ["group_coordinator", "share_coordinator", "transaction"])
def test_changed_bytes_are_judged_as_by_the_reference(kind: str) -> None:
    """Changed records decode, or fail, as with the plain decoder."""
    draw = random.Random(7)
    changed = []
    for vector in internal_vectors()[kind]:
        if not vector["value"]:
            continue
        for _ in range(25):
            value = bytearray(vector["value"])
            at = draw.randrange(min(len(value), 300))
            value[at] = draw.choice([0, 1, 2, 127, 128, 255, value[at] ^ (1 << draw.randrange(8))])
            changed.append(vector | {"value": bytes(value)})
    decoded, faults = decode_internal(LOGS[kind][0], *columns(changed))
    good = {int(row) for part in decoded for row in part.rows}
    surplus = {
        int(row): int(number)
        for fault in faults
        if fault.status is Status.SIZE_MISMATCH
        for row, number in zip(fault.rows, fault.number, strict=True)
    }
    outcomes = [_outcome(vector, vector["value"]) for vector in changed]
    assert {at for at, outcome in enumerate(outcomes) if outcome} == good
    assert {at: outcome[1] for at, outcome in enumerate(outcomes) if outcome and outcome[1]} == (
        surplus
    )
    assert 0 < len(good) < len(changed)


def test_slices_of_columns_are_read_at_their_places() -> None:
    """Offsets of a sliced Arrow array are respected."""
    array = pa.array([b"ab", None, b"", b"cde"], pa.binary()).slice(1)
    places = Places.of(array)
    assert places.length.tolist() == [-1, 0, 3]
    assert places.buf[places.start[2] : places.start[2] + 3].tobytes() == b"cde"
    assert Places.of(pa.array([], pa.binary())).start.dtype == np.int64


def test_all_definitions_have_plans() -> None:
    """Each record definition compiles to a column plan."""
    for definition in catalog.record_definitions().values():
        assert definition_plan(definition).body.children is not None
