"""Faults of a capture itself: lost packets, a clock that jumped, parts that say nothing."""

from __future__ import annotations

from kdissect.incidents.evidence import CONNECTION_IDS, IDS
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, INFO, WARN
from kdissect.incidents.kind import CAPTURES, kind
from kdissect.sql.sessions import UNREAD_TLS
from kdissect.tables.schemas import Row
from kdissect.text import byte_size, duration, plural, share

# SQL of packets with known times: the first of each request and response
_PACKETS = """
  SELECT request_capture_id AS capture_id, request_packet AS packet, request_time AS time
  FROM exchanges WHERE request_packet IS NOT NULL
  UNION ALL SELECT response_capture_id, response_packet, response_time
  FROM exchanges WHERE response_packet IS NOT NULL
"""
# A larger share of missing bytes makes counts and latencies wrong, not only some rows.
SHARE_BAD = 0.001
_IS_BAD = f"if(part >= {SHARE_BAD}, '{BAD}', '{WARN}')"
_TCPDUMP = "tcpdump -i any -s 0 -B 65536 -w trace.pcap 'tcp port 9092'"
# The known bytes of each stream with a gap: packet `packet` has the byte before `pos`, at `time`.
# A broker answers in order, so a response is no older than a request that directly follows the
# previous request.
_ENDS = """
    SELECT connection_id, 'request' AS direction, request_capture_id AS capture_id,
      request_packet AS packet, request_pos + 1 AS pos, request_time AS time
    FROM near WHERE request_pos IS NOT NULL
    UNION ALL SELECT connection_id, 'request', request_capture_id, request_packet,
      request_pos + 4 + request_size, request_end_time
    FROM near WHERE request_end_time IS NOT NULL
    UNION ALL SELECT connection_id, 'response', response_capture_id, response_packet,
      response_pos + 1, response_time
    FROM near WHERE response_pos IS NOT NULL
    UNION ALL SELECT connection_id, 'response', response_capture_id, response_packet,
      response_pos + 4 + response_size, greatest(response_end_time, next_request_time)
    FROM near WHERE response_end_time IS NOT NULL
"""
# Each gap's packets were sent after `before` and before `after`. The packet of a gap follows it; at
# the end of a stream there is none, and FIN or RST shows the gap.
_BOUNDS = f"""
    WITH near AS (
      SELECT *, CASE WHEN lead(request_pos) OVER w = request_pos + 4 + request_size
        THEN lead(request_time) OVER w END AS next_request_time
      FROM exchanges WHERE connection_id IN (SELECT connection_id FROM gaps)
      WINDOW w AS (PARTITION BY connection_id ORDER BY request_pos)
    ), ends AS ({_ENDS}
    ), packets AS ({_PACKETS}
    ), placed AS (
      SELECT g.*, e.time AS before,
        coalesce(e.capture_id = g.capture_id AND e.packet >= g.packet, false) AS is_last
      FROM gaps g ASOF LEFT JOIN ends e
        ON e.connection_id = g.connection_id AND e.direction = g.direction AND e.pos <= g.pos
    ), bounded AS (
      SELECT g.* EXCLUDE (before), coalesce(g.before, s.first_time) AS before,
        CASE WHEN NOT is_last AND p.time IS NOT NULL THEN p.time ELSE s.last_time END AS after
      FROM placed g ASOF LEFT JOIN packets p
        ON g.capture_id = p.capture_id AND p.packet >= g.packet
      LEFT JOIN sessions s USING (connection_id)
    )
    -- a response whose request is missing was sent after that request
    SELECT b.* EXCLUDE (after), least(b.after, (SELECT min(r.response_time) FROM near r
      WHERE r.connection_id = b.connection_id AND b.direction = 'request'
        AND r.status = 'request_missing' AND r.response_time BETWEEN b.before AND b.after
      )) AS after
    FROM bounded b
"""
_GAPS = "anomalies WHERE kind = 'gap' AND byte_count > 0"
# A row for each capture that lacks bytes of Kafka connections between captured ones. The incident
# starts at the latest possible end of the first gap. It ends in the middle of the bounds of the
# last gap. Gaps that may be from one moment begin and end with the bounds that they share.
_LOSSES = f"""
    WITH gaps AS (
      SELECT capture_id, packet, connection_id, direction, pos, byte_count FROM {_GAPS}
    ), timed AS ({_BOUNDS}
    ), totals AS (
      SELECT capture_id, sum(request_byte_count + response_byte_count) AS bytes,
        sum(request_missing_byte_count + response_missing_byte_count) AS missing
      FROM (SELECT capture_id, connection_id FROM requests
        UNION SELECT capture_id, connection_id FROM gaps)
      JOIN connections USING (connection_id) WHERE is_kafka GROUP BY capture_id
    )
    SELECT c.path, min(t.after) AS first_after, max(t.before) AS last_before,
      coalesce(least(last_before, first_after), c.first_time) AS start,
      CASE WHEN last_before <= first_after THEN first_after
        ELSE coalesce(last_before + (arg_max(t.after, t.before) - last_before) / 2,
          c.last_time) END AS stop,
      count(*) AS gaps,
      sum(t.byte_count)::BIGINT AS missing, count(DISTINCT t.connection_id) AS connections,
      any_value(totals.missing / (totals.missing + totals.bytes))::DOUBLE AS part,
      c.truncated_packet_count AS truncated,
      (SELECT count(*) FROM requests r WHERE may_be_lost AND r.capture_id = c.capture_id)
        AS unjudged,
      list_sort(list(DISTINCT t.connection_id))[:{EVIDENCE_MAX}] AS connection_ids
    FROM timed t JOIN captures c USING (capture_id) LEFT JOIN totals USING (capture_id)
    GROUP BY c.path, c.capture_id, c.first_time, c.last_time, c.truncated_packet_count
    ORDER BY start, path
"""


@kind("overview", _IS_BAD, "path", _GAPS, _LOSSES, command=_TCPDUMP)
def capture_loss(row: Row) -> str:
    """Return the text of the gaps of a capture."""
    reason = (
        "If no filter and no kdissect extract left packets out, check tcpdump's count of packets "
        "dropped by kernel, and give it a larger buffer."
    )
    if row["truncated"]:
        reason = f"The snap length cut {plural(row['truncated'], 'packet')}: capture with -s 0."
    if row["unjudged"]:
        lost = plural(row["unjudged"], "request")
        reason = f"{lost} without an answer could not be judged. {reason}"
    return (
        f"{byte_size(row['missing'])} are missing in {plural(row['gaps'], 'gap')} of "
        f"{plural(row['connections'], 'connection')}. The Kafka connections in this capture lack "
        f"{share(row['part'])} of their bytes. Counts and latencies near gaps are lower bounds. "
        f"{reason}"
    )


# NTP slews smaller offsets, and packets of several CPUs may be out of order by milliseconds.
STEP_MIN_MS = 200
# Batches of a producer on each side of a step. A busy producer delays some, but not so many.
BATCHES_MIN = 10
# Share of a step for which the capture must have no packet: the jump itself is such a time.
SILENT_SHARE = 0.9
_SILENCE_MIN_MS = STEP_MIN_MS * SILENT_SHARE
# Pauses of the capture, and packets that are earlier than the one before them. Packet numbers have
# the order of arrival. `packet` is the first one after the pause.
_JUMPS = f"""
    SELECT capture_id, packet, previous, time, ms_between(previous, time) AS jump_ms
    FROM (
      SELECT *, lag(time) OVER (PARTITION BY capture_id ORDER BY packet) AS previous
      FROM ({_PACKETS})
    ) WHERE jump_ms >= {_SILENCE_MIN_MS} OR jump_ms <= -{STEP_MIN_MS}
"""
_STEPS_BACK = f"""
    SELECT capture_id, packet, previous AS before_time, time AS after_time, -jump_ms AS step_ms
    FROM clock_jumps WHERE jump_ms <= -{STEP_MIN_MS}
"""
# Steps of packet times against the timestamps of produced records. The smallest difference of both
# clocks stays the same, whatever delays some batches. If it is larger from a pause on, and the
# pause is as long, then the capture's clock stepped. Batches queue at a producer that a quota or a
# slow upload holds up: it proves nothing.
_STEPS_FORWARD = f"""
    WITH stamped AS (
      SELECT e.request_capture_id AS capture_id, e.request_packet AS packet, e.client_ip,
        epoch_us(e.request_time) / 1e3 - b.max_timestamp_ms AS offset_ms
      FROM record_batches b JOIN exchanges e USING (exchange_id)
      WHERE b.source = 'produce' AND b.max_timestamp_ms > 0 AND e.request_packet IS NOT NULL
        AND e.connection_id NOT IN (SELECT connection_id FROM exchanges
          WHERE throttle_time_ms > 0 OR upload_ms >= {STEP_MIN_MS})
    ), sections AS (
      SELECT s.capture_id, s.client_ip, coalesce(j.packet, 0) AS section,
        min(s.offset_ms) AS offset_ms, count(DISTINCT s.packet) AS batches
      FROM stamped s ASOF LEFT JOIN clock_jumps j
        ON j.capture_id = s.capture_id AND j.packet <= s.packet
      GROUP BY ALL
    ), from_here AS (
      SELECT *, min(offset_ms) OVER w AS least_ms, sum(batches) OVER w AS batches_after,
        sum(batches) OVER (PARTITION BY capture_id, client_ip) - batches_after AS batches_before
      FROM sections
      WINDOW w AS (PARTITION BY capture_id, client_ip ORDER BY section DESC)
    ), sides AS (
      SELECT *, lag(section) OVER w AS previous_section,
        least_ms - lag(least_ms) OVER w AS step_ms
      FROM from_here WINDOW w AS (PARTITION BY capture_id, client_ip ORDER BY section)
    )
    SELECT s.capture_id, max_by(j.packet, j.jump_ms) AS packet,
      max_by(j.previous, j.jump_ms) AS before_time,
      max_by(j.time, j.jump_ms) AS after_time, s.step_ms
    FROM sides s JOIN clock_jumps j ON j.capture_id = s.capture_id
      AND j.packet > s.previous_section AND j.packet <= s.section
    WHERE s.step_ms >= {STEP_MIN_MS} AND s.batches_before >= {BATCHES_MIN}
      AND s.batches_after >= {BATCHES_MIN}
    GROUP BY s.capture_id, s.client_ip, s.section, s.step_ms
    HAVING max(j.jump_ms) >= {SILENT_SHARE} * s.step_ms
"""
# A row for the steps of each capture in one direction, however many it has: its steps back as
# packets show them, and its steps forward.
_STEPS = f"""
    WITH steps AS (
      SELECT direction, capture_id, packet, before_time, after_time, max(step_ms) AS step_ms
      FROM (SELECT 'back' AS direction, * FROM ({_STEPS_BACK})
        UNION ALL SELECT 'forward', * FROM ({_STEPS_FORWARD}))
      GROUP BY ALL
    )
    SELECT c.path, direction, arg_min(s.before_time, s.packet) AS start,
      greatest(start, arg_max(s.after_time, s.packet)) AS stop, count(*) AS steps,
      max(s.step_ms) AS step_ms
    FROM steps s JOIN captures c USING (capture_id)
    GROUP BY c.path, c.capture_id, direction ORDER BY direction, start, c.path
"""
_TABLES = {"clock_jumps": _JUMPS}
_FROM = "kdissect show {source} --from {start}"


@kind("overview", WARN, "path", "exchanges", _STEPS, tables=_TABLES, command=_FROM)
def clock_step(row: Row) -> str:
    """Return the text of the steps of a capture in one direction."""
    steps = f"by {duration(row['step_ms'])}"
    if row["steps"] > 1:
        steps = f"{plural(row['steps'], 'time')}, {steps} at most"
    return (
        f"The clock of the capture went {row['direction']} {steps}. "
        "Durations across a step are wrong."
    )


_DAMAGED = """
    SELECT path, error, first_time AS start, last_time AS stop FROM captures
    WHERE error IS NOT NULL AND format <> 'unknown' AND first_time IS NOT NULL
    ORDER BY start, path
"""


@kind("overview", WARN, "path", "captures WHERE error IS NOT NULL", _DAMAGED, name="capture_unread")
def damaged_capture(row: Row) -> str:
    """Return the text of a file that ends with an error."""
    return f"The file could not be read to its end: {row['error']}"


_HALVES = "least(request_segment_count, response_segment_count) = 0"
# The reasons for which connections say nothing: their severity, their condition and their text
_REASONS = (
    (
        INFO,
        UNREAD_TLS,
        "with TLS that was not decrypted: only their handshakes are known. A key log decrypts them "
        "(--keylog FILE).",
    ),
    (
        WARN,
        # a connection that carries bytes was acknowledged: those packets were not captured
        f"is_kafka AND {_HALVES} AND request_segment_count + response_segment_count > 0",
        "captured in one direction: latency is unknown, and so are errors without responses.",
    ),
    (INFO, "NOT EXISTS (FROM sessions WHERE is_kafka OR is_tls)", "without any Kafka traffic."),
)
_UNREAD = " UNION ALL ".join(
    f"""
    SELECT '{severity}' AS severity, '{reason}' AS reason, count(*) AS connections,
      min(first_time) AS start, max(last_time) AS stop, {CONNECTION_IDS}
    FROM sessions WHERE {condition} HAVING start IS NOT NULL
    """
    for severity, condition, reason in _REASONS
)


@kind("overview", "severity", CAPTURES, "sessions", _UNREAD)
def capture_unread(row: Row) -> str:
    """Return the text of connections that say nothing."""
    return f"{plural(row['connections'], 'connection')} {row['reason']}"


_SERIOUS = "anomalies WHERE severity = 'error' AND kind <> 'gap'"
# A row for all serious anomalies but missing bytes
_ANOMALIES = f"""
    SELECT list_sort(list(DISTINCT kind)) AS kinds, count(*) AS anomalies,
      count(DISTINCT exchange_id) AS requests, min(coalesce(time, first_time)) AS start,
      max(coalesce(time, last_time)) AS stop, {IDS}
    FROM (SELECT kind, exchange_id, connection_id FROM {_SERIOUS})
    LEFT JOIN (SELECT exchange_id, time FROM requests) USING (exchange_id)
    LEFT JOIN (SELECT connection_id, first_time, last_time FROM sessions)
      USING (connection_id)
    HAVING start IS NOT NULL
"""
_LIST = """kdissect sql {source} "from anomalies where severity = 'error'" """


@kind("anomalies", INFO, CAPTURES, _SERIOUS, _ANOMALIES, command=_LIST)
def malformed_data(row: Row) -> str:
    """Return the text of all serious anomalies."""
    count = plural(row["anomalies"], "serious anomaly", "serious anomalies")
    return f"{count}: {', '.join(row['kinds'])}."
