"""The wire: retransmissions, gaps, encrypted and foreign connections, anomalies."""

from __future__ import annotations

from typing import Any

from kdissect.protocol.model import SIDES
from kdissect.report.database import ReportDatabase, listed
from kdissect.sql.requests import endpoint

_EXAMPLES = 8  # of each kind of anomaly


def _window_scale(side: str) -> str:
    """SQL of one side's window scale as text: "none" without the option, "?" if unknown."""
    return (
        f"CASE WHEN NOT c.{side}_syn_seen THEN '?' "
        f"ELSE coalesce(c.{side}_window_scale::VARCHAR, 'none') END"
    )


def collect(database: ReportDatabase) -> dict[str, Any]:
    """Tables `connection_health` and `anomalies_all`."""
    both = ", ".join(
        f"(c.request_{name} + c.response_{name})::BIGINT AS {name}"
        for name in (
            *("byte_count", "missing_byte_count", "unframed_byte_count", "segment_count"),
            *("retransmitted_segment_count", "out_of_order_segment_count", "gap_count"),
        )
    )
    scales = " || ' / ' || ".join(_window_scale(side) for side in SIDES)
    database.run(
        f"""
        CREATE TABLE connection_health AS
        SELECT c.connection_id, {endpoint("c.client_ip", "c.client_port")} AS client_address,
          {endpoint("c.broker_ip", "c.broker_port")} AS broker,
          array_to_string(c.client_ids, ', ') AS client_ids, c.protocol, c.is_kafka, c.is_tls,
          c.tls_version, c.tls_sni, c.close_reason, c.handshake_rtt_ms, c.first_time, c.last_time,
          c.proxied_from, c.closed_by, c.idle_ms_max, {scales} AS window_scales,
          c.request_zero_window_ms + c.response_zero_window_ms AS zero_window_ms,
          c.request_rtt_ms_p50, c.request_rtt_ms_p99, c.response_rtt_ms_p50, c.response_rtt_ms_p99,
          {both}, c.request_retransmitted_segment_count, c.response_retransmitted_segment_count,
          retransmitted_segment_count / nullif(segment_count, 0) AS retransmitted_share
        FROM connections c
        """
    )
    database.run(
        """
        CREATE TABLE anomalies_all AS
        SELECT a.kind, a.severity, a.detail, a.packet, a.capture_id, a.direction, a.pos,
          a.byte_count,
          a.connection_id, a.exchange_id, h.client_address, h.broker, x.api, x.client_id,
          row_number() OVER (PARTITION BY a.kind, a.severity ORDER BY a.capture_id, a.packet, a.pos)
            AS number
        FROM anomalies a LEFT JOIN connection_health h USING (connection_id)
        LEFT JOIN x ON x.exchange_id = a.exchange_id
        """
    )
    kinds = database.rows(
        """
        SELECT kind, severity, count(*) AS count, coalesce(sum(byte_count), 0)::BIGINT AS bytes,
          count(DISTINCT connection_id) AS connections
        FROM anomalies GROUP BY kind, severity
        ORDER BY CASE severity WHEN 'error' THEN 0 WHEN 'warning' THEN 1 ELSE 2 END, count DESC,
          kind
        """
    )
    examples = database.rows(
        f"SELECT * EXCLUDE (number) FROM anomalies_all WHERE number <= {_EXAMPLES} "
        "ORDER BY CASE severity WHEN 'error' THEN 0 WHEN 'warning' THEN 1 ELSE 2 END, kind, number "
        "LIMIT 200"
    )
    database.run(
        "CREATE VIEW lossy AS SELECT * FROM connection_health "
        "WHERE retransmitted_segment_count + out_of_order_segment_count + gap_count "
        "+ missing_byte_count + zero_window_ms > 0 AND is_kafka"
    )
    database.run("CREATE VIEW closed_to_us AS SELECT * FROM connection_health WHERE NOT is_kafka")
    return {
        "lossy_connections": listed(
            database,
            "lossy",
            "missing_byte_count DESC, retransmitted_segment_count DESC, connection_id",
        ),
        "other_connections": listed(database, "closed_to_us", "byte_count DESC, connection_id"),
        "close_reasons": database.rows(
            "SELECT close_reason, count(*) AS connections FROM connections "
            "GROUP BY 1 ORDER BY 2 DESC, 1"
        ),
        "anomaly_kinds": kinds,
        "anomaly_examples": examples,
    }
