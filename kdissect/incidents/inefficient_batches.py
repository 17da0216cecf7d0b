"""`inefficient_batches`: a producer writes batches of single records, or does not compress.

linger.ms, batch.size and compression.type of the producer decide.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import IDS, Evidence
from kdissect.incidents.incident import INFO, Incident, Kind
from kdissect.text import byte_size, decimal, plural

KIND = Kind("inefficient_batches", "client", "a producer wrote small or plain batches", "topics")
PLAIN_BYTES_MIN = 1_000_000
SMALL_RECORDS, SMALL_BATCHES_MIN = 2, 1000


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the producers with many bytes of such batches."""
    rows = evidence.rows(
        f"""
        SELECT r.client, min(r.time) AS start, max(r.time) AS stop, count(*) AS batches,
          sum(b.record_count) / count(*) AS batch_records,
          coalesce(sum(b.size) FILTER (b.codec = 'none'), 0)::BIGINT AS plain,
          sum(b.size)::BIGINT AS bytes, {IDS}
        FROM record_batches b JOIN (
          SELECT exchange_id, connection_id, client, time FROM requests) r USING (exchange_id)
        WHERE b.source = 'produce' AND NOT coalesce(b.is_control, false) GROUP BY r.client
        HAVING plain >= {PLAIN_BYTES_MIN}
          OR batches >= {SMALL_BATCHES_MIN} AND batch_records < {SMALL_RECORDS}
        ORDER BY start, r.client
        """
    )
    for row in rows:
        yield evidence.incident(
            row,
            KIND,
            INFO,
            row["client"],
            f"{plural(row['batches'], 'batch', 'batches')} have "
            f"{decimal(row['batch_records'])} records on average, and {byte_size(row['plain'])} of "
            f"{byte_size(row['bytes'])} are not compressed.",
            next_command=evidence.command(
                "sql",
                "select topic, codec, sum(size), avg(record_count) from record_batches "
                "where source = 'produce' group by all order by 3 desc",
            ),
        )
