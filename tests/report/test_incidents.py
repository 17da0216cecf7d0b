"""Incidents in the report: before other findings, on a timeline, as marks on charts."""

from __future__ import annotations

from pathlib import Path

import pytest
import vl_convert

import kdissect
from kdissect.report import collect
from kdissect.report.database import ReportDatabase
from kdissect.report.page import _charts

RED = "#d1242f"


@pytest.mark.parametrize("name", ["broker_paused"])
def test_an_incident_is_the_first_finding_and_marks_the_charts(name: str, captures: Path) -> None:
    """Every chart over time has a band for it, and each specification still compiles."""
    with ReportDatabase(kdissect.read(captures / "incidents" / f"{name}.pcap.gz")) as database:
        document = collect(database)
    (incident,) = document["incidents"]
    first = document["findings"]["findings"][0]
    assert (first["kind"], first["whom"]) == ("broker_stall", incident["subject"])
    assert not [one for one in document["findings"]["findings"] if one["section"] == "latency"][1:]
    charts = {chart.id: chart for chart in _charts(document)}
    assert charts["incidents"].data["lane"] == ["broker_stall"]
    assert charts["incidents"].to_json()["legend"] == [["bad", RED]]
    assert first["next_command"] == incident["next_command"]
    over_time = [chart for chart in charts.values() if "t" in chart.data]
    assert {"traffic", "bytes", "latency-time"} < {chart.id for chart in over_time}
    for chart in over_time:
        if chart.id != "incidents":
            band = chart.spec["layer"][0]
            assert [mark["kind"] for mark in band["data"]["values"]] == ["broker_stall"]
        rows = [
            dict(zip(chart.data, row, strict=True))
            for row in zip(*chart.data.values(), strict=True)
        ]
        spec = {**chart.spec, "data": {"name": "d", "values": rows}}
        assert "</svg>" in vl_convert.vegalite_to_svg(spec, vl_version="6.4")
