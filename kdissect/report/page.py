"""The document of a report as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from kdissect import text as f
from kdissect.incidents.model import INFO
from kdissect.report import charts
from kdissect.report.charts import Chart
from kdissect.report.page_tables import STORY, TABLES, Document, with_reason
from kdissect.report.sections import readiness, security
from kdissect.report.table_view import View, view
from kdissect.text import visible

LEVEL_NAMES = {"bad": "Look at this", "warn": "Worth a look", "info": "Good to know"}
STORY_ROWS = 15  # events of a rebalance


@cache
def _environment() -> jinja2.Environment:
    """Jinja's environment, which keeps the compiled templates for further reports."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = lambda value: visible(value, 1000)
    environment.filters["moment"] = f.moment
    return environment


def render(document: Document, name: str, csv_names: dict[str, str], library: str) -> str:
    """The page. library: the script that sets `window.vegaEmbed`; csv_names: table -> file."""
    environment = _environment()
    style, page_script = _asset("style.css"), _asset("page.js")
    chart_of = {chart.id: chart for chart in _charts(document)}
    shown = _views(document, csv_names)
    scripts = [library, page_script]
    return environment.get_template("report.html.j2").render(
        d=document,
        name=visible(name, 300),
        subtitle=_subtitle(document),
        sections=_sections(document),
        tiles=_tiles(document),
        level_names=LEVEL_NAMES,
        views=shown,
        charts=chart_of,
        timelines=_timelines(document, csv_names),
        readiness_text=readiness.text(document["readiness"]),
        security_text=security.text(document["security"]),
        broker_log_text=_broker_log_text(document),
        network_text=_network_text(document),
        csv_of=lambda table: csv_names.get(table, ""),
        style=Markup(style),
        plain_style=Markup(environment.get_template("plain.css").render(views=shown)),
        script_hashes=Markup(" ".join(_hash(script) for script in scripts)),
        charts_json=json_script({key: chart.to_json() for key, chart in chart_of.items()}),
        vega_script=Markup(_inline(library)),
        page_script=Markup(_inline(page_script)),
    )


def _asset(name: str) -> str:
    return resources.files("kdissect.report").joinpath("templates", name).read_text("utf-8")


def json_script(value: Any) -> Markup:
    """JSON for a script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _inline(script: str) -> str:
    """A script of ours or of a library; its bytes are hashed, so it must be good as it is."""
    lowered = script.lower()
    if "</script" in lowered or "<!--" in lowered:
        raise AssertionError("a script would end its own element")
    return script


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _subtitle(d: Document) -> str:
    o = d["overview"]
    if o["first_time"] is None:
        return "An empty capture."
    return (
        f"{f.day(o['first_time'])}, {f.duration(o['span_s'] * 1000)} · "
        f"{f.plural(len(o['captures']), 'capture file')}, {f.count(o['packets'])} packets, "
        f"{f.byte_size(o['capture_bytes'])}"
    )


def _tiles(d: Document) -> list[dict[str, str]]:
    o, everyone, read = d["overview"], d["latency"]["all"], d["overview"]["read"]
    span = o["span_s"] or 0
    unread, missing = read["unread_tls_connections"], o["health"]["missing_byte_count"]
    lost = [f"{f.byte_size(missing)} missing"] if missing else []
    if unread:
        lost.append(f"{f.plural(unread, 'TLS connection')} not decrypted")

    def tile(label: str, value: str, note: str, text: str, level: str = "") -> dict[str, str]:
        return {"label": label, "value": value, "note": note, "help": text, "level": level}

    return [
        tile(
            "Exchanges",
            f.count(o["exchanges"]),
            f.rate(o["exchanges"] / span) if span else "",
            "requests with their responses, or either alone",
        ),
        tile(
            "Service time p50",
            f.duration(everyone["p50"]),
            f"p95 {f.duration(everyone['p95'])}, p99 {f.duration(everyone['p99'])}",
            "service_ms of answers: what the broker took, without long polls and waits for a group",
        ),
        tile(
            "Errors",
            f.count(o["failed"]),
            f.share(o["failed"] / o["paired"]) + " of answers" if o["paired"] else "",
            "answers with an error code anywhere that is no routine step of the protocol",
        ),
        tile(
            "Clients",
            f.count(d["clients"]["total"]),
            f.plural(o["kafka_connections"], "Kafka connection"),
            "client ids, each at each of its addresses",
        ),
        tile(
            "Topics",
            f.count(d["topics"]["topics"]["total"]),
            f"{f.count(o['records'])} records seen",
            "topics that were written, read or asked for, Kafka's own too",
        ),
        tile(
            "Payload",
            f.byte_size(read["request_bytes"] + read["response_bytes"]),
            f"{f.byte_size(read['request_bytes'])} to brokers",
            "TCP payload of Kafka connections, each byte once",
        ),
        tile(
            "Read",
            f.share(read["framed_byte_count"] / read["byte_count"] if read["byte_count"] else None),
            ", ".join(lost),
            "bytes in Kafka's frames, of all bytes of Kafka connections and of TLS connections "
            "that were not decrypted, the missing ones included",
            "warn" if lost else "",
        ),
        tile("Anomalies", f.count(o["anomalies"]), "", "faults in the data, each with its place"),
    ]


def _sections(d: Document) -> list[dict[str, str]]:
    o = d["overview"]

    def item(id_: str, title: str, badge: int | None = None) -> dict[str, str]:
        return {"id": id_, "title": title, "badge": f.count(badge) if badge else ""}

    return [
        item("overview", "What stands out"),
        item("traffic", "Traffic"),
        item("latency", "Latency"),
        item("errors", "Errors", d["errors"]["exchanges"]),
        item("clients", "Clients", d["clients"]["total"]),
        item(
            "security", "Security", sum(row["refused"] for row in d["security"]["logins"]["rows"])
        ),
        item("readiness", "Readiness", d["readiness"]["counts"]["breaks"]),
        item("topics", "Topics", d["topics"]["topics"]["total"]),
        item("groups", "Groups", d["groups"]["groups"]["total"]),
        item("lag", "Lag", d["lag"]["groups"]["total"] if d["lag"] else None),
        item("transactions", "Transactions", d["transactions"]["transactions"]["total"]),
        item("throttling", "Throttling", d["throttling"]["responses"]),
        item("network", "Network", o["health"]["retransmitted_segment_count"]),
        item("anomalies", "Anomalies", o["anomalies"]),
    ]


def _charts(d: Document) -> list[Chart]:
    traffic = d["traffic"]
    log = d["broker_log"]
    marks = charts.incident_marks([row for row in d["incidents"] if row["severity"] != INFO])
    all_charts = [
        charts.traffic(traffic["exchanges"], traffic["slice_ms"]),
        charts.sizes(traffic["bytes"], traffic["slice_ms"]),
        charts.latency_over_time(traffic["latency"], traffic["slice_ms"]),
        charts.errors_over_time(traffic["errors"], traffic["slice_ms"]),
        charts.latency_histogram(d["latency"]["histogram"]),
        charts.latency_ranges(d["latency"]["clients"]["rows"]),
        charts.heat_map(d["topics"]["heat_map"], "write", "Who writes what", "write"),
        charts.heat_map(d["topics"]["heat_map"], "read", "Who reads what", "read"),
        charts.batch_sizes(d["topics"]["batch_sizes"]),
        charts.transaction_timeline(d["transactions"]["timeline"]),
        charts.lag_over_time(d["lag"]["over_time"]) if d["lag"] else None,
        charts.broker_difference(log["histogram"]) if log else None,
        charts.broker_times(log["cells"]) if log else None,
        *(
            charts.group_timeline(timeline, number)
            for number, timeline in enumerate(d["groups"]["timelines"])
        ),
    ]
    shown = [chart for chart in all_charts if chart is not None]
    for chart in shown:
        charts.mark_incidents(chart, marks)
    span = (d["overview"]["first_time"], d["overview"]["last_time"])
    timeline = charts.incident_timeline(d["incidents"], span)
    return [timeline, *shown] if timeline else shown


def _views(d: Document, csv_names: dict[str, str]) -> dict[str, View | None]:
    files = {row["capture_id"]: row["path"] for row in d["overview"]["captures"]}
    views: dict[str, View | None] = {}
    for name, table in TABLES.items():
        rows, total = table.rows(d), None
        if isinstance(rows, dict):
            rows, total = rows["rows"], rows["total"]
        views[name] = view(
            table.id,
            table.caption,
            table.columns,
            rows,
            total=total,
            csv=csv_names.get(table.csv),
            note=table.note,
            captures=files,
            dated=_spans_days(d),
        )
    return views


def _spans_days(d: Document) -> bool:
    first, last = d["overview"]["first_time"], d["overview"]["last_time"]
    return first is not None and first[:10] != last[:10]


def _timelines(d: Document, csv_names: dict[str, str]) -> list[dict[str, Any]]:
    files = {row["capture_id"]: row["path"] for row in d["overview"]["captures"]}
    timelines = []
    moment = f.dated if _spans_days(d) else f.moment
    for number, timeline in enumerate(d["groups"]["timelines"]):
        stories = []
        for index, story in enumerate(timeline["stories"]):
            generation = story["generation"]
            explained = with_reason(story)
            stories.append(
                {
                    "title": f"{moment(story['time'])}, generation "
                    f"{f.count(generation)}, {f.duration(story['duration_ms'])}",
                    "why": visible(explained["why"] or explained["detail"], 240),
                    "result": visible(story["result"], 600),
                    "view": view(
                        f"t-story-{number}-{index}",
                        f"Events up to generation {f.count(generation)}",
                        STORY,
                        story["events"],
                        captures=files,
                        csv=csv_names.get("group_events"),
                        limit=STORY_ROWS,
                        dated=_spans_days(d),
                    ),
                }
            )
        shown = len(timeline["events"])
        timelines.append(
            {
                "chart": f"group-{number}",
                "stories": stories,
                "shown": f.count(shown),
                "total": f.count(timeline["total"]),
                "cut": timeline["total"] > shown,
            }
        )
    return timelines


def _broker_log_text(d: Document) -> str:
    log = d["broker_log"]
    if not log:
        return ""

    def said(value: float | None) -> str:
        return f.NONE if value is None else f"{value:.3f}"

    spread = log["difference_ms"]
    return (
        f"{f.count(log['matched'])} of {f.count(log['logged'])} logged requests are in the capture "
        f"with an answer. The broker's total time less `service_ms`: p1 "
        f"{f.decimal(spread['p1'])} ms, median {f.decimal(spread['p50'])} ms, p99 "
        f"{f.decimal(spread['p99'])} ms. Rank correlation over the {f.count(log['slow_count'])} "
        f"slower than {f.count(log['slow_ms'])} ms: {said(log['rank_correlation_slow'])} "
        f"({said(log['rank_correlation_slow_latency'])} with the time behind earlier requests "
        f"left in, which the broker does not count; {f.count(log['queued_count'])} waited so)."
    )


def _network_text(d: Document) -> str:
    health = d["overview"]["health"]
    rtt = d["latency"]["handshake_rtt"]
    text = (
        f"{f.count(health['segment_count'])} TCP segments of Kafka connections: "
        f"{f.count(health['retransmitted_segment_count'])} retransmitted, "
        f"{f.count(health['out_of_order_segment_count'])} out of order, "
        f"{f.plural(health['gap_count'], 'gap')} with "
        f"{f.byte_size(health['missing_byte_count'])} missing."
    )
    if rtt["count"]:
        text += (
            f" Handshakes took {f.duration(rtt['p50'])} (p50), {f.duration(rtt['p99'])} (p99), "
            f"{f.duration(rtt['max'])} at most."
        )
    return text
