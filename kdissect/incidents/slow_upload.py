"""`slow_upload`: requests took long to arrive, because the network or the broker took few bytes.

A receive window limits the sender (RFC 9293, 3.8.6). A window of zero means that the receiver does
not read; a connection without window scaling (RFC 7323) has at most 64 KiB in flight.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import Evidence, Row, runs
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, WARN, Incident, Kind
from kdissect.text import duration, plural, share

KIND = Kind("slow_upload", "client", "requests took long to arrive", "latency")

# A client with the default request.timeout.ms of 30 s survives shorter uploads, but not many.
UPLOAD_MS = 1000
# With uploads this long, a request that waits for others before it is close to its timeout.
LONG_MS = 5000
PAUSE_MS = 30_000
# Shorter uploads are slow if they have fewer bytes a second than any usual network, and if they
# follow one another: for half of the time, over some seconds.
SHORT_MS = 100
BYTES_PER_MS = 1000
SUSTAINED_MS = 5000
SHARE_MIN = 0.5
SHORT_PAUSE_MS = 2000


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the slow uploads of each client to each broker."""
    slow = f"(SELECT * FROM requests WHERE upload_ms >= {UPLOAD_MS})"
    short = f"""(
      SELECT * FROM requests WHERE upload_ms >= {SHORT_MS}
        AND request_size < upload_ms * {BYTES_PER_MS}
        AND (client, broker) NOT IN (SELECT client, broker FROM {slow}))"""
    rows = evidence.rows(
        f"""
        WITH slow_runs AS (
          FROM ({runs(slow, "client, broker", PAUSE_MS)})
          UNION ALL FROM ({runs(short, "client, broker", SHORT_PAUSE_MS)})
        ), uploads AS (
          SELECT client, broker, run, min(time) AS start, max(request_end_time) AS stop,
            count(*) AS requests, sum(upload_ms) AS upload_ms, max(upload_ms) AS longest_ms,
            sum(upload_ms) + sum(coalesce(service_ms, 0)) AS whole_ms,
            list(exchange_id ORDER BY time)[:{EVIDENCE_MAX}] AS exchange_ids,
            list(DISTINCT connection_id ORDER BY connection_id) AS connection_ids
          FROM slow_runs GROUP BY client, broker, run
          HAVING longest_ms >= {UPLOAD_MS} OR (upload_ms >= {SUSTAINED_MS}
            AND upload_ms >= {SHARE_MIN} * ms_between(min(time), max(request_end_time)))
        )
        SELECT u.*, sum(s.response_zero_window_ms) AS zero_window_ms,
          sum(s.response_zero_window_count)::BIGINT AS zero_windows,
          sum(s.request_retransmitted_segment_count)::BIGINT AS retransmitted,
          bool_or((s.request_syn_seen AND s.request_window_scale IS NULL)
            OR (s.response_syn_seen AND s.response_window_scale IS NULL)) AS is_unscaled
        FROM uploads u JOIN sessions s ON list_contains(u.connection_ids, s.connection_id)
        GROUP BY ALL ORDER BY start, client
        """
    )
    for row in rows:
        yield evidence.incident(
            row,
            KIND,
            BAD if row["longest_ms"] >= LONG_MS else WARN,
            row["client"],
            f"{plural(row['requests'], 'request')} of {row['client']} took "
            f"{duration(row['upload_ms'])} to arrive at {row['broker']}, the longest "
            f"{duration(row['longest_ms'])}: {share(row['upload_ms'] / row['whole_ms'])} of the "
            f"time until the response. {_cause(row)}",
            time_lost_ms=row["upload_ms"],
        )


def _cause(row: Row) -> str:
    """Return the sentences about the signs of TCP on the connections."""
    signs = []
    if row["zero_windows"]:
        signs.append(
            f"The broker announced a full receive window {row['zero_windows']:,} times, "
            f"{duration(row['zero_window_ms'])} in all: it read too slowly."
        )
    if row["is_unscaled"]:
        signs.append("A connection has no window scaling, so at most 64 KiB are in flight.")
    if row["retransmitted"]:
        signs.append(f"{plural(row['retransmitted'], 'segment')} of requests were sent again.")
    return " ".join(signs) or "TCP shows no cause: look at the client and its network."
