"""Tables that all sections of the report read: `x`, an exchange a row, and `broker_connections`.

Columns of `x` that need a word:

- `service_ms` is the time that the broker itself took. `queued_ms` is the time that the response
  waited for the previous response on the connection.
- `wait` says what the time was spent on: an ordinary answer, a long poll, or waiting for members of
  a group. `tables/waits` decides it.
- `failed`: the response has an error code that is not part of normal operation. The whole report
  counts errors this way.
- `is_unanswered`: the broker did not respond. `may_be_lost`: the response may lie in bytes that the
  capture lacks. `sql/unanswered` decides between them.
"""

from __future__ import annotations

from kdissect.report.database import ReportDatabase
from kdissect.sql.exchange_facts import broker_connections, endpoint, is_fault, topic_names
from kdissect.sql.unanswered import unanswered

EXACT_MAX = 20_000_000  # above this many exchanges percentiles are t-digests: bounded memory


def prepare(database: ReportDatabase) -> None:
    """Make `broker_connections`, `topic_names` and `x`."""
    database.run(f"CREATE TABLE topic_names AS {topic_names()}")
    database.run(
        f"CREATE TABLE broker_connections AS {broker_connections(database.has('apis/Fetch'))}"
    )
    database.run(
        f"""
        CREATE TABLE x AS
        SELECT
          e.exchange_id, e.connection_id, e.api_name AS api, e.api_key, e.api_version,
          e.client_id, e.client_ip, e.client_port,
          {endpoint("e.broker_ip", "e.broker_port")} AS broker,
          coalesce(e.request_time, e.response_time) AS time,
          e.request_time, e.response_time, e.latency_ms, e.queued_ms, e.service_ms, e.upload_ms,
          e.download_ms, e.wait, e.request_size, e.response_size, e.status, e.error_code,
          e.error_name, e.error_codes, e.throttle_time_ms, e.topics, e.group_id, e.transactional_id,
          e.decode_status, e.request_packet, e.response_packet,
          coalesce(e.request_packet, e.response_packet) AS packet,
          coalesce(e.request_capture_id, e.response_capture_id) AS capture_id,
          coalesce(e.error_code, 0) <> 0 AS has_error,
          {is_fault("e.api_name", "e.error_codes")} AS failed,
          u.may_be_lost, NOT coalesce(u.may_be_lost, true) AS is_unanswered,
          b.connection_id IS NOT NULL AS is_broker
        FROM exchanges e LEFT JOIN broker_connections b ON b.connection_id = e.connection_id
        LEFT JOIN ({unanswered()}) u ON u.exchange_id = e.exchange_id
        """
    )


def quantile(database: ReportDatabase, column: str, share: float, condition: str = "true") -> str:
    """SQL of a quantile, exact unless that takes much memory."""
    exact = database.value("SELECT count(*) <= ? FROM exchanges", [EXACT_MAX])
    name = "quantile_cont" if exact else "approx_quantile"
    return f"{name}({column}, {share}) FILTER ({condition})"


def quantiles(database: ReportDatabase, column: str, condition: str = "true") -> str:
    """SQL of p50, p90, p95, p99 and max of a column."""
    shares = (0.5, 0.9, 0.95, 0.99)
    found = [
        f"{quantile(database, column, share, condition)} AS p{share * 100:.0f}" for share in shares
    ]
    return ", ".join([*found, f"max({column}) FILTER ({condition}) AS max"])
