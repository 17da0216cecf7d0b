"""Rows of `exchanges`: the index of exchanges joined with facts from their messages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.arrays import distinct
from kdissect.kafka.assembly import NO_API, PairStatus
from kdissect.protocol import catalog
from kdissect.protocol.column_plan import Role
from kdissect.protocol.error_codes import error_name
from kdissect.tables.arrow_arrays import ints, labels, names_of, table_of, times_from_ns
from kdissect.tables.connections import endpoint_columns
from kdissect.tables.message_facts import ChunkMarks
from kdissect.tables.schemas import EXCHANGES
from kdissect.tables.waits import service_ns

SASL_TOKEN = "SaslToken"


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
    """Facts from decoding a chunk, one entry per exchange."""

    decode_status: npt.NDArray[np.int8]  # [n, 2] DecodeStatus of request, response
    version_source: npt.NDArray[np.int8]
    has_error: npt.NDArray[np.bool_]  # a decoded response whose version has error fields
    wait: pa.Array
    client_id: pa.Array


def worse(status: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """decode_status of exchanges: the worse side, absent only if both are."""
    present = np.where(status == DecodeStatus.ABSENT, -1, status)
    worst = present.max(axis=1)
    return np.where(worst < 0, DecodeStatus.ABSENT, worst).astype(np.int8)


def api_name_column(exchanges: npt.NDArray[np.void]) -> pa.Array:
    """Name by api key; SaslToken for tokens without headers, null for an unknown key or none."""
    keys = np.where(exchanges["is_sasl_token"] != 0, -2, exchanges["api_key"].astype(np.int64))
    api_keys, codes = distinct(keys)
    known = catalog.apis()
    names = [
        SASL_TOKEN if key == -2 else known[key].name if key in known else ""
        for key in api_keys.tolist()
    ]
    valid = np.array([name != "" for name in names], bool)
    return labels(codes, names, valid[codes])


def _capture_ids(side: npt.NDArray[np.void], capture_ids: list[int], valid: Any) -> pa.Array:
    ids = np.array([*capture_ids, 0], np.int64)
    return ints(ids[np.where(valid, side["source"], len(capture_ids))], pa.int64(), valid)


def _ms(nanoseconds: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_]) -> pa.Array:
    return pa.array(nanoseconds / 1e6, mask=~valid)


def exchanges_table(
    endpoints: npt.NDArray[np.void],
    connections: npt.NDArray[np.void],
    exchanges: npt.NDArray[np.void],
    capture_ids: list[int],
    facts: ExchangeFacts,
    marks: ChunkMarks,
) -> pa.Table:
    """`exchanges` for EXCHANGE rows of a chunk, in their order."""
    request, response = exchanges["request"], exchanges["response"]
    has_request, has_response = request["size"] >= 0, response["size"] >= 0
    both = has_request & has_response
    latency_ns = response["time_ns"] - request["end_time_ns"]
    queued_ns = exchanges["queued_ns"]
    service, has_queue = service_ns(exchanges)
    where = endpoint_columns(endpoints, connections)
    via = pa.array(exchanges["connection"], pa.int32())
    has_version = has_request | (exchanges["confidence"] > 0)
    has_api = (exchanges["api_key"] != NO_API) & has_version & (exchanges["is_sasl_token"] == 0)
    has_id = exchanges["is_sasl_token"] == 0
    error, error_codes = marks.error_columns
    distinct_errors, error_codes_of = distinct(error)
    throttle, has_throttle = marks.first_number(Role.THROTTLE_TIME_MS)
    status = facts.decode_status
    decode_names = names_of(DecodeStatus)
    version_source = facts.version_source
    confidence = np.where(version_source == VersionSource.UNKNOWN, 0.0, 1.0)
    inferred = version_source == VersionSource.INFERRED
    confidence = np.where(inferred, exchanges["confidence"], confidence)
    columns = {
        "exchange_id": ints(exchanges["exchange_id"], pa.int64()),
        "connection_id": ints(connections["connection_id"][exchanges["connection"]], pa.int64()),
        "client_ip": where.client_ip.take(via),
        "client_port": ints(
            where.client_port.astype(np.int32)[exchanges["connection"]], pa.int32()
        ),
        "broker_ip": where.broker_ip.take(via),
        "broker_port": ints(
            where.broker_port.astype(np.int32)[exchanges["connection"]], pa.int32()
        ),
        "api_key": ints(exchanges["api_key"], pa.int16(), has_api),
        "api_name": api_name_column(exchanges),
        "api_version": ints(exchanges["api_version"], pa.int16(), has_api),
        "correlation_id": ints(exchanges["correlation_id"], pa.int32(), has_id),
        "client_id": facts.client_id,
        "request_time": times_from_ns(request["time_ns"], has_request),
        "request_end_time": times_from_ns(request["end_time_ns"], has_request),
        "response_time": times_from_ns(response["time_ns"], has_response),
        "response_end_time": times_from_ns(response["end_time_ns"], has_response),
        "request_time_ns": ints(request["time_ns"], pa.int64(), has_request),
        "response_time_ns": ints(response["time_ns"], pa.int64(), has_response),
        "latency_ms": _ms(latency_ns, both),
        "duration_ms": _ms(response["end_time_ns"] - request["time_ns"], both),
        "queued_ms": _ms(queued_ns, has_queue),
        "service_ms": _ms(service, has_queue),
        "upload_ms": _ms(request["end_time_ns"] - request["time_ns"], has_request),
        "download_ms": _ms(response["end_time_ns"] - response["time_ns"], has_response),
        "wait": facts.wait,
        "request_size": ints(request["size"], pa.int64(), has_request),
        "response_size": ints(response["size"], pa.int64(), has_response),
        "request_capture_id": _capture_ids(request, capture_ids, has_request),
        "response_capture_id": _capture_ids(response, capture_ids, has_response),
        "request_packet": ints(request["packet"], pa.int64(), has_request),
        "response_packet": ints(response["packet"], pa.int64(), has_response),
        "request_pos": ints(request["pos"], pa.int64(), has_request),
        "response_pos": ints(response["pos"], pa.int64(), has_response),
        "status": labels(exchanges["status"], names_of(PairStatus)),
        "version_source": labels(version_source, names_of(VersionSource)),
        "version_confidence": pa.array(confidence),
        "decode_status": labels(worse(status), decode_names),
        "request_decode_status": labels(status[:, 0], decode_names),
        "response_decode_status": labels(status[:, 1], decode_names),
        "error_code": ints(error, pa.int16(), facts.has_error),
        "error_name": labels(
            error_codes_of, [error_name(int(code)) for code in distinct_errors], facts.has_error
        ),
        "error_codes": error_codes,
        "throttle_time_ms": ints(throttle.astype(np.int32), pa.int32(), has_throttle),
        "topics": marks.topics_column(),
        "group_id": marks.first_text(Role.GROUP_ID),
        "transactional_id": marks.first_text(Role.TRANSACTIONAL_ID),
    }
    return table_of(columns, EXCHANGES)
