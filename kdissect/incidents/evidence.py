"""Evidence of incidents: SQL that several kinds of incidents share."""

from __future__ import annotations

from kdissect.incidents.incident import EVIDENCE_MAX

# A broker holds back the responses of these until records or members arrive, so that a request
# without a response is no sign of a fault until its time is over.
HELD_APIS = "('Fetch', 'ShareFetch', 'JoinGroup', 'SyncGroup')"
# Columns of incidents (`kind`), over rows of requests
CONNECTION_IDS = f"list_sort(list(DISTINCT connection_id))[:{EVIDENCE_MAX}] AS connection_ids"
IDS = (
    "list(exchange_id ORDER BY time, exchange_id) FILTER (exchange_id IS NOT NULL)"
    f"[:{EVIDENCE_MAX}] AS exchange_ids, {CONNECTION_IDS}"
)
PARTITION_NAME = "topic || '-' || partition"
PARTIES = "list_sort(list(DISTINCT broker)) AS brokers, list_sort(list(DISTINCT client)) AS clients"


def runs(source: str, key: str, pause_ms: int) -> str:
    """Return SQL for the rows of `source` with a column `run`: its number among those of a key.

    A run is of events that follow one another without a long pause. source: a table or a query in
    parentheses, with a column `time`. pause_ms: ends a run.
    """
    return f"""
      SELECT *, count(*) FILTER (is_first) OVER (PARTITION BY {key} ORDER BY time) AS run
      FROM (
        SELECT *, coalesce(ms_between(lag(time) OVER (PARTITION BY {key} ORDER BY time), time)
          > {pause_ms}, true) AS is_first
        FROM {source}
      )
    """
