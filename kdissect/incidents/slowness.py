"""Clients that wait: for slow responses, for uploads, or for a quota."""

from __future__ import annotations

from kdissect.incidents.connections import AGAIN_SHARE_MIN
from kdissect.incidents.evidence import IDS, PARTIES, runs
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, INFO, WARN
from kdissect.incidents.kind import kind, lasted_ms
from kdissect.tables.schemas import Row
from kdissect.text import duration, plural, share

ANSWERS_MIN = 20  # of an API, or of a client
API_SLOW_MS = 100.0  # p95
CLIENTS_MIN = 3  # of an API
CLIENT_SLOW_FACTOR, CLIENT_SLOW_MS = 3, 20.0  # beside the usual p95
_MOMENT_MS, _USUAL, _CHANCE = 100, 0.05, 0.01
_ANSWERS = "(FROM requests WHERE wait = 'answer' AND service_ms IS NOT NULL AND NOT is_broker)"
_SLOW_APIS = f"""
    WITH slow AS (
      SELECT api, count(*) AS answers, p50(service_ms) AS p50, p95(service_ms) AS p95
      FROM {_ANSWERS} GROUP BY api HAVING count(*) >= {ANSWERS_MIN} AND p95 >= {API_SLOW_MS}
    )
    SELECT s.*, min(time) AS start, max(response_time) AS stop, count(*) AS requests,
      sum(service_ms - {API_SLOW_MS}) AS lost_ms, {PARTIES}, {IDS}
    FROM slow s JOIN {_ANSWERS} USING (api) WHERE service_ms > {API_SLOW_MS}
    GROUP BY ALL ORDER BY start, api
"""
_SLOW = f"{_ANSWERS} WHERE service_ms > {API_SLOW_MS}"
_SHOW_API = f"kdissect show {{source}} --api {{api}} --slow {API_SLOW_MS:.0f}ms"


@kind("latency", INFO, "api", _SLOW, _SLOW_APIS, command=_SHOW_API)
def slow_api(row: Row) -> str:
    """Return the text of a slow API."""
    return (
        f"p95 of service_ms is {duration(row['p95'])} over "
        f"{plural(row['answers'], 'response')}, p50 {duration(row['p50'])}. Counted as lost: "
        f"the time above {duration(API_SLOW_MS)}."
    )


# A row for each client for which an API's responses take much longer than for its other clients.
# The usual time is the median over the clients' p95, so that a busy client does not decide it.
# Slow responses of one moment are one event, and of many clients one is slow by chance.
_SLOW_CLIENTS = f"""
    WITH clients AS (
      SELECT api, client, count(*) AS answers, p95(service_ms) AS p95
      FROM {_ANSWERS} GROUP BY ALL HAVING count(*) >= {ANSWERS_MIN}
    ), usual AS (
      SELECT api, median(p95) AS usual_p95 FROM clients GROUP BY api
      HAVING count(*) >= {CLIENTS_MIN}
    ), slow AS (
      SELECT c.*, usual_p95 FROM clients c JOIN usual USING (api)
      WHERE p95 >= {CLIENT_SLOW_FACTOR} * usual_p95 AND p95 - usual_p95 >= {CLIENT_SLOW_MS}
    ), slower AS (
      SELECT s.*, min(time) AS start, max(response_time) AS stop, count(*) AS requests,
        sum(service_ms - usual_p95) AS lost_ms,
        count(DISTINCT epoch_ms(time) // {_MOMENT_MS}) AS moments, {PARTIES}, {IDS}
      FROM slow s JOIN {_ANSWERS} USING (api, client) WHERE service_ms > usual_p95 GROUP BY ALL
    )
    -- more answers are above the usual p95 than chance gives one of the compared clients:
    -- Hoeffding's (1963) bound of the binomial tail, for all of them together
    SELECT *, moments / answers AS share, split_part(client, ' @ ', 1) AS client_id
    FROM slower WHERE share > {_USUAL} AND answers * (share * ln(share / {_USUAL})
      + if(share < 1, (1 - share) * ln((1 - share) / (1 - {_USUAL})), 0))
        >= ln((SELECT count(*) FROM clients) / {_CHANCE})
    ORDER BY start, api, client
"""
_SLOWER = f"{_ANSWERS} WHERE service_ms > {CLIENT_SLOW_MS}"
_SHOW_CLIENT = "kdissect show {source} --api {api} --client {client_id} --slow {usual_p95:.0f}ms"


@kind("latency", INFO, "client", _SLOWER, _SLOW_CLIENTS, command=_SHOW_CLIENT)
def slow_client(row: Row) -> str:
    """Return the text of a client's responses of an API."""
    return (
        f"p95 of service_ms is {duration(row['p95'])} over "
        f"{plural(row['answers'], row['api'] + ' response')}; for other clients it is "
        f"{duration(row['usual_p95'])}. Counted as lost: the time above that."
    )


# A client with the default request.timeout.ms of 30 s survives shorter uploads, but not many.
UPLOAD_MS = 1000
# With uploads this long, a request that waits for others before it is close to its timeout.
LONG_UPLOAD_MS = 5000
UPLOAD_PAUSE_MS = 30_000
# Shorter uploads are slow if they have fewer bytes a second than any usual network, and if they
# follow one another: for half of the time, over some seconds.
SHORT_UPLOAD_MS = 100
BYTES_PER_MS = 1000
SUSTAINED_MS = 5000
SHARE_MIN = 0.5
SHORT_PAUSE_MS = 2000
# Signs of TCP explain slow uploads if they last a good part of their time, or are of many segments.
SIGN_SHARE_MIN = 0.1
_LONG = f"(SELECT * FROM requests WHERE upload_ms >= {UPLOAD_MS})"
_SHORT = f"""(
  SELECT * FROM requests WHERE upload_ms >= {SHORT_UPLOAD_MS}
    AND request_size < upload_ms * {BYTES_PER_MS}
    AND (client, broker) NOT IN (SELECT client, broker FROM {_LONG}))"""
# A row for the slow uploads of each client to each broker: the network or the broker took few
# bytes. A receive window limits the sender (RFC 9293, 3.8.6). A window of zero means that the
# receiver does not read; a connection without window scaling (RFC 7323) has at most 64 KiB in
# flight.
_UPLOADS = f"""
    WITH slow_runs AS (
      FROM ({runs(_LONG, "client, broker", UPLOAD_PAUSE_MS)})
      UNION ALL FROM ({runs(_SHORT, "client, broker", SHORT_PAUSE_MS)})
    ), uploads AS (
      SELECT client, broker, run, min(time) AS start, max(request_end_time) AS stop,
        count(*) AS requests, sum(upload_ms) AS lost_ms, max(upload_ms) AS longest_ms,
        sum(upload_ms) + sum(coalesce(service_ms, 0)) AS whole_ms,
        list(exchange_id ORDER BY time)[:{EVIDENCE_MAX}] AS exchange_ids,
        list_sort(list(DISTINCT connection_id)) AS connection_ids
      FROM slow_runs GROUP BY client, broker, run
      HAVING longest_ms >= {UPLOAD_MS} OR (lost_ms >= {SUSTAINED_MS}
        AND lost_ms >= {SHARE_MIN} * ms_between(min(time), max(request_end_time)))
    )
    SELECT u.*, sum(s.response_zero_window_ms) AS zero_window_ms,
      sum(s.response_zero_window_count)::BIGINT AS zero_windows,
      sum(s.request_retransmitted_segment_count)::BIGINT AS retransmitted,
      retransmitted / sum(s.request_segment_count) AS retransmitted_part,
      bool_or((s.request_syn_seen AND s.request_window_scale IS NULL)
        OR (s.response_syn_seen AND s.response_window_scale IS NULL)) AS is_unscaled
    FROM uploads u JOIN sessions s ON list_contains(u.connection_ids, s.connection_id)
    GROUP BY ALL ORDER BY start, client
"""
_SLOW_SIGNS = f"requests WHERE upload_ms >= {SHORT_UPLOAD_MS}"
_UPLOAD_SEVERITY = f"if(longest_ms >= {LONG_UPLOAD_MS}, '{BAD}', '{WARN}')"


@kind("latency", _UPLOAD_SEVERITY, "client", _SLOW_SIGNS, _UPLOADS)
def slow_upload(row: Row) -> str:
    """Return the text of the uploads of a client to a broker."""
    return (
        f"{plural(row['requests'], 'request')} of {row['client']} took "
        f"{duration(row['lost_ms'])} to arrive at {row['broker']}, the longest "
        f"{duration(row['longest_ms'])}: {share(row['lost_ms'] / row['whole_ms'])} of the "
        f"time until the response. {_upload_cause(row)}"
    )


def _upload_cause(row: Row) -> str:
    """Return the sentences about the signs of TCP on the connections."""
    signs = []
    if (row["zero_window_ms"] or 0) >= SIGN_SHARE_MIN * row["lost_ms"]:
        signs.append(
            f"The broker announced a full receive window {plural(row['zero_windows'], 'time')}, "
            f"{duration(row['zero_window_ms'])} in all: it read too slowly."
        )
    if row["is_unscaled"]:
        signs.append("A connection has no window scaling, so at most 64 KiB are in flight.")
    if (row["retransmitted_part"] or 0) >= AGAIN_SHARE_MIN:
        signs.append(f"{plural(row['retransmitted'], 'segment')} of requests were sent again.")
    return " ".join(signs) or "TCP shows no cause: look at the client and its network."


# Quotas are averages over seconds (quota.window.num * quota.window.size.seconds: 11 s).
QUOTA_PAUSE_MS = 30_000
# Shorter waits are what a quota is for; a client notices them no more than a slow network.
QUOTA_WAIT_MS = 1000
# A quota of requests throttles every API (KIP-124), and one of bytes only these.
_WAITS = "requests WHERE throttle_time_ms > 0"
_QUOTAS = {("Produce",): "of bytes written ", ("Fetch",): "of bytes read "}
_THROTTLED = f"(SELECT * REPLACE (response_time AS time) FROM {_WAITS})"
# A row for the waits of each client for a quota. The broker names the wait in its response
# (`throttle_time_ms`); since Kafka 2.0 it also ignores the connection for that time (KIP-219).
_QUOTA_WAITS = f"""
    SELECT client, run, list_sort(list(DISTINCT api)) AS apis, min(time) AS start,
      max(time + to_milliseconds(throttle_time_ms)) AS stop, count(*) AS requests,
      sum(throttle_time_ms)::DOUBLE AS lost_ms, max(throttle_time_ms) AS longest_ms,
      {PARTIES}, {IDS}
    FROM ({runs(_THROTTLED, "client", QUOTA_PAUSE_MS)})
    GROUP BY client, run ORDER BY start, client
"""
_QUOTA_SEVERITY = f"""CASE WHEN longest_ms >= {LONG_UPLOAD_MS} THEN '{BAD}'
  WHEN lost_ms >= {QUOTA_WAIT_MS} THEN '{WARN}' ELSE '{INFO}' END"""


@kind("throttling", _QUOTA_SEVERITY, "client", _WAITS, _QUOTA_WAITS)
def throttled(row: Row) -> str:
    """Return the text of a client's waits, with the quota that its APIs suggest."""
    length_ms = lasted_ms(row)
    quota = _QUOTAS.get(tuple(row["apis"]), "")
    return (
        f"A quota {quota}made {row['client']} wait {duration(row['lost_ms'])} in "
        f"{duration(length_ms)} ({share(min(1, row['lost_ms'] / length_ms))} of the time): "
        f"{plural(row['requests'], 'response')} ({', '.join(row['apis'])}), the longest wait "
        f"{duration(row['longest_ms'])}."
    )
