"""The bytes of some exchanges' frames, gathered into one buffer for the decoding kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.arrays import by_value, gather_ranges, joined, take
from kdissect.capture.mapped_files import Sources
from kdissect.codec.message_columns import ELEMENTS_MAX, MessageColumns, decode_columns
from kdissect.kafka.assembly import EXTENT, Assembly
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES

UNSUPPORTED_VERSION = 35
_NO_ROWS = np.zeros(0, np.int64)


@cache
def known_versions() -> npt.NDArray[np.bool_]:
    """bool[api_key, api_version]: whether a definition exists."""
    apis = catalog.apis()
    table = np.zeros((max(apis) + 2, 64), bool)
    for key, api in apis.items():
        table[key, api.request.versions.first : api.request.versions.last + 1] = True
    return table


@dataclass(slots=True)
class FrameBuffer:
    """Some exchanges and the bytes of their frames.

    exchanges: EXCHANGE[n]. api_key, api_version: int16[n], copies of its columns.
    buf: uint8, all frames. start, end: int64[n, 2], position in `buf` of the request's and the
    response's frame without the size prefix; equal if there is none. A frame ends early at a hole
    or a cut; only sides with `is_whole` are decoded.
    response_version: int16[n]: api_version, or 0 for an ApiVersions response with error 35.
    """

    exchanges: npt.NDArray[np.void]
    api_key: npt.NDArray[np.int16]
    api_version: npt.NDArray[np.int16]
    buf: npt.NDArray[np.uint8]
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    response_version: npt.NDArray[np.int16]
    _readable: dict[int, dict[int, npt.NDArray[np.int64]]] = field(default_factory=dict, repr=False)

    @staticmethod
    def gather(
        assembly: Assembly,
        sources: Sources,
        rows: npt.NDArray[Any],
        sides: tuple[int, ...] = (REQUEST, RESPONSE),
        prefix: int | None = None,
    ) -> FrameBuffer:
        """Copy the frames of the exchanges `rows`; prefix: at most this many bytes of each
        frame."""
        exchanges = take(assembly.exchanges, rows)
        count = len(rows)
        start = np.zeros((count, 2), np.int64)
        end = np.zeros((count, 2), np.int64)
        chosen = []
        lengths = []
        for side in sides:
            column = exchanges[SIDES[side]]
            indices, first = gather_ranges(
                column["extent_start"].astype(np.int64), column["extent_count"].astype(np.int64)
            )
            extents = take(assembly.extents, indices)
            owner = np.repeat(np.arange(count), column["extent_count"])
            # After a hole the position within the message is unknown: the frame ends there.
            holes = np.cumsum(extents["source"] < 0)
            before = np.concatenate([[0], holes])[first] if count else holes
            visible = holes == before[owner]
            if holes.any():
                extents, owner = extents[visible], owner[visible]
            if prefix is not None:
                done = np.cumsum(extents["length"]) - extents["length"]
                base = np.full(count, np.iinfo(np.int64).max)
                np.minimum.at(base, owner, done)
                room = np.maximum(prefix - (done - base[owner]), 0)
                extents["length"] = np.minimum(extents["length"], room)
            chosen.append(extents)
            lengths.append(np.bincount(owner, extents["length"], count).astype(np.int64))
        at = 0
        for side, length in zip(sides, lengths, strict=True):
            end[:, side] = at + np.cumsum(length)
            start[:, side] = end[:, side] - length
            at += int(length.sum())
        extents = joined(chosen) if chosen else np.zeros(0, EXTENT)
        buf = sources.gather(extents)
        api_key, api_version = exchanges["api_key"].copy(), exchanges["api_version"].copy()
        frames = FrameBuffer(exchanges, api_key, api_version, buf, start, end, api_version.copy())
        frames._fall_back()
        return frames

    def _fall_back(self) -> None:
        """KIP-511: a broker answers ApiVersions with error 35 in a v0 body, whatever the
        request's version."""
        rows = np.flatnonzero(
            (self.api_key == ApiKey.API_VERSIONS)
            & (self.end[:, RESPONSE] - self.start[:, RESPONSE] >= 6)
        )
        at = self.start[rows, RESPONSE] + 4
        code = (self.buf[at].astype(np.int64) << 8) | self.buf[at + 1]
        self.response_version[rows[code == UNSUPPORTED_VERSION]] = 0

    def versions(self, side: int) -> npt.NDArray[np.int16]:
        """int16[n]: api_version to decode that side of each exchange with."""
        return self.response_version if side == RESPONSE else self.api_version

    def known(self, side: int) -> npt.NDArray[np.bool_]:
        """bool[n]: whether API and version of that side have a definition."""
        table = known_versions()
        key = self.api_key.astype(np.int64)
        version = self.versions(side).astype(np.int64)
        inside = (key >= 0) & (key < len(table)) & (version >= 0) & (version < 64)
        return inside & table[np.where(inside, key, 0), np.where(inside, version, 0)]

    def whole(self, side: int) -> npt.NDArray[np.bool_]:
        """bool[n]: whether all bytes of that side's frame were captured."""
        return self.exchanges[SIDES[side]]["is_whole"] != 0

    def readable(self, api_key: int, side: int) -> npt.NDArray[np.int64]:
        """Rows, ascending, of that API whose side is whole and has a known version."""
        if side not in self._readable:  # computed once, used for every API
            rows = np.flatnonzero(self.whole(side) & self.known(side))
            places = by_value(self.api_key[rows])
            self._readable[side] = {key: rows[some] for key, some in places.items()}
        return self._readable[side].get(api_key, _NO_ROWS)

    def decode(
        self,
        api_key: int,
        side: int,
        rows: npt.NDArray[Any],
        elements_max: int = ELEMENTS_MAX,
    ) -> MessageColumns:
        """Decode the messages of `rows` (indices into exchanges) into columns."""
        return decode_columns(
            api_key,
            SIDES[side],
            self.buf,
            np.ascontiguousarray(self.start[rows, side]),
            np.ascontiguousarray(self.end[rows, side]),
            np.ascontiguousarray(self.versions(side)[rows]),
            elements_max,
        )


def chunks(rows: Any, sizes: Any, chunk_bytes: int) -> list[npt.NDArray[np.int64]]:
    """Split rows of exchanges so that the frames of a part, of these sizes, fit a buffer of about
    `chunk_bytes`."""
    if not len(rows):
        return []
    filled = np.cumsum(sizes[rows] + 64) // chunk_bytes
    return np.split(rows, np.flatnonzero(np.diff(filled)) + 1)
