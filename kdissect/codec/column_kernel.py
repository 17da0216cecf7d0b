"""The column kernel: runs a plan's programs over a batch of messages, in one call.

*State.* A message is decoded by moving `pc` over the program and `pos` over the bytes below
`limit`, the end of the frame or of a tagged field. Open arrays and tagged sections lie on `stack`,
whose size follows from the definition, never from the bytes. Values are stored in the rows of the
levels, by address. The current row of a level is the last one that was reserved.

Each instruction (`protocol/column_plan.py` lists them) is a function that returns the next `pos`
and a status. If the status is not OK, `pos` is the position of the fault.

*All or nothing.* A message that fails, or finds a level full, leaves no trace: row counts are
reset, and its body in level 0 becomes null. If a level is full, the call ends with the message, the
level and the rows needed in `state`; the caller enlarges the level and calls again.

*Hostile bytes.* Every size is compared with the remaining bytes before it is used: a count of
elements times the smallest element, a length, a tag's size. Rows are reserved one by one. So memory
grows with the bytes that exist.

`message_codec.py` is the plain-Python counterpart, which decodes one message into values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kdissect.jit import (
    copy_bytes,
    inlined,
    kernel,
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

FULL_MARKS = -1  # value of `full` that is no level
# State of a call: it continues at message `row`; `full` is the level that is full, or FULL_MARKS,
# `needed` the rows it needs. `templates_at` is the address of all templates, `template_size` the
# bytes of a version. `template_at` and the next fields belong to the current message.
STATE = np.dtype([
    ("row", "i8"),
    ("full", "i8"), ("needed", "i8"),
    ("marks", "i8"), ("marks_room", "i8"), ("marks_at", "i8"),
    ("first_version", "i8"), ("templates_at", "i8"), ("template_size", "i8"),
    ("header_size", "i8"),  # bytes of the message header in a row of level 0
    ("elements_max", "i8"),
    ("template_at", "i8"), ("elements", "i8"), ("has_error_code", "i8"),
])  # fmt: skip
# A level: the address and the size of its rows, their template in that of a version, rows of room,
# rows used, rows used before the current message, and the address of the current row.
LEVEL = np.dtype([
    ("address", "i8"), ("row_size", "i8"), ("template", "i8"), ("room", "i8"),
    ("used", "i8"), ("saved", "i8"), ("row_at", "i8"),
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
INDICES = 7  # most arrays around a field

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
_UNKNOWN_TAG, _UNKNOWN_DATA = int(Role.UNKNOWN_TAG), int(Role.UNKNOWN_DATA)
_UNKNOWN_AT = int(Role.UNKNOWN_AT)
wide: Any = np.int64  # all numbers of the kernel have this type, so that each variable has one type


class Program(NamedTuple):
    """The program to run: the instructions and `entries` (pc per version) of a `ColumnPlan`."""

    instructions: npt.NDArray[np.void]
    entries: npt.NDArray[np.int64]


class EncodedMessages(NamedTuple):
    """Message i is buf[start[i]:end[i]]; the caller checked the bounds."""

    buf: npt.NDArray[np.uint8]
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    api_version: npt.NDArray[np.int16]


class RunOutcome(NamedTuple):
    """Result per message. error_pos: from the frame's start. error_at: INDICES numbers each, the
    element indices of the arrays around the fault. surplus: bytes after the end of the body."""

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
def _read_size(buf: Any, pos: int, limit: int, form: int, unit: int, excess: int) -> Any:
    """(length, next pos, status) of a string, bytes or an array; -1 means null, if the form allows
    it.

    unit: fewest bytes of an element. excess: the status if the remaining bytes cannot hold them.
    """
    length, after, code = read_length(buf, pos, limit, form & 3)
    if code == _OK:
        if length < 0:
            if length < -1 or not form & plan.NULLABLE_FLAG:
                code = _NEGATIVE
        elif length * unit > limit - after:
            code = excess
    if code != _OK:
        return length, pos, code
    return length, after, code


# ---- room ----


@part
def _is_full(state: Any, full: int, needed: int) -> int:
    state["full"] = full
    state["needed"] = needed
    return _ROOM


@part
def _take_row(levels: Any, number: int, state: Any) -> int:
    """Reserve the next row of a level, as its template is; returns a status."""
    level = levels[number]
    if level["used"] == level["room"]:
        return _is_full(state, number, level["used"] + 1)
    row_at = level["address"] + level["row_size"] * level["used"]
    copy_bytes(row_at, state["template_at"] + level["template"], level["row_size"])
    level["row_at"] = row_at
    level["used"] += 1
    return _OK


@part
def _check_marks(state: Any, number: int) -> int:
    """Check that there is room for `number` marks; returns a status."""
    needed = state["marks"] + number
    if needed > state["marks_room"]:
        return _is_full(state, wide(FULL_MARKS), needed)
    return _OK


@part
def _put_mark(state: Any, message: int, role: int, value: int, length: int) -> None:
    """Append a mark; there is room for it."""
    at = state["marks_at"] + MARK_SIZE * state["marks"]
    store_32(at, message)
    store_16(at + 4, role)
    store_64(at + 8, value)
    store_64(at + 16, length)
    state["marks"] += 1


@part
def _append_mark(state: Any, message: int, role: int, value: int, length: int) -> int:
    """Append a mark; returns a status."""
    code = _check_marks(state, 1)
    if code == _OK:
        _put_mark(state, message, role, value, length)
    return code


# ---- values, arrays, structs ----


@part
def _store_value(step: Any, buf: Any, pos: int, limit: int, levels: Any, state: Any, i: int) -> Any:
    """VALUE: store a value of fixed width; returns (next pos, status)."""
    size = step["size"]
    if size > limit - pos:
        return pos, _TRUNCATED
    at = levels[step["level"]]["row_at"] + step["at"]
    store_8(at, 1)
    at += 1
    if size == 4:
        value = wide(read_i32(buf, pos))
        store_32(at, value)
    elif size == 8:
        value = wide(read_i64(buf, pos))
        store_64(at, value)
    elif size == 2:
        value = wide(read_i16(buf, pos))
        store_16(at, value)
    elif size == 1:
        value = wide(read_i8(buf, pos))
        store_8(at, value)
    else:  # a uuid: only its position, the bytes are not copied
        value = wide(pos)
        store_64(at, value)
    code = _OK
    role = step["role"]
    # The first error code of a message is marked in any case, later ones only if they are not 0.
    if role != 0 and (role != _ERROR_CODE or value != 0 or not state["has_error_code"]):
        code = _append_mark(state, i, role, value, wide(0))
    if role == _ERROR_CODE:
        state["has_error_code"] = 1
    return pos + size, code


@part
def _store_bytes(step: Any, buf: Any, pos: int, limit: int, levels: Any, state: Any, i: int) -> Any:
    """BYTES: store the place of a string or bytes; returns (next pos, status)."""
    length, after, code = _read_size(buf, pos, limit, step["form"], wide(1), _TRUNCATED)
    if code != _OK:
        return pos, code
    if step["at"] >= 0:
        at = levels[step["level"]]["row_at"] + step["at"]
        store_8(at, wide(length >= 0))
        if length >= 0:
            # a packed place: 33 bits of position, 31 bits of length
            store_64(at + 1, (after << 31) | length)
    if step["role"] != 0 and length >= step["size"]:
        code = _append_mark(state, i, step["role"], after, length)
    return after + max(length, 0), code


@part
def _open_array(
    step: Any, buf: Any, pos: int, limit: int, levels: Any, top: Any, state: Any
) -> Any:
    """ARRAY: open an array; returns (elements, next pos, status).

    `top` becomes the open array and the row of its first element is reserved, unless it is empty.
    """
    number, after, code = _read_size(buf, pos, limit, step["form"], step["size"], _IMPOSSIBLE)
    if code == _OK:
        state["elements"] += max(number, 0)
        if state["elements"] > state["elements_max"]:
            code = _LIMIT
    if code != _OK:
        return wide(0), pos, code
    at = levels[step["level"]]["row_at"] + step["at"]
    store_8(at, wide(number >= 0))
    store_32(at + 1, max(number, 0))
    if number > 0:
        code = _take_row(levels, step["child_level"], state)
        top["is_array"] = 1
        top["left"] = number
        top["count"] = number
    return number, after, code


@part
def _read_presence(step: Any, buf: Any, pos: int, limit: int, levels: Any) -> Any:
    """NULLABLE: returns (presence, next pos, status); a negative presence means null."""
    # a nullable struct in a tagged field has a varint here, 0 for null
    if step["form"] == plan.FORM_COMPACT:
        number, after, code = read_uvarint(buf, pos, limit)
        presence = wide(number - 1)
    elif pos < limit:
        presence, after, code = wide(read_i8(buf, pos)), pos + 1, _OK
    else:
        presence, after, code = wide(0), pos, _TRUNCATED
    if code != _OK:
        return presence, pos, code
    store_8(levels[step["level"]]["row_at"] + step["at"], wide(presence >= 0))
    return presence, after, code


# ---- tagged fields (KIP-482) ----


@part
def _open_tags(buf: Any, pos: int, limit: int, pc: int, top: Any) -> Any:
    """TAGS: returns (fields, next pos, status). `top` becomes the open section, unless it is
    empty."""
    number, after, code = read_uvarint(buf, pos, limit)
    if code == _OK and number * 2 > limit - after:  # a tag and a size take at least one byte each
        code = _IMPOSSIBLE
    if code != _OK:
        return wide(0), pos, code
    if number > 0:
        top["is_array"] = 0
        top["left"] = number
        top["last_tag"] = -1
        top["limit"] = limit
        top["pc"] = pc
    return number, after, code


@part
def _mark_unknown_tag(stack: Any, depth: int, state: Any, i: int, pos: int, length: int) -> int:
    """Mark the tag that the innermost section read last; returns a status."""
    code = _check_marks(state, 2 + INDICES)
    if code == _OK:
        top = stack[depth - 1]
        _put_mark(state, i, wide(_UNKNOWN_TAG), top["last_tag"], top["pc"])
        _put_mark(state, i, wide(_UNKNOWN_DATA), pos, length)
        for outer in range(depth):
            if stack[outer]["is_array"]:
                index = stack[outer]["count"] - stack[outer]["left"]
                _put_mark(state, i, wide(_UNKNOWN_AT), index, wide(0))
    return code


@part
def _next_tag(
    program: Any, buf: Any, pos: int, limit: int, stack: Any, depth: int, state: Any, i: int
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
                return step["jump"], pos, pos + size, depth, code
        code = _mark_unknown_tag(stack, depth, state, i, pos, size)
        if code != _OK:
            return pc, pos, limit, depth, code
        pos += size
    return tags["jump"], pos, limit, depth - 1, _OK


# ---- messages ----


@part
def _begin(program: Any, version: int, levels: Any, state: Any) -> int:
    """Begin a message in the next row of level 0; returns its pc, -1 for an unknown version."""
    for number in range(len(levels)):
        levels[number]["saved"] = levels[number]["used"]
    state["elements"] = 0
    state["has_error_code"] = 0
    version -= state["first_version"]
    pc = wide(-1)
    if 0 <= version < len(program.entries):
        pc = program.entries[version]
    else:
        version = wide(len(program.entries))
    state["template_at"] = state["templates_at"] + version * state["template_size"]
    _take_row(levels, wide(0), state)
    return pc


@part
def _undo(levels: Any, state: Any) -> None:
    """Remove the rows of a message; in level 0 only the header's values stay."""
    for number in range(1, len(levels)):
        levels[number]["used"] = levels[number]["saved"]
    row_at = levels[0]["row_at"]
    for at in range(row_at + state["header_size"], row_at + levels[0]["row_size"]):
        store_8(at, 0)


@part
def _put_failure_place(outcome: Any, stack: Any, depth: int, i: int) -> None:
    at = i * INDICES
    for outer in range(depth):
        if stack[outer]["is_array"]:
            outcome.error_at[at] = stack[outer]["count"] - stack[outer]["left"]
            at += 1


@kernel
def run_plan(
    program: Any, messages: Any, levels: Any, stack: Any, outcome: Any, states: Any
) -> int:
    """Decode messages from states[0]["row"] on; returns how many are done.

    Fewer than all are done if a level is full. program: `Program`. messages: `EncodedMessages`.
    levels: LEVEL, the first with room for all messages. outcome: `RunOutcome`, written per message.
    stack: OPEN[depth of the plan + 1]. states: STATE[1].
    """
    instructions = program.instructions
    buf = messages.buf
    state = states[0]
    i = state["row"]
    while i < len(messages.start):
        start = messages.start[i]
        limit = messages.end[i]
        pos = start
        marks = state["marks"]
        depth = wide(0)  # rows of the stack
        pc = _begin(program, wide(messages.api_version[i]), levels, state)
        code = _OK if pc >= 0 else _VERSION
        at = pc  # of the instruction that runs
        while code == _OK:
            at = pc
            step = instructions[pc]
            op = step["op"]
            in_tags = False
            pc += 1
            if op == plan.VALUE:
                pos, code = _store_value(step, buf, pos, limit, levels, state, i)
            elif op == plan.BYTES:
                pos, code = _store_bytes(step, buf, pos, limit, levels, state, i)
            elif op == plan.TAGS:
                number, pos, code = _open_tags(buf, pos, limit, at, stack[depth])
                if number > 0:
                    depth += 1
                    in_tags = True
                else:
                    pc = step["jump"]
            elif op == plan.NEXT:
                top = stack[depth - 1]
                top["left"] -= 1
                if top["left"] == 0:
                    depth -= 1
                else:
                    code = _take_row(levels, step["child_level"], state)
                    pc = step["jump"]
            elif op == plan.ARRAY:
                top = stack[depth]
                number, pos, code = _open_array(step, buf, pos, limit, levels, top, state)
                if number > 0:
                    depth += 1
                else:
                    pc = step["jump"]
            elif op == plan.TAG_END:
                if pos == limit:
                    limit = stack[depth - 1]["limit"]
                    in_tags = True
                else:
                    code = _MISMATCH
            elif op == plan.NULLABLE:
                presence, pos, code = _read_presence(step, buf, pos, limit, levels)
                if presence < 0:
                    pc = step["jump"]
            else:  # END
                break
            if in_tags:
                at = stack[depth - 1]["pc"]
                pc, pos, limit, depth, code = _next_tag(
                    instructions, buf, pos, limit, stack, depth, state, i
                )
        if code == _OK:
            outcome.status[i] = _OK
            outcome.surplus[i] = limit - pos
        else:
            _undo(levels, state)
            state["marks"] = marks
            if code == _ROOM:
                levels[0]["used"] = i
                break
            outcome.status[i] = code
            outcome.error_pos[i] = pos - start
            outcome.error_pc[i] = at
            _put_failure_place(outcome, stack, depth, i)
        i += 1
    state["row"] = i
    return i
