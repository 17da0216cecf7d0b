"""Decodes bodies of responses as evidence for their API, or against it.

A response contains neither its API nor its version. A definition *fits* if it decodes the frame to
its last byte, with error codes that Kafka has and a plausible throttle time.

A search after a gap finds a response by its size and its correlation id (`frame_search.py`). Other
bytes may resemble these. If all bytes of the response are there, they have to decode as an answer
to its request; else the search goes on (`are_other_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kdissect.arrays import (
    Bools,
    Bytes,
    Ints,
    Positions,
    Rows,
    Struct,
    address_of,
    joined,
    read_only,
)
from kdissect.codec import column_kernel
from kdissect.codec.column_kernel import LEVEL, MARK, OPEN, STATE, EncodedMessages
from kdissect.jit import int64, kernel
from kdissect.kafka.walk import Stream
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import INSTRUCTION, ColumnPlan, Role, plan
from kdissect.protocol.error_codes import ErrorCode
from kdissect.status import Status
from kdissect.tcp.byte_ranges import copy_range

THROTTLE_MAX_MS = 3_600_000
_SIZE_MAX = 1 << 20  # bytes; larger responses are not decoded after a gap
_MARKS_MAX = 1 << 14  # of a response; so many that agree are evidence enough
_NO_LIMIT = 1 << 62  # rows or elements: more than any response has

_OK = int(Status.OK)
_ERROR_CODE, _THROTTLE_TIME = int(Role.ERROR_CODE), int(Role.THROTTLE_TIME_MS)
_API_VERSIONS = int(ApiKey.API_VERSIONS)
_LOWEST_ERROR = min(ErrorCode)

Pair = tuple[int, int]  # api key, api version
PAIR = np.dtype([("api_key", "i8"), ("api_version", "i8")])
# Versions of an API, and the place of the first one among the entries of all programs.
API = np.dtype([("first_version", "i8"), ("last_version", "i8"), ("entry", "i8")])


class BodyDecoder(NamedTuple):
    """The programs of responses, and the memory of a kernel that decodes one at a time.

    apis: API per api key. known_errors: uint8, 1 for each error code from _LOWEST_ERROR on that
    Kafka has. frame: uint8[_SIZE_MAX], and its address. row: all rows of the levels lie in it, one
    over the other, because nobody reads their values. marks: MARK[_MARKS_MAX].
    """

    apis: Rows
    program: column_kernel.Program
    known_errors: Bytes
    frame: Bytes
    frame_at: int
    start: Positions
    end: Positions
    api_version: Ints
    row: Bytes
    marks: Rows
    levels: Rows
    stack: Rows
    outcome: column_kernel.RunOutcome
    state: Struct


def every_response() -> frozenset[Pair]:
    """(api key, version) of every defined response."""
    return frozenset(
        (key, version)
        for key, api in catalog.apis().items()
        for version in range(api.response.versions.first, api.response.versions.last + 1)
    )


def _programs(plans: dict[int, ColumnPlan]) -> tuple[Rows, column_kernel.Program]:
    """API per api key, and the programs of these plans as one."""
    apis = np.zeros(max(catalog.apis()) + 1, API)
    apis["last_version"] = -1
    programs, entries = [np.zeros(0, INSTRUCTION)], [np.zeros(0, np.int64)]
    length = entry = 0
    for key, one in plans.items():
        program = one.program.copy()
        program["jump"] += length
        programs.append(program)
        entries.append(one.entries + length)
        apis[key] = one.first_version, one.first_version + len(one.entries) - 1, entry
        length += len(program)
        entry += len(one.entries)
    return apis, column_kernel.Program(joined(programs), np.concatenate(entries))


def new_decoder(api_keys: Iterable[int]) -> BodyDecoder:
    """A decoder of the defined responses of some APIs, for one thread."""
    defined = sorted({key for key, _ in every_response()}.intersection(api_keys))
    by_key = {key: plan(key, "response") for key in defined}
    apis, program = _programs(by_key)
    plans = by_key.values()
    known_errors = np.zeros(max(ErrorCode) + 1 - _LOWEST_ERROR, np.uint8)
    known_errors[np.array(sorted(ErrorCode)) - _LOWEST_ERROR] = 1
    frame = np.empty(_SIZE_MAX, np.uint8)
    row = np.empty(max((one.row_size.max() for one in plans), default=0), np.uint8)
    marks = np.empty(_MARKS_MAX, MARK)
    levels = np.zeros(max((len(one.row_size) for one in plans), default=0) + 1, LEVEL)
    levels["address"], levels["room"] = address_of(row), _NO_LIMIT
    levels["address"][-1], levels["room"][-1] = address_of(marks), _MARKS_MAX
    levels["row_size"][-1] = MARK.itemsize
    state = np.zeros(1, STATE)[0]
    state["elements_max"] = _NO_LIMIT  # each takes a byte, so the size is the limit
    return BodyDecoder(
        apis=apis,
        program=program,
        known_errors=known_errors,
        start=np.zeros(1, np.int64),
        end=np.zeros(1, np.int64),
        api_version=np.zeros(1, np.int16),
        frame=read_only(frame),
        frame_at=address_of(frame),
        row=row,
        marks=marks,
        levels=levels,
        stack=np.zeros(max((one.depth for one in plans), default=0) + 1, OPEN),
        outcome=column_kernel.new_outcome(1),
        state=state,
    )


@kernel
def fits(key: int, version: int, buf: Bytes, start: int, end: int, decoder: BodyDecoder) -> bool:
    """Return whether buf[start:end] can be a response of that defined API and version."""
    api = decoder.apis[key]
    decoder.start[0], decoder.end[0], decoder.api_version[0] = start, end, version
    messages = EncodedMessages(buf, decoder.start, decoder.end, decoder.api_version)
    levels, outcome, state = decoder.levels, decoder.outcome, decoder.state
    for number in range(len(levels)):
        levels[number]["used"] = 0
    state["row"] = 0
    state["first_version"] = api["first_version"] - api["entry"]
    done = column_kernel.run_plan(decoder.program, messages, levels, decoder.stack, outcome, state)
    mark_count = int64(_MARKS_MAX)
    if done:  # else there are more marks
        mark_count = levels[len(levels) - 1]["used"]
        if outcome.status[0] != _OK or outcome.surplus[0] != 0:
            return False
    for number in range(mark_count):
        mark = decoder.marks[number]
        value = mark["value"]
        if mark["role"] == _ERROR_CODE:
            place = value - _LOWEST_ERROR
            if not 0 <= place < len(decoder.known_errors) or not decoder.known_errors[place]:
                return False
        elif mark["role"] == _THROTTLE_TIME and not 0 <= value <= THROTTLE_MAX_MS:
            return False
    return True


@kernel
def try_all(
    pairs: Rows, buf: Bytes, start: Positions, end: Positions, decoder: BodyDecoder, fitting: Bools
) -> None:
    """Set fitting[frame * len(pairs) + pair] for each frame buf[start:end] and PAIR."""
    at = 0
    for frame in range(len(start)):
        for pair in range(len(pairs)):
            key, version = pairs[pair]["api_key"], pairs[pair]["api_version"]
            fitting[at] = fits(key, version, buf, start[frame], end[frame], decoder)
            at += 1


@kernel
def are_other_bytes(
    stream: Stream, index: int, pos: int, size: int, request: Struct, decoder: BodyDecoder
) -> bool:
    """Return whether the frame at `pos`, of `size` bytes, cannot be the response to a request.

    request: FRAME. It is unknown, so False, if bytes are missing, or the version is not defined.
    """
    key, version = request["api_key"], request["api_version"]
    if size > _SIZE_MAX or not 0 <= key < len(decoder.apis):
        return False
    if not decoder.apis[key]["first_version"] <= version <= decoder.apis[key]["last_version"]:
        return False
    begin, end = pos + 4, pos + 4 + size
    if not copy_range(stream.pieces, index, stream.stop, begin, end, decoder.frame_at):
        return False
    if fits(key, version, decoder.frame, int64(0), size, decoder):
        return False
    # KIP-511: a broker answers an unknown version of ApiVersions with version 0.
    is_refusal = key == _API_VERSIONS and version != 0
    return not is_refusal or not fits(key, int64(0), decoder.frame, int64(0), size, decoder)
