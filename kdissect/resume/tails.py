"""What is open at the end of a run, kept so that a later one goes on there: see `rejoined`.

Here are the words and the shapes, what goes on (`openings`, `known_of`), and where a connection is
cut (`cuts`), by the columns of `reassembly` and the exchanges of `assemble` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kdissect.arrays import copied, joined, take
from kdissect.capture.segments import ACK, ENDPOINTS, FRAGMENT_PART, SEGMENT, SYN
from kdissect.kafka.assemble import Known
from kdissect.kafka.assembly import DIRECTION, Assembly, PairStatus, Protocol
from kdissect.kafka.framing import HAS_ASKED, IN_TOKENS, LAST_ID, RESUMED
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.resume.placing import NO_NUMBER
from kdissect.tcp.columns import DUPLICATE
from kdissect.tcp.connection_ids import mixed
from kdissect.tcp.reassembly import Streams

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]

MS = 1_000_000
SASL_HANDSHAKE = 17
TURNS_MAX = 64  # of the search for a cut

NEW, WHOLE, CUT, OVER = range(4)  # PAIR.kind

# What is kept of a pair of endpoints. WHOLE: the segments of its last connections. CUT: those of
# the last connection from the cut on; the numbers from `first_time_ns` on are of what is before it.
# OVER: none. `incarnation` is that of the first connection kept (of the last one where it is OVER).
# By side: base, stream position of the cut; seq, its sequence number (NO_NUMBER: the stream begins
# as it was captured); syn, that of position 0 where a SYN told it; bits, of `framing`'s has_origin.
PAIR = np.dtype(
    [
        ("kind", "u1"),
        ("client_side", "u1"),
        ("handshake_seen", "u1"),
        ("is_tls", "u1"),
        ("protocol", "u1"),
        ("has_loss", "u1"),  # bytes of responses are missing
        ("is_blank", "u1"),  # bytes of secret messages are overwritten
        ("incarnation", "<i4"),
        ("first_time_ns", "<i8"),
        ("last_time_ns", "<i8"),
        ("handshake_rtt_ns", "<i8"),
        ("id_low", "<i8"),  # correlation ids of requests before the cut; low > high: none
        ("id_high", "<i8"),
        ("base", "<i8", (2,)),
        ("seq", "<i8", (2,)),
        ("syn", "<i8", (2,)),
        ("bits", "<i8", (2,)),
        ("direction", DIRECTION, (2,)),
    ]
)

# An exchange with bytes kept here whose rows are in final files; `pair` is a row of `Open.pairs`.
SHOWN = np.dtype([("exchange_id", "<i8"), ("digest", "<i8"), ("pair", "<i8")])


@dataclass(frozen=True, slots=True)
class Keeping:
    """When what is final. end_ns: of the latest packet of all captures.

    keep_ns: segments as young as that are kept for the comparison with copies (10 ms) and
    retransmissions to come. linger_ns: how long a closed connection, or a hole, may still change.
    cut_bytes: connections with fewer bytes are kept whole. looked_at: bytes after which what is
    nothing known stays that. secret_apis: keys of APIs whose messages are not kept as they are;
    with any, bare SASL tokens are not either.
    """

    end_ns: int
    keep_ns: int = 200 * MS
    linger_ns: int = 1000 * MS
    cut_bytes: int = 16384
    looked_at: int = 256 << 10
    data_max: int = 256 << 20  # bytes kept of a bucket; with more nothing is kept
    secret_apis: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Open:
    """What is kept of some pairs of endpoints.

    segments: `endpoints` is a row of `pairs`, `pos` a place in `data`, `source` the number of the
    capture that it came from. facts: by row of pairs, of each connection kept there, what messages
    and handshakes told.
    """

    endpoints: Rows = field(default_factory=lambda: np.zeros(0, ENDPOINTS))
    pairs: Rows = field(default_factory=lambda: np.zeros(0, PAIR))
    segments: Rows = field(default_factory=lambda: np.zeros(0, SEGMENT))
    data: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    shown: Rows = field(default_factory=lambda: np.zeros(0, SHOWN))
    facts: dict[int, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        arrays = (self.endpoints, self.pairs, self.segments, self.data, self.shown)
        told = json.dumps(sorted(self.facts.items())).encode()
        counts = np.array([*(len(array) for array in arrays), len(told)], "<i8")
        return b"".join([counts.tobytes(), *(array.tobytes() for array in arrays), told])

    @staticmethod
    def from_bytes(data: bytes) -> Open:
        counts = np.frombuffer(data, "<i8", 6)
        pos = counts.nbytes
        arrays = []
        kinds = (ENDPOINTS, PAIR, SEGMENT, np.dtype(np.uint8), SHOWN)
        for kind, count in zip(kinds, counts[:5].tolist(), strict=True):
            arrays.append(np.frombuffer(data, kind, count, pos))
            pos += arrays[-1].nbytes
        facts = {int(row): told for row, told in json.loads(data[pos:])}
        return Open(arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], facts)

    @staticmethod
    def concat(parts: list[Open]) -> Open:
        """All of them; no pair is in two."""
        if not parts:
            return Open()
        segments, shown, facts = [], [], {}
        row = place = 0
        for part in parts:
            some = copied(part.segments)
            some["endpoints"] += row
            some["pos"] += place
            segments.append(some)
            shown.append(copied(part.shown))
            shown[-1]["pair"] += row
            facts.update({row + at: told for at, told in part.facts.items()})
            row += len(part.pairs)
            place += len(part.data)
        return Open(
            joined([part.endpoints for part in parts]),
            joined([part.pairs for part in parts]),
            joined(segments),
            np.concatenate([part.data for part in parts]),
            joined(shown),
            facts,
        )

    def of_pairs(self, rows: Ints) -> Open:
        """The pairs `rows`, ascending, and what is kept of them."""
        new = np.full(len(self.pairs), -1, np.int64)
        new[rows] = np.arange(len(rows))
        segments = take(self.segments, np.flatnonzero(new[self.segments["endpoints"]] >= 0))
        size = segments["captured"].astype(np.int64)
        data = _behind_each_other(self.data, segments["pos"], size)
        segments["pos"] = np.cumsum(size) - size
        segments["endpoints"] = new[segments["endpoints"]]
        shown = take(self.shown, np.flatnonzero(new[self.shown["pair"]] >= 0))
        shown["pair"] = new[shown["pair"]]
        facts = {int(new[row]): told for row, told in self.facts.items() if new[row] >= 0}
        return Open(
            self.endpoints[rows],
            take(self.pairs, rows),
            segments,
            data,
            shown,
            facts,
        )

    def by_key(self, key: Ints, bytes_max: int) -> Iterator[tuple[int, Open]]:
        """Of all pairs in pieces of one key (int64 by pair) and about `bytes_max` bytes."""
        size = np.bincount(
            self.segments["endpoints"],
            self.segments["captured"] + SEGMENT.itemsize,
            minlength=len(self.pairs),
        )
        size += PAIR.itemsize + ENDPOINTS.itemsize
        order = np.argsort(key, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
            number = np.cumsum(size[rows]) // bytes_max
            for part in np.split(rows, np.flatnonzero(np.diff(number)) + 1):
                if len(part):
                    yield int(key[part[0]]), self.of_pairs(part)


def _behind_each_other(data: npt.NDArray[np.uint8], start: Ints, size: Ints) -> Any:
    """Ranges of `data` in a new array; those of a connection mostly follow one another there."""
    ends = np.flatnonzero((start + size)[:-1] != start[1:]) + 1
    low, high = np.append(0, ends), np.append(ends, len(start)) - 1
    if not len(start):
        return data[:0]
    bounds = zip(start[low].tolist(), (start + size)[high].tolist(), strict=True)
    return np.concatenate([data[begin:end] for begin, end in bounds])


def openings(pairs: Rows) -> Rows:
    """SEGMENT rows: the SYNs that make what is behind a cut begin at a boundary; packet 0."""
    rows = np.flatnonzero(pairs["kind"] == CUT)
    client = pairs["client_side"][rows].astype(np.int64)
    parts = []
    for side in (client, 1 - client):  # the client's comes first
        seq = pairs["seq"][rows, side]
        chosen = np.flatnonzero(seq != NO_NUMBER)
        made = np.zeros(len(chosen), SEGMENT)
        made["time_ns"] = pairs["first_time_ns"][rows[chosen]]
        made["seq"] = (seq[chosen] - 1) & 0xFFFFFFFF
        asked = pairs["seq"][rows[chosen], client[chosen]]
        is_answer = (side[chosen] != client[chosen]) & (asked != NO_NUMBER)
        made["ack"] = np.where(is_answer, asked, 0) & 0xFFFFFFFF
        made["flags"] = np.where(is_answer, SYN | ACK, SYN)
        made["side"] = side[chosen]
        made["endpoints"] = rows[chosen]
        parts.append(made)
    return np.concatenate(parts)


def known_of(pairs: Rows) -> Known:
    """What the kernels must know of each pair's first connection."""
    is_cut = pairs["kind"] == CUT
    protocol = np.where(is_cut, pairs["protocol"], 0)
    # its records begin anywhere: what the handshake told is told already
    protocol = np.where(protocol == Protocol.TLS, Protocol.OTHER, protocol).astype(np.uint8)
    bits = np.where(is_cut[:, None], pairs["bits"], 0).reshape(-1)
    has_loss = (is_cut & (pairs["has_loss"] != 0)).astype(np.uint8)
    none = np.zeros(0, np.int64)
    client_side = pairs["client_side"].copy()
    return Known(np.ascontiguousarray(bits), protocol, client_side, none, none, has_loss)


def digests(table: Rows) -> Ints:
    """int64[n]: a hash of all that a row of EXCHANGE or ANOMALY says, but for its references."""
    state = np.zeros(len(table), np.uint64)
    for column in _columns(table):
        state = mixed(state, column.astype(np.int64))
    return state.view(np.int64)


_REFERENCES = {"connection", "extent_start", "extent_count", "confidence"}


def _columns(table: Rows) -> list[Any]:
    assert table.dtype.names is not None
    found: list[Any] = []
    for name in table.dtype.names:
        if table.dtype[name].names is not None:
            found += _columns(table[name])
        elif name not in _REFERENCES:
            found.append(table[name])
    return found


# -- where to cut ---------------------------------------------------------------------------


class Cut(NamedTuple):
    """By side of a connection the position of the cut; of request and response frames before it
    what `framing` and `pairing` must know. id_low > id_high: no requests."""

    at: tuple[int, int]
    bits: tuple[int, int]
    id_low: int
    id_high: int


class Spans(NamedTuple):
    """Of exchanges, by direction: which sides are there and whole, and the stream positions where
    they begin and end, as in this run."""

    has: Sequence[Bools]
    is_whole: Sequence[Bools]
    pos: Sequence[Ints]
    end: Sequence[Ints]

    @staticmethod
    def of(exchanges: Rows, pos: Sequence[Ints]) -> Spans:
        sides = [exchanges[name] for name in SIDES]
        return Spans(
            [side["size"] >= 0 for side in sides],
            [side["is_whole"] != 0 for side in sides],
            pos,
            [at + 4 + side["size"] for at, side in zip(pos, sides, strict=True)],
        )

    def part(self, some: slice) -> Spans:
        has, is_whole, pos, end = self
        return Spans(
            [column[some] for column in has],
            [column[some] for column in is_whole],
            [column[some] for column in pos],
            [column[some] for column in end],
        )


def cut_of(
    client: int,
    limits: list[int],
    exchanges: Rows | None,
    spans: Spans,
    is_final: Bools,
) -> Cut | None:
    """Where to cut a connection; None where nothing would be before it.

    limits: by direction, the position up to which it may be cut. exchanges: those of the
    connection; None where it is not Kafka's. is_final: of each, whether no later packet changes it.
    """
    at: list[int] | None = [max(0, limit) for limit in limits]
    if exchanges is not None:
        at = _boundary(spans, is_final, limits)
    if at is None or not any(at):
        return None
    bits, low, high = [0, 0], 1, 0
    if exchanges is not None:
        bits, low, high = _before(exchanges, spans, at)
    order = (0, 1) if client == 0 else (1, 0)  # directions by side
    return Cut((at[order[0]], at[order[1]]), (bits[order[0]], bits[order[1]]), low, high)


def _boundary(spans: Spans, is_final: Bools, limits: list[int]) -> list[int] | None:
    """By direction the last positions up to `limits` that end a frame, such that what is before
    them is final and no exchange lies on both sides. None where the search takes too long."""
    has, is_whole, pos, end = spans
    at = list(limits)
    both = has[REQUEST] & has[RESPONSE]
    for _ in range(TURNS_MAX):
        for way in (REQUEST, RESPONSE):
            stays = has[way] & (end[way] > at[way])
            stays |= has[way] & ~is_final
            first = pos[way][stays]
            stop = min(at[way], int(first.min())) if len(first) else at[way]
            # a hole right before the cut might grow: it would be two
            ends = end[way][is_whole[way] & (end[way] <= stop)]
            at[way] = int(ends.max()) if len(ends) else 0
        before = [has[way] & (end[way] <= at[way]) for way in (REQUEST, RESPONSE)]
        wrong = both & (before[REQUEST] != before[RESPONSE])
        if not wrong.any():
            return at
        for way in (REQUEST, RESPONSE):
            some = pos[way][wrong & before[way]]
            if len(some):
                at[way] = min(at[way], int(some.min()))
    return None


def _before(exchanges: Rows, spans: Spans, at: list[int]) -> tuple[list[int], int, int]:
    """(bits of has_origin by direction, least and greatest id of the requests there)."""
    bits = [0, 0]
    ids = exchanges["correlation_id"].astype(np.int64) & 0xFFFFFFFF
    is_token = exchanges["is_sasl_token"] != 0
    low, high = 1, 0
    for way in (REQUEST, RESPONSE):
        pos = spans.pos[way]
        rows = np.flatnonzero(spans.has[way] & (pos < at[way]))
        if not len(rows):
            continue
        bits[way] |= RESUMED
        numbered = rows[~is_token[rows]]
        if len(numbered):
            bits[way] |= int(ids[_last_of(numbered, pos)] + 1) << LAST_ID
        if way == REQUEST:
            bits[RESPONSE] |= HAS_ASKED
            last = exchanges[_last_of(rows, pos)]
            is_bare = last["api_key"] == SASL_HANDSHAKE and last["api_version"] == 0
            if last["is_sasl_token"] or is_bare:
                bits[way] |= IN_TOKENS
            if len(numbered):
                low, high = int(ids[numbered].min()), int(ids[numbered].max())
    return bits, low, high


def _last_of(rows: Ints, pos: Ints) -> int:
    """The one of `rows` with the highest pos, of several the last."""
    backwards = rows[::-1]
    return int(backwards[np.argmax(pos[backwards])])


def may_pass(exchanges: Rows, is_done: Any, has_loss: bool) -> Bools:
    """Exchanges of one connection, in order, that may lie before a cut: those that are done, those
    without a request, and those whose answer was lost while later ones came."""
    answered = np.flatnonzero(exchanges["response"]["size"] >= 0)
    last = int(answered[-1]) if len(answered) else -1
    passed: Bools = np.array(is_done, np.bool_)
    passed |= exchanges["request"]["size"] < 0
    if has_loss:
        lost = exchanges["status"] == PairStatus.RESPONSE_MISSING
        passed |= lost & (np.arange(len(exchanges)) < last)
    return passed


BLANK = 0xFF  # reads as no request: its api key is none
_RESPONSE_HEAD = 9  # size, correlation id, and a byte that a search for responses looks at


def secret_ranges(exchanges: Rows, pos: list[Ints], way: int, client_ids: Ints) -> Any:
    """int64[n, 2]: of the messages of one direction the stream positions to overwrite.

    pos: by direction, positions as in this run; client_ids: bytes of each request's client id.
    """
    size = exchanges[SIDES[way]]["size"]
    some = np.flatnonzero(size >= 0)
    head = np.full(len(exchanges), _RESPONSE_HEAD)
    if way == REQUEST:
        head = 14 + client_ids
    head = np.where(exchanges["is_sasl_token"] != 0, 4, head)
    start = pos[way] + head
    return np.stack([start, np.maximum(start, pos[way] + 4 + size)], 1)[some]


def overwrite(data: Any, segments: Rows, place: Ints, ranges: Any) -> None:
    """Blank the ranges of stream positions in the bytes of segments that begin at `place`."""
    at, captured = segments["pos"].tolist(), segments["captured"].tolist()
    for start, end in ranges.tolist():
        for row in np.flatnonzero((place < end) & (place + segments["length"] > start)).tolist():
            low, high = max(0, start - int(place[row])), min(captured[row], end - int(place[row]))
            data[at[row] + low : at[row] + max(low, high)] = BLANK


def frozen_duplicates(streams: Streams, kept: Ints, count: int) -> Ints:
    """int64[count]: by source, second copies among the segments that are not kept."""
    is_second = streams.mark == DUPLICATE
    is_second[kept] = False
    segments = take(streams.segments, np.flatnonzero(is_second))
    is_counted = (segments["ip_id"] & FRAGMENT_PART) == 0
    return np.bincount(segments["source"][is_counted], minlength=count).astype(np.int64)


def base_of(pairs: Rows, assembly: Assembly, is_cut: Any) -> list[Ints]:
    """By direction, int64 of each connection: what positions of this run are moved by."""
    connections = assembly.connections
    pair = connections["endpoints"]
    client = connections["client_side"].astype(np.int64)
    return [np.where(is_cut, pairs["base"][pair, client ^ way], 0) for way in (REQUEST, RESPONSE)]
