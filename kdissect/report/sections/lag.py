"""Consumer lag: the end of each partition's log, less the committed offset of its readers.

The end at a time is the highest offset that the responses so far report: high watermarks of
fetches, latest offsets of ListOffsets, base offsets of produced batches plus their records. The log
may be longer than the capture shows, so the lag is a lower bound. A partition whose end no response
reports has no lag.

Commits are accepted OffsetCommit requests, and TxnOffsetCommit requests whose transaction
committed, from the end of that transaction on. Offsets of an aborted transaction never count, and
those of an open one not yet, if no byte of its client is missing. A commit is undecided if the
capture lacks its answer or the end of its transaction. A partition has neither a last commit nor a
lag if its latest commit is undecided. The same holds if its connection misses bytes of requests
after that, which may be a later commit. Ends and commits from before a topic was deleted, or got
another ID, do not count.
"""

from __future__ import annotations

from kdissect import text as f
from kdissect.charts import Chart, Columns, load
from kdissect.protocol.api_keys import ApiKey
from kdissect.report.document import LISTS, Document, Listing, Options, Section, listed
from kdissect.sql import Database
from kdissect.sql.requests import BREAKS, PRODUCE_ANSWERS, fetch_answers

_SHOWN_GROUPS = 8
LATEST = -1  # the timestamp in ListOffsets that asks for the end
# Requests to the coordinator of a transaction.
_COORDINATED = (
    *(int(ApiKey.INIT_PRODUCER_ID), int(ApiKey.ADD_PARTITIONS_TO_TXN)),
    *(int(ApiKey.ADD_OFFSETS_TO_TXN), int(ApiKey.END_TXN)),
)
# A commit has at least the size, the header, three lengths, a partition and its offset.
_COMMIT_BYTES_MIN = 40


def _listed(side: str) -> str:
    """SQL of the partitions `p` in one side of ListOffsets."""
    return f"""
        SELECT exchange_id, t.name AS topic, unnest(t.partitions) AS p
        FROM (SELECT exchange_id, unnest({side}.topics) AS t FROM api_list_offsets)
    """


_PRODUCED = """
    SELECT exchange_id, topic, partition, sum(record_count)::BIGINT AS records
    FROM record_batches WHERE source = 'produce' GROUP BY ALL
"""
# `exchange_id`, `topic`, `partition` and `log_end` of each response that shows it.
_LOG_ENDS = f"""
    SELECT r.exchange_id, r.topic, r.p.partition_index AS partition, r.p.offset AS log_end
    FROM ({_listed("response")}) r
    SEMI JOIN (FROM ({_listed("request")}) WHERE p.timestamp = {LATEST}) q
    ON q.exchange_id = r.exchange_id AND q.topic = r.topic
      AND q.p.partition_index = r.p.partition_index
    WHERE r.p.offset >= 0
    UNION ALL SELECT exchange_id, topic, partition, high FROM ({fetch_answers()}) WHERE high >= 0
    UNION ALL SELECT exchange_id, topic, partition, base_offset + records
    FROM ({PRODUCE_ANSWERS}) JOIN ({_PRODUCED}) USING (exchange_id, topic, partition)
    WHERE base_offset >= 0 AND error = 0
"""

# How each transaction ended that committed offsets: TxnOffsetCommit's exchange to outcome and time.
# An open one is `pending` if the capture has the client's requests to its coordinator, no EndTxn
# among them, and all bytes of the client.
_OUTCOMES = f"""
    CREATE TEMP TABLE commit_outcomes AS
    WITH unended AS (
      SELECT t.transactional_id, t.begin_time, bool_or(e.api_key = {ApiKey.END_TXN}
        AND e.request_time >= t.begin_time) AS is_ending,
        bool_or(e.client_ip IN (SELECT client_ip FROM anomalies JOIN connections
          USING (connection_id) WHERE kind IN {BREAKS})) AS is_lossy
      FROM transactions t JOIN exchanges e USING (transactional_id)
      WHERE t.outcome = 'open' GROUP BY ALL HAVING bool_or(e.api_key IN {_COORDINATED})
    )
    SELECT exchange_id, end_time,
      CASE WHEN NOT (is_ending OR is_lossy) THEN 'pending' ELSE outcome END AS outcome
    FROM (
      SELECT unnest(exchange_ids) AS exchange_id, transactional_id, begin_time, outcome, end_time
      FROM transactions)
    LEFT JOIN unended USING (transactional_id, begin_time)
    SEMI JOIN api_txn_offset_commit USING (exchange_id)
"""

# Topics that are new under an old name (KIP-516: each has an ID of its own), or after a deletion,
# and since when.
_RESTARTS = """
    SELECT n.topic, max(t.first_time) AS time FROM topic_names n JOIN topics t USING (topic_id)
    GROUP BY n.topic HAVING count(DISTINCT topic_id) > 1
    UNION ALL SELECT t.name, max(time) FROM (
      SELECT response_time AS time, unnest(response.responses) AS t FROM api_delete_topics)
    WHERE t.error_code = 0 AND t.name IS NOT NULL GROUP BY ALL
"""
_SINCE = "ANTI JOIN restarts r ON r.topic = a.topic AND r.time >= a.time"

# When a later commit to a partition may have been lost: before the first request behind the missing
# bytes, or before the end of the connection.
_LOST_COMMITS = f"""
    WITH breaks AS (
      SELECT connection_id, pos + byte_count AS stop FROM anomalies
      WHERE direction = 'request' AND kind IN {BREAKS} AND byte_count >= {_COMMIT_BYTES_MIN}
    ), lost AS (
      SELECT h.connection_id, max(coalesce(e.request_time, c.last_time)) AS time
      FROM breaks h JOIN connections c USING (connection_id) ASOF LEFT JOIN exchanges e
        ON e.connection_id = h.connection_id AND e.request_pos >= h.stop
      GROUP BY ALL
    )
    SELECT c.group_id, c.topic, c.partition, max(l.time) AS time
    FROM commits c JOIN exchanges USING (exchange_id) JOIN lost l USING (connection_id) GROUP BY ALL
"""


# Commits that were not refused or aborted, by view: times, whether they are decided, their topics.
_REQUESTS = {
    "api_offset_commit": """
        SELECT exchange_id, coalesce(response_time, request_time) AS time,
          response_time IS NOT NULL AS is_decided, request.group_id, unnest(request.topics) AS t
        FROM api_offset_commit
    """,
    "api_txn_offset_commit": """
        SELECT exchange_id, coalesce(end_time, response_time, request_time) AS time,
          coalesce(outcome = 'commit', false) AND end_time IS NOT NULL AS is_decided,
          request.group_id, unnest(request.topics) AS t
        FROM api_txn_offset_commit LEFT JOIN commit_outcomes USING (exchange_id)
        WHERE coalesce(outcome, 'open') IN ('commit', 'open')
    """,
}


def _commits() -> str:
    """SQL of group, topic, partition and offset of every commit."""
    # TxnOffsetCommit has no topic ids
    ids = dict(zip(_REQUESTS, ("t.topic_id", "NULL::VARCHAR"), strict=True))
    parts = [
        f"""
        SELECT exchange_id, time, is_decided, group_id, name, topic_id,
          p.partition_index AS partition, p.committed_offset AS committed
        FROM (
          SELECT * EXCLUDE (t), t.name AS name, {ids[view]} AS topic_id, unnest(t.partitions) AS p
          FROM ({request}))
        """
        for view, request in _REQUESTS.items()
    ]
    return f"""
        SELECT c.time, c.group_id, coalesce(c.name, n.topic) AS topic, c.partition, c.committed,
          c.is_decided, c.exchange_id
        FROM ({" UNION ALL ".join(parts)}) c LEFT JOIN topic_names n USING (topic_id)
        ANTI JOIN errors e ON e.exchange_id = c.exchange_id
          AND (e.partition IS NULL OR e.partition = c.partition)
          AND (e.topic IS NULL OR e.topic = coalesce(c.name, n.topic))
        WHERE c.committed >= 0
    """


def collect(database: Database, _: Options) -> Document | None:
    """Table `lag`, a row per group and partition, and a chart's columns. None without commits."""
    database.run(_OUTCOMES)
    database.run(f"CREATE TEMP TABLE restarts AS {_RESTARTS}")
    database.run(f"CREATE TEMP TABLE commits AS SELECT a.* FROM ({_commits()}) a {_SINCE}")
    if not database.value("SELECT count(*) FROM commits"):
        return None
    _make_log_ends(database)
    database.run(
        """
        CREATE TEMP TABLE commit_lag AS
        SELECT c.*, slice_of(c.time) AS slice,
          CASE WHEN c.is_decided AND e.log_end IS NOT NULL
            THEN greatest(e.log_end - c.committed, 0) END AS lag, e.log_end
        FROM commits c ASOF LEFT JOIN log_ends e
        ON c.topic = e.topic AND c.partition = e.partition AND c.time >= e.time
        """
    )
    database.run(f"CREATE TEMP TABLE lost_commits AS {_LOST_COMMITS}")
    database.run(
        """
        CREATE TEMP TABLE lag AS
        WITH tail AS (SELECT topic, partition, max(log_end) AS log_end FROM log_ends GROUP BY ALL)
        SELECT group_id, topic, partition, commits, undecided_commits, first_committed,
          last_committed, log_end, lag_max,
          CASE WHEN last_committed IS NOT NULL THEN lag_at_last_commit END AS lag_at_last_commit,
          CASE WHEN last_committed IS NOT NULL AND log_end IS NOT NULL
            THEN greatest(log_end - last_committed, 0) END AS lag_at_end,
          first_time, last_time, exchange_id
        FROM (
          SELECT c.group_id, c.topic, c.partition, count(*) FILTER (c.is_decided) AS commits,
            count(*) FILTER (NOT c.is_decided) AS undecided_commits,
            arg_min(c.committed, c.time) FILTER (c.is_decided) AS first_committed,
            CASE WHEN arg_max(c.is_decided, c.time) AND coalesce(max(l.time) <= max(c.time), true)
              THEN arg_max(c.committed, c.time) END AS last_committed,
            any_value(t.log_end) AS log_end, max(c.lag) AS lag_max,
            arg_max(c.lag, c.time) AS lag_at_last_commit,
            min(c.time) AS first_time, max(c.time) AS last_time,
            arg_max(c.exchange_id, c.time) AS exchange_id
          FROM commit_lag c LEFT JOIN tail t USING (topic, partition)
          LEFT JOIN lost_commits l USING (group_id, topic, partition) GROUP BY ALL)
        """
    )
    database.run(
        "CREATE TEMP TABLE lag_groups AS "
        "SELECT group_id, count(*) AS partitions, sum(commits)::BIGINT AS commits, "
        "max(lag_max) AS lag_max, sum(lag_at_end)::BIGINT AS lag_at_end, "
        "count(*) FILTER (lag_at_end IS NULL) AS unknown_partitions, "
        "count(DISTINCT topic) AS topics FROM lag GROUP BY group_id"
    )
    return {
        "groups": listed(
            database, "FROM lag_groups ORDER BY lag_at_end DESC NULLS LAST, lag_max DESC, group_id"
        ),
        "partitions": listed(database, LISTS["lag"]),
        "over_time": _over_time(database),
    }


def _make_log_ends(database: Database) -> None:
    """Rising log ends per partition that somebody commits to; the best of each slice's tenth."""
    log_ends = f"""
        SELECT r.response_time AS time, e.* FROM ({_LOG_ENDS}) e
        JOIN (SELECT exchange_id, response_time FROM requests) r USING (exchange_id)
    """
    database.run(
        f"""
        CREATE TEMP TABLE log_ends AS
        SELECT topic, partition, min(time) AS time, max(log_end) AS log_end
        FROM (SELECT a.* FROM ({log_ends}) a {_SINCE})
        SEMI JOIN (SELECT DISTINCT topic, partition FROM commits) USING (topic, partition)
        WHERE time IS NOT NULL
        GROUP BY topic, partition, epoch_us(time) // greatest(slice_us() // 10, 1), log_end
        """
    )


def _over_time(database: Database) -> Columns:
    """The sum of a group's lags at the end of each slice, each partition's last commit counting."""
    columns = database.table(
        f"""
        WITH shown AS (
          SELECT group_id FROM lag_groups ORDER BY lag_at_end DESC NULLS LAST, lag_max DESC,
            group_id
          LIMIT {_SHOWN_GROUPS}
        ), parts AS (SELECT DISTINCT group_id, topic,
          partition FROM lag SEMI JOIN shown USING (group_id)),
        grid AS (SELECT group_id, topic, partition, slice FROM parts, slices),
        committed AS (
          SELECT group_id, topic, partition, slice,
            arg_max_null(CASE WHEN is_decided THEN committed END, time) AS committed
          FROM commit_lag GROUP BY ALL
        ), ended AS (
          SELECT topic, partition, slice_of(time) AS slice, max(log_end) AS log_end
          FROM log_ends GROUP BY ALL
        ), joined AS (
          SELECT g.group_id, g.slice, c.committed, e.log_end
          FROM grid g
          ASOF LEFT JOIN committed c ON g.group_id = c.group_id AND g.topic = c.topic
            AND g.partition = c.partition AND g.slice >= c.slice
          ASOF LEFT JOIN ended e ON g.topic = e.topic AND g.partition = e.partition
            AND g.slice >= e.slice
        )
        SELECT slice_begin(slice) AS t, group_id AS "group",
          sum(greatest(log_end - committed, 0))::BIGINT AS lag
        FROM joined WHERE committed IS NOT NULL AND log_end IS NOT NULL
        GROUP BY ALL ORDER BY "group", t
        """
    )
    return columns.to_pydict()


def section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["lag"]
    blocks = d and [
        "Lag is the highest log end in any response, less the group's last committed offset. The "
        "real lag may be higher. Offsets of a transaction count if it committed. A partition has "
        "no lag here if no response shows its end, if the capture lacks the outcome of the last "
        'commit ("undecided"), or if bytes are missing after it that may be another commit.',
        _chart(d["over_time"]),
        Listing("lag", d["partitions"]),
    ]
    return Section(
        "lag",
        "Consumer lag",
        blocks or [],
        "No commit in this capture.",
        name="Lag",
        badge=d["groups"]["total"] if d else None,
    )


def _chart(d: Columns) -> Chart | None:
    """The lag of groups, in records."""
    if not d["t"]:
        return None
    worst = max(range(len(d["lag"])), key=lambda place: d["lag"][place])
    return Chart(
        "lag",
        "Consumer lag of committed offsets",
        f"Highest: {f.visible(d['group'][worst], 300)}, {f.count(d['lag'][worst])} records behind.",
        d,
        load("lag"),
        series=list(dict.fromkeys(f.visible(group, 300) for group in d["group"])),
        by="group",
    )
