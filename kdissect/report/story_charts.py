"""The charts of groups, transactions, lag and the brokers' own logs; as `charts`."""

from __future__ import annotations

from typing import Any

from kdissect import text as f
from kdissect.report.charting import (
    ZOOM,
    Chart,
    Columns,
    number_axis,
    series_color,
    shown_texts,
    time_axis,
)
from kdissect.text import visible

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
        "lane": shown_texts([event["lane"] for event in events]),
        "event": [_EVENT_NAMES.get(event["event"], event["event"]) for event in events],
        "t": [event["t"] for event in events],
        "t_end": [event["t_end"] for event in events],
        "generation": [event["generation"] for event in events],
        "ms": [event["duration_ms"] for event in events],
        "detail": shown_texts([event["detail"] for event in events]),
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
    color = series_color("event", list(_EVENT_NAMES.values()))
    x = time_axis(columns["t"])
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
                "params": [ZOOM],
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
        f"Timeline of {visible(timeline['group_id'], 300)}",
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
    columns = {**data, "id": shown_texts(data["id"])}
    lanes = len(set(columns["id"]))
    if lanes > 40:
        return None  # the table tells these better
    outcomes = ["commit", "abort", "open", "fenced"]
    color = series_color("outcome", outcomes)
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
    x = {"field": "t", **time_axis(data["t"])}
    spec = {
        "layer": [
            {
                "params": [ZOOM],
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
    columns = {**data, "group": shown_texts(data["group"])}
    names = list(dict.fromkeys(columns["group"]))
    # names of groups are the capture's: the specification knows numbers of series
    keys = {name: f"s{number}" for number, name in enumerate(names)}
    columns["_key"] = [keys[name] for name in columns["group"]]
    x = time_axis(data["t"])
    worst = max(range(len(data["lag"])), key=lambda i: data["lag"][i])
    spec = {
        "layer": [
            {
                "params": [ZOOM],
                "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.6},
                "encoding": {
                    "x": {"field": "t", **x},
                    "y": {"field": "lag", **number_axis("records behind", "~s")},
                    "color": series_color("_key", list(keys.values())),
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
                    "color": series_color("_key", list(keys.values())),
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
            "x": {"field": "from", **number_axis("broker's time less the capture's, ms")},
            "x2": {"field": "to"},
            "y": {"field": "zero", **number_axis("exchanges", "~s", type="symlog")},
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
            "x": {"field": "capture", **number_axis("capture, ms", type="log", nice=False)},
            "x2": {"field": "capture_to"},
            "y": {"field": "broker", **number_axis("broker's log, ms", type="log", nice=False)},
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
