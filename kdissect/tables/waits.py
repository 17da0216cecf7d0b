"""What an exchange waits for: `wait` of `exchanges`, the one classification that all verbs use.

answer     the broker's own work: it took the request, did it and answered
long_poll  a Fetch or ShareFetch that the broker held because its client asked for that: fewer than
           `min_bytes` were there, and `max_wait_ms` were not over
group      JoinGroup and SyncGroup wait for the other members of the group

No response says whether it was held. So a poll counts as held if it took POLL_MIN_MS at least and
brought fewer than `min_bytes` of records that were there when it was sent. A batch was there if its
latest timestamp lies more than APPEND_MS before the request, since a producer stamps its records
before it sends them. A transaction's batches appear with its marker. An error ends a wait, so it
says nothing. A poll that took longer than `max_wait_ms` allows is an answer, however little it
brought.

Heartbeats of the newer groups (KIP-848, KIP-932, KIP-1071) are answers: their coordinator waits for
no member.
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

POLLS = (ApiKey.FETCH, ApiKey.SHARE_FETCH)
GROUP_WAITS = (ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP)

POLL_MIN_MS = 1.0  # what is there already comes sooner
POLL_LATE, POLL_LATE_MS = 1.1, 100.0  # a timer of the broker ends a poll, late by its tick
APPEND_MS = 50  # from a record's timestamp until a consumer may see it: linger, replication
_BATCHES = 4096  # looked at together
_IS_TRANSACTIONAL, _IS_CONTROL = 16, 32  # attributes of a batch

Bools = npt.NDArray[np.bool_]


class Wait(IntEnum):
    """wait; names in lower case are the table's values."""

    ANSWER = 0
    LONG_POLL = 1
    GROUP = 2


def service_ns(exchanges: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """int64[n]: latency without queued_ns, as far as that is known, if both sides are there."""
    latency = exchanges["response"]["time_ns"] - exchanges["request"]["end_time_ns"]
    return np.asarray(latency - np.maximum(exchanges["queued_ns"], 0), np.int64)


def waits(
    exchanges: npt.NDArray[np.void], is_decoded: Bools, marks: ChunkMarks
) -> tuple[npt.NDArray[np.int8], Bools]:
    """(Wait int8[n], whether it is known) of the EXCHANGE rows of a chunk.

    is_decoded: both messages were.
    """
    key = exchanges["api_key"]
    known = (exchanges["request"]["size"] >= 0) & (exchanges["response"]["size"] >= 0)
    known &= is_decoded | ~np.isin(key, POLLS)
    wait = np.where(np.isin(key, GROUP_WAITS), Wait.GROUP, Wait.ANSWER).astype(np.int8)
    longest, is_poll = marks.first_number(Role.MAX_WAIT_MS)
    service_ms = service_ns(exchanges) / 1e6
    is_poll &= known & (service_ms >= POLL_MIN_MS)
    is_poll &= service_ms <= longest * POLL_LATE + POLL_LATE_MS
    wanted, _ = marks.first_number(Role.MIN_BYTES)
    is_poll[is_poll] = (
        _bytes_there(exchanges, is_poll, marks)[is_poll] < np.maximum(wanted, 1)[is_poll]
    )
    wait[is_poll] = Wait.LONG_POLL
    return wait, known


def _bytes_there(
    exchanges: npt.NDArray[np.void], chosen: Bools, marks: ChunkMarks
) -> npt.NDArray[np.int64]:
    """int64[n]: of the chosen exchanges, record bytes that the log had when they were sent."""
    sets = marks.places(Role.RECORDS)
    some = np.flatnonzero((sets.side == RESPONSE) & (sets.length > 0) & chosen[sets.row])
    row = sets.row[some]
    sent_ms = exchanges["request"]["time_ns"][row] // 1_000_000
    start, length = (np.ascontiguousarray(column[some]) for column in (sets.start, sets.length))
    plain, of_transactions = np.zeros(len(some), np.int64), np.zeros(len(some), np.int64)
    has_ended = np.zeros(len(some), np.bool_)  # a transaction, after the request was sent
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
