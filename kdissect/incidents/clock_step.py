"""`clock_step`: the clock of the capturing machine jumped."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.facts import Facts, Row
from kdissect.incidents.model import WARN, Incident
from kdissect.text import duration

# NTP slews smaller offsets, and packets of several CPUs may be out of order by milliseconds.
STEP_MIN_MS = 200
# Batches of a producer on each side of a step. A busy producer delays some, but not so many.
BATCHES_MIN = 10
# Share of a step for which the capture must have no packet: the jump itself is such a time.
SILENT_SHARE = 0.9
# Times of packets in the order of the capture, which is the order of their arrival.
_PACKETS = """
    SELECT capture_id, packet, time, lag(time) OVER (PARTITION BY capture_id ORDER BY packet)
      AS previous
    FROM (SELECT request_capture_id AS capture_id, request_packet AS packet, request_time AS time
        FROM exchanges WHERE request_packet IS NOT NULL
      UNION ALL SELECT response_capture_id, response_packet, response_time
        FROM exchanges WHERE response_packet IS NOT NULL)
"""
_OFFSETS = "OVER (PARTITION BY capture_id, client_ip ORDER BY packet ROWS BETWEEN"
_BEFORE = f"{_OFFSETS} UNBOUNDED PRECEDING AND 1 PRECEDING)"
_AFTER = f"{_OFFSETS} CURRENT ROW AND UNBOUNDED FOLLOWING)"


def find(facts: Facts) -> Iterator[Incident]:
    """Yield the steps back, as packets show them, and the first step forward of each capture."""
    yield from _incidents(facts, _steps_back(facts), "back")
    yield from _incidents(facts, _steps_forward(facts), "forward")


def _steps_back(facts: Facts) -> list[Row]:
    return facts.rows(
        f"""
        SELECT c.path, p.previous AS before_time, p.time AS after_time,
          epoch_us(p.previous - p.time) / 1e3 AS step_ms
        FROM ({_PACKETS}) p JOIN captures c USING (capture_id)
        WHERE p.previous - p.time >= INTERVAL {STEP_MIN_MS} MILLISECONDS ORDER BY p.packet
        """
    )


def _steps_forward(facts: Facts) -> list[Row]:
    """Return the steps of packet times against the timestamps of produced records.

    The smallest difference of both clocks stays the same, whatever delays some batches. If it
    grows from one packet on, and the capture is silent for as long, then its clock stepped.
    Batches queue at a producer that a quota or a slow upload holds up: it proves nothing.
    """
    return facts.rows(
        f"""
        WITH stamped AS (
          SELECT r.request_capture_id AS capture_id, r.request_packet AS packet, r.client_ip,
            r.request_time AS time,
            epoch_us(r.request_time) / 1e3 - max(b.max_timestamp_ms) AS offset_ms
          FROM record_batches b JOIN exchanges r USING (exchange_id)
          WHERE b.source = 'produce' AND b.max_timestamp_ms > 0 AND r.request_packet IS NOT NULL
            AND r.connection_id NOT IN (SELECT connection_id FROM exchanges
              WHERE throttle_time_ms > 0 OR upload_ms >= {STEP_MIN_MS})
          GROUP BY exchange_id, capture_id, packet, r.client_ip, r.request_time
        ), sides AS (
          SELECT *, max(packet) {_BEFORE} AS before_packet, count(*) {_BEFORE} AS before_count,
            count(*) {_AFTER} AS after_count,
            min(offset_ms) {_AFTER} - min(offset_ms) {_BEFORE} AS step_ms
          FROM stamped
        ), steps AS (
          SELECT capture_id, arg_min(packet, packet) AS packet,
            arg_min(before_packet, packet) AS before_packet, arg_min(step_ms, packet) AS step_ms
          FROM sides WHERE step_ms >= {STEP_MIN_MS} AND before_count >= {BATCHES_MIN}
            AND after_count >= {BATCHES_MIN} GROUP BY capture_id
        )
        SELECT c.path, arg_max(p.previous, p.time - p.previous) AS before_time,
          arg_max(p.time, p.time - p.previous) AS after_time, s.step_ms
        FROM steps s JOIN ({_PACKETS}) p ON p.capture_id = s.capture_id
          AND p.packet > s.before_packet AND p.packet <= s.packet
        JOIN captures c ON c.capture_id = s.capture_id
        GROUP BY c.path, s.step_ms
        HAVING max(epoch_us(p.time - p.previous)) / 1e3 >= {SILENT_SHARE} * s.step_ms
        """
    )


def _incidents(facts: Facts, rows: list[Row], direction: str) -> Iterator[Incident]:
    for row in rows:
        yield Incident(
            "clock_step",
            WARN,
            row["before_time"],
            max(row["before_time"], row["after_time"]),
            row["path"],
            f"The clock of the capture went {direction} by {duration(row['step_ms'])}. "
            "Durations across the step are wrong.",
            next_command=facts.command("show", "--from", row["before_time"].isoformat()),
        )
