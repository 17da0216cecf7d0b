"""`clock_step`: the clock of the capturing machine jumped."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import PACKETS, Evidence
from kdissect.incidents.incident import WARN, Incident, Kind
from kdissect.text import duration, plural

KIND = Kind("clock_step", "capture", "the clock of the capturing machine jumped", "overview")

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
    CREATE TEMP TABLE clock_jumps AS
    SELECT capture_id, packet, previous, time, ms_between(previous, time) AS jump_ms
    FROM (
      SELECT *, lag(time) OVER (PARTITION BY capture_id ORDER BY packet) AS previous
      FROM ({PACKETS})
    ) WHERE jump_ms >= {_SILENCE_MIN_MS} OR jump_ms <= -{STEP_MIN_MS}
"""


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the steps back of each capture, as packets show them, and its steps forward."""
    evidence.run(_JUMPS)
    yield from _incidents(evidence, _STEPS_BACK, "back")
    yield from _incidents(evidence, _STEPS_FORWARD, "forward")


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


def _incidents(evidence: Evidence, steps: str, direction: str) -> Iterator[Incident]:
    """Yield one incident for the steps of a capture, however many it has."""
    rows = evidence.rows(
        f"""
        WITH steps AS (
          SELECT capture_id, packet, before_time, after_time, max(step_ms) AS step_ms
          FROM ({steps}) GROUP BY ALL
        )
        SELECT c.path, c.capture_id, arg_min(s.before_time, s.packet) AS start,
          greatest(start, arg_max(s.after_time, s.packet)) AS stop, count(*) AS steps,
          max(s.step_ms) AS step_ms
        FROM steps s JOIN captures c USING (capture_id)
        GROUP BY c.path, c.capture_id ORDER BY start, c.path
        """
    )
    for row in rows:
        size = duration(row["step_ms"])
        steps_taken = f"by {size}"
        if row["steps"] > 1:
            steps_taken = f"{plural(row['steps'], 'time')}, by {size} at most"
        yield evidence.incident(
            row,
            KIND,
            WARN,
            row["path"],
            f"The clock of the capture went {direction} {steps_taken}. "
            "Durations across a step are wrong.",
            next_command=evidence.command(
                "show", "--from", row["start"].isoformat(), capture_id=row["capture_id"]
            ),
        )
