"""Findings of the report, each figure computed again from another source.

A request log gives errors, latencies, lags and transactions; dpkt gives retransmissions and TLS
from the packets; pandas gives the rest from the tables. Incidents have the truth of the recorded
scenes.
"""

from __future__ import annotations

import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import dpkt
import numpy as np
import pandas as pd

import kdissect
from kdissect import Tables
from kdissect.protocol.error_codes import ErrorCode
from kdissect.protocol.releases import facts
from kdissect.readiness.assessment import BREAKS
from kdissect.report import collect
from kdissect.report.database import ReportDatabase
from lab.truth.captures import log_of, read_capture
from lab.truth.readiness import TRUTHS
from lab.truth.transaction import read_ends
from tests.incidents.recorded import SUFFIX, judge, truths
from tests.truth.lag import read_lines, read_logged_offsets

RIGHT, WRONG, UNDECIDED = "right", "wrong", "not decided"
INCIDENTS = Path(__file__).resolve().parents[2] / "captures" / "incidents"
NEAR_MS, NEAR_SHARE = 15.0, 0.1  # a p95 of the log, as in the section on latency
TLS_HANDSHAKE = b"\x16\x03"
_UNITS = {"ms": 1.0, "s": 1e3, "min": 6e4, "h": 3.6e6}
Finding = dict[str, Any]


@dataclass
class Scene:
    """A capture with its other sources. log: of the broker, or None."""

    path: Path
    tables: Tables
    log: Path | None

    @cached_property
    def logged(self) -> list[dict[str, Any]]:
        """Requests of the log that were not forwarded."""
        rows = read_lines(self.log) if self.log else iter(())
        return [row for row in rows if not row["forwarded"]]

    @cached_property
    def exchanges(self) -> pd.DataFrame:
        return self.tables.exchanges.to_pandas()

    def answers(self, api: str) -> pd.DataFrame:
        """The exchanges of an API that are answers to clients: replicas fetch apart."""
        rows = self.exchanges[(self.exchanges.wait == "answer") & (self.exchanges.api_name == api)]
        if api == "Fetch":
            replicas = self.tables.sql(
                "select exchange_id from api_fetch where request.replica_id >= 0 "
                "or request.replica_state.replica_id >= 0"
            )
            rows = rows[~rows.exchange_id.isin(replicas.to_pandas().exchange_id)]
        return rows

    @cached_property
    def packets(self) -> list[tuple[tuple[Any, ...], dpkt.tcp.TCP]]:
        """TCP segments with their flow, without copies of a packet."""
        opened = gzip.open if self.path.suffix == ".gz" else open
        segments, seen = [], set()
        with opened(self.path, "rb") as file:
            reader = dpkt.pcap.Reader(file)
            link = (
                dpkt.sll2.SLL2
                if reader.datalink() == dpkt.pcap.DLT_LINUX_SLL2
                else dpkt.ethernet.Ethernet
            )
            for _, data in reader:
                network = link(data).data
                segment = getattr(network, "data", None)
                if isinstance(segment, dpkt.tcp.TCP) and bytes(network) not in seen:
                    seen.add(bytes(network))
                    flow = (network.src, segment.sport, network.dst, segment.dport)
                    segments.append((flow, segment))
        return segments


def _errors(scene: Scene, finding: Finding, error: str, api: str) -> bool:
    """The responses with the error, by the log; without a log by the exchanges."""
    code = int(ErrorCode[error])
    if scene.log is None:
        rows = scene.exchanges[scene.exchanges.api_name == api]
        count = sum(code in codes for codes in rows.error_codes.dropna())
    else:
        rows = [row for row in scene.logged if facts().names[row["api_key"]] == api]
        count = sum(code in set(_codes(row.get("response"))) for row in rows)
    return bool(count == finding["request_count"])


def _codes(node: Any) -> Iterator[int]:
    """The error codes anywhere in a logged response."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if key.lower().endswith("errorcode") and isinstance(value, int):
            yield value
        else:
            yield from _codes(value)
    for value in node if isinstance(node, list) else ():
        yield from _codes(value)


def _logged_p95(scene: Scene, api: str) -> dict[tuple[str, str], float]:
    """p95 of the log's total time by client ID and address, of requests that are answers."""
    answers = scene.answers(api)
    keys = set(zip(answers.client_ip, answers.client_port, answers.correlation_id, strict=True))
    times = defaultdict(list)
    for row in scene.logged:
        if (*row["client"], row["correlation_id"]) in keys and facts().names[row["api_key"]] == api:
            times[row["client_id"], row["client"][0]].append(row["total_time_ms"])
    return {client: float(np.quantile(values, 0.95)) for client, values in times.items()}


def _is_near(value: float, truth: float) -> bool:
    return abs(value - truth) <= max(NEAR_MS, NEAR_SHARE * truth)


def _slow_client(scene: Scene, finding: Finding, api: str, client: str) -> bool | None:
    """The client's p95, and the median of the clients' p95, by the log."""
    if scene.log is None:
        return None
    own, usual = map(
        _milliseconds, re.findall(r"(?:service_ms|clients') ([\d.,]+ \w+)", finding["text"])
    )
    p95 = _logged_p95(scene, api)
    client_id, _, address = client.rpartition(" @ ")
    truth = p95.get((client_id, address))
    return truth is not None and _is_near(own, truth) and truth > usual


def _slow_api(scene: Scene, finding: Finding, api: str, p95: str) -> bool | None:
    """The API's p95, by the log; without a log by the exchanges."""
    answers = scene.answers(api)
    times = answers.service_ms.to_list()
    if scene.log is not None:
        keys = set(zip(answers.client_ip, answers.client_port, answers.correlation_id, strict=True))
        times = [
            row["total_time_ms"]
            for row in scene.logged
            if (*row["client"], row["correlation_id"]) in keys
            and facts().names[row["api_key"]] == api
        ]
        if len(times) < 0.9 * len(keys):
            return None  # SaslAuthenticate, for example, is not logged
    return _is_near(_milliseconds(p95), float(np.quantile(times, 0.95)))


def _milliseconds(text: str) -> float:
    """The milliseconds of ``1.50 s`` or ``2 min 5 s``."""
    parts = re.findall(r"([\d.,]+) (ms|s|min|h)\b", text)
    return sum(float(number.replace(",", "")) * _UNITS[unit] for number, unit in parts)


def _stood_still(scene: Scene, _: Finding, group: str, time: str) -> bool | None:
    """The longest time from a generation's first JoinGroup to its last SyncGroup."""
    if "apis/JoinGroup" not in scene.tables:
        return None
    rows = scene.tables.sql(
        f"""
        with members as (
            select exchange_id, response.generation_id generation from api_join_group
            where response.error_code = 0
            union all
            select exchange_id, request.generation_id from api_sync_group
            where response.error_code = 0
        )
        select max(until - since) as longest from (
            select epoch_us(min(request_end_time)) / 1e3 since,
                epoch_us(max(response_time)) / 1e3 until
            from members join exchanges using (exchange_id)
            where group_id = '{group}' group by generation)
        """
    ).to_pylist()
    longest = rows[0]["longest"]
    return None if longest is None else _is_near(_milliseconds(time), longest)


def _behind(scene: Scene, _: Finding, group: str, records: str) -> bool | None:
    """The log's ends less the log's commits; a lower one is right, because it is a lower bound.

    Without a log: the last records in the capture less the last accepted commits, if no transaction
    has any.
    """
    if scene.log is None and "apis/TxnOffsetCommit" in scene.tables:
        return None
    if scene.log is None:
        return _number(records) == scene.tables.sql(_LAG.format(group=group)).to_pylist()[0]["lag"]
    logged = read_logged_offsets(scene.log)
    truth = sum(
        max(logged.log_ends[key[1:]] - offset, 0)
        for key, offset in logged.committed.items()
        if key[0] == group and key[1:] in logged.log_ends
    )
    return 0 < _number(records) <= truth


def _uncommitted(scene: Scene, _: Finding, count: str, total: str) -> bool:
    """Aborted transactions by the log, and fenced ones, which no EndTxn shows."""
    outcomes = Counter(scene.tables.transactions.to_pandas().outcome)
    if scene.log is None:
        failed = outcomes["abort"] + outcomes["fenced"]
        return (failed, outcomes.total()) == (_number(count), _number(total))
    ends = Counter(end[3] for end in read_ends(scene.log).elements())
    return ends["abort"] <= _number(count) <= ends["abort"] + outcomes["fenced"] + outcomes[
        "abort"
    ] and ends["commit"] == _number(total) - outcomes["open"] - _number(count)


def _open(scene: Scene, _: Finding, count: str, __: str) -> bool:
    """The transactions without an end in the table, none of which EndTxn ended in the log."""
    rows = scene.tables.transactions.to_pandas()
    rows = rows[rows.outcome == "open"]
    ends = {end[:3] for end in read_ends(scene.log)} if scene.log else set()
    keys = zip(rows.transactional_id, rows.producer_id, rows.producer_epoch, strict=True)
    return len(rows) == _number(count) and not ends.intersection(keys)


def _retransmitted(scene: Scene, _: Finding, count: str, __: str) -> bool | None:
    """Segments all of whose bytes were sent before, by dpkt."""
    again, ends = 0, defaultdict[tuple[Any, ...], set[int]](set)
    for flow, segment in scene.packets:
        if segment.data:
            covered = range(segment.seq, segment.seq + len(segment.data))
            again += ends[flow].issuperset(covered)
            ends[flow].update(covered)
    return again == _number(count)


def _undecrypted(scene: Scene, _: Finding, count: str) -> bool:
    """Connections of which both sides begin with a TLS handshake, without a key log."""
    first: dict[tuple[Any, ...], bytes] = {}
    for flow, segment in scene.packets:
        if segment.data:
            first.setdefault(flow, bytes(segment.data[:2]))
    sides = [flow for flow, data in first.items() if data == TLS_HANDSHAKE]
    return sum(flow[2:] + flow[:2] in sides for flow in sides) == 2 * _number(count)


def _no_kafka(scene: Scene, finding: Finding) -> bool:
    """The protocols by their connections, none of which is Kafka."""
    counts = Counter(scene.tables.connections.to_pandas().protocol)
    named = re.findall(r"([\d,]+) (\w+)", finding["text"])
    return "kafka" not in counts and counts == {name: _number(count) for count, name in named}


def _anomalies(scene: Scene, _: Finding, count: str) -> bool:
    rows = scene.tables.anomalies.to_pandas()
    return int((rows.severity == "error").sum()) == _number(count)


def _plain_bytes(scene: Scene, finding: Finding, share: str) -> bool:
    rows = _written(scene)
    plain = rows[rows.codec == "none"]["size"].sum()
    return abs(100 * plain / rows["size"].sum() - float(share)) < 0.6


def _small_batches(scene: Scene, _: Finding, mean: str) -> bool:
    rows = _written(scene)
    return abs(rows.record_count.sum() / len(rows) - float(mean)) < 0.01


def _written(scene: Scene) -> pd.DataFrame:
    rows = scene.tables.record_batches.to_pandas()
    return rows[(rows.source == "produce") & ~rows.is_partial.fillna(False).astype(bool)]


def _breaks(scene: Scene, _: Finding, count: str, target: str) -> bool | None:
    """The clients of the manifest that the release refuses."""
    name = f"{scene.path.parent.name}/{scene.path.stem}"
    # the releases from 4.0 on refuse the same old versions
    patterns = TRUTHS.get((name, target)) or TRUTHS.get((name, "4.1"))
    if patterns is None:
        return None
    from kdissect.readiness.assessment import assess

    clients = [client["client_id"] or "" for client in assess(scene.tables, target)["clients"]]
    refused = [
        next(patterns[each] for each in patterns if re.fullmatch(each, client)) == BREAKS
        for client in clients
    ]
    return sum(refused) == _number(count)


def _closed(scene: Scene, _: Finding, count: str) -> bool | None:
    """Requests of closed connections without a response, of a capture that lacks no packet."""
    anomalies = scene.tables.anomalies.to_pandas()
    if (anomalies.kind == "gap").any():
        return None
    return int((scene.exchanges.status == "connection_closed").sum()) == _number(count)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


_CHECKS: dict[str, Callable[..., bool | None]] = {
    r"([A-Z_]+) in (\w+)": _errors,
    r"(\w+) is slow for (.+)": _slow_client,
    r"(\w+) takes long: p95 (.+)": _slow_api,
    r"(.+) stood still for (.+)": _stood_still,
    r"(.+) is ([\d,]+) records? behind at the end": _behind,
    r"([\d,]+) of ([\d,]+) transactions? did not commit": _uncommitted,
    r"([\d,]+) of ([\d,]+) transactions? had no end in the capture": _open,
    r"([\d,]+) retransmitted segments? \((.+)\)": _retransmitted,
    r"([\d,]+) TLS connections? not decrypted": _undecrypted,
    r"No Kafka traffic found": _no_kafka,
    r"([\d,]+) serious anomal(?:y|ies)": _anomalies,
    r"([\d.]+) % of the written bytes are not compressed": _plain_bytes,
    r"Batches hold ([\d.]+) records on average": _small_batches,
    r"([\d,]+) clients? would break on Kafka ([\d.]+)": _breaks,
    r"([\d,]+) requests? whose connection was closed before the answer": _closed,
}
_NAMES = {
    _errors: "an error", _slow_client: "a slow client", _slow_api: "a slow API",
    _stood_still: "a long rebalance", _behind: "a lag", _uncommitted: "transactions",
    _open: "open transactions", _retransmitted: "retransmissions", _undecrypted: "TLS",
    _anomalies: "anomalies",
    _no_kafka: "no Kafka", _plain_bytes: "compression", _small_batches: "small batches",
    _breaks: "readiness",
    _closed: "closed connections",
}  # fmt: skip


_LAG = """
    with commits as (
        select topic, p.partition_index as partition, arg_max(p.committed_offset, time) as committed
        from (select time, t.name as topic, unnest(t.partitions) p
            from (select request_time as time, unnest(request.topics) t from api_offset_commit
                where request.group_id = '{group}' and response_time is not null))
        group by all
    ), produced as (
        select b.topic, b.partition, max(p.base_offset + b.record_count) as log_end
        from (select exchange_id, unnest(t.partition_responses) p
            from (select exchange_id, unnest(response.responses) t from api_produce)) r
        join record_batches b on b.exchange_id = r.exchange_id and b.partition = r.p.index
        group by all
    ), fetched as (
        select topic, partition, max(last_offset) + 1 as log_end from record_batches
        where source = 'fetch' group by all
    ), ends as (from produced union all from fetched)
    select sum(lag)::bigint as lag from (
        select greatest(max(log_end) - any_value(committed), 0) as lag
        from commits join ends using (topic, partition) group by topic, partition)
"""


@dataclass
class Tally:
    """Outcomes by kind of finding, and lines about those that are not right."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def add(self, kind: str, outcome: str, note: str) -> None:
        """Count one finding."""
        self.counts[kind, outcome] += 1
        if outcome != RIGHT:
            self.notes.append(f"{outcome}: {note}")


def log_with_messages(capture: Path) -> Path | None:
    """A capture's request log if it has messages as JSON, as brokers write from 2.6 on."""
    log = log_of(capture)
    return log if log.is_file() and "request" in next(read_lines(log)) else None


def judge_findings(scene: Scene, tally: Tally) -> None:
    """Check each finding of a capture's report, incidents apart."""
    with ReportDatabase(scene.tables) as database:
        found = collect(database)["findings"]["findings"]
    for finding in found:
        if finding["kind"] is not None:
            continue
        kind, outcome = "another", UNDECIDED
        for pattern, check in _CHECKS.items():
            if match := re.fullmatch(pattern, finding["title"]):
                is_right = check(scene, finding, *match.groups())
                kind = _NAMES[check]
                outcome = UNDECIDED if is_right is None else RIGHT if is_right else WRONG
                break
        tally.add(kind, outcome, f"{scene.path.stem}: {finding['title']}. {finding['text']}")


def section(captures: Path) -> str:
    """The section of the page."""
    tally = Tally()
    for path in sorted(captures.glob("*/*.pcap")):
        if log_of(path).is_file():
            judge_findings(Scene(path, read_capture(path), log_with_messages(path)), tally)
    for name in truths(INCIDENTS):
        path = INCIDENTS / (name + SUFFIX)
        judge_findings(Scene(path, kdissect.read(path), None), tally)
        faults = judge(INCIDENTS, name).faults
        tally.add("an incident", WRONG if faults else RIGHT, f"{name}: {'; '.join(faults)}")
    kinds = sorted({kind for kind, _ in tally.counts})
    outcomes = (RIGHT, WRONG, UNDECIDED)
    return "\n".join(
        [
            "## Finding",
            "",
            "Each finding of the report, its figures computed again from another source: the "
            "broker's request log, the packets (dpkt), the truth of a recorded scene, or other "
            "queries of the tables.",
            "",
            f"| finding | {' | '.join(outcomes)} |",
            "|---|---:|---:|---:|",
            *(
                f"| {kind} | {' | '.join(str(tally.counts[kind, each]) for each in outcomes)} |"
                for kind in kinds
            ),
            "",
            *(f"- {note}" for note in tally.notes),
        ]
    )
