"""The wire: lost segments, foreign connections, waits for a quota, and faults in the data."""

from __future__ import annotations

from kdissect import text as f
from kdissect.protocol.model import SIDES
from kdissect.report.document import LISTS, Block, Document, Listing, Options, Section, listed
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
            """
            FROM connection_health WHERE is_kafka AND retransmitted_segment_count
              + out_of_order_segment_count + gap_count + missing_byte_count + zero_window_ms > 0
            ORDER BY missing_byte_count DESC, retransmitted_segment_count DESC, connection_id
            """,
        ),
        "other_connections": listed(
            database,
            "FROM connection_health WHERE NOT is_kafka ORDER BY byte_count DESC, connection_id",
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


# -- throttling: waits for a quota, as `throttle_time_ms` of responses has them (KIP-219)


def collect_throttling(database: Database, _: Options) -> Document:
    """Make the table `throttling`, a client, API and broker a row; return its totals and rows."""
    database.run(
        """
        CREATE TEMP TABLE throttling AS
        SELECT client_id, client_ip, api, broker, count(*) AS responses,
          sum(throttle_time_ms)::BIGINT AS throttle_ms, max(throttle_time_ms) AS throttle_ms_max,
          min(response_time) AS first_time, max(response_time) AS last_time,
          arg_max(response_packet, throttle_time_ms) AS packet,
          arg_max(capture_id, throttle_time_ms) AS capture_id
        FROM requests WHERE throttle_time_ms > 0 GROUP BY ALL
        """
    )
    total = database.row(
        "SELECT coalesce(sum(responses), 0)::BIGINT AS responses, "
        "coalesce(sum(throttle_ms), 0)::BIGINT AS throttle_ms, "
        "max(throttle_ms_max) AS throttle_ms_max FROM throttling"
    )
    return {**total, "clients": listed(database, LISTS["throttling"])}


def throttling_section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["throttling"]
    listing = Listing("throttling", d["clients"])
    return Section(
        "throttling",
        "Throttling",
        [listing] if d["responses"] else [],
        "No response has a throttle time.",
        badge=d["responses"],
    )


# -- anomalies: faults in the data, by kind and with examples

_EXAMPLES = 8  # of each kind
_WORST_FIRST = "CASE severity WHEN 'error' THEN 0 WHEN 'warning' THEN 1 ELSE 2 END"


def collect_anomalies(database: Database, _: Options) -> Document:
    """Make the table `anomalies_all`; return the kinds and examples of each."""
    database.run(
        """
        CREATE TEMP TABLE anomalies_all AS
        SELECT a.kind, a.severity, a.detail, a.packet, a.capture_id, a.direction, a.pos,
          a.byte_count, a.connection_id, a.exchange_id, h.client_address, h.broker, x.api,
          x.client_id, row_number() OVER (
            PARTITION BY a.kind, a.severity ORDER BY a.capture_id, a.packet, a.pos) AS number
        FROM anomalies a LEFT JOIN sessions h USING (connection_id)
        LEFT JOIN requests x ON x.exchange_id = a.exchange_id
        """
    )
    kinds = database.rows(
        f"""
        SELECT kind, severity, count(*) AS count, coalesce(sum(byte_count), 0)::BIGINT AS bytes,
          count(DISTINCT connection_id) AS connections
        FROM anomalies GROUP BY kind, severity ORDER BY {_WORST_FIRST}, count DESC, kind
        """
    )
    examples = database.rows(
        f"SELECT * EXCLUDE (number) FROM anomalies_all WHERE number <= {_EXAMPLES} "
        f"ORDER BY {_WORST_FIRST}, kind, number"
    )
    return {"kinds": kinds, "examples": examples}


def anomalies_section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["anomalies"]
    blocks = d["kinds"] and [
        "Faults in the data. The button of a packet copies Wireshark's display filter for it.",
        Listing("anomaly_kinds", d["kinds"]),
        Listing("anomalies", d["examples"]),
    ]
    return Section(
        "anomalies",
        "Anomalies",
        blocks,
        "No fault found in the data.",
        badge=sum(row["count"] for row in d["kinds"]),
    )
