"""One self-contained page of a replay: verdicts, differences, latency then and now, lag.

The page has no script and loads nothing. `templates/replay.html.j2` escapes every text.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kdissect.atomic_file import atomic_write
from kdissect.replay.comparison.findings import Finding
from kdissect.replay.model import Verdict
from kdissect.replay.output.results import ApiResult, Results, show_ns, timestamp
from kdissect.replay.output.text import (
    code_names,
    finding_text,
    followers_of,
    note_of,
    release_lines,
    texts_of,
)
from kdissect.text import visible

# Verdicts whose reasons have a table of their own, with its heading.
_REASONS = (
    (Verdict.ERROR, "Errors"),
    (Verdict.DIFFERENT, "Findings"),
    (Verdict.SKIPPED, "Skipped"),
)


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
    groups = results.groups()
    return environment.get_template("replay.html.j2").render(
        results=results,
        verdicts=[(verdict.value, counts[verdict]) for verdict in Verdict],
        kinds=_rows(results, results.kinds),
        different=_rows(results, groups) if len(groups) > len(results.kinds) else [],
        tolerated=_rows(results, results.groups(tolerated=True)),
        changes=release_lines(results.outcomes),
        findings=[finding_text(each) for each in results.findings],
        reasons=[(title, rows) for each, title in _REASONS if (rows := results.reasons(each))],
        latencies=_latencies(results.by_api()),
    )


def _rows(results: Results, kinds: Iterable[Finding]) -> list[dict[str, Any]]:
    """The cells of a table of differences."""
    rows = []
    for each in kinds:
        one = each.example
        captured, answered = code_names(one) or texts_of(results.api_key(each), one)
        notes = each.notes or [note_of(one)]
        rows.append(
            {
                "count": each.count, "api_name": each.api_name, "place": one.place,
                "captured": captured, "answered": answered, "path": one.path,
                "means": " ".join(filter(None, [one.rule, "; ".join(filter(None, notes))])),
                "exchange": results.exchange_id(each.step), "followers": followers_of(each),
            }
        )  # fmt: skip
    return rows


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
