"""Topics: their writers and readers, codecs and batch sizes."""

from __future__ import annotations

from kdissect import text as f
from kdissect.charts import DIRECTION_NAMES, Chart, Columns, heat_map, load
from kdissect.report.document import LISTS, Block, Document, Listing, Options, Section, listed
from kdissect.sql import Database
from kdissect.sql.requests import client_name, quantile

SHOWN_TOPICS, SHOWN_CLIENTS = 20, 20
# what of a batch's size no codec touches: its header, by magic
_HEADER = "CASE magic WHEN 2 THEN 61 WHEN 1 THEN 34 ELSE 26 END"
_READS = "'fetch', 'share_fetch'"


def collect(database: Database, _: Options) -> Document:
    """Tables `topic_batches`, `topic_clients` and `topics_all`."""
    database.run(
        f"""
        CREATE TEMP TABLE batches AS
        SELECT b.exchange_id, coalesce(b.topic, b.topic_id) AS topic, b.partition, b.codec, b.size,
          b.uncompressed_size, b.record_count, b.magic, b.is_control,
          CASE WHEN b.source = 'produce' THEN 'write' WHEN b.source IN ({_READS}) THEN 'read'
               ELSE 'replicate' END AS direction
        FROM record_batches b WHERE NOT coalesce(b.is_partial, false)
        """
    )
    sums = f"""
        count(*) AS batches, sum(record_count)::BIGINT AS records, sum(size)::BIGINT AS bytes,
        sum(uncompressed_size)::BIGINT AS uncompressed_bytes,
        sum(uncompressed_size) FILTER (codec <> 'none' OR magic = 2)
          / nullif(sum(greatest(size - {_HEADER}, 1))
            FILTER (uncompressed_size IS NOT NULL AND (codec <> 'none' OR magic = 2)), 0)
          AS compression_ratio,
        sum(uncompressed_size) / nullif(sum(record_count), 0) AS record_size_mean,
        {quantile(database, "size", 0.5)} AS batch_size_p50,
        {quantile(database, "size", 0.95)} AS batch_size_p95,
        max(size) AS batch_size_max,
        sum(record_count) / count(*) AS records_per_batch
    """
    database.run(
        f"CREATE TEMP TABLE topic_batches AS SELECT topic, direction, codec, {sums} "
        "FROM batches WHERE NOT coalesce(is_control, false) GROUP BY topic, direction, codec"
    )
    _make_topic_clients(database)
    _make_topics(database, sums)
    cells = database.table(
        f"""
        WITH top_topics AS (SELECT topic FROM topics_all WHERE NOT is_internal
          ORDER BY write_bytes + read_bytes DESC, topic LIMIT {SHOWN_TOPICS}),
        top_clients AS (
          SELECT client, count(*) OVER (PARTITION BY any_value(client_id)) AS namesakes
          FROM topic_clients WHERE direction <> 'replicate'
          GROUP BY client ORDER BY sum(bytes) DESC, client LIMIT {SHOWN_CLIENTS})
        SELECT topic, CASE WHEN t.namesakes = 1 THEN coalesce(c.client_id, '(none)')
          ELSE c.client END AS client,
          direction, sum(bytes)::BIGINT AS bytes,
          sum(records)::BIGINT AS records
        FROM topic_clients c SEMI JOIN top_topics USING (topic)
        JOIN top_clients t ON t.client = c.client
        WHERE direction <> 'replicate' AND bytes > 0 GROUP BY ALL ORDER BY ALL
        """
    )
    sizes = database.table(
        "SELECT direction, floor(log2(greatest(size, 1)))::INTEGER AS bin, count(*) AS count "
        "FROM batches WHERE NOT coalesce(is_control, false) AND size > 0 GROUP BY ALL ORDER BY ALL"
    )
    codecs = database.rows(
        f"SELECT direction, codec, {sums} FROM batches WHERE NOT coalesce(is_control, false) "
        "AND codec IS NOT NULL GROUP BY direction, codec ORDER BY direction DESC, bytes DESC, codec"
    )
    return {
        "topics": listed(database, LISTS["topics"]),
        "clients": listed(database, LISTS["topic_clients"]),
        "batches": listed(database, LISTS["topic_batches"]),
        "codecs": codecs,
        "heat_map": cells.to_pydict(),
        "batch_sizes": sizes.to_pydict(),
    }


def _make_topic_clients(database: Database) -> None:
    """Make `topic_clients`: clients that wrote or read a topic, or fetched it without any data."""
    columns = "topic, client_id, client_ip, direction"
    database.run(
        f"""
        CREATE TEMP TABLE topic_clients AS
        WITH moved AS (
          SELECT {columns}, count(*) AS batches, sum(b.record_count)::BIGINT AS records,
            sum(b.size)::BIGINT AS bytes, count(DISTINCT b.partition) AS partitions,
            list_sort(list(DISTINCT b.codec)) AS codecs,
            list_sort(list(DISTINCT b.magic)) AS magics,
            count(DISTINCT x.exchange_id) AS exchanges,
            min(x.time) AS first_time, max(x.time) AS last_time,
            arg_min(x.packet, x.time) AS packet, arg_min(x.capture_id, x.time) AS capture_id
          FROM batches b JOIN requests x USING (exchange_id) GROUP BY ALL
        ), asked AS (
          SELECT {columns}, count(*) AS exchanges, min(time) AS first_time, max(time) AS last_time,
            arg_min(packet, time) AS packet, arg_min(capture_id, time) AS capture_id
          FROM (
            SELECT unnest(topics) AS topic, client_id, client_ip, time, packet, capture_id,
              CASE WHEN api = 'Produce' THEN 'write' WHEN is_broker THEN 'replicate' ELSE 'read' END
                AS direction
            FROM requests WHERE api IN ('Produce', 'Fetch', 'ShareFetch')
          ) GROUP BY ALL
        )
        SELECT {columns}, {client_name("client_id", "client_ip")} AS client,
          coalesce(max(batches), 0) AS batches, coalesce(max(records), 0) AS records,
          coalesce(max(bytes), 0) AS bytes, coalesce(max(partitions), 0) AS partitions,
          any_value(codecs) AS codecs, any_value(magics) AS magics, max(exchanges) AS exchanges,
          min(first_time) AS first_time, max(last_time) AS last_time,
          max_by(packet, is_moved) AS packet, max_by(capture_id, is_moved) AS capture_id
        FROM (
          SELECT *, true AS is_moved FROM moved
          UNION ALL BY NAME SELECT *, false AS is_moved FROM asked
        ) GROUP BY {columns}
        """
    )


def _make_topics(database: Database, sums: str) -> None:
    database.run(
        f"""
        CREATE TEMP TABLE topics_all AS
        WITH summed AS (
          SELECT topic, direction, {sums}, list_sort(list(DISTINCT codec)) AS codecs,
            count(DISTINCT partition) AS partitions
          FROM batches WHERE NOT coalesce(is_control, false) GROUP BY topic, direction
        ), people AS (
          SELECT topic, count(DISTINCT client) FILTER (direction = 'write') AS writers,
            count(DISTINCT client) FILTER (direction = 'read') AS readers
          FROM topic_clients GROUP BY topic
        ), every AS (SELECT topic FROM people UNION SELECT topic FROM summed)
        SELECT e.topic, starts_with(e.topic, '__') AS is_internal,
          coalesce(p.writers, 0) AS writers, coalesce(p.readers, 0) AS readers,
          greatest(w.partitions, r.partitions, l.partitions) AS partitions,
          coalesce(w.bytes, 0) AS write_bytes, coalesce(w.records, 0) AS write_records,
          coalesce(r.bytes, 0) AS read_bytes, coalesce(r.records, 0) AS read_records,
          coalesce(l.bytes, 0) AS replicate_bytes,
          coalesce(w.codecs, r.codecs, l.codecs) AS codecs,
          coalesce(w.compression_ratio, r.compression_ratio) AS compression_ratio,
          coalesce(w.batch_size_p50, r.batch_size_p50) AS batch_size_p50,
          coalesce(w.batch_size_max, r.batch_size_max) AS batch_size_max,
          coalesce(w.records_per_batch, r.records_per_batch) AS records_per_batch,
          coalesce(w.record_size_mean, r.record_size_mean) AS record_size_mean
        FROM every e LEFT JOIN people p USING (topic)
        LEFT JOIN summed w ON w.topic = e.topic AND w.direction = 'write'
        LEFT JOIN summed r ON r.topic = e.topic AND r.direction = 'read'
        LEFT JOIN summed l ON l.topic = e.topic AND l.direction = 'replicate'
        WHERE e.topic IS NOT NULL
        """
    )


_DOES = {"write": "writes", "read": "reads", "replicate": "replicates"}


def section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["topics"]
    clients = {
        **d["clients"],
        "rows": [{**row, "direction": _DOES[row["direction"]]} for row in d["clients"]["rows"]],
    }
    maps = [
        _heat_map(d["heat_map"], direction, title)
        for direction, title in (("write", "Who writes what"), ("read", "Who reads what"))
    ]
    blocks: list[Block] = [
        Listing("topics", d["topics"]),
        maps,
        Listing("topic_clients", clients),
        (_batch_sizes(d["batch_sizes"]),),
        Listing("codecs", d["codecs"]),
    ]
    return Section(
        "topics",
        "Topics",
        blocks if d["topics"]["total"] else [],
        "No record data and no topic in this capture.",
        badge=d["topics"]["total"],
    )


def _heat_map(d: Columns, direction: str, title: str) -> Chart | None:
    """Topics by clients, bytes as colour."""
    places = [place for place, value in enumerate(d["direction"]) if value == direction]
    if not places:
        return None
    names = ("topic", "client", "bytes", "records")
    data = {name: [d[name][place] for place in places] for name in names}
    topics, clients = len(set(data["topic"])), len(set(data["client"]))
    text = f"{f.plural(clients, 'client')} {direction} {f.plural(topics, 'topic')}."
    return heat_map(f"heat-{direction}", title, text, data, "bytes")


def _batch_sizes(d: Columns) -> Chart | None:
    """The histogram of batch sizes, in powers of two."""
    if not d["bin"]:
        return None
    directions = list(DIRECTION_NAMES.values())
    return Chart(
        "batch-sizes",
        "Sizes of record batches",
        f"{f.plural(sum(d['count']), 'batch', 'batches')} of whole size, in powers of two.",
        {
            "series": [DIRECTION_NAMES[value] for value in d["direction"]],
            "from": [2**bin_ for bin_ in d["bin"]],
            "to": [2 ** (bin_ + 1) for bin_ in d["bin"]],
            "count": d["count"],
        },
        load(
            "histogram",
            series=directions,
            x_title="bytes of a batch",
            x_scale={"type": "log", "base": 2},
            x_label="datum.value >= 1048576 ? format(datum.value / 1048576, ',d') + ' Mi' : "
            "datum.value >= 1024 ? datum.value / 1024 + ' Ki' : datum.label",
            count_title="batches",
        ),
        series=directions,
    )
