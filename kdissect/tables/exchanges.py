"""Rows of `exchanges`: the index of exchanges joined with what their messages say."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.arrays import Bools, Ints, Rows, distinct
from kdissect.kafka.assembly import NO_API, PairStatus
from kdissect.protocol import catalog
from kdissect.protocol.column_plan import Role
from kdissect.protocol.error_codes import error_name
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.tables.arrow_arrays import labels, names_of
from kdissect.tables.connections import endpoint_columns
from kdissect.tables.message_marks import ChunkMarks
from kdissect.tables.schemas import EXCHANGES, table_of

SASL_TOKEN = "SaslToken"
_TOKEN_KEY = -2  # among api keys


class DecodeStatus(IntEnum):
    """Values of *_decode_status, best to worst; the table has the names in lower case."""

    OK = 0
    ABSENT = 1
    ENCRYPTED = 2
    PARTIAL = 3
    UNKNOWN_VERSION = 4
    UNKNOWN_API = 5
    MALFORMED = 6


class VersionSource(IntEnum):
    """Values of version_source; the table has the names in lower case."""

    REQUEST_HEADER = 0
    FALLBACK_V0 = 1
    INFERRED = 2
    UNKNOWN = 3


@dataclass(slots=True)
class ExchangeFacts:
    """What decoding tells about the exchanges of a chunk, one entry each."""

    decode_status: npt.NDArray[np.int8]  # [n, 2] DecodeStatus of request, response
    version_source: npt.NDArray[np.int8]
    has_error: Bools  # a decoded response whose version has error fields
    wait: pa.Array
    client_id: pa.Array


def worse(status: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """decode_status of exchanges: the worse side, absent only if both are."""
    present = np.where(status == DecodeStatus.ABSENT, -1, status)
    worst = present.max(axis=1)
    return np.where(worst < 0, DecodeStatus.ABSENT, worst).astype(np.int8)


def exchanges_table(
    endpoints: Rows,
    connections: Rows,
    exchanges: Rows,
    capture_ids: list[int],
    facts: ExchangeFacts,
    marks: ChunkMarks,
) -> pa.Table:
    """`exchanges` for EXCHANGE rows of a chunk, in their order."""
    where = endpoint_columns(endpoints, connections)
    connection = exchanges["connection"]
    via = pa.array(connection, pa.int32())
    is_message = exchanges["is_sasl_token"] == 0
    is_known = (exchanges["request"]["size"] >= 0) | (exchanges["confidence"] > 0)
    has_api = (exchanges["api_key"] != NO_API) & is_known & is_message
    service, has_queue = service_ns(exchanges)
    error, error_codes = marks.error_columns
    status = facts.decode_status
    columns = {
        "exchange_id": exchanges["exchange_id"],
        "connection_id": connections["connection_id"][connection],
        "client_ip": where.client_ip.take(via),
        "client_port": where.client_port[connection],
        "broker_ip": where.broker_ip.take(via),
        "broker_port": where.broker_port[connection],
        "api_key": (exchanges["api_key"], has_api),
        "api_name": _api_names(exchanges, is_message),
        "api_version": (exchanges["api_version"], has_api),
        "correlation_id": (exchanges["correlation_id"], is_message),
        "client_id": facts.client_id,
        "queued_ms": (exchanges["queued_ns"] / 1e6, has_queue),
        "service_ms": (service / 1e6, has_queue),
        "wait": facts.wait,
        "status": labels(exchanges["status"], names_of(PairStatus)),
        "version_source": labels(facts.version_source, names_of(VersionSource)),
        "version_confidence": _confidence(facts.version_source, exchanges["confidence"]),
        "decode_status": labels(worse(status), names_of(DecodeStatus)),
        "request_decode_status": labels(status[:, REQUEST], names_of(DecodeStatus)),
        "response_decode_status": labels(status[:, RESPONSE], names_of(DecodeStatus)),
        "error_code": (error, facts.has_error),
        "error_name": _error_names(error, facts.has_error),
        "error_codes": error_codes,
        "throttle_time_ms": marks.first_number(Role.THROTTLE_TIME_MS),
        "topics": marks.topic_lists(),
        "group_id": marks.first_text(Role.GROUP_ID),
        "transactional_id": marks.first_text(Role.TRANSACTIONAL_ID),
        **_places(exchanges, capture_ids),
        **_durations(exchanges),
    }
    return table_of(EXCHANGES, columns)


def _places(exchanges: Rows, capture_ids: list[int]) -> dict[str, Any]:
    """Columns that each side has: times, sizes and positions."""
    columns: dict[str, Any] = {}
    ids = np.array([*capture_ids, 0], np.int64)
    for name in SIDES:
        side = exchanges[name]
        has_side = side["size"] >= 0
        source = np.where(has_side, side["source"], len(capture_ids))
        for column, values in (
            ("time", side["time_ns"]),
            ("end_time", side["end_time_ns"]),
            ("time_ns", side["time_ns"]),
            ("size", side["size"]),
            ("capture_id", ids[source]),
            ("packet", side["packet"]),
            ("pos", side["pos"]),
        ):
            columns[f"{name}_{column}"] = values, has_side
    return columns


def _durations(exchanges: Rows) -> dict[str, tuple[Ints, Bools]]:
    """Milliseconds between the ends of the sides."""
    request, response = exchanges["request"], exchanges["response"]
    has_request, has_response = request["size"] >= 0, response["size"] >= 0
    both = has_request & has_response
    first, sent = request["time_ns"], request["end_time_ns"]
    answered, last = response["time_ns"], response["end_time_ns"]
    return {
        "latency_ms": ((answered - sent) / 1e6, both),
        "duration_ms": ((last - first) / 1e6, both),
        "upload_ms": ((sent - first) / 1e6, has_request),
        "download_ms": ((last - answered) / 1e6, has_response),
    }


def service_ns(exchanges: Rows) -> tuple[Ints, Bools]:
    """(int64[n] latency minus queued_ns, in ns; bool[n] both sides exist and the queue is known).

    The column `service_ms` is this time. If bytes before the response are missing, nobody knows
    how long the request was queued.
    """
    latency = exchanges["response"]["time_ns"] - exchanges["request"]["end_time_ns"]
    is_answered = (exchanges["request"]["size"] >= 0) & (exchanges["response"]["size"] >= 0)
    queued = exchanges["queued_ns"]
    return np.asarray(latency - queued, np.int64), is_answered & (queued >= 0)


def _confidence(version_source: npt.NDArray[np.int8], inferred: Ints) -> Ints:
    """The confidence of inferred versions; 1 of others, 0 of unknown ones."""
    known = np.where(version_source == VersionSource.UNKNOWN, 0.0, 1.0)
    return np.where(version_source == VersionSource.INFERRED, inferred, known)


def _error_names(codes: Ints, valid: Bools) -> pa.Array:
    different, code_of = distinct(codes)
    return labels(code_of, [error_name(int(code)) for code in different], valid)


def _api_names(exchanges: Rows, is_message: Bools) -> pa.Array:
    """Name by api key; SaslToken for tokens without headers, null for an unknown key or none."""
    keys = np.where(is_message, exchanges["api_key"].astype(np.int64), _TOKEN_KEY)
    api_keys, codes = distinct(keys)
    known = catalog.apis()
    names = [
        SASL_TOKEN if key == _TOKEN_KEY else known[key].name if key in known else ""
        for key in api_keys.tolist()
    ]
    valid = np.array([name != "" for name in names], bool)
    return labels(codes, names, valid[codes])
