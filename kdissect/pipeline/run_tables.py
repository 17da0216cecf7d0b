"""What the steps tell of the whole run, and the tables made of it.

Every step yields rows with the key RUN. The caller of the steps sums them up. After the last bucket
it writes the tables of the whole run. Each decode task gets the names of topics and the owners of
tokens, because a fact that comes late applies to earlier rows as well.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from kdissect.kafka.assembly import Anomaly
from kdissect.pipeline.learn import Cluster
from kdissect.pipeline.plan import Before, RunPlan
from kdissect.pipeline.saved_state import NamesUsed, late_names
from kdissect.pipeline.step_rows import RUN, RowKind, Sink, StepRow
from kdissect.pipeline.table_writer import StagedFile
from kdissect.tables.anomalies import AnomalyRow, anomalies_table
from kdissect.tables.schemas import CAPTURES, table_of_rows

LATE_NAMES_LISTED = 20


@dataclass(slots=True)
class RunSummary:
    """What a run tells besides rows of tables, or what a part of it tells; `+=` adds another part.

    packets, tcp, duplicates: by source. ignored: by source and reason. counts: by name of
    `saved_state.COUNTS`. timings: seconds and bytes by name. hashes: sha256 by number in the
    plan's `files`. facts: what messages tell. names_used: if the run saves state. files: of tables,
    staged by successful attempts.
    """

    packets: Counter[int] = field(default_factory=Counter)
    tcp: Counter[int] = field(default_factory=Counter)
    duplicates: Counter[int] = field(default_factory=Counter)
    ignored: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    counts: Counter[str] = field(default_factory=Counter)
    timings: dict[str, float] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)
    facts: Cluster = field(default_factory=Cluster)
    names_used: NamesUsed = field(default_factory=set)
    files: list[StagedFile] = field(default_factory=list)

    def __iadd__(self, other: RunSummary) -> RunSummary:
        for name in ("packets", "tcp", "duplicates", "counts"):
            getattr(self, name).update(getattr(other, name))  # a counter adds
        for source, reasons in other.ignored.items():
            self.ignored[source].update(reasons)
        for name, value in other.timings.items():
            self.timings[name] = self.timings.get(name, 0.0) + value
        self.facts.merge(other.facts)
        self.hashes |= other.hashes
        self.names_used |= other.names_used
        self.files += other.files
        return self

    def add(self, row: StepRow) -> None:
        """Add what a row with the key RUN tells."""
        self += pickle.loads(row.data)

    def row(self, order: int = 0) -> StepRow:
        """The row with the key RUN that tells the same."""
        return StepRow(RUN, RowKind.SUMMARY, order, pickle.dumps(self))

    def rows(self, fact_keys: int) -> Iterator[StepRow]:
        """The rows that tell the same: with keys of facts these are in rows of their own."""
        for key, part in enumerate(self.facts.parts(fact_keys) if fact_keys else ()):
            if part != Cluster():
                yield RunSummary(facts=part).row()._replace(key=key, kind=RowKind.FACTS)
        yield (replace(self, facts=Cluster()) if fact_keys else self).row()


def write_run_tables(plan: RunPlan, summary: RunSummary, sink: Sink) -> None:
    """Write the tables of the whole run, after the assemble step; the summary gets what earlier
    runs knew."""
    facts = summary.facts
    if plan.before is not None:
        earlier = Cluster.from_bytes(plan.before.known["facts"].encode())
        facts.merge(earlier)
        summary.counts["late_names"] = _late_names(plan.before, earlier, facts, sink)
    sink("topics", facts.topics.table())
    sink("brokers", facts.brokers.table())
    sink("captures", captures_table(plan, summary))
    sink("anomalies", cut_captures(plan))


def _late_names(before: Before, earlier: Cluster, facts: Cluster, sink: Sink) -> int:
    """Return how many names this run knows that rows of earlier runs lack; an anomaly lists some of
    them."""
    used = {(kind, name) for kind, name in before.known["names_used"]}
    names = late_names(used, earlier, facts)
    if names:
        listed = ", ".join(names[:LATE_NAMES_LISTED])
        detail = f"{len(names)} names became known that rows of earlier runs lack: {listed}"
        sink("anomalies", anomalies_table([AnomalyRow(Anomaly.LATE_NAMES, detail)]))
    return len(names)


def captures_table(plan: RunPlan, stats: RunSummary) -> pa.Table:
    """Rows of `captures`, from the plan and the counts of all steps."""
    rows = []
    for number, info in enumerate(plan.captures, plan.earlier_count):
        of = info.source
        assert stats.packets[of] == info.packet_count, (info.path, stats.packets[of])
        rows.append(
            {
                "capture_id": int(plan.capture_ids[number]),
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
            capture_id=int(plan.capture_ids[number]),
            packet=info.error_packet if info.error_packet >= 0 else None,
            pos=info.error_pos if info.error_pos >= 0 else None,
        )
        for number, info in enumerate(plan.captures, plan.earlier_count)
        if info.source >= 0 and info.error is not None
    )
