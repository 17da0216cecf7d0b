"""Connections that go on where an earlier run ended, exactly as if there had been one run.

Theory of operation
-------------------
A run leaves connections open. What it keeps of them (`tails.Open`) is enough to assemble what comes
later as one run over everything would, without the captures:

*Whole.* Of a small connection all segments with their bytes. They are assembled again, together
with the new ones.

*Cut.* Of a larger one the segments behind a cut: a position in each of its two streams that ends a
frame, with no exchange on both sides of it, no hole before it that may still be filled, and no
segment before it that is young enough for a copy or a retransmission to come. What lies before it
is final. Behind it the same kernels run, from a SYN made for the purpose, with what they would
have learnt before (`assemble.Known`); positions, ids and counters are moved back afterwards.

*Over.* Of a connection closed a while ago nothing but its endpoints, so that the next one there has
the right number.

Nothing is believed that can be tried: behind each new cut the kernels run at once, as they will in
the next run. Exchanges and anomalies must come out as they did without the cut, else the pair stays
as it was; counters before the cut are what is left when those behind it are taken away.

*Final and open.* A row is final when no later packet changes it. Those of an exchange are when both
its frames are whole and settled on a connection that is certainly Kafka's, or when the cut is
behind it. Those of a connection, and its anomalies behind the cut, are open while the connection is
kept. Exchanges that are final but kept with bytes are named (`shown`), each with a digest: the next
run assembles them again, gives them no rows, and compares.

*What does not fit.* A segment with bytes before a cut, a copy of an old SYN, a stray segment of a
connection that was over, an answer that may belong to a request before the cut, a shown exchange
that comes out differently: each would need what is gone. `Rejoined.unfit` then says why, and the
run must be done over the captures themselves.

What remains different from one run over all: a response whose request was not captured is told by
the requests around it (`pipeline.infer`), and those before a cut are known no more; and a
connection of `looked_at` bytes that nothing was recognised in stays `other`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.arrays import is_any_of, joined, take
from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SYN, SegmentBatch
from kdissect.kafka.assemble import assemble_streams
from kdissect.kafka.assembly import (
    DIRECTION,
    EXTENT,
    Anomaly,
    Assembly,
    CloseReason,
    PairStatus,
    Protocol,
)
from kdissect.kafka.framing import HAS_ASKED
from kdissect.kafka.options import StreamOptions
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.resume.placing import FAR, NO_NUMBER, behind, places
from kdissect.resume.tails import (
    CUT,
    OVER,
    PAIR,
    SHOWN,
    WHOLE,
    Cut,
    Ints,
    Keeping,
    Open,
    Rows,
    Spans,
    base_of,
    cut_of,
    digests,
    frozen_duplicates,
    known_of,
    may_pass,
    openings,
    overwrite,
    secret_ranges,
)
from kdissect.tcp.columns import (
    CONNECTION_WIDTH,
    FIN_AT,
    GAP_COUNT,
    HAS_DATA,
    HAS_SYN,
    INCARNATION,
    LOW,
    NO_ACK,
    ORIGIN,
    SIDE_WIDTH,
)
from kdissect.tcp.connection_ids import connection_ids, exchange_ids
from kdissect.tcp.reassembly import REORDERED, Streams

Bools = npt.NDArray[np.bool_]
STABLE_AFTER = 4  # whole exchanges that leave no doubt that a connection is Kafka's
FINAL, OPEN, SHOWN_BEFORE = range(3)  # lanes of rows

# Protocols that their first bytes tell, whatever comes later.
_TOLD_AT_ONCE = (Protocol.HTTP, Protocol.HTTP2, Protocol.ZOOKEEPER)
TLS_HANDSHAKE_BYTES = 64 << 10  # in which both sides have said hello and shown certificates


@dataclass(frozen=True, slots=True)
class Rejoined:
    """A bucket's connections, those that go on and new ones.

    assembly: as of one run over everything. pairs: by row of its endpoints, what was known before.
    is_cut: connections that go on behind a cut. pos: by direction, positions of exchanges in this
    run. counted: DIRECTION of connections, of this run alone. is_shown: exchanges that have rows.
    facts: by connection, what was told before. unfit: why this is not what one run would give.
    """

    assembly: Assembly
    streams: Streams
    pairs: Rows
    is_cut: Bools
    pos: list[Ints]
    counted: Rows
    is_shown: Bools
    facts: dict[int, Any]
    unfit: str | None


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept for a later run, and the lanes (FINAL, OPEN, SHOWN_BEFORE) of rows until then.

    duplicates: int64 by source, second copies that no later run will count again. told: by row of
    open.pairs the connections kept, for their facts. is_secret: a message that must not be kept as
    it is is not complete.
    """

    open: Open
    exchanges: npt.NDArray[np.int8]
    connections: npt.NDArray[np.int8]
    anomalies: npt.NDArray[np.int8]
    duplicates: Ints
    told: dict[int, list[int]]
    is_secret: bool


# -- going on -------------------------------------------------------------------------------


def joined_batch(before: Open, batches: list[SegmentBatch]) -> tuple[SegmentBatch, Rows, Ints]:
    """(all segments, PAIR by row of its endpoints, where the pairs of `before` are there)."""
    if not len(before.pairs):
        batch = batches[0] if len(batches) == 1 else SegmentBatch.concat(batches)
        pairs = np.zeros(len(batch.endpoints), PAIR)
        pairs["id_low"] = 1
        return batch, pairs, np.zeros(0, np.int64)
    kept = np.concatenate([openings(before.pairs), before.segments])
    batch = SegmentBatch.concat([SegmentBatch(before.endpoints, kept), *batches])
    both = np.concatenate([batch.endpoints, before.endpoints])
    raw = np.frombuffer(both.tobytes(), f"V{both.itemsize}")
    at = np.unique(raw, return_inverse=True)[1].reshape(-1)[len(batch.endpoints) :]
    pairs = np.zeros(len(batch.endpoints), PAIR)
    pairs["id_low"] = 1
    pairs[at] = before.pairs
    return batch, pairs, at


def rejoin(
    before: Open,
    batch: SegmentBatch,
    pairs: Rows,
    at: Ints,
    sources: Sources,
    options: StreamOptions,
    key_logs: Sequence[Any],
    old_count: int,
) -> Rejoined:
    """Assemble what was kept and what is new; sources below `old_count` are of earlier runs."""
    known = known_of(pairs) if len(before.pairs) else None
    assembly, streams, _ = assemble_streams(batch, sources, options, key_logs, known)
    connections, exchanges = assembly.connections, assembly.exchanges
    pair = connections["endpoints"]
    incarnation = streams.connections.reshape(-1, CONNECTION_WIDTH)[:, INCARNATION]
    is_cut = (incarnation == 0) & (pairs["kind"][pair] == CUT)
    counted = connections["direction"].copy()
    pos = [exchanges[name]["pos"].copy() for name in SIDES]
    is_shown = np.zeros(len(exchanges), np.bool_)
    facts: dict[int, Any] = {}
    if not len(before.pairs):
        return Rejoined(assembly, streams, pairs, is_cut, pos, counted, is_shown, facts, None)
    unfit = _misfit(streams, assembly, pairs, is_cut, old_count, options)
    _move(assembly, pairs, is_cut, incarnation)
    first = np.searchsorted(pair, np.arange(len(pairs)))
    for row, told in before.facts.items():
        for number, one in enumerate(told):
            facts[int(first[at[row]]) + number] = one
    if _differs(assembly, pairs, old_count):
        unfit = unfit or "bytes come again that were not kept as they are"
    is_shown = np.isin(exchanges["exchange_id"], before.shown["exchange_id"])
    again = digests(exchanges[is_shown])
    if not np.array_equal(np.sort(again), np.sort(before.shown["digest"])):
        unfit = unfit or "packets changed what was final"
    return Rejoined(assembly, streams, pairs, is_cut, pos, counted, is_shown, facts, unfit)


def _move(assembly: Assembly, pairs: Rows, is_cut: Bools, incarnation: Ints) -> None:
    """Ids, positions, counters and what the handshake told, as of the whole connections."""
    connections, exchanges = assembly.connections, assembly.exchanges
    pair = connections["endpoints"]
    known = pairs[pair]
    for name in ("first_time_ns", "handshake_rtt_ns", "handshake_seen", "is_tls", "protocol"):
        connections[name] = np.where(is_cut, known[name], connections[name])
    last = np.maximum(known["last_time_ns"], connections["last_time_ns"])
    connections["last_time_ns"] = np.where(is_cut, last, connections["last_time_ns"])
    for name in DIRECTION.names or ():
        more = np.where(is_cut[:, None], known["direction"][name], 0)
        connections["direction"][name] += more
    number = incarnation + known["incarnation"] + (known["kind"] == OVER)
    connections["connection_id"] = connection_ids(
        assembly.endpoints, pair, connections["first_time_ns"], number
    )
    base = base_of(pairs, assembly, is_cut)
    of = exchanges["connection"]
    for way, name in enumerate(SIDES):
        side = exchanges[name]
        side["pos"] = np.where(side["size"] >= 0, side["pos"] + base[way][of], side["pos"])
    asked = exchanges["request"]["size"] >= 0
    place = np.where(asked, exchanges["request"]["pos"], exchanges["response"]["pos"])
    before = exchanges["exchange_id"].copy()
    exchanges["exchange_id"] = exchange_ids(
        connections["connection_id"][of], np.where(asked, REQUEST, RESPONSE), place
    )
    anomalies = assembly.anomalies
    if not len(anomalies):
        return
    there = np.flatnonzero(anomalies["exchange_id"] != 0)
    order = np.argsort(before)
    found = order[np.searchsorted(before[order], anomalies["exchange_id"][there])]
    anomalies["exchange_id"][there] = exchanges["exchange_id"][found]
    of = anomalies["connection"]
    by_way = [base[REQUEST][of], base[RESPONSE][of], np.zeros(len(of), np.int64)]
    moved = np.choose(anomalies["direction"], by_way)
    anomalies["pos"] += np.where(anomalies["pos"] >= 0, moved, 0)


def _misfit(
    streams: Streams, assembly: Assembly, pairs: Rows, is_cut: Bools, old_count: int,
    options: StreamOptions,
) -> str | None:  # fmt: skip
    """Why what is gone would be needed; before anything is moved."""
    sides = streams.sides.reshape(-1, SIDE_WIDTH)
    connections = assembly.connections
    pair = connections["endpoints"]
    cut = np.flatnonzero(is_cut)
    for side in (0, 1):
        stream = sides[2 * cut + side]
        begun = pairs["seq"][pair[cut], side] != NO_NUMBER
        if (begun & (stream[:, HAS_DATA] != 0) & (stream[:, LOW] < stream[:, ORIGIN])).any():
            return "segments come again that were final"
    gaps = sides[:, GAP_COUNT].reshape(-1, 2)[cut].max(axis=1, initial=0)
    before = pairs["direction"]["gap_count"][pair[cut]].max(axis=1, initial=0)
    if (gaps + before > options.gaps_max).any():
        return "a stream has more gaps than are listed"
    if _strays(streams, connections, pairs, old_count):
        return "segments belong to connections that were over or cut"
    anomalies = assembly.anomalies
    late = anomalies["kind"] == Anomaly.RESPONSE_WITHOUT_REQUEST
    late &= (anomalies["source"] >= old_count) & is_cut[anomalies["connection"]]
    number = anomalies["a"][late] & 0xFFFFFFFF
    known = pairs[pair[anomalies["connection"][late]]]
    if ((known["id_low"] <= number) & (number <= known["id_high"])).any():
        return "a response may answer a request that was final"
    return None


def _differs(assembly: Assembly, pairs: Rows, old_count: int) -> bool:
    """Whether new packets differ from bytes that were overwritten."""
    anomalies = assembly.anomalies
    is_new = (anomalies["kind"] == Anomaly.OVERLAP_CONFLICT) & (anomalies["source"] >= old_count)
    pair = assembly.connections["endpoints"][anomalies["connection"][is_new]]
    return bool(pairs["is_blank"][pair].any())


def _strays(streams: Streams, connections: Rows, pairs: Rows, old_count: int) -> bool:
    """Whether new segments may be of connections whose beginning, or all of them, is gone."""
    segments = streams.segments
    of_pair = connections["endpoints"][streams.connection]
    kind = pairs["kind"][of_pair]
    is_new = segments["source"] >= old_count
    is_syn = (segments["flags"] & SYN) != 0
    # SYNs like those a cut connection began with, or begins with here
    rows = np.flatnonzero(is_new & is_syn & (kind == CUT))
    if len(rows):
        known, side = pairs[of_pair[rows]], segments["side"][rows]
        number = (segments["seq"][rows].astype(np.int64) + 1) & 0xFFFFFFFF
        index = np.arange(len(rows))
        syn, seq, base = (known[name][index, side] for name in ("syn", "seq", "base"))
        start = (seq - base) & 0xFFFFFFFF
        before = (start - number) & 0xFFFFFFFF
        is_late = (syn == NO_NUMBER) & (seq != NO_NUMBER) & (before < REORDERED)
        if ((number == syn) | (number == seq) | is_late).any():
            return True
    rows = np.flatnonzero(kind == OVER)
    if not len(rows):
        return False
    rows = rows[np.unique(of_pair[rows], return_index=True)[1]]  # the first of each pair
    known, side = pairs[of_pair[rows]], segments["side"][rows]
    number = (segments["seq"][rows].astype(np.int64) + 1) & 0xFFFFFFFF
    syn = known["syn"][np.arange(len(rows)), side]
    began = (known["syn"] != NO_NUMBER).any(axis=1)
    is_fresh = is_syn[rows] & np.where(began, (syn != NO_NUMBER) & (syn != number), True)
    return not bool(is_fresh.all())


# -- what is kept ---------------------------------------------------------------------------


class Keeper:
    """What a later run needs of this one; arrays are by connection where nothing else is said.

    is_done: by exchange, whether it is final whatever is kept.
    """

    def __init__(
        self, run: Rejoined, sources: Sources, options: StreamOptions, keeping: Keeping
    ) -> None:
        self.run, self.sources, self.options, self.keeping = run, sources, options, keeping
        self.assembly, self.streams = run.assembly, run.streams
        self.connections = run.assembly.connections
        self.exchanges = run.assembly.exchanges
        self.of = self.exchanges["connection"].astype(np.int64)
        self.count = len(self.connections)
        self.pair = self.connections["endpoints"].astype(np.int64)
        self.sides = run.streams.sides.reshape(-1, SIDE_WIDTH)
        self.incarnation = run.streams.connections.reshape(-1, CONNECTION_WIDTH)[:, INCARNATION]
        self.client = self.connections["client_side"].astype(np.int64)
        self.places = places(run.streams, keeping.end_ns, keeping.keep_ns, keeping.linger_ns)
        self.spans = Spans.of(self.exchanges, run.pos)
        self.is_secret = np.isin(self.exchanges["api_key"], list(keeping.secret_apis))
        self.is_secret |= (self.exchanges["is_sasl_token"] != 0) & bool(keeping.secret_apis)
        self.first_exchange = np.searchsorted(self.of, np.arange(self.count + 1))
        self._sort_out()

    def kept(self) -> Kept | None:
        """What a later run needs; None where that is too much to keep."""
        cuts = self._cuts()
        made = self._made(cuts)
        if made is None:
            return None
        tried = self._tried(made) if cuts else None
        if tried is not None:
            wrong = self._wrong(tried, made)
            if wrong:
                cuts = {row: cut for row, cut in cuts.items() if row not in wrong}
                made = self._made(cuts)
                assert made is not None
                tried = self._tried(made) if cuts else None
                wrong = self._wrong(tried, made) if tried is not None else set()
                assert not wrong, "a cut changes others"
        return self._told(made, tried)

    def _sort_out(self) -> None:
        """Which connections are kept, and which exchanges are final."""
        pair_count = len(self.run.pairs)
        is_last = np.append(self.pair[1:] != self.pair[:-1], True)[: self.count]
        has_fin = (self.sides[:, FIN_AT] != NO_ACK).reshape(-1, 2).all(axis=1)
        is_closed = has_fin | (self.connections["close_reason"] == CloseReason.RST)
        last_time = self.connections["last_time_ns"]
        is_quiet = last_time < self.keeping.end_ns - self.keeping.linger_ns
        is_recent = np.zeros(pair_count, np.bool_)
        is_recent[self.pair[~is_last & ~is_quiet]] = True
        self.is_recent = is_recent
        self.is_over = is_last & is_closed & is_quiet & ~is_recent[self.pair]
        self.is_kept = (is_last & ~self.is_over) | is_recent[self.pair]
        self.is_last = is_last
        exchanges = self.exchanges
        has, is_whole, _, end = self.spans
        both = has[REQUEST] & has[RESPONSE]
        whole = both & is_whole[REQUEST] & is_whole[RESPONSE]
        is_stable = np.bincount(self.of[whole], minlength=self.count) >= STABLE_AFTER
        first = self.first_exchange[:-1]
        some = np.flatnonzero(self.first_exchange[1:] > first)
        head = take(exchanges, first[some])
        begins = (self.run.pos[REQUEST][first[some]] == 0) & (head["request"]["size"] >= 0)
        begins &= (head["api_key"] >= 0) & (head["is_sasl_token"] == 0)
        begins &= self.sides[2 * some + self.client[some], HAS_SYN] != 0
        is_stable[some] |= begins & (np.bincount(self.of[whole], minlength=self.count)[some] > 0)
        self.is_stable = is_stable | self.run.is_cut
        limit = self.places.settled
        number = [2 * self.of + (self.client[self.of] ^ way) for way in (REQUEST, RESPONSE)]
        is_in = [~has[way] | (end[way] <= limit[number[way]]) for way in (REQUEST, RESPONSE)]
        silent = exchanges["status"] == PairStatus.NO_RESPONSE_EXPECTED
        done = (both | (silent & has[REQUEST])) & is_in[REQUEST] & is_in[RESPONSE]
        done &= self.is_stable[self.of]
        self.is_done = done | self.run.is_shown

    def _cuts(self) -> dict[int, Cut]:
        """By connection: new cuts."""
        captured = self.run.counted["byte_count"].sum(axis=1)
        protocol = self.connections["protocol"]
        is_known = (protocol == Protocol.KAFKA) & self.is_stable
        is_known |= np.isin(protocol, [int(one) for one in _TOLD_AT_ONCE])
        is_known |= (protocol == Protocol.TLS) & (captured >= TLS_HANDSHAKE_BYTES)
        other = (protocol == Protocol.OTHER) & (captured >= self.keeping.looked_at)
        wanted = self.is_last & self.is_kept & ~self.is_recent[self.pair]
        wanted &= (is_known & (captured >= self.keeping.cut_bytes)) | other
        wanted |= self.is_last & self.is_kept & self.run.is_cut & ~self.is_recent[self.pair]
        limit = np.minimum(self.places.settled, self.places.quiet)
        cuts = {}
        for connection in np.flatnonzero(wanted).tolist():
            some = slice(self.first_exchange[connection], self.first_exchange[connection + 1])
            exchanges, final = None, np.zeros(0, np.bool_)
            if protocol[connection] == Protocol.KAFKA:
                exchanges = self.exchanges[some]
                counts = self.connections["direction"]["missing_byte_count"]
                lossy = bool(counts[connection, RESPONSE] > 0)
                final = may_pass(exchanges, self.is_done[some], lossy)
            client = int(self.client[connection])
            cut = cut_of(
                client,
                [int(limit[2 * connection + (client ^ way)]) for way in (REQUEST, RESPONSE)],
                exchanges,
                self.spans.part(some),
                final,
            )
            if cut is not None:
                cuts[connection] = cut
        return cuts

    # -- packing ----------------------------------------------------------------------------

    def _made(self, cuts: dict[int, Cut]) -> Open | None:
        """What is kept with these cuts, without counters, shown exchanges and facts; None where it
        is too much."""
        run = self.run
        is_kept = np.zeros(len(run.pairs), np.bool_)
        is_kept[self.pair[self.is_kept | self.is_over]] = True
        is_kept |= run.pairs["kind"] == OVER
        rows = np.flatnonzero(is_kept)
        pairs = run.pairs[rows].copy()
        new = np.full(len(run.pairs), -1, np.int64)
        new[rows] = np.arange(len(rows))
        first = np.flatnonzero(self.is_kept | self.is_over)[::-1]
        one = np.full(len(rows), -1, np.int64)
        one[new[self.pair[first]]] = first  # the first connection kept of each pair stays
        self.one = one
        met = np.flatnonzero(one >= 0)
        kind = np.where(self.is_over[one[met]], OVER, WHOLE)
        pairs["kind"][met] = np.where(run.is_cut[one[met]] & (kind == WHOLE), CUT, kind)
        was_over = run.pairs["kind"][rows[met]] == OVER
        begin = run.pairs["incarnation"][rows[met]] + was_over
        pairs["incarnation"][met] = begin + self.incarnation[one[met]]
        for name in ("first_time_ns", "last_time_ns", "protocol", "is_tls", "client_side",
                     "handshake_seen", "handshake_rtt_ns"):  # fmt: skip
            pairs[name][met] = self.connections[name][one[met]]
        self._tell_syns(pairs, met)
        as_is = self.is_kept.copy()
        as_is[list(cuts)] = False
        rows_as_is = np.flatnonzero(as_is[self.streams.connection])
        rows_as_is = rows_as_is[self.streams.segments["packet"][rows_as_is] > 0]
        self.rows_as_is = rows_as_is
        as_they_are = take(self.streams.segments, rows_as_is)
        as_they_are["endpoints"] = new[self.pair[self.streams.connection[rows_as_is]]]
        for connection, cut in cuts.items():
            self._cut(pairs, int(new[self.pair[connection]]), connection, cut)
        cut_now = np.array(list(cuts), np.int64)
        stream = (2 * cut_now[:, None] + np.arange(2)).reshape(-1)
        at = np.array([cut.at for cut in cuts.values()], np.int64).reshape(-1)
        kept, rows_behind, of = behind(self.streams, self.places, stream, at)
        kept["endpoints"] = new[self.pair[stream[of] >> 1]]
        segments = joined([as_they_are, kept])
        rows_kept = np.concatenate([rows_as_is, rows_behind])
        if int(segments["captured"].sum(dtype=np.int64)) > self.keeping.data_max:
            return None
        order = np.lexsort((segments["packet"], segments["source"], segments["endpoints"]))
        segments = segments[order]
        extents = np.zeros(len(segments), EXTENT)
        for name, column in (("pos", "pos"), ("length", "captured"), ("source", "source")):
            extents[name] = segments[column]
        data = self.sources.gather(extents[extents["length"] > 0]).copy()
        captured = segments["captured"].astype(np.int64)
        segments["pos"] = np.cumsum(captured) - captured
        self._overwrite(pairs, segments, rows_kept[order], new, data)
        self.row_of_pair = new
        self.cut_rows = {int(new[self.pair[connection]]): connection for connection in cuts}
        return Open(self.assembly.endpoints[rows], pairs, segments, data)

    def _overwrite(self, pairs: Rows, segments: Rows, rows: Ints, new: Ints, data: Any) -> None:
        """Blank secret messages that are complete, in kept segments, which are `rows` of all."""
        secret = np.flatnonzero(self.is_secret & self.is_done & self.is_kept[self.of])
        connection_of = self.streams.connection[rows]
        for connection in np.unique(self.of[secret]).tolist():
            some = secret[self.of[secret] == connection]
            mine = np.flatnonzero(connection_of == connection)
            for way in (REQUEST, RESPONSE):
                stream = 2 * connection + int(self.client[connection] ^ way)
                here = self.places.of(stream)
                chosen = mine[np.isin(rows[mine], here.rows)]
                at = np.searchsorted(here.rows, rows[chosen])
                trimmed = here.length[at] - segments["length"][chosen]
                ranges = secret_ranges(
                    take(self.exchanges, some),
                    [pos[some] for pos in self.run.pos],
                    way,
                    self._client_ids(some),
                )
                overwrite(data, segments[chosen], here.place[at] + trimmed, ranges)
            pairs["is_blank"][new[self.pair[connection]]] = 1

    def _client_ids(self, rows: Ints) -> Ints:
        """int64[n]: how long the client ids of requests are; their extents hold them whole."""
        found = np.zeros(len(rows), np.int64)
        requests = self.exchanges["request"]
        for number, row in enumerate(rows.tolist()):
            start = int(requests["extent_start"][row])
            extents = self.assembly.extents[start : start + int(requests["extent_count"][row])]
            head = self.sources.gather(extents)[8:10].tobytes()
            found[number] = max(0, int.from_bytes(head, "big", signed=True))
        return found

    def _tell_syns(self, pairs: Rows, met: Ints) -> None:
        """Sequence numbers of position 0 of each pair's connection, where a SYN told it."""
        is_old = pairs["kind"][met] == CUT
        fresh = met[~is_old]
        pairs["syn"][fresh] = NO_NUMBER
        where = np.full(self.count, -1, np.int64)
        where[self.one[fresh]] = fresh
        segments = self.streams.segments
        rows = np.flatnonzero(segments["flags"] & SYN)[::-1]
        rows = rows[segments["packet"][rows] > 0]
        to = where[self.streams.connection[rows]]
        rows, to = rows[to >= 0], to[to >= 0]
        number = (segments["seq"][rows].astype(np.int64) + 1) & 0xFFFFFFFF
        pairs["syn"][to, segments["side"][rows]] = number  # the first one stays
        over = met[pairs["kind"][met] == OVER]  # of one that went on behind a cut
        went_on = over[self.run.is_cut[self.one[over]]]
        pairs["syn"][went_on] = self.run.pairs["syn"][self.pair[self.one[went_on]]]

    def _cut(self, pairs: Rows, row: int, connection: int, cut: Cut) -> None:
        """Fill the row of a pair whose connection is cut now."""
        went_on = bool(self.run.is_cut[connection])
        pair = pairs[row]
        pair["kind"] = CUT
        if not went_on:
            pair["id_low"], pair["id_high"], pair["bits"], pair["base"] = 1, 0, 0, 0
        for side in (0, 1):
            begun = went_on and pair["seq"][side] != NO_NUMBER
            has_syn = self.sides[2 * connection + side, HAS_SYN] != 0
            at, seq = cut.at[side], int(self.places.seq[2 * connection + side])
            if (at or has_syn or begun) and seq != NO_NUMBER:
                pair["seq"][side] = (seq + at) & 0xFFFFFFFF
            elif not begun:
                pair["seq"][side] = NO_NUMBER
            pair["base"][side] += at
            kept_bits = int(pair["bits"][side])
            if at:
                pair["bits"][side] = cut.bits[side] | kept_bits & HAS_ASKED
            else:
                pair["bits"][side] = kept_bits | cut.bits[side] & HAS_ASKED
        if cut.id_low <= cut.id_high:
            had = pair["id_low"] <= pair["id_high"]
            pair["id_low"] = min(cut.id_low, pair["id_low"]) if had else cut.id_low
            pair["id_high"] = max(cut.id_high, pair["id_high"]) if had else cut.id_high

    # -- trying -----------------------------------------------------------------------------

    def _tried(self, made: Open) -> Rejoined:
        """What the kernels say behind the new cuts, and nothing else."""
        rows = np.array(sorted(self.cut_rows), np.int64)
        some = made.of_pairs(rows)
        some.pairs["direction"] = np.zeros(1, PAIR)["direction"]
        batch, pairs, at = joined_batch(some, [])
        sources = self.sources.standing_in(len(self.sources), some.data)
        return rejoin(some, batch, pairs, at, sources, self.options, (), len(self.sources))

    def _wrong(self, tried: Rejoined, made: Open) -> set[int]:
        """Connections that come out differently behind their cut; takes counters of the others."""
        theirs, counts = tried.assembly.connections, made.pairs["direction"]
        rows = np.array(sorted(self.cut_rows), np.int64)
        ours = np.array([self.cut_rows[row] for row in rows.tolist()], np.int64)
        order = np.argsort(self.connections["connection_id"][ours])
        ids = self.connections["connection_id"][ours[order]]
        at = np.minimum(np.searchsorted(ids, theirs["connection_id"]), len(ids) - 1)
        is_ours = ids[at] == theirs["connection_id"]
        mine = np.where(is_ours, ours[order[at]], -1)  # by connection of theirs
        alike = is_ours & (theirs["close_reason"] == self.connections["close_reason"][mine])
        alike &= theirs["last_time_ns"] == self.connections["last_time_ns"][mine]
        alike &= theirs["protocol"] == self.connections["protocol"][mine]
        wrong = set(ours.tolist()) - set(mine[alike].tolist())
        to = rows[order[at[alike]]]
        for name in DIRECTION.names or ():
            left = self.connections["direction"][name][mine[alike]] - tried.counted[name][alike]
            counts[name][to] = left
        missing = counts["missing_byte_count"][to, RESPONSE]
        made.pairs["has_loss"][to] = missing > 0
        base = np.full((self.count, 2), FAR)  # nothing is behind where nothing is cut
        base[ours] = made.pairs["base"][rows]
        for table, again in (
            (self.exchanges, tried.assembly.exchanges),
            (self.assembly.anomalies, tried.assembly.anomalies),
        ):
            of = table["connection"]
            some = np.flatnonzero(self._is_behind(table, base))
            found, got = digests(take(table, some)), digests(again)
            wrong |= set(of[some[~np.isin(found, got)]].tolist())
            wrong |= set(mine[again["connection"][~np.isin(got, found)]].tolist()) - {-1}
        return wrong

    def _is_behind(self, table: Rows, base: Ints) -> Bools:
        """Rows of EXCHANGE or ANOMALY that lie behind `base`, by connection and side."""
        of = table["connection"]
        is_behind = np.zeros(len(table), np.bool_)
        if "pos" in (table.dtype.names or ()):
            side = self.client[of] ^ (table["direction"] & 1)
            return np.asarray(table["pos"] >= base[of, side])
        connection = np.arange(self.count)
        for way, name in enumerate(SIDES):
            begin = base[connection, self.client ^ way]
            here = table[name]
            is_behind |= (here["size"] >= 0) & (here["pos"] >= begin[of])
        return is_behind

    # -- telling ----------------------------------------------------------------------------

    def _told(self, made: Open, tried: Rejoined | None) -> Kept:
        is_cut_now = np.zeros(self.count, np.bool_)
        is_cut_now[list(self.cut_rows.values())] = True
        again_ids, again_anomalies = np.zeros(0, np.int64), np.zeros(0, np.int64)
        duplicates = np.zeros(len(self.sources), np.int64)
        if tried is not None:
            again_ids = tried.assembly.exchanges["exchange_id"]
            again_anomalies = digests(tried.assembly.anomalies)
            duplicates = tried.assembly.duplicate_packets
        is_behind = is_any_of(self.exchanges["exchange_id"], again_ids)
        is_before = is_cut_now[self.of] & ~is_behind
        is_final = self.is_done | is_before | ~self.is_kept[self.of]
        lane = np.where(is_final, FINAL, OPEN).astype(np.int8)
        lane[self.run.is_shown] = SHOWN_BEFORE
        shown = np.flatnonzero(self.is_done & self.is_kept[self.of] & ~is_before)
        table = np.zeros(len(shown), SHOWN)
        table["exchange_id"] = self.exchanges["exchange_id"][shown]
        table["digest"] = digests(take(self.exchanges, shown))
        table["pair"] = self.row_of_pair[self.pair[self.of[shown]]]
        anomalies = self.assembly.anomalies
        of = anomalies["connection"]
        is_open = self.is_kept[of]
        is_open &= ~is_cut_now[of] | np.isin(digests(anomalies), again_anomalies)
        told: dict[int, list[int]] = {}
        for connection in np.flatnonzero(self.is_kept).tolist():
            row = int(self.row_of_pair[self.pair[connection]])
            told.setdefault(row, []).append(connection)
        secret = self.is_secret & self.is_kept[self.of] & ~self.is_done & ~is_before
        return Kept(
            replace(made, shown=table),
            lane,
            np.where(self.is_kept, OPEN, FINAL).astype(np.int8),
            np.where(is_open, OPEN, FINAL).astype(np.int8),
            frozen_duplicates(self.streams, self.rows_as_is, len(self.sources)) - duplicates,
            told,
            bool(secret.any()),
        )


def keep(run: Rejoined, sources: Sources, options: StreamOptions, keeping: Keeping) -> Kept | None:
    """What a later run needs; None where that is too much to keep."""
    return Keeper(run, sources, options, keeping).kept()
