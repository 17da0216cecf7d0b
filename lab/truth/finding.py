"""Findings of the report, each figure computed again from another source.

A request log gives errors, latencies and transactions; dpkt gives retransmissions and TLS from the
packets. Incidents have the truth of the recorded scenes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import kdissect
from kdissect import Tables
from kdissect.protocol.error_codes import ErrorCode
from kdissect.protocol.releases import facts
from lab.truth.captures import log_of, read_capture
from lab.truth.section import table
from lab.truth.transaction import read_ends
from tests.incidents.recorded import SUFFIX, judge, truths
from tests.truth.packets import TcpPacket, tcp_packets
from tests.truth.request_log import read_lines

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


def _errors(scene: Scene, finding: Finding, error: str) -> bool:
    """The responses with the error, by the log; without a log by the exchanges."""
    code, api = int(ErrorCode[error]), finding["subject"]
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


def _slow_client(scene: Scene, finding: Finding, own: str, api: str, usual: str) -> bool | None:
    """The client's p95, and the median of the clients' p95, by the log."""
    if scene.log is None:
        return None
    client_id, _, address = finding["subject"].rpartition(" @ ")
    truth = _logged_p95(scene, api).get((client_id, address))
    return (
        truth is not None and _is_near(_milliseconds(own), truth) and truth > _milliseconds(usual)
    )


def _slow_api(scene: Scene, finding: Finding, p95: str) -> bool | None:
    """The API's p95, by the log; without a log by the exchanges."""
    api = finding["subject"]
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


def _uncommitted(scene: Scene, _: Finding, failed: str, total: str) -> bool:
    """Aborted and open transactions by the log, and fenced ones, which no EndTxn shows."""
    rows = scene.tables.transactions.to_pandas()
    outcomes = Counter(rows.outcome)
    if scene.log is None:
        return (outcomes.total() - outcomes["commit"], outcomes.total()) == (
            _number(failed),
            _number(total),
        )
    ends = read_ends(scene.log)
    still = rows[rows.outcome == "open"]
    keys = zip(still.transactional_id, still.producer_id, still.producer_epoch, strict=True)
    commits = Counter(end[3] for end in ends.elements())["commit"]
    is_open = not {end[:3] for end in ends}.intersection(keys)
    return is_open and commits == _number(total) - _number(failed)


def _retransmitted(scene: Scene, _: Finding, count: str) -> bool | None:
    """Segments all of whose bytes were sent before, by dpkt; copies of a packet count once."""
    again, sent = 0, defaultdict[tuple[Any, ...], set[int]](set)
    for packet in {replace(each, number=0, time_ns=0): each for each in _data(scene)}.values():
        covered = range(packet.seq, packet.seq + len(packet.payload))
        flow = packet.source, packet.destination
        again += sent[flow].issuperset(covered)
        sent[flow].update(covered)
    return again == _number(count)


def _data(scene: Scene) -> list[TcpPacket]:
    return [packet for packet in tcp_packets(scene.path) if packet.payload]


def _undecrypted(scene: Scene, _: Finding, count: str) -> bool:
    """Connections of which both sides begin with a TLS handshake, without a key log."""
    first: dict[tuple[Any, ...], bytes] = {}
    for packet in _data(scene):
        first.setdefault((packet.source, packet.destination), packet.payload[:2])
    sides = [flow for flow, data in first.items() if data == TLS_HANDSHAKE]
    return sum(flow[::-1] in sides for flow in sides) == 2 * _number(count)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


# (kind, text of the incident) -> its check
_CHECKS: dict[tuple[str, str], Callable[..., bool | None]] = {
    ("request_errors", r"[\d,]+ responses? with ([A-Z_]+) "): _errors,
    ("refused_requests", r"[\d,]+ responses? with ([A-Z_]+) "): _errors,
    ("slow_client", r"p95 of service_ms is (.+) over [\d,]+ (\w+) resp.+ it is (.+?)\. "):
        _slow_client,
    ("slow_api", r"p95 of service_ms is (.+?) over "): _slow_api,
    ("failed_transactions", r"([\d,]+) of ([\d,]+) transactions? did not"): _uncommitted,
    ("retransmissions", r"([\d,]+) segments? "): _retransmitted,
    ("capture_unread", r"([\d,]+) connections? with TLS "): _undecrypted,
}  # fmt: skip


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
    """Check the incidents of a capture that other sources can show."""
    for finding in scene.tables.incidents().to_arrow().to_pylist():
        for (kind, pattern), check in _CHECKS.items():
            if finding["kind"] == kind and (match := re.match(pattern, finding["text"])):
                is_right = check(scene, finding, *match.groups())
                outcome = UNDECIDED if is_right is None else RIGHT if is_right else WRONG
                note = f"{scene.path.stem}: {finding['subject']}. {finding['text']}"
                tally.add(kind, outcome, note)
                break


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
            "Incidents, their figures computed again from another source: the "
            "broker's request log, the packets (dpkt), or the truth of a recorded scene.",
            "",
            table(
                ["finding", *outcomes],
                [[kind, *(tally.counts[kind, each] for each in outcomes)] for kind in kinds],
            ),
            "",
            *(f"- {note}" for note in tally.notes),
        ]
    )
