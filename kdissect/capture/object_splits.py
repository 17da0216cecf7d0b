"""Cuts captures in an object store into splits, by many tasks at a time.

Theory of operation
-------------------
A walk over the records of a capture has to read all of it, because a store has no ranges as small
as a record's header. So the walk is cut into pieces of equal bytes, which tasks do in parallel. The
first piece of a capture begins at its first record. For each other piece, its task guesses: the
first position in the piece from which a chain of plausible records starts (`guess_record`). It uses
the byte order and the interfaces of the capture's head. The walk of a piece ends at the first
record after the piece. If the next piece began exactly there, with the state that its task assumed,
both are right, because the first piece is right (`_agree`).

If a guess was wrong, its piece is walked again, from the position and state that are known by then.
So is a piece after one with new interfaces or a new section. After ROUNDS_MAX rounds, one task
walks the rest to its end, so the work is linear in the input in any case. The pieces become the
splits. Fragments, secrets and counts are merged in order, and packets numbered, as in a single
walk.

A piece does not know the time of the packet before it, which a simple packet block of pcapng
inherits. It starts with a time that no packet has; if that time is used, the walk is repeated.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture import object_bytes
from kdissect.capture import splits as walking
from kdissect.capture.boundary_search import GUESSED_BYTES, guess_record
from kdissect.capture.inputs import InputFile
from kdissect.capture.ip_fragments import FRAGMENT_WIDTH, PACKET
from kdissect.capture.mapped_files import Sources
from kdissect.capture.object_bytes import Version
from kdissect.capture.packet_reader import (
    END,
    FORMAT,
    INTERFACE_COUNT,
    INTERFACE_SIZE,
    LITTLE,
    PCAPNG,
    POS,
    SECRET_COUNT,
    SECRET_SIZE,
    SECTION_BASE,
    STEP_BAD,
    STEP_CUT,
    STEP_END,
    TIME,
)
from kdissect.capture.splits import CaptureInfo, Split

# half of a worker's budget, because the payload of a split is read a second time
PIECE_BYTES_MAX = 32 << 20
ROUNDS_MAX = 3
_NO_TIME = -(2**63) + 1  # time of the packet before a piece, if unknown


@dataclass(frozen=True, slots=True)
class ReadState:
    """The state that reading from `pos` on depends on. interfaces: those of the section."""

    pos: int
    little: int
    interfaces: bytes
    time_ns: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Records of an object from `start` on, or from the first one after `begin`, up to `stop`."""

    url: str
    version: Version
    begin: int
    stop: int
    start: ReadState | None  # None: guess it; if begin is 0, the capture's beginning
    split_bytes: int
    fragment_max: int


@dataclass(frozen=True, slots=True)
class Walked:
    """The result of walking a piece. Packet numbers begin with 1 in each piece.

    start: None if no record was found. fragments: int64[n, FRAGMENT_WIDTH], packed. outcome: of the
    last step. number_count: records that have a frame number in Wireshark.
    """

    start: ReadState | None
    end: ReadState
    outcome: int
    error: tuple[str, str] | None  # clauses before and after the packet's number
    splits: tuple[Split, ...]
    link_types: tuple[str, ...]
    counts: tuple[int, ...]
    number_count: int
    secrets: tuple[tuple[int, int, int], ...]
    fragments: bytes


Runner = Callable[[Sequence[Piece]], list[Walked]]


def walk_piece(piece: Piece) -> Walked:
    """Walk one piece. Raises EnvironmentFailed if the object cannot be read."""
    sources = Sources([piece.url], [piece.version])
    size = piece.version.size
    head = sources.part(0, 0, min(size, object_bytes.BLOCK_BYTES))
    walk = walking._Walk(sources.data(0), piece.split_bytes, piece.fragment_max)
    start = piece.start
    if start is None and piece.begin == 0:
        start = _state(walk)
    elif start is None:
        start = _guessed(walk, sources, piece, len(head))
    if start is None:
        return Walked(None, _state(walk), STEP_END, None, (), (), (0,) * 9, 0, (), b"")
    _go_to(walk, start)
    walk.outcome = sources.windows(0, walk.cursor, piece.stop, lambda: walk.run().outcome)
    secrets = walk.secrets.reshape(-1, SECRET_SIZE)[: walk.cursor[SECRET_COUNT]]
    return Walked(
        start=start,
        end=_state(walk),
        outcome=walk.outcome,
        error=_error(walk),
        splits=tuple(walk.make_splits(0)),
        link_types=walk.link_types(),
        counts=tuple(int(count) for count in walk.counts),
        number_count=walk.number_count,
        secrets=tuple((int(kind), int(pos), int(length)) for kind, pos, length in secrets),
        fragments=zlib.compress(walk.fragment_table().tobytes(), 1),
    )


def _state(walk: Any) -> ReadState:
    cursor = walk.cursor
    rows = slice(cursor[SECTION_BASE] * INTERFACE_SIZE, cursor[INTERFACE_COUNT] * INTERFACE_SIZE)
    return ReadState(
        int(cursor[POS]), int(cursor[LITTLE]), walk.interfaces[rows].tobytes(), int(cursor[TIME])
    )


def _go_to(walk: Any, state: ReadState) -> None:
    """Put a fresh walk into `state`."""
    known = np.frombuffer(state.interfaces, np.int64)
    walk.interfaces = np.zeros(max(len(walk.interfaces), 2 * len(known)), np.int64)
    walk.interfaces[: len(known)] = known
    walk.cursor[[POS, LITTLE, TIME]] = state.pos, state.little, state.time_ns
    walk.cursor[[SECTION_BASE, INTERFACE_COUNT]] = 0, len(known) // INTERFACE_SIZE


def _guessed(walk: Any, sources: Sources, piece: Piece, head_size: int) -> ReadState | None:
    """State at the guessed first record of a piece, with byte order and interfaces of the head."""
    probe = walking._Walk(sources.data(0), 2**62)
    probe.cursor[END] = head_size
    first_time = probe.run().start_time_ns
    head_state = _state(probe)
    end = min(piece.version.size, piece.begin + GUESSED_BYTES)
    is_pcapng = walk.cursor[FORMAT] == PCAPNG
    pos = guess_record(
        sources.part(0, piece.begin, end),
        bool(head_state.little),
        is_pcapng,
        walk.interfaces,
        first_time,
    )
    if pos < 0 or piece.begin + pos >= piece.stop:
        return None
    return replace(head_state, pos=piece.begin + pos, time_ns=_NO_TIME)


def _error(walk: Any) -> tuple[str, str] | None:
    """The walk's error, without the packet's number, which is not known yet."""
    text = walk.error()
    if text is None:
        return None
    number = f"packet {walk.number_count + 1} "
    if not text.startswith(number):
        return text, ""
    return "packet ", text[len(number) - 1 :]


class FarWalk:
    """The walk over one object, merged from its pieces; a `splits.CaptureWalk`."""

    def __init__(self, file: InputFile, split_bytes: int, fragment_max: int) -> None:
        self.file = file
        self.version = Version(file.size, file.tag)
        self.split_bytes = split_bytes
        self.fragment_max = fragment_max
        self.settled: list[Walked] = []
        self._waiting: dict[int, Walked] = {}  # by the piece's number
        self._count = max(1, -(-file.size // split_bytes))
        self._done = False

    # -- rounds -------------------------------------------------------------------------------

    def pieces(self, round_number: int) -> list[tuple[int, Piece]]:
        """(number, piece) to walk in this round; empty if all pieces are settled."""
        if self._done:
            return []
        if not self.settled and not self._waiting:
            return [(number, self._piece(number, None)) for number in range(self._count)]
        state = self._end()
        first = self._number_of(state)
        if round_number >= ROUNDS_MAX:
            self._waiting.clear()
            return [(first, replace(self._piece(first, state), stop=self.file.size))]
        again = [(first, self._piece(first, state))]
        for number in range(first + 1, self._count):
            before = self._waiting.get(number)
            if before is None or before.start is None:
                continue  # its start follows from the piece before it
            known = replace(before.start, little=state.little, interfaces=state.interfaces)
            if before.start.time_ns != _NO_TIME or before.counts[walking._START] == _NO_TIME:
                known = replace(known, time_ns=state.time_ns)
            if known != before.start:
                again.append((number, self._piece(number, known)))
        return again

    def take(self, number: int, walked: Walked) -> None:
        self._waiting[number] = walked

    def settle(self) -> None:
        """Accept pieces that are certainly right."""
        while not self._done:
            state = self._end() if self.settled else None
            number = self._number_of(state) if state is not None else 0
            walked = self._waiting.get(number)
            if walked is None or not (state is None or _agree(state, walked)):
                return
            if state is not None and walked.end.time_ns == _NO_TIME:  # the piece has no packet
                walked = replace(walked, end=replace(walked.end, time_ns=state.time_ns))
            for passed in [other for other in self._waiting if other <= number]:
                del self._waiting[passed]
            self.settled.append(walked)
            self._done = walked.outcome in (STEP_CUT, STEP_BAD) or walked.end.pos >= self.file.size

    def _piece(self, number: int, start: ReadState | None) -> Piece:
        begin = number * self.split_bytes
        return Piece(
            self.file.path,
            self.version,
            begin,
            min(self.file.size, begin + self.split_bytes),
            start,
            self.split_bytes,
            self.fragment_max,
        )

    def _end(self) -> ReadState:
        return self.settled[-1].end

    def _number_of(self, state: ReadState) -> int:
        return state.pos // self.split_bytes

    # -- results of a walk --------------------------------------------------------------------

    def _sum(self, index: int) -> int:
        return sum(walked.counts[index] for walked in self.settled)

    def _numbers(self) -> int:
        return sum(walked.number_count for walked in self.settled)

    @property
    def start_time_ns(self) -> int | None:
        """Time of the first packet in ns since 1970; None without packets."""
        return next(
            (
                walked.counts[walking._START]
                for walked in self.settled
                if walked.counts[walking._PACKETS]
            ),
            None,
        )

    @property
    def passed_over(self) -> int:
        return self._sum(walking._PASSED_OVER)

    def _error(self) -> str | None:
        last = self.settled[-1]
        if last.error is None:
            return None
        before, behind = last.error
        return f"{before}{self._numbers() + 1}{behind}" if behind else before

    def make_splits(self, source: int) -> list[Split]:
        splits = []
        numbers = 0
        for walked in self.settled:
            for split in walked.splits:
                number = numbers + split.first_packet
                splits.append(replace(split, source=source, first_packet=number))
            numbers += walked.number_count
        return splits

    def fragment_table(self) -> npt.NDArray[np.int64]:
        """int64[n, FRAGMENT_WIDTH]: IP fragments that may carry TCP."""
        tables = [np.zeros((0, FRAGMENT_WIDTH), np.int64)]
        numbers = 0
        for walked in self.settled:
            data = zlib.decompress(walked.fragments) if walked.fragments else b""
            table = np.frombuffer(data, np.int64).reshape(-1, FRAGMENT_WIDTH).copy()
            table[:, PACKET] += numbers
            tables.append(table)
            numbers += walked.number_count
        return np.concatenate(tables)

    def info(self, source: int, file: InputFile) -> CaptureInfo:
        packets = self._sum(walking._PACKETS)
        own_error = self._error()
        with_packets = [walked for walked in self.settled if walked.counts[walking._PACKETS]]
        types = [name for walked in self.settled for name in walked.link_types]
        return CaptureInfo(
            source=source,
            path=file.path,
            format=file.format,
            compression=file.compression,
            link_types=tuple(dict.fromkeys(types)),
            first_time_ns=min(
                (walked.counts[walking._FIRST] for walked in with_packets), default=None
            ),
            last_time_ns=max(
                (walked.counts[walking._LAST] for walked in with_packets), default=None
            ),
            packet_count=packets,
            byte_count=self._sum(walking._BYTES),
            truncated_packet_count=self._sum(walking._CUT),
            error="; ".join(text for text in (file.error, own_error) if text) or None,
            error_pos=self.settled[-1].end.pos if own_error is not None else -1,
            error_packet=self._numbers() + 1 if own_error is not None else -1,
            secrets=tuple(secret for walked in self.settled for secret in walked.secrets),
        )


def _agree(state: ReadState, walked: Walked) -> bool:
    """Return whether a piece was walked from exactly the given state."""
    start = walked.start
    if start is None:
        return False
    if start.time_ns == _NO_TIME and walked.counts[walking._START] != _NO_TIME:
        start = replace(start, time_ns=state.time_ns)
    return start == state


def walk_all(
    files: Sequence[InputFile], split_bytes: int, fragment_max: int, run: Runner
) -> dict[str, FarWalk]:
    """Walk over objects; returns the walks by URL. `run` walks pieces, in any process."""
    walks = {file.path: FarWalk(file, split_bytes, fragment_max) for file in files}
    round_number = 0
    while True:
        requested = [
            (walk, number, piece)
            for walk in walks.values()
            for number, piece in walk.pieces(round_number)
        ]
        if not requested:
            return walks
        results = run([piece for _, _, piece in requested])
        for (walk, number, _), walked in zip(requested, results, strict=True):
            walk.take(number, walked)
        for walk in walks.values():
            walk.settle()
        round_number += 1
