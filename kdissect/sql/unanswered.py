"""Requests without a captured response: which had none, and which may have had one.

A broker answers the requests of a connection in order. So the response of a request lies between
those of the answered requests before and after it. If bytes are missing or unframed there, the
response may be among them.

If no later response was captured, the response may have come after the last packet, unless the
broker's side was seen to end. A client's FIN ends only its own direction (RFC 9293, 3.6): the
broker may still answer, unless the capture goes on long enough. A FIN of the broker gives the
length of the response stream, so that a lost response leaves a gap. If it came second it may be
lost as well, and before an RST a lost response leaves no gap. So if any packet is missing, another
close than the broker's FIN proves nothing. And a stream without SYN has no known beginning:
responses lost before the first captured one leave no gap.

A missing packet concerns the stretch of time in which capturing went on without a break: rotated
files are one stretch, recordings of two days are two. Within it, it does not concern a host pair
that another capture took at that time.
"""

from __future__ import annotations

# runs of response bytes that hold no known frame
HOLES = "('gap', 'unframed_bytes', 'limit', 'not_decrypted')"

# A client that has closed its side may still get an answer so long after its request. Clients let
# a Fetch wait 0.5 s by default.
_LATE_S = 10


def unanswered(prefix: str = "") -> str:
    """Return SQL for `exchange_id` and `may_be_lost` (bool) of each request without its response.

    prefix: of the views `exchanges`, `connections`, `captures` and `anomalies`.
    """
    return f"""
        with due as (
            select exchange_id, connection_id, request_end_time from {prefix}exchanges
            where status in ('response_missing', 'connection_closed')
        ), placed as (
            select exchange_id, connection_id,
                coalesce(max(response_pos + 4 + response_size) over (
                    partition by connection_id order by request_pos
                    rows between unbounded preceding and 1 preceding), 0) as low,
                min(response_pos) over (
                    partition by connection_id order by request_pos
                    rows between 1 following and unbounded following) as high
            from {prefix}exchanges
            where request_pos is not null and connection_id in (select connection_id from due)
        ), holes as (
            select connection_id, pos, pos + byte_count as stop from {prefix}anomalies
            where direction = 'response' and kind in {HOLES} and byte_count > 0
        ), among_holes as (
            select distinct exchange_id from placed join holes using (connection_id)
            where holes.stop > low and holes.pos < coalesce(high, holes.stop)
        ), {_exposed(prefix)}
        select exchange_id,
            exchange_id in (from among_holes)
                or (low = 0 and not handshake_seen)
                or (high is null and not (close_reason = 'fin' and closed_by = 'broker')
                    and (connection_id in (from exposed) or not response_ended
                        and (close_reason <> 'fin'
                            or coalesce(captured_until
                                < request_end_time + interval {_LATE_S} seconds, true)))
                ) as may_be_lost
        from due join placed using (exchange_id, connection_id)
            join {prefix}connections using (connection_id)
            left join watched using (connection_id)
    """


def _exposed(prefix: str) -> str:
    """Return SQL of `exposed`: the connections of `due` whose packets may be missing unseen.

    A capture with a gap lies in the connection's stretch of time. It has messages of the same
    client and broker, or no capture that has them was taken at the same time.

    Also SQL of `watched`: until when the captures of the connections' last packets go on.
    """
    return f"""
        spans as (
            select first_time, last_time from {prefix}captures where first_time is not null
            union all select first_time, last_time from {prefix}connections
        ), stretches as (
            select first_time as stretch from spans
            qualify first_time > coalesce(max(last_time) over (
                order by first_time, last_time
                rows between unbounded preceding and 1 preceding), '-infinity')
        ), lossy as (
            select stretch, capture_id, c.first_time, c.last_time
            from {prefix}captures c asof join stretches on c.first_time >= stretch
            where capture_id in (select capture_id from {prefix}anomalies where kind = 'gap')
        ), carriers as (
            select distinct client_ip, broker_ip, capture_id, c.first_time, c.last_time
            from (
                select client_ip, broker_ip,
                    unnest([request_capture_id, response_capture_id]) as capture_id
                from {prefix}exchanges
            ) join {prefix}captures c using (capture_id)
        ), watched as (
            select connection_id, max(carriers.last_time) as captured_until
            from {prefix}connections k join carriers using (client_ip, broker_ip)
            where connection_id in (select connection_id from due)
                and k.last_time between carriers.first_time and carriers.last_time
            group by all
        ), exposed as (
            select connection_id
            from {prefix}connections k asof join stretches on k.first_time >= stretch
                join lossy g using (stretch) join carriers using (client_ip, broker_ip)
            where connection_id in (select connection_id from due)
            group by connection_id, g.capture_id
            having bool_or(carriers.capture_id = g.capture_id) or not bool_or(
                carriers.first_time < g.last_time and carriers.last_time > g.first_time)
        )
    """
