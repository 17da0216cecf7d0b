"""One self-contained page of a replay: verdicts, differences, latency then and now, lag.

The page has no script and loads nothing. `templates/replay.html.j2` escapes every text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kdissect.atomic_file import atomic_write
from kdissect.replay.model import Verdict
from kdissect.replay.output.rows import Results, Row, summary_row, timestamp
from kdissect.replay.output.text import finding_text, followers_text, release_lines, show_us
from kdissect.text import visible

# Verdicts whose reasons have a table of their own, with its heading.
_REASONS = {Verdict.ERROR: "Errors", Verdict.DIFFERENT: "Findings", Verdict.SKIPPED: "Skipped"}


def write_html(results: Results, path: Path) -> None:
    """Write the page whole, or not at all."""
    with atomic_write(path) as partial:
        Path(partial).write_text(_page(results) + "\n", "utf-8", "backslashreplace")


def _page(results: Results) -> str:
    environment = Environment(
        loader=PackageLoader("kdissect.replay.output"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "visible": visible, "time": show_us, "timestamp": timestamp, "followers": followers_text,
    }  # fmt: skip
    summary = summary_row(results)
    return environment.get_template("replay.html.j2").render(
        results=results,
        summary=summary,
        verdicts=[verdict.value for verdict in Verdict],
        changes=release_lines(summary["release_changes"]),
        findings=[finding_text(each) for each in results.findings],
        reasons=[
            (title, [each for each in summary["reasons"] if each["verdict"] == verdict.value])
            for verdict, title in _REASONS.items()
        ],
        latencies=_latencies(summary["apis"]),
    )


def _latencies(apis: list[Row]) -> list[dict[str, Any]]:
    """Percentiles of each API in microseconds; bars of p99 in percent of the widest."""
    widest = max(
        (row[name]["p99_us"] or 0 for row in apis for name in ("captured_latency", "latency")),
        default=0,
    )
    latencies = []
    for row in apis:
        spans = row["captured_latency"], row["latency"]
        latencies.append(
            {
                "api_name": row["api_name"],
                "counts": [row["verdicts"].get(verdict.value) for verdict in Verdict],
                "times": [span[name] for name in ("p50_us", "p95_us", "p99_us") for span in spans],
                "bars": [
                    (name, 100 * span["p99_us"] / widest if widest else 0)
                    for name, span in zip(("then", "now"), spans, strict=True)
                    if span["count"]
                ],
            }
        )
    return latencies
