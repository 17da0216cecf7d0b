"""A finished replay, and what it tells as rows: one for the run, one per exchange, and the summary.

`--json` writes them as lines, and all outputs but `--out` are made of them.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np

from kdissect.atomic_file import atomic_write
from kdissect.replay import model
from kdissect.replay.comparison.kinds import RULE as RELEASE_RULE
from kdissect.replay.comparison.kinds import Kind, kinds_of
from kdissect.replay.model import LATENCY, Difference, Outcome, ReplayPlan, Verdict
from kdissect.replay.output import text
from kdissect.replay.planning.plan import Pace
from kdissect.replay.running.runner import RunResult
from kdissect.replay.target.cluster import Target
from kdissect.tables.schemas import Row

FORMAT_VERSION = 1
_PARTS = {"p50_us": 0.5, "p95_us": 0.95, "p99_us": 0.99, "max_us": 1}
FAIL_ON = frozenset({Verdict.DIFFERENT.value, Verdict.ERROR.value})
EXIT_DONE, _EXIT_FINDING, _EXIT_ENVIRONMENT, _EXIT_INTERRUPTED = 0, 1, 3, 130


def parse_fail_on(values: Iterable[str]) -> frozenset[str]:
    """The names of ``different,error,latency`` and the like; ``none`` for nothing. Raises
    OptionError."""
    names = {name.strip().lower() for value in values for name in value.split(",")} - {"", "none"}
    known = [*(verdict.value for verdict in Verdict), LATENCY]
    if unknown := sorted(names.difference(known)):
        every = ", ".join(known)
        raise model.OptionError(f"--fail-on {unknown[0]}: verdicts are {every}, or none")
    return frozenset(names)


@dataclass(repr=False)  # a task that ends with it is shown, by `asyncio.run`
class Results:
    """A finished replay.

    fail_on: verdicts, and "latency". reference: the kind of responses that the answers were
    compared with; reference_name: the name of that target or run, if any. releases: Kafka releases
    of the captured broker and of the target, "" unknown. findings: about the whole run. kinds: of
    the differences of single answers. follows: step -> step that it follows.
    """

    plan: ReplayPlan
    run: RunResult
    target: Target
    pace: Pace
    fail_on: frozenset[str] = FAIL_ON
    reference: str = "the capture"
    reference_name: str = ""
    notes: list[str] = field(default_factory=list)
    findings: list[Difference] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    follows: dict[int, int] = field(default_factory=dict)
    releases: tuple[str, str] = ("", "")

    @property
    def outcomes(self) -> list[Outcome]:
        return self.run.outcomes

    @property
    def sent_count(self) -> int:
        return sum(outcome.sent is not None for outcome in self.outcomes)

    @property
    def compared_with(self) -> str:
        return f"{self.reference} {self.reference_name}".strip()

    def exchange_id(self, step_number: int) -> str:
        """As text: ids may be beyond 2^53."""
        return str(self.plan.steps[step_number].exchange.exchange_id)

    def fails(self, finding: Difference) -> bool:
        """Return whether --fail-on names a finding of the whole run."""
        is_latency = finding.place == LATENCY
        return (LATENCY if is_latency else Verdict.DIFFERENT.value) in self.fail_on

    def failing(self) -> int:
        """Outcomes and findings that --fail-on names."""
        outcomes = sum(each.judgement.verdict.value in self.fail_on for each in self.outcomes)
        return outcomes + sum(self.fails(each) for each in self.findings)

    @property
    def exit_code(self) -> int:
        if self.run.is_interrupted:
            return _EXIT_INTERRUPTED
        if self.run.ended:
            return _EXIT_ENVIRONMENT
        return _EXIT_FINDING if self.failing() else EXIT_DONE


# -- rows -----------------------------------------------------------------------------------------


def rows(results: Results) -> list[Row]:
    """All rows in their order: the run, the exchanges, the summary."""
    workload, run = results.plan.workload, results.run
    first = {
        "type": "run",
        "format_version": FORMAT_VERSION,
        "source": workload.source,
        "source_kind": workload.kind,
        "target": str(results.target),
        "cluster_id": results.target.cluster.cluster_id,
        "pace": str(results.pace),
        "compared_with": results.reference,
        "reference": results.reference_name or None,
        "captured_release": results.releases[0] or None,
        "target_release": results.releases[1] or None,
        "start_time": text.timestamp(run.start_time_ns),
        "steps": len(results.plan.steps),
        "connections": len(results.plan.lanes),
        "notes": [*workload.notes, *results.plan.notes, *results.notes],
    }
    exchanges = [_exchange_row(results, each) for each in results.outcomes]
    return [first, *exchanges, summary_row(results)]


def write_json_lines(results: Results, path: Path) -> None:
    """Write the file whole, or not at all."""
    with atomic_write(path) as partial, open(partial, "w", encoding="utf-8") as file:
        for row in rows(results):
            # Captured text may hold lone surrogates: only escaped are they JSON.
            file.write(json.dumps(row, ensure_ascii=True) + "\n")


def _exchange_row(results: Results, outcome: Outcome) -> Row:
    """Request, result and times of an exchange. IDs beyond 2^53 are strings."""
    step, judgement, start_time_ns = outcome.step, outcome.judgement, results.run.start_time_ns
    exchange, root = step.exchange, results.follows.get(step.number)
    was_sent = outcome.sent is not None
    dropped = [{"path": each.path, "value": text.texts_of(each)[0]} for each in outcome.dropped]
    then, now = exchange.latency_ns, outcome.latency_ns
    return {
        "type": "exchange",
        "step": step.number,
        "exchange_id": str(exchange.exchange_id),
        "connection": step.connection,
        "index": exchange.index,
        "capture": exchange.capture or None,
        "request_packet": exchange.request_packet if exchange.request_packet >= 0 else None,
        "response_packet": exchange.response_packet if exchange.response_packet >= 0 else None,
        "client_id": exchange.client_id,
        "api_key": exchange.api_key,
        "api_name": step.api_name,
        "api_version": exchange.api_version,
        "sent_api_version": outcome.api_version if was_sent and outcome.api_version >= 0 else None,
        "dropped": dropped,
        "class": step.step_class,
        "verdict": judgement.verdict.value,
        "reason": judgement.reason or None,
        "skipped": outcome.skipped.code.value if outcome.skipped else None,
        "error": outcome.error or None,
        "differences": [
            {"path": each.path, "place": each.place,
             **_pair(text.texts_of(each)),
             "rule": each.rule or None, "note": text.note_of(each) or None}
            for each in judgement.differences
        ],
        "earlier_answers": [
            {"reason": each.reason, "sent_time": text.timestamp(start_time_ns + each.sent_ns),
             "latency_us": (each.answered_ns - each.sent_ns) / 1000}
            for each in outcome.earlier
        ],
        "request_time": text.timestamp(exchange.request_time_ns),
        "sent_time": text.timestamp(start_time_ns + outcome.sent_ns) if was_sent else None,
        "node_id": outcome.node_id,
        "lag_us": outcome.lag_ns / 1000 if was_sent and not results.pace.is_max else None,
        "captured_latency_us": then / 1000 if then >= 0 else None,
        "latency_us": now / 1000 if now >= 0 else None,
        "follows": None if root is None else results.exchange_id(root),
    }  # fmt: skip


def summary_row(results: Results) -> Row:
    """Verdicts, APIs, findings, lag, how it ended."""
    outcomes, run = results.outcomes, results.run
    sent = [each for each in outcomes if each.sent is not None]
    tolerated = kinds_of(outcomes, tolerated=True)
    return {
        "type": "summary",
        "verdicts": _counts(outcomes),
        "apis": list(_api_rows(outcomes)),
        "kinds": [_kind_row(results, each) for each in results.kinds],
        "tolerated": [_kind_row(results, each) for each in tolerated],
        "release_changes": [
            {"api_name": each.api_name, "path": each.first.path,
             **_pair(text.readable_texts_of(each.first)), "what": each.first.note,
             "count": len(each.found),
             "configs": sorted({one.keys[-1] for _, one in each.found if "configs[]" in one.place})}
            for each in tolerated
            if each.first.rule == RELEASE_RULE
        ],
        "findings": [
            {"kind": each.place, "subject": each.keys[0],
             **dict(zip(("expected", "found"), text.texts_of(each), strict=True)),
             "note": each.note or None, "fails": results.fails(each)}
            for each in results.findings
        ],
        "reasons": _reasons(outcomes),
        "sent": len(sent),
        "connections": len({each.step.connection for each in sent}),
        "elapsed_s": run.elapsed_ns / 1e9,
        "requests_per_s": len(sent) / (run.elapsed_ns / 1e9) if run.elapsed_ns else 0.0,
        # behind the schedule; and the part of it that is ours: ready to go, and not yet sent
        "lag": _span(each.lag_ns for each in sent if not results.pace.is_max),
        "own_lag": _span(each.own_lag_ns for each in outcomes if each.own_lag_ns >= 0),
        "reconnects": run.reconnects,
        "ended": run.ended or None,
        "failing": results.failing(),
        "exit_code": results.exit_code,
    }  # fmt: skip


def _counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    counts = Counter(each.judgement.verdict for each in outcomes)
    return {verdict.value: counts[verdict] for verdict in Verdict if counts[verdict]}


def _api_rows(outcomes: Iterable[Outcome]) -> Iterator[Row]:
    """In order of the APIs' keys; latencies of exchanges that have one in both clusters."""
    by_api: dict[tuple[int, str], list[Outcome]] = defaultdict(list)
    for each in outcomes:
        by_api[each.step.exchange.api_key, each.step.api_name].append(each)
    for (_, name), found in sorted(by_api.items()):
        pairs = [(each.step.exchange.latency_ns, each.latency_ns) for each in found]
        timed = [pair for pair in pairs if min(pair) >= 0]
        yield {
            "api_name": name,
            "verdicts": _counts(found),
            "captured_latency": _span(then for then, _ in timed),
            "latency": _span(now for _, now in timed),
        }


def _span(times_ns: Iterable[int]) -> Row:
    """Percentiles in microseconds; None if there are no times."""
    found = np.array([*times_ns], np.int64) / 1000
    us = np.quantile(found, [*_PARTS.values()], method="higher").tolist() if len(found) else ()
    return {"count": len(found), **dict(zip_longest(_PARTS, us))}


def _reasons(outcomes: Iterable[Outcome]) -> list[Row]:
    """Reasons that have no place in a message, the most frequent first. code: of skipped steps."""
    counts: Counter[tuple[Verdict, str, str, str]] = Counter()
    for outcome in outcomes:
        judgement, code = outcome.judgement, outcome.skipped.code.value if outcome.skipped else ""
        if judgement.verdict not in (Verdict.SAME, Verdict.TOLERATED) and not judgement.differences:
            reason = judgement.reason or judgement.verdict.value
            counts[judgement.verdict, outcome.step.api_name, code, reason] += 1
    return [
        {"verdict": verdict.value, "api_name": name, "code": code, "reason": reason, "count": count}
        for (verdict, name, code, reason), count in counts.most_common()
    ]


def _kind_row(results: Results, kind: Kind) -> Row:
    """A kind of differences. example: its first exchange, with the path and values there."""
    steps, found = zip(*kind.found, strict=True)
    one = kind.first
    return {
        "api_name": kind.api_name,
        "path": one.place,
        **_pair(text.readable_texts_of(one)),
        "rule": one.rule or None,
        "notes": kind.notes or [each for each in [text.note_of(one)] if each],
        "count": len(found),
        "exchanges": len({*steps}),
        "places": len({each.keys for each in found}),
        "value_pairs": len({(str(each.captured), str(each.answered)) for each in found}),
        "example": results.exchange_id(steps[0]),
        "example_path": one.path,
        "followers": [
            {"api_name": api_name, "what": word, "exchanges": count}
            for (api_name, word), count in kind.followers.most_common()
        ],
    }


def _pair(texts: tuple[str, str]) -> dict[str, str]:
    return {"captured": texts[0], "answered": texts[1]}
