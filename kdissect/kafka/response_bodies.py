"""Decodes bodies of responses as evidence for their API, or against it.

A response contains neither its API nor its version. A definition *fits* if it decodes the frame to
its last byte, with error codes that Kafka has, a plausible throttle time and text in UTF-8.

A search after a gap finds a response by its size and its correlation id (`frame_search.py`). Other
bytes may resemble these. If all bytes of the response are there, they have to decode as an answer
to its request; else the search goes on (`refuse_other_bytes`).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from kdissect.arrays import Bools, Bytes, Positions, Row, Rows
from kdissect.codec.message_columns import decode_columns
from kdissect.kafka.walk import NO_REQUEST, Stream
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role, plan
from kdissect.protocol.error_codes import ErrorCode
from kdissect.tcp.byte_ranges import find, read_bytes

THROTTLE_MAX_MS = 3_600_000
_SIZE_MAX = 1 << 20  # bytes; larger responses are not decoded after a gap
# So many of a stream are refused, and one more for each few of its segments. Then the score of a
# frame decides, as for larger frames. A test takes milliseconds, so it has to be rare.
REFUSED_MIN = 4
SEGMENTS_PER_REFUSAL = 8

Pair = tuple[int, int]  # api key, api version


@cache
def every_response() -> frozenset[Pair]:
    """(api key, version) of every defined response."""
    return frozenset(
        (key, version)
        for key, api in catalog.apis().items()
        for version in range(api.response.versions.first, api.response.versions.last + 1)
        if not api.response.versions.is_empty
    )


@cache
def _known_errors() -> npt.NDArray[np.int64]:
    return np.array(sorted(ErrorCode), np.int64)


def fits(key: int, version: int, buf: Bytes, start: Positions, end: Positions) -> Bools:
    """bool[m]: whether buf[start:end] can be a response of that API and version."""
    versions = np.full(len(start), version, np.int16)
    columns = decode_columns(plan(key, "response"), buf, start, end, versions)
    is_fitting = np.asarray(
        (columns.status == 0) & (columns.surplus == 0) & (columns.invalid_utf8 == 0)
    )
    marks = columns.marks
    codes = marks[marks["role"] == Role.ERROR_CODE]
    is_fitting[codes["row"][~np.isin(codes["value"], _known_errors())]] = False
    throttles = marks[marks["role"] == Role.THROTTLE_TIME_MS]
    wrong = (throttles["value"] < 0) | (throttles["value"] > THROTTLE_MAX_MS)
    is_fitting[throttles["row"][wrong]] = False
    return is_fitting


def refuse_other_bytes(walk: Row, stream: Stream, requests: Rows) -> None:
    """Continue a walk one byte further if the frame that its search found is no response.

    requests: FRAME[n], among them WALK.request, whose response it would be. After some frames of a
    stream (REFUSED_MIN) the walk keeps the next ones, so that the time stays linear in the bytes.
    """
    request = requests[walk["request"]]
    key, version = int(request["api_key"]), int(request["api_version"])
    walk["request"] = NO_REQUEST
    pos, size = int(walk["pos"]) + 4, int(walk["header"]["size"])
    index = find(stream.pieces, stream.start, stream.stop, pos)
    refused_max = REFUSED_MIN + (stream.stop - stream.start) // SEGMENTS_PER_REFUSAL
    if walk["refused_count"] >= refused_max or size > _SIZE_MAX:
        return
    if not _is_whole(stream, index, pos + size):
        return
    if key not in catalog.apis() or version not in catalog.api(key).response.versions:
        return
    # KIP-511: a broker answers an unknown version of ApiVersions with version 0.
    versions = {version, 0} if key == ApiKey.API_VERSIONS else {version}
    frame = np.frombuffer(read_bytes(stream.pieces, index, pos, size), np.uint8)
    start, end = np.zeros(1, np.int64), np.array([size], np.int64)
    if not any(fits(key, version, frame, start, end)[0] for version in versions):
        walk["pos"] += 1
        walk["refused_count"] += 1


def _is_whole(stream: Stream, index: int, end: int) -> bool:
    """Return whether all bytes from inside piece `index` up to `end` were captured."""
    pieces = stream.pieces
    while pieces[index]["end"] < end:
        index += 1
        if index >= stream.stop or pieces[index]["pos"] > pieces[index - 1]["end"]:
            return False
    return True
