"""The column kernel: runs a plan's programs over a batch of messages, in one call.

*State.* A message is a walk of `pc` over the program and `pos` over the bytes below `limit` (the
frame's end, or a tagged field's). Open arrays and tagged sections lie on `stack`; its size follows
from the definition, never from the bytes. Values go to the builders' columns, whose addresses the
caller hands over: value `row` of column `c` at `data[c] + row * width`, its validity byte at
`valid[c] + row`. The current row of a level is the last one that was counted.

*All or nothing.* A message that fails, or that finds a builder full, leaves nothing behind: the
counts go back to where they were and the validity bytes beyond them to zero (the invariant that
makes absent fields null without an instruction). Full builders end the call with the row, the
builder and the rows it needs in `state`; the caller grows it and calls again.

*Hostile bytes.* Every size is compared with the bytes left before it is used: a count of elements
times the smallest that an element can be, a length, a tag's size. Rows are taken one by one where
an element holds more than one column, so memory follows the bytes that are really there.

The plain-Python twin is `message_codec.py`, which reads one message into values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdissect.jit import (
    inlined,
    kernel,
    load_u8,
    load_word,
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
from kdissect.protocol.column_plan import (
    ARRAY,
    ARRAY_OF,
    BIND,
    BYTES,
    FORM_COMPACT,
    FORM_INT16,
    FORM_INT32,
    K_8,
    K_16,
    K_32,
    K_64,
    K_BOOL,
    K_BYTES,
    K_FILL_8,
    K_FILL_16,
    K_FILL_32,
    K_FILL_64,
    K_PRESENT,
    K_STRING,
    K_U16,
    K_U32,
    K_UUID,
    NEXT,
    NULLABLE,
    NULLABLE_FLAG,
    RUN,
    TAG_END,
    TAGS,
    Role,
)
from kdissect.status import Status

# Places in `state`.
(S_ROW, S_MARKS, S_MARKS_ROOM, S_MARKS_AT, S_TAGS, S_TAGS_ROOM, S_TAGS_AT, S_FULL, S_NEEDED,
 S_HEADER, S_FIRST, S_ELEMENTS_MAX) = range(12)  # fmt: skip
STATE_SIZE = 12
FULL_MARKS, FULL_TAGS = -1, -2  # in S_FULL, else the level

# An open array: (0, elements left, elements). An open tagged section: (1, tags left, last tag,
# limit outside, pc of its TAGS).
FRAME = 5
MARK = np.dtype([("row", "<i4"), ("role", "<i2"), ("a", "<i8"), ("b", "<i8")], align=True)
MARK_SIZE = MARK.itemsize
# An unknown tag: row, pc of its TAGS, tag, length, start in the frame, element indices of the
# arrays around it.
INDICES = 7
UNKNOWN = np.dtype([("row", "<i4"), ("pc", "<i4"), ("tag", "<i4"), ("length", "<i4"),
                    ("pos", "<i4"), ("index", "<i4", (INDICES,))])  # fmt: skip
UNKNOWN_SIZE = UNKNOWN.itemsize
# Where a message failed: element of an array of plain values (-1: none), element indices around it.
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
_TOPIC_BINDING = int(Role.TOPIC_BINDING)
_WORDS = 8  # plan.WORDS
wide: Any = np.int64  # every number of the kernel is one of these, for a single type each


@inlined
def read_uvarint(buf: Any, pos: int, limit: int) -> Any:
    """(value, next pos, status) of an unsigned varint of at most 32 bits."""
    value = 0
    shift = 0
    while pos < limit:
        byte = read_u8(buf, pos)
        pos += 1
        if shift == 28 and byte > 15:
            return 0, pos, _OVERFLOW
        value |= (byte & 127) << shift
        if byte < 128:
            return value, pos, _OK
        shift += 7
    return 0, pos, _TRUNCATED


@inlined
def read_length(buf: Any, pos: int, limit: int, form: int) -> Any:
    """(length or count, next pos, status); -1 is null, whatever the form."""
    if form == FORM_COMPACT:
        if pos < limit:
            byte = read_u8(buf, pos)
            if byte < 128:
                return byte - 1, pos + 1, _OK
        value, pos, code = read_uvarint(buf, pos, limit)
        return value - 1, pos, code
    if form == FORM_INT16:
        if limit - pos < 2:
            return 0, pos, _TRUNCATED
        return read_i16(buf, pos), pos + 2, _OK
    if limit - pos < 4:
        return 0, pos, _TRUNCATED
    return read_i32(buf, pos), pos + 4, _OK


@inlined
def put_mark(at: int, row: int, role: int, a: int, b: int) -> None:
    store_32(at, row)
    store_16(at + 4, role)
    store_64(at + 8, a)
    store_64(at + 16, b)


@kernel
def run_plan(
    program: Any,
    entries: Any,
    buf: Any,
    start: Any,
    end: Any,
    api_version: Any,
    data: Any,
    valid: Any,
    level_first: Any,
    room: Any,
    count: Any,
    saved: Any,
    stack: Any,
    status: Any,
    error_pos: Any,
    error_pc: Any,
    error_at: Any,
    surplus: Any,
    state: Any,
) -> int:
    """Decode from row state[S_ROW] on; returns how many rows are done (fewer: a builder is full).

    program, entries: of the plan, int32. buf: uint8[n]; start, end: int64[m], within buf (the
    caller checked); api_version: int16[m]. data, valid: int64 addresses per column. level_first,
    room, count, saved: int64 per level (first column, rows there is room for, rows taken, scratch).
    stack: int64[FRAME * (depth + 1)]. status int8[m], error_pos int64[m] (from the frame's start),
    error_pc int32[m], surplus int64[m]: written per row. state: int64[STATE_SIZE].
    """
    levels = room.shape[0]
    rows = start.shape[0]
    i = state[S_ROW]
    marks = state[S_MARKS]
    marks_room = state[S_MARKS_ROOM]
    marks_at = state[S_MARKS_AT]
    tags = state[S_TAGS]
    tags_room = state[S_TAGS_ROOM]
    tags_at = state[S_TAGS_AT]
    first_version = state[S_FIRST]
    elements_max = state[S_ELEMENTS_MAX]
    while i < rows:
        pos = start[i]
        limit = end[i]
        for level in range(levels):
            saved[level] = count[level]
        saved_marks = marks
        saved_tags = tags
        count[0] = i + 1
        code = _OK
        fault = pos
        element = -1
        elements = wide(0)  # of all arrays of the message so far
        sp = 0
        errors_seen = 0
        pc = -1
        version = api_version[i] - first_version
        if version >= 0 and version < entries.shape[0]:
            pc = wide(entries[version])
        if pc < 0:
            code = _VERSION
        while code == _OK:
            q = pc * _WORDS
            op = program[q]
            next_tag = False
            if op == RUN:
                size = wide(program[q + 2])
                if size > limit - pos:
                    code = _TRUNCATED
                    left = limit - pos
                    for j in range(program[q + 1]):
                        e = q + _WORDS * (j + 1)
                        kind = program[e]
                        if kind >= K_PRESENT:
                            continue
                        at = wide(program[e + 3])
                        width = 1
                        if kind in (K_16, K_U16):
                            width = 2
                        elif kind in (K_32, K_U32):
                            width = 4
                        elif kind == K_64:
                            width = 8
                        elif kind == K_UUID:
                            width = 16
                        if at + width > left:
                            fault = pos + at
                            pc = pc + 1 + j
                            break
                    break
                if marks + wide(program[q + 4]) > marks_room:
                    code = _ROOM
                    state[S_FULL] = FULL_MARKS
                    state[S_NEEDED] = marks + wide(program[q + 4])
                    break
                row = count[program[q + 3]] - 1
                entry_count = wide(program[q + 1])
                e = q
                for _ in range(entry_count):
                    e += _WORDS
                    kind = program[e]
                    c = program[e + 1]
                    at = pos + wide(program[e + 3])
                    value = wide(0)
                    if kind in (K_32, K_U32):
                        value = read_i32(buf, at)
                        store_32(data[c] + 4 * row, value)
                    elif kind == K_64:
                        value = read_i64(buf, at)
                        store_64(data[c] + 8 * row, value)
                    elif kind in (K_16, K_U16):
                        value = read_i16(buf, at)
                        store_16(data[c] + 2 * row, value)
                    elif kind == K_8:
                        value = read_i8(buf, at)
                        store_8(data[c] + row, value)
                    elif kind == K_BOOL:
                        store_8(data[c] + row, wide(read_i8(buf, at) != 0))
                    elif kind == K_UUID:
                        value = at
                        store_64(data[c] + 8 * row, at)
                    elif kind != K_PRESENT:
                        low = wide(program[e + 4])
                        if kind == K_FILL_32:
                            store_32(data[c] + 4 * row, low)
                        elif kind == K_FILL_64:
                            high = wide(program[e + 5])
                            store_64(data[c] + 8 * row, (high << 32) | (low & 0xFFFFFFFF))
                        elif kind == K_FILL_16:
                            store_16(data[c] + 2 * row, low)
                        elif kind == K_FILL_8:
                            store_8(data[c] + row, low)
                    store_8(valid[c] + row, 1)
                    role = wide(program[e + 2])
                    if role != 0:
                        if role != _ERROR_CODE or value != 0 or errors_seen == 0:
                            put_mark(marks_at + MARK_SIZE * marks, i, role, value, 0)
                            marks += 1
                        if role == _ERROR_CODE:
                            errors_seen = 1
                pos += size
                pc += 1 + entry_count
            elif op == BYTES:
                form = program[q + 3]
                role = wide(program[q + 4])
                at = pos
                length, pos, code = read_length(buf, pos, limit, form & 3)
                if code == _OK:
                    if length < 0:
                        if length < -1 or not form & NULLABLE_FLAG:
                            code = _NEGATIVE
                    elif length > limit - pos:
                        code = _TRUNCATED
                if code != _OK:
                    fault = at
                    break
                c = program[q + 1]
                if c >= 0:
                    row = count[program[q + 2]] - 1
                    if length >= 0:
                        store_64(data[c] + 8 * row, (pos << 31) | length)
                        store_8(valid[c] + row, 1)
                    else:
                        store_8(valid[c] + row, 0)
                if role != 0:
                    if marks == marks_room:
                        code = _ROOM
                        state[S_FULL] = FULL_MARKS
                        state[S_NEEDED] = marks + 1
                        break
                    put_mark(marks_at + MARK_SIZE * marks, i, role, pos, length)
                    marks += 1
                if length > 0:
                    pos += length
                pc += 1
            elif op == TAGS:
                at = pos
                number, pos, code = read_uvarint(buf, pos, limit)
                if code == _OK and number * 2 > limit - pos:
                    code = _IMPOSSIBLE
                if code != _OK:
                    fault = at
                    break
                if number == 0:
                    pc = wide(program[q + 3])
                else:
                    stack[sp] = 1
                    stack[sp + 1] = number
                    stack[sp + 2] = -1
                    stack[sp + 3] = limit
                    stack[sp + 4] = pc
                    sp += FRAME
                    next_tag = True
            elif op == NEXT:
                left = stack[sp - FRAME + 1] - 1
                stack[sp - FRAME + 1] = left
                if left == 0:
                    sp -= FRAME
                    pc += 1
                else:
                    child = program[q + 1]
                    if count[child] >= room[child]:
                        code = _ROOM
                        state[S_FULL] = child
                        state[S_NEEDED] = count[child] + 1
                        break
                    count[child] += 1
                    pc = wide(program[q + 2])
            elif op == ARRAY:
                form = program[q + 4]
                at = pos
                number, pos, code = read_length(buf, pos, limit, form & 3)
                if code == _OK:
                    if number < 0:
                        if number < -1 or not form & NULLABLE_FLAG:
                            code = _NEGATIVE
                    elif number * wide(program[q + 5]) > limit - pos:
                        code = _IMPOSSIBLE
                    else:
                        elements += number
                        if elements > elements_max:
                            code = _LIMIT
                if code != _OK:
                    fault = at
                    break
                c = program[q + 1]
                row = count[program[q + 2]] - 1
                store_8(valid[c] + row, wide(number >= 0))
                if number <= 0:
                    store_32(data[c] + 4 * row, 0)
                    pc = wide(program[q + 6])
                else:
                    child = program[q + 3]
                    if count[child] >= room[child]:
                        code = _ROOM
                        state[S_FULL] = child
                        state[S_NEEDED] = count[child] + 1
                        break
                    store_32(data[c] + 4 * row, number)
                    count[child] += 1
                    stack[sp] = 0
                    stack[sp + 1] = number
                    stack[sp + 2] = number
                    sp += FRAME
                    pc += 1
            elif op == ARRAY_OF:
                form = program[q + 4]
                kind = program[q + 5]
                role = wide(program[q + 7])
                width = 1
                element_form = wide(form & 3)
                if kind in (K_32, K_U32):
                    width = 4
                elif kind == K_STRING:
                    if element_form != FORM_COMPACT:
                        element_form = wide(FORM_INT16)
                        width = 2
                elif kind == K_BYTES:
                    if element_form != FORM_COMPACT:
                        element_form = wide(FORM_INT32)
                        width = 4
                elif kind == K_UUID:
                    width = 16
                elif kind == K_64:
                    width = 8
                elif kind in (K_16, K_U16):
                    width = 2
                at = pos
                number, pos, code = read_length(buf, pos, limit, form & 3)
                if code == _OK:
                    if number < 0:
                        if number < -1 or not form & NULLABLE_FLAG:
                            code = _NEGATIVE
                    elif number * width > limit - pos:
                        code = _IMPOSSIBLE
                    else:
                        elements += number
                        if elements > elements_max:
                            code = _LIMIT
                if code != _OK:
                    fault = at
                    break
                c = program[q + 1]
                row = count[program[q + 2]] - 1
                store_8(valid[c] + row, wide(number >= 0))
                number = max(number, 0)
                store_32(data[c] + 4 * row, number)
                child = program[q + 3]
                row = count[child]
                if row + number > room[child]:
                    code = _ROOM
                    state[S_FULL] = child
                    state[S_NEEDED] = row + number
                    break
                if role != 0 and marks + number > marks_room:
                    code = _ROOM
                    state[S_FULL] = FULL_MARKS
                    state[S_NEEDED] = marks + number
                    break
                count[child] = row + number
                c = program[q + 6]
                values = data[c]
                flags = valid[c] + row
                if kind in (K_32, K_U32):
                    for j in range(number):
                        value = read_i32(buf, pos + 4 * j)
                        store_32(values + 4 * (row + j), value)
                        store_8(flags + j, 1)
                        if role != 0:
                            put_mark(marks_at + MARK_SIZE * marks, i, role, value, 0)
                            marks += 1
                elif kind in (K_STRING, K_BYTES):
                    for j in range(number):
                        at = pos
                        length, pos, code = read_length(buf, pos, limit, element_form)
                        if code == _OK:
                            if length < 0:
                                code = _NEGATIVE
                            elif length > limit - pos:
                                code = _TRUNCATED
                        if code != _OK:
                            fault = at
                            element = j
                            break
                        store_64(values + 8 * (row + j), (pos << 31) | length)
                        store_8(flags + j, 1)
                        if role != 0 and length > 0:
                            put_mark(marks_at + MARK_SIZE * marks, i, role, pos, length)
                            marks += 1
                        pos += length
                    if code != _OK:
                        break
                    width = 0  # pos is already behind the elements
                elif kind == K_UUID:
                    for j in range(number):
                        at = pos + 16 * j
                        store_64(values + 8 * (row + j), at)
                        store_8(flags + j, 1)
                        if role != 0:
                            put_mark(marks_at + MARK_SIZE * marks, i, role, at, 0)
                            marks += 1
                else:
                    for j in range(number):
                        if width == 8:
                            value = read_i64(buf, pos + 8 * j)
                            store_64(values + 8 * (row + j), value)
                        elif width == 2:
                            value = read_i16(buf, pos + 2 * j)
                            store_16(values + 2 * (row + j), value)
                        else:
                            value = read_i8(buf, pos + j)
                            if kind == K_BOOL:
                                value = wide(value != 0)
                            store_8(values + row + j, value)
                        store_8(flags + j, 1)
                        if role != 0:
                            put_mark(marks_at + MARK_SIZE * marks, i, role, value, 0)
                            marks += 1
                pos += number * width
                pc += 1
            elif op == TAG_END:
                if pos != limit:
                    code = _MISMATCH
                    fault = pos
                    break
                limit = stack[sp - FRAME + 3]
                next_tag = True
            elif op == BIND:
                row = count[program[q + 3]] - 1
                name = program[q + 1]
                if load_u8(valid[name] + row):
                    if marks == marks_room:
                        code = _ROOM
                        state[S_FULL] = FULL_MARKS
                        state[S_NEEDED] = marks + 1
                        break
                    place = load_word(data[name] + 8 * row)
                    topic_id = load_word(data[program[q + 2]] + 8 * row)
                    put_mark(marks_at + MARK_SIZE * marks, i, _TOPIC_BINDING, place, topic_id)
                    marks += 1
                pc += 1
            elif op == NULLABLE:
                if program[q + 4] != 0:
                    at = pos
                    number, pos, code = read_uvarint(buf, pos, limit)
                    if code != _OK:
                        fault = at
                        break
                    presence = number - 1
                elif pos < limit:
                    presence = read_i8(buf, pos)
                    pos += 1
                else:
                    code = _TRUNCATED
                    fault = pos
                    break
                row = count[program[q + 2]] - 1
                if presence >= 0:
                    store_8(valid[program[q + 1]] + row, 1)
                    pc += 1
                else:
                    store_8(valid[program[q + 1]] + row, 0)
                    pc = wide(program[q + 3])
            else:  # END
                break
            while next_tag:
                tags_pc = stack[sp - FRAME + 4]
                t = tags_pc * _WORDS
                if stack[sp - FRAME + 1] == 0:
                    sp -= FRAME
                    pc = wide(program[t + 3])
                    break
                stack[sp - FRAME + 1] -= 1
                at = pos
                tag, pos, code = read_uvarint(buf, pos, limit)
                if code == _OK and tag <= stack[sp - FRAME + 2]:
                    code = _DUPLICATE
                if code != _OK:
                    fault = at
                    pc = tags_pc
                    break
                stack[sp - FRAME + 2] = tag
                at = pos
                size, pos, code = read_uvarint(buf, pos, limit)
                if code == _OK and size > limit - pos:
                    code = _TRUNCATED
                if code != _OK:
                    fault = at
                    pc = tags_pc
                    break
                known = -1
                for j in range(program[t + 1]):
                    if program[t + _WORDS * (j + 1)] == tag:
                        known = wide(program[t + _WORDS * (j + 1) + 1])
                if known >= 0:
                    limit = pos + size
                    pc = known
                    break
                if tags == tags_room:
                    code = _ROOM
                    state[S_FULL] = FULL_TAGS
                    state[S_NEEDED] = tags + 1
                    break
                at = tags_at + UNKNOWN_SIZE * tags
                tags += 1
                store_32(at, i)
                store_32(at + 4, tags_pc)
                store_32(at + 8, tag)
                store_32(at + 12, size)
                store_32(at + 16, pos - start[i])
                at += 20
                frame = 0
                while frame < sp:
                    if stack[frame] == 0:
                        store_32(at, stack[frame + 2] - stack[frame + 1])
                        at += 4
                    frame += FRAME
                pos += size
        if code == _OK:
            status[i] = _OK
            surplus[i] = limit - pos
        else:
            for level in range(levels):
                if level == 0:
                    low = i
                    first = state[S_HEADER]
                else:
                    low = saved[level]
                    first = level_first[level]
                if count[level] > low:
                    for c in range(first, level_first[level + 1]):
                        for at in range(valid[c] + low, valid[c] + count[level]):
                            store_8(at, 0)
                count[level] = saved[level]
            marks = saved_marks
            tags = saved_tags
            if code == _ROOM:
                break
            status[i] = code
            error_pos[i] = fault - start[i]
            error_pc[i] = pc
            at = i * FAILED_AT
            error_at[at] = element
            frame = 0
            while frame < sp:
                if stack[frame] == 0:
                    at += 1
                    error_at[at] = stack[frame + 2] - stack[frame + 1]
                frame += FRAME
        i += 1
    state[S_ROW] = i
    state[S_MARKS] = marks
    state[S_TAGS] = tags
    return i
