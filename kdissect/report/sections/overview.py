"""The report's overview: counts, the captured time, and how complete the capture is."""

from __future__ import annotations

from typing import Any

from kdissect.report.database import ReportDatabase

_COUNTERS = (
    *("byte_count", "framed_byte_count", "unframed_byte_count", "missing_byte_count"),
    *("segment_count", "retransmitted_segment_count", "out_of_order_segment_count"),
    *("duplicate_segment_count", "gap_count"),
)


def collect(database: ReportDatabase) -> dict[str, Any]:
    """Return the counts, the captured time, and the health of the capture."""
    manifest = database.tables.manifest
    sums = ", ".join(
        f"coalesce(sum(request_{name} + response_{name}), 0)::BIGINT AS {name}"
        for name in _COUNTERS
    )
    captures = database.rows(
        "SELECT capture_id, path, format, compression, link_types, packet_count, byte_count, "
        "first_time, last_time, truncated_packet_count, tcp_packet_count, duplicate_packet_count, "
        "ignored_packet_count, map_entries(ignored_reasons) AS ignored_reasons, error "
        "FROM captures ORDER BY first_time NULLS LAST, path"
    )
    for capture in captures:
        reasons = capture["ignored_reasons"] or []
        capture["ignored_reasons"] = {item["key"]: item["value"] for item in reasons}
    span = database.row(
        "SELECT min(first_time) AS first_time, max(last_time) AS last_time, "
        "epoch_us(max(last_time) - min(first_time)) / 1e6 AS span_s FROM captures"
    )
    exchanges = database.row(
        """
        SELECT count(*) AS exchanges,
          count(*) FILTER (status = 'paired') AS paired,
          count(*) FILTER (status = 'no_response_expected') AS no_response_expected,
          count(*) FILTER (is_unanswered AND status = 'response_missing') AS response_missing,
          count(*) FILTER (is_unanswered AND status = 'connection_closed') AS connection_closed,
          count(*) FILTER (may_be_lost) AS unjudged,
          count(*) FILTER (status = 'request_missing') AS request_missing,
          count(*) FILTER (failed) AS failed,
          count(*) FILTER (decode_status NOT IN ('ok', 'absent')) AS not_decoded,
          count(DISTINCT api) AS apis
        FROM x
        """
    )
    return {
        **span,
        "packets": manifest["totals"]["packets"],
        "capture_bytes": manifest["totals"]["bytes"],
        "connections": database.value("SELECT count(*) FROM connections"),
        "kafka_connections": database.value("SELECT count(*) FROM connections WHERE is_kafka"),
        **exchanges,
        "record_batches": database.value("SELECT count(*) FROM record_batches"),
        "records": database.value("SELECT count(*) FROM records"),
        "anomalies": database.value("SELECT count(*) FROM anomalies"),
        "health": database.row(f"SELECT {sums} FROM connections WHERE is_kafka"),
        "read": database.row(
            """
            SELECT count(*) FILTER (NOT is_kafka) AS unread_tls_connections,
              -- a connection that carries bytes was acknowledged: those packets were not captured
              count(*) FILTER (
                is_kafka AND response_segment_count = 0 AND request_segment_count > 0
              ) AS request_only_connections,
              count(*) FILTER (
                is_kafka AND request_segment_count = 0 AND response_segment_count > 0
              ) AS response_only_connections,
              coalesce(sum(request_framed_byte_count + response_framed_byte_count), 0)::BIGINT
                AS framed_byte_count,
              coalesce(sum(request_byte_count + request_missing_byte_count + response_byte_count
                + response_missing_byte_count), 0)::BIGINT AS byte_count,
              coalesce(sum(request_byte_count) FILTER (is_kafka), 0)::BIGINT AS request_bytes,
              coalesce(sum(response_byte_count) FILTER (is_kafka), 0)::BIGINT AS response_bytes
            FROM connections
            -- a broker that answered a ClientHello without a ServerHello encrypted nothing
            WHERE is_kafka OR is_tls AND (tls_cipher IS NOT NULL
              OR response_segment_count = 0 OR response_missing_byte_count > 0)
            """
        ),
        "protocols": database.rows(
            "SELECT protocol, count(*) AS connections, "
            "sum(request_byte_count + response_byte_count)::BIGINT AS bytes "
            "FROM connections GROUP BY protocol ORDER BY bytes DESC, protocol"
        ),
        "brokers": database.rows(
            "SELECT node_id, host, port, rack, cluster_id, ip FROM brokers "
            "ORDER BY node_id, host, port"
        ),
        "captures": captures,
    }
