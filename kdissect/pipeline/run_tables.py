"""What the scan and assemble steps tell of the whole run, and the tables made of it.

Both steps yield rows with the key RUN: counts of packets, facts that messages hold (names of
topics, brokers), and the connections that go on from run to run. The caller of the steps collects
them after the last bucket. It writes the tables of the whole run, and gives the facts to each
decode task, because a fact that comes late applies to earlier rows as well.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from kdissect.kafka.assembly import Anomaly
from kdissect.pipeline.clients import with_owners
from kdissect.pipeline.learn import Cluster
from kdissect.pipeline.plan import RunPlan
from kdissect.pipeline.saved_state import (
    NamesUsed,
    late_names,
    open_and_ended_connections,
    scram_users,
)
from kdissect.pipeline.step_rows import (
    RUN,
    Row,
    RowKind,
    Sink,
    packed_table,
)
from kdissect.tables.anomalies import AnomalyRow, anomalies_table
from kdissect.tables.arrow_arrays import unpacked
from kdissect.tables.schemas import CAPTURES, table_of_rows

LATE_NAMES_LISTED = 20


@dataclass(slots=True)
class RunStats:
    """Counts of a run, or of a part of it, picklable; `+=` adds another part.

    packets, tcp, duplicates: by source. ignored: by source and reason. counts: by name of
    `saved_state.COUNTS`. timings: seconds and bytes by name. hashes: (number in the plan's `files`,
    size, sha256).
    """

    packets: Counter[int] = field(default_factory=Counter)
    tcp: Counter[int] = field(default_factory=Counter)
    duplicates: Counter[int] = field(default_factory=Counter)
    ignored: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    counts: Counter[str] = field(default_factory=Counter)
    timings: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    hashes: list[tuple[int, int, str]] = field(default_factory=list)

    def __iadd__(self, other: RunStats) -> RunStats:
        for name in ("packets", "tcp", "duplicates", "counts"):
            getattr(self, name).update(getattr(other, name))  # a counter adds
        for source, reasons in other.ignored.items():
            self.ignored[source].update(reasons)
        for name, value in other.timings.items():
            self.timings[name] += value
        self.hashes += other.hashes
        return self


@dataclass(slots=True)
class RunSummary:
    """All that the rows with the key RUN tell.

    connections: rows of OPEN_CONNECTIONS and of ENDED_CONNECTIONS, which go on from run to run.
    """

    stats: RunStats = field(default_factory=RunStats)
    facts: Cluster = field(default_factory=Cluster)
    connections: dict[str, list[pa.Table]] = field(default_factory=dict)

    @staticmethod
    def of(rows: Iterable[Row]) -> RunSummary:
        summary = RunSummary()
        for row in rows:
            assert row.key == RUN, row.key
            if row.kind == RowKind.STATS:
                summary.stats += pickle.loads(row.data)
            elif row.kind == RowKind.FACTS:
                summary.facts.merge(Cluster.from_bytes(row.data))
            else:
                name, table = unpacked(row.data)
                summary.connections.setdefault(name, []).append(table)
        return summary

    def rows(self) -> Iterator[Row]:
        """The same in few rows."""
        yield Row(RUN, RowKind.STATS, 0, pickle.dumps(self.stats))
        yield Row(RUN, RowKind.FACTS, 0, self.facts.to_bytes())
        for name, tables in self.connections.items():
            for table in tables:
                yield Row(RUN, RowKind.TABLE, 0, packed_table(name, table))


def write_run_tables(plan: RunPlan, summary: RunSummary, sink: Sink) -> dict[str, Any]:
    """Write the tables of the whole run; returns a result as those of tasks (`local.summed`)."""
    before = plan.before
    if before is not None:
        summary.facts.merge(Cluster.from_bytes(before.known["facts"].encode()))
    stats, facts = summary.stats, summary.facts
    used: NamesUsed = set()
    for name, tables in summary.connections.items():
        for table in tables:
            used |= scram_users(table)
        summary.connections[name] = [with_owners(table, facts.owners) for table in tables]
    sink("topics", facts.topics.table())
    sink("brokers", facts.brokers.table())
    sink("captures", captures_table(plan, stats))
    sink("anomalies", cut_captures(plan))
    for name, table in open_and_ended_connections(plan, summary.connections):
        sink(name, table)
    stats.counts["late_names"] = _late_names(plan, facts, sink)
    state = {
        "counts": stats.counts,
        "facts": facts.to_bytes().decode(),
        "names_used": sorted(used),
    }
    return {"timings": stats.timings, "state": state, "hashes": stats.hashes}


def _late_names(plan: RunPlan, facts: Cluster, sink: Sink) -> int:
    """Return how many names this run knows that rows of earlier runs lack; an anomaly lists some of
    them."""
    if plan.before is None:
        return 0
    known = plan.before.known
    used = {(kind, name) for kind, name in known["names_used"]}
    names = late_names(used, Cluster.from_bytes(known["facts"].encode()), facts)
    if names:
        listed = ", ".join(names[:LATE_NAMES_LISTED])
        detail = f"{len(names)} names became known that rows of earlier runs lack: {listed}"
        sink("anomalies", anomalies_table([AnomalyRow(Anomaly.LATE_NAMES, detail)]))
    return len(names)


def captures_table(plan: RunPlan, stats: RunStats) -> pa.Table:
    """Rows of `captures`, from the plan and the counts of all scans."""
    rows = []
    for number, info in enumerate(plan.captures, plan.earlier_count):
        of = info.source
        assert stats.packets[of] == info.packet_count, (info.path, stats.packets[of])
        rows.append(
            {
                "capture_id": plan.capture_ids[number],
                "path": info.path,
                "format": info.format,
                "compression": info.compression,
                "link_types": list(info.link_types),
                "packet_count": info.packet_count,
                "byte_count": info.byte_count,
                "first_time": info.first_time_ns,
                "last_time": info.last_time_ns,
                "truncated_packet_count": info.truncated_packet_count,
                "tcp_packet_count": stats.tcp[of],
                "duplicate_packet_count": stats.duplicates[of],
                "ignored_packet_count": sum(stats.ignored[of].values()),
                "ignored_reasons": sorted(stats.ignored[of].items()),
                "error": info.error,
            }
        )
    return table_of_rows(CAPTURES, rows)


def cut_captures(plan: RunPlan) -> pa.Table:
    """A capture_cut anomaly for each file that could not be read to its end."""
    return anomalies_table(
        AnomalyRow(
            Anomaly.CAPTURE_CUT,
            info.error or "",
            capture_id=plan.capture_ids[number],
            packet=info.error_packet if info.error_packet >= 0 else None,
            pos=info.error_pos if info.error_pos >= 0 else None,
        )
        for number, info in enumerate(plan.captures, plan.earlier_count)
        if info.source >= 0 and info.error is not None
    )
