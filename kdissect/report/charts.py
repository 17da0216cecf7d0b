"""Charts of a report: Vega-Lite specifications, compiled to Vega, and the columns they show.

What came from the capture is data only: it never becomes part of a specification, where a field's
name or an expression would be read by Vega. Colours come from the page, which knows its theme:
marks name their series, never a colour. Legends are the page's too, since they have to wrap on a
phone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kdissect.report import formats as f
from kdissect.report.text import visible

Spec = dict[str, Any]
Columns = dict[str, list[Any]]

VEGA_LITE = "6.4"
WAIT_NAMES = {
    "answer": "answer",
    "idle": "long poll, empty",
    "woken": "long poll, ended early",
    "behind": "behind a long poll",
    "group": "waiting for members",
}
_NEUTRAL = "#8b949e"  # of what is no series: good on light and on dark
_DAY_MS, _HOUR_MS = 86_400_000, 3_600_000
# dragging zooms where a mouse does it; a finger goes on scrolling the page
_ZOOM = {
    "name": "zoom",
    "select": {
        "type": "interval",
        "encodings": ["x"],
        "translate": "[pointerdown[event.pointerType === 'mouse'], window:pointerup] > "
        "window:pointermove!",
        "zoom": "wheel![event.shiftKey]",
    },
    "bind": "scales",
}


@dataclass(slots=True)
class Chart:
    """A chart: where it stands, what it says in words, its data and how to draw it."""

    id: str
    title: str
    text: str  # what the picture shows, for who does not see it
    data: Columns
    spec: Spec
    height: int = 220
    series: list[str] = field(default_factory=list)  # in the order of their colours
    shown: list[str] | None = None  # those of them that the data has, if not all
    choose: str | None = None  # a column of `data` that a menu narrows to one value
    choose_label: str = ""
    zooms: bool = False
    labels: dict[str, str] = field(default_factory=dict)  # column -> heading of the data table

    def to_json(self) -> dict[str, Any]:
        return {
            "spec": compiled(self.spec),
            "data": self.data,
            "choose": self.choose,
            "legend": [
                [name, number]
                for number, name in enumerate(self.series)
                if self.shown is None or name in self.shown
            ],
            "labels": self.labels,
        }


def compiled(spec: Spec) -> Spec:
    """The Vega of a Vega-Lite specification."""
    import vl_convert

    whole = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "data": {"name": "d"},
        "background": None,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": {"view": {"stroke": None}},
        **spec,
    }
    vega: Spec = vl_convert.vegalite_to_vega(whole, vl_version=VEGA_LITE)
    vega.pop("$schema", None)  # an address, and of no use here
    for mark in _marks(vega):
        if mark.get("name", "").endswith("voronoi"):
            # the cell around a mark has the mark as its datum; Vega-Lite forgets it for texts
            tooltip = mark["encode"]["update"]["tooltip"]
            tooltip["signal"] = re.sub(r'(?<!datum\.)datum\["', 'datum.datum["', tooltip["signal"])
    return vega


def _marks(group: Spec) -> Iterator[Spec]:
    for mark in group.get("marks", ()):
        yield mark
        yield from _marks(mark)


@functools.cache
def library() -> str:
    """Vega with its embedder, as one script that sets `window.vegaEmbed`."""
    import vl_convert

    script: str = vl_convert.javascript_bundle(
        "window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE
    )
    # of an editor, of a tracker in an error message, of a schema: none is used, none stays
    return re.sub(r"https://(github\.com|vega\.github\.io)", "about:blank#", script)


def _shown(values: list[Any]) -> list[Any]:
    """Texts of the capture as they may be drawn."""
    return [visible(value) if isinstance(value, str) else value for value in values]


def _time(times: list[float]) -> Spec:
    """A time axis in UTC whose labels are as fine as the span needs."""
    span = max(times) - min(times) if times else 0
    pattern = "%m-%d %H:%M" if span > _DAY_MS else "%H:%M:%S"
    if span < 3000:
        pattern = "%H:%M:%S.%L"
    elif span > _HOUR_MS * 3 and span <= _DAY_MS:
        pattern = "%H:%M"
    return {
        "type": "temporal",
        "scale": {"type": "utc"},
        "axis": {
            "title": None,
            "format": pattern,
            "formatType": "time",
            "tickCount": {"expr": "max(2, floor(width / 110))"},
            "labelFlush": True,
        },
    }


def _series(field_name: str, names: list[str]) -> Spec:
    """Colours of series, in the order of the page's legend."""
    return {"field": field_name, "type": "nominal", "scale": {"domain": names}, "legend": None}


def _stacked(value: str, place: str, series: str) -> Spec:
    """Lay the series of a place on one another: columns y0 and y1."""
    return {
        "stack": value,
        "groupby": [place],
        "sort": [{"field": series, "order": "ascending"}],
        "as": ["y0", "y1"],
    }


def _number(axis_title: str, pattern: str = ",.3~r", **scale: Any) -> Spec:
    axis: Spec = {"title": axis_title, "format": pattern}
    if pattern == ",d":
        axis["tickMinStep"] = 1
    if pattern == "~s":
        axis["labelExpr"] = "datum.value === 0 ? '0' : datum.label"  # not 0k
    found: Spec = {"type": "quantitative", "axis": axis}
    if scale:
        found["scale"] = scale
    return found


def _hover(tooltip: list[Spec], x: Spec) -> Spec:
    """A rule at the nearest time, with what all series say there."""
    return {
        "params": [
            {
                "name": "hover",
                "select": {
                    "type": "point",
                    "fields": ["t"],
                    "nearest": True,
                    "on": "pointermove",
                    "clear": "pointerout",
                },
            }
        ],
        "mark": {"type": "rule", "strokeWidth": 1, "color": _NEUTRAL},
        "encoding": {
            "x": {"field": "t", **x},
            "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0},
            "tooltip": tooltip,
        },
    }


def traffic(data: Columns, slice_ms: float) -> Chart | None:
    """Exchanges per second, stacked by API."""
    if not data["t"]:
        return None
    names = sorted(set(data["api"]), key=lambda name: (name == "other", name or ""))
    totals: dict[float, float] = {}
    sums = dict.fromkeys(names, 0.0)
    wide: dict[float, dict[str, float]] = {}
    for t, api, rate in zip(data["t"], data["api"], data["rate"], strict=True):
        totals[t] = totals.get(t, 0) + rate
        sums[api] += rate
        wide.setdefault(t, {})[api] = rate
    peak = max(totals, key=lambda t: totals[t])
    names.sort(key=lambda name: (name == "other", -sums[name]))
    times = sorted(totals)
    columns: Columns = {"t": times, "total": [round(totals[t], 3) for t in times]}
    for index, name in enumerate(names):
        columns[f"s{index}"] = [round(wide[t].get(name, 0), 3) for t in times]
    fields = [f"s{index}" for index in range(len(names))]
    titles = [name or "unknown" for name in names]  # of our definitions, not of the capture
    labels = dict(zip(fields, titles, strict=True))
    tooltip = [
        {"field": "t_text", "title": "from"},
        *({"field": key, "title": labels[key], "format": ",.3~r"} for key in fields),
        {"field": "total", "title": "all", "format": ",.3~r"},
    ]
    x = _time(times)
    area = {
        "transform": [{"fold": fields, "as": ["key", "rate"]}],
        "mark": {"type": "area", "interpolate": "step-after", "line": False},
        "params": [_ZOOM],
        "encoding": {
            "x": {"field": "t", **x},
            "y": {"field": "rate", "stack": True, **_number("exchanges per second", "~s")},
            "color": _series("key", fields),
            "order": {"field": "key", "type": "nominal"},
        },
    }
    return Chart(
        "traffic",
        "Exchanges per second, by API",
        f"Highest {f.rate(totals[peak])}; mean {f.rate(sum(totals.values()) / len(totals))}; "
        f"slices of {f.width(slice_ms)}. Most frequent: {', '.join(titles[:3])}.",
        columns,
        {"layer": [area, _hover(tooltip, x)], "height": 220},
        series=titles,
        zooms=True,
        labels={"t": "from", "total": "all", **labels},
    )


def sizes(data: Columns) -> Chart | None:
    """Bytes per second in both directions."""
    if not data["t"]:
        return None
    tooltip = [
        {"field": "t_text", "title": "from"},
        {"field": "requests", "title": "requests, B/s", "format": ",.3~s"},
        {"field": "responses", "title": "responses, B/s", "format": ",.3~s"},
    ]
    mean = sum(data["requests"]) / len(data["t"]), sum(data["responses"]) / len(data["t"])
    return Chart(
        "bytes",
        "Bytes per second",
        f"Requests {f.bytes_(mean[0])}/s and responses {f.bytes_(mean[1])}/s on average.",
        {name: [_short(value) for value in values] for name, values in data.items()},
        _lines(["requests", "responses"], tooltip, _number("bytes per second", "~s"), data["t"]),
        series=["requests", "responses"],
        zooms=True,
        labels={"t": "from", "requests": "requests, B/s", "responses": "responses, B/s"},
    )


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _lines(fields: list[str], tooltip: list[Spec], y: Spec, times: list[float]) -> Spec:
    x = _time(times)
    layers: list[Spec] = [
        {
            "mark": {"type": "line", "strokeWidth": 1.6, "point": {"size": 6}},
            "encoding": {
                "x": {"field": "t", **x},
                "y": {"field": name, **y},
                "color": {
                    "datum": name,
                    "type": "nominal",
                    "scale": {"domain": fields},
                    "legend": None,
                },
            },
        }
        for name in fields
    ]
    layers[0]["params"] = [_ZOOM]
    return {"layer": [*layers, _hover(tooltip, x)], "height": 200}


def latency_over_time(data: Columns) -> Chart | None:
    """Percentiles of each slice."""
    said = [value for value in data["p95"] if value is not None]
    if not said:
        return None
    tooltip = [
        {"field": "t_text", "title": "from"},
        {"field": "count", "title": "answers", "format": ",d"},
        *(
            {"field": name, "title": f"{name}, ms", "format": ",.3~r"}
            for name in ("p50", "p95", "p99", "max")
        ),
    ]
    data = {name: [_positive(name, value) for value in values] for name, values in data.items()}
    return Chart(
        "latency-time",
        "Latency of answers over time",
        f"p95 of a slice between {f.duration(min(said))} and {f.duration(max(said))}.",
        data,
        _lines(["p50", "p95", "p99"], tooltip, _number("latency, ms", type="log"), data["t"]),
        series=["p50", "p95", "p99"],
        zooms=True,
        labels={"t": "from", "count": "answers"},
    )


def _positive(name: str, value: Any) -> Any:
    """A logarithm has no zero."""
    if name in ("t", "count") or value is None:
        return value
    return max(round(value, 3), 0.001)


def errors_over_time(data: Columns, slice_ms: float) -> Chart | None:
    """Answers with an error, stacked by their first code."""
    if not data["t"]:
        return None
    totals: dict[str, int] = {}
    for error, count in zip(data["error"], data["count"], strict=True):
        totals[error] = totals.get(error, 0) + count
    names = sorted(totals, key=lambda name: (name == "other", -totals[name], name))
    spec = {
        "mark": {"type": "rect", "clip": True},
        "params": [_ZOOM],
        "transform": [
            {"calculate": f"datum.t + {slice_ms}", "as": "t_end"},
            _stacked("count", "t", "error"),
        ],
        "encoding": {
            "x": {"field": "t", **_time(data["t"])},
            "x2": {"field": "t_end"},
            "y": {"field": "y0", **_number("answers", ",d")},
            "y2": {"field": "y1"},
            "color": _series("error", names),
            "tooltip": [
                {"field": "t_text", "title": "from"},
                {"field": "error", "title": "error"},
                {"field": "count", "title": "answers", "format": ",d"},
            ],
        },
        "height": 150,
    }
    return Chart(
        "errors-time",
        "Answers with an error over time",
        f"{f.plural(sum(data['count']), 'answer')} in slices of {f.width(slice_ms)}.",
        data,
        spec,
        150,
        series=names,
        zooms=True,
        labels={"t": "from"},
    )


def latency_histogram(data: dict[str, Any]) -> Chart | None:
    """Counts by latency, long polls apart, for all APIs or one."""
    if not data["bin"]:
        return None
    per_decade = data["bins_per_decade"]
    names = [name for wait, name in WAIT_NAMES.items() if wait in data["wait"]]
    columns: Columns = {
        "api": [api or "unknown" for api in data["api"]],
        "wait": [WAIT_NAMES[wait] for wait in data["wait"]],
        "from": [float(f"{10 ** (bin_ / per_decade):.4g}") for bin_ in data["bin"]],
        "to": [float(f"{10 ** ((bin_ + 1) / per_decade):.4g}") for bin_ in data["bin"]],
        "count": data["count"],
    }
    spec = {
        "mark": {"type": "rect"},
        "transform": [
            {
                "aggregate": [{"op": "sum", "field": "count", "as": "count"}],
                "groupby": ["wait", "from", "to"],
            },
            _stacked("count", "from", "wait"),
        ],
        "encoding": {
            "x": {"field": "from", **_number("latency, ms", type="log", nice=False)},
            "x2": {"field": "to"},
            "y": {"field": "y0", **_number("exchanges", "~s")},
            "y2": {"field": "y1"},
            "color": _series("wait", list(WAIT_NAMES.values())),
            "tooltip": [
                {"field": "wait", "title": "kind"},
                {"field": "from", "title": "from, ms", "format": ",.3~r"},
                {"field": "to", "title": "to, ms", "format": ",.3~r"},
                {"field": "count", "title": "exchanges", "format": ",d"},
            ],
        },
        "height": 200,
    }
    polls = sum(
        n for n, w in zip(data["count"], data["wait"], strict=True) if w in ("idle", "woken")
    )
    return Chart(
        "latency-histogram",
        "Latency, long polls apart",
        f"{f.plural(sum(data['count']), 'answered exchange')}, "
        f"{f.count(polls)} of them long polls.",
        columns,
        spec,
        200,
        series=list(WAIT_NAMES.values()),
        shown=names,
        choose="api",
        choose_label="API",
        labels={"from": "from, ms", "to": "to, ms"},
    )


def latency_ranges(rows: list[dict[str, Any]]) -> Chart | None:
    """p50 to p99 of the clients with the highest p95."""
    shown = [row for row in rows if not row["is_broker"] and row["p50"] is not None][:15]
    if len(shown) < 2:
        return None
    ids = [row["client_id"] for row in shown]
    columns: Columns = {
        "client": _shown(
            [row["client_id"] or "(none)" for row in shown]
            if len(set(ids)) == len(ids)
            else [f.client(row) for row in shown]
        )
    }
    for name in ("p50", "p95", "p99", "max"):
        columns[name] = [max(round(row[name], 3), 0.001) for row in shown]
    columns["answers"] = [row["answers"] for row in shown]
    y = {
        "field": "client",
        "type": "nominal",
        "sort": None,
        "axis": {"title": None, "labelLimit": {"expr": "width < 500 ? 110 : 260"}, "ticks": False},
    }
    tooltip = [
        {"field": "client", "title": "client"},
        *(
            {"field": name, "title": f"{name}, ms", "format": ",.3~r"}
            for name in ("p50", "p95", "p99", "max")
        ),
        {"field": "answers", "title": "answers", "format": ",d"},
    ]
    x = _number("latency, ms", type="log", nice=False)
    layers: list[Spec] = [
        {
            "mark": {"type": "bar", "height": 4, "opacity": 0.5, "color": _NEUTRAL},
            "encoding": {
                "x": {"field": "p50", **x},
                "x2": {"field": "p99"},
                "y": y,
                "tooltip": tooltip,
            },
        }
    ]
    for name in ("p50", "p95", "p99"):
        layers.append(
            {
                "mark": {"type": "point", "filled": True, "size": 50, "opacity": 1},
                "encoding": {
                    "x": {"field": name, **x},
                    "y": y,
                    "color": {
                        "datum": name,
                        "type": "nominal",
                        "scale": {"domain": ["p50", "p95", "p99"]},
                        "legend": None,
                    },
                    "tooltip": tooltip,
                },
            }
        )
    return Chart(
        "latency-clients",
        "Clients with the highest p95",
        f"{columns['client'][0]}: p95 {f.duration(shown[0]['p95'])}.",
        columns,
        {"layer": layers, "height": {"step": 20}},
        20 * len(shown) + 40,
        series=["p50", "p95", "p99"],
        labels={name: f"{name}, ms" for name in ("p50", "p95", "p99", "max")},
    )


def heat_map(data: Columns, direction: str, title: str, verb: str) -> Chart | None:
    """Topics by clients, bytes as colour."""
    chosen = [i for i, value in enumerate(data["direction"]) if value == direction]
    if not chosen:
        return None
    columns: Columns = {
        name: _shown([data[name][i] for i in chosen])
        for name in ("topic", "client", "bytes", "records")
    }
    topics, clients = len(set(columns["topic"])), len(set(columns["client"]))
    spec = {
        "mark": {"type": "rect", "cornerRadius": 2},
        "encoding": {
            "y": {
                "field": "topic",
                "type": "nominal",
                "axis": {
                    "title": None,
                    "labelLimit": {"expr": "width < 500 ? 100 : 160"},
                    "ticks": False,
                },
            },
            "x": {
                "field": "client",
                "type": "nominal",
                "axis": {
                    "title": None,
                    "labelAngle": -40,
                    "labelLimit": 130,
                    "labelOverlap": False,
                    "ticks": False,
                },
            },
            "color": {
                "field": "bytes",
                "type": "quantitative",
                "scale": {"type": "log", "range": "heatmap"},
                "legend": {
                    "orient": "top",
                    "title": "bytes",
                    "format": ".0s",
                    "gradientLength": 160,
                    "tickCount": 3,
                },
            },
            "tooltip": [
                {"field": "topic", "title": "topic"},
                {"field": "client", "title": "client"},
                {"field": "bytes", "title": "bytes", "format": ",d"},
                {"field": "records", "title": "records", "format": ",d"},
            ],
        },
        "height": {"step": 20},
    }
    return Chart(
        f"heat-{direction}",
        title,
        f"{f.plural(clients, 'client')} {verb} {f.plural(topics, 'topic')}.",
        columns,
        spec,
        20 * topics + 190,
    )


def batch_sizes(data: Columns) -> Chart | None:
    """How large batches are, in powers of two."""
    if not data["bin"]:
        return None
    names = {"write": "written", "read": "read", "replicate": "replicated"}
    seen = [name for key, name in names.items() if key in data["direction"]]
    columns: Columns = {
        "direction": [names[value] for value in data["direction"]],
        "from": [2**bin_ for bin_ in data["bin"]],
        "to": [2 ** (bin_ + 1) for bin_ in data["bin"]],
        "count": data["count"],
    }
    x = _number("bytes of a batch", ",d", type="log", base=2)
    x["axis"]["labelExpr"] = (
        "datum.value >= 1048576 ? format(datum.value / 1048576, ',d') + ' Mi' : "
        "datum.value >= 1024 ? datum.value / 1024 + ' Ki' : datum.label"
    )
    spec = {
        "mark": {"type": "rect"},
        "transform": [_stacked("count", "from", "direction")],
        "encoding": {
            "x": {"field": "from", **x},
            "x2": {"field": "to"},
            "y": {"field": "y0", **_number("batches", "~s")},
            "y2": {"field": "y1"},
            "color": _series("direction", list(names.values())),
            "tooltip": [
                {"field": "direction", "title": "direction"},
                {"field": "from", "title": "from, bytes", "format": ",d"},
                {"field": "to", "title": "below, bytes", "format": ",d"},
                {"field": "count", "title": "batches", "format": ",d"},
            ],
        },
        "height": 180,
    }
    return Chart(
        "batch-sizes",
        "Sizes of record batches",
        f"{f.plural(sum(data['count']), 'batch', 'batches')} of whole size, in powers of two.",
        columns,
        spec,
        180,
        series=list(names.values()),
        shown=seen,
        labels={"from": "from, bytes", "to": "below, bytes"},
    )


_EVENT_NAMES = {
    "rebalance": "rebalance",
    "join": "join",
    "sync": "sync",
    "heartbeat_error": "heartbeat refused",
    "leave": "leave",
    "commit_error": "commit refused",
    "stable": "stable",
}


def group_timeline(timeline: dict[str, Any], number: int) -> Chart:
    """A lane for the group and each member: what happened when, and how long it took."""
    events = sorted(timeline["events"], key=lambda event: event["lane"] != "group")
    lanes = list(dict.fromkeys(["group", *(event["lane"] for event in events)]))
    columns: Columns = {
        "lane": _shown([event["lane"] for event in events]),
        "event": [_EVENT_NAMES.get(event["event"], event["event"]) for event in events],
        "t": [event["t"] for event in events],
        "t_end": [event["t_end"] for event in events],
        "generation": [event["generation"] for event in events],
        "ms": [event["duration_ms"] for event in events],
        "detail": _shown([event["detail"] for event in events]),
    }
    y = {
        "field": "lane",
        "type": "nominal",
        "sort": None,
        "axis": {
            "title": None,
            "labelLimit": {"expr": "width < 500 ? 110 : 240"},
            "ticks": False,
            "grid": True,
        },
    }
    seen = [name for name in _EVENT_NAMES.values() if name in columns["event"]]
    color = _series("event", list(_EVENT_NAMES.values()))
    x = _time(columns["t"])
    tooltip = [
        {"field": "event", "title": "event"},
        {"field": "lane", "title": "who"},
        {"field": "t_text", "title": "at"},
        {"field": "ms", "title": "took, ms", "format": ",.3~r"},
        {"field": "generation", "title": "generation"},
        {"field": "detail", "title": "detail"},
    ]
    spec = {
        "layer": [
            {
                "params": [_ZOOM],
                "mark": {"type": "bar", "height": 9, "opacity": 0.75, "clip": True},
                "encoding": {
                    "x": {"field": "t", **x},
                    "x2": {"field": "t_end"},
                    "y": y,
                    "color": color,
                    "tooltip": tooltip,
                },
            },
            {
                "mark": {"type": "tick", "thickness": 3, "size": 14, "clip": True},
                "encoding": {
                    "x": {"field": "t", **x},
                    "y": y,
                    "color": color,
                    "tooltip": tooltip,
                },
            },
        ],
        "height": {"step": 22},
    }
    rebalances = sum(event["event"] == "rebalance" for event in events)
    return Chart(
        f"group-{number}",
        f"Timeline of {visible(timeline['group_id'])}",
        f"{f.plural(len(lanes) - 1, 'member')}, {f.plural(rebalances, 'rebalance')}.",
        columns,
        spec,
        22 * len(lanes) + 40,
        series=list(_EVENT_NAMES.values()),
        shown=seen,
        zooms=True,
        labels={"lane": "who", "t": "at", "t_end": "until", "ms": "took, ms"},
    )


def transaction_timeline(data: Columns) -> Chart | None:
    """A lane for each transactional id, a bar for each transaction."""
    if not data["t"]:
        return None
    columns = {**data, "id": _shown(data["id"])}
    lanes = len(set(columns["id"]))
    if lanes > 40:
        return None  # the table tells these better
    outcomes = ["commit", "abort", "open", "fenced"]
    color = _series("outcome", outcomes)
    y = {
        "field": "id",
        "type": "nominal",
        "axis": {"title": None, "labelLimit": {"expr": "width < 500 ? 110 : 240"}, "ticks": False},
    }
    tooltip = [
        {"field": "id", "title": "transactional id"},
        {"field": "outcome", "title": "outcome"},
        {"field": "t_text", "title": "begin"},
        {"field": "duration_ms", "title": "took, ms", "format": ",.3~r"},
        {"field": "record_count", "title": "records", "format": ",d"},
    ]
    x = {"field": "t", **_time(data["t"])}
    spec = {
        "layer": [
            {
                "params": [_ZOOM],
                "mark": {"type": "bar", "height": 9, "opacity": 0.75, "clip": True},
                "encoding": {
                    "x": x,
                    "x2": {"field": "t_end"},
                    "y": y,
                    "color": color,
                    "tooltip": tooltip,
                },
            },
            {
                "mark": {"type": "tick", "thickness": 2, "size": 12, "clip": True},
                "encoding": {"x": x, "y": y, "color": color, "tooltip": tooltip},
            },
        ],
        "height": {"step": 20},
    }
    return Chart(
        "transactions",
        "Transactions over time",
        f"{f.plural(len(data['t']), 'transaction')} of {f.plural(lanes, 'transactional id')}.",
        columns,
        spec,
        20 * lanes + 40,
        series=outcomes,
        shown=data["outcome"],
        zooms=True,
        labels={"id": "transactional id", "t": "begin", "t_end": "end", "duration_ms": "took, ms"},
    )


def lag_over_time(data: Columns) -> Chart | None:
    """Records that groups were behind."""
    if not data["t"]:
        return None
    columns = {**data, "group": _shown(data["group"])}
    names = list(dict.fromkeys(columns["group"]))
    x = _time(data["t"])
    worst = max(range(len(data["lag"])), key=lambda i: data["lag"][i])
    spec = {
        "layer": [
            {
                "params": [_ZOOM],
                "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.6},
                "encoding": {
                    "x": {"field": "t", **x},
                    "y": {"field": "lag", **_number("records behind", "~s")},
                    "color": _series("group", names),
                },
            },
            {
                "params": [
                    {
                        "name": "near",
                        "select": {
                            "type": "point",
                            "nearest": True,
                            "on": "pointermove",
                            "clear": "pointerout",
                        },
                    }
                ],
                "mark": {"type": "point", "filled": True, "size": 60},
                "encoding": {
                    "x": {"field": "t", **x},
                    "y": {"field": "lag", "type": "quantitative"},
                    "color": _series("group", names),
                    "opacity": {
                        "condition": {"param": "near", "empty": False, "value": 1},
                        "value": 0,
                    },
                    "tooltip": [
                        {"field": "group", "title": "group"},
                        {"field": "t_text", "title": "at"},
                        {"field": "lag", "title": "records behind", "format": ",d"},
                    ],
                },
            },
        ],
        "height": 200,
    }
    return Chart(
        "lag",
        "Consumer lag of committed offsets",
        f"Highest: {columns['group'][worst]}, {f.count(data['lag'][worst])} records behind.",
        columns,
        spec,
        series=names,
        zooms=True,
        labels={"t": "at", "lag": "records behind"},
    )


def broker_difference(histogram: dict[str, Any]) -> Chart | None:
    """Broker's time less the capture's."""
    edges = histogram["edges"]
    if not edges:
        return None
    columns: Columns = {"from": edges[:-1], "to": edges[1:], "count": histogram["counts"]}
    spec = {
        "mark": {"type": "rect"},
        "transform": [{"calculate": "0", "as": "zero"}],
        "encoding": {
            "x": {"field": "from", **_number("broker's time less the capture's, ms")},
            "x2": {"field": "to"},
            "y": {"field": "zero", **_number("exchanges", "~s", type="symlog")},
            "y2": {"field": "count"},
            "color": {"datum": "exchanges", "type": "nominal", "legend": None},
            "tooltip": [
                {"field": "from", "title": "from, ms", "format": ",.3~r"},
                {"field": "to", "title": "to, ms", "format": ",.3~r"},
                {"field": "count", "title": "exchanges", "format": ",d"},
            ],
        },
        "height": 180,
    }
    return Chart(
        "broker-difference",
        "How the broker's times differ",
        f"The middle 98 %; {f.count(histogram['below'])} lie below and "
        f"{f.count(histogram['above'])} above.",
        columns,
        spec,
        180,
        labels={"from": "from, ms", "to": "to, ms"},
    )


def broker_cells(cells: dict[str, Any]) -> Chart | None:
    """The capture's time against the broker's, on logarithmic axes."""
    if not cells["bin"]:
        return None
    per_decade = cells["bins_per_decade"]

    def edge(bin_: int) -> float:
        return float(f"{10 ** (bin_ / per_decade):.4g}")

    columns: Columns = {
        "capture": [edge(bin_) for bin_ in cells["bin"]],
        "capture_to": [edge(bin_ + 1) for bin_ in cells["bin"]],
        "broker": [edge(bin_) for bin_ in cells["log_bin"]],
        "broker_to": [edge(bin_ + 1) for bin_ in cells["log_bin"]],
        "count": cells["count"],
    }
    spec = {
        "mark": {"type": "rect"},
        "encoding": {
            "x": {"field": "capture", **_number("capture, ms", type="log", nice=False)},
            "x2": {"field": "capture_to"},
            "y": {"field": "broker", **_number("broker's log, ms", type="log", nice=False)},
            "y2": {"field": "broker_to"},
            "color": {
                "field": "count",
                "type": "quantitative",
                "scale": {"type": "log", "range": "heatmap"},
                "legend": {"orient": "top", "title": "exchanges", "format": ".0s", "tickCount": 3},
            },
            "tooltip": [
                {"field": "capture", "title": "capture, ms", "format": ",.3~r"},
                {"field": "broker", "title": "broker, ms", "format": ",.3~r"},
                {"field": "count", "title": "exchanges", "format": ",d"},
            ],
        },
        "height": 260,
    }
    return Chart(
        "broker-cells",
        "The capture's time beside the broker's",
        "On the diagonal both agree.",
        columns,
        spec,
        260,
        labels={"capture": "capture, from ms", "broker": "broker, from ms"},
    )
