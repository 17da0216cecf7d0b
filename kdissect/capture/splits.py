"""Cuts captures into splits, by one walk over the packet headers of each file.

A split starts at a record and has the state that is needed to read from there: byte order, the
section's interfaces, the number of the first packet. The walk also finds a capture's times, counts
and IP fragments (`ip_fragments`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.arrays import read_only
from kdissect.capture.copies import spooled
from kdissect.capture.inputs import InputFile
from kdissect.capture.ip_fragments import FRAGMENT, note_fragment
from kdissect.capture.link_layers import (
    HEADERS,
    IP_FRAGMENT,
    LINK_TYPE_NAMES,
    find_tcp,
)
from kdissect.capture.mapped_files import Sources
from kdissect.capture.packet_reader import (
    CURSOR,
    FAULT_TEXT,
    FILE_HEADER_SIZE,
    INTERFACE,
    PACKET,
    SECRET,
    STEP_BAD,
    STEP_CUT,
    STEP_PACKET,
    STEP_ROOM_NEEDED,
    TIME_MAX,
    TIME_MIN,
    opened,
    step,
)
from kdissect.jit import kernel

FRAGMENT_MAX = 1_000_000  # default: IP fragments joined, over all captures

_COUNTS = np.dtype(
    [(name, "i8") for name in ("packets", "bytes", "cut", "first_ns", "last_ns", "start_ns",
                               "splits", "fragments", "passed_over")]
)  # fmt: skip
# Where a split begins, and what the walk had found before.
_START = np.dtype(
    [(name, "i8") for name in ("pos", "packets", "others", "base", "interfaces", "little",
                               "time_ns")]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Split:
    """Records data[pos:end] of a source, and the state of reading before them.

    first_packet: Wireshark's number of its first packet, from 1.
    other_count: records from its first packet on that are no packets but have such a number.
    format: of the cursor.
    interfaces: the section's rows so far, packed int64.
    interface_room: number of rows at the split's end.
    time_ns: of the packet before.
    """

    source: int
    pos: int
    end: int
    first_packet: int
    packet_count: int
    format: int
    little: int
    interfaces: bytes
    interface_room: int
    time_ns: int
    other_count: int = 0

    def reading(self) -> tuple[np.void, npt.NDArray[np.void]]:
        """(cursor at the first record, table of interfaces)."""
        known = np.frombuffer(self.interfaces, INTERFACE)
        interfaces = np.zeros(self.interface_room, INTERFACE)
        interfaces[: len(known)] = known
        cursor = np.zeros(1, CURSOR)[0]
        cursor["pos"], cursor["end"], cursor["format"] = self.pos, self.end, self.format
        cursor["little"], cursor["time_ns"] = self.little, self.time_ns
        cursor["interface_count"], cursor["secret_count"] = len(known), -1
        return cursor, interfaces


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
    buf: Any,
    cursor: Any,
    interfaces: Any,
    secrets: Any,
    counts: Any,
    splits: Any,
    fragments: Any,
    packet: Any,
    headers: Any,
    split_bytes: Any,
    packet_max: Any,
    fragment_max: Any,
) -> Any:
    """Step to the end, or past `packet_max` packets; returns the outcome of the last step.

    `splits` has room for a row per `split_bytes` of the file. Call again after ROOM_NEEDED.
    """
    outcome = np.int64(STEP_PACKET)
    while counts["packets"] < packet_max:
        row = counts["fragments"]
        if row == len(fragments):
            return np.int64(STEP_ROOM_NEEDED)
        time_before = cursor["time_ns"]
        outcome = step(buf, cursor, interfaces, secrets, packet)
        if outcome != STEP_PACKET:
            break
        at = counts["splits"]
        if at == 0 or packet["record_pos"] - splits["pos"][at - 1] >= split_bytes:
            splits["pos"][at] = packet["record_pos"]
            splits["packets"][at] = counts["packets"]
            splits["others"][at] = cursor["other_count"]
            splits["base"][at] = cursor["section_base"]
            splits["interfaces"][at] = cursor["interface_count"]
            splits["little"][at] = cursor["little"]
            splits["time_ns"][at] = time_before
            counts["splits"] = at + 1
        if counts["packets"] == 0:
            counts["start_ns"] = packet["time_ns"]
        counts["packets"] += 1
        counts["bytes"] += packet["captured"]
        if packet["captured"] < packet["length"]:
            counts["cut"] += 1
        counts["first_ns"] = min(counts["first_ns"], packet["time_ns"])
        counts["last_ns"] = max(counts["last_ns"], packet["time_ns"])
        if packet["interface"] < 0:
            continue
        link_type = interfaces["link_type"][packet["interface"]]
        start = packet["data_pos"]
        captured = packet["captured"]
        wire_end = start + max(captured, packet["length"])
        if find_tcp(buf, start, start + captured, wire_end, link_type, headers) == IP_FRAGMENT:
            if row == fragment_max:
                counts["passed_over"] += 1
            else:
                number = counts["packets"] + cursor["other_count"]
                counts["fragments"] += note_fragment(buf, headers, packet, number, fragments, row)
    return outcome


class RecordWalk:
    """A walk over one file, and its tables."""

    def __init__(
        self, data: npt.NDArray[np.uint8], split_bytes: int, fragment_max: int = 0
    ) -> None:
        self.cursor, self.interfaces = opened(data)
        self.data = read_only(data)
        self.split_bytes = split_bytes
        self.secrets = np.zeros(4, SECRET)
        self.fragment_max = fragment_max
        self.fragments = np.zeros(64, FRAGMENT)
        self.counts = np.zeros(1, _COUNTS)[0]
        self.counts["first_ns"], self.counts["last_ns"] = TIME_MAX, TIME_MIN
        self.splits = np.zeros(len(data) // split_bytes + 2, _START)
        self.packet = np.zeros(1, PACKET)[0]
        self.headers = np.zeros(1, HEADERS)[0]
        self.outcome = STEP_PACKET

    def run(self, packet_max: int = 2**62) -> RecordWalk:
        while True:
            self.outcome = _walk(
                self.data, self.cursor, self.interfaces, self.secrets, self.counts, self.splits,
                self.fragments, self.packet, self.headers, self.split_bytes, packet_max,
                self.fragment_max,
            )  # fmt: skip
            if self.outcome != STEP_ROOM_NEEDED:
                return self
            if self.counts["fragments"] == len(self.fragments):
                self.fragments = np.concatenate((self.fragments, np.zeros_like(self.fragments)))
                continue
            self.interfaces = np.concatenate((self.interfaces, np.zeros_like(self.interfaces)))
            self.secrets = np.concatenate((self.secrets, np.zeros_like(self.secrets)))

    @property
    def number_count(self) -> int:
        """Records so far that have a frame number in Wireshark."""
        return int(self.counts["packets"] + self.cursor["other_count"])

    @property
    def start_time_ns(self) -> int | None:
        return int(self.counts["start_ns"]) if self.counts["packets"] else None

    def fragment_table(self) -> npt.NDArray[np.void]:
        """FRAGMENT[n]: IP fragments that may carry TCP."""
        return self.fragments[: self.counts["fragments"]].copy()

    def error(self, packets_before: int = 0, bytes_before: int = 0) -> str | None:
        """One clause with a position if the file could not be read to its end; else None.

        packets_before, bytes_before: of the file, before `data`.
        """
        pos = int(self.cursor["pos"])
        packet = packets_before + self.number_count + 1
        place = f"packet {packet} at byte {bytes_before + pos}"
        if self.outcome == STEP_CUT:
            left = int(self.cursor["end"]) - pos
            return f"{place} is cut: it needs {int(self.cursor['needed'])} bytes, {left} are left"
        if self.outcome == STEP_BAD:
            return f"{place} cannot be read: {FAULT_TEXT[int(self.cursor['fault'])]}"
        if len(self.data) < FILE_HEADER_SIZE:
            return f"the file header is cut: {len(self.data)} bytes"
        return None

    def link_types(self) -> tuple[str, ...]:
        rows = self.interfaces["link_type"][: self.cursor["interface_count"]]
        types, first = np.unique(rows, return_index=True)
        ordered = (int(types[i]) for i in np.argsort(first))
        return tuple(dict.fromkeys(LINK_TYPE_NAMES.get(t, f"link_type_{t}") for t in ordered))

    def make_splits(self, source: int) -> list[Split]:
        rows = self.splits[: self.counts["splits"]]
        if len(rows) == 0:
            return []
        ends = np.append(rows["pos"][1:], self.cursor["pos"]).tolist()
        packets = np.append(rows["packets"][1:], self.counts["packets"]).tolist()
        others = np.append(rows["others"][1:], self.cursor["other_count"]).tolist()
        tables = np.append(rows["interfaces"][1:], self.cursor["interface_count"]).tolist()
        splits = []
        for row, end, packet_end, other_end, interface_end in zip(
            rows.tolist(), ends, packets, others, tables, strict=True
        ):
            pos, packets_before, others_before, base, count, little, time_ns = row
            interface_rows = self.interfaces[base:count]
            splits.append(
                Split(
                    source=source,
                    pos=pos,
                    end=end,
                    first_packet=packets_before + others_before + 1,
                    packet_count=packet_end - packets_before,
                    format=int(self.cursor["format"]),
                    little=little,
                    interfaces=interface_rows.tobytes(),
                    interface_room=interface_end - base,
                    time_ns=time_ns,
                    other_count=other_end - others_before,
                )
            )
        return splits

    def info(self, source: int, file: InputFile) -> CaptureInfo:
        counts = dict(zip(_COUNTS.names or (), self.counts.item(), strict=True))
        errors = [text for text in (file.error, self.error()) if text]
        is_stopped = self.error() is not None
        secrets = self.secrets[: self.cursor["secret_count"]]
        return CaptureInfo(
            source=source,
            path=file.path,
            format=file.format,
            compression=file.compression,
            link_types=self.link_types(),
            first_time_ns=counts["first_ns"] if counts["packets"] else None,
            last_time_ns=counts["last_ns"] if counts["packets"] else None,
            packet_count=counts["packets"],
            byte_count=counts["bytes"],
            truncated_packet_count=counts["cut"],
            error="; ".join(errors) or None,
            error_pos=int(self.cursor["pos"]) if is_stopped else -1,
            error_packet=self.number_count + 1 if is_stopped else -1,
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
    fragments: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, FRAGMENT))
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
    sources.windows(0, walk.cursor, len(data), lambda: int(walk.run().outcome))
    return WalkedCapture(
        file, walk.info(0, file), len(data), tuple(walk.make_splits(0)), walk.start_time_ns,
        walk.fragment_table(), int(walk.counts["passed_over"]),
    )  # fmt: skip
