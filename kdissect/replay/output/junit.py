"""JUnit XML of a replay: a test suite per API, a test case per exchange.

The dialect is what GitHub's reporters and Jenkins read alike: testsuites > testsuite > testcase
with failure, error, skipped, system-out. A verdict that --fail-on does not name passes, and says
what it saw in system-out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from kdissect.replay.comparison.value_text import text_of
from kdissect.replay.model import Judgement, Outcome, Verdict
from kdissect.replay.output.results import Results, judgement_of, timestamp

# what XML 1.0 cannot hold, escaped or not
_UNPRINTABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(results: Results, path: Path) -> None:
    """Write the file whole, or not at all."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        for line in _lines(results):
            file.write(line + "\n")
    partial.replace(path)


def _lines(results: Results) -> Iterator[str]:
    suites: dict[tuple[int, str], list[Outcome]] = {}
    for outcome in results.outcomes:
        step = outcome.step
        suites.setdefault((step.exchange.api_key, step.api_name), []).append(outcome)
    run = _Counts()
    run.tests, run.errors = 1, int(bool(results.run.ended))
    total = _Counts()
    total.add(run)
    counted = {}
    for key, outcomes in suites.items():
        counted[key] = _count(results, outcomes)
        total.add(counted[key])
    began = timestamp(results.run.start_time_ns) or ""
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    seconds = results.run.elapsed_ns / 1e9
    yield f'<testsuites name="kdissect replay" {total} time="{seconds:.6f}">'
    yield f'<testsuite name="replay" {run} time="{seconds:.6f}" timestamp={_attribute(began)}>'
    yield from _properties(results)
    yield '<testcase classname="kdissect.replay" name="the run reaches its end">'
    if results.run.ended:
        yield f'<error message={_attribute(results.run.ended)} type="run"/>'
    yield "</testcase>"
    yield "</testsuite>"
    for key in sorted(suites):
        seconds = sum(max(each.latency_ns, 0) for each in suites[key]) / 1e9
        yield (
            f"<testsuite name={_attribute(key[1])} {counted[key]} "
            f'time="{seconds:.6f}" timestamp={_attribute(began)}>'
        )
        for outcome in suites[key]:
            yield from _case(results, outcome)
        yield "</testsuite>"
    yield "</testsuites>"


class _Counts:
    """The counting attributes of a suite."""

    def __init__(self) -> None:
        self.tests = self.failures = self.errors = self.skipped = 0

    def add(self, other: _Counts) -> None:
        self.tests += other.tests
        self.failures += other.failures
        self.errors += other.errors
        self.skipped += other.skipped

    def __str__(self) -> str:
        return (
            f'tests="{self.tests}" failures="{self.failures}" errors="{self.errors}" '
            f'skipped="{self.skipped}"'
        )


def _count(results: Results, outcomes: list[Outcome]) -> _Counts:
    counts = _Counts()
    for outcome in outcomes:
        counts.tests += 1
        element = _element(results, judgement_of(outcome).verdict)
        counts.failures += element == "failure"
        counts.errors += element == "error"
        counts.skipped += element == "skipped"
    return counts


def _element(results: Results, verdict: Verdict) -> str:
    """The child that tells the verdict; "" for a test case that passes."""
    if verdict in results.fail_on:
        return "error" if verdict is Verdict.ERROR else "failure"
    return "skipped" if verdict is Verdict.SKIPPED else ""


def _properties(results: Results) -> Iterator[str]:
    lag = results.lag()
    values = {
        "source": results.plan.workload.source,
        "target": results.target,
        "cluster_id": results.cluster_id or "",
        "pace": results.pace,
        "compared_with": f"{results.reference.value} {results.reference_name}".strip(),
        "fail_on": ",".join(sorted(verdict.value for verdict in results.fail_on)),
        "lag_p99_ms": "" if lag.p99 is None else f"{lag.p99 / 1e6:.3f}",
    }
    yield "<properties>"
    for name, value in values.items():
        yield f"<property name={_attribute(name)} value={_attribute(value)}/>"
    yield "</properties>"


def _case(results: Results, outcome: Outcome) -> Iterator[str]:
    step, judgement = outcome.step, judgement_of(outcome)
    exchange = step.exchange
    client = f" of {exchange.client_id}" if exchange.client_id else ""
    name = f"{step.api_name} v{exchange.api_version} exchange {exchange.exchange_id}{client}"
    seconds = max(outcome.latency_ns, 0) / 1e9
    head = (
        f"<testcase classname={_attribute('kdissect.replay.' + step.api_name)} "
        f'name={_attribute(name)} time="{seconds:.6f}"'
    )
    element = _element(results, judgement.verdict)
    if not element and judgement.verdict is Verdict.SAME and not outcome.dropped:
        yield head + "/>"
        return
    yield head + ">"
    if element:
        body = _text(_details(outcome, judgement)) if element != "skipped" else ""
        yield (
            f"<{element} message={_attribute(headline(judgement))} "
            f"type={_attribute(judgement.verdict.value)}>{body}</{element}>"
        )
    else:
        yield f"<system-out>{_text(_details(outcome, judgement))}</system-out>"
    yield "</testcase>"


def headline(judgement: Judgement) -> str:
    """The judgement in one line."""
    telling = [each for each in judgement.differences if not each.rule] or judgement.differences
    if not telling:
        return judgement.reason or judgement.verdict.value
    first = telling[0]
    more = f" (and {len(telling) - 1} more)" if len(telling) > 1 else ""
    return f"{first.path}: captured {first.captured}, answered {first.answered}{more}"


def _details(outcome: Outcome, judgement: Judgement) -> str:
    exchange = outcome.step.exchange
    lines = [f"{judgement.verdict.value}: {judgement.reason}".rstrip(": ")]
    for each in judgement.differences:
        line = f"{each.path}: captured {each.captured}, answered {each.answered}"
        line += f" [tolerated by {each.rule}]" if each.rule else ""
        lines.append(line + (f" ({each.note})" if each.note else ""))
    lines += [
        f"v{outcome.api_version} has no {each.path}: {text_of(each.value)} was not sent"
        for each in outcome.dropped
    ]
    where = [f"exchange {exchange.exchange_id}", f"connection {outcome.step.connection}"]
    if exchange.request_packet >= 0:
        where.append(f"{exchange.capture} packet {exchange.request_packet}".strip())
    return "\n".join([*lines, ", ".join(where)])


def _attribute(text: str) -> str:
    return quoteattr(_UNPRINTABLE.sub("\ufffd", text))


def _text(text: str) -> str:
    return escape(_UNPRINTABLE.sub("\ufffd", text))
