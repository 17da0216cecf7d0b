"""JSON lines of a replay: a line for the run, one per exchange, one with the counts.

A later run with `--baseline` reads this file (`baseline.read_baseline`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kdissect.atomic_file import atomic_write
from kdissect.replay.comparison.findings import Finding
from kdissect.replay.model import Outcome
from kdissect.replay.output.results import RESULTS_VERSION, Results, judgement_of, timestamp
from kdissect.replay.output.text import (
    dropped_text,
    note_of,
    release_changes,
    run_texts,
    texts_of,
)

_VALUES = ("captured", "answered")


def write_json_lines(results: Results, path: Path) -> None:
    """Write the file whole, or not at all."""
    with atomic_write(path) as partial, open(partial, "w", encoding="utf-8") as file:
        for row in rows(results):
            # Captured text may hold lone surrogates: only escaped are they JSON.
            file.write(json.dumps(row, ensure_ascii=True) + "\n")


def rows(results: Results) -> Iterator[dict[str, Any]]:
    """The lines, as dicts."""
    workload, run = results.plan.workload, results.run
    yield {
        "type": "run",
        "format_version": RESULTS_VERSION,
        "source": workload.source,
        "source_kind": workload.kind,
        "target": results.target,
        "cluster_id": results.cluster_id,
        "pace": results.pace,
        "compared_with": results.reference.value,
        "reference": results.reference_name or None,
        "captured_release": results.releases[0] or None,
        "target_release": results.releases[1] or None,
        "start_time": timestamp(run.start_time_ns),
        "steps": len(results.plan.steps),
        "connections": len(results.plan.lanes),
        "notes": [*workload.notes, *results.plan.notes, *results.notes],
        "topics": [
            {"name": each.name, "made": each.is_made, "note": each.note}
            for each in results.prepared
        ],
    }
    for outcome in results.outcomes:
        row = exchange_row(outcome, run.start_time_ns, results.is_timed)
        root = results.follows.get(outcome.step.number)
        yield {**row, "follows": None if root is None else str(results.exchange_id(root))}
    yield summary_row(results)


def exchange_row(outcome: Outcome, start_time_ns: int, is_timed: bool) -> dict[str, Any]:
    """The JSON line of an exchange: request, result and times. IDs beyond 2^53 are strings."""
    step, judgement = outcome.step, judgement_of(outcome)
    exchange = step.exchange
    was_sent = outcome.sent is not None
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
        "dropped": [{"path": each.path, "value": dropped_text(each)} for each in outcome.dropped],
        "class": step.step_class,
        "verdict": judgement.verdict.value,
        "reason": judgement.reason or None,
        "skipped": outcome.skipped.code.value if outcome.skipped else None,
        "error": outcome.error or None,
        "differences": [
            {
                "path": each.path,
                "place": each.place,
                **dict(zip(_VALUES, texts_of(exchange.api_key, each), strict=True)),
                "rule": each.rule or None,
                "note": note_of(each) or None,
            }
            for each in judgement.differences
        ],
        "earlier_answers": [
            {
                "reason": attempt.reason,
                "sent_time": timestamp(start_time_ns + attempt.sent_ns),
                "latency_us": (attempt.answered_ns - attempt.sent_ns) / 1000,
            }
            for attempt in outcome.earlier
        ],
        "request_time": timestamp(exchange.request_time_ns),
        "sent_time": timestamp(start_time_ns + outcome.sent_ns) if was_sent else None,
        "node_id": outcome.node_id,
        "lag_us": outcome.lag_ns / 1000 if was_sent and is_timed else None,
        "captured_latency_us": then / 1000 if then >= 0 else None,
        "latency_us": now / 1000 if now >= 0 else None,
    }


def summary_row(results: Results) -> dict[str, Any]:
    """The last line: verdicts, APIs, lag, how it ended."""
    return {
        "type": "summary",
        "verdicts": {verdict.value: count for verdict, count in results.verdicts().items()},
        "apis": [
            {
                "api_name": api.api_name,
                "verdicts": {verdict.value: count for verdict, count in api.verdicts.items()},
                "captured_latency": api.captured.as_us(),
                "latency": api.answered.as_us(),
            }
            for api in results.by_api()
        ],
        "differences": [
            _kind_row(results, each, ())
            for tolerated in (False, True)
            for each in results.groups(tolerated=tolerated)
        ],
        "kinds": [_kind_row(results, each, each.notes) for each in results.kinds],
        "release_changes": release_changes(results.outcomes),
        "findings": [
            {
                "kind": finding.kind,
                "subject": finding.subject,
                **dict(zip(("expected", "found"), run_texts(finding), strict=True)),
                "note": finding.note or None,
                "fails": results.fails(finding),
            }
            for finding in results.findings
        ],
        "sent": results.sent_count,
        "elapsed_s": results.run.elapsed_ns / 1e9,
        "requests_per_s": results.requests_per_s(),
        "lag": results.lag().as_us(),
        "own_lag": results.own_lag().as_us(),
        "reconnects": results.run.reconnects,
        "ended": results.run.ended or None,
        "failing": results.failing(),
        "exit_code": results.exit_code,
    }


def _kind_row(results: Results, finding: Finding, notes: Sequence[str]) -> dict[str, Any]:
    """A kind of differences. example: its first exchange, with the path and values there."""
    one = finding.example
    return {
        "api_name": finding.api_name,
        "path": one.place,
        **dict(zip(_VALUES, texts_of(results.api_key(finding), one), strict=True)),
        "rule": one.rule or None,
        "note": "; ".join(notes) or note_of(one) or None,
        "count": finding.count,
        "exchanges": len(finding.steps),
        "example": str(results.exchange_id(finding.step)),
        "example_path": one.path,
        "followers": [
            {"api_name": api_name, "what": word, "exchanges": count}
            for (api_name, word), count in finding.followers.most_common()
        ],
    }
