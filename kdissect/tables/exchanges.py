"""Rows of `exchanges`: the index of exchanges joined with what their messages say."""

from __future__ import annotations

from enum import IntEnum
from functools import cache

import numpy as np
import pyarrow as pa

from kdissect.arrays import Bools, Ints, Rows, States
from kdissect.codec import record_kernel as rk
from kdissect.kafka.assembly import NO_API, PairStatus
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import SASL_TOKEN, ApiKey
from kdissect.protocol.column_plan import Role, role_of
from kdissect.protocol.error_codes import error_name
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES, walk
from kdissect.tables.arrow_arrays import labels, names_of
from kdissect.tables.message_chunk import DecodeStatus, MessageChunk, VersionSource
from kdissect.tables.message_marks import ChunkMarks
from kdissect.tables.schemas import EXCHANGES, Column, table_of

_TOKEN_KEY = -2  # among api keys


def worse(status: States) -> States:
    """decode_status of exchanges: the worse side, absent only if both are."""
    present = np.where(status == DecodeStatus.ABSENT, -1, status)
    worst = present.max(axis=1)
    return np.where(worst < 0, DecodeStatus.ABSENT, worst).astype(np.int8)


def exchanges_table(chunk: MessageChunk) -> pa.Table:
    """`exchanges` for the exchanges of a chunk, in their order."""
    where, exchanges, marks = chunk.endpoints, chunk.exchanges, chunk.marks
    connection = exchanges["connection"]
    via = pa.array(connection, pa.int32())
    is_message = exchanges["is_sasl_token"] == 0
    has_api = exchanges["api_key"] != NO_API
    is_pair = _are_pairs(exchanges)
    service, has_service = service_ns(exchanges)
    error, error_codes = marks.error_columns
    has_error, status = _has_error_code(chunk), chunk.status
    is_decoded = (status == DecodeStatus.OK).all(axis=1)
    wait = _waits(exchanges, service / 1e6, has_service, is_decoded, marks)
    columns = {
        "exchange_id": exchanges["exchange_id"],
        "connection_id": chunk.frames.connection_ids,
        "client_ip": where.client_ip.take(via),
        "client_port": where.client_port[connection],
        "broker_ip": where.broker_ip.take(via),
        "broker_port": where.broker_port[connection],
        "api_key": (exchanges["api_key"], has_api),
        "api_name": _api_names(exchanges, is_message),
        "api_version": (exchanges["api_version"], has_api),
        "correlation_id": (exchanges["correlation_id"], is_message),
        "client_id": chunk.client_ids,
        "queued_ms": (exchanges["queued_ns"] / 1e6, has_service),
        "service_ms": (service / 1e6, has_service),
        "wait": labels(wait, names_of(Wait), is_pair),
        "status": labels(exchanges["status"], names_of(PairStatus)),
        "version_source": labels(chunk.version_source, names_of(VersionSource)),
        "version_confidence": _confidence(chunk.version_source, exchanges["confidence"]),
        "decode_status": labels(worse(status), names_of(DecodeStatus)),
        "request_decode_status": labels(status[:, REQUEST], names_of(DecodeStatus)),
        "response_decode_status": labels(status[:, RESPONSE], names_of(DecodeStatus)),
        "error_code": (error, has_error),
        "error_name": _error_names(error, has_error),
        "error_codes": error_codes,
        "throttle_time_ms": marks.first_number(Role.THROTTLE_TIME_MS),
        "topics": marks.topic_lists(),
        "group_id": marks.first_text(Role.GROUP_ID),
        "transactional_id": marks.first_text(Role.TRANSACTIONAL_ID),
        **_places(chunk),
        **_durations(exchanges, is_pair),
    }
    return table_of(EXCHANGES, columns)


def _has_error_code(chunk: MessageChunk) -> Bools:
    """bool[n]: a response was decoded whose version has an error code."""
    has_error = np.zeros(len(chunk.status), np.bool_)
    for (api_key, side), decoded in chunk.decoded.items():
        if side == RESPONSE:
            versions = chunk.frames.versions(RESPONSE)[decoded.rows]
            is_good = decoded.columns.status == 0
            has_error[decoded.rows] = _error_versions(api_key)[versions] & is_good
    return has_error


@cache
def _error_versions(api_key: int) -> Bools:
    """bool by api_version: whether the response's definition has an error code."""
    response = catalog.api(api_key).response
    roles = [
        {role_of(api_key, field) for field in walk(response.fields, api_version)}
        for api_version in range(response.versions.last + 1)
    ]
    return np.array([Role.ERROR_CODE in each for each in roles], bool)


def _places(chunk: MessageChunk) -> dict[str, Column]:
    """Columns that each side has: times, sizes and positions."""
    columns: dict[str, Column] = {}
    for number, name in enumerate(SIDES):
        side = chunk.exchanges[name]
        has_side = side["size"] >= 0
        for column, values in (
            ("time", side["time_ns"]),
            ("end_time", side["end_time_ns"]),
            ("time_ns", side["time_ns"]),
            ("size", side["size"]),
            ("capture_id", chunk.capture_id(number)),
            ("packet", side["packet"]),
            ("pos", side["pos"]),
        ):
            columns[f"{name}_{column}"] = values, has_side
    return columns


def _durations(exchanges: Rows, is_pair: Bools) -> dict[str, tuple[Ints, Bools]]:
    """Milliseconds between the first and last bytes of request and response."""
    request, response = exchanges["request"], exchanges["response"]
    first, sent = request["time_ns"], request["end_time_ns"]
    answered, last = response["time_ns"], response["end_time_ns"]
    return {
        "latency_ms": ((answered - sent) / 1e6, is_pair),
        "duration_ms": ((last - first) / 1e6, is_pair),
        "upload_ms": ((sent - first) / 1e6, request["size"] >= 0),
        "download_ms": ((last - answered) / 1e6, response["size"] >= 0),
    }


def _are_pairs(exchanges: Rows) -> Bools:
    """bool[n]: whether both sides exist."""
    pairs: Bools = (exchanges["request"]["size"] >= 0) & (exchanges["response"]["size"] >= 0)
    return pairs


def service_ns(exchanges: Rows) -> tuple[Ints, Bools]:
    """(int64[n] latency minus queued_ns, in ns; bool[n] both sides exist and the queue is known).

    The column `service_ms` is this time. If bytes before the response are missing, or in no frame,
    nobody knows how long the request was queued.
    """
    latency = exchanges["response"]["time_ns"] - exchanges["request"]["end_time_ns"]
    queued = exchanges["queued_ns"]
    return np.asarray(latency - queued, np.int64), _are_pairs(exchanges) & (queued >= 0)


def _confidence(version_source: States, inferred: Ints) -> Ints:
    """The confidence of inferred versions; 1 of others, 0 of unknown ones."""
    known = np.where(version_source == VersionSource.UNKNOWN, 0.0, 1.0)
    return np.where(version_source == VersionSource.INFERRED, inferred, known)


def _error_names(codes: Ints, valid: Bools) -> pa.Array:
    coded = pa.array(codes).dictionary_encode()
    names = [error_name(code) for code in coded.dictionary.to_pylist()]
    return labels(coded.indices.to_numpy(), names, valid)


def _api_names(exchanges: Rows, is_message: Bools) -> pa.Array:
    """Name by api key; SaslToken for tokens without headers, null for an unknown key or none."""
    keys = np.where(is_message, exchanges["api_key"].astype(np.int64), _TOKEN_KEY)
    coded = pa.array(keys).dictionary_encode()
    codes = coded.indices.to_numpy()
    known = catalog.apis()
    names = [
        SASL_TOKEN if key == _TOKEN_KEY else known[key].name if key in known else ""
        for key in coded.dictionary.to_pylist()
    ]
    valid = np.array([name != "" for name in names], bool)
    return labels(codes, names, valid[codes])


# -- waits ------------------------------------------------------------------------------------

_POLLS = (ApiKey.FETCH, ApiKey.SHARE_FETCH)
GROUP_WAITS = (ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP)

POLL_MIN_MS = 1.0  # available records are returned faster
POLL_LATE, POLL_LATE_MS = 1.1, 100.0  # a timer of the broker ends a poll, up to a tick late
APPEND_MS = 250  # from a record's timestamp until a consumer can see it: linger, replication
_BATCHES = 4096  # scanned at a time
_IS_TRANSACTIONAL, _IS_CONTROL = 16, 32  # attributes of a batch


class Wait(IntEnum):
    """Values of wait; the table has the names in lower case.

    - `answer`: the broker's own work: it took the request, did it and answered.
    - `long_poll`: a Fetch or ShareFetch that had to wait, as its client requested: fewer than
      `min_bytes` were available, and `max_wait_ms` had not passed.
    - `group`: JoinGroup and SyncGroup wait for the other members of the group.
    - `undecided`: a poll, and the capture does not show which, or not how long its response waited
      for the one before it.

    The records that a poll returned decide. A batch was not available if its latest timestamp is
    after the request. It was available if that timestamp is more than APPEND_MS before the request:
    a producer stamps records before it sends them, and a broker writes them later. In between, and
    without timestamps, nothing decides. A transaction's batches become visible with its marker. An
    error ends a wait, so it is no evidence. A poll below POLL_MIN_MS did not wait. A poll that took
    longer than `max_wait_ms` allows is an answer, however little it returned: the broker was late.

    Heartbeats of the newer groups (KIP-848, KIP-932, KIP-1071) are answers: their coordinator does
    not wait for members.
    """

    ANSWER = 0
    LONG_POLL = 1
    GROUP = 2
    UNDECIDED = 3


def _waits(
    exchanges: Rows, service_ms: Ints, is_known: Bools, is_decoded: Bools, marks: ChunkMarks
) -> States:
    """Wait int8[n] of the EXCHANGE rows of a chunk; without meaning if a side is missing.

    service_ms: float64[n]. is_known: bool[n], whether it is. is_decoded: bool[n], both messages
    were decoded.
    """
    key = exchanges["api_key"]
    wait = np.where(np.isin(key, GROUP_WAITS), Wait.GROUP, Wait.ANSWER).astype(np.int8)
    wait[np.isin(key, _POLLS) & ~is_decoded] = Wait.UNDECIDED
    longest, is_poll = marks.first_number(Role.MAX_WAIT_MS)
    wait[is_poll & ~is_known] = Wait.UNDECIDED
    is_poll &= (longest > 0) & is_known & is_decoded & (service_ms >= POLL_MIN_MS)
    is_poll &= service_ms <= longest * POLL_LATE + POLL_LATE_MS
    wanted = marks.first_number(Role.MIN_BYTES)[0]
    node_id, is_node = marks.first_number(Role.REPLICA_ID)
    # a follower of the metadata log asks for 0 bytes, and its leader waits for the next record
    waits_for_one = (key != ApiKey.FETCH) | (is_node & (node_id >= 0))
    wanted = np.where(waits_for_one, np.maximum(wanted, 1), wanted)
    least, most = _bytes_there(exchanges, is_poll, marks)
    wait[is_poll & (least < wanted)] = Wait.UNDECIDED
    wait[is_poll & (most < wanted)] = Wait.LONG_POLL
    return wait


def _bytes_there(exchanges: Rows, chosen: Bools, marks: ChunkMarks) -> tuple[Ints, Ints]:
    """int64[n] twice: the fewest and the most returned bytes that the log can have had when the
    chosen exchanges were sent."""
    sets = marks.record_marks
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
