"""Plots of a table set in a notebook: `tables.plot.timeline()` and the like give Altair charts.

Everything is counted with Arrow before it reaches a chart, which holds some thousand marks at most;
where a plot shows a part only, its title says so. Altair is an extra of the package:
``pip install 'kdissect[notebook]'``. A notebook shows charts as SVG, without the network;
``altair.renderers.enable(...)`` before the first plot chooses another way.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.charts import EVENT_NAMES, Spec, event_detail, load

if TYPE_CHECKING:
    import altair as alt

INTERVALS = 240  # of a time axis, at most
SERIES_MAX = 12  # rows of a chart that has one per API, client or topic; the rest is "other"
SEQUENCE_MAX = 60  # exchanges of a sequence diagram
EVENTS_MAX = 4000  # events of a group's timeline
_STEPS_NS = [
    unit * step
    for unit, steps in (
        (10**3, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
        (10**6, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
        (10**9, (1, 2, 5, 10, 15, 30)),
        (60 * 10**9, (1, 2, 5, 10, 15, 30)),
        (3600 * 10**9, (1, 2, 3, 6, 12, 24)),
    )
    for step in steps
]


def _altair() -> Any:
    try:
        import altair
    except ImportError:
        raise ImportError(
            "plots need Altair, which is not installed: pip install 'kdissect[notebook]'"
        ) from None
    if altair.renderers.active == "default":  # it fetches scripts from the network
        altair.renderers.enable("svg")
    return altair


def _chart(title: str, rows: list[dict[str, Any]], spec: Spec) -> Any:
    """The chart of a specification and its rows."""
    alt = _altair()
    chart = alt.Chart.from_dict({**spec, "width": 640, "title": title})
    chart.data = alt.InlineData(values=rows)
    return chart


class Plots:
    """The plots of a table set (`kdissect.Tables`); each gives an `altair.Chart`."""

    def __init__(self, tables: Any) -> None:
        self._tables = tables

    def timeline(self, by: str = "api_name", measure: str = "requests") -> alt.Chart:
        """Requests, bytes or errors per interval of time, stacked.

        by: a column of `exchanges`, for example "api_name", "client_id" or "client_ip".
        measure: "requests", "bytes" (requests and responses) or "errors".
        Raises ValueError for another measure, KeyError for a column that is not there.
        """
        measures = ("requests", "bytes", "errors")
        if measure not in measures:
            raise ValueError(f"measure must be one of {', '.join(measures)}, not {measure!r}")
        columns = [by, "request_time_ns", "response_time_ns", "request_size", "response_size",
                   "error_code"]  # fmt: skip
        rows = self._exchanges(columns)
        time_ns = pc.coalesce(rows["request_time_ns"], rows["response_time_ns"])
        if measure == "bytes":
            amount = pc.add(
                pc.fill_null(rows["request_size"], 0), pc.fill_null(rows["response_size"], 0)
            )
        elif measure == "errors":
            amount = pc.cast(pc.fill_null(pc.not_equal(rows["error_code"], 0), False), pa.int64())
        else:
            amount = pa.chunked_array([np.ones(len(rows), np.int64)])
        step, interval = _intervals(time_ns)
        table = pa.table({"time": interval, "series": _top(rows[by], amount), "amount": amount})
        counted = table.group_by(["time", "series"], use_threads=False).aggregate(
            [("amount", "sum")]
        )
        rows = [
            {
                "t": row["time"].timestamp() * 1000,
                "series": row["series"],
                "value": row["amount_sum"],
            }
            for row in counted.sort_by("time").to_pylist()
        ]
        return _chart(
            f"{measure} by {by}",
            rows,
            load(
                "stack_over_time",
                slice_ms=step / 1e6,
                value_title=f"{measure} per {_span(step)}",
                series_title=by,
                step_min=1,
            ),
        )

    def latency(self, by: str = "api_name") -> alt.Chart:
        """`service_ms` of answers: a row with the median, the 95th and the 99th percentile.

        by: a column of `exchanges`. Long polls and requests that waited for other members of their
        group are rows of their own, as `wait` says.
        """
        rows = self._exchanges([by, "service_ms", "wait"])
        rows = rows.filter(
            pc.and_(pc.is_valid(rows["service_ms"]), pc.greater(rows["service_ms"], 0))
        )
        ones = pa.chunked_array([np.ones(len(rows), np.int64)])
        waits = pc.replace_substring(rows["wait"].cast(pa.string()), "_", " ")
        note = pc.binary_join_element_wise(" (", waits, ")", "")
        note = pc.if_else(pc.equal(waits, "answer"), "", note)
        series = pc.binary_join_element_wise(_top(rows[by], ones), note, "").to_numpy()
        latency = rows["service_ms"].to_numpy()
        summary = []
        for name in sorted(set(series.tolist())):
            of_one = latency[series == name]
            p50, p95, p99, top = np.percentile(of_one, (50, 95, 99, 100)).tolist()
            summary.append(
                {"name": name, "p50": p50, "p95": p95, "p99": p99, "max": top,
                 "answers": len(of_one)}
            )  # fmt: skip
        summary.sort(key=lambda row: -row["p95"])
        return _chart(f"service time by {by}", summary, load("ranges", height=20 * len(summary)))

    def topics_by_client(self, measure: str = "records") -> alt.Chart:
        """A heat map of who writes to which topic: clients by topics.

        measure: "records" or "bytes" of record batches in Produce requests.
        """
        if measure not in ("records", "bytes"):
            raise ValueError(f"measure must be records or bytes, not {measure!r}")
        batches = self._tables.record_batches.to_arrow(
            ["exchange_id", "topic", "record_count", "size"], pc.field("source") == "produce"
        )
        clients = self._exchanges(["exchange_id", "client_id"])
        joined = batches.join(clients, "exchange_id", join_type="left outer", use_threads=False)
        sums = {
            "records": pc.fill_null(joined["record_count"], 0),
            "bytes": pc.fill_null(joined["size"], 0),
        }
        table = pa.table(
            {
                "client": _top(joined["client_id"], sums[measure]),
                "topic": _top(joined["topic"], sums[measure]),
                **sums,
            }
        )
        counted = table.group_by(["client", "topic"], use_threads=False).aggregate(
            [(name, "sum") for name in sums]
        )
        rows = counted.rename_columns(["client", "topic", *sums]).to_pylist()
        height = 20 * len({row["topic"] for row in rows})
        title = f"{measure} written, by client and topic"
        return _chart(title, rows, load("heat_map", measure=measure, height=height))

    def group(self, group_id: str | None = None) -> alt.Chart:
        """Draw the events of a group, a row per member: joins, syncs, errors, leaves.

        group_id: the one with most events where none is given. Raises KeyError for one that the
        captures do not show.
        """
        events = self._tables.group_events.to_arrow()
        counts = pc.value_counts(events["group_id"]).to_pylist()
        if not counts:
            raise KeyError("no group events in these tables")
        if group_id is None:
            group_id = max(counts, key=lambda entry: entry["counts"])["values"]
        rows = events.filter(pc.equal(events["group_id"], group_id)).sort_by("time")
        if not len(rows):
            known = ", ".join(sorted(str(entry["values"]) for entry in counts))
            raise KeyError(f"no group {group_id!r}; there are {known}")
        count, shown = len(rows), rows.slice(0, EVENTS_MAX)
        member = pc.if_else(
            pc.fill_null(pc.equal(shown["member_id"], ""), True),
            pc.fill_null(shown["client_id"], "(group)"),
            shown["member_id"],
        )
        rows = [
            {
                "lane": lane,
                "event": EVENT_NAMES.get(row["event"], row["event"]),
                "t": row["time"].timestamp() * 1000,
                "t_end": row["time"].timestamp() * 1000 + (row["duration_ms"] or 0),
                "ms": row["duration_ms"],
                "detail": event_detail(row["generation"], row["detail"]),
            }
            for lane, row in zip(member.to_pylist(), shown.to_pylist(), strict=True)
        ]
        part = f" (first {EVENTS_MAX} of {count} events)" if count > EVENTS_MAX else ""
        spec = load(
            "events",
            colours={"domain": list(EVENT_NAMES.values())},
            lane_title="member",
            height=22 * len({row["lane"] for row in rows}),
        )
        return _chart(f"group {group_id}{part}", rows, spec)

    def sequence(self, connection_id: int | None = None, start: int = 0) -> alt.Chart:
        """The exchanges of a connection as a sequence diagram: client left, broker right.

        connection_id: the one with most exchanges where none is given. It shows 60 exchanges from
        number `start` on. Raises KeyError for a connection without exchanges.
        """
        columns = ["connection_id", "exchange_id", "client_ip", "client_port", "broker_ip",
                   "broker_port", "api_name", "api_version", "correlation_id", "request_time_ns",
                   "response_time_ns", "latency_ms", "error_name", "status"]  # fmt: skip
        rows = self._exchanges(columns)
        counts = pc.value_counts(rows["connection_id"]).to_pylist()
        if not counts:
            raise KeyError("no exchanges in these tables")
        if connection_id is None:
            connection_id = max(counts, key=lambda entry: entry["counts"])["values"]
        rows = rows.filter(pc.equal(rows["connection_id"], connection_id))
        if not len(rows):
            raise KeyError(f"no exchanges of a connection {connection_id}")
        time = pc.coalesce(rows["request_time_ns"], rows["response_time_ns"])
        shown = rows.take(pc.sort_indices(time)).slice(start, SEQUENCE_MAX).to_pylist()
        arrows = [arrow for row in shown for arrow in _arrows(row)]
        arrows.sort(key=lambda arrow: arrow["time_ns"])
        first = arrows[0]["time_ns"] if arrows else 0
        for number, arrow in enumerate(arrows):
            arrow["order"] = number
            arrow["label"] = f"{(arrow.pop('time_ns') - first) / 1e6:+.3f} ms  {arrow['label']}"
        one = rows.slice(0, 1).to_pylist()[0]
        title = (
            f"{one['client_ip']}:{one['client_port']} to {one['broker_ip']}:{one['broker_port']}, "
            f"exchanges {start + 1} to {start + len(shown)} of {len(rows)}"
        )
        return _chart(title, arrows, load("sequence"))

    def _exchanges(self, columns: list[str]) -> pa.Table:
        schema = self._tables.exchanges.schema
        missing = [name for name in columns if name not in schema.names]
        if missing:
            raise KeyError(f"exchanges has no column {missing[0]!r}")
        return self._tables.exchanges.to_arrow(list(dict.fromkeys(columns)))


def _arrows(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A request's arrow to the right, its response's to the left."""
    version = "" if row["api_version"] is None else f" v{row['api_version']}"
    what = f"{row['api_name'] or 'unknown'}{version} #{row['correlation_id']}"
    same = {"exchange_id": str(row["exchange_id"])}
    arrows = []
    if row["request_time_ns"] is not None:
        kind = "request" if row["status"] in ("paired", "no_response_expected") else "unanswered"
        arrows.append({"time_ns": row["request_time_ns"], "from": 0.0, "to": 1.0, "kind": kind,
                       "head": "triangle-right", "label": what, **same})  # fmt: skip
    if row["response_time_ns"] is not None:
        error = row["error_name"]
        is_error = bool(error) and error != "NONE"
        took = "" if row["latency_ms"] is None else f" ({row['latency_ms']:.3f} ms)"
        label = f"{what}{took}{' ' + error if is_error else ''}"
        arrows.append({"time_ns": row["response_time_ns"], "from": 1.0, "to": 0.0,
                       "kind": "error" if is_error else "response", "head": "triangle-left",
                       "label": label, **same})  # fmt: skip
    return arrows


def _intervals(time_ns: Any) -> tuple[int, Any]:
    """(length in ns of an interval, where each time's interval begins as timestamp[us])."""
    times = time_ns.to_numpy()
    if not len(times):
        return _STEPS_NS[0], pa.array([], pa.timestamp("us", "UTC"))
    length = int(times.max() - times.min())
    day = 86_400 * 10**9
    whole_days = day * max(1, math.ceil(length / INTERVALS / day))
    step = next((step for step in _STEPS_NS if length <= step * INTERVALS), whole_days)
    return step, pa.array(times // step * step // 1000).cast(pa.timestamp("us", "UTC"))


def _span(step_ns: int) -> str:
    for unit, name in ((3600 * 10**9, "h"), (60 * 10**9, "min"), (10**9, "s"), (10**6, "ms")):
        if step_ns >= unit:
            return f"{step_ns // unit} {name}"
    return f"{step_ns // 1000} µs"


def _top(names: Any, amount: Any) -> Any:
    """The names with the largest sums; all others, beyond SERIES_MAX, become "other"."""
    named = pc.fill_null(names.cast(pa.string()), "(none)")
    rows = pa.table({"name": named, "amount": amount})
    sums = rows.group_by("name", use_threads=False).aggregate([("amount", "sum")])
    kept = sums.sort_by([("amount_sum", "descending")])["name"].slice(0, SERIES_MAX)
    is_kept = pc.is_in(named, value_set=kept.combine_chunks())
    return pc.if_else(is_kept, named, "other")
