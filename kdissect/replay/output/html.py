"""One self-contained page of a replay: verdicts, differences, latency then and now, lag.

The page has no script and loads nothing. `templates/replay.html.j2` escapes every text.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from kdissect.atomic_file import atomic_write
from kdissect.replay.model import Verdict
from kdissect.replay.output.rows import Results, summary_row, timestamp
from kdissect.replay.output.text import finding_text, followers_text, release_lines, show_us
from kdissect.text import visible


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
    spans = [each[name] for each in summary["apis"] for name in ("captured_latency", "latency")]
    return environment.get_template("replay.html.j2").render(
        results=results,
        summary=summary,
        verdicts=[verdict.value for verdict in Verdict],
        changes=release_lines(summary["release_changes"]),
        findings=[finding_text(each) for each in results.findings],
        widest=max((span["p99_us"] for span in spans if span["count"]), default=0),
    )
