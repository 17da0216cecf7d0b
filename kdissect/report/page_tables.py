"""The tables of the page: each with its caption, its columns and its rows of the document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kdissect import text as f
from kdissect.report import table_columns as columns

Document = dict[str, Any]
_DIRECTIONS = {"write": "writes", "read": "reads", "replicate": "replicates"}


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of the page.

    rows: takes the document; returns a list of rows, or `rows` with their `total`. csv: the name
    of the table whose CSV file has all rows.
    """

    id: str
    caption: str
    columns: tuple[columns.Column, ...]
    rows: Callable[[Document], Any]
    csv: str = ""
    note: str = ""


def with_reason(rebalance: dict[str, Any]) -> dict[str, Any]:
    """Return a rebalance with its reason in a column of its own, apart from its members."""
    members, _, why = (rebalance["detail"] or "").rpartition("why: ")
    return {**rebalance, "detail": members.rstrip("; "), "why": why}


def _captures(d: Document) -> list[dict[str, Any]]:
    return [
        {
            **row,
            "file": row["path"].replace("\\", "/").rpartition("/")[2],
            "ignored": ", ".join(
                f"{name} {f.count(number)}" for name, number in row["ignored_reasons"].items()
            ),
        }
        for row in d["overview"]["captures"]
    ]


def _protocols(d: Document) -> list[dict[str, Any]]:
    protocols: list[dict[str, Any]] = d["overview"]["protocols"]
    return protocols if len(protocols) > 1 else []


def _time_spent(d: Document) -> list[dict[str, Any]]:
    rows = (row for row in d["latency"]["apis"]["rows"] if row["service_ms"])
    return sorted(rows, key=lambda row: (-row["service_ms"], row["api"] or ""))


def _broker_times(d: Document) -> list[dict[str, Any]]:
    log = d["broker_log"]
    return [{"api": "all", **log["difference_ms"]}, *log["by_api"]] if log else []


def _topic_clients(d: Document) -> dict[str, Any]:
    clients = d["topics"]["clients"]
    rows = [{**row, "direction": _DIRECTIONS[row["direction"]]} for row in clients["rows"]]
    return {**clients, "rows": rows}


def _rebalances(d: Document) -> dict[str, Any]:
    rebalances = d["groups"]["rebalances"]
    return {**rebalances, "rows": [with_reason(row) for row in rebalances["rows"]]}


TABLES = {
    "captures": PageTable("t-captures", "Capture files", columns.CAPTURES, _captures, "captures"),
    "protocols": PageTable("t-protocols", "Connections by protocol", columns.PROTOCOLS, _protocols),
    "brokers": PageTable(
        "t-brokers", "Brokers", columns.BROKERS_COLUMNS, lambda d: d["overview"]["brokers"]
    ),
    "latency_apis": PageTable(
        "t-apis", "By API", columns.LATENCY_APIS, lambda d: d["latency"]["apis"], "latency_apis"
    ),
    "time_spent": PageTable(
        "t-time-spent", "Where the time of answers went", columns.TIME_SPENT, _time_spent
    ),
    "latency_clients": PageTable(
        "t-latency-clients",
        "By client",
        columns.LATENCY_CLIENTS,
        lambda d: d["latency"]["clients"],
        "latency_clients",
    ),
    "latency_brokers": PageTable(
        "t-latency-brokers",
        "By broker",
        columns.LATENCY_BROKERS,
        lambda d: d["latency"]["brokers"],
        "latency_brokers",
    ),
    "slowest": PageTable(
        "t-slowest", "Slowest answers", columns.SLOWEST, lambda d: d["latency"]["slowest"]
    ),
    "broker_times": PageTable(
        "t-broker-times",
        "Broker's time less the capture's, by API",
        columns.BROKER_TIMES,
        _broker_times,
        "broker_times",
    ),
    "error_codes": PageTable(
        "t-codes", "Error codes", columns.ERROR_CODES, lambda d: d["errors"]["codes"]
    ),
    "error_places": PageTable(
        "t-places",
        "Where they are",
        columns.ERROR_PLACES,
        lambda d: d["errors"]["places"],
        "errors",
        note="The file has every single one.",
    ),
    "unanswered": PageTable(
        "t-unanswered",
        "Requests without an answer",
        columns.UNANSWERED,
        lambda d: d["errors"]["unanswered"],
    ),
    "clients": PageTable(
        "t-clients", "Clients by id and address", columns.CLIENTS, lambda d: d["clients"], "clients"
    ),
    "sessions": PageTable(
        "t-sessions",
        "Connections by TLS and SASL",
        columns.SESSIONS,
        lambda d: d["security"]["sessions"],
    ),
    "certificates": PageTable(
        "t-certificates",
        "Certificates, the next to expire first",
        columns.CERTIFICATES,
        lambda d: d["security"]["certificates"],
        "certificates",
    ),
    "logins": PageTable(
        "t-logins",
        "Logins by principal",
        columns.LOGINS,
        lambda d: d["security"]["logins"],
        "logins",
    ),
    "readiness": PageTable(
        "t-readiness", "Clients by verdict", columns.READINESS, lambda d: d["readiness"]["clients"]
    ),
    "topics": PageTable(
        "t-topics", "Topics", columns.TOPICS_COLUMNS, lambda d: d["topics"]["topics"], "topics"
    ),
    "topic_clients": PageTable(
        "t-topic-clients",
        "Who writes, who reads",
        columns.TOPIC_CLIENTS,
        _topic_clients,
        "topic_clients",
    ),
    "codecs": PageTable(
        "t-codecs",
        "Codecs",
        columns.CODECS,
        lambda d: d["topics"]["codecs"],
        note="Compression: bytes of the records to their bytes in the batch.",
    ),
    "groups": PageTable(
        "t-groups", "Groups", columns.GROUPS_COLUMNS, lambda d: d["groups"]["groups"], "groups"
    ),
    "rebalances": PageTable(
        "t-rebalances", "Longest rebalances", columns.REBALANCES, _rebalances, "rebalances"
    ),
    "lag": PageTable(
        "t-lag",
        "Lag by partition",
        columns.LAG,
        lambda d: d["lag"]["partitions"] if d["lag"] else [],
        "lag",
    ),
    "outcomes": PageTable(
        "t-outcomes", "How they ended", columns.OUTCOMES, lambda d: d["transactions"]["outcomes"]
    ),
    "producers": PageTable(
        "t-producers",
        "By transactional id",
        columns.PRODUCERS,
        lambda d: d["transactions"]["producers"],
        "transaction_producers",
    ),
    "transactions": PageTable(
        "t-transactions",
        "Transactions, those without a commit first",
        columns.TRANSACTIONS_COLUMNS,
        lambda d: d["transactions"]["transactions"],
        "transactions",
    ),
    "throttling": PageTable(
        "t-throttling",
        "Who was throttled",
        columns.THROTTLING,
        lambda d: d["throttling"]["clients"],
        "throttling",
    ),
    "lossy": PageTable(
        "t-lossy",
        "Connections with retransmissions, reordering, gaps or closed windows",
        columns.LOSSY,
        lambda d: d["network"]["lossy_connections"],
        "connections",
    ),
    "others": PageTable(
        "t-others",
        "Connections that are not Kafka, or not decrypted",
        columns.OTHERS,
        lambda d: d["network"]["other_connections"],
        "connections",
    ),
    "anomaly_kinds": PageTable(
        "t-kinds", "Kinds", columns.ANOMALY_KINDS, lambda d: d["network"]["anomaly_kinds"]
    ),
    "anomalies": PageTable(
        "t-anomalies",
        "Examples of each kind",
        columns.ANOMALIES_COLUMNS,
        lambda d: d["network"]["anomaly_examples"],
        "anomalies",
        note="The file has every single one.",
    ),
}
