"""One self-contained page of a replay: verdicts, differences, latency then and now, lag.

The page has no script and loads nothing. `templates/replay.html.j2` escapes every text.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kdissect.atomic_file import atomic_write
from kdissect.replay.model import Verdict
from kdissect.replay.output.junit import headline
from kdissect.replay.output.results import ApiResult, Results, judgement_of, show_ns, timestamp
from kdissect.text import visible

# Verdicts whose reasons have a table of their own, with its heading.
_REASONS = (
    (Verdict.ERROR, "Errors"),
    (Verdict.DIFFERENT, "Findings"),
    (Verdict.SKIPPED, "Skipped"),
)

Reasons = list[tuple[tuple[str, str, str], int]]


def write_html(results: Results, path: Path) -> None:
    """Write the page whole, or not at all."""
    with atomic_write(path) as partial:
        Path(partial).write_text(_page(results) + "\n", "utf-8", "backslashreplace")


def _page(results: Results) -> str:
    environment = Environment(
        loader=PackageLoader("kdissect.replay.output"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True,
    )  # fmt: skip
    environment.filters |= {"visible": visible, "time": show_ns, "timestamp": timestamp}
    counts = results.verdicts()
    roots, groups = results.root_groups(), results.groups()
    return environment.get_template("replay.html.j2").render(
        results=results,
        verdicts=[(verdict.value, counts[verdict]) for verdict in Verdict],
        roots=roots,
        different=groups if len(groups) > len(roots) else [],
        tolerated=results.groups(tolerated=True),
        reasons=[(title, rows) for each, title in _REASONS if (rows := _reasons(results, each))],
        latencies=_latencies(results.by_api()),
    )


def _reasons(results: Results, verdict: Verdict) -> Reasons:
    """((API, kind, reason), count) of outcomes whose verdict has no place in a message."""
    reasons: Counter[tuple[str, str, str]] = Counter()
    for outcome in results.outcomes:
        judgement = judgement_of(outcome)
        if judgement.verdict is verdict and not judgement.differences:
            kind = outcome.skipped.code.value if outcome.skipped else ""
            reasons[outcome.step.api_name, kind, headline(judgement)] += 1
    return reasons.most_common()


def _latencies(rows: list[ApiResult]) -> list[dict[str, Any]]:
    """Percentiles of each API in nanoseconds; bars of p99 in percent of the widest."""
    widest = max(
        (span.p99 or 0 for row in rows for span in (row.captured, row.answered)), default=0
    )
    latencies = []
    for row in rows:
        then, now = row.captured, row.answered
        latencies.append(
            {
                "api_name": row.api_name,
                "counts": [row.verdicts[verdict] for verdict in Verdict],
                "times": (then.p50, now.p50, then.p95, now.p95, then.p99, now.p99),
                "bars": [
                    (name, 100 * (span.p99 or 0) / widest if widest else 0)
                    for name, span in (("then", then), ("now", now))
                    if span.count
                ],
            }
        )
    return latencies
