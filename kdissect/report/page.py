"""The document of a report as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from kdissect import text as f
from kdissect.incidents.model import INFO
from kdissect.report import charts, table_columns
from kdissect.report.charts import Chart
from kdissect.report.sections import readiness
from kdissect.report.table_columns import View, view
from kdissect.text import visible

LEVEL_NAMES = {"bad": "Look at this", "warn": "Worth a look", "info": "Good to know"}
STORY_ROWS = 15  # events of a rebalance
_DIRECTIONS = {"write": "writes", "read": "reads", "replicate": "replicates"}

Document = dict[str, Any]


def render(document: Document, name: str, csv_names: dict[str, str], library: str) -> str:
    """The page. library: the script that sets `window.vegaEmbed`; csv_names: table -> file."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = lambda value: visible(value, 1000)
    environment.filters["moment"] = f.moment
    style, page_script = _asset("style.css"), _asset("page.js")
    found = {chart.id: chart for chart in _charts(document)}
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
        charts=found,
        timelines=_timelines(document, csv_names),
        readiness_text=readiness.text(document["readiness"]),
        broker_log_text=_broker_log_text(document),
        network_text=_network_text(document),
        csv_of=lambda table: csv_names.get(table, ""),
        style=Markup(style),
        plain_style=Markup(environment.get_template("plain.css").render(views=shown)),
        script_hashes=Markup(" ".join(_hash(script) for script in scripts)),
        charts_json=json_script({key: chart.to_json() for key, chart in found.items()}),
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
    found = [
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
    shown = [chart for chart in found if chart is not None]
    for chart in shown:
        charts.mark_incidents(chart, marks)
    timeline = charts.incident_timeline(d["incidents"])
    return [timeline, *shown] if timeline else shown


def _views(d: Document, csv_names: dict[str, str]) -> dict[str, View | None]:
    files = {row["capture_id"]: row["path"] for row in d["overview"]["captures"]}

    def made(
        id_: str,
        caption: str,
        columns: tuple[table_columns.Column, ...],
        rows: Any,
        csv: str | None = None,
        note: str = "",
    ) -> View | None:
        total = None
        if isinstance(rows, dict):
            rows, total = rows["rows"], rows["total"]
        return view(
            id_,
            caption,
            columns,
            rows,
            total=total,
            csv=csv_names.get(csv) if csv else None,
            note=note,
            captures=files,
            dated=_spans_days(d),
        )

    latency, errors, topics = d["latency"], d["errors"], d["topics"]
    groups, transactions, network = d["groups"], d["transactions"], d["network"]
    captures = [
        {**row, "ignored": _reasons(row["ignored_reasons"]), "file": _file_name(row["path"])}
        for row in d["overview"]["captures"]
    ]
    topic_clients = {
        "total": topics["clients"]["total"],
        "rows": [
            {**row, "direction": _DIRECTIONS[row["direction"]]} for row in topics["clients"]["rows"]
        ],
    }
    log, lag = d["broker_log"], d["lag"]
    return {
        "captures": made(
            "t-captures", "Capture files", table_columns.CAPTURES, captures, "captures"
        ),
        "protocols": made(
            "t-protocols",
            "Connections by protocol",
            table_columns.PROTOCOLS,
            d["overview"]["protocols"] if len(d["overview"]["protocols"]) > 1 else [],
        ),
        "brokers": made(
            "t-brokers", "Brokers", table_columns.BROKERS_COLUMNS, d["overview"]["brokers"]
        ),
        "latency_apis": made(
            "t-apis", "By API", table_columns.LATENCY_APIS, latency["apis"], "latency_apis"
        ),
        "time_spent": made(
            "t-time-spent",
            "Where the time of answers went",
            table_columns.TIME_SPENT,
            sorted(
                (row for row in latency["apis"]["rows"] if row["service_ms"]),
                key=lambda row: (-row["service_ms"], row["api"] or ""),
            ),
        ),
        "latency_clients": made(
            "t-latency-clients",
            "By client",
            table_columns.LATENCY_CLIENTS,
            latency["clients"],
            "latency_clients",
        ),
        "latency_brokers": made(
            "t-latency-brokers",
            "By broker",
            table_columns.LATENCY_BROKERS,
            latency["brokers"],
            "latency_brokers",
        ),
        "slowest": made("t-slowest", "Slowest answers", table_columns.SLOWEST, latency["slowest"]),
        "broker_times": made(
            "t-broker-times",
            "Broker's time less the capture's, by API",
            table_columns.BROKER_TIMES,
            [{"api": "all", **log["difference_ms"]}, *log["by_api"]] if log else [],
            "broker_times",
        ),
        "error_codes": made("t-codes", "Error codes", table_columns.ERROR_CODES, errors["codes"]),
        "error_places": made(
            "t-places",
            "Where they are",
            table_columns.ERROR_PLACES,
            errors["places"],
            "errors",
            "The file has every single one.",
        ),
        "unanswered": made(
            "t-unanswered",
            "Requests without an answer",
            table_columns.UNANSWERED,
            errors["unanswered"],
        ),
        "clients": made(
            "t-clients", "Clients by id and address", table_columns.CLIENTS, d["clients"], "clients"
        ),
        "readiness": made(
            "t-readiness", "Clients by verdict", table_columns.READINESS, d["readiness"]["clients"]
        ),
        "topics": made(
            "t-topics", "Topics", table_columns.TOPICS_COLUMNS, topics["topics"], "topics"
        ),
        "topic_clients": made(
            "t-topic-clients",
            "Who writes, who reads",
            table_columns.TOPIC_CLIENTS,
            topic_clients,
            "topic_clients",
        ),
        "codecs": made(
            "t-codecs",
            "Codecs",
            table_columns.CODECS,
            topics["codecs"],
            note="Compression: bytes of the records to their bytes in the batch.",
        ),
        "groups": made(
            "t-groups", "Groups", table_columns.GROUPS_COLUMNS, groups["groups"], "groups"
        ),
        "rebalances": made(
            "t-rebalances",
            "Longest rebalances",
            table_columns.REBALANCES,
            {**groups["rebalances"], "rows": [_told(row) for row in groups["rebalances"]["rows"]]},
            "rebalances",
        ),
        "lag": made(
            "t-lag", "Lag by partition", table_columns.LAG, lag["partitions"] if lag else [], "lag"
        ),
        "outcomes": made(
            "t-outcomes", "How they ended", table_columns.OUTCOMES, transactions["outcomes"]
        ),
        "producers": made(
            "t-producers",
            "By transactional id",
            table_columns.PRODUCERS,
            transactions["producers"],
            "transaction_producers",
        ),
        "transactions": made(
            "t-transactions",
            "Transactions, those without a commit first",
            table_columns.TRANSACTIONS_COLUMNS,
            transactions["transactions"],
            "transactions",
        ),
        "throttling": made(
            "t-throttling",
            "Who was throttled",
            table_columns.THROTTLING,
            d["throttling"]["clients"],
            "throttling",
        ),
        "lossy": made(
            "t-lossy",
            "Connections with retransmissions, reordering, gaps or closed windows",
            table_columns.LOSSY,
            network["lossy_connections"],
            "connections",
        ),
        "others": made(
            "t-others",
            "Connections that are not Kafka, or not decrypted",
            table_columns.OTHERS,
            network["other_connections"],
            "connections",
        ),
        "anomaly_kinds": made(
            "t-kinds", "Kinds", table_columns.ANOMALY_KINDS, network["anomaly_kinds"]
        ),
        "anomalies": made(
            "t-anomalies",
            "Examples of each kind",
            table_columns.ANOMALIES_COLUMNS,
            network["anomaly_examples"],
            "anomalies",
            "The file has every single one.",
        ),
    }


def _told(rebalance: dict[str, Any]) -> dict[str, Any]:
    """A rebalance with its reason apart from who took part."""
    who, _, why = (rebalance["detail"] or "").rpartition("why: ")
    return {**rebalance, "detail": who.rstrip("; "), "why": why}


def _spans_days(d: Document) -> bool:
    first, last = d["overview"]["first_time"], d["overview"]["last_time"]
    return first is not None and first[:10] != last[:10]


def _file_name(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _reasons(reasons: dict[str, int]) -> str:
    return ", ".join(f"{name} {f.count(number)}" for name, number in reasons.items())


def _timelines(d: Document, csv_names: dict[str, str]) -> list[dict[str, Any]]:
    files = {row["capture_id"]: row["path"] for row in d["overview"]["captures"]}
    found = []
    moment = f.dated if _spans_days(d) else f.moment
    for number, timeline in enumerate(d["groups"]["timelines"]):
        stories = []
        for index, story in enumerate(timeline["stories"]):
            generation = story["generation"]
            told = _told(story)
            stories.append(
                {
                    "title": f"{moment(story['time'])}, generation "
                    f"{f.count(generation)}, {f.duration(story['duration_ms'])}",
                    "why": visible(told["why"] or told["detail"], 240),
                    "result": visible(story["result"], 600),
                    "view": view(
                        f"t-story-{number}-{index}",
                        f"Events up to generation {f.count(generation)}",
                        table_columns.STORY,
                        story["events"],
                        captures=files,
                        csv=csv_names.get("group_events"),
                        limit=STORY_ROWS,
                        dated=_spans_days(d),
                    ),
                }
            )
        shown = len(timeline["events"])
        found.append(
            {
                "chart": f"group-{number}",
                "stories": stories,
                "shown": f.count(shown),
                "total": f.count(timeline["total"]),
                "cut": timeline["total"] > shown,
            }
        )
    return found


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
