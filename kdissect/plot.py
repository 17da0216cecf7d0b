"""Plots of a table set in a notebook: `tables.plot.timeline()` and the like give Altair charts.

DuckDB counts before anything reaches a chart, which holds some thousand marks at most; where a plot
shows a part only, its title says so. Altair is an extra of the package:
``pip install 'kdissect[notebook]'``. A notebook shows charts as SVG, without the network;
``altair.renderers.enable(...)`` before the first plot chooses another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdissect import charts
from kdissect.tables.schemas import Row
from kdissect.text import no_such, width

if TYPE_CHECKING:
    import altair as alt

    from kdissect.api import Tables

SERIES_MAX = 12  # rows of a chart that has one per API, client or topic; the rest is "other"
SEQUENCE_MAX = 60  # exchanges of a sequence diagram
EVENTS_MAX = 4000  # events of a group's timeline
_AMOUNTS = {
    "requests": "1",
    "bytes": "coalesce(request_size, 0) + coalesce(response_size, 0)",
    "errors": "(coalesce(error_code, 0) <> 0)::INTEGER",
}
_BATCH_AMOUNTS = {"records": "record_count", "bytes": "size"}


def _altair(chart: charts.Chart) -> alt.Chart:
    """The chart as Altair draws it."""
    try:
        import altair
    except ImportError:
        raise ImportError(
            "plots need Altair, which is not installed: pip install 'kdissect[notebook]'"
        ) from None
    if altair.renderers.active == "default":  # it fetches scripts from the network
        altair.renderers.enable("svg")
    drawn = altair.Chart.from_dict({**chart.spec, "width": 640, "title": chart.title})
    drawn.data = altair.InlineData(values=chart.rows())
    return drawn


def _top(column: str, amount: str, source: str) -> str:
    """SQL of the names with the largest amounts; all others, beyond SERIES_MAX, are "other"."""
    name = f"coalesce({column}::VARCHAR, '(none)')"
    return (
        f"CASE WHEN {name} IN (SELECT {name} FROM {source} GROUP BY ALL "
        f"ORDER BY sum({amount}) DESC, {name} LIMIT {SERIES_MAX}) THEN {name} ELSE 'other' END"
    )


class Plots:
    """The plots of a table set (`kdissect.Tables`); each gives an `altair.Chart`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def timeline(self, by: str = "api_name", measure: str = "requests") -> alt.Chart:
        """Requests, bytes or errors per interval of time, stacked.

        by: a column of `exchanges`, for example "api_name", "client_id" or "client_ip".
        measure: "requests", "bytes" (requests and responses) or "errors".
        Raises ValueError for another measure, KeyError for a column that is not there.
        """
        if measure not in _AMOUNTS:
            raise ValueError(f"measure must be one of {', '.join(_AMOUNTS)}, not {measure!r}")
        column, amount = self._column(by), _AMOUNTS[measure]
        time = "epoch_us(coalesce(request_time, response_time))"
        (span,) = self._rows(f"SELECT max({time}) - min({time}) AS us FROM exchanges")
        slice_us = charts.slice_width_us(span["us"] or 0)
        data = self._columns(
            f"SELECT {time} // {slice_us} * {slice_us} / 1e3 AS t, "
            f"{_top(column, amount, 'exchanges')} AS series, sum({amount})::BIGINT AS value "
            "FROM exchanges GROUP BY ALL ORDER BY t, series"
        )
        value_title = f"{measure} per {width(slice_us / 1000)}"
        return _altair(
            charts.stack_over_time(
                "timeline",
                f"{measure} by {by}",
                "",
                data,
                slice_ms=slice_us / 1000,
                value_title=value_title,
                series_title=by,
                step_min=1,
            )
        )

    def latency(self, by: str = "api_name") -> alt.Chart:
        """`service_ms` of answers: a row with the median, the 95th and the 99th percentile.

        by: a column of `exchanges`. Long polls and requests that waited for other members of their
        group are rows of their own, as `wait` says.
        """
        spent = "(FROM exchanges WHERE service_ms > 0)"
        name = _top(self._column(by), "1", spent)
        quantiles = ", ".join(
            f"quantile_cont(service_ms, {share}) AS p{share * 100:.0f}"
            for share in (0.5, 0.95, 0.99)
        )
        rows = self._rows(
            f"SELECT {name} || CASE WHEN wait = 'answer' THEN '' "
            "ELSE ' (' || replace(wait, '_', ' ') || ')' END AS name, "
            f"{quantiles}, max(service_ms) AS max, count(*) AS answers "
            f"FROM {spent} GROUP BY ALL ORDER BY p95 DESC, name"
        )
        return _altair(charts.percentile_ranges("latency", f"service time by {by}", "", rows))

    def topics_by_client(self, measure: str = "records") -> alt.Chart:
        """A heat map of who writes to which topic: clients by topics.

        measure: "records" or "bytes" of record batches in Produce requests.
        """
        if measure not in _BATCH_AMOUNTS:
            raise ValueError(f"measure must be records or bytes, not {measure!r}")
        written = """(SELECT topic, client_id, record_count, size FROM record_batches
            JOIN exchanges USING (exchange_id) WHERE source = 'produce')"""
        client, topic = (
            _top(column, _BATCH_AMOUNTS[measure], written) for column in ("client_id", "topic")
        )
        data = self._columns(
            f"SELECT {client} AS client, {topic} AS topic, sum(record_count)::BIGINT AS records, "
            f"sum(size)::BIGINT AS bytes FROM {written} GROUP BY ALL ORDER BY ALL"
        )
        title = f"{measure} written, by client and topic"
        return _altair(charts.heat_map("topics", title, "", data, measure))

    def group(self, group_id: str | None = None) -> alt.Chart:
        """Draw the events of a group, a row per member: joins, syncs, errors, leaves.

        group_id: by default the one with most events. Raises KeyError for one that the
        captures do not show.
        """
        counts = {
            row["group_id"]: row["count"]
            for row in self._rows(
                "SELECT group_id, count(*) AS count FROM group_events GROUP BY ALL "
                "ORDER BY count DESC, group_id"
            )
        }
        if not counts:
            raise KeyError("no group events in these tables")
        if group_id is None:
            group_id = next(iter(counts))
        if group_id not in counts:
            raise KeyError(f"no group {group_id!r}; there are {', '.join(sorted(counts))}")
        rows = self._rows(
            f"""
            SELECT coalesce(nullif(member_id, ''), client_id, '(group)') AS lane, event,
              epoch_us(time) / 1e3 AS t, t + coalesce(duration_ms, 0) AS t_end,
              duration_ms, generation, detail
            FROM group_events WHERE group_id = ? ORDER BY time LIMIT {EVENTS_MAX}
            """,
            [group_id],
        )
        count = counts[group_id]
        part = f" (first {EVENTS_MAX} of {count} events)" if count > EVENTS_MAX else ""
        return _altair(charts.group_events("group", f"group {group_id}{part}", "", rows))

    def sequence(self, connection_id: int | None = None, start: int = 0) -> alt.Chart:
        """The exchanges of a connection as a sequence diagram: client left, broker right.

        connection_id: by default the one with most exchanges. It shows 60 exchanges from
        number `start` on, the first is 0. Raises KeyError for a connection without exchanges,
        ValueError for a start beyond them.
        """
        chosen = "" if connection_id is None else f"WHERE connection_id = {int(connection_id)}"
        connections = self._rows(
            f"""
            SELECT connection_id, count(*) AS count, any_value(
              client_ip || ':' || client_port || ' to ' || broker_ip || ':' || broker_port) AS ends
            FROM exchanges {chosen} GROUP BY connection_id
            ORDER BY count DESC, connection_id LIMIT 1
            """
        )
        if not connections:
            what = (
                "in these tables" if connection_id is None else f"of a connection {connection_id}"
            )
            raise KeyError(f"no exchanges {what}")
        (connection,) = connections
        if not 0 <= start < connection["count"]:
            raise ValueError(f"start must be from 0 to {connection['count'] - 1}, not {start}")
        rows = self._rows(
            f"""
            FROM exchanges WHERE connection_id = {connection["connection_id"]}
            ORDER BY coalesce(request_time_ns, response_time_ns), exchange_id
            LIMIT {SEQUENCE_MAX} OFFSET {int(start)}
            """
        )
        arrows = [arrow for row in rows for arrow in _arrows(row)]
        arrows.sort(key=lambda arrow: arrow["time_ns"])
        for number, arrow in enumerate(arrows):
            after_ms = (arrow["time_ns"] - arrows[0]["time_ns"]) / 1e6
            arrow |= {"order": number, "label": f"{after_ms:+.3f} ms  {arrow['label']}"}
        title = (
            f"{connection['ends']}, exchanges {start + 1} to {start + len(rows)} "
            f"of {connection['count']}"
        )
        names = ("order", "kind", "from", "to", "head", "label", "exchange_id")
        data = {name: [arrow[name] for arrow in arrows] for name in names}
        return _altair(charts.Chart("sequence", title, "", data, charts.load("sequence")))

    def _column(self, name: str) -> str:
        """SQL of a column of `exchanges`."""
        if name not in self._tables.exchanges.columns:
            raise KeyError(no_such("column", name, self._tables.exchanges.columns))
        return f'"{name}"'

    def _rows(self, query: str, values: Sequence[str] = ()) -> list[Row]:
        with self._tables.database() as database:
            return database.rows(query, values)

    def _columns(self, query: str) -> charts.Columns:
        with self._tables.database() as database:
            return database.table(query).to_pydict()


def _arrows(row: Row) -> list[Row]:
    """A request's arrow to the right, its response's to the left."""
    version = "" if row["api_version"] is None else f" v{row['api_version']}"
    what = f"{row['api_name'] or 'unknown'}{version} #{row['correlation_id']}"
    same = {"exchange_id": str(row["exchange_id"])}
    arrows = []
    if row["request_time_ns"] is not None:
        kind = "request" if row["status"] in ("paired", "no_response_expected") else "unanswered"
        to_broker = {"from": 0.0, "to": 1.0, "head": "triangle-right"}
        at = {"time_ns": row["request_time_ns"], "kind": kind, "label": what}
        arrows.append({**to_broker, **at, **same})
    if row["response_time_ns"] is not None:
        error = row["error_name"]
        is_error = bool(error) and error != "NONE"
        took = "" if row["latency_ms"] is None else f" ({row['latency_ms']:.3f} ms)"
        label = f"{what}{took}{' ' + error if is_error else ''}"
        kind = "error" if is_error else "response"
        to_client = {"from": 1.0, "to": 0.0, "head": "triangle-left"}
        at = {"time_ns": row["response_time_ns"], "kind": kind, "label": label}
        arrows.append({**to_client, **at, **same})
    return arrows
