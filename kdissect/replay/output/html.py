"""One self-contained page of a replay: verdicts, differences, latency then and now, lag.

No script, nothing loaded; every text of the capture or the target is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from kdissect.replay.comparison.grouping import DifferenceGroup
from kdissect.replay.model import Verdict
from kdissect.replay.output.junit import headline
from kdissect.replay.output.results import (
    ApiResult,
    Results,
    Span,
    judgement_of,
    show_ns,
    timestamp,
)
from kdissect.text import visible

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --then: #7a8fb5; --now: #d98a3d; --bad: #c33;
  --good: #2a7d46; --grey: #8888 }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } caption { text-align: left }
th, td { padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line) }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
code { overflow-wrap: anywhere } .tiles { display: flex; gap: 1.5rem; flex-wrap: wrap }
.tiles div { border-left: 4px solid var(--grey); padding: 0 .7rem } .tiles b { font-size: 1.7rem;
  display: block } .same, .tolerated { border-color: var(--good) !important }
.different, .error { border-color: var(--bad) !important }
.bar { height: .55rem; min-width: 1px } .then { background: var(--then) }
.now { background: var(--now) }
.bars { width: 16rem } .ended { border: 2px solid var(--bad); padding: .5rem 1rem }
"""


def write_html(results: Results, path: Path) -> None:
    """Write the page whole, or not at all."""
    partial = path.with_name(path.name + ".partial")
    text = "\n".join(_page(results)) + "\n"
    partial.write_bytes(text.encode("utf-8", "backslashreplace"))
    partial.replace(path)


def _page(results: Results) -> Iterator[str]:
    workload = results.plan.workload
    title = f"Replay of {workload.source} to {results.target}"
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield (
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    )
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{_text(title)}</h1>"
    yield from _facts(results)
    yield from _tiles(results)
    yield from _differences(results)
    yield from _reasons(results)
    yield from _latencies(results)
    yield from _lag(results)
    yield from _prepared(results)
    yield "</body></html>"


def _facts(results: Results) -> Iterator[str]:
    run = results.run
    compared = f"{results.reference.value} {results.reference_name}".strip()
    yield (
        f"<p>Cluster {_text(results.cluster_id or 'unknown')}, {timestamp(run.start_time_ns)}, "
        f"pace {_text(results.pace)}, compared with {_text(compared)}. "
        f"{results.sent_count} requests on {results.connection_count()} connections in "
        f"{run.elapsed_ns / 1e9:.1f} s ({results.requests_per_s():.0f} a second).</p>"
    )
    if run.ended:
        yield f'<p class="ended">The run ended early: {_text(run.ended)}</p>'
    for note in [*results.plan.workload.notes, *results.plan.notes, *results.notes]:
        yield f"<p>Note: {_text(note)}</p>"


def _tiles(results: Results) -> Iterator[str]:
    counts = results.verdicts()
    yield '<div class="tiles">'
    for verdict in Verdict:
        yield f'<div class="{verdict.value}"><b>{counts[verdict]}</b>{verdict.value}</div>'
    yield "</div>"


def _differences(results: Results) -> Iterator[str]:
    groups = results.groups()
    yield f"<h2>Differences ({len(groups)} kinds)</h2>"
    if not groups:
        yield "<p>None.</p>"
    else:
        yield from _groups(results, groups, "What it means")
    if tolerated := results.groups(tolerated=True):
        yield f"<details><summary>Tolerated ({len(tolerated)} kinds)</summary>"
        yield from _groups(results, tolerated, "Rule")
        yield "</details>"


def _groups(results: Results, groups: list[DifferenceGroup], why: str) -> Iterator[str]:
    yield from _table(
        ("Count", "API", "Where", "Captured", "Answered", why, "Example"),
        (
            (
                str(each.count),
                _text(each.api_name),
                _code(each.path),
                _code(each.captured),
                _code(each.answered),
                _text(" ".join(part for part in (each.rule, each.note) if part)),
                f"exchange {results.exchange_id(each.example)} {_code(each.example_path)}",
            )
            for each in groups
        ),
        numbers=(0,),
    )


def _reasons(results: Results) -> Iterator[str]:
    """Errors, findings without a place in a message, skipped ones, by reason."""
    for verdict, title in (
        (Verdict.ERROR, "Errors"),
        (Verdict.DIFFERENT, "Findings"),
        (Verdict.SKIPPED, "Skipped"),
    ):
        reasons: Counter[tuple[str, str, str]] = Counter()
        for outcome in results.outcomes:
            judgement = judgement_of(outcome)
            if judgement.verdict is verdict and not judgement.differences:
                code = outcome.skipped.code.value if outcome.skipped else ""
                reasons[outcome.step.api_name, code, headline(judgement)] += 1
        if reasons:
            yield f"<h2>{title}</h2>"
            yield from _table(
                ("Count", "API", "Kind", "Why"),
                (
                    (str(count), _text(name), _text(code), _text(reason))
                    for (name, code, reason), count in reasons.most_common()
                ),
                numbers=(0,),
            )


def _latencies(results: Results) -> Iterator[str]:
    rows = results.by_api()
    top = max(
        (span.p99 or 0 for each in rows for span in (each.captured, each.answered)), default=0
    )
    yield "<h2>Latency then and now</h2>"
    yield (
        "<p>From the last byte of a request to the first of its answer, as captured and as seen by "
        "the replay. Requests that wait at the broker (Fetch, JoinGroup) show their waiting. "
        "Bars: p99, on one scale.</p>"
    )
    names = ("API", *(verdict.value for verdict in Verdict), "p50 then", "now", "p95 then", "now",
             "p99 then", "now", "")  # fmt: skip
    yield from _table(names, (_latency_row(each, top) for each in rows), numbers=range(1, 12))


def _latency_row(each: ApiResult, top: int) -> Sequence[str]:
    then, now = each.captured, each.answered
    counts = [str(each.verdicts[verdict] or "") for verdict in Verdict]
    times = (then.p50, now.p50, then.p95, now.p95, then.p99, now.p99)
    bars = "".join(
        f'<div class="bar {name}" style="width:{100 * (span.p99 or 0) / top if top else 0:.1f}%">'
        "</div>"
        for name, span in (("then", then), ("now", now))
        if span.count
    )
    shown = [show_ns(ns) for ns in times]
    return [_text(each.api_name), *counts, *shown, f'<div class="bars">{bars}</div>']


def _lag(results: Results) -> Iterator[str]:
    yield "<h2>Lag behind the schedule</h2>"
    if not results.is_timed:
        yield "<p>None: at pace max nothing is scheduled.</p>"
        return
    spans = (("behind schedule", results.lag()), ("not waiting for answers", results.own_lag()))
    yield from _table(
        ("", "requests", "p50", "p95", "p99", "max"),
        ((name, str(span.count), *_show(span)) for name, span in spans),
        numbers=range(1, 6),
    )


def _show(span: Span) -> Iterator[str]:
    for ns in (span.p50, span.p95, span.p99, span.max):
        yield show_ns(ns)


def _prepared(results: Results) -> Iterator[str]:
    if results.prepared:
        yield "<h2>Topics made before</h2>"
        rows = (
            (_text(each.name), str(each.partition_count), _text(each.note))
            for each in results.prepared
        )
        yield from _table(("topic", "partitions", ""), rows, numbers=(1,))


def _table(
    names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()
) -> Iterator[str]:
    """Cells are HTML already."""
    right = set(numbers)
    mark = [' class="n"' if number in right else "" for number in range(len(names))]
    yield "<table><thead><tr>"
    yield "".join(f"<th{mark[n]}>{_text(name)}</th>" for n, name in enumerate(names))
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = "".join(f"<td{mark[n]}>{cell}</td>" for n, cell in enumerate(row))
        yield f"<tr>{cells}</tr>"
    yield "</tbody></table>"


def _text(text: str) -> str:
    return escape(visible(text))


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>"
