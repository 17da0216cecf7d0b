"""The report's overview: counts, the captured time, and how complete the capture is."""

from __future__ import annotations

from kdissect import text as f
from kdissect.charts import Chart, incidents_over_time
from kdissect.report.document import Document, Listing, Options, Section
from kdissect.sql import Database
from kdissect.sql.sessions import UNREAD_TLS

_COUNTERS = (
    *("byte_count", "framed_byte_count", "unframed_byte_count", "missing_byte_count"),
    *("segment_count", "retransmitted_segment_count", "out_of_order_segment_count"),
    *("duplicate_segment_count", "gap_count"),
)


def collect(database: Database, options: Options) -> Document:
    """Return the counts, the captured time, and the health of the capture."""
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
        FROM requests
        """
    )
    return {
        **span,
        "packets": options.totals["packets"],
        "capture_bytes": options.totals["bytes"],
        "connections": database.value("SELECT count(*) FROM connections"),
        "kafka_connections": database.value("SELECT count(*) FROM connections WHERE is_kafka"),
        **exchanges,
        "record_batches": database.value("SELECT count(*) FROM record_batches"),
        "records": database.value("SELECT count(*) FROM records"),
        "anomalies": database.value("SELECT count(*) FROM anomalies"),
        "health": database.row(f"SELECT {sums} FROM connections WHERE is_kafka"),
        "read": database.row(
            f"""
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
            FROM connections WHERE is_kafka OR {UNREAD_TLS}
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


def section(document: Document) -> Section:
    """Return the section of the page behind the incidents and the main figures."""
    d = document["overview"]
    captures = [
        {
            **row,
            "file": row["path"].replace("\\", "/").rpartition("/")[2],
            "ignored": ", ".join(
                f"{name} {f.count(number)}" for name, number in row["ignored_reasons"].items()
            ),
        }
        for row in d["captures"]
    ]
    protocols = d["protocols"] if len(d["protocols"]) > 1 else []
    blocks = [
        Listing("captures", captures),
        Listing("protocols", protocols),
        Listing("brokers", d["brokers"]),
    ]
    return Section("overview", "What stands out", blocks)


def timeline(document: Document) -> Chart | None:
    """A lane for each kind of incident, over the time of the capture."""
    incidents = document["incidents"]
    if not incidents:
        return None
    first = min(row["start_time"] for row in incidents)
    return incidents_over_time(
        "incidents",
        "Incidents over time",
        f"{f.plural(len(incidents), 'incident')}, the first at {f.moment(first)} UTC.",
        incidents,
        (document["overview"]["first_time"], document["overview"]["last_time"]),
    )


def clear(document: Document) -> list[str]:
    """Return the passed checks. A capture with undecrypted TLS connections, without responses to
    requests, or of which only some exchanges are here, passes no check."""
    d = document["overview"]
    unanswered = d["response_missing"] + d["connection_closed"] + d["unjudged"]
    checks = (
        ("no bytes missing", not d["health"]["missing_byte_count"]),
        ("no retransmissions", not d["health"]["retransmitted_segment_count"]),
        ("every request answered", not unanswered),
        ("no errors", not d["failed"]),
        ("no throttling", not document["throttling"]["responses"]),
        ("no anomalies", not d["anomalies"]),
    )
    is_read = d["paired"] and not d["read"]["unread_tls_connections"] and not document["selection"]
    return [text for text, holds in checks if holds and is_read]
