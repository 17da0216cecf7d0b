"""Rows of `captures`, and an anomaly for each capture that could not be read to its end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa

from kdissect.kafka.assembly import Anomaly
from kdissect.pipeline.filters import NOT_FOLLOWED
from kdissect.pipeline.run_plan import RunPlan
from kdissect.tables.anomalies import AnomalyRow, anomalies_table
from kdissect.tables.schemas import CAPTURES, table_of_rows


def captures_table(plan: RunPlan, stats: list[dict[str, Any]]) -> pa.Table:
    """Rows of `captures`, from the plan and the counts of all scans."""
    count = plan.earlier_count + len(plan.captures)
    packets, tcp = [0] * count, [0] * count
    duplicates = [0] * count
    ignored: list[Counter[str]] = [Counter() for _ in range(count)]
    for entry in stats:
        for source, number in entry.get("duplicates", {}).items():
            duplicates[int(source)] += number
        for source, number in entry.get("given_up", {}).items():
            tcp[int(source)] -= number
            ignored[int(source)][NOT_FOLLOWED] += number
        if "source" in entry:
            source = entry["source"]
            packets[source] += entry["packet_count"]
            tcp[source] += entry["tcp_packet_count"]
            ignored[source].update(entry["ignored"])
    rows = []
    for number, info in enumerate(plan.captures, plan.earlier_count):
        assert packets[number] == info.packet_count, (info.path, packets[number])
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
                "tcp_packet_count": tcp[number],
                "duplicate_packet_count": duplicates[number],
                "ignored_packet_count": sum(ignored[number].values()),
                "ignored_reasons": sorted(ignored[number].items()),
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
