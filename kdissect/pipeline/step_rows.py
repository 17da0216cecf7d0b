"""Rows between the steps of a run; `local` and `spark` only move them.

- scan reads UNITS, such as a split. It gives SEGMENTS rows keyed by bucket, a hash of the
  endpoints.
- assemble reads a bucket. It gives EXCHANGES rows keyed by slot (a range of the captures' bytes)
  and TABLE rows (connections, anomalies).
- decode reads a slot, and the names that the whole run knows. It writes tables into a sink, and
  gives EVENTS rows keyed by group or producer.
- analyse reads the events of one such key. It writes tables built from many messages into a sink.

Each step is a plain function over rows. It also gives rows with the key RUN, which tell of the
whole run: each is a `run_tables.RunSummary`, and their sum is the result. A bucket holds whole
connections.
A slot holds about equal bytes of any connections. Both depend on the input and the options alone,
so the rows are the same however many workers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import pyarrow as pa

from kdissect.pipeline.options import MB

Sink = Callable[[str, pa.Table], None]  # receives (name of a table, rows of it)
DATE = "/date="  # follows the name of a table, before a day: its rows of that day

# Names of rows with files apart from the others of their table: connections that a later run may
# continue; anomalies found in all events.
OPEN_CONNECTIONS, STORY_ANOMALIES = "open connections", "anomalies of stories"
TABLE_OF = {OPEN_CONNECTIONS: "connections", STORY_ANOMALIES: "anomalies"}
# Tables of a set's saved state, which `append` describes: connections as `open_connection` packs
# them, the events of SCHEMAS, and one row with all else.
STATE = "_state"  # readers of tables skip folders with a leading underscore
STATE_OPEN, STATE_KNOWN = f"{STATE}/open", f"{STATE}/known"
RUN = -1  # key of rows about the whole run
ROW_BYTES_MAX = 4 * MB  # bytes of one shuffled row; Spark's Arrow batches hold several


class RowKind(IntEnum):
    """The content of a row; a step reads the rows of a key in this order."""

    UNITS = 0  # of the scan: (number, `plan.ScanUnit`) pairs
    SUMMARY = 1
    FACTS = 2  # of a stream, or summaries with facts of one key only
    TABLE = 3
    SEGMENTS = 4
    EXCHANGES = 5
    EVENTS = 6
    STATES = 7  # of open connections of earlier runs
    SAVED_EVENTS = 8  # the path of a file with events of earlier runs


class StepRow(NamedTuple):
    """A row between steps. key: the bucket, the slot, the key of events, or RUN.

    data: a SegmentBatch of SEGMENTS, an Assembly of EXCHANGES, bytes of other kinds.
    """

    key: int
    kind: int
    order: int
    data: Any


def sliced(table: pa.Table) -> Iterator[pa.Table]:
    if not table.num_rows:
        return
    row_max = max(1, int(table.num_rows * ROW_BYTES_MAX // max(table.nbytes, 1)))
    for start in range(0, table.num_rows, row_max):
        yield table.slice(start, row_max)
