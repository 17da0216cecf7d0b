"""Computes the wait of an exchange: the column `wait` of `exchanges`, which all commands use.

- `answer`: the broker's own work: it took the request, did it and answered.
- `long_poll`: a Fetch or ShareFetch that the broker held back, as its client requested: fewer than
  `min_bytes` were available, and `max_wait_ms` had not passed.
- `group`: JoinGroup and SyncGroup wait for the other members of the group.

A response does not show whether it was held back. So a poll counts as held if it took at least
POLL_MIN_MS and returned fewer than `min_bytes` of records that were available when it was sent. A
batch was available if its latest timestamp is more than APPEND_MS before the request, because a
producer stamps records before it sends them. A transaction's batches become visible with its
marker. An error ends a wait, so it is no evidence. A poll that took longer than `max_wait_ms`
allows is an answer, however little it returned.

Heartbeats of the newer groups (KIP-848, KIP-932, KIP-1071) are answers: their coordinator does not
wait for members.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kdissect.codec import record_kernel as rk
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role
from kdissect.protocol.model import RESPONSE
from kdissect.tables.message_facts import ChunkMarks

_POLLS = (ApiKey.FETCH, ApiKey.SHARE_FETCH)
GROUP_WAITS = (ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP)

POLL_MIN_MS = 1.0  # available records are returned faster
POLL_LATE, POLL_LATE_MS = 1.1, 100.0  # a timer of the broker ends a poll, up to a tick late
APPEND_MS = 50  # from a record's timestamp until a consumer can see it: linger, replication
_BATCHES = 4096  # scanned at a time
_IS_TRANSACTIONAL, _IS_CONTROL = 16, 32  # attributes of a batch

Bools = npt.NDArray[np.bool_]


class Wait(IntEnum):
    """Values of wait; the table has the names in lower case."""

    ANSWER = 0
    LONG_POLL = 1
    GROUP = 2


def service_ns(exchanges: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """int64[n]: latency minus queued_ns (if known), in ns; valid if both sides exist."""
    latency = exchanges["response"]["time_ns"] - exchanges["request"]["end_time_ns"]
    return np.asarray(latency - np.maximum(exchanges["queued_ns"], 0), np.int64)


def waits(
    exchanges: npt.NDArray[np.void], is_decoded: Bools, marks: ChunkMarks
) -> tuple[npt.NDArray[np.int8], Bools]:
    """(Wait int8[n], bool[n]: it is known) of the EXCHANGE rows of a chunk.

    is_decoded: bool[n], both messages were decoded.
    """
    key = exchanges["api_key"]
    is_known = (exchanges["request"]["size"] >= 0) & (exchanges["response"]["size"] >= 0)
    is_known &= is_decoded | ~np.isin(key, _POLLS)
    wait = np.where(np.isin(key, GROUP_WAITS), Wait.GROUP, Wait.ANSWER).astype(np.int8)
    longest, is_poll = marks.first_number(Role.MAX_WAIT_MS)
    service_ms = service_ns(exchanges) / 1e6
    is_poll &= is_known & (service_ms >= POLL_MIN_MS)
    is_poll &= service_ms <= longest * POLL_LATE + POLL_LATE_MS
    wanted, _ = marks.first_number(Role.MIN_BYTES)
    is_poll[is_poll] = (
        _bytes_there(exchanges, is_poll, marks)[is_poll] < np.maximum(wanted, 1)[is_poll]
    )
    wait[is_poll] = Wait.LONG_POLL
    return wait, is_known


def _bytes_there(
    exchanges: npt.NDArray[np.void], chosen: Bools, marks: ChunkMarks
) -> npt.NDArray[np.int64]:
    """int64[n]: record bytes that the log had when the chosen exchanges were sent."""
    sets = marks.places(Role.RECORDS)
    some = np.flatnonzero((sets.side == RESPONSE) & (sets.length > 0) & chosen[sets.row])
    row = sets.row[some]
    sent_ms = exchanges["request"]["time_ns"][row] // 1_000_000
    start, length = (np.ascontiguousarray(column[some]) for column in (sets.start, sets.length))
    plain, of_transactions = np.zeros(len(some), np.int64), np.zeros(len(some), np.int64)
    has_ended = np.zeros(len(some), np.bool_)  # the transaction ended after the request was sent
    state = np.array([0, -1, 0], np.int64)
    table = np.empty(_BATCHES * rk.BATCH_WORDS, np.int64)
    while count := int(rk.scan_batches(marks.buf, start, length, state, table)):
        batches = table.reshape(-1, rk.BATCH_WORDS)[:count]
        of, attributes = batches[:, rk.SET], batches[:, rk.ATTRIBUTES]
        is_new = batches[:, rk.MAX_TIME] > sent_ms[of] - APPEND_MS
        has_ended[of[is_new & (attributes & _IS_CONTROL != 0)]] = True
        size = np.where(is_new, 0, batches[:, rk.SIZE])
        is_transactional = attributes & _IS_TRANSACTIONAL != 0
        np.add.at(of_transactions, of[is_transactional], size[is_transactional])
        np.add.at(plain, of[~is_transactional], size[~is_transactional])
    there = plain + np.where(has_ended, 0, of_transactions)
    return np.bincount(row, there, len(exchanges)).astype(np.int64)
