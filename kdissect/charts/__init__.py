"""Charts: rows as columns, and the Vega-Lite specification that draws them.

The report's page and notebooks draw with the same specifications, each from rows of its own. Charts
that look alike share one. Those whose rows need work have a function, `Chart(..., load(name))`
makes the others.
A `.vl.json` file holds a chart's marks, encodings and titles. A text ``$name`` in it is a
parameter: a title, a kind of scale, or names of ours. What came from a capture is data only: it
never becomes part of a specification, where Vega reads field names and expressions. `config.json`
has what all charts share: axes, and zooming. Only a mouse zooms: a finger scrolls the page.

Colours and legends are the page's, which knows its theme and wraps legends on a phone: marks name
their series, and the page gives its colours to the series in their order. Only severities have
colours of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from typing import Any

from kdissect.tables.schemas import Row
from kdissect.text import visible

Spec = dict[str, Any]
Columns = dict[str, list[Any]]

VEGA_LITE = "6.4"  # the version that draws them

# Events of a group, as charts name them, in the order of their colours.
EVENT_NAMES = {
    "rebalance": "rebalance",
    "join": "join",
    "sync": "sync",
    "heartbeat_error": "heartbeat refused",
    "leave": "leave",
    "commit_error": "commit refused",
    "stable": "stable",
}
# Severities of incidents, the worst first; the colours suit light and dark pages.
SEVERITY_COLOURS = {"bad": "#d1242f", "warn": "#bf8700", "info": "#7290b3"}
WAIT_NAMES = {
    "answer": "answer",
    "long_poll": "long poll",
    "group": "waiting for members",
    "undecided": "undecided",
}
DIRECTION_NAMES = {"write": "written", "read": "read", "replicate": "replicated"}
LATENCY_LINES = ("p50", "p95", "p99")
SLICES_MAX = 240  # of a time axis
_ROW = 20  # pixels of a row; of a lane 22
_MILLIS_MIN = 0.001  # a logarithm has no zero
_SECOND = 1_000_000
_WIDTHS_US = (
    *(n * 10**power for power in range(3, 6) for n in (1, 2, 5)),
    *(n * _SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * 60 * _SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * 3600 * _SECOND for n in (1, 2, 3, 6, 12, 24, 48, 168)),
)


@dataclass(slots=True)
class Chart:
    """A chart: its title and text, its rows, and the Vega-Lite specification that draws them.

    text: a description of the picture for readers who cannot see it.
    height: in pixels.
    series: the legend, in the order of colours. by: the column with their names.
    choose: a column that a menu narrows to one value.
    colours: of series that have colours of their own.

    The headings of the table of the chart's data stand in the specification (`usermeta`).
    """

    id: str
    title: str
    text: str
    data: Columns
    spec: Spec
    height: int = 200
    series: Sequence[str] = ()
    choose: str | None = None
    colours: dict[str, str] = field(default_factory=dict)
    by: str = "series"

    def __post_init__(self) -> None:
        self.data = {
            name: [visible(value, 300) if isinstance(value, str) else value for value in values]
            for name, values in self.data.items()
        }

    @property
    def labels(self) -> dict[str, str]:
        """The headings of the columns in the table of the data, other than their names."""
        labels = self.spec.get("usermeta", {}).get("labels", {})
        return {"t": "from (UTC)", "t_end": "until (UTC)", **labels}

    def rows(self) -> list[Row]:
        """The data as rows."""
        rows = zip(*self.data.values(), strict=True)
        return [dict(zip(self.data, row, strict=True)) for row in rows]

    def to_json(self) -> Spec:
        """The values from which the page's script draws the chart."""
        present = set(self.data.get(self.by, ()))
        legend = [
            [name, self.colours.get(name, number)]
            for number, name in enumerate(self.series)
            if name in present or not present
        ]
        data = {
            name: [round(value, 3) if isinstance(value, float) else value for value in values]
            for name, values in self.data.items()
        }
        return {
            "spec": self.spec,
            "data": data,
            "choose": self.choose,
            "legend": legend,
            "labels": self.labels,
        }


def load(name: str, /, **parameters: object) -> Spec:
    """The specification `name`, without data. Its data source is called ``d``.

    Raises KeyError for a parameter that is not given, TypeError for one that it does not have.
    """
    unused = set(parameters)

    def filled(value: object) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        if isinstance(value, str) and value.startswith("$"):
            unused.discard(value[1:])
            return parameters[value[1:]]
        return value

    spec: Spec = filled(_read(f"{name}.vl.json"))
    if unused:
        raise TypeError(f"{name} has no parameter {', '.join(sorted(unused))}")
    return {"data": {"name": "d"}, "config": _read("config.json"), **spec}


def _read(file: str) -> Spec:
    return json.loads(resources.files(__name__).joinpath(file).read_text("utf-8"))


def slice_width_us(span_us: int) -> int:
    """A round width that cuts a span of time into at most SLICES_MAX slices."""
    for width in _WIDTHS_US:
        if span_us <= width * SLICES_MAX:
            return width
    return -(-span_us // SLICES_MAX)


def stack_over_time(id_: str, title: str, text: str, data: Columns, **parameters: object) -> Chart:
    """Values of slices of time (columns t, series, value), stacked: the largest series first,
    "other" last.

    parameters: slice_ms, value_title, series_title, step_min (between values with a label).
    """
    sums: dict[str, float] = {}
    for name, value in zip(data["series"], data["value"], strict=True):
        sums[name] = sums.get(name, 0) + value
    order = sorted(sums, key=lambda name: (name == "other", -sums[name], name))
    place = {name: number for number, name in enumerate(order)}
    rows = sorted(
        (place[name], t, value)
        for t, name, value in zip(data["t"], data["series"], data["value"], strict=True)
        if value
    )
    series = [order[number] for number, _, _ in rows]
    data = {"t": [t for _, t, _ in rows], "series": series, "value": [value for *_, value in rows]}
    spec = load("stack_over_time", **parameters)
    return Chart(id_, title, text, data, spec, series=list(dict.fromkeys(series)))


def lines_over_time(
    id_: str, title: str, text: str, data: Columns, series: Sequence[str], **parameters: object
) -> Chart:
    """Values of slices of time (column t, and one for each series).

    parameters: slice_ms, value_title, scale ("linear" or "log"), format, labels (headings of the
    columns).
    """
    if parameters["scale"] == "log":
        data = {**data, **{name: _positive(data[name]) for name in (*series, "max")}}
    spec = load("lines_over_time", series=list(series), **parameters)
    return Chart(id_, title, text, data, spec, series=series)


def _positive(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else max(value, _MILLIS_MIN) for value in values]


def percentile_ranges(id_: str, title: str, text: str, rows: Sequence[Row]) -> Chart:
    """A line from p50 to p99 for each row (name, p50, p95, p99, max, answers)."""
    lines = (*LATENCY_LINES, "max")
    return Chart(
        id_,
        title,
        text,
        {
            "name": [row["name"] for row in rows],
            **{name: _positive(row[name] for row in rows) for name in lines},
            "answers": [row["answers"] for row in rows],
        },
        load("ranges", height=_ROW * len(rows)),
        _ROW * len(rows) + 40,
        series=LATENCY_LINES,
    )


def heat_map(id_: str, title: str, text: str, data: Columns, measure: str) -> Chart:
    """Topics by clients (columns topic, client, bytes, records), a measure as colour."""
    height = _ROW * len(set(data["topic"]))
    return Chart(
        id_, title, text, data, load("heat_map", measure=measure, height=height), height + 190
    )


def events(
    id_: str,
    title: str,
    text: str,
    data: Columns,
    colours: dict[str, str | None],
    **parameters: object,
) -> Chart:
    """Events with their durations, in lanes (columns lane, event, t, t_end, ms, detail).

    colours: of the kinds of events, None for those of the page. parameters: lane_title,
    event_title.
    """
    own = {name: colour for name, colour in colours.items() if colour is not None}
    height = 22 * len(set(data["lane"]))
    scale = {"domain": list(colours), **({"range": list(own.values())} if own else {})}
    spec = load("events", colours=scale, height=height, **parameters)
    return Chart(id_, title, text, data, spec, height + 40, list(colours), colours=own, by="event")


def group_events(id_: str, title: str, text: str, rows: Sequence[Row]) -> Chart:
    """Rows of `group_events` with t, t_end and their lane: the group or a member."""
    data = {
        "lane": [row["lane"] for row in rows],
        "event": [EVENT_NAMES.get(row["event"], row["event"]) for row in rows],
        "t": [row["t"] for row in rows],
        "t_end": [row["t_end"] for row in rows],
        "ms": [row["duration_ms"] for row in rows],
        "detail": [_event_detail(row["generation"], row["detail"]) for row in rows],
    }
    colours = dict.fromkeys(EVENT_NAMES.values())
    return events(id_, title, text, data, colours, lane_title="member", event_title="event")


def _event_detail(generation: int | None, detail: str | None) -> str:
    """The tooltip of a group's event."""
    parts = ["" if generation is None else f"generation {generation}", detail or ""]
    return ", ".join(part for part in parts if part)


def incidents_over_time(
    id_: str, title: str, text: str, incidents: Sequence[Row], span: tuple[str, str]
) -> Chart:
    """A lane for each kind of incident, a bar for each incident, over the capture's time `span`."""
    marks = _marks(incidents)
    chart = events(
        id_,
        title,
        text,
        {
            "lane": [row["kind"] for row in incidents],
            "event": [row["severity"] for row in incidents],
            "t": [mark["t"] for mark in marks],
            "t_end": [mark["t_end"] for mark in marks],
            "ms": [mark["t_end"] - mark["t"] for mark in marks],
            "detail": [row["subject"] for row in incidents],
        },
        dict(SEVERITY_COLOURS),
        lane_title="kind",
        event_title="severity",
    )
    # Points that are not seen, at both ends: Vega-Lite warns of a domain for bars from x to x2.
    ends = [{"t": _epoch_ms(time)} for time in span]
    nothing = {"y": {"value": 0}, "color": {"value": "transparent"}, "tooltip": {"value": None}}
    chart.spec["layer"].append({"data": {"values": ends}, "mark": "point", "encoding": nothing})
    return chart


def mark_incidents(charts: Iterable[Chart], incidents: Sequence[Row]) -> None:
    """Add a band for each incident but those for information to the charts over time."""
    colours = {name: SEVERITY_COLOURS[name] for name in ("bad", "warn")}
    marks = _marks([row for row in incidents if row["severity"] in colours])
    for chart in charts:
        if marks and "t" in chart.data and "layer" in chart.spec:
            band = {**load("incident_marks", **colours), "data": {"values": marks}}
            chart.spec["layer"].insert(0, {key: band[key] for key in ("data", "mark", "encoding")})


def _marks(incidents: Sequence[Row]) -> list[Row]:
    """Times in ms since 1970, kinds and severities of incidents."""
    return [
        {
            "t": _epoch_ms(row["start_time"]),
            "t_end": _epoch_ms(row["end_time"]),
            "kind": row["kind"],
            "severity": row["severity"],
        }
        for row in incidents
    ]


def _epoch_ms(time: str) -> float:
    return datetime.fromisoformat(time).timestamp() * 1000
