"""Cuts captures into splits, by one walk over the packet headers of each file.

A split starts at a record and has the state that is needed to read from there: byte order, the
section's interfaces, the number of the first packet. The walk also finds a capture's times, counts
and IP fragments (`ip_fragments`). `pick` finds chosen packets of a split.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kdissect.arrays import Bytes, Indices, Rows, Struct, read_only
from kdissect.capture import packet_reader
from kdissect.capture.copies import spooled
from kdissect.capture.inputs import InputFile
from kdissect.capture.ip_fragments import FRAGMENT, Joined, note_fragment
from kdissect.capture.link_layers import HEADERS, IP_FRAGMENT, LINK_TYPE_NAMES, find_headers
from kdissect.capture.mapped_files import Sources
from kdissect.capture.packet_reader import CURSOR, STEP_PACKET, Reading
from kdissect.jit import kernel

FRAGMENT_MAX = 1_000_000  # default: IP fragments joined, over all captures

_COUNTS = np.dtype(
    [
        ("bytes", "i8"),
        ("cut", "i8"),
        ("first_ns", "i8"),
        ("last_ns", "i8"),
        ("start_ns", "i8"),
        ("splits", "i8"),
        ("fragments", "i8"),
        ("passed_over", "i8"),
    ]
)


@dataclass(frozen=True, slots=True)
class Split:
    """Records of a source up to position `end`, and the state of reading before them.

    cursor: packed CURSOR. interfaces: the capture's, packed INTERFACE rows. last_number:
    Wireshark's number of its last frame, from 1. fragments: what its packets get from IP fragments.
    """

    source: int
    cursor: bytes
    end: int
    packet_count: int
    last_number: int
    interfaces: bytes
    fragments: Joined | None = field(default=None, compare=False)

    @property
    def pos(self) -> int:
        return int(np.frombuffer(self.cursor, CURSOR)["pos"][0])

    @property
    def number_before(self) -> int:
        """Wireshark's number of the frame before the first one."""
        return int(np.frombuffer(self.cursor, CURSOR)["number"][0])

    def reading(self, data: Bytes) -> Reading:
        """The capture with these bytes, read from the split's first record on."""
        cursor = np.frombuffer(self.cursor, CURSOR).copy()[0]
        cursor["end"], cursor["secret_count"] = min(self.end, len(data)), -1
        interfaces = np.frombuffer(self.interfaces, packet_reader.INTERFACE).copy()
        return Reading(data, cursor, interfaces, np.zeros(0, packet_reader.SECRET))


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """Facts about an input file from the walk; `source` is its index in Sources, -1: not used.

    first_time_ns, last_time_ns: earliest and latest packet (None without packets).
    byte_count: captured bytes of all packets, without record headers.
    error: why the file could not be read to its end.
    error_pos: position of the error in the uncompressed file.
    error_packet: number of the first missing packet.
    secrets: key logs inside a pcapng, as (type, pos, length).
    """

    source: int
    path: str
    format: str
    compression: str
    link_types: tuple[str, ...] = ()
    first_time_ns: int | None = None
    last_time_ns: int | None = None
    packet_count: int = 0
    byte_count: int = 0
    truncated_packet_count: int = 0
    error: str | None = None
    error_pos: int = -1
    error_packet: int = -1
    secrets: tuple[tuple[int, int, int], ...] = ()


@kernel
def _walk(
    reading: Reading,
    headers: Struct,
    counts: Struct,
    splits: Rows,
    fragments: Rows,
    split_bytes: int,
    fragment_max: int,
) -> int:
    """Step to the end; returns the outcome of the last step. Call again after ROOM_NEEDED.

    splits: CURSOR before the first packet of each, with room for a row per `split_bytes`.
    """
    cursor = reading.cursor
    while True:
        row = counts["fragments"]
        if row == len(fragments):
            return packet_reader.STEP_ROOM_NEEDED
        at = counts["splits"]
        is_start = at == 0 or cursor["pos"] - splits["pos"][at - 1] >= split_bytes
        if is_start:
            splits[at] = cursor
        outcome = packet_reader.step(reading)
        if outcome != STEP_PACKET:
            return outcome
        if is_start:
            counts["splits"] = at + 1
        if cursor["packet_count"] == 1:
            counts["start_ns"] = cursor["time_ns"]
        counts["bytes"] += cursor["captured"]
        if cursor["captured"] < cursor["length"]:
            counts["cut"] += 1
        counts["first_ns"] = min(counts["first_ns"], cursor["time_ns"])
        counts["last_ns"] = max(counts["last_ns"], cursor["time_ns"])
        if find_headers(reading, headers) == IP_FRAGMENT:
            found = note_fragment(reading, headers, fragments[row])
            if row == fragment_max:
                counts["passed_over"] += found
            else:
                counts["fragments"] += found


class RecordWalk:
    """A walk over one file, and its tables."""

    def __init__(self, data: Bytes, split_bytes: int, fragment_max: int = 0) -> None:
        self.reading = packet_reader.opened(read_only(data))
        self.split_bytes = split_bytes
        self.fragment_max = fragment_max
        self.fragments = np.zeros(64, FRAGMENT)
        self.counts = np.zeros(1, _COUNTS)[0]
        self.counts["first_ns"] = packet_reader.TIME_MAX
        self.counts["last_ns"] = packet_reader.TIME_MIN
        self.splits = np.zeros(len(data) // split_bytes + 2, CURSOR)
        self.headers = np.zeros(1, HEADERS)[0]
        self.outcome = STEP_PACKET

    @property
    def cursor(self) -> Struct:
        return self.reading.cursor

    def run(self) -> int:
        """Step to the end; returns the outcome of the last step."""
        while True:
            self.outcome = _walk(
                self.reading,
                self.headers,
                self.counts,
                self.splits,
                self.fragments,
                self.split_bytes,
                self.fragment_max,
            )
            if self.outcome != packet_reader.STEP_ROOM_NEEDED:
                return self.outcome
            if self.counts["fragments"] == len(self.fragments):
                self.fragments = _doubled(self.fragments)
                continue
            self.reading = self.reading._replace(
                interfaces=_doubled(self.reading.interfaces), secrets=_doubled(self.reading.secrets)
            )

    @property
    def start_time_ns(self) -> int | None:
        return int(self.counts["start_ns"]) if self.cursor["packet_count"] else None

    def fragment_table(self) -> Rows:
        """FRAGMENT[n]: IP fragments that may carry TCP."""
        return self.fragments[: self.counts["fragments"]].copy()

    def error(self, bytes_before: int = 0) -> str | None:
        """Why, and at which packet and byte, the file could not be read to its end; else None.

        bytes_before: of the file, before these bytes.
        """
        data, cursor, _, _ = self.reading
        pos = int(cursor["pos"])
        place = f"packet {cursor['number'] + 1} at byte {bytes_before + pos}"
        if self.outcome == packet_reader.STEP_CUT:
            left = int(cursor["end"]) - pos
            return f"{place} is cut: it needs {cursor['needed']} bytes, {left} are left"
        if self.outcome == packet_reader.STEP_BAD:
            return f"{place} cannot be read: {packet_reader.FAULT_TEXT[int(cursor['fault'])]}"
        if len(data) < packet_reader.FILE_HEADER_SIZE:
            return f"the file header is cut: {len(data)} bytes"
        return None

    def link_types(self) -> tuple[str, ...]:
        rows = self.reading.interfaces["link_type"][: self.cursor["interface_count"]]
        types, first = np.unique(rows, return_index=True)
        ordered = (int(types[i]) for i in np.argsort(first))
        return tuple(dict.fromkeys(LINK_TYPE_NAMES.get(t, f"link_type_{t}") for t in ordered))

    def make_splits(self, source: int) -> list[Split]:
        starts = self.splits[: self.counts["splits"]]
        starts["end"] = starts["needed"] = 0  # the same however far the walk saw at a time
        interfaces = self.reading.interfaces[: self.cursor["interface_count"]].tobytes()
        return [
            Split(
                source=source,
                cursor=start.tobytes(),
                end=int(end["pos"]),
                packet_count=int(end["packet_count"] - start["packet_count"]),
                last_number=int(end["number"]),
                interfaces=interfaces,
            )
            for start, end in pairwise(np.append(starts, self.cursor))
        ]

    def info(self, source: int, file: InputFile) -> CaptureInfo:
        counts = dict(zip(_COUNTS.names or (), self.counts.item(), strict=True))
        cursor = self.cursor
        packet_count = int(cursor["packet_count"])
        errors = [text for text in (file.error, self.error()) if text]
        is_stopped = self.error() is not None
        secrets = self.reading.secrets[: cursor["secret_count"]]
        return CaptureInfo(
            source=source,
            path=file.path,
            format=file.format,
            compression=file.compression,
            link_types=self.link_types(),
            first_time_ns=counts["first_ns"] if packet_count else None,
            last_time_ns=counts["last_ns"] if packet_count else None,
            packet_count=packet_count,
            byte_count=counts["bytes"],
            truncated_packet_count=counts["cut"],
            error="; ".join(errors) or None,
            error_pos=int(cursor["pos"]) if is_stopped else -1,
            error_packet=int(cursor["number"]) + 1 if is_stopped else -1,
            secrets=tuple(secrets.tolist()),
        )


@dataclass(frozen=True, slots=True)
class WalkedCapture:
    """The result of walking one input. Its source number is 0 in `info` and `splits`; -1 if it is
    no capture.

    file: as `spooled` describes it. size: plain bytes. start_time_ns: of the first packet, None
    without packets. fragments: FRAGMENT[n]. passed_over: IP fragments beyond the
    limit.
    """

    file: InputFile
    info: CaptureInfo
    size: int = 0
    splits: tuple[Split, ...] = ()
    start_time_ns: int | None = None
    fragments: Rows = field(default_factory=lambda: np.zeros(0, FRAGMENT))
    passed_over: int = 0


def walk_capture(
    file: InputFile, folder: str, split_bytes: int, fragment_max: int
) -> WalkedCapture:
    """Look at an input, make it readable (`spooled`, in `folder`), and walk over its packets.

    Raises CaptureError if it cannot be opened, EnvironmentFailed if it cannot be read.
    """
    file = spooled(file, folder)
    if not file.is_capture:
        info = CaptureInfo(-1, file.path, file.format, file.compression, error=file.error)
        return WalkedCapture(file, info)
    sources = Sources([file], folder)
    data = sources.data(0)
    walk = RecordWalk(data, split_bytes, fragment_max)
    sources.windows(0, walk.cursor, len(data), walk.run)
    return WalkedCapture(
        file,
        walk.info(0, file),
        size=len(data),
        splits=tuple(walk.make_splits(0)),
        start_time_ns=walk.start_time_ns,
        fragments=walk.fragment_table(),
        passed_over=int(walk.counts["passed_over"]),
    )


def _doubled(table: Rows) -> Rows:
    """The table with as many further rows."""
    return np.concatenate((table, np.zeros_like(table)))


@kernel
def _pick(reading: Reading, wanted: Indices, found: Rows) -> int:
    """Walk until the last packet of `wanted` (ascending numbers); returns how many were found."""
    row = 0
    while row < len(wanted) and packet_reader.step(reading) == STEP_PACKET:
        if reading.cursor["number"] == wanted[row]:
            found[row] = reading.cursor
            row += 1
    return row


def pick(split: Split, sources: Sources, wanted: Indices) -> tuple[Rows, Indices]:
    """(CURSOR[n] after each packet, link types int64[n]) of the packets `wanted` (ascending
    numbers) that are in the split.

    The link type is -1 if the capture does not describe the interface. Raises CaptureError if the
    file cannot be opened.
    """
    within = wanted[(wanted > split.number_before) & (wanted <= split.last_number)]
    found = np.zeros(len(within), CURSOR)
    reading = split.reading(sources.data(split.source))
    count = _pick(reading, within, found)
    assert count == len(within), (count, len(within), split)
    link_types = np.append(reading.interfaces["link_type"], -1)[np.maximum(found["interface"], -1)]
    return found, link_types
