"""Storms: clients that connect, ask for metadata or repeat a failing request without a pause."""

from __future__ import annotations

from typing import NamedTuple

from kdissect.incidents.evidence import IDS, PARTIES, runs
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, WARN
from kdissect.incidents.kind import kind, lasted_ms
from kdissect.tables.schemas import Row
from kdissect.text import byte_size, duration, plural

SHORT_S = 5  # connections of pooled clients live for minutes (connections.max.idle.ms: 9 min)


class Storm(NamedTuple):
    """The least count, length and rate of events that follow one another without a pause."""

    count_min: int
    pause_ms: int
    length_ms: int
    rate: int  # a second

    def signs(self, key: str, rows: str) -> str:
        """Return SQL of the keys with enough rows, as it follows FROM."""
        return f"(SELECT 1 FROM {rows} GROUP BY {key} HAVING count(*) >= {self.count_min})"

    def found(self, count: str) -> str:
        """Return SQL of the condition for a group of rows, by the `time` of each event.

        count: the column with their number. start: when the first event began.
        """
        return f"""
          {count} >= {self.count_min}
          AND max(time) - min(time) >= INTERVAL {self.length_ms} MILLISECONDS
          AND {count} >= {self.rate} * epoch(max(time) - start)
        """


# Clients open a few connections to each broker when they start; a test program that starts
# several clients opened 21 within a second. Many clients that start at once are no storm.
CONNECTIONS = Storm(30, pause_ms=2000, length_ms=2000, rate=2)
# A client that starts sends up to 17 Metadata requests within seconds. Waiting for a new topic or
# leader, it sends one each retry.backoff.ms: 100 ms, and up to 1 s apart (KIP-580). Monitors ask
# once a second or, if they are eager, twice.
METADATA = Storm(30, pause_ms=1000, length_ms=3000, rate=3)
# With Kafka's defaults a client repeats a request after 100 ms, 200 ms, ... 1 s (KIP-580): 8 times
# in 5 s. An election of a leader takes less than that.
RETRIES = Storm(20, pause_ms=1000, length_ms=2000, rate=3)


# A client that opens a connection for each record is a storm. Each connection costs the broker a
# thread's time, handshakes of TLS and SASL, and a Metadata response.
_OPENED = f"""(
  SELECT *, first_time AS time FROM sessions
  WHERE handshake_seen AND (is_kafka OR is_tls) AND NOT is_broker
    AND close_reason IN ('fin', 'rst') AND last_time - first_time < INTERVAL {SHORT_S} SECONDS
)"""
_CONNECTION_STORMS = f"""
    SELECT client, broker, run, min(time) AS start, max(time) AS stop,
      count(*) AS connections,
      list(connection_id ORDER BY time)[:{EVIDENCE_MAX}] AS connection_ids
    FROM ({runs(_OPENED, "client, broker", CONNECTIONS.pause_ms)})
    GROUP BY ALL HAVING {CONNECTIONS.found("connections")} ORDER BY start, client
"""
_OPENINGS = CONNECTIONS.signs("client, broker", "sessions WHERE handshake_seen")


@kind("network", WARN, "client", _OPENINGS, _CONNECTION_STORMS)
def connection_storm(row: Row) -> str:
    """Return the text of the connections of a client to a broker."""
    return (
        f"{row['client']} opened {plural(row['connections'], 'connection')} to "
        f"{row['broker']} in {_pace(row, row['connections'])}, "
        f"none open for {SHORT_S} s. An application should keep one client and share it."
    )


# A client needs Metadata when it starts, after an error, and every metadata.max.age.ms (5 minutes).
# It asks twice for a topic that its first request makes. So one that makes many topics sends many
# requests, but few with the same topics.
QUESTION_MIN = 3  # requests for each list of topics
_ASKED = "(SELECT * FROM requests WHERE api = 'Metadata' AND NOT is_broker)"
_METADATA_STORMS = f"""
    SELECT client, run, min(time) AS start, max(coalesce(response_time, time)) AS stop,
      count(*) AS requests, sum(request_size) + sum(response_size) AS bytes,
      mode(error_name ORDER BY error_name) FILTER (failed) AS error,
      sum(duration_ms) AS lost_ms, {PARTIES}, {IDS}
    FROM ({runs(_ASKED, "client", METADATA.pause_ms)})
    GROUP BY client, run HAVING {METADATA.found("requests")}
      AND requests >= {QUESTION_MIN} * count(DISTINCT topics)
    ORDER BY start, client
"""
_QUESTIONS = METADATA.signs("client", "requests WHERE api = 'Metadata'")


@kind("traffic", WARN, "client", _QUESTIONS, _METADATA_STORMS)
def metadata_storm(row: Row) -> str:
    """Return the text of a client's requests."""
    error = f" Their most frequent error: {row['error']}." if row["error"] else ""
    return (
        f"{row['client']} sent {plural(row['requests'], 'Metadata request')} in "
        f"{_pace(row, row['requests'])}; requests and responses have "
        f"{byte_size(row['bytes'])}.{error}"
    )


# By the times of the errors: requests that wait in a queue are no answer to them
_FAILING = """(
  SELECT * REPLACE (response_time AS time) FROM requests
  WHERE failed AND response_time IS NOT NULL AND NOT is_broker
)"""
_RETRY_STORMS = f"""
    SELECT client, api, error_name AS error, run, min(request_time) AS start,
      max(time) AS stop, count(*) AS requests,
      sum(request_size) AS bytes, sum(duration_ms) AS lost_ms, {PARTIES}, {IDS}
    FROM ({runs(_FAILING, "client, api, error_name", RETRIES.pause_ms)})
    WHERE api NOT IN ('SaslHandshake', 'SaslAuthenticate', 'Metadata')
    GROUP BY ALL HAVING {RETRIES.found("requests")} ORDER BY start, client, api
"""
_FAILURES = RETRIES.signs("client, api, error_name", "requests WHERE failed")


@kind("errors", BAD, "client", _FAILURES, _RETRY_STORMS)
def retry_storm(row: Row) -> str:
    """Return the text of a client's requests with one error."""
    return (
        f"{row['client']} sent {plural(row['requests'], row['api'] + ' request')} "
        f"({byte_size(row['bytes'])}) in {_pace(row, row['requests'])}; "
        f"{', '.join(row['brokers'])} answered each with {row['error']}."
    )


def _pace(row: Row, count: int) -> str:
    """Return the length of a storm and its rate: 3.01 s, 12.0 a second"""
    length_ms = lasted_ms(row)
    return f"{duration(length_ms)}, {count / (length_ms / 1000):,.1f} a second"
