"""SQL of runs: events of one key that follow one another without a long pause."""

from __future__ import annotations


def runs(source: str, key: str, pause_ms: int) -> str:
    """Return SQL for the rows of `source` with a column `run`: its number among those of a key.

    source: a table or a query in parentheses, with a column `time`. pause_ms: ends a run.
    """
    return f"""
      SELECT *, count(*) FILTER (is_first) OVER (PARTITION BY {key} ORDER BY time) AS run
      FROM (
        SELECT *, coalesce(ms_between(lag(time) OVER (PARTITION BY {key} ORDER BY time), time)
          > {pause_ms}, true) AS is_first
        FROM {source}
      )
    """
