"""The column kernel: runs a plan's programs over a batch of messages, in one call.

*State.* A message is decoded by moving `pc` over the program and `pos` over the bytes below
`limit`, the end of the frame or of a tagged field. Open arrays and tagged sections lie on `stack`,
whose size follows from the definition, never from the bytes. Values are stored in the builders'
columns by address: value `row` of column `c` at `data[c] + row * width`, its validity byte at
`valid[c] + row`. The current row of a level is the last one that was reserved.

Each instruction (`protocol/column_plan.py` lists them) is a function that returns the next `pos`
and a status. If the status is not OK, `pos` is the position of the fault.

*All or nothing.* A message that fails, or finds a builder full, leaves no trace. Row counts are
reset, and validity bytes beyond them are set to zero; so absent fields are null without an
instruction. If a builder is full, the call ends with the row, the builder and the rows needed in
`state`; the caller enlarges the builder and calls again.

*Hostile bytes.* Every size is compared with the remaining bytes before it is used: a count of
elements times the smallest element, a length, a tag's size. If an element has more than one column,
rows are reserved one by one. So memory grows with the bytes that exist.

`message_codec.py` is the plain-Python counterpart, which decodes one message into values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kdissect.jit import (
    inlined,
    kernel,
    load_u8,
    load_word,
    part,
    read_i8,
    read_i16,
    read_i32,
    read_i64,
    read_u8,
    store_8,
    store_16,
    store_32,
    store_64,
)
from kdissect.protocol import column_plan as plan
from kdissect.protocol.column_plan import Role
from kdissect.status import Status

FULL_MARKS, FULL_TAGS = -1, -2  # values of `full` that are no level
# State of a call: it continues at message `row`; `full` is the builder that is full, `needed` the
# rows it needs. `elements` (of all arrays) and the next fields belong to the current message.
STATE = np.dtype([
    ("row", "i8"),
    ("full", "i8"), ("needed", "i8"),
    ("marks", "i8"), ("marks_room", "i8"), ("marks_at", "i8"),
    ("tags", "i8"), ("tags_room", "i8"), ("tags_at", "i8"),
    ("header_count", "i8"),  # columns of the message header; they come first in level 0
    ("first_version", "i8"),
    ("elements_max", "i8"), ("elements", "i8"),
    ("has_error_code", "i8"),
    ("element", "i8"),  # element at which an array of primitive values failed, or -1
])  # fmt: skip
# An open array: `left` of `count` elements remain. An open tagged section: `left` fields remain;
# `last_tag`, the `limit` outside it, and the pc of its TAGS.
OPEN = np.dtype([
    ("is_array", "i8"), ("left", "i8"), ("count", "i8"), ("last_tag", "i8"), ("limit", "i8"),
    ("pc", "i8"),
])  # fmt: skip
# A mark of message `row`; `Role` has the meaning of value and length.
MARK = np.dtype([("row", "<i4"), ("role", "<i2"), ("value", "<i8"), ("length", "<i8")], align=True)
MARK_SIZE = MARK.itemsize
# An unknown tag: row, pc of its TAGS, tag, length, position in the frame, and the element indices
# of the enclosing arrays.
INDICES = 7
UNKNOWN_TAG = np.dtype([("row", "<i4"), ("pc", "<i4"), ("tag", "<i4"), ("length", "<i4"),
                    ("pos", "<i4"), ("index", "<i4", (INDICES,))])  # fmt: skip
UNKNOWN_SIZE = UNKNOWN_TAG.itemsize
# Where a message failed: element of an array of primitive values (-1: none), then the element
# indices of the enclosing arrays.
FAILED_AT = 1 + INDICES

_OK = int(Status.OK)
_TRUNCATED = int(Status.TRUNCATED)
_OVERFLOW = int(Status.VARINT_OVERFLOW)
_NEGATIVE = int(Status.NEGATIVE_LENGTH)
_IMPOSSIBLE = int(Status.COUNT_IMPOSSIBLE)
_LIMIT = int(Status.LIMIT)
_DUPLICATE = int(Status.DUPLICATE_TAG)
_MISMATCH = int(Status.TAG_SIZE_MISMATCH)
_VERSION = int(Status.UNKNOWN_VERSION)
_ROOM = int(Status.ROOM_NEEDED)
_ERROR_CODE = int(Role.ERROR_CODE)
_BOUND_NAME, _BOUND_ID = int(Role.BOUND_NAME), int(Role.BOUND_ID)
wide: Any = np.int64  # all numbers of the kernel have this type, so that each variable has one type


class Program(NamedTuple):
    """The program to run: the instructions and `entries` (pc per version, -1 none) of a
    `ColumnPlan`."""

    instructions: npt.NDArray[np.void]
    entries: npt.NDArray[np.int32]


class EncodedMessages(NamedTuple):
    """Message i is buf[start[i]:end[i]]; the caller checked the bounds."""

    buf: npt.NDArray[np.uint8]
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    api_version: npt.NDArray[np.int16]


class Columns(NamedTuple):
    """The places of stored values. data, valid: addresses, per column. The others per level: first
    column, rows of room, rows used, rows used before the current message."""

    data: npt.NDArray[np.int64]
    valid: npt.NDArray[np.int64]
    level_first: npt.NDArray[np.int64]
    room: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]
    saved: npt.NDArray[np.int64]


class RunOutcome(NamedTuple):
    """Result per message. error_pos: from the frame's start. error_at: FAILED_AT numbers each.
    surplus: bytes after the end of the body."""

    status: npt.NDArray[np.int8]
    error_pos: npt.NDArray[np.int64]
    error_pc: npt.NDArray[np.int32]
    error_at: npt.NDArray[np.int64]
    surplus: npt.NDArray[np.int64]


# ---- lengths and counts ----


@inlined
def read_uvarint(buf: Any, pos: int, limit: int) -> Any:
    """(value, next pos, status) of an unsigned varint of at most 32 bits."""
    value = 0
    shift = 0
    while pos < limit:
        byte = read_u8(buf, pos)
        pos += 1
        # the fifth byte has the upper four of 32 bits
        if shift == 28 and byte > 15:
            return 0, pos, _OVERFLOW
        value |= (byte & 127) << shift
        if byte < 128:
            return value, pos, _OK
        shift += 7
    return 0, pos, _TRUNCATED


@inlined
def read_length(buf: Any, pos: int, limit: int, form: int) -> Any:
    """(length or count, next pos, status); -1 means null in every form."""
    # KIP-482: a compact length is stored plus one as a varint, 0 means null
    if form == plan.FORM_COMPACT:
        if pos < limit:
            byte = read_u8(buf, pos)
            if byte < 128:
                return byte - 1, pos + 1, _OK
        value, pos, code = read_uvarint(buf, pos, limit)
        return value - 1, pos, code
    if form == plan.FORM_INT16:
        if limit - pos < 2:
            return 0, pos, _TRUNCATED
        return read_i16(buf, pos), pos + 2, _OK
    if limit - pos < 4:
        return 0, pos, _TRUNCATED
    return read_i32(buf, pos), pos + 4, _OK


@part
def _read_size(buf: Any, pos: int, limit: int, form: int) -> Any:
    """(length, next pos, status) of a string or bytes; -1 means null, if the form allows it."""
    length, after, code = read_length(buf, pos, limit, form & 3)
    if code == _OK:
        if length < 0:
            if length < -1 or not form & plan.NULLABLE_FLAG:
                code = _NEGATIVE
        elif length > limit - after:
            code = _TRUNCATED
    if code != _OK:
        return length, pos, code
    return length, after, code


@part
def _read_count(buf: Any, pos: int, limit: int, form: int, size_min: int, state: Any) -> Any:
    """(elements, next pos, status) of an array; -1 means null, if the form allows it.

    size_min: fewest bytes per element. A count that the remaining bytes cannot hold is a fault.
    """
    number, after, code = read_length(buf, pos, limit, form & 3)
    if code == _OK:
        if number < 0:
            if number < -1 or not form & plan.NULLABLE_FLAG:
                code = _NEGATIVE
        elif number * size_min > limit - after:
            code = _IMPOSSIBLE
        else:
            state["elements"] += number
            if state["elements"] > state["elements_max"]:
                code = _LIMIT
    if code != _OK:
        return number, pos, code
    return number, after, code


# ---- room ----


@part
def _is_full(state: Any, full: int, needed: int) -> int:
    state["full"] = full
    state["needed"] = needed
    return _ROOM


@part
def _take_rows(columns: Any, level: int, number: int, state: Any) -> int:
    """Reserve `number` more rows of a level; returns a status."""
    needed = columns.used[level] + number
    if needed > columns.room[level]:
        return _is_full(state, wide(level), needed)
    columns.used[level] = needed
    return _OK


@part
def _check_marks(state: Any, number: int) -> int:
    """Check that there is room for `number` marks; returns a status."""
    needed = state["marks"] + number
    if needed > state["marks_room"]:
        return _is_full(state, wide(FULL_MARKS), needed)
    return _OK


@part
def _put_mark(at: int, message: int, role: int, value: int, length: int) -> int:
    """Write a mark at an address; returns the address of the next one."""
    store_32(at, message)
    store_16(at + 4, role)
    store_64(at + 8, value)
    store_64(at + 16, length)
    return at + MARK_SIZE


@part
def _append_mark(state: Any, message: int, role: int, value: int, length: int) -> int:
    """Append a mark; returns a status."""
    code = _check_marks(state, 1)
    if code == _OK:
        _put_mark(state["marks_at"] + MARK_SIZE * state["marks"], message, role, value, length)
        state["marks"] += 1
    return code


# ---- values of fixed width ----


@part
def _wire_size(kind: int) -> int:
    """Encoded bytes of a fixed-width value."""
    if kind in (plan.K_INT32, plan.K_UINT32):
        return 4
    if kind == plan.K_INT64:
        return 8
    if kind in (plan.K_INT16, plan.K_UINT16):
        return 2
    if kind == plan.K_UUID:
        return 16
    return 1


@part
def _store_value(buf: Any, at: int, kind: int, address: int, row: int) -> int:
    """Store the value at `at` as value `row` of the column at `address`; returns the value."""
    if kind in (plan.K_INT32, plan.K_UINT32):
        value = wide(read_i32(buf, at))
        store_32(address + 4 * row, value)
    elif kind == plan.K_INT64:
        value = wide(read_i64(buf, at))
        store_64(address + 8 * row, value)
    elif kind in (plan.K_INT16, plan.K_UINT16):
        value = wide(read_i16(buf, at))
        store_16(address + 2 * row, value)
    elif kind == plan.K_UUID:  # only its position: the bytes are not copied
        value = wide(at)
        store_64(address + 8 * row, value)
    else:
        value = wide(read_i8(buf, at))
        if kind == plan.K_BOOL:
            value = wide(value != 0)
        store_8(address + row, value)
    return value


@part
def _store_default(kind: int, default: int, address: int, row: int) -> None:
    """Store the default of a tagged field (KIP-482); the tagged section may overwrite it."""
    if kind == plan.K_FILL_32:
        store_32(address + 4 * row, default)
    elif kind == plan.K_FILL_64:
        store_64(address + 8 * row, default)
    elif kind == plan.K_FILL_16:
        store_16(address + 2 * row, default)
    elif kind == plan.K_FILL_8:
        store_8(address + row, default)


@part
def _store_run(program: Any, pc: int, buf: Any, pos: int, columns: Any, state: Any, i: int) -> None:
    """RUN: store a run of fixed-width values; all its bytes and room for its marks exist."""
    run = program[pc]
    row = columns.used[run["level"]] - 1
    marks_at = state["marks_at"]
    mark_at = marks_at + MARK_SIZE * state["marks"]
    has_error_code = state["has_error_code"]
    for entry in range(pc + 1, pc + 1 + wide(run["count"])):
        step = program[entry]
        kind = step["kind"]
        column = step["column"]
        role = wide(step["role"])
        at = pos + wide(step["offset"])
        value = wide(0)
        if kind < plan.K_PRESENT:
            value = _store_value(buf, at, kind, columns.data[column], row)
        elif kind != plan.K_PRESENT:
            _store_default(kind, step["default"], columns.data[column], row)
        store_8(columns.valid[column] + row, 1)
        if role != 0:
            # The first error code of a message is marked in any case, later ones only if they are
            # not 0.
            if role != _ERROR_CODE or value != 0 or not has_error_code:
                mark_at = _put_mark(mark_at, i, role, value, 0)
            if role == _ERROR_CODE:
                has_error_code = wide(1)
    state["marks"] = (mark_at - marks_at) // MARK_SIZE
    state["has_error_code"] = has_error_code


@part
def _first_cut(program: Any, pc: int, left: int) -> Any:
    """(entry, position) of the first value of a RUN that does not fit the remaining bytes."""
    for j in range(program[pc]["count"]):
        step = program[pc + 1 + j]
        at = wide(step["offset"])
        if step["kind"] < plan.K_PRESENT and at + _wire_size(step["kind"]) > left:
            return wide(j), at
    return wide(-1), wide(0)


# ---- strings, arrays, structs ----


@part
def _store_bytes(
    step: Any, buf: Any, pos: int, limit: int, columns: Any, state: Any, i: int
) -> Any:
    """BYTES: store the place of a string or bytes; returns (next pos, status)."""
    column = step["column"]
    role = wide(step["role"])
    length, after, code = _read_size(buf, pos, limit, wide(step["form"]))
    if code != _OK:
        return pos, code
    if column >= 0:
        row = columns.used[step["level"]] - 1
        if length >= 0:
            # a packed place: 33 bits of position, 31 bits of length
            store_64(columns.data[column] + 8 * row, (after << 31) | length)
        store_8(columns.valid[column] + row, wide(length >= 0))
    if role != 0:
        code = _append_mark(state, i, role, after, length)
    return after + max(length, 0), code


@part
def _open_array(
    step: Any, buf: Any, pos: int, limit: int, columns: Any, top: Any, state: Any
) -> Any:
    """ARRAY: open an array of structs; returns (elements, next pos, status).

    `top` becomes the open array and the row of its first element is reserved, unless it is empty.
    """
    column = step["column"]
    smallest = wide(step["smallest"])
    number, after, code = _read_count(buf, pos, limit, step["form"], smallest, state)
    if code != _OK:
        return number, pos, code
    row = columns.used[step["level"]] - 1
    store_8(columns.valid[column] + row, wide(number >= 0))
    store_32(columns.data[column] + 4 * row, max(number, 0))
    if number > 0:
        code = _take_rows(columns, step["child_level"], 1, state)
        top["is_array"] = 1
        top["left"] = number
        top["count"] = number
    return number, after, code


@part
def _store_array(
    step: Any, buf: Any, pos: int, limit: int, columns: Any, state: Any, i: int
) -> Any:
    """ARRAY_OF: store an array of primitive values; returns (next pos, status)."""
    column = step["column"]
    child = step["child_level"]
    form = step["form"]
    kind = step["kind"]
    role = wide(step["role"])
    size = _wire_size(kind)
    element_form = wide(plan.FORM_COMPACT)
    if form & 3 != plan.FORM_COMPACT:
        if kind == plan.K_STRING:
            element_form = wide(plan.FORM_INT16)
            size = 2
        elif kind == plan.K_BYTES:
            element_form = wide(plan.FORM_INT32)
            size = 4
    number, after, code = _read_count(buf, pos, limit, form, size, state)
    if code != _OK:
        return pos, code
    row = columns.used[step["level"]] - 1
    store_8(columns.valid[column] + row, wide(number >= 0))
    number = max(number, 0)
    store_32(columns.data[column] + 4 * row, number)
    row = columns.used[child]
    # rows are reserved at once, because the count was compared with the remaining bytes
    code = _take_rows(columns, child, number, state)
    if code == _OK and role != 0:
        code = _check_marks(state, number)
    if code != _OK:
        return pos, code
    pos = after
    values = columns.data[step["child_column"]]
    flags = columns.valid[step["child_column"]] + row
    marks_at = state["marks_at"]
    mark_at = marks_at + MARK_SIZE * state["marks"]
    for j in range(number):
        store_8(flags + j, 1)
        if kind != plan.K_STRING and kind != plan.K_BYTES:
            value = _store_value(buf, pos, kind, values, row + j)
            pos += size
            if role != 0:
                mark_at = _put_mark(mark_at, i, role, value, 0)
            continue
        length, pos, code = _read_size(buf, pos, limit, element_form)
        if code != _OK:
            state["element"] = j
            return pos, code
        store_64(values + 8 * (row + j), (pos << 31) | length)
        if role != 0 and length > 0:
            mark_at = _put_mark(mark_at, i, role, pos, length)
        pos += length
    state["marks"] = (mark_at - marks_at) // MARK_SIZE
    return pos, code


@part
def _read_presence(step: Any, buf: Any, pos: int, limit: int, columns: Any) -> Any:
    """NULLABLE: returns (presence, next pos, status); a negative presence means null."""
    if step["is_tagged"]:  # a nullable struct in a tagged field has a varint here, 0 for null
        number, after, code = read_uvarint(buf, pos, limit)
        presence = wide(number - 1)
    elif pos < limit:
        presence, after, code = wide(read_i8(buf, pos)), pos + 1, _OK
    else:
        presence, after, code = wide(0), pos, _TRUNCATED
    if code != _OK:
        return presence, pos, code
    row = columns.used[step["level"]] - 1
    store_8(columns.valid[step["column"]] + row, wide(presence >= 0))
    return presence, after, code


@part
def _bind_topic(step: Any, columns: Any, state: Any, i: int) -> int:
    """BIND: mark a topic's name together with its id; returns a status."""
    row = columns.used[step["level"]] - 1
    if not load_u8(columns.valid[step["column"]] + row):
        return _OK
    code = _check_marks(state, 2)
    if code == _OK:
        name = load_word(columns.data[step["column"]] + 8 * row)
        ident = load_word(columns.data[step["id_column"]] + 8 * row)
        at = state["marks_at"] + MARK_SIZE * state["marks"]
        at = _put_mark(at, i, wide(_BOUND_NAME), name >> 31, name & 0x7FFFFFFF)
        _put_mark(at, i, wide(_BOUND_ID), ident, 16)
        state["marks"] += 2
    return code


# ---- tagged fields (KIP-482) ----


@part
def _open_tags(buf: Any, pos: int, limit: int, pc: int, top: Any) -> Any:
    """TAGS: returns (fields, next pos, status). `top` becomes the open section, unless it is
    empty."""
    number, after, code = read_uvarint(buf, pos, limit)
    if code == _OK and number * 2 > limit - after:  # a tag and a size take at least one byte each
        code = _IMPOSSIBLE
    if code != _OK:
        return number, pos, code
    if number > 0:
        top["is_array"] = 0
        top["left"] = number
        top["last_tag"] = -1
        top["limit"] = limit
        top["pc"] = pc
    return number, after, code


@part
def _put_unknown_tag(
    stack: Any, depth: int, state: Any, i: int, pc: int, tag: int, length: int, frame_pos: int
) -> None:
    at = state["tags_at"] + UNKNOWN_SIZE * state["tags"]
    state["tags"] += 1
    store_32(at, i)
    store_32(at + 4, pc)
    store_32(at + 8, tag)
    store_32(at + 12, length)
    store_32(at + 16, frame_pos)
    at += 20
    for outer in range(depth):
        if stack[outer]["is_array"]:
            store_32(at, stack[outer]["count"] - stack[outer]["left"])
            at += 4


@part
def _next_tag(
    program: Any,
    buf: Any,
    pos: int,
    limit: int,
    start: int,
    stack: Any,
    depth: int,
    state: Any,
    i: int,
) -> Any:
    """Go to the next known field of the innermost section, or close the section.

    Returns (pc, next pos, limit, depth, status).
    """
    top = stack[depth - 1]
    pc = top["pc"]
    tags = program[pc]
    while top["left"] > 0:
        top["left"] -= 1
        tag, after, code = read_uvarint(buf, pos, limit)
        if code == _OK and tag <= top["last_tag"]:  # KIP-482: tags ascend
            code = _DUPLICATE
        if code != _OK:
            return pc, pos, limit, depth, code
        top["last_tag"] = tag
        pos = after
        size, after, code = read_uvarint(buf, pos, limit)
        if code == _OK and size > limit - after:
            code = _TRUNCATED
        if code != _OK:
            return pc, pos, limit, depth, code
        pos = after
        for entry in range(pc + 1, pc + 1 + tags["count"]):
            step = program[entry]
            if step["tag"] == tag:
                return wide(step["jump"]), pos, pos + size, depth, code
        if state["tags"] == state["tags_room"]:
            code = _is_full(state, wide(FULL_TAGS), state["tags"] + 1)
            return pc, pos, limit, depth, code
        _put_unknown_tag(stack, depth, state, i, pc, tag, size, pos - start)
        pos += size
    return wide(tags["jump"]), pos, limit, depth - 1, _OK


# ---- messages ----


@part
def _begin(columns: Any, state: Any, i: int) -> None:
    for level in range(len(columns.used)):
        columns.saved[level] = columns.used[level]
    columns.used[0] = i + 1
    state["elements"] = 0
    state["has_error_code"] = 0
    state["element"] = -1


@part
def _undo(columns: Any, state: Any, i: int) -> None:
    """Remove the rows of a message: their validity bytes become zero again."""
    for level in range(len(columns.used)):
        low = columns.saved[level]
        first = columns.level_first[level]
        if level == 0:  # the header's values stay
            low = i
            first = state["header_count"]
        if columns.used[level] > low:
            for column in range(first, columns.level_first[level + 1]):
                valid = columns.valid[column]
                for at in range(valid + low, valid + columns.used[level]):
                    store_8(at, 0)
        columns.used[level] = columns.saved[level]


@part
def _put_failure_place(outcome: Any, stack: Any, depth: int, state: Any, i: int) -> None:
    at = i * FAILED_AT
    outcome.error_at[at] = state["element"]
    for outer in range(depth):
        if stack[outer]["is_array"]:
            at += 1
            outcome.error_at[at] = stack[outer]["count"] - stack[outer]["left"]


@kernel
def run_plan(
    program: Any, messages: Any, columns: Any, stack: Any, outcome: Any, states: Any
) -> int:
    """Decode messages from states[0]["row"] on; returns how many are done.

    Fewer than all are done if a builder is full. program: `Program`. messages: `EncodedMessages`.
    columns: `Columns`. outcome: `RunOutcome`, written per message. stack: OPEN[depth of the plan +
    1]. states: STATE[1].
    """
    instructions = program.instructions
    buf = messages.buf
    state = states[0]
    i = state["row"]
    while i < len(messages.start):
        start = messages.start[i]
        limit = messages.end[i]
        pos = start
        marks, tags = state["marks"], state["tags"]
        depth = wide(0)  # rows of the stack
        _begin(columns, state, i)
        pc = wide(-1)
        version = messages.api_version[i] - state["first_version"]
        if version >= 0 and version < len(program.entries):
            pc = wide(program.entries[version])
        code = _OK if pc >= 0 else _VERSION
        while code == _OK:
            step = instructions[pc]
            op = step["op"]
            in_tags = False
            if op == plan.RUN:
                size = wide(step["size"])
                if size > limit - pos:
                    code = _TRUNCATED
                    entry, at = _first_cut(instructions, pc, limit - pos)
                    pc += 1 + entry
                    pos += at
                    break
                code = _check_marks(state, wide(step["marks"]))
                if code != _OK:
                    break
                _store_run(instructions, pc, buf, pos, columns, state, i)
                pos += size
                pc += 1 + wide(step["count"])
            elif op == plan.BYTES:
                pos, code = _store_bytes(step, buf, pos, limit, columns, state, i)
                if code != _OK:
                    break
                pc += 1
            elif op == plan.TAGS:
                number, pos, code = _open_tags(buf, pos, limit, pc, stack[depth])
                if code != _OK:
                    break
                if number > 0:
                    depth += 1
                    in_tags = True
                else:
                    pc = wide(step["jump"])
            elif op == plan.NEXT:
                top = stack[depth - 1]
                top["left"] -= 1
                if top["left"] == 0:
                    depth -= 1
                    pc += 1
                else:
                    code = _take_rows(columns, step["child_level"], 1, state)
                    pc = wide(step["jump"])
            elif op == plan.ARRAY:
                top = stack[depth]
                number, pos, code = _open_array(step, buf, pos, limit, columns, top, state)
                if code != _OK:
                    break
                if number > 0:
                    depth += 1
                    pc += 1
                else:
                    pc = wide(step["jump"])
            elif op == plan.ARRAY_OF:
                pos, code = _store_array(step, buf, pos, limit, columns, state, i)
                if code != _OK:
                    break
                pc += 1
            elif op == plan.TAG_END:
                if pos != limit:
                    code = _MISMATCH
                    break
                limit = stack[depth - 1]["limit"]
                in_tags = True
            elif op == plan.BIND:
                code = _bind_topic(step, columns, state, i)
                pc += 1
            elif op == plan.NULLABLE:
                presence, pos, code = _read_presence(step, buf, pos, limit, columns)
                if code != _OK:
                    break
                pc = pc + 1 if presence >= 0 else wide(step["jump"])
            else:  # END
                break
            if in_tags:
                pc, pos, limit, depth, code = _next_tag(
                    instructions, buf, pos, limit, start, stack, depth, state, i
                )
        if code == _OK:
            outcome.status[i] = _OK
            outcome.surplus[i] = limit - pos
        else:
            _undo(columns, state, i)
            state["marks"], state["tags"] = marks, tags
            if code == _ROOM:
                break
            outcome.status[i] = code
            outcome.error_pos[i] = pos - start
            outcome.error_pc[i] = pc
            _put_failure_place(outcome, stack, depth, state, i)
        i += 1
    state["row"] = i
    return i
