"""Arrow schemas of all fixed tables: names, types and order of columns (docs/tables.md).

`api_schema` builds those of ``apis/<ApiName>`` from the definitions. Parquet files have plain types
(no Arrow extension metadata), so any reader can open them without settings.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

FORMAT_VERSION = 1

TIME = pa.timestamp("us", tz="UTC")
STRINGS = pa.list_(pa.string())
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
UNKNOWN_TAGS = pa.list_(
    pa.struct([("path", pa.string()), ("tag", pa.int32()), ("data", pa.binary())])
)

_i8, _i16, _i32, _i64 = pa.int8(), pa.int16(), pa.int32(), pa.int64()
_f64, _bool, _string, _binary = pa.float64(), pa.bool_(), pa.string(), pa.binary()

COUNTERS = (
    "byte_count",
    "framed_byte_count",
    "unframed_byte_count",
    "missing_byte_count",
    "segment_count",
    "retransmitted_segment_count",
    "out_of_order_segment_count",
    "duplicate_segment_count",
    "gap_count",
)

_CAPTURES = pa.schema(
    [
        ("capture_id", _i64),
        ("path", _string),
        ("format", _string),
        ("compression", _string),
        ("link_types", STRINGS),
        ("packet_count", _i64),
        ("byte_count", _i64),
        ("first_time", TIME),
        ("last_time", TIME),
        ("truncated_packet_count", _i64),
        ("tcp_packet_count", _i64),
        ("duplicate_packet_count", _i64),
        ("ignored_packet_count", _i64),
        ("ignored_reasons", pa.map_(_string, _i64)),
        ("error", _string),
    ]
)

# Facts of one side of a TCP connection.
SIDE_COLUMNS = (
    ("syn_seen", _bool),
    ("mss", _i32),
    ("window_scale", _i32),
    ("sack_permitted", _bool),
    ("window_max", _i64),
    ("zero_window_count", _i64),
    ("zero_window_ms", _f64),
    ("rtt_ms_p50", _f64),
    ("rtt_ms_p99", _f64),
    ("last_time", TIME),
    ("ended", _bool),
)

CONNECTIONS = pa.schema(
    [
        ("connection_id", _i64),
        ("client_ip", _string),
        ("client_port", _i32),
        ("broker_ip", _string),
        ("broker_port", _i32),
        ("first_time", TIME),
        ("last_time", TIME),
        ("handshake_seen", _bool),
        ("handshake_rtt_ms", _f64),
        ("close_reason", _string),
        ("is_kafka", _bool),
        ("is_tls", _bool),
        ("protocol", _string),
        ("tls_version", _string),
        ("tls_sni", _string),
        ("tls_cipher", _string),
        ("tls_certificate_names", STRINGS),
        ("tls_certificate_subject", _string),
        ("tls_certificate_issuer", _string),
        ("tls_certificate_not_before", TIME),
        ("tls_certificate_not_after", TIME),
        ("tls_client_subject", _string),
        ("tls_client_issuer", _string),
        ("tls_client_not_before", TIME),
        ("tls_client_not_after", TIME),
        ("request_tls_alert", _string),
        ("response_tls_alert", _string),
        ("sasl_mechanism", _string),
        ("principal", _string),
        ("client_software_name", _string),
        ("client_software_version", _string),
        ("client_ids", STRINGS),
        ("proxied_from", _string),
        ("proxy_byte_count", _i64),
        ("closed_by", _string),
        ("syn_count", _i64),
        ("unanswered_syn_count", _i64),
        ("refused", _bool),
        ("idle_ms_max", _f64),
        ("idle_start_time", TIME),
        *((f"request_{name}", kind) for name, kind in SIDE_COLUMNS),
        *((f"response_{name}", kind) for name, kind in SIDE_COLUMNS),
        *((f"request_{name}", _i64) for name in COUNTERS),
        *((f"response_{name}", _i64) for name in COUNTERS),
    ]
)

EXCHANGES = pa.schema(
    [
        ("exchange_id", _i64),
        ("connection_id", _i64),
        ("client_ip", _string),
        ("client_port", _i32),
        ("broker_ip", _string),
        ("broker_port", _i32),
        ("api_key", _i16),
        ("api_name", _string),
        ("api_version", _i16),
        ("correlation_id", _i32),
        ("client_id", _string),
        ("request_time", TIME),
        ("request_end_time", TIME),
        ("response_time", TIME),
        ("response_end_time", TIME),
        ("request_time_ns", _i64),
        ("response_time_ns", _i64),
        ("latency_ms", _f64),
        ("duration_ms", _f64),
        ("queued_ms", _f64),
        ("service_ms", _f64),
        ("upload_ms", _f64),
        ("download_ms", _f64),
        ("wait", _string),
        ("request_size", _i64),
        ("response_size", _i64),
        ("request_capture_id", _i64),
        ("response_capture_id", _i64),
        ("request_packet", _i64),
        ("response_packet", _i64),
        ("request_pos", _i64),
        ("response_pos", _i64),
        ("status", _string),
        ("version_source", _string),
        ("version_confidence", _f64),
        ("decode_status", _string),
        ("request_decode_status", _string),
        ("response_decode_status", _string),
        ("error_code", _i16),
        ("error_name", _string),
        ("error_codes", pa.list_(_i16)),
        ("throttle_time_ms", _i32),
        ("topics", STRINGS),
        ("group_id", _string),
        ("transactional_id", _string),
    ]
)

RECORD_BATCHES = pa.schema(
    [
        ("exchange_id", _i64),
        ("source", _string),
        ("topic", _string),
        ("topic_id", _string),
        ("partition", _i32),
        ("batch_index", _i64),
        ("base_offset", _i64),
        ("last_offset", _i64),
        ("magic", _i8),
        ("codec", _string),
        ("crc_ok", _bool),
        ("is_partial", _bool),
        ("size", _i64),
        ("uncompressed_size", _i64),
        ("record_count", _i64),
        ("base_timestamp", TIME),
        ("base_timestamp_ms", _i64),
        ("max_timestamp", TIME),
        ("max_timestamp_ms", _i64),
        ("timestamp_type", _string),
        ("producer_id", _i64),
        ("producer_epoch", _i16),
        ("base_sequence", _i32),
        ("partition_leader_epoch", _i32),
        ("is_transactional", _bool),
        ("is_control", _bool),
        ("delete_horizon_ms", _i64),
    ]
)

RECORDS = pa.schema(
    [
        ("exchange_id", _i64),
        ("batch_index", _i64),
        ("record_index", _i64),
        ("source", _string),
        ("topic", _string),
        ("topic_id", _string),
        ("partition", _i32),
        ("offset", _i64),
        ("timestamp", TIME),
        ("timestamp_ms", _i64),
        ("timestamp_type", _string),
        ("key", _binary),
        ("value", _binary),
        ("headers", HEADERS),
        ("control_type", _string),
    ]
)

GROUP_EVENTS = pa.schema(
    [
        ("group_id", _string),
        ("group_type", _string),
        ("time", TIME),
        ("event", _string),
        ("member_id", _string),
        ("client_id", _string),
        ("generation", _i32),
        ("duration_ms", _f64),
        ("exchange_id", _i64),
        ("detail", _string),
    ]
)

OFFSETS = pa.list_(
    pa.struct([("group_id", _string), ("topic", _string), ("partition", _i32), ("offset", _i64)])
)

TRANSACTIONS = pa.schema(
    [
        ("transactional_id", _string),
        ("producer_id", _i64),
        ("producer_epoch", _i16),
        ("begin_time", TIME),
        ("end_time", TIME),
        ("outcome", _string),
        ("duration_ms", _f64),
        ("partitions", pa.list_(pa.struct([("topic", _string), ("partition", _i32)]))),
        ("record_count", _i64),
        ("exchange_ids", pa.list_(_i64)),
        ("offsets", OFFSETS),
    ]
)

FETCH_SESSIONS = pa.schema(
    [
        ("broker_ip", _string),
        ("broker_port", _i32),
        ("session_id", _i32),
        ("client_id", _string),
        ("state", _string),
        ("topic", _string),
        ("partition", _i32),
        ("first_epoch", _i32),
        ("last_epoch", _i32),
        ("first_time", TIME),
        ("last_time", TIME),
        ("exchange_id", _i64),
        ("end_exchange_id", _i64),
    ]
)

TOPICS = pa.schema(
    [("topic", _string), ("topic_id", _string), ("first_time", TIME), ("source", _string)]
)

BROKERS = pa.schema(
    [
        ("node_id", _i32),
        ("host", _string),
        ("port", _i32),
        ("rack", _string),
        ("cluster_id", _string),
        ("ip", _string),
        ("roles", pa.list_(_string)),
    ]
)

ANOMALIES = pa.schema(
    [
        ("kind", _string),
        ("severity", _string),
        ("connection_id", _i64),
        ("exchange_id", _i64),
        ("capture_id", _i64),
        ("packet", _i64),
        ("direction", _string),
        ("pos", _i64),
        ("byte_count", _i64),
        ("detail", _string),
        ("data", _binary),
    ]
)

# In the order of `names` and the summary. These tables exist even if they are empty.
FIXED_TABLES: dict[str, Any] = {
    "captures": _CAPTURES,
    "connections": CONNECTIONS,
    "exchanges": EXCHANGES,
    "record_batches": RECORD_BATCHES,
    "records": RECORDS,
    "group_events": GROUP_EVENTS,
    "transactions": TRANSACTIONS,
    "fetch_sessions": FETCH_SESSIONS,
    "topics": TOPICS,
    "brokers": BROKERS,
    "anomalies": ANOMALIES,
}

# Columns with few distinct values per file; only there a Parquet dictionary is smaller.
DICTIONARY_COLUMNS = frozenset(
    (
        *("format", "compression", "link_types.list.element", "capture_id"),
        *("client_ip", "client_port", "broker_ip", "broker_port", "close_reason", "protocol"),
        *("tls_version", "tls_sni", "tls_cipher", "sasl_mechanism", "principal"),
        *("client_software_name", "client_software_version", "client_ids.list.element"),
        *("connection_id", "exchange_id", "api_key", "api_name", "api_version", "client_id"),
        *("request_capture_id", "response_capture_id", "status", "wait", "version_source"),
        *("version_confidence", "decode_status", "request_decode_status"),
        *("response_decode_status", "error_code", "error_name", "topics.list.element"),
        *("group_id", "transactional_id", "source", "topic", "topic_id", "partition"),
        *("batch_index", "magic", "codec", "timestamp_type", "producer_id", "producer_epoch"),
        *("control_type", "kind", "severity", "direction"),
        *("group_type", "event", "member_id", "outcome"),
    )
)


def api_schema(request: pa.DataType, response: pa.DataType) -> pa.Schema:
    """Schema of ``apis/<ApiName>`` from the struct types of both sides' bodies."""
    return pa.schema(
        [
            ("exchange_id", _i64),
            ("connection_id", _i64),
            ("api_version", _i16),
            ("request_time", TIME),
            ("response_time", TIME),
            ("request", request),
            ("response", response),
            ("request_unknown_tags", UNKNOWN_TAGS),
            ("response_unknown_tags", UNKNOWN_TAGS),
        ]
    )


# Columns that ``--decode-values`` adds to `records`.
_DECODED = {
    "string": [("value_text", _string)],
    "json": [("value_json", _string)],
    "schema-registry-id": [("value_schema_id", _i32), ("key_schema_id", _i32)],
}
DECODE_VALUES = tuple(_DECODED)


def decoded_fields(kind: str) -> list[pa.Field]:
    """Columns that a value of ``--decode-values`` adds to `records`."""
    return [pa.field(name, type_) for name, type_ in _DECODED[kind]]


def fixed_tables(decode_values: str | None = None) -> dict[str, Any]:
    """`FIXED_TABLES` for a run with that option."""
    if decode_values is None:
        return FIXED_TABLES
    fields = [*RECORDS, *decoded_fields(decode_values)]
    return {**FIXED_TABLES, "records": pa.schema(fields)}


def internal_schema(key: pa.DataType | None, value: pa.DataType) -> pa.Schema:
    """Schema of ``internal/<Name>``; records of the metadata log have no key."""
    return pa.schema(
        [
            ("exchange_id", _i64),
            ("batch_index", _i64),
            ("record_index", _i64),
            ("topic", _string),
            ("partition", _i32),
            ("offset", _i64),
            ("timestamp", TIME),
            ("key_version", _i16),
            ("value_version", _i16),
            *([] if key is None else [("key", key)]),
            ("value", value),
            ("value_unknown_tags", UNKNOWN_TAGS),
        ]
    )
