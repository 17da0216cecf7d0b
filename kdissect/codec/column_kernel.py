"""The column kernel: runs a plan's programs over a batch of messages, in one call.

*State.* A message is decoded by moving `pc` over the program and `pos` over the bytes below
`limit`, the end of the frame or of a tagged field. Open arrays and tagged sections lie on `stack`,
whose size follows from the definition, never from the bytes. Values are stored in the rows of the
levels, by address. The current row of a level is the last one that was reserved. The rows of the
last level are marks.

Each instruction (`protocol/column_plan.py` lists them) is a function that returns the next `pos`
and a status. If the status is not OK, `pos` is the position of the fault.

*All or nothing.* A message that fails, or finds a level full, leaves no trace: row counts are
reset, and its body in level 0 becomes null. If a level is full, the call ends with the message and
the level in `state`; the caller enlarges the level and calls again.

*Hostile bytes.* Every size is compared with the remaining bytes before it is used: a count of
elements times the smallest element, a length, a tag's size. Rows are reserved one by one. So memory
grows with the bytes that exist.

`message_codec.py` is the plain-Python counterpart, which decodes one message into values.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kdissect import jit
from kdissect.arrays import Bytes, Indices, Ints, Positions, Rows, Struct
from kdissect.protocol import column_plan as plan
from kdissect.protocol.column_plan import Role
from kdissect.status import Status

# State of a call: it continues at message `row`; `full` is the level that is full. `templates_at`
# is the address of all templates, `template_size` the bytes of a version, `header_size` those of
# the message header in a row of level 0. `template_at` and the next fields belong to the current
# message.
_STATE_FIELDS = (
    *("row", "full", "first_version", "templates_at", "template_size", "header_size"),
    *("elements_max", "template_at", "elements", "has_error_code"),
)
STATE = np.dtype([(name, "i8") for name in _STATE_FIELDS])
# A level: the address and the size of its rows, their template in that of a version, rows of room,
# rows used, rows used before the current message, and the address of the current row.
_LEVEL_FIELDS = "address", "row_size", "template", "room", "used", "saved", "row_at"
LEVEL = np.dtype([(name, "i8") for name in _LEVEL_FIELDS])
# An open array: `left` of `count` elements remain. An open tagged section: `left` fields remain;
# `last_tag`, the `limit` outside it, and the pc of its TAGS.
_OPEN_FIELDS = "is_array", "left", "count", "last_tag", "limit", "pc"
OPEN = np.dtype([(name, "i8") for name in _OPEN_FIELDS])
# A mark of message `row`; `Role` has the meaning of value and length.
MARK = np.dtype([("row", "<i4"), ("role", "<i2"), ("value", "<i8"), ("length", "<i8")], align=True)
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


class Program(NamedTuple):
    """The program to run: the instructions and `entries` (pc per version) of a `ColumnPlan`."""

    instructions: Rows
    entries: Indices


class EncodedMessages(NamedTuple):
    """Message i is buf[start[i]:end[i]]; the caller checked the bounds."""

    buf: Bytes
    start: Positions
    end: Positions
    api_version: Ints


class RunOutcome(NamedTuple):
    """Result per message. error_pos: from the frame's start. error_at: INDICES numbers each, the
    element indices of the arrays around the fault. surplus: bytes after the end of the body."""

    status: Ints  # int8
    error_pos: Positions
    error_pc: Ints  # int32
    error_at: Indices
    surplus: Indices


def new_outcome(count: int) -> RunOutcome:
    """The result of messages that are not decoded yet."""
    return RunOutcome(
        np.zeros(count, np.int8),
        np.zeros(count, np.int64),
        np.full(count, -1, np.int32),
        np.zeros(count * INDICES, np.int64),
        np.zeros(count, np.int64),
    )


# ---- lengths and counts ----


@jit.inlined
def read_uvarint(buf: Bytes, pos: int, limit: int) -> tuple[int, int, int]:
    """(value, next pos, status) of an unsigned varint of at most 32 bits."""
    value = 0
    shift = 0
    while pos < limit:
        byte = jit.read_u8(buf, pos)
        pos += 1
        # the fifth byte has the upper four of 32 bits
        if shift == 28 and byte > 15:
            return 0, pos, _OVERFLOW
        value |= (byte & 127) << shift
        if byte < 128:
            return value, pos, _OK
        shift += 7
    return 0, pos, _TRUNCATED


@jit.inlined
def read_length(buf: Bytes, pos: int, limit: int, form: int) -> tuple[int, int, int]:
    """(length or count, next pos, status); -1 means null in every form."""
    # KIP-482: a compact length is stored plus one as a varint, 0 means null
    if form == plan.FORM_COMPACT:
        if pos < limit:
            byte = jit.read_u8(buf, pos)
            if byte < 128:
                return byte - 1, pos + 1, _OK
        value, pos, code = read_uvarint(buf, pos, limit)
        return value - 1, pos, code
    if form == plan.FORM_INT16:
        if limit - pos < 2:
            return 0, pos, _TRUNCATED
        return jit.read_i16(buf, pos), pos + 2, _OK
    if limit - pos < 4:
        return 0, pos, _TRUNCATED
    return jit.read_i32(buf, pos), pos + 4, _OK


@jit.part
def _read_size(
    buf: Bytes, pos: int, limit: int, form: int, unit: int, excess: int
) -> tuple[int, int, int]:
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


@jit.part
def _reserve(levels: Rows, number: int, state: Struct) -> int:
    """Reserve the next row of a level; returns a status."""
    level = levels[number]
    if level["used"] == level["room"]:
        state["full"] = number
        return _ROOM
    level["row_at"] = level["address"] + level["row_size"] * level["used"]
    level["used"] += 1
    return _OK


@jit.part
def _take_row(levels: Rows, number: int, state: Struct) -> int:
    """Reserve the next row of a level, as its template is; returns a status."""
    code = _reserve(levels, number, state)
    if code == _OK:
        level = levels[number]
        jit.copy_bytes(level["row_at"], state["template_at"] + level["template"], level["row_size"])
    return code


@jit.part
def _mark(levels: Rows, state: Struct, role: int, value: int, length: int) -> int:
    """Append a mark of the current message; returns a status."""
    number = jit.int64(len(levels) - 1)
    code = _reserve(levels, number, state)
    if code == _OK:
        at = levels[number]["row_at"]
        jit.store_32(at, state["row"])
        jit.store_16(at + 4, role)
        jit.store_64(at + 8, value)
        jit.store_64(at + 16, length)
    return code


# ---- values, arrays, structs ----


@jit.part
def _store_value(
    step: Struct, buf: Bytes, pos: int, limit: int, levels: Rows, state: Struct
) -> tuple[int, int]:
    """VALUE: store a value of fixed width; returns (next pos, status)."""
    size = step["size"]
    if size > limit - pos:
        return pos, _TRUNCATED
    at = levels[step["level"]]["row_at"] + step["at"]
    jit.store_8(at, 1)
    at += 1
    if size == 4:
        value = jit.int64(jit.read_i32(buf, pos))
        jit.store_32(at, value)
    elif size == 8:
        value = jit.int64(jit.read_i64(buf, pos))
        jit.store_64(at, value)
    elif size == 2:
        value = jit.int64(jit.read_i16(buf, pos))
        jit.store_16(at, value)
    elif size == 1:
        value = jit.int64(jit.read_i8(buf, pos))
        jit.store_8(at, value)
    else:  # a uuid: only its position, the bytes are not copied
        value = jit.int64(pos)
        jit.store_64(at, value)
    code = _OK
    role = step["role"]
    # The first error code of a message is marked in any case, later ones only if they are not 0.
    if role != 0 and (role != _ERROR_CODE or value != 0 or not state["has_error_code"]):
        code = _mark(levels, state, role, value, jit.int64(0))
    if role == _ERROR_CODE:
        state["has_error_code"] = 1
    return pos + size, code


@jit.part
def _store_bytes(
    step: Struct, buf: Bytes, pos: int, limit: int, levels: Rows, state: Struct
) -> tuple[int, int]:
    """BYTES: store the place of a string or bytes; returns (next pos, status)."""
    length, after, code = _read_size(buf, pos, limit, step["form"], jit.int64(1), _TRUNCATED)
    if code != _OK:
        return pos, code
    if step["at"] >= 0:
        at = levels[step["level"]]["row_at"] + step["at"]
        jit.store_8(at, jit.int64(length >= 0))
        if length >= 0:
            # a packed place: 33 bits of position, 31 bits of length
            jit.store_64(at + 1, (after << 31) | length)
    if step["role"] != 0 and length >= step["size"]:
        code = _mark(levels, state, step["role"], after, length)
    return after + max(length, 0), code


@jit.part
def _open_array(
    step: Struct, buf: Bytes, pos: int, limit: int, levels: Rows, top: Struct, state: Struct
) -> tuple[int, int, int]:
    """ARRAY: open an array; returns (elements, next pos, status).

    `top` becomes the open array and the row of its first element is reserved, unless it is empty.
    """
    number, after, code = _read_size(buf, pos, limit, step["form"], step["size"], _IMPOSSIBLE)
    if code == _OK:
        state["elements"] += max(number, 0)
        if state["elements"] > state["elements_max"]:
            code = _LIMIT
    if code != _OK:
        return jit.int64(0), pos, code
    at = levels[step["level"]]["row_at"] + step["at"]
    jit.store_8(at, jit.int64(number >= 0))
    jit.store_32(at + 1, max(number, 0))
    if number > 0:
        code = _take_row(levels, step["child_level"], state)
        top["is_array"] = 1
        top["left"] = number
        top["count"] = number
    return number, after, code


@jit.part
def _read_presence(
    step: Struct, buf: Bytes, pos: int, limit: int, levels: Rows
) -> tuple[int, int, int]:
    """NULLABLE: returns (presence, next pos, status); a negative presence means null."""
    # a nullable struct in a tagged field has a varint here, 0 for null
    if step["form"] == plan.FORM_COMPACT:
        number, after, code = read_uvarint(buf, pos, limit)
        presence = jit.int64(number - 1)
    elif pos < limit:
        presence, after, code = jit.int64(jit.read_i8(buf, pos)), pos + 1, _OK
    else:
        presence, after, code = jit.int64(0), pos, _TRUNCATED
    if code != _OK:
        return presence, pos, code
    jit.store_8(levels[step["level"]]["row_at"] + step["at"], jit.int64(presence >= 0))
    return presence, after, code


# ---- tagged fields (KIP-482) ----


@jit.part
def _open_tags(buf: Bytes, pos: int, limit: int, pc: int, top: Struct) -> tuple[int, int, int]:
    """TAGS: returns (fields, next pos, status). `top` becomes the open section, unless it is
    empty."""
    number, after, code = read_uvarint(buf, pos, limit)
    if code == _OK and number * 2 > limit - after:  # a tag and a size take at least one byte each
        code = _IMPOSSIBLE
    if code != _OK:
        return jit.int64(0), pos, code
    if number > 0:
        top["is_array"] = 0
        top["left"] = number
        top["last_tag"] = -1
        top["limit"] = limit
        top["pc"] = pc
    return number, after, code


@jit.part
def _mark_unknown_tag(
    stack: Rows, depth: int, levels: Rows, state: Struct, pos: int, length: int
) -> int:
    """Mark the tag that the innermost section read last; returns a status."""
    top = stack[depth - 1]
    state["elements"] += 1
    if state["elements"] > state["elements_max"]:
        return _LIMIT
    code = _mark(levels, state, jit.int64(_UNKNOWN_TAG), top["last_tag"], top["pc"])
    if code == _OK:
        code = _mark(levels, state, jit.int64(_UNKNOWN_DATA), pos, length)
    for outer in range(depth):
        if code == _OK and stack[outer]["is_array"]:
            index = stack[outer]["count"] - stack[outer]["left"]
            code = _mark(levels, state, jit.int64(_UNKNOWN_AT), index, jit.int64(0))
    return code


@jit.part
def _next_tag(
    program: Rows,
    buf: Bytes,
    pos: int,
    limit: int,
    stack: Rows,
    depth: int,
    levels: Rows,
    state: Struct,
) -> tuple[int, int, int, int, int]:
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
        code = _mark_unknown_tag(stack, depth, levels, state, pos, size)
        if code != _OK:
            return pc, pos, limit, depth, code
        pos += size
    return tags["jump"], pos, limit, depth - 1, _OK


# ---- messages ----


@jit.part
def _begin(program: Program, version: int, levels: Rows, state: Struct) -> int:
    """Begin a message in the next row of level 0; returns its pc, -1 for an unknown version."""
    for number in range(len(levels)):
        levels[number]["saved"] = levels[number]["used"]
    state["elements"] = 0
    state["has_error_code"] = 0
    version -= state["first_version"]
    pc = jit.int64(-1)
    if 0 <= version < len(program.entries):
        pc = program.entries[version]
    else:
        version = jit.int64(len(program.entries))
    state["template_at"] = state["templates_at"] + version * state["template_size"]
    _take_row(levels, jit.int64(0), state)
    return pc


@jit.part
def _undo(levels: Rows, state: Struct) -> None:
    """Remove the rows of a message; in level 0 only the header's values stay."""
    for number in range(1, len(levels)):
        levels[number]["used"] = levels[number]["saved"]
    row_at = levels[0]["row_at"]
    for at in range(row_at + state["header_size"], row_at + levels[0]["row_size"]):
        jit.store_8(at, 0)


@jit.part
def _put_failure_place(outcome: RunOutcome, stack: Rows, depth: int, i: int) -> None:
    at = i * INDICES
    for outer in range(depth):
        if stack[outer]["is_array"]:
            outcome.error_at[at] = stack[outer]["count"] - stack[outer]["left"]
            at += 1


@jit.kernel
def run_plan(
    program: Program,
    messages: EncodedMessages,
    levels: Rows,
    stack: Rows,
    outcome: RunOutcome,
    state: Struct,
) -> int:
    """Decode messages from the row of `state` on; returns how many are done.

    Fewer than all are done if a level is full. levels: LEVEL, the first with room for all messages.
    outcome: written per message. stack: OPEN[depth of the plan + 1]. state: STATE.
    """
    instructions = program.instructions
    buf = messages.buf
    for i in range(state["row"], len(messages.start)):
        state["row"] = i
        start = messages.start[i]
        limit = messages.end[i]
        pos = start
        depth = jit.int64(0)  # rows of the stack
        pc = _begin(program, jit.int64(messages.api_version[i]), levels, state)
        code = _OK if pc >= 0 else _VERSION
        at = pc  # of the instruction that runs
        while code == _OK:
            at = pc
            step = instructions[pc]
            op = step["op"]
            in_tags = False
            pc += 1
            if op == plan.VALUE:
                pos, code = _store_value(step, buf, pos, limit, levels, state)
            elif op == plan.BYTES:
                pos, code = _store_bytes(step, buf, pos, limit, levels, state)
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
                    instructions, buf, pos, limit, stack, depth, levels, state
                )
        if code == _OK:
            outcome.status[i] = _OK
            outcome.surplus[i] = limit - pos
        else:
            _undo(levels, state)
            if code == _ROOM:
                levels[0]["used"] = i
                return i
            outcome.status[i] = code
            outcome.error_pos[i] = pos - start
            outcome.error_pc[i] = at
            _put_failure_place(outcome, stack, depth, i)
    return len(messages.start)
