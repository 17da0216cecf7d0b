"""Places of a connection where both a request and its response may be missing.

A broker answers the requests of a connection in order. So an exchange lies between two paired ones
in both streams. If bytes are missing or unframed there in both, an exchange may be lost without a
row in `exchanges`.
"""

from __future__ import annotations

from kdissect.sql.unanswered import HOLES


def lost_exchanges(searched: str) -> str:
    """Return SQL for `connection_id` and `time`: when its last lost exchange began, at the latest.

    searched: SQL of `connection_id` and `request_size_min`, the bytes of the smallest request that
    counts, with its size prefix.
    """
    holes = f"""
        select connection_id, pos, pos + byte_count as stop, byte_count from anomalies
        where direction = '{{}}' and kind in {HOLES}
    """
    return f"""
        with searched as ({searched}), between_paired as (
            select connection_id,
                request_pos + 4 + request_size as request_low,
                response_pos + 4 + response_size as response_low,
                lead(request_pos) over following as request_high,
                lead(response_pos) over following as response_high,
                lead(request_time) over following as next_time
            from exchanges semi join searched using (connection_id)
            where status = 'paired'
            window following as (partition by connection_id order by request_pos)
        ), request_holes as ({holes.format("request")}),
        response_holes as ({holes.format("response")})
        select connection_id, max(coalesce(next_time, last_time)) as time
        from between_paired b join searched using (connection_id)
            join connections using (connection_id)
            join request_holes r using (connection_id)
        where r.byte_count >= request_size_min
            and r.stop > request_low and r.pos < coalesce(request_high, r.stop)
            and (response_high is null or exists (
                from response_holes s where s.connection_id = b.connection_id
                    and s.stop > response_low and s.pos < response_high))
        group by connection_id
    """
