"""Decodes many messages of one API and side into Arrow columns, with mixed versions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from kdissect.arrays import Bools, Bytes, Ints, Positions, Rows, address_of, read_only
from kdissect.codec import column_kernel as kernel
from kdissect.codec.arrow_columns import Reader, arrow_type, field_paths, unknown_tags
from kdissect.codec.column_kernel import INDICES, EncodedMessages, RunOutcome
from kdissect.protocol.column_plan import ColumnPlan
from kdissect.protocol.column_plan import plan as plan_of
from kdissect.status import Status

# Repair of invalid UTF-8 triples a text at most, and Arrow's string offsets are int32.
BYTES_MAX = (2**31 - 1) // 3
# Default limit on the elements of all arrays and the unknown tags of a message, because a byte may
# take hundreds of bytes in columns. A response with 200 000 partitions names some 2 000 000
# replicas.
ELEMENTS_MAX = 5_000_000
BUFFER_MAX = 2**32  # a packed place has 32 bits of position and 31 of length
_FIRST_ROOM = 256  # rows of a level at least


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """The m decoded messages of a call, in the given order.

    body: struct of `body_type`, null if the message could not be decoded.
    status: int8[m], kdissect.status.Status.
    error_pos: int64[m], position of the faulty value from the frame's start; 0 without fault.
    surplus: int64[m], bytes after a complete message; 0 if it failed.
    correlation_id: int32[m], also if the body failed; 0 if the header is incomplete.
    has_header: bool[m], False if the header is incomplete.
    invalid_utf8: bool[m], a string of the body is no UTF-8 (U+FFFD replaces the wrong bytes).
    unknown_tags: list<struct<path, tag, data>>[m], of header and body; null if there are none.
    marks: column_kernel.MARK, by row, then in wire order; none of failed rows. `decode_columns` has
    the guarantees of order.
    """

    body: pa.StructArray
    status: Ints
    error_pos: Positions
    surplus: Positions
    correlation_id: Ints
    has_header: Bools
    invalid_utf8: Bools
    unknown_tags: pa.ListArray
    marks: Rows
    _plan: ColumnPlan = field(repr=False)
    _error_pc: Ints = field(repr=False)
    _error_at: Positions = field(repr=False)  # [m, INDICES]

    def error_path(self, row: int) -> str:
        """The field at which message `row` failed, ``responses[0].partitions[3].records``; ""
        for all."""
        return str(self.error_paths(np.array([row]))[0].as_py())

    def error_paths(self, rows: Ints) -> pa.StringArray:
        """`error_path` of many messages."""
        in_body = ~np.isin(self.status[rows], (Status.OK, Status.UNKNOWN_VERSION))
        pc = np.where(in_body, self._error_pc[rows], -1)
        return field_paths(self._plan, pc, self._error_at[rows])


def body_type(api_key: int, side: str) -> pa.StructType:
    """The Arrow type of `MessageColumns.body`: the union of the fields of all versions."""
    kind: pa.StructType = arrow_type(plan_of(api_key, side).body)
    return kind


def decode_columns(
    plan: ColumnPlan,
    buf: Bytes,
    start: Positions,
    end: Positions,
    api_version: Ints,
    elements_max: int = ELEMENTS_MAX,
) -> MessageColumns:
    """Decode the frames buf[start:end] (header and body, without the size prefix).

    plan: of their API and side. buf: uint8[n], below 4 GiB, may be read-only. start, end: int64[m];
    all frames together below 715 MB. api_version: int16[m]; an unknown one gives
    Status.UNKNOWN_VERSION. elements_max: limit on the elements of all arrays and the unknown tags
    of a message; more gives Status.LIMIT.
    Raises ValueError if these arrays do not fit each other.

    A mark notes where a message has a value that other tables need: a topic, a partition, record
    data, an error code (`column_plan.Role`). Marks of a row are in wire order, those of tagged
    fields too. So a partition's PARTITION mark precedes its RECORDS mark, and a topic's TOPIC_NAME
    or TOPIC_ID mark precedes those of its partitions. The first error code of a message is marked
    in any case, others if they are not 0. Empty names in arrays of names are not marked.
    """
    buf, start, end, api_version = _checked(buf, start, end, api_version)
    count = len(start)
    messages = EncodedMessages(buf, start, end, api_version)
    (*levels, marked), outcome = _run(plan, messages, elements_max)
    reader = Reader(levels, buf)
    good = outcome.status == Status.OK
    # if no message decodes, columns of its fields would be null
    is_any = bool(good.any())
    body = reader.struct(plan.body, 0, good) if is_any else pa.nulls(count, arrow_type(plan.body))
    node = plan.header.children["correlation_id"]
    has_header = reader.rows[0][:, node.at].astype(np.bool_)
    marks = marked.view(kernel.MARK)[:, 0]
    return MessageColumns(
        body=body,
        status=outcome.status,
        error_pos=outcome.error_pos,
        surplus=outcome.surplus,
        correlation_id=reader.values(node, 0, np.int32) * has_header,
        has_header=has_header,
        invalid_utf8=reader.invalid_utf8,
        unknown_tags=unknown_tags(plan, buf, marks, count),
        marks=marks,
        _plan=plan,
        _error_pc=outcome.error_pc,
        _error_at=outcome.error_at.reshape(count, INDICES),
    )


def _checked(
    buf: Bytes, start: Positions, end: Positions, api_version: Ints
) -> tuple[Bytes, Positions, Positions, Ints]:
    """The arrays as the kernel takes them: in other dtypes it would be compiled again."""
    if buf.dtype != np.uint8 or buf.ndim != 1 or not buf.flags.c_contiguous:
        raise ValueError("buf must be a contiguous uint8 array of one dimension")
    if len(buf) >= BUFFER_MAX:
        raise ValueError("buf must be smaller than 4 GiB")
    size = len(buf)
    buf = read_only(buf)
    start = np.require(start, np.int64, ("C", "W"))
    end = np.require(end, np.int64, ("C", "W"))
    api_version = np.require(api_version, np.int16, ("C", "W"))
    if not len(start) == len(end) == len(api_version):
        raise ValueError("start, end and api_version must be of one length")
    if len(start):
        if (start < 0).any() or (end < start).any() or int(end.max()) > size:
            raise ValueError("start, end must lie within buf")
        if int((end - start).sum()) > BYTES_MAX:
            raise ValueError(f"start, end: at most {BYTES_MAX} bytes in one call")
    return buf, start, end, api_version


def _run(
    plan: ColumnPlan, messages: EncodedMessages, elements_max: int
) -> tuple[list[Bytes], RunOutcome]:
    """The rows of each level as bytes, those of the marks last; the result of each message."""
    if (plan.indices > INDICES).any():
        raise ValueError(f"a plan with arrays more than {INDICES} deep in one another")
    count = len(messages.start)
    outcome = kernel.new_outcome(count)
    row_size = np.append(plan.row_size, kernel.MARK.itemsize)
    rows = [np.empty((max(_FIRST_ROOM, count), size), np.uint8) for size in row_size.tolist()]
    rows[0] = np.empty((count, rows[0].shape[1]), np.uint8)
    levels = np.zeros(len(rows), kernel.LEVEL)
    levels["row_size"], levels["template"] = row_size, np.cumsum(row_size) - row_size
    levels["room"] = [len(some) for some in rows]
    levels["address"] = [address_of(some) for some in rows]
    stack = np.zeros(plan.depth + 1, kernel.OPEN)
    state = np.zeros(1, kernel.STATE)[0]
    state["first_version"] = plan.first_version
    state["templates_at"] = address_of(plan.templates)
    state["template_size"] = plan.row_size.sum()
    state["header_size"] = plan.header_size
    state["elements_max"] = elements_max
    program = kernel.Program(plan.program, plan.entries)
    while kernel.run_plan(program, messages, levels, stack, outcome, state) < count:
        full = int(state["full"])
        level, some = levels[full], rows[full]
        rows[full] = np.empty((2 * len(some), some.shape[1]), np.uint8)
        rows[full][: len(some)] = some
        level["room"], level["address"] = len(rows[full]), address_of(rows[full])
    return [some[:used] for some, used in zip(rows, levels["used"].tolist(), strict=True)], outcome
