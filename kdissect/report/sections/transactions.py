"""Transactions: how they ended, how long they took, which need a look."""

from __future__ import annotations

from kdissect import text as f
from kdissect.charts import Chart, Columns, events
from kdissect.report.document import LISTS, Document, Listing, Options, Section, listed
from kdissect.sql import Database
from kdissect.sql.requests import quantiles

_SHOWN_MAX = 400
_LANES_MAX = 40  # of the timeline; beyond that a table is easier to read
OUTCOMES = ("commit", "abort", "open", "fenced")


def collect(database: Database, _: Options) -> Document:
    """Tables `transactions_all` and `transaction_producers`."""
    database.run(
        """
        CREATE TEMP TABLE transactions_all AS
        SELECT t.transactional_id, t.producer_id, t.producer_epoch, t.begin_time, t.end_time,
          t.outcome, t.duration_ms, t.record_count,
          list_transform(t.partitions, lambda p: p.topic || '-' || p.partition) AS partitions,
          len(t.exchange_ids) AS exchanges, t.exchange_ids[1] AS exchange_id, x.packet,
            x.capture_id,
          x.client_id, x.client_ip
        FROM transactions t LEFT JOIN requests x ON x.exchange_id = t.exchange_ids[1]
        """
    )
    database.run(
        f"""
        CREATE TEMP TABLE transaction_producers AS
        SELECT transactional_id, count(*) AS transactions,
          count(*) FILTER (outcome = 'commit') AS commits,
          count(*) FILTER (outcome = 'abort') AS aborts,
          count(*) FILTER (outcome = 'fenced') AS fenced,
          count(*) FILTER (outcome = 'open') AS open,
          sum(record_count)::BIGINT AS records, {quantiles(database, "duration_ms")},
          count(DISTINCT producer_id) AS producer_ids, max(producer_epoch) AS producer_epoch_max
        FROM transactions_all GROUP BY transactional_id
        """
    )
    outcomes = database.rows(
        f"SELECT outcome, count(*) AS count, sum(record_count)::BIGINT AS records, "
        f"{quantiles(database, 'duration_ms')} FROM transactions_all "
        "GROUP BY outcome ORDER BY count DESC"
    )
    bars = database.table(
        f"""
        SELECT coalesce(transactional_id, '(none)') AS id, outcome,
          epoch_us(coalesce(begin_time, end_time)) / 1000.0 AS t,
          epoch_us(coalesce(end_time, begin_time)) / 1000.0 AS t_end, duration_ms, record_count
        FROM transactions_all WHERE coalesce(begin_time, end_time) IS NOT NULL
        ORDER BY outcome = 'commit', duration_ms DESC NULLS LAST LIMIT {_SHOWN_MAX}
        """
    )
    return {
        "outcomes": outcomes,
        "producers": listed(database, LISTS["transaction_producers"]),
        "transactions": listed(database, LISTS["transactions"]),
        "timeline": bars.to_pydict(),
    }


def section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["transactions"]
    blocks = [
        Listing("outcomes", d["outcomes"]),
        _timeline(d["timeline"]),
        Listing("producers", d["producers"]),
        Listing("transactions", d["transactions"]),
    ]
    return Section(
        "transactions",
        "Transactions",
        blocks if d["outcomes"] else [],
        "No transaction in this capture.",
        badge=d["transactions"]["total"],
    )


def _timeline(d: Columns) -> Chart | None:
    """A lane for each transactional id, a bar for each transaction."""
    ids = set(d["id"])
    if not ids or len(ids) > _LANES_MAX:
        return None
    return events(
        "transactions",
        "Transactions over time",
        f"{f.plural(len(d['t']), 'transaction')} of {f.plural(len(ids), 'transactional id')}.",
        {
            "lane": d["id"],
            "event": d["outcome"],
            "t": d["t"],
            "t_end": d["t_end"],
            "ms": d["duration_ms"],
            "detail": ["" if n is None else f.plural(n, "record") for n in d["record_count"]],
        },
        dict.fromkeys(OUTCOMES),
        lane_title="transactional id",
        event_title="outcome",
    )
