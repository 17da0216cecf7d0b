"""The charts of the page: the rows of each, its words, and which specification draws it.

Colours and legends are the page's, which knows its theme and wraps legends on a phone: marks name
their series, and the series come in the order of their colours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from typing import Any

from kdissect import kernel_cache
from kdissect import text as f
from kdissect.atomic_file import atomic_write
from kdissect.charts import (
    EVENT_NAMES,
    SEVERITY_COLOURS,
    VEGA_LITE,
    Spec,
    event_detail,
    load,
)
from kdissect.report.page_tables import chart_word
from kdissect.text import visible

Columns = dict[str, list[Any]]
Series = tuple[str, ...]

WAIT_NAMES = {
    "answer": "answer",
    "long_poll": "long poll",
    "group": "waiting for members",
    "undecided": "undecided",
}
DIRECTION_NAMES = {"write": "written", "read": "read", "replicate": "replicated"}
OUTCOME_NAMES = ("commit", "abort", "open", "fenced")
LATENCY_LINES = ("p50", "p95", "p99")
_CLIENTS_MAX = 15  # of the chart of clients
_LANES_MAX = 40  # of the timeline of transactions; beyond that a table is easier to read
_MILLIS_MIN = 0.001  # a logarithm has no zero


@dataclass(slots=True)
class Chart:
    """A chart: its title and text, its rows, and the Vega-Lite specification that draws them.

    text: a description of the picture for readers who cannot see it.
    height: in pixels.
    series: the legend, in the order of colours.
    choose: a column that a menu narrows to one value.
    labels: the headings of the columns in the table of the chart's data.
    meanings: of columns, if the number means something else here than in other charts.
    colours: of series that have colours of their own.
    """

    id: str
    title: str
    text: str
    data: Columns
    spec: Spec
    height: int = 200
    series: Iterable[str] = ()
    choose: str | None = None
    choose_label: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)
    colours: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The values from which the page's script draws the chart."""
        present = set().union(*(self.data.get(name, ()) for name in ("series", "event", "group")))
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
            "labels": {"t": "from (UTC)", "t_end": "until (UTC)", **self.labels},
            "meanings": {name: self.meanings.get(name) or chart_word(name) for name in data},
        }


def library() -> str:
    """Vega, Vega-Lite and their embedder as one script that sets `window.vegaEmbed`.

    Bundling takes seconds, so the script is kept beside the compiled kernels.
    """
    import vl_convert

    folder = kernel_cache.folder()
    file = folder and folder / f"vega-embed-{VEGA_LITE}-{version('vl-convert-python')}.js"
    if file is not None:
        with suppress(OSError, UnicodeDecodeError):
            return file.read_text("utf-8")
    script: str = vl_convert.javascript_bundle(
        "window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE
    )
    # of an editor, of a tracker in an error message, of a schema: none is used, none stays
    script = re.sub(r"https://(github\.com|vega\.github\.io)", "about:blank#", script)
    if file is not None:
        with (
            suppress(OSError),
            atomic_write(file) as part,
            open(part, "w", encoding="utf-8") as out,
        ):
            out.write(script)
    return script


def traffic(data: Columns, slice_ms: float) -> Chart | None:
    """Exchanges per second, stacked by API."""
    if not data["t"]:
        return None
    stack = _stack(data["t"], [api or "unknown" for api in data["api"]], data["rate"])
    totals = dict.fromkeys(data["t"], 0.0)
    for t, rate in zip(data["t"], data["rate"], strict=True):
        totals[t] += rate
    names = list(dict.fromkeys(stack["series"]))
    return Chart(
        "traffic",
        "Exchanges per second, by API",
        f"Highest {f.rate(max(totals.values()))}; slices of {f.width(slice_ms)}. "
        f"Most frequent: {', '.join(names[:3])}.",
        stack,
        load(
            "stack_over_time",
            slice_ms=slice_ms,
            value_title="exchanges per second",
            series_title="API",
            step_min=0,
        ),
        series=names,
        labels={"series": "API", "value": "exchanges per second"},
        meanings={"value": "exchanges in the slice, divided by its length"},
    )


def errors_over_time(data: Columns, slice_ms: float) -> Chart | None:
    """Answers with an error, stacked by their first code."""
    if not data["t"]:
        return None
    stack = _stack(data["t"], data["error"], data["count"])
    return Chart(
        "errors-time",
        "Answers with an error over time",
        f"{f.plural(sum(data['count']), 'answer')} in slices of {f.width(slice_ms)}.",
        stack,
        load(
            "stack_over_time",
            slice_ms=slice_ms,
            value_title="answers",
            series_title="error",
            step_min=1,
        ),
        series=dict.fromkeys(stack["series"]),
        labels={"series": "error", "value": "answers"},
        meanings={"value": "answers in the slice whose first error code is this"},
    )


def _stack(times: list[float], names: list[str], values: list[float]) -> Columns:
    """Rows that are not zero, by series: the largest first, "other" last."""
    sums = dict.fromkeys(names, 0.0)
    for name, value in zip(names, values, strict=True):
        sums[name] += value
    order = sorted(sums, key=lambda name: (name == "other", -sums[name], name))
    place = {name: number for number, name in enumerate(order)}
    rows = sorted(
        (place[name], t, value)
        for t, name, value in zip(times, names, values, strict=True)
        if value
    )
    return {
        "t": [t for _, t, _ in rows],
        "series": [order[number] for number, _, _ in rows],
        "value": [value for _, _, value in rows],
    }


def sizes(data: Columns, slice_ms: float) -> Chart | None:
    """Bytes per second in both directions."""
    if not data["t"]:
        return None
    series = ("requests", "responses")
    requests, responses = (max(data[name]) for name in series)
    title = "bytes per second"
    return Chart(
        "bytes",
        "Bytes per second",
        f"Highest: requests {f.byte_size(requests)}/s, responses {f.byte_size(responses)}/s.",
        data,
        load(
            "lines_over_time",
            slice_ms=slice_ms,
            series=list(series),
            value_title=title,
            scale="linear",
            format="~s",
        ),
        series=series,
        labels={name: f"{name}, bytes per second" for name in series},
    )


def latency_over_time(data: Columns, slice_ms: float) -> Chart | None:
    """Percentiles of each slice."""
    p95 = [value for value in data["p95"] if value is not None]
    if not p95:
        return None
    return Chart(
        "latency-time",
        "Service time of answers",
        f"p95 of a slice between {f.duration(min(p95))} and {f.duration(max(p95))}.",
        {**data, **{name: _positive(data[name]) for name in (*LATENCY_LINES, "max")}},
        load(
            "lines_over_time",
            slice_ms=slice_ms,
            series=list(LATENCY_LINES),
            value_title="service time, ms",
            scale="log",
            format=",~r",
        ),
        series=LATENCY_LINES,
        labels={"count": "answers"},
        meanings={"count": "answers in the slice"},
    )


def _positive(values: list[float | None]) -> list[float | None]:
    return [None if value is None else max(value, _MILLIS_MIN) for value in values]


def latency_histogram(data: dict[str, Any]) -> Chart | None:
    """Counts by service time and wait, for all APIs or one."""
    if not data["bin"]:
        return None
    polls = sum(n for n, w in zip(data["count"], data["wait"], strict=True) if w == "long_poll")
    return _histogram(
        "latency-histogram",
        "Service time, long polls apart",
        f"{f.plural(sum(data['count']), 'answered exchange')}, "
        f"{f.count(polls)} of them long polls.",
        {
            "api": [api or "unknown" for api in data["api"]],
            "series": [WAIT_NAMES[wait] for wait in data["wait"]],
            **_edges(data["bin"], data["bins_per_decade"]),
            "count": data["count"],
        },
        tuple(WAIT_NAMES.values()),
        x_title="service time, ms",
        x_scale={"type": "log", "nice": False},
        count_title="exchanges",
        choose="api",
        choose_label="API",
    )


def batch_sizes(data: Columns) -> Chart | None:
    """Return the histogram of batch sizes, in powers of two."""
    if not data["bin"]:
        return None
    return _histogram(
        "batch-sizes",
        "Sizes of record batches",
        f"{f.plural(sum(data['count']), 'batch', 'batches')} of whole size, in powers of two.",
        {
            "series": [DIRECTION_NAMES[value] for value in data["direction"]],
            "from": [2**bin_ for bin_ in data["bin"]],
            "to": [2 ** (bin_ + 1) for bin_ in data["bin"]],
            "count": data["count"],
        },
        tuple(DIRECTION_NAMES.values()),
        x_title="bytes of a batch",
        x_scale={"type": "log", "base": 2},
        x_label="datum.value >= 1048576 ? format(datum.value / 1048576, ',d') + ' Mi' : "
        "datum.value >= 1024 ? datum.value / 1024 + ' Ki' : datum.label",
        count_title="batches",
    )


def broker_difference(histogram: dict[str, Any]) -> Chart | None:
    """Broker's time less the capture's."""
    edges = histogram["edges"]
    if not edges:
        return None
    return _histogram(
        "broker-difference",
        "How the broker's times differ",
        f"The middle 98 %; {f.count(histogram['below'])} lie below and "
        f"{f.count(histogram['above'])} above.",
        {
            "series": ["exchanges"] * len(histogram["counts"]),
            "from": edges[:-1],
            "to": edges[1:],
            "count": histogram["counts"],
        },
        ("exchanges",),
        x_title="broker's time less the capture's, ms",
        x_scale={"type": "linear"},
        count_title="exchanges",
        count_scale="symlog",
    )


def _histogram(
    id_: str,
    title: str,
    text: str,
    data: Columns,
    series: Series,
    *,
    x_title: str,
    x_scale: dict[str, Any],
    count_title: str,
    x_label: str = "datum.label",
    count_scale: str = "linear",
    choose: str | None = None,
    choose_label: str = "",
) -> Chart:
    spec = load(
        "histogram",
        x_title=x_title,
        x_scale=x_scale,
        x_label=x_label,
        count_title=count_title,
        count_scale=count_scale,
        series=list(series),
    )
    labels = {"api": "API", "series": "kind", "to": "below", "count": count_title}
    return Chart(id_, title, text, data, spec, 200, series, choose, choose_label, labels)


def _edges(bins: list[int], per_decade: int, names: Series = ("from", "to")) -> Columns:
    """The begin and end of logarithmic bins, with four digits."""
    return {
        name: [float(f"{10 ** ((bin_ + after) / per_decade):.4g}") for bin_ in bins]
        for after, name in enumerate(names)
    }


def latency_ranges(rows: list[dict[str, Any]]) -> Chart | None:
    """p50 to p99 of the clients with the highest p95."""
    shown = [row for row in rows if not row["is_broker"] and row["p50"] is not None]
    shown = shown[:_CLIENTS_MAX]
    if len(shown) < 2:
        return None
    ids = {row["client_id"] for row in shown}
    names = [
        (row["client_id"] or "(none)") if len(ids) == len(shown) else f.client(row) for row in shown
    ]
    columns: Columns = {"name": shown_texts(names)}
    for name in (*LATENCY_LINES, "max"):
        columns[name] = _positive([row[name] for row in shown])
    columns["answers"] = [row["answers"] for row in shown]
    return Chart(
        "latency-clients",
        "Clients with the highest p95",
        f"{columns['name'][0]}: p95 {f.duration(shown[0]['p95'])}.",
        columns,
        load("ranges", height=20 * len(shown)),
        20 * len(shown) + 40,
        series=LATENCY_LINES,
        labels={"name": "client", **{name: f"{name}, ms" for name in (*LATENCY_LINES, "max")}},
    )


def heat_map(data: Columns, direction: str, title: str, verb: str) -> Chart | None:
    """Topics by clients, bytes as colour."""
    rows = [i for i, value in enumerate(data["direction"]) if value == direction]
    if not rows:
        return None
    columns: Columns = {
        name: shown_texts([data[name][i] for i in rows])
        for name in ("topic", "client", "bytes", "records")
    }
    topics, clients = len(set(columns["topic"])), len(set(columns["client"]))
    return Chart(
        f"heat-{direction}",
        title,
        f"{f.plural(clients, 'client')} {verb} {f.plural(topics, 'topic')}.",
        columns,
        load("heat_map", measure="bytes", height=20 * topics),
        20 * topics + 190,
    )


def group_timeline(timeline: dict[str, Any], number: int) -> Chart:
    """A lane for the group and for each member, with its events and their durations."""
    events = sorted(timeline["events"], key=lambda event: event["lane"] != "group")
    lanes = list(dict.fromkeys(["group", *(event["lane"] for event in events)]))
    rebalances = sum(event["event"] == "rebalance" for event in events)
    details = [event_detail(event["generation"], event["detail"]) for event in events]
    return Chart(
        f"group-{number}",
        f"Timeline of {visible(timeline['group_id'], 300)}",
        f"{f.plural(len(lanes) - 1, 'member')}, {f.plural(rebalances, 'rebalance')}.",
        {
            "lane": shown_texts([event["lane"] for event in events]),
            "event": [EVENT_NAMES.get(event["event"], event["event"]) for event in events],
            "t": [event["t"] for event in events],
            "t_end": [event["t_end"] for event in events],
            "ms": [event["duration_ms"] for event in events],
            "detail": shown_texts(details),
        },
        load(
            "events",
            colours={"domain": list(EVENT_NAMES.values())},
            lane_title="member",
            height=22 * len(lanes),
        ),
        22 * len(lanes) + 40,
        series=EVENT_NAMES.values(),
        labels={"lane": "member", "ms": "took, ms"},
    )


def transaction_timeline(data: Columns) -> Chart | None:
    """A lane for each transactional id, a bar for each transaction."""
    ids = set(data["id"])
    if not ids or len(ids) > _LANES_MAX:
        return None
    return Chart(
        "transactions",
        "Transactions over time",
        f"{f.plural(len(data['t']), 'transaction')} of {f.plural(len(ids), 'transactional id')}.",
        {
            "lane": shown_texts(data["id"]),
            "event": data["outcome"],
            "t": data["t"],
            "t_end": data["t_end"],
            "ms": data["duration_ms"],
            "detail": ["" if n is None else f.plural(n, "record") for n in data["record_count"]],
        },
        load(
            "events",
            colours={"domain": list(OUTCOME_NAMES)},
            lane_title="transactional id",
            height=22 * len(ids),
        ),
        22 * len(ids) + 40,
        series=OUTCOME_NAMES,
        labels={"lane": "transactional id", "event": "outcome", "ms": "took, ms"},
        meanings={"lane": "transactional id of the producer", "event": "how the transaction ended"},
    )


def incident_timeline(incidents: list[dict[str, Any]], span: tuple[str, str]) -> Chart | None:
    """A lane for each kind of incident, a bar for each incident, over the capture's time `span`."""
    if not incidents:
        return None
    lanes = list(dict.fromkeys(row["kind"] for row in incidents))
    marks = incident_marks(incidents)
    spec = load(
        "events",
        colours={"domain": list(SEVERITY_COLOURS), "range": list(SEVERITY_COLOURS.values())},
        lane_title="kind",
        height=22 * len(lanes),
    )
    spec["encoding"]["x"]["scale"]["domain"] = [_epoch_ms(time) for time in span]
    return Chart(
        "incidents",
        "Incidents over time",
        f"{f.plural(len(incidents), 'incident')}, the first at "
        f"{f.moment(min(row['start_time'] for row in incidents))} UTC.",
        {
            "lane": [row["kind"] for row in incidents],
            "event": [row["severity"] for row in incidents],
            "t": [mark["t"] for mark in marks],
            "t_end": [mark["t_end"] for mark in marks],
            "ms": [mark["t_end"] - mark["t"] for mark in marks],
            "detail": [visible(row["subject"], 200) for row in incidents],
        },
        spec,
        22 * len(lanes) + 40,
        series=SEVERITY_COLOURS,
        colours=SEVERITY_COLOURS,
        labels={"lane": "kind", "event": "severity", "ms": "lasted, ms"},
        meanings={"lane": "kind of the incident", "event": "how bad it is",
                  "detail": "broker, client, group or partition"},
    )  # fmt: skip


def incident_marks(incidents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Times in ms since 1970, kinds and severities of incidents, for marks on charts."""
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


def mark_incidents(chart: Chart, marks: list[dict[str, Any]]) -> None:
    """Add a band for each incident as the background of a chart over time."""
    if marks and "t" in chart.data and "layer" in chart.spec:
        colours = {name: SEVERITY_COLOURS[name] for name in ("bad", "warn")}
        band = {**load("incident_marks", **colours), "data": {"values": marks}}
        chart.spec["layer"].insert(0, {key: band[key] for key in ("data", "mark", "encoding")})


def lag_over_time(data: Columns) -> Chart | None:
    """The lag of groups, in records."""
    if not data["t"]:
        return None
    groups = shown_texts(data["group"])
    worst = max(range(len(groups)), key=lambda i: data["lag"][i])
    return Chart(
        "lag",
        "Consumer lag of committed offsets",
        f"Highest: {groups[worst]}, {f.count(data['lag'][worst])} records behind.",
        {**data, "group": groups},
        load("lag"),
        series=dict.fromkeys(groups),
        labels={"t": "at (UTC)", "lag": "records behind"},
    )


def broker_times(cells: dict[str, Any]) -> Chart | None:
    """The capture's time against the broker's, on logarithmic axes."""
    if not cells["bin"]:
        return None
    per_decade = cells["bins_per_decade"]
    return Chart(
        "broker-cells",
        "The capture's time beside the broker's",
        "On the diagonal both agree.",
        {
            **_edges(cells["bin"], per_decade, ("capture", "capture_to")),
            **_edges(cells["log_bin"], per_decade, ("broker", "broker_to")),
            "count": cells["count"],
        },
        load("broker_times"),
        260,
        labels={"capture": "capture, from ms", "broker": "broker, from ms"},
    )


def shown_texts(values: list[Any]) -> list[Any]:
    """Texts of the capture as they may be drawn."""
    return [visible(value, 300) if isinstance(value, str) else value for value in values]
