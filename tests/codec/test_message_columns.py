"""Columns of whole messages: the values of every vector, marks, types, faults, growth."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kdissect.codec.arrow_columns import field_paths
from kdissect.codec.column_kernel import INDICES
from kdissect.codec.message import Message, encode_message
from kdissect.codec.message_columns import MessageColumns, body_type, decode_columns
from kdissect.protocol import catalog
from kdissect.protocol.column_plan import Role, plan
from kdissect.protocol.model import SIDES
from kdissect.status import Status
from tests.codec.vectors import batch, message_vectors, same, tags_of_message
from tests.processes import run
from tests.steps import lines_run


def decoded(key: int, side: str, frames: list[bytes], versions: list[int]) -> MessageColumns:
    buf, start, end = batch(frames)
    return decode_columns(plan(key, side), buf, start, end, np.array(versions, np.int16))


def vector_columns(key: int, side: str) -> tuple[list[dict[str, Any]], MessageColumns]:
    vectors = message_vectors()[key, side]
    frames = [one["frame"] for one in vectors]
    return vectors, decoded(key, side, frames, [one["api_version"] for one in vectors])


def test_every_vector() -> None:
    """All versions of a side in one batch give the vectors' values, tags and header fields."""
    count = 0
    for key, side in message_vectors():
        vectors, columns = vector_columns(key, side)
        assert not columns.status.any()
        assert not columns.surplus.any()
        assert columns.body.type == body_type(key, side)
        columns.body.validate(full=True)
        columns.unknown_tags.validate(full=True)
        fields = catalog.api(key).side(side).fields
        tags = columns.unknown_tags.to_pylist()
        for at, (vector, body) in enumerate(zip(vectors, columns.body.to_pylist(), strict=True)):
            where = f"{vector['api']} v{vector['api_version']} {side}"
            same(vector["body"], body, fields, where)
            got = [(tag["path"], tag["tag"], tag["data"]) for tag in tags[at] or ()]
            assert sorted(got) == sorted(tags_of_message(vector)), where
            header = vector["header"]
            assert columns.has_header[at]
            assert columns.correlation_id[at] == header["correlation_id"]
            count += 1
    print(f"compared {count} messages")
    assert count == 2166


def test_one_version_at_a_time_is_the_same() -> None:
    """The type and the values do not depend on which versions share a batch."""
    for key, side in ((1, "response"), (3, "response"), (9, "request"), (18, "response")):
        vectors, columns = vector_columns(key, side)
        for at, vector in enumerate(vectors):
            alone = decoded(key, side, [vector["frame"]], [vector["api_version"]])
            assert alone.body.type == columns.body.type
            assert alone.body[0] == columns.body[at]


def test_empty_batch() -> None:
    """No message gives empty columns of the right type."""
    columns = decoded(1, "request", [], [])
    assert len(columns.body) == len(columns.unknown_tags) == len(columns.marks) == 0
    assert columns.body.type == body_type(1, "request")


def test_growth_rolls_back_and_resumes() -> None:
    """Large batches and large messages outgrow the first builders; the result is the same."""
    vectors, columns = vector_columns(3, "response")
    frames = [one["frame"] for one in vectors] * 200
    versions = [one["api_version"] for one in vectors] * 200
    many = decoded(3, "response", frames, versions)
    assert not many.status.any()
    one = columns.body
    for at in range(0, len(frames), len(vectors) * 50):
        assert many.body.slice(at, len(vectors)).equals(one)
    assert len(many.marks) == 200 * len(columns.marks)


def array_of_ids(number: int) -> bytes:
    """A DeleteGroups request v0 with that many names."""
    names = b"".join(b"\0\3g%02d" % (at % 100) for at in range(number))
    return b"\0\x2a\0\0\0\0\0\1\xff\xff" + number.to_bytes(4, "big") + names


def test_surplus_unknown_version_and_failures_share_a_batch() -> None:
    """Each message has its own status."""
    good = array_of_ids(3)
    frames = [good + b"xyz", good, good[:-1], good, b""]
    columns = decoded(42, "request", frames, [0, 99, 0, -1, 0])
    expected = [Status.OK, Status.UNKNOWN_VERSION, Status.TRUNCATED, Status.UNKNOWN_VERSION,
                Status.TRUNCATED]  # fmt: skip
    assert columns.status.tolist() == expected
    assert columns.surplus.tolist() == [3, 0, 0, 0, 0]
    assert columns.body.is_valid().to_pylist() == [True, False, False, False, False]
    assert columns.body[0].as_py()["groups_names"] == ["g00", "g01", "g02"]
    assert columns.error_path(2) == "groups_names[2]"
    assert columns.error_pos[2] == len(good) - 5
    assert columns.has_header.tolist() == [True, False, True, False, False]
    assert set(columns.marks["row"].tolist()) == {0}


def test_bytes_that_are_no_utf8() -> None:
    """U+FFFD in the column, and the message is flagged, not the others."""
    good = array_of_ids(2)
    bad = good.replace(b"g01", b"\xe0\x80z")
    columns = decoded(42, "request", [good, bad, good], [0, 0, 0])
    assert columns.invalid_utf8.tolist() == [False, True, False]
    names = columns.body.field("groups_names").to_pylist()
    expected = b"\xe0\x80z".decode("utf-8", "replace")
    assert names == [["g00", "g01"], ["g00", expected], ["g00", "g01"]]


def test_read_only_and_writable_buffers_share_a_signature() -> None:
    """The kernel compiles once for both."""
    from kdissect.codec.column_kernel import run_plan

    buf, start, end = batch([array_of_ids(2)])
    versions = np.zeros(1, np.int16)
    assert not buf.flags.writeable
    decode_columns(plan(42, "request"), buf, start, end, versions)
    decode_columns(plan(42, "request"), buf.copy(), start, end, versions)
    start.flags.writeable = False
    decode_columns(plan(42, "request"), buf, start, end.astype(np.int32), versions)
    assert len(getattr(run_plan, "signatures", [0])) == 1


def test_caller_faults() -> None:
    """Positions and arrays that do not fit raise ValueError."""
    buf, start, end = batch([array_of_ids(2)])
    versions = np.zeros(1, np.int16)
    for wrong in (
        (buf, start, end + 1, versions),
        (buf, start - 1, end, versions),
        (buf, end, start, versions),
        (buf, start, end, np.zeros(2, np.int16)),
        (buf.view(np.int8), start, end, versions),
        (buf[::2], start, end // 2, versions),
        (buf[:0], start, np.ones(1, np.int64), versions),
    ):
        with pytest.raises(ValueError, match=r"buf|start"):
            decode_columns(plan(42, "request"), *wrong)
    with pytest.raises(ValueError, match="no API has key"):
        decode_columns(plan(4242, "request"), buf, start, end, versions)


def marks_of(columns: MessageColumns, role: Role) -> list[tuple[int, int, int]]:
    chosen = columns.marks[columns.marks["role"] == role]
    return list(zip(*(chosen[name].tolist() for name in ("row", "value", "length")), strict=True))


RECORDS = {
    (0, "request"): ("topic_data", "partition_data", "index", "records"),
    (1, "response"): ("responses", "partitions", "partition_index", "records"),
    (59, "response"): ("topics", "partitions", "index", "unaligned_records"),
    (78, "response"): ("responses", "partitions", "partition_index", "records"),
}


@pytest.mark.parametrize(("key", "side"), RECORDS)
def test_record_sets_follow_their_topic_and_partition(key: int, side: str) -> None:
    """A walk over the marks finds each record set with its topic, topic id and partition."""
    topics, partitions, index, records = RECORDS[key, side]
    vectors, columns = vector_columns(key, side)
    raw = b"".join(one["frame"] for one in vectors)
    got: list[list[tuple[Any, ...]]] = [[] for _ in vectors]
    name = partition = None
    for row, role, value, length in columns.marks.tolist():
        if role == Role.TOPIC_NAME:
            name = raw[value : value + length].decode()
        elif role == Role.TOPIC_ID:
            name = raw[value : value + 16]
        elif role == Role.PARTITION:
            partition = value
        elif role == Role.RECORDS:
            data = raw[value : value + length] if length >= 0 else None
            got[row].append((name, partition, data))
    for at, vector in enumerate(vectors):
        expected = []
        for topic in vector["body"][topics]:
            said = topic.get("name", topic.get("topic", topic.get("topic_id")))
            if isinstance(said, dict):
                said = bytes.fromhex(said["$uuid"].replace("-", ""))
            for one in topic[partitions]:
                data = one[records]
                data = None if data is None else bytes.fromhex(data["$bytes"])
                expected.append((said, one[index], data))
        assert got[at] == expected, vector["api_version"]
    assert f" {records}:" not in str(columns.body.type)


def test_error_codes_and_throttle_times() -> None:
    """Every non-zero error code is marked in wire order, and the first whatever it is."""
    for key, side in message_vectors():
        if side == "request":
            continue
        vectors, columns = vector_columns(key, side)
        found: dict[int, list[int]] = {}
        for row, code, _ in marks_of(columns, Role.ERROR_CODE):
            found.setdefault(row, []).append(code)
        throttle = {row: ms for row, ms, _ in marks_of(columns, Role.THROTTLE_TIME_MS)}
        for at, vector in enumerate(vectors):
            codes: list[int] = []

            def walk(value: Any, codes: list[int] = codes) -> None:
                if isinstance(value, list):
                    for one in value:
                        walk(one)
                elif isinstance(value, dict):
                    for name, one in value.items():
                        if name == "error_code" or name.endswith("_error_code"):
                            codes.append(one)
                        walk(one)

            walk(vector["body"])
            got = found.get(at, [])
            assert bool(got) or not codes
            assert sorted(c for c in got if c) == sorted(c for c in codes if c)
            if "throttle_time_ms" in vector["body"]:
                assert throttle[at] == vector["body"]["throttle_time_ms"]


def test_types_are_what_spark_reads() -> None:
    """No unsigned integer, no struct without a field, in any body."""

    def check(kind: pa.DataType, where: str) -> None:
        assert not pa.types.is_unsigned_integer(kind), where
        if pa.types.is_struct(kind):
            assert kind.num_fields, where
        for at in range(kind.num_fields):
            check(kind.field(at).type, f"{where}.{kind.field(at).name}")

    for key in catalog.apis():
        for side in SIDES:
            check(body_type(key, side), f"{key} {side}")


def test_threads_share_plans() -> None:
    """Many threads, each with its builders, get the columns of one thread."""
    alone = {}
    for key, side in list(message_vectors())[::4]:
        alone[key, side] = vector_columns(key, side)[1].body

    def work(_: int) -> bool:
        return all(vector_columns(*pair)[1].body.equals(body) for pair, body in alone.items())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_the_first_decode_of_a_process_compiles_nothing() -> None:
    """With a warm cache the first decode compiles no kernel, and loads no other verb."""
    code = (
        "import sys, numpy as np\n"
        "from numba.core import event\n"
        "with event.install_recorder('numba:compile') as compiled:\n"
        "    from kdissect.codec.message_columns import decode_columns\n"
        "    from kdissect.protocol.column_plan import plan\n"
        "    frame = np.zeros(40, np.uint8)\n"
        "    place = np.zeros(1, np.int64), np.full(1, 40), np.zeros(1, np.int16)\n"
        "    decode_columns(plan(3, 'request'), frame, *place)\n"
        "print(len(compiled.buffer), *{'pyspark', 'pandas', 'duckdb', 'cryptography'} & "
        "set(sys.modules))\n"
    )
    place = np.zeros(1, np.int64), np.full(1, 40), np.zeros(1, np.int16)
    decode_columns(plan(3, "request"), np.zeros(40, np.uint8), *place)
    assert run(sys.executable, "-c", code, check=True).stdout == "0\n"


def test_unknown_tags_count_as_elements() -> None:
    """A tag of two bytes takes hundreds in columns, so a message may have so many only."""
    body = {"_unknown_tags": dict.fromkeys(range(100, 150), b"")}
    buf, start, end = batch([encode_message(Message(3, 12, "request", body=body))])
    for most, status in ((50, Status.OK), (49, Status.LIMIT)):
        columns = decode_columns(
            plan(3, "request"), buf, start, end, np.array([12], np.int16), most
        )
        assert columns.status.tolist() == [status]


def read_distinct_paths(count: int) -> None:
    fields = plan(1, "response")
    place = fields.paths.index("responses[].partitions[].error_code")
    indices = np.arange(count)[:, None] + np.arange(INDICES)
    paths = field_paths(fields, np.full(count, place), indices).to_pylist()
    assert paths[::7] == [
        f"responses[{at}].partitions[{at + 1}].error_code" for at in range(0, count, 7)
    ]


def test_paths_of_fields_take_no_python_per_field() -> None:
    """A message may have five million unknown tags, each with a path of its own."""
    assert lines_run(read_distinct_paths, 10_000) < 100
