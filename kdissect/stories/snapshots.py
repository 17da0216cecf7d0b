"""Snapshots put together again from their pieces (FetchSnapshot, KIP-630).

Theory of operation. A follower downloads a snapshot in pieces, each from a position on, cut without
regard to record batches. What lies whole in a piece is decoded where the piece is. Its edges travel
as *fragments*: the bytes in front of the first batch that is there whole (they begin where the
piece does, and end where a batch begins), those behind the last one (they begin with a batch), or
all of a piece in which no batch is whole. Fragments come in order of their position, so that a
`Joiner` holds little: of each download the bytes of one batch that is not complete.

A download is one follower's of one snapshot from one broker, on however many connections; a request
that is not in the capture leaves the follower unknown, and its connection stands for it. Bytes of a
snapshot never change, so a piece that was sent again adds only what lies behind those before. Of
fragments at one position one is kept, whatever order they came in. Behind a piece that is missing
nothing tells where a batch begins, until one lies whole, with the right CRC, in what came since.

What comes out: `JoinedBatches`, bytes that begin with a batch, to be decoded as a record set;
`Headless`, the end of a batch whose begin is in no piece; `Fault`. The place of each is the
fragment that
brought the last of the bytes.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kdissect.codec.batch_resync import first_batch
from kdissect.kafka.assembly import Anomaly

HELD_MAX = 256 << 20  # bytes of incomplete batches of all downloads; what is more is given up
_LENGTH_POS, _ENTRY_HEADER_SIZE, _ENTRY_LENGTH_MIN = 8, 12, 14
_ORDER_MAX = 2**63 - 1


class Snapshot(NamedTuple):
    """What is downloaded. broker: address and port, with a space between."""

    broker: str
    topic: str
    topic_id: str | None
    partition: int
    end_offset: int
    epoch: int
    size: int


@dataclass(frozen=True, slots=True)
class BatchFragment:
    """Bytes at an edge of a piece.

    follower: node id, -1 unknown. time_ns, capture_id, packet: of the response; pos: of the bytes
    in its stream. position: of the bytes in the snapshot; piece_end: the place behind their piece.
    is_first: they are where their piece begins. begins: with a batch. ends: where a batch begins.
    batch_index: of the batch that is completed or left open here; of further ones spare_index and
    every spare_step-th behind it.
    """

    snapshot: Snapshot
    follower: int
    connection_id: int
    exchange_id: int
    time_ns: int
    capture_id: int | None
    packet: int | None
    pos: int
    position: int
    piece_end: int
    is_first: bool
    begins: bool
    ends: bool
    batch_index: int
    spare_index: int
    spare_step: int
    data: bytes

    @property
    def end(self) -> int:
        """Place behind the bytes."""
        return self.position + len(self.data)

    @property
    def order(self) -> int:
        """By which fragments are sorted."""
        return min(self.position, _ORDER_MAX)

    def to_bytes(self) -> bytes:
        told = asdict(replace(self, data=b""))
        head = json.dumps(told | {"snapshot": tuple(self.snapshot), "data": ""}).encode()
        return len(head).to_bytes(4, "big") + head + self.data

    @staticmethod
    def from_bytes(data: bytes) -> BatchFragment:
        size = int.from_bytes(data[:4], "big")
        told = json.loads(data[4 : 4 + size])
        return BatchFragment(
            **(told | {"snapshot": Snapshot(*told["snapshot"]), "data": data[4 + size :]})
        )


@dataclass(frozen=True, slots=True)
class JoinedBatches:
    """Bytes that begin with a batch; if the last one is not whole, no more of it is there.

    first: number of batches that were told at this fragment before.
    """

    at: BatchFragment
    data: bytes
    first: int


@dataclass(frozen=True, slots=True)
class Headless:
    """`size` bytes of a batch whose begin is in no piece."""

    at: BatchFragment
    size: int


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong at a fragment; byte_count: bytes of the snapshot that this is about."""

    at: BatchFragment
    kind: Anomaly
    detail: str
    byte_count: int


Found = JoinedBatches | Headless | Fault
_Key = tuple[Snapshot, str, int]  # a download: of a follower, or on a connection


@dataclass(slots=True)
class _Download:
    """How far a download is known.

    end: the place behind the bytes that were looked at one after another, of which `held` are the
    last. is_aligned: they begin with a batch; `last` brought the last of them, and `told` batches
    before. Else `parts` has what brought them, with the place of the first byte of each in `held`.
    covered: the place behind all pieces, the last of which is that of `seen`.
    """

    end: int = 0
    covered: int = 0
    is_aligned: bool = False
    held: bytearray = field(default_factory=bytearray)
    told: int = 0
    last: BatchFragment | None = None
    parts: list[tuple[int, BatchFragment]] = field(default_factory=list)
    seen: BatchFragment | None = None


class Joiner:
    """Joins the fragments of any number of downloads."""

    def __init__(self, batch_size_max: int, held_max: int = HELD_MAX) -> None:
        """batch_size_max: bytes that a batch may have."""
        self.batch_size_max = batch_size_max
        self.held_max = held_max
        self._downloads: dict[_Key, _Download] = {}
        self._of_connection: dict[tuple[Snapshot, int], _Key] = {}
        self._held = 0

    def join(self, fragments: Iterable[BatchFragment]) -> Iterator[Found]:
        """What fragments sorted by `order` come to; in another order less is joined."""
        for _, group in groupby(fragments, key=lambda fragment: fragment.position):
            yield from self._at_one_position(group)
        for download in self._downloads.values():
            yield from self._finish(download)

    def _at_one_position(self, group: Iterable[BatchFragment]) -> Iterator[Found]:
        best: dict[tuple[_Key, bool], BatchFragment] = {}
        others: list[tuple[tuple[_Key, bool], BatchFragment, int, bytes]] = []
        for fragment in group:
            slot = self._key(fragment), fragment.is_first or not fragment.begins
            known = best.get(slot)
            if known is None:
                best[slot] = fragment
                continue
            piece_end = max(known.piece_end, fragment.piece_end)
            kept, other = sorted((known, fragment), key=_preference)
            best[slot] = replace(kept, piece_end=piece_end)
            digest = blake2b(other.data).digest()
            others.append((slot, replace(other, data=b""), len(other.data), digest))
        for slot, other, size, digest in others:
            data = best[slot].data
            # a longer one holds what the one that is kept knows as whole batches
            if size <= len(data) and blake2b(memoryview(data)[:size]).digest() != digest:
                detail = "a piece of a snapshot differs from another at its position, which counts"
                yield Fault(other, Anomaly.OVERLAP_CONFLICT, detail, size)
        # what ends at a position comes before what begins there
        for (key, _), fragment in sorted(best.items(), key=lambda item: item[0][1]):
            if fragment.follower >= 0:
                self._of_connection[fragment.snapshot, fragment.connection_id] = key
            download = self._downloads.setdefault(key, _Download())
            if fragment.position < 0:
                yield from _misplaced(fragment)
            elif fragment.begins and not fragment.is_first:
                yield from self._begin(download, fragment)
            else:
                yield from self._go_on(download, fragment)

    def _key(self, fragment: BatchFragment) -> _Key:
        snapshot, connection_id = fragment.snapshot, fragment.connection_id
        if fragment.follower >= 0:
            return snapshot, "follower", fragment.follower
        alone = snapshot, "connection", connection_id
        return self._of_connection.get((snapshot, connection_id), alone)

    def _go_on(self, download: _Download, fragment: BatchFragment) -> Iterator[Found]:
        """Bytes from where a piece begins."""
        missing = fragment.position - download.covered
        if fragment.position > download.end:
            yield from self._leave(download)
            download.end, download.is_aligned = fragment.position, False
        if missing > 0:
            yield _gap(fragment, download.covered, missing)
        self._cover(download, fragment)
        if fragment.end < download.end:
            return  # sent again
        data = fragment.data[download.end - fragment.position :]
        if fragment.begins:
            download.is_aligned = True
        elif data:
            empty = replace(fragment, data=b"")
            if download.is_aligned:
                download.last, download.told = empty, 0
            else:
                download.parts.append((len(download.held), empty))
            download.held += data
            self._held += len(data)
            if download.is_aligned:
                yield from self._walk(download)
            elif len(download.held) > self.batch_size_max or self._held > self.held_max:
                yield from self._search(download)
        download.end = fragment.end
        if fragment.ends:
            if not download.is_aligned:
                yield from self._search(download)
            if download.held and download.is_aligned:
                yield from self._cut_short(download, fragment)
            download.is_aligned = True

    def _begin(self, download: _Download, fragment: BatchFragment) -> Iterator[Found]:
        """The begin of a batch at the end of a piece."""
        if fragment.end < download.end or (fragment.end == download.end and fragment.data):
            return  # sent again
        if download.held:
            start = download.end - len(download.held)
            if fragment.position < start or not download.is_aligned:
                yield from self._leave(download)
            # else this piece is the same from there on, and longer
            self._drop(download)
        download.held += fragment.data
        self._held += len(fragment.data)
        download.is_aligned, download.end = True, fragment.end
        download.last, download.told = replace(fragment, data=b""), 0
        self._cover(download, fragment)
        yield from self._walk(download)

    @staticmethod
    def _cover(download: _Download, fragment: BatchFragment) -> None:
        if download.seen is None or fragment.piece_end > download.covered:
            download.seen = replace(fragment, data=b"")
            download.covered = max(download.covered, fragment.piece_end)

    def _walk(self, download: _Download) -> Iterator[Found]:
        """Give the batches that are complete; keep the rest."""
        held, last = download.held, download.last
        assert last is not None
        pos = count = size = 0
        while len(held) - pos >= _ENTRY_HEADER_SIZE:
            known = _entry_size(held, pos)
            if known is None:  # nothing says where the next batch begins
                yield from self._leave(download)
                download.is_aligned = False
                return
            size = known
            if pos + size > len(held):
                break
            pos, count, size = pos + size, count + 1, 0
        if count:
            yield JoinedBatches(last, bytes(held[:pos]), download.told)
            download.told += count
            del held[:pos]
            self._held -= pos
        limit = 0
        if size > self.batch_size_max:
            limit, name = self.batch_size_max, "frame_size"
        elif self._held > self.held_max:
            limit, name = self.held_max, "what is held of all of them"
        if limit:
            given_up = len(held)
            yield from self._leave(download)
            download.is_aligned = False
            detail = f"a batch in pieces of a snapshot is beyond the limit of {name}, {limit}"
            yield Fault(last, Anomaly.LIMIT, detail, given_up)

    def _search(self, download: _Download) -> Iterator[Found]:
        """Find where a batch begins in what is held, and give all up to the last whole batch."""
        data, parts = bytes(download.held), download.parts
        self._drop(download)
        if not data:
            return
        pos = first_batch(np.frombuffer(data, np.uint8))
        bounds = [start for start, _ in parts] + [len(data)]
        told = [0] * len(parts)
        for n, (start, fragment) in enumerate(parts):
            if pos > start:
                yield Headless(fragment, min(pos, bounds[n + 1]) - start)
                told[n] = 1
        while pos < len(data):
            size = _entry_size(data, pos)
            if size is None or pos + size > len(data):
                break
            n = bisect(bounds, pos + size - 1) - 1
            yield JoinedBatches(parts[n][1], data[pos : pos + size], told[n])
            download.is_aligned = True
            told[n] += 1
            pos += size
        if download.is_aligned and pos < len(data):
            download.held += data[pos:]
            self._held += len(data) - pos
            download.last, download.told = parts[-1][1], told[-1]
            yield from self._walk(download)

    def _leave(self, download: _Download) -> Iterator[Found]:
        """Give what is held as it is."""
        if not download.is_aligned:
            yield from self._search(download)
        if download.held:
            assert download.last is not None
            yield JoinedBatches(download.last, bytes(download.held), download.told)
            self._drop(download)

    def _drop(self, download: _Download) -> None:
        self._held -= len(download.held)
        download.held, download.parts = bytearray(), []

    def _cut_short(self, download: _Download, fragment: BatchFragment) -> Iterator[Found]:
        size = len(download.held)
        yield from self._leave(download)
        detail = f"a batch of a snapshot ends after {size} bytes, before its length is reached"
        yield Fault(replace(fragment, data=b""), Anomaly.MALFORMED_RECORDS, detail, size)

    def _finish(self, download: _Download) -> Iterator[Found]:
        seen = download.seen
        if seen is None:
            return
        missing = seen.snapshot.size - download.covered
        if not download.is_aligned:
            yield from self._search(download)
        if download.held and missing <= 0:
            yield from self._cut_short(download, seen)
        yield from self._leave(download)
        if missing > 0:
            yield _gap(seen, download.covered, missing)


def _entry_size(data: bytes | bytearray, pos: int) -> int | None:
    """Bytes of the batch at pos; None where there is no length, or one that cannot be."""
    at = pos + _LENGTH_POS
    length = int.from_bytes(data[at : pos + _ENTRY_HEADER_SIZE], "big", signed=True)
    return None if length < _ENTRY_LENGTH_MIN else _ENTRY_HEADER_SIZE + length


def _preference(fragment: BatchFragment) -> tuple[bool, int, int, int]:
    """Of several at one position the least is kept: one that knows most, else the earliest."""
    return not fragment.ends, -len(fragment.data), fragment.time_ns, fragment.exchange_id


def _gap(at: BatchFragment, position: int, missing: int) -> Fault:
    detail = f"{missing} bytes of a snapshot, from position {position} on, are in no piece"
    return Fault(replace(at, data=b""), Anomaly.SNAPSHOT_GAP, detail, missing)


def _misplaced(fragment: BatchFragment) -> Iterator[Found]:
    """Bytes at a negative position."""
    at = replace(fragment, data=b"")
    if fragment.begins and fragment.data:
        yield JoinedBatches(at, fragment.data, 0)
    elif fragment.data:
        yield Headless(at, len(fragment.data))
    if fragment.is_first:
        detail = f"a piece of a snapshot has position {fragment.position}"
        size = fragment.piece_end - fragment.position
        yield Fault(at, Anomaly.MALFORMED_RECORDS, detail, size)
