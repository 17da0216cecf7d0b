"""Incidents in the report: a timeline of them, and marks on the charts over time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vl_convert

import kdissect
from kdissect.charts import Chart, mark_incidents
from kdissect.incidents import KINDS
from kdissect.report import _SECTIONS
from kdissect.report.sections import latency, overview, traffic
from tests.report.documents import document_of

RED = "#d1242f"


def _charts(blocks: Any) -> Iterator[Chart]:
    for block in blocks:
        if isinstance(block, Chart):
            yield block
        elif isinstance(block, list | tuple):
            yield from _charts(block)


def test_each_kind_has_a_section_of_the_page() -> None:
    """Its incidents link to that section."""
    assert set(KINDS.values()) <= set(_SECTIONS)


def test_incidents_mark_the_charts(captures: Path) -> None:
    """Every chart over time has a band for each but those for information, and still compiles."""
    document = document_of(kdissect.read(captures / "incidents" / "broker_paused.pcap.gz"))
    assert [row["severity"] for row in document["incidents"]] == ["bad", "info"]
    timeline = overview.timeline(document)
    assert timeline is not None
    assert timeline.data["lane"] == ["broker_stall", "unanswered_requests"]
    assert timeline.to_json()["legend"][0] == ["bad", RED]
    charts = list(_charts([*traffic.section(document).blocks, *latency.section(document).blocks]))
    mark_incidents(charts, document["incidents"])
    over_time = [chart for chart in charts if "t" in chart.data]
    assert {chart.id for chart in over_time} == {"traffic", "bytes", "latency-time"}
    for chart in over_time:
        band = chart.spec["layer"][0]
        assert [mark["kind"] for mark in band["data"]["values"]] == ["broker_stall"]
        spec = {**chart.spec, "data": {"name": "d", "values": chart.rows()}}
        assert "</svg>" in vl_convert.vegalite_to_svg(spec, vl_version="6.4")
