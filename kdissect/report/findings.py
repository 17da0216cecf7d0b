"""Ranks the few findings that a reader should see first; those that cost most are on top.

A finding says what happened, since when, to whom, with which exchanges and packets as evidence,
and which command shows more. Its level says how bad it is: `bad` if requests failed for good or
data was not seen, `warn` if users lost time, else `info`. Within a level findings are in the order
of the time that was lost, then of the requests that were hit; `cost` says these figures. A fact
that holds in every capture (some API is the slowest one) is no finding. Incidents come first, and
findings that are their consequences are left out.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from kdissect import text as f
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import INTER_BROKER_APIS
from kdissect.report.database import ReportDatabase
from kdissect.report.exchange_facts import quantile
from kdissect.report.sections.latency import ANSWERS_MIN
from kdissect.text import shell_word

Document = dict[str, Any]
Finding = dict[str, Any]

EVIDENCE = 5  # exchanges and packets that a finding names
SHOWN = 3  # findings of a kind
SLOW_FACTOR, _SLOW_MS = 3, 20.0  # a client's p95 beside that of other clients of the same API
_MOMENT_MS, _CHANCE = 100, 0.01
API_SLOW_MS, API_STUCK_MS = 100.0, 1000.0  # p95 of an API that makes an info, a warning
RETRANSMITTED_MIN = 0.001
PASSING_MS = 1000.0  # an error that a client's next success ends within this is an info
UNCOMPRESSED_BYTES_MIN = 1_000_000
SMALL_BATCH_RECORDS, SMALL_BATCHES_MIN = 2, 1000
REBALANCE_LONG_MS = 3000
# Kind of an incident -> the section of the page with the details.
_SECTIONS = {
    **dict.fromkeys(("broker_stall", "slow_upload"), "latency"),
    **dict.fromkeys(("broker_unreachable", "advertised_address_unreachable"), "network"),
    **dict.fromkeys(("idle_connection_cut", "connection_storm"), "network"),
    "tls_failure": "security",
    **dict.fromkeys(("capture_loss", "clock_step"), "overview"),
    **dict.fromkeys(("login_failures", "retry_storm", "leader_change"), "errors"),
    **dict.fromkeys(("rebalance_loop", "member_too_slow"), "groups"),
    **dict.fromkeys(("duplicate_records", "out_of_order_records", "consumer_stuck"), "topics"),
    "transaction_open": "transactions",
    "metadata_storm": "traffic",
    "throttled": "throttling",
}
# Kind -> the sections whose findings are its consequences while it lasts.
_EXPLAINED = {
    "broker_stall": ("latency", "groups"),
    "broker_unreachable": ("latency", "errors", "groups"),
    "idle_connection_cut": ("errors",),
    "slow_upload": ("latency",),
    "login_failures": ("errors",),
    "leader_change": ("errors",),
    "retry_storm": ("errors",),
    "rebalance_loop": ("groups", "errors"),
    "member_too_slow": ("groups", "errors"),
    "transaction_open": ("transactions",),
}
_BROKERS_APIS = frozenset(catalog.apis()[key].name for key in INTER_BROKER_APIS)
_ORDER = {"bad": 0, "warn": 1, "info": 2}


class _Facts:
    """The inputs of the rules: the document, and the database for evidence."""

    def __init__(self, database: ReportDatabase, document: Document) -> None:
        self.database, self.document = database, document
        self.paths = {row["capture_id"]: row["path"] for row in document["overview"]["captures"]}

    def evidence(
        self, condition: str, values: tuple[Any, ...] = (), order: str = "time", *,
        is_counted: bool = True,
    ) -> Finding:  # fmt: skip
        """Fields of a finding about the exchanges of `x` that fulfil a condition in SQL.

        is_counted: the number of these exchanges ranks the finding.
        """
        row = self.database.row(
            f"""
            SELECT count(*) AS request_count, min(time) AS since,
              list(exchange_id ORDER BY {order}, exchange_id)[:{EVIDENCE}] AS exchange_ids,
              list(packet ORDER BY {order}, exchange_id)[:{EVIDENCE}] AS packets,
              list(capture_id ORDER BY {order}, exchange_id)[1] AS capture_id
            FROM x WHERE {condition}
            """,
            values,
        )
        path = self.paths.get(row.pop("capture_id"))
        ids = [str(ident) for ident in row["exchange_ids"] or []]
        if not is_counted:
            row["request_count"] = None
        return {**row, "exchange_ids": ids, "packets": row["packets"] or [], "capture": path}

    def command(self, verb: str, *options: str, capture: str | None = None) -> str:
        """A command over a capture, which a shell takes as it is."""
        path = capture or next(iter(self.paths.values()), "CAPTURE")
        return " ".join(shell_word(word) for word in ("kdissect", verb, path, *options))


def _finding(
    level: str, section: str, title: str, text: str, *, whom: str = "", command: str = "",
    time_lost_ms: float | None = None, **evidence: Any,
) -> Finding:  # fmt: skip
    count = evidence.get("request_count")
    cost = [f"{f.duration(time_lost_ms)} lost"] if time_lost_ms else []
    cost += [f.plural(count, "request")] if count else []
    return {
        "level": level,
        "section": section,
        "title": title,
        "text": text,
        "cost": ", ".join(cost),
        "time_lost_ms": time_lost_ms,
        "request_count": count,
        "since": evidence.get("since"),
        "until": evidence.get("until"),
        "kind": evidence.get("kind"),
        "whom": whom,
        "exchange_ids": evidence.get("exchange_ids", []),
        "packets": evidence.get("packets", []),
        "next_command": command,
    }


def _incidents(facts: _Facts) -> Iterator[Finding]:
    """The incidents, which are the only source of their conclusions."""
    for row in facts.document["incidents"]:
        ids = row["evidence"]["exchange_ids"]
        packets = facts.database.rows(
            f"SELECT packet FROM x WHERE exchange_id IN ({', '.join(ids) or 'NULL'}) "
            f"AND packet IS NOT NULL ORDER BY time LIMIT {EVIDENCE}"
        )
        yield _finding(
            row["severity"],
            _SECTIONS[row["kind"]],
            f"{row['kind'].replace('_', ' ').capitalize()}: {row['subject']}",
            row["text"],
            whom=row["subject"],
            command=row["next_command"],
            time_lost_ms=row["time_lost_ms"],
            request_count=row["request_count"],
            since=row["start_time"],
            until=row["end_time"],
            kind=row["kind"],
            exchange_ids=ids[:EVIDENCE],
            packets=[packet["packet"] for packet in packets],
        )


def _is_consequence(finding: Finding, incidents: list[Finding]) -> bool:
    """True if an incident brought the finding about: it began at that time, in its sections."""
    return any(
        finding["section"] in _EXPLAINED.get(incident["kind"], ())
        # requests that failed for good have another reason, refused logins apart
        and (finding["level"] != "bad" or incident["kind"] == "login_failures")
        and incident["since"] <= (finding["since"] or "") <= incident["until"]
        for incident in incidents
    )


def _health(facts: _Facts) -> Iterator[Finding]:
    overview = facts.document["overview"]
    read = overview["read"]
    damaged = [c for c in overview["captures"] if c["error"] and c["format"] != "unknown"]
    if damaged:
        yield _finding(
            "bad",
            "overview",
            f"{f.plural(len(damaged), 'capture')} could not be read to the end",
            f"{damaged[0]['path']}: {damaged[0]['error']}",
            command=shlex.join(["capinfos", damaged[0]["path"]]),
        )
    unread = read["unread_tls_connections"]
    if unread:
        yield _finding(
            "warn",
            "network",
            f"{f.plural(unread, 'TLS connection')} not decrypted",
            f"Only their handshakes are known; what this page says is of the other "
            f"{f.plural(overview['kafka_connections'], 'connection')}. A key log opens them.",
            command=facts.command("report", "--keylog", "FILE"),
        )
    if halves := read["request_only_connections"] + read["response_only_connections"]:
        yield _finding(
            "bad",
            "network",
            f"{f.plural(halves, 'connection')} captured in one direction",
            f"Requests only: {f.count(read['request_only_connections'])}, responses only: "
            f"{f.count(read['response_only_connections'])}. Their latency is unknown, and so are "
            "errors without responses.",
            command=facts.command(
                "sql",
                "from connections where is_kafka "
                "and least(request_segment_count, response_segment_count) = 0",
            ),
        )
    if not overview["kafka_connections"]:
        protocols = ", ".join(
            f"{f.count(row['connections'])} {row['protocol']}" for row in overview["protocols"]
        )
        yield _finding(
            "bad", "overview", "No Kafka traffic found",
            f"Connections by protocol: {protocols or 'none'}.",
            command=facts.command("sql", "select protocol, count(*) from connections group by all"),
        )  # fmt: skip


def _slow_clients(facts: _Facts) -> Iterator[Finding]:
    """Clients whose answers of an API take longer than those of the API's other clients.

    The usual time is the median over the clients' p95, so a busy client does not decide it. Slow
    answers of one moment are one event, and one of many clients is slow by chance.
    """
    database = facts.database
    rows = database.rows(
        f"""
        WITH clients AS (
          SELECT api, client_id, client_ip, count(*) AS answers,
            {quantile(database, "service_ms", 0.95)} AS p95
          FROM x WHERE wait = 'answer' AND service_ms IS NOT NULL AND NOT is_broker
          GROUP BY ALL HAVING count(*) >= {ANSWERS_MIN}
        ), usual AS (
          SELECT api, median(p95) AS usual_p95 FROM clients GROUP BY api HAVING count(*) >= 3
        ), slow AS (
          SELECT * FROM clients JOIN usual USING (api)
          WHERE p95 >= {SLOW_FACTOR} * usual_p95 AND p95 - usual_p95 >= {_SLOW_MS}
        )
        SELECT s.*, sum(x.service_ms - s.usual_p95) AS lost_ms,
          count(DISTINCT epoch_ms(x.time) // {_MOMENT_MS}) AS slow_moments,
          (SELECT count(*) FROM clients) AS compared
        FROM slow s JOIN x ON x.api = s.api AND x.client_ip = s.client_ip
          AND x.client_id IS NOT DISTINCT FROM s.client_id
        WHERE x.wait = 'answer' AND x.service_ms > s.usual_p95
        GROUP BY ALL ORDER BY lost_ms DESC, api, client_id
        """
    )
    proven = [
        row
        for row in rows
        if _is_beyond_chance(row["slow_moments"], row["answers"], row["compared"])
    ]
    for row in proven[:SHOWN]:
        evidence = facts.evidence(
            "wait = 'answer' AND service_ms > ? AND api = ? AND client_ip = ? "
            "AND client_id IS NOT DISTINCT FROM ?",
            (row["usual_p95"], row["api"], row["client_ip"], row["client_id"]),
            "service_ms DESC",
        )
        yield _finding(
            "warn",
            "latency",
            f"{row['api']} is slow for {f.client(row)}",
            f"p95 of service_ms {f.duration(row['p95'])} over "
            f"{f.plural(row['answers'], 'answer')}; other clients' {f.duration(row['usual_p95'])}. "
            "Counted as lost: what its answers took above that.",
            whom=f.client(row),
            command=facts.command(
                "show", "--api", row["api"], "--client", row["client_id"] or row["client_ip"],
                "--slow", f"{row['usual_p95']:.0f}ms", capture=evidence["capture"],
            ),
            time_lost_ms=row["lost_ms"],
            **evidence,
        )  # fmt: skip


def _is_beyond_chance(slow: int, answers: int, compared: int) -> bool:
    """Return whether more answers are above the usual p95 than chance gives one of the compared.

    Hoeffding's (1963) bound of the binomial tail, for `compared` clients together.
    """
    share, usual = slow / answers, 0.05
    if share <= usual:
        return False
    distance = share * math.log(share / usual)
    if share < 1:
        distance += (1 - share) * math.log((1 - share) / (1 - usual))
    return answers * distance >= math.log(compared / _CHANCE)


def _slow_apis(facts: _Facts) -> Iterator[Finding]:
    """APIs whose answers take long for all clients."""
    database = facts.database
    rows = database.rows(
        f"""
        SELECT api, count(*) AS answers, {quantile(database, "service_ms", 0.5)} AS p50,
          {quantile(database, "service_ms", 0.95)} AS p95,
          sum(greatest(service_ms - {API_SLOW_MS}, 0)) AS lost_ms
        FROM x WHERE wait = 'answer' AND service_ms IS NOT NULL AND NOT is_broker
        GROUP BY api HAVING count(*) >= {ANSWERS_MIN} AND p95 >= {API_SLOW_MS}
        ORDER BY lost_ms DESC, api LIMIT {SHOWN}
        """
    )
    for row in rows:
        evidence = facts.evidence(
            f"wait = 'answer' AND NOT is_broker AND service_ms > {API_SLOW_MS} AND api = ?",
            (row["api"],),
            "service_ms DESC",
        )
        yield _finding(
            "warn" if row["p95"] >= API_STUCK_MS else "info",
            "latency",
            f"{row['api']} takes long: p95 {f.duration(row['p95'])}",
            f"service_ms over {f.plural(row['answers'], 'answer')}, p50 {f.duration(row['p50'])}. "
            f"Counted as lost: what answers took above {f.duration(API_SLOW_MS)}.",
            command=facts.command(
                "show", "--api", row["api"], "--slow", f"{API_SLOW_MS:.0f}ms",
                capture=evidence["capture"],
            ),
            time_lost_ms=row["lost_ms"],
            **evidence,
        )  # fmt: skip


def _errors(facts: _Facts) -> Iterator[Finding]:
    errors = facts.document["errors"]
    real = [row for row in errors["codes"] if not row["routine"]]
    real.sort(key=lambda row: (-row["exchanges"], row["api"], row["error"]))
    for row in real[:SHOWN]:
        condition = "api = ? AND list_contains(error_codes, ?)"
        evidence = facts.evidence(condition, (row["api"], row["code"]))
        has_code = f"list_contains(error_codes, {row['code']})"
        places = f" Topics: {', '.join(row['topics'])}." if row["topics"] else ""
        # a broker repeats its own requests whatever the code: a success says that it helped
        is_repeated = row["is_retriable"] or row["api"] in _BROKERS_APIS
        longest, lost = _until_success(facts, row) if is_repeated else (None, None)
        passing = longest is not None and longest <= PASSING_MS
        has_ended = row["is_retriable"] or longest is not None
        if longest is not None:
            then = f"A request without it followed within {f.duration(longest)}."
        else:
            then = "May be tried again." if row["is_retriable"] else "Trying again does not help."
        yield _finding(
            ("info" if passing else "warn") if has_ended else "bad",
            "errors",
            f"{row['error']} in {row['api']}",
            f"{f.plural(row['clients'], 'client')}. {then}{places}",
            time_lost_ms=lost,
            whom=_first_client(facts, condition, (row["api"], row["code"])),
            command=facts.command(
                "show", "--api", row["api"], "--where", has_code,
                capture=evidence["capture"],
            ),
            **evidence,
        )  # fmt: skip
    # those without an answer at the capture's end may have got one later
    closed = facts.document["overview"]["connection_closed"]
    if closed:
        closed_before = "status = 'connection_closed'"
        condition = f"{closed_before} AND is_unanswered"
        evidence = facts.evidence(condition)
        lost = facts.database.value(
            "SELECT sum(epoch_us(c.last_time - x.time)) / 1e3 FROM x "
            f"JOIN connections c USING (connection_id) WHERE {condition}"
        )
        top = next(row for row in errors["unanswered"] if row["status"] == "connection_closed")
        yield _finding(
            "warn",
            "errors",
            f"{f.plural(closed, 'request')} whose connection was closed before the answer",
            f"Most: {top['api']} of {f.client(top)}. Counted as lost: the time until then.",
            whom=_first_client(facts, condition),
            command=facts.command("show", "--where", closed_before, capture=evidence["capture"]),
            time_lost_ms=lost,
            **evidence,
        )


def _until_success(facts: _Facts, row: Document) -> tuple[float | None, float | None]:
    """The longest time and the sum of times from an error to the client's next success, in ms.

    A success is an answer of the same API without any error. The first error of a run counts. None
    if an error had no success later in the capture.
    """
    result = facts.database.row(
        """
        WITH answers AS (
          SELECT coalesce(client_id, '') AS client_id, client_ip, time, response_time,
            error_codes
          FROM x WHERE api = $1 AND response_time IS NOT NULL
        ), runs AS (
          SELECT epoch_us(g.response_time - min(b.time)) / 1e3 AS ms
          FROM (FROM answers WHERE list_contains(error_codes, $2)) b
          ASOF LEFT JOIN (FROM answers WHERE len(error_codes) = 0) g
            ON b.client_id = g.client_id AND b.client_ip = g.client_ip AND b.time < g.time
          GROUP BY b.client_id, b.client_ip, g.response_time
        )
        SELECT max(ms) AS longest, sum(ms) AS lost, count(*) = count(ms) AS all_ended FROM runs
        """,
        (row["api"], row["code"]),
    )
    return (result["longest"], result["lost"]) if result["all_ended"] else (None, None)


def _first_client(facts: _Facts, condition: str, values: tuple[Any, ...] = ()) -> str:
    """The client with most of these exchanges."""
    rows = facts.database.rows(
        f"SELECT client_id, client_ip FROM x WHERE {condition} GROUP BY ALL "
        "ORDER BY count(*) DESC, client_id, client_ip LIMIT 1",
        values,
    )
    return f.client(rows[0]) if rows else ""


def _groups(facts: _Facts) -> Iterator[Finding]:
    document = facts.document
    slow = [
        row
        for row in document["groups"]["groups"]["rows"]
        if (row["rebalance_ms_max"] or 0) >= REBALANCE_LONG_MS
    ]
    slow.sort(key=lambda row: (-row["rebalance_ms"], row["group_id"]))
    for row in slow[:SHOWN]:
        members = row["members"] or 1
        evidence = facts.evidence(
            "exchange_id IN (SELECT exchange_id FROM rebalances WHERE group_id = ?)",
            (row["group_id"],),
            is_counted=False,
        )
        yield _finding(
            "warn",
            "groups",
            f"{row['group_id']} stood still for {f.duration(row['rebalance_ms_max'])}",
            f"{f.plural(row['rebalances'], 'rebalance')} with {f.plural(members, 'member')}; this "
            "was the longest. Counted as lost: the time of all its rebalances.",
            whom=f"group {row['group_id']}",
            command=facts.command("show", "--group", row["group_id"], capture=evidence["capture"]),
            time_lost_ms=row["rebalance_ms"],
            **evidence,
        )
    if document["lag"] and document["lag"]["groups"]["rows"]:
        row = document["lag"]["groups"]["rows"][0]
        if row["lag_at_end"]:
            evidence = facts.evidence(
                "exchange_id IN (SELECT exchange_id FROM lag WHERE group_id = ? "
                "AND lag_at_end > 0)",
                (row["group_id"],),
                is_counted=False,
            )
            most = f"; the most behind at any commit was {f.count(row['lag_max'])} in one"
            yield _finding(
                "info",
                "lag",
                f"{row['group_id']} is {f.plural(row['lag_at_end'], 'record')} behind at the end",
                f"Summed over {f.plural(row['partitions'], 'partition')}"
                f"{most if row['lag_max'] is not None else ''}.",
                whom=f"group {row['group_id']}",
                command=facts.command(
                    "show",
                    "--group",
                    row["group_id"],
                    "--api",
                    "*OffsetCommit",
                    capture=evidence["capture"],
                ),
                **evidence,
            )


def _readiness(facts: _Facts) -> Iterator[Finding]:
    readiness = facts.document["readiness"]
    # clients of newer APIs work with their brokers, and break only if these are downgraded
    if count := readiness["outdated_count"]:
        first = readiness["clients"]["rows"][0]
        ids = [row["first_exchange_id"] for row in first["findings"]]
        condition = f"exchange_id IN ({', '.join(ids) or 'NULL'})"
        evidence = facts.evidence(condition, is_counted=False)
        why = f"; {first['why']}" if first["why"] else ""
        yield _finding(
            "warn",
            "readiness",
            f"{f.plural(count, 'client')} would break on Kafka {readiness['target']}",
            f"{f.client(first)}: {', '.join((first['requests'] + first['old_formats'])[:4])}{why}.",
            whom=f.client(first),
            command=facts.command(
                "readiness", "--target", readiness["target"], capture=evidence["capture"]
            ),
            **evidence,
        )


def _transactions(facts: _Facts) -> Iterator[Finding]:
    counts = {row["outcome"]: row["count"] for row in facts.document["transactions"]["outcomes"]}
    words = {"fenced": "fenced", "abort": "aborted"}
    failed = {words[name]: counts[name] for name in words if counts.get(name)}
    total = f.plural(sum(counts.values()), "transaction")
    if failed:
        said = ", ".join(f"{f.count(number)} {name}" for name, number in failed.items())
        yield _finding(
            "warn" if counts.get("fenced") else "info",
            "transactions",
            f"{f.count(sum(failed.values()))} of {total} did not commit",
            f"{said}.",
            command=facts.command("sql", "from transactions where outcome in ('fenced', 'abort')"),
            **_of_transactions(facts, "outcome IN ('fenced', 'abort')"),
        )
    # their later fate is unknown; `transaction_open` has those that kept readers waiting
    if is_open := counts.get("open"):
        yield _finding(
            "info",
            "transactions",
            f"{f.count(is_open)} of {total} had no end in the capture",
            "They may have committed later.",
            command=facts.command("sql", "from transactions where outcome = 'open'"),
            **_of_transactions(facts, "outcome = 'open'"),
        )


def _of_transactions(facts: _Facts, condition: str) -> Finding:
    """The first exchanges of some transactions as evidence."""
    ids = f"SELECT exchange_id FROM transactions_all WHERE {condition}"
    return facts.evidence(f"exchange_id IN ({ids})", is_counted=False)


def _network(facts: _Facts) -> Iterator[Finding]:
    document = facts.document
    health = document["overview"]["health"]
    segments, again = health["segment_count"], health["retransmitted_segment_count"]
    part = again / segments if segments else 0
    if part >= RETRANSMITTED_MIN:
        rows = document["network"]["lossy_connections"]["rows"]
        worst = max(rows, key=lambda row: row["retransmitted_segment_count"])
        evidence = facts.evidence("connection_id = ?", (worst["connection_id"],), is_counted=False)
        yield _finding(
            "warn",
            "network",
            f"{f.plural(again, 'retransmitted segment')} ({f.share(part)})",
            f"Most on {worst['client_address']} to {worst['broker']}"
            f"{' (' + worst['client_ids'] + ')' if worst['client_ids'] else ''}: "
            f"{f.count(worst['retransmitted_segment_count'])}.",
            whom=worst["client_address"],
            command=facts.command("show", "--follow", str(worst["connection_id"])),
            **evidence,
        )
    serious = [row for row in document["network"]["anomaly_kinds"] if row["severity"] == "error"]
    if serious:
        kinds = ", ".join(f"{row['kind']} {f.count(row['count'])}" for row in serious[:4])
        evidence = facts.evidence(
            "exchange_id IN (SELECT exchange_id FROM anomalies WHERE severity = 'error')"
        )
        yield _finding(
            "bad",
            "anomalies",
            f.plural(sum(row["count"] for row in serious), "serious anomaly", "serious anomalies"),
            f"{kinds}.",
            command=facts.command("sql", "from anomalies where severity = 'error'"),
            **evidence,
        )


def _topics(facts: _Facts) -> Iterator[Finding]:
    written = [row for row in facts.document["topics"]["codecs"] if row["direction"] == "write"]
    total = sum(row["bytes"] for row in written)
    plain = sum(row["bytes"] for row in written if row["codec"] == "none")
    by_client = "select topic, codec, sum(size) from record_batches where source = 'produce' "
    if plain >= UNCOMPRESSED_BYTES_MIN:
        yield _finding(
            "info",
            "topics",
            f"{f.share(plain / total)} of the written bytes are not compressed",
            f"{f.byte_size(plain)} of {f.byte_size(total)}.",
            command=facts.command("sql", by_client + "group by all order by 3 desc"),
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
            command=facts.command(
                "sql",
                "select topic, avg(record_count) from record_batches where source = 'produce' "
                "group by all order by 2",
            ),
        )


_RULES: tuple[Callable[[_Facts], Iterator[Finding]], ...] = (
    *(_health, _errors, _readiness, _slow_clients, _slow_apis, _groups),
    *(_transactions, _network, _topics),
)


def find(database: ReportDatabase, document: Document) -> dict[str, Any]:
    """{"findings": list; "clear": names of the checks that found no problem}.

    Incidents come first, except those for information, which come after findings of higher levels.

    A finding is a dict of text and numbers: level, section, title, text, cost, time_lost_ms and
    request_count (what ranked it, or None), since and until (RFC 3339), kind (of an incident),
    whom, exchange_ids, packets, next_command.
    """
    facts = _Facts(database, document)
    incidents = list(_incidents(facts))
    findings = [finding for rule in _RULES for finding in rule(facts)]
    findings = [one for one in findings if not _is_consequence(one, incidents)]
    return {"findings": sorted([*incidents, *findings], key=_rank), "clear": _clear(document)}


def _rank(finding: Finding) -> tuple[float, ...]:
    is_incident = finding["kind"] is not None and finding["level"] != "info"
    return (
        not is_incident,
        _ORDER[finding["level"]],
        -(finding["time_lost_ms"] or 0),
        -(finding["request_count"] or 0),
    )


def _clear(d: Document) -> list[str]:
    """Return the passed checks. A capture with undecrypted TLS connections, or without responses to
    requests, passes no check."""
    overview = d["overview"]
    checks = (
        ("no bytes missing", not overview["health"]["missing_byte_count"]),
        ("no retransmissions", not overview["health"]["retransmitted_segment_count"]),
        (
            "every request answered",
            not overview["response_missing"] + overview["connection_closed"] + overview["unjudged"],
        ),
        ("no errors", not overview["failed"]),
        ("no throttling", not d["throttling"]["responses"]),
        ("no anomalies", not overview["anomalies"]),
    )
    is_read = overview["paired"] and not overview["read"]["unread_tls_connections"]
    return [text for text, holds in checks if holds and is_read]
