"""The saved state of a table set, from which a later `--append` continues; tables in `_state/`.

`append` describes the whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kdissect.capture.object_store import repeated
from kdissect.errors import CaptureError
from kdissect.kafka.assembly import Anomaly
from kdissect.pipeline.learn import Cluster
from kdissect.pipeline.plan import RunPlan
from kdissect.pipeline.step_rows import RowKind, StepRow
from kdissect.pipeline.table_set import dataset
from kdissect.stories.events import SCHEMAS
from kdissect.tables.anomalies import AnomalyRow
from kdissect.tables.arrow_arrays import plain
from kdissect.tables.schemas import CONNECTIONS

_SO_FAR = "connection"  # a column beside those of `open_connection`

# What a run counts that keeps state, with the text for each.
COUNTS = {
    "late_packets": "packets came when the rows that they belong to were complete",
    "late_names": "names of topics or users became known that earlier rows lack",
    "carry_limits": "connections were given up before their end (a limit, or secrets that are gone "
    "or not to be saved): their open requests have no response",
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
    """The rows of a file of the state, at a path or a URL.

    Raises CaptureError if it cannot be read.
    """
    folder, _, name = path.rpartition("/")
    try:
        return repeated(dataset(folder, [name]).to_table)
    except (OSError, pa.ArrowException) as error:
        raise CaptureError(f"{path}: not readable ({error})") from error


def saved_events(plan: RunPlan) -> list[StepRow]:
    """A row for each file with events of earlier runs, keyed by slot."""
    files = plan.before.event_files if plan.before else ()
    return [
        StepRow(number % plan.slot_count, RowKind.SAVED_EVENTS, number, os.fsencode(path))
        for number, path in enumerate(files)
    ]


def read_events(row: StepRow) -> tuple[str, pa.Table]:
    """(name of SCHEMAS, events) of a row of `saved_events`."""
    path = os.fsdecode(row.data)
    name = Path(path).parent.name
    return name, read_state(path).cast(SCHEMAS[name])


def with_rows(states: pa.Table, connections: pa.Table) -> pa.Table:
    """A table of open connections with their rows of `connections` so far."""
    columns = [column.combine_chunks() for column in connections.columns]  # without their meanings
    return states.append_column(
        _SO_FAR, pa.StructArray.from_arrays(columns, connections.column_names)
    )


def rows_so_far(states: pa.Table) -> pa.Table:
    """The rows that `with_rows` was given."""
    return pa.Table.from_struct_array(states[_SO_FAR])


def continued(now: pa.Table, earlier: pa.Table) -> pa.Table:
    """`connections` of this run with what messages and handshakes told the runs before; counts are
    whole already. Then the earlier rows of connections without packets in this run."""
    if not earlier.num_rows:
        return now
    before = earlier.take(pc.index_in(now["connection_id"], earlier["connection_id"]))
    pairs = zip(plain(now, CONNECTIONS).columns, before.columns, strict=True)
    merged = pa.table([_either(*pair) for pair in pairs], schema=CONNECTIONS)
    is_here = pc.is_in(earlier["connection_id"], now["connection_id"])
    return pa.concat_tables([merged, earlier.filter(pc.invert(is_here))])


def _either(now: pa.ChunkedArray, before: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The values of this run; those of the runs before for null, and before those of a list."""
    if not pa.types.is_list(now.type):
        return pc.coalesce(now, before)
    lists = zip(before.to_pylist(), now.to_pylist(), strict=True)
    both = [list(dict.fromkeys([*(one or ()), *(two or ())])) for one, two in lists]
    return pa.array(both, now.type)
