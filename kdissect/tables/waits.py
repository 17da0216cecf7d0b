"""Computes the wait of an exchange: the column `wait` of `exchanges`, which all commands use.

- `answer`: the broker's own work: it took the request, did it and answered.
- `long_poll`: a Fetch or ShareFetch that had to wait, as its client requested: fewer than
  `min_bytes` were available, and `max_wait_ms` had not passed.
- `group`: JoinGroup and SyncGroup wait for the other members of the group.
- `undecided`: a poll, and the capture does not show which, or not how long its response waited for
  the one before it.

The records that a poll returned decide. A batch was not available if its latest timestamp is after
the request. It was available if that timestamp is more than APPEND_MS before the request: a
producer stamps records before it sends them, and a broker writes them later. In between, and
without timestamps, nothing decides. A transaction's batches become visible with its marker. An
error ends a wait, so it is no evidence. A poll below POLL_MIN_MS did not wait. A poll that took
longer than `max_wait_ms` allows is an answer, however little it returned: the broker was late.

Heartbeats of the newer groups (KIP-848, KIP-932, KIP-1071) are answers: their coordinator does not
wait for members.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kdissect.arrays import Bools, Ints, Rows
from kdissect.codec import record_kernel as rk
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role
from kdissect.protocol.model import RESPONSE
from kdissect.tables.exchanges import service_ns
from kdissect.tables.message_marks import ChunkMarks

_POLLS = (ApiKey.FETCH, ApiKey.SHARE_FETCH)
GROUP_WAITS = (ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP)

POLL_MIN_MS = 1.0  # available records are returned faster
POLL_LATE, POLL_LATE_MS = 1.1, 100.0  # a timer of the broker ends a poll, up to a tick late
APPEND_MS = 250  # from a record's timestamp until a consumer can see it: linger, replication
_BATCHES = 4096  # scanned at a time
_IS_TRANSACTIONAL, _IS_CONTROL = 16, 32  # attributes of a batch


class Wait(IntEnum):
    """Values of wait; the table has the names in lower case."""

    ANSWER = 0
    LONG_POLL = 1
    GROUP = 2
    UNDECIDED = 3


def waits(
    exchanges: Rows, is_decoded: Bools, marks: ChunkMarks
) -> tuple[npt.NDArray[np.int8], Bools]:
    """(Wait int8[n], bool[n]: both sides exist) of the EXCHANGE rows of a chunk.

    is_decoded: bool[n], both messages were decoded.
    """
    key = exchanges["api_key"]
    is_answered = (exchanges["request"]["size"] >= 0) & (exchanges["response"]["size"] >= 0)
    wait = np.where(np.isin(key, GROUP_WAITS), Wait.GROUP, Wait.ANSWER).astype(np.int8)
    wait[np.isin(key, _POLLS) & ~is_decoded] = Wait.UNDECIDED
    longest, is_poll = marks.first_number(Role.MAX_WAIT_MS)
    service, is_known = service_ns(exchanges)
    service_ms = service / 1e6
    wait[is_poll & is_answered & ~is_known] = Wait.UNDECIDED
    is_poll &= is_known & is_decoded & (service_ms >= POLL_MIN_MS)
    is_poll &= service_ms <= longest * POLL_LATE + POLL_LATE_MS
    wanted = np.maximum(marks.first_number(Role.MIN_BYTES)[0], 1)
    least, most = _bytes_there(exchanges, is_poll, marks)
    wait[is_poll & (least < wanted)] = Wait.UNDECIDED
    wait[is_poll & (most < wanted)] = Wait.LONG_POLL
    return wait, is_answered


def _bytes_there(exchanges: Rows, chosen: Bools, marks: ChunkMarks) -> tuple[Ints, Ints]:
    """int64[n] twice: the fewest and the most returned bytes that the log can have had when the
    chosen exchanges were sent."""
    sets = marks.by_partition(Role.RECORDS)
    sets = sets[(sets["side"] == RESPONSE) & (sets["length"] > 0) & chosen[sets["row"]]]
    row = sets["row"]
    sent_ms = exchanges["request"]["time_ns"][row] // 1_000_000
    start, length = (np.ascontiguousarray(sets[name]) for name in ("value", "length"))
    by_evidence = np.zeros((2, 2, len(sets)), np.int64)  # least or most, plain or transactional
    has_ended = np.zeros((2, len(sets)), np.bool_)  # a transaction ended after the request
    position = rk.scan_start()
    table = np.empty(_BATCHES, rk.BATCH)
    while count := int(rk.scan_batches(marks.buf, start, length, position, table)):
        batches = table[:count]
        of, attributes = batches["set_index"], batches["attributes"]
        is_control = attributes & _IS_CONTROL != 0
        is_transactional = (attributes & _IS_TRANSACTIONAL != 0).astype(np.int64)
        for case, tolerance_ms in enumerate((APPEND_MS, 0)):
            latest_ms = batches["max_timestamp"]
            is_new = latest_ms > sent_ms[of] - tolerance_ms
            is_new |= (latest_ms < 0) & (tolerance_ms > 0)  # magic 0 has no timestamps
            has_ended[case, of[is_new & is_control]] = True
            np.add.at(
                by_evidence[case], (is_transactional, of), np.where(is_new, 0, batches["size"])
            )
    plain, of_transactions = by_evidence[:, 0], by_evidence[:, 1]
    there = plain + np.where(has_ended, 0, of_transactions)
    least, most = (np.bincount(row, case, len(exchanges)).astype(np.int64) for case in there)
    return least, most
