"""The saved state of a table set, from which a later `--append` continues; tables in `_state/`.

`append` describes the whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kdissect.errors import CaptureError
from kdissect.kafka.assembly import Anomaly
from kdissect.pipeline.learn import Cluster
from kdissect.pipeline.plan import RunPlan
from kdissect.pipeline.step_rows import ENDED_CONNECTIONS, OPEN_CONNECTIONS, Row, RowKind
from kdissect.stories.events import SCHEMAS
from kdissect.tables.anomalies import AnomalyRow
from kdissect.tables.arrow_arrays import plain
from kdissect.tables.schemas import FIXED_TABLES

# What a run counts that keeps state, with the text for each.
COUNTS = {
    "late_packets": "packets came when the rows that they belong to were complete",
    "late_names": "names of topics or users became known that earlier rows lack",
    "carry_limits": "connections go on that a limit ended, or for which there are no TLS secrets "
    "any more",
    "open_exchanges": "requests or responses are not complete: the next --append continues them",
}


def count_anomalies(counts: dict[str, int]) -> list[AnomalyRow]:
    """A row for each of these counts that a connection or a packet caused."""
    kinds = {"late_packets": Anomaly.LATE_PACKETS, "carry_limits": Anomaly.CARRY_LIMIT}
    return [
        AnomalyRow(kind, f"{counts[name]} {COUNTS[name]}")
        for name, kind in kinds.items()
        if counts.get(name)
    ]


# Names in final rows that a later message may complete, with their kind: "id" is a topic id without
# a known name, "topic" a topic whose records came by name, without an id, "user" a SCRAM user,
# which may be the id of a delegation token.
NamesUsed = set[tuple[str, str]]


def scram_users(connections: pa.Table) -> NamesUsed:
    """The SCRAM users in rows of `connections`."""
    is_scram = pc.fill_null(pc.starts_with(connections["sasl_mechanism"], "SCRAM"), False)
    principals = connections["principal"].filter(is_scram).unique().to_pylist()
    return {("user", user.removeprefix("User:")) for user in principals if user is not None}


def late_names(used: NamesUsed, before: Cluster, after: Cluster) -> list[str]:
    """Names that `after` knows and that rows written with `before` lack."""
    old, new = before.topics.names(), after.topics.names()
    late = {old.name(ident) for ident in old.of_id if old.name(ident) != new.name(ident)}
    for kind, name in used:
        if kind == "id" and old.name(name) != new.name(name):
            late.add(new.name(name))
        if kind == "topic" and old.id_of.get(name) != new.id_of.get(name):
            late.add(name)
        if kind == "user" and before.owners.get(name) != after.owners.get(name):
            late.add(name)
    return sorted(late)


def read_state(path: str) -> pa.Table:
    """The rows of a file of the state. Raises CaptureError if it cannot be read."""
    try:
        return pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise CaptureError(f"{path}: not readable ({error})") from error


def saved_events(plan: RunPlan) -> list[Row]:
    """A row for each file with events of earlier runs, keyed by slot."""
    files = plan.before.event_files if plan.before else ()
    return [
        Row(number % plan.slot_count, RowKind.SAVED_EVENTS, number, os.fsencode(path))
        for number, path in enumerate(files)
    ]


def read_events(row: Row) -> tuple[str, pa.Table]:
    """(name of SCHEMAS, events) of a row of `saved_events`."""
    path = os.fsdecode(row.data)
    name = Path(path).parent.name
    return name, read_state(path).cast(SCHEMAS[name])


def open_and_ended_connections(
    plan: RunPlan, now: dict[str, list[pa.Table]]
) -> Iterator[tuple[str, pa.Table]]:
    """(table or OPEN_CONNECTIONS, rows) of connections that go on from run to run: the rows of this
    run with what messages and handshakes told the runs before. Counts are whole already."""
    schema = FIXED_TABLES["connections"]
    files = plan.before.connection_files if plan.before else ()
    earlier = pa.concat_tables(
        [schema.empty_table(), *(pq.read_table(path, schema=schema) for path in files)]
    )
    seen = [schema.empty_table()["connection_id"]]
    for name, target in ((OPEN_CONNECTIONS, OPEN_CONNECTIONS), (ENDED_CONNECTIONS, "connections")):
        for table in now.get(name, ()):
            place = pc.index_in(table["connection_id"], earlier["connection_id"])
            before = earlier.take(place)
            table = plain(table, schema)
            pairs = zip(table.columns, before.columns, strict=True)
            table = pa.table([_either(*pair) for pair in pairs], schema=schema)
            seen.append(table["connection_id"])
            yield target, table
    known = pa.chunked_array([chunk for column in seen for chunk in column.chunks], pa.int64())
    others = earlier.filter(pc.invert(pc.is_in(earlier["connection_id"], value_set=known)))
    if others.num_rows:
        yield OPEN_CONNECTIONS, others


def _either(now: pa.ChunkedArray, before: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The values of this run; those of the runs before for null, and before those of a list."""
    if not pa.types.is_list(now.type):
        return pc.coalesce(now, before)
    lists = zip(before.to_pylist(), now.to_pylist(), strict=True)
    both = [list(dict.fromkeys([*(one or ()), *(two or ())])) for one, two in lists]
    return pa.array(both, now.type)
