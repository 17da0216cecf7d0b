"""Connections that died while idle, closed too early, or needed TCP to send much again."""

from __future__ import annotations

from kdissect.incidents.evidence import HELD_APIS, IDS, PARTIES
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, INFO, WARN
from kdissect.incidents.kind import CAPTURES, kind
from kdissect.tables.schemas import Row
from kdissect.text import duration, plural, share

# Shorter than the idle limit of any load balancer, and longer than a client's usual pauses:
# heartbeats follow each 3 s, long polls each 0.5 s.
IDLE_S = 5
# A broker answers within this time, or its other connections show that it is slow as well.
SILENCE_S = 2
# The broker's other connections prove that it is alive.
PROOF_S = 60
# A broker holds these back for other members or share groups. Fetch says how long it may wait.
_HELD_FOR_OTHERS = ("ShareFetch", "JoinGroup", "SyncGroup")
_DEAD = f"""requests WHERE status IN ('response_missing', 'connection_closed')
  AND api NOT IN {_HELD_FOR_OTHERS}"""
# A row for each client and broker with connections that died while they were idle. Load balancers
# and firewalls forget idle connections. Some send RST at the next segment, others drop it: then the
# client waits for its request timeout. Kafka's own limit is connections.max.idle.ms.
_CUT = f"""
    WITH alive AS (
      SELECT connection_id, max(response_end_time) AS answered FROM requests
      WHERE response_time IS NOT NULL GROUP BY connection_id
    ), asked AS (
      SELECT r.connection_id, a.answered, min(r.request_time) AS asked,
        arg_min(coalesce(f.request.max_wait_ms, 0), r.request_time) AS wait_ms,
        count(*) AS requests, list(r.exchange_id ORDER BY r.request_time) AS ids
      FROM (FROM {_DEAD}) r JOIN alive a USING (connection_id)
      LEFT JOIN api_fetch f USING (exchange_id)
      WHERE r.request_time > a.answered GROUP BY ALL
    ), dead AS (
      SELECT q.*, s.client, s.broker, s.last_time,
        s.close_reason = 'rst' AND s.closed_by = 'broker' AS is_reset,
        ms_between(q.asked, s.last_time) >= {SILENCE_S} * 1000 + q.wait_ms AS is_silent
      FROM asked q JOIN sessions s USING (connection_id)
      WHERE q.asked - q.answered >= INTERVAL {IDLE_S} SECONDS
        AND s.response_last_time <= q.asked AND s.response_gap_count = 0
        AND NOT s.is_broker
    )
    SELECT client, broker, min(asked) AS start, max(last_time) AS stop,
      max(epoch_us(asked) - epoch_us(answered)) / 1e3 AS idle_ms, is_reset,
      count(*) AS connections, sum(requests)::BIGINT AS requests,
      sum(ms_between(asked, last_time)) AS lost_ms, max(ms_between(asked, last_time)) AS longest_ms,
      flatten(list(ids ORDER BY asked))[:{EVIDENCE_MAX}] AS exchange_ids,
      list(connection_id ORDER BY asked)[:{EVIDENCE_MAX}] AS connection_ids
    FROM dead d WHERE (is_reset OR is_silent) AND EXISTS (
      FROM requests r WHERE r.broker = d.broker AND r.connection_id != d.connection_id
        AND r.response_time BETWEEN d.asked AND d.last_time + INTERVAL {PROOF_S} SECONDS)
    GROUP BY client, broker, is_reset ORDER BY start, client, is_reset
"""


@kind("network", f"if(is_reset, '{WARN}', '{BAD}')", "client", _DEAD, _CUT)
def idle_connection_cut(row: Row) -> str:
    """Return the text of the connections of a client to a broker."""
    how = "RST answered the next segment."
    if not row["is_reset"]:
        how = (
            f"Nothing answered {plural(row['requests'], 'request')} for "
            f"up to {duration(row['longest_ms'])}, while the broker answered other connections."
        )
    return (
        f"{plural(row['connections'], 'connection')} of {row['client']} to {row['broker']} "
        f"died while idle for {duration(row['idle_ms'])}. {how} Compare the idle limits of "
        "load balancers and firewalls with connections.max.idle.ms of the client."
    )


# Requests that a broker holds (HELD_APIS) do not count, nor does one without a response at the end
# of the capture: it may have come later.
_CLOSED = f"""requests WHERE status = 'connection_closed' AND is_unanswered
  AND api NOT IN {HELD_APIS}"""
_UNANSWERED = f"""
    SELECT r.client, min(r.time) AS start, max(s.last_time) AS stop, count(*) AS requests,
      sum(epoch_us(s.last_time - r.time)) / 1e3 AS lost_ms,
      list_sort(list(DISTINCT api)) AS apis, {PARTIES}, {IDS}
    FROM (FROM {_CLOSED}) r JOIN (SELECT connection_id, last_time FROM sessions) s
      USING (connection_id)
    GROUP BY r.client ORDER BY start, r.client
"""


@kind("errors", INFO, "client", _CLOSED, _UNANSWERED)
def unanswered_requests(row: Row) -> str:
    """Return the text of a client's requests whose connection closed before the response."""
    return (
        f"{plural(row['requests'], 'request')} ({', '.join(row['apis'])}) had no response "
        "before the connection was closed. Counted as lost: the time until then."
    )


AGAIN_SHARE_MIN = 0.01
_AGAIN = "(request_retransmitted_segment_count + response_retransmitted_segment_count)"
_WORST = f"row({_AGAIN}, connection_id)"
_ALL = "(request_segment_count + response_segment_count)"
# A row for all connections, which names the worst
_SENT_AGAIN = f"""
    SELECT sum({_AGAIN})::BIGINT AS again, again / sum({_ALL}) AS part,
      min(first_time) AS start, max(last_time) AS stop,
      arg_max(client_address || ' to ' || broker, {_WORST}) AS worst,
      arg_max(client, {_WORST}) AS client, max({_AGAIN}) AS worst_again,
      [arg_max(connection_id, {_WORST})] AS connection_ids
    FROM sessions WHERE is_kafka HAVING again >= {AGAIN_SHARE_MIN} * sum({_ALL}) AND again > 0
"""


@kind("network", INFO, CAPTURES, f"sessions WHERE is_kafka AND {_AGAIN} > 0", _SENT_AGAIN)
def retransmissions(row: Row) -> str:
    """Return the text of all segments that were sent again."""
    return (
        f"{plural(row['again'], 'segment')} ({share(row['part'])}) were sent again, "
        f"{row['worst_again']:,} of them on {row['worst']} ({row['client']})."
    )
