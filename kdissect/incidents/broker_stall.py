"""A broker that sent no response on any connection while requests waited.

A long garbage collection, a stopped process or a blocked disk looks like this: all connections are
silent, then all responses come at once. If the capture ends before, the silence lasts until then.
"""

from __future__ import annotations

from kdissect.incidents.evidence import CONNECTION_IDS, HELD_APIS, PARTIES
from kdissect.incidents.incident import BAD, EVIDENCE_MAX
from kdissect.incidents.kind import kind, lasted_ms
from kdissect.tables.schemas import Row
from kdissect.text import duration, plural

# Shorter pauses are usual: a young collection takes 100 ms, a slow disk write some hundreds.
STALL_MS = 1000
# A broker that runs again works off its queue at once; later responses are slow for other reasons.
RELEASE_MS = 500
# After so long without a request it is open whether the broker or one idle connection is dead.
IDLE_MS = 5000
# A broker answers these from memory or, as Produce, after one write to memory or to its replicas.
# Other requests may wait for a controller or for other clients.
QUICK_APIS = (
    "Produce",
    *("ApiVersions", "Metadata", "Heartbeat", "FindCoordinator", "ListOffsets", "OffsetFetch"),
    *("Fetch", "SaslHandshake", "SaslAuthenticate"),
)
_END = {False: "the responses came at once after it", True: "none was answered by its end"}
POLLS = ("Fetch", "ShareFetch")
# a request that waited so long, answered or not
_SIGNS = f"""requests
  WHERE wait = 'answer' AND ms_between(request_end_time, response_time) >= {STALL_MS}
  OR status = 'response_missing' AND api NOT IN {HELD_APIS}"""
# A row for each stall of a broker. Waiting requests of two connections prove it, or those of one
# connection with a request of QUICK_APIS. A long poll that ended in time proves nothing.
_STALLS = f"""
    WITH answered AS (
      SELECT connection_id, max(request_time) AS last_asked FROM requests
      WHERE response_time IS NOT NULL GROUP BY connection_id
    ), pending AS (
      -- the end of what was seen stands for the response that has not come
      SELECT r.* REPLACE (seen_until(c.last_time) AS response_time)
      FROM requests r JOIN sessions s USING (connection_id) LEFT JOIN answered a
        USING (connection_id)
      JOIN exchanges e USING (exchange_id)
      JOIN captures c ON c.capture_id = e.request_capture_id
      WHERE r.status = 'response_missing' AND r.api NOT IN {HELD_APIS}
        AND s.close_reason NOT IN ('fin', 'rst') AND s.response_gap_count = 0
        AND r.request_time >= coalesce(a.last_asked, r.request_time)
    ), responses AS (
      SELECT broker, response_time,
        lag(response_time) OVER (PARTITION BY broker ORDER BY response_time) AS previous
      FROM (SELECT broker, response_time FROM requests WHERE response_time IS NOT NULL
        UNION ALL SELECT broker, response_time FROM pending)
    ), silences AS (
      SELECT broker, previous AS silent_from, response_time AS silent_to FROM responses
      WHERE ms_between(previous, response_time) >= {STALL_MS}
    ), candidates AS (
      SELECT s.broker, s.silent_from, s.silent_to, r.*, false AS is_pending
      FROM silences s JOIN requests r ON r.broker = s.broker
        AND r.response_time BETWEEN s.silent_to
          AND s.silent_to + INTERVAL {RELEASE_MS} MILLISECONDS
      WHERE r.wait = 'answer' AND r.service_ms IS NOT NULL
      UNION ALL SELECT s.broker, s.silent_from, s.silent_to, r.*, true
      FROM silences s JOIN pending r ON r.broker = s.broker AND r.response_time = s.silent_to
        -- others got a response after an older one: its connection is to blame
        AND ms_between(r.request_end_time, s.silent_from) <= {RELEASE_MS}
    ), waiting AS (
      SELECT c.*, greatest(c.request_end_time, silent_from,
        -- a quota: the broker does not read from the connection for that time (KIP-219)
        t.response_time + to_milliseconds(t.throttle_time_ms)) AS waits_from
      FROM candidates c ASOF LEFT JOIN (FROM requests WHERE throttle_time_ms > 0) t
        ON t.connection_id = c.connection_id AND t.response_time < c.response_time
      WHERE c.request_end_time < silent_to
        AND ms_between(waits_from, silent_to) >= {RELEASE_MS}
    )
    SELECT broker, silent_from, silent_to AS stop, count(*) AS requests,
      bool_or(is_pending) AS is_open, count(DISTINCT connection_id) AS connections,
      {PARTIES},
      count(*) FILTER (api IN {QUICK_APIS}) AS quick_requests,
      -- a poll that was on hold when the silence began does not show when the stall did
      coalesce(min(waits_from) FILTER (waits_from > silent_from OR api NOT IN {POLLS}),
        silent_from) AS start,
      max(epoch_us(silent_to) - epoch_us(waits_from)) / 1e3 AS longest_ms,
      sum(epoch_us(response_time) - epoch_us(waits_from)) / 1e3 AS lost_ms,
      list(exchange_id ORDER BY waits_from, exchange_id)[:{EVIDENCE_MAX}] AS exchange_ids,
      {CONNECTION_IDS}
    FROM waiting GROUP BY broker, silent_from, silent_to
    HAVING longest_ms >= {STALL_MS} AND (connections > 1 OR (quick_requests > 0
      AND (NOT is_open OR ms_between(silent_from, min(waits_from)) < {IDLE_MS})))
    ORDER BY silent_from, broker
"""


@kind("latency", BAD, "broker", _SIGNS, _STALLS)
def broker_stall(row: Row) -> str:
    """Return the text of a stall."""
    return (
        f"{row['broker']} sent no response on any connection for {duration(lasted_ms(row))}. "
        f"{plural(row['requests'], 'request')} of {plural(row['connections'], 'connection')} "
        f"({plural(len(row['clients']), 'client')}) waited; {_END[row['is_open']]}. "
        "Look at the broker's garbage collection log, its disk and its CPU at that time."
    )
