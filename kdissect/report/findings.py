"""What stands out: the few sentences that a reader should see first, each with its section."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kdissect import text as f
from kdissect.report.sections.latency import ANSWERS_MIN

Document = dict[str, Any]
Finding = dict[str, str]

SLOW_FACTOR = 3  # a client's p95 that is so many times that of all stands out
RETRANSMITTED_MIN = 0.001
UNCOMPRESSED_BYTES_MIN = 1_000_000
SMALL_BATCH_RECORDS, SMALL_BATCHES_MIN = 2, 1000
REBALANCE_LONG_MS = 3000
_ORDER = {"bad": 0, "warn": 1, "info": 2}


def _finding(level: str, section: str, title: str, text: str) -> Finding:
    return {"level": level, "section": section, "title": title, "text": text}


def _health(d: Document) -> Iterator[Finding]:
    overview = d["overview"]
    health = overview["health"]
    missing = health["missing_byte_count"]
    if missing:
        part = missing / (missing + health["byte_count"])
        yield _finding(
            "bad",
            "network",
            f"{f.byte_size(missing)} of Kafka traffic were not captured",
            f"{f.share(part)} of the bytes in {f.plural(health['gap_count'], 'gap')}: counts and "
            "latencies near them are lower bounds.",
        )
    damaged = [c for c in overview["captures"] if c["error"] and c["format"] != "unknown"]
    if damaged:
        yield _finding(
            "bad",
            "overview",
            f"{f.plural(len(damaged), 'capture')} could not be read to the end",
            f"{damaged[0]['path']}: {damaged[0]['error']}",
        )
    truncated = sum(c["truncated_packet_count"] for c in overview["captures"])
    if truncated:
        yield _finding(
            "bad",
            "overview",
            f"{f.plural(truncated, 'packet')} cut by the snap length",
            "Their bytes are missing for good: capture with a snap length of 0 (tcpdump -s 0).",
        )
    closed = [row for row in d["network"]["other_connections"]["rows"] if row["is_tls"]]
    if closed:
        yield _finding(
            "warn",
            "network",
            f"{f.plural(len(closed), 'TLS connection')} not decrypted",
            "Only their handshakes are known. A key log (--keylog) opens them.",
        )
    if not overview["kafka_connections"]:
        yield _finding(
            "bad", "overview", "No Kafka traffic found", "Every connection speaks something else."
        )


def _latency(d: Document) -> Iterator[Finding]:
    everyone = d["latency"]["all"]
    if not everyone["count"]:
        return
    clients: list[Document] = []
    for answers_min in (ANSWERS_MIN, 5, 1):
        clients = [
            row
            for row in d["latency"]["clients"]["rows"]
            if not row["is_broker"] and row["answers"] >= answers_min
        ]
        if any(row["p95"] >= everyone["p95"] for row in clients):
            break  # else a client of few answers is behind the figure of all
    if clients:
        slowest = max(clients, key=lambda row: row["p95"])
        outlier = slowest["p95"] >= SLOW_FACTOR * everyone["p95"] and slowest["p95"] > 20
        yield _finding(
            "warn" if outlier else "info",
            "latency",
            f"Slowest client: {f.client(slowest)}",
            f"p95 {f.duration(slowest['p95'])} over {f.plural(slowest['answers'], 'answer')}, "
            f"all clients {f.duration(everyone['p95'])}; longest "
            f"{f.duration(slowest['max'])}. Long polls are left out.",
        )
    apis = [row for row in d["latency"]["apis"]["rows"] if row["answers"] >= ANSWERS_MIN]
    if apis:
        slowest = max(apis, key=lambda row: row["p95"])
        yield _finding(
            "info",
            "latency",
            f"Slowest API: {slowest['api']}",
            f"p50 {f.duration(slowest['p50'])}, p95 {f.duration(slowest['p95'])}, "
            f"p99 {f.duration(slowest['p99'])} over {f.plural(slowest['answers'], 'answer')}.",
        )


def _errors(d: Document) -> Iterator[Finding]:
    real = [row for row in d["errors"]["codes"] if not row["routine"]]
    total = sum(row["exchanges"] for row in real)
    if real:
        top = real[0]
        where = f" ({', '.join(top['topics'])})" if top["topics"] else ""
        steps = d["errors"]["exchanges"] - total
        also = (
            f" {f.plural(steps, 'more answer')} told a routine step of the protocol."
            if steps > 0
            else ""
        )
        final = sum(row["exchanges"] for row in real if not row["is_retriable"])
        yield _finding(
            "bad" if final else "warn",
            "errors",
            f"{f.plural(total, 'answer')} with an error",
            f"Most frequent: {top['error']} in {top['api']}{where}, {f.count(top['count'])}×. "
            f"{_retriable(total, final)}{also}",
        )
    unanswered = sum(row["count"] for row in d["errors"]["unanswered"])
    if unanswered:
        top = d["errors"]["unanswered"][0]
        lost = d["overview"]["response_missing"] + d["overview"]["connection_closed"]
        closed = d["overview"]["connection_closed"]
        yield _finding(
            "warn" if closed else "info",
            "errors",
            f"{f.plural(lost, 'request')} without an answer",
            f"{_unanswered(closed, lost - closed)} Most: {top['api']} of {f.client(top)}.",
        )


def _retriable(total: int, final: int) -> str:
    if final == total:
        return "None of them can simply be tried again."
    if not final:
        return "All of them may be tried again."
    return f"{f.count(final)} of them cannot simply be tried again."


def _unanswered(closed: int, open_: int) -> str:
    if not closed:
        return "They had none when the capture ended."
    if not open_:
        return "Their connections were closed before."
    return (
        f"{f.count(closed)} because the connection was closed, "
        f"{f.count(open_)} had none when the capture ended."
    )


def _groups(d: Document) -> Iterator[Finding]:
    groups = d["groups"]["groups"]["rows"]
    rebalances = sum(row["rebalances"] for row in groups)
    if rebalances:
        busiest = max(groups, key=lambda row: (row["rebalances"], row["rebalance_ms"] or 0))
        longest = max(groups, key=lambda row: row["rebalance_ms_max"] or 0)
        slow = (longest["rebalance_ms_max"] or 0) >= REBALANCE_LONG_MS
        yield _finding(
            "warn" if slow else "info",
            "groups",
            f"{f.plural(rebalances, 'rebalance')} in {f.plural(len(groups), 'group')}",
            f"Most in {busiest['group_id']}: {f.count(busiest['rebalances'])} with "
            f"{f.plural(busiest['members'], 'member')}. Longest: "
            f"{f.duration(longest['rebalance_ms_max'])} in {longest['group_id']}.",
        )
    if d["lag"] and d["lag"]["groups"]["rows"]:
        row = d["lag"]["groups"]["rows"][0]
        if row["lag_at_end"]:
            yield _finding(
                "info",
                "lag",
                f"{row['group_id']} is {f.count(row['lag_at_end'])} records behind at the end",
                f"Summed over {f.plural(row['partitions'], 'partition')}"
                + (
                    f", {f.count(row['unknown_partitions'])} of them not known"
                    if row["unknown_partitions"]
                    else ""
                )
                + f"; the most behind at any commit was {f.count(row['lag_max'])} in one.",
            )


def _readiness(d: Document) -> Iterator[Finding]:
    readiness = d["readiness"]
    breaks = readiness["counts"]["breaks"]
    if breaks:
        first = readiness["clients"]["rows"][0]
        yield _finding(
            "warn",
            "readiness",
            f"{f.plural(breaks, 'client')} would break on Kafka {readiness['target']}",
            f"{f.client(first)}: {', '.join((first['requests'] + first['old_formats'])[:4])}.",
        )


def _transactions(d: Document) -> Iterator[Finding]:
    counts = {row["outcome"]: row["count"] for row in d["transactions"]["outcomes"]}
    failed = {name: counts[name] for name in ("abort", "fenced", "open") if counts.get(name)}
    if failed:
        said = ", ".join(f"{f.count(number)} {name}" for name, number in failed.items())
        yield _finding(
            "warn" if counts.get("fenced") or counts.get("open") else "info",
            "transactions",
            f"{f.count(sum(failed.values()))} of {f.plural(sum(counts.values()), 'transaction')} "
            "did not commit",
            f"{said}.",
        )


def _network(d: Document) -> Iterator[Finding]:
    health = d["overview"]["health"]
    segments, again = health["segment_count"], health["retransmitted_segment_count"]
    part = again / segments if segments else 0
    if again:
        rows = d["network"]["lossy_connections"]["rows"]
        worst = max(rows, key=lambda row: row["retransmitted_segment_count"])
        yield _finding(
            "warn" if part >= RETRANSMITTED_MIN else "info",
            "network",
            f"{f.plural(again, 'retransmitted segment')} ({f.share(part)})",
            f"Most on {worst['client_address']} to {worst['broker']}"
            f"{' (' + worst['client_ids'] + ')' if worst['client_ids'] else ''}: "
            f"{f.count(worst['retransmitted_segment_count'])}.",
        )
    serious = [row for row in d["network"]["anomaly_kinds"] if row["severity"] == "error"]
    if serious:
        kinds = ", ".join(f"{row['kind']} {f.count(row['count'])}" for row in serious[:4])
        yield _finding(
            "bad",
            "anomalies",
            f.plural(sum(row["count"] for row in serious), "serious anomaly", "serious anomalies"),
            f"{kinds}.",
        )


def _throttling(d: Document) -> Iterator[Finding]:
    throttling = d["throttling"]
    if throttling["responses"]:
        top = throttling["clients"]["rows"][0]
        yield _finding(
            "warn",
            "throttling",
            f"{f.plural(throttling['responses'], 'answer')} throttled",
            f"{f.duration(throttling['throttle_ms'])} in all; most: {f.client(top)} in "
            f"{top['api']}, {f.duration(top['throttle_ms'])}.",
        )


def _topics(d: Document) -> Iterator[Finding]:
    written = [row for row in d["topics"]["codecs"] if row["direction"] == "write"]
    total = sum(row["bytes"] for row in written)
    plain = sum(row["bytes"] for row in written if row["codec"] == "none")
    if plain >= UNCOMPRESSED_BYTES_MIN:
        yield _finding(
            "info",
            "topics",
            f"{f.share(plain / total)} of the written bytes are not compressed",
            f"{f.byte_size(plain)} of {f.byte_size(total)}.",
        )
    batches = sum(row["batches"] for row in written)
    records = sum(row["records"] or 0 for row in written)
    if batches >= SMALL_BATCHES_MIN and records / batches < SMALL_BATCH_RECORDS:
        yield _finding(
            "info",
            "topics",
            f"Batches hold {f.decimal(records / batches)} records on average",
            f"{f.plural(batches, 'batch', 'batches')} were written; linger.ms and batch.size "
            "of the producers decide how many records share one.",
        )


_RULES: tuple[Callable[[Document], Iterator[Finding]], ...] = (
    *(_health, _errors, _readiness, _latency, _groups),
    *(_transactions, _throttling, _network, _topics),
)


def find(document: Document) -> dict[str, Any]:
    """{"findings": in order of weight, "clear": what was looked for and is not there}."""
    findings = [finding for rule in _RULES for finding in rule(document)]
    findings.sort(key=lambda finding: _ORDER[finding["level"]])
    return {"findings": findings, "clear": _clear(document)}


def _clear(d: Document) -> list[str]:
    overview = d["overview"]
    checks = (
        ("no bytes missing", not overview["health"]["missing_byte_count"]),
        ("no retransmissions", not overview["health"]["retransmitted_segment_count"]),
        (
            "every request answered",
            not overview["response_missing"] + overview["connection_closed"],
        ),
        ("no errors", not overview["failed"]),
        ("no throttling", not d["throttling"]["responses"]),
        ("no anomalies", not overview["anomalies"]),
    )
    return [text for text, holds in checks if holds and overview["exchanges"]]
