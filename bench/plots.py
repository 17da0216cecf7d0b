"""The pictures of reports/benchmarks.md: small SVG files, made from the results alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MB = 1 << 20
STAGES = ("scan", "assemble", "decode")
WIDTH, HEIGHT = 420, 220

Rows = list[dict[str, Any]]
Spec = dict[str, Any]


def write(results: dict[str, Any], folder: Path) -> dict[str, str]:
    """Draw what the results have; titles by file name. Pictures of other runs are removed."""
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    drawn = {}
    for name, (title, spec) in charts(results).items():
        whole = {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", **spec}
        (folder / f"{name}.svg").write_text(vl_convert.vegalite_to_svg(whole) + "\n")
        drawn[f"{name}.svg"] = title
    return drawn


def charts(results: dict[str, Any]) -> dict[str, tuple[str, Spec]]:
    """(title, Vega-Lite) of each picture, by name."""
    found = {}
    rows = throughput(results)
    if rows:
        found["throughput"] = (
            "Throughput beside other programs, marginal",
            _bars(rows, "MB/s", "program", "capture", is_log=True),
        )
    rows = stages(results)
    if rows:
        found["stages"] = (
            "Throughput of each stage, of one core",
            _bars(rows, "MB/s", "stage", "capture"),
        )
    times, sizes = growth(results)
    if times:
        found["growth-time"] = ("Time over the size of the input", _lines(times, "seconds"))
        found["growth-memory"] = ("Peak memory over the size of the input", _lines(sizes, "MB"))
    return found


def throughput(results: dict[str, Any]) -> Rows:
    """MB of capture a second, by program and capture."""
    rows = []
    for name, one in results.get("marginal", {}).get("inputs", {}).items():
        size, capture = one["byte_count"] / MB, one["title"]
        costs = {"the floor": one["floor_marginal"], "kdissect": one["product_marginal"]}
        for kind, program in PROGRAMS.items():
            result = results.get("loop" if kind == "loop" else "tshark", {})
            other = result.get("inputs", {}).get(name, {})
            if f"{kind}_marginal" in other:
                costs[program] = other[f"{kind}_marginal"]
        rows += [
            {"capture": capture, "program": program, "MB/s": size / cost}
            for program, cost in costs.items()
            if cost > 0
        ]
    return rows


PROGRAMS = {
    "fields": "tshark -T fields",
    "json": "tshark -T json",
    "ek": "tshark -T ek",
    "loop": "dpkt + kafka-python",
}


def stages(results: dict[str, Any]) -> Rows:
    """MB read a second of the tasks' time, by stage and capture; where both are known."""
    rows = []
    for one in results.get("marginal", {}).get("inputs", {}).values():
        timings = list(one["timings"].values())[-1]
        rows += [
            {
                "capture": one["title"],
                "stage": stage,
                "MB/s": timings[f"{stage}_bytes"] / MB / timings[f"{stage}_s"],
            }
            for stage in STAGES
            if timings.get(f"{stage}_bytes") and timings.get(f"{stage}_s")
        ]
    return rows


def growth(results: dict[str, Any]) -> tuple[Rows, Rows]:
    """(seconds, memory by kind of process) by the size of the input."""
    times: Rows = []
    sizes: Rows = []
    for one in results.get("growth", {}).get("inputs", {}).values():
        for row in one["rows"]:
            place = {"input, MB": row["byte_count"] / MB}
            times.append(place | {"series": one["title"], "seconds": row["seconds"][0]})
            sizes += [
                place | {"series": f"{one['title']}: {kind}", "MB": row[kind] / MB}
                for kind in ("driver", "workers", "java")
            ]
    return times, sizes


def _bars(rows: Rows, value: str, bar: str, group: str, is_log: bool = False) -> Spec:
    order = list(dict.fromkeys(row[bar] for row in rows))
    scale: Spec = {"type": "log"} if is_log else {"zero": True}
    return {
        "data": {"values": _rounded(rows)},
        "facet": {
            "row": {
                "field": group,
                "title": None,
                "header": {"labelAngle": 0, "labelAlign": "left"},
            }
        },
        "spec": {
            "width": WIDTH,
            "mark": {"type": "point", "filled": True, "size": 80} if is_log else "bar",
            "encoding": {
                "y": {"field": bar, "type": "nominal", "sort": order, "title": None},
                "x": {"field": value, "type": "quantitative", "scale": scale},
                "color": {"field": bar, "type": "nominal", "sort": order, "legend": None},
            },
        },
    }  # fmt: skip


def _lines(rows: Rows, value: str) -> Spec:
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "data": {"values": _rounded(rows)},
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "input, MB", "type": "quantitative"},
            "y": {"field": value, "type": "quantitative"},
            "color": {"field": "series", "type": "nominal", "title": None},
        },
    }


def _rounded(rows: Rows) -> Rows:
    return [
        {name: round(item, 3) if isinstance(item, float) else item for name, item in row.items()}
        for row in rows
    ]
