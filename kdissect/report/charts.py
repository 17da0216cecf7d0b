"""The charts of traffic, latency and topics: what each shows, its columns, its specification, its
words."""

from __future__ import annotations

from typing import Any

from kdissect import text as f
from kdissect.report.charting import (
    NEUTRAL,
    ZOOM,
    Chart,
    Columns,
    Spec,
    hover,
    lines,
    number_axis,
    rounded,
    series_color,
    shown_texts,
    stacked,
    time_axis,
)

WAIT_NAMES = {
    "answer": "answer",
    "long_poll": "long poll",
    "group": "waiting for members",
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
    x = time_axis(times)
    area = {
        "transform": [{"fold": fields, "as": ["key", "rate"]}],
        "mark": {"type": "area", "interpolate": "step-after", "line": False},
        "params": [ZOOM],
        "encoding": {
            "x": {"field": "t", **x},
            "y": {"field": "rate", "stack": True, **number_axis("exchanges per second", "~s")},
            "color": series_color("key", fields),
            "order": {"field": "key", "type": "nominal"},
        },
    }
    return Chart(
        "traffic",
        "Exchanges per second, by API",
        f"Highest {f.rate(totals[peak])}; mean {f.rate(sum(totals.values()) / len(totals))}; "
        f"slices of {f.width(slice_ms)}. Most frequent: {', '.join(titles[:3])}.",
        columns,
        {"layer": [area, hover(tooltip, x)], "height": 220},
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
        f"Requests {f.byte_size(mean[0])}/s and responses {f.byte_size(mean[1])}/s on average.",
        {name: [rounded(value) for value in values] for name, values in data.items()},
        lines(["requests", "responses"], tooltip, number_axis("bytes per second", "~s"), data["t"]),
        series=["requests", "responses"],
        zooms=True,
        labels={"t": "from", "requests": "requests, B/s", "responses": "responses, B/s"},
    )


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
        "Service time of answers",
        f"p95 of a slice between {f.duration(min(said))} and {f.duration(max(said))}.",
        data,
        lines(
            ["p50", "p95", "p99"], tooltip, number_axis("service time, ms", type="log"), data["t"]
        ),
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
        "params": [ZOOM],
        "transform": [
            {"calculate": f"datum.t + {slice_ms}", "as": "t_end"},
            stacked("count", "t", "error"),
        ],
        "encoding": {
            "x": {"field": "t", **time_axis(data["t"])},
            "x2": {"field": "t_end"},
            "y": {"field": "y0", **number_axis("answers", ",d")},
            "y2": {"field": "y1"},
            "color": series_color("error", names),
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
    """Counts by service time, long polls apart, for all APIs or one."""
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
            stacked("count", "from", "wait"),
        ],
        "encoding": {
            "x": {"field": "from", **number_axis("service time, ms", type="log", nice=False)},
            "x2": {"field": "to"},
            "y": {"field": "y0", **number_axis("exchanges", "~s")},
            "y2": {"field": "y1"},
            "color": series_color("wait", list(WAIT_NAMES.values())),
            "tooltip": [
                {"field": "wait", "title": "kind"},
                {"field": "from", "title": "from, ms", "format": ",.3~r"},
                {"field": "to", "title": "to, ms", "format": ",.3~r"},
                {"field": "count", "title": "exchanges", "format": ",d"},
            ],
        },
        "height": 200,
    }
    polls = sum(n for n, w in zip(data["count"], data["wait"], strict=True) if w == "long_poll")
    return Chart(
        "latency-histogram",
        "Service time, long polls apart",
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
        "client": shown_texts(
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
    x = number_axis("service time, ms", type="log", nice=False)
    layers: list[Spec] = [
        {
            "mark": {"type": "bar", "height": 4, "opacity": 0.5, "color": NEUTRAL},
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
        name: shown_texts([data[name][i] for i in chosen])
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
    x = number_axis("bytes of a batch", ",d", type="log", base=2)
    x["axis"]["labelExpr"] = (
        "datum.value >= 1048576 ? format(datum.value / 1048576, ',d') + ' Mi' : "
        "datum.value >= 1024 ? datum.value / 1024 + ' Ki' : datum.label"
    )
    spec = {
        "mark": {"type": "rect"},
        "transform": [stacked("count", "from", "direction")],
        "encoding": {
            "x": {"field": "from", **x},
            "x2": {"field": "to"},
            "y": {"field": "y0", **number_axis("batches", "~s")},
            "y2": {"field": "y1"},
            "color": series_color("direction", list(names.values())),
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
