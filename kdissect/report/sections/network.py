"""The wire: retransmissions, gaps, encrypted and foreign connections."""

from __future__ import annotations

from kdissect import text as f
from kdissect.protocol.model import SIDES
from kdissect.report.document import Block, Document, Listing, Options, Section, listed
from kdissect.sql import Database


def _window_scale(side: str) -> str:
    """SQL of one side's window scale as text: "none" without the option, "?" if unknown."""
    return (
        f"CASE WHEN NOT c.{side}_syn_seen THEN '?' "
        f"ELSE coalesce(c.{side}_window_scale::VARCHAR, 'none') END"
    )


def collect(database: Database, _: Options) -> Document:
    """Table `connection_health`."""
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
        CREATE TEMP TABLE connection_health AS
        SELECT c.connection_id, c.client_address, c.broker,
          array_to_string(c.client_ids, ', ') AS client_ids, c.protocol, c.is_kafka, c.is_tls,
          c.tls_version, c.tls_sni, c.close_reason, c.handshake_rtt_ms, c.first_time, c.last_time,
          c.proxied_from, c.closed_by, c.idle_ms_max, {scales} AS window_scales,
          c.request_zero_window_ms + c.response_zero_window_ms AS zero_window_ms,
          c.request_rtt_ms_p50, c.request_rtt_ms_p99, c.response_rtt_ms_p50, c.response_rtt_ms_p99,
          {both}, c.request_retransmitted_segment_count, c.response_retransmitted_segment_count,
          retransmitted_segment_count / nullif(segment_count, 0) AS retransmitted_share
        FROM sessions c
        """
    )
    return {
        "lossy_connections": listed(
            database,
            "connection_health WHERE retransmitted_segment_count + out_of_order_segment_count "
            "+ gap_count + missing_byte_count + zero_window_ms > 0 AND is_kafka",
            "missing_byte_count DESC, retransmitted_segment_count DESC, connection_id",
        ),
        "other_connections": listed(
            database, "connection_health WHERE NOT is_kafka", "byte_count DESC, connection_id"
        ),
        "close_reasons": database.rows(
            "SELECT close_reason, count(*) AS connections FROM connections "
            "GROUP BY 1 ORDER BY 2 DESC, 1"
        ),
    }


def section(document: Document) -> Section:
    """Return the section of the page."""
    d, health = document["network"], document["overview"]["health"]
    blocks: list[Block] = [
        _text(health, document["latency"]["handshake_rtt"]),
        Listing("lossy", d["lossy_connections"]),
        Listing("others", d["other_connections"]),
    ]
    return Section("network", "Network", blocks, badge=health["retransmitted_segment_count"])


def _text(health: Document, rtt: Document) -> str:
    text = (
        f"{f.count(health['segment_count'])} TCP segments of Kafka connections: "
        f"{f.count(health['retransmitted_segment_count'])} retransmitted, "
        f"{f.count(health['out_of_order_segment_count'])} out of order, "
        f"{f.plural(health['gap_count'], 'gap')} with "
        f"{f.byte_size(health['missing_byte_count'])} missing."
    )
    if rtt["count"]:
        text += (
            f" Handshakes took {f.duration(rtt['p50'])} (p50), {f.duration(rtt['p99'])} (p99), "
            f"{f.duration(rtt['max'])} at most."
        )
    return text
