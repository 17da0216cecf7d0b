"""JUnit XML of a replay: a test suite per API, a test case per exchange.

The dialect is what GitHub's reporters and Jenkins read alike: testsuites > testsuite > testcase
with failure, error, skipped, system-out. A verdict that --fail-on does not name passes, and says
what it saw in system-out.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from kdissect.atomic_file import atomic_write
from kdissect.replay.model import Difference, Judgement, Outcome, Verdict
from kdissect.replay.output.results import Results, judgement_of, timestamp
from kdissect.replay.output.text import (
    dropped_text,
    finding_text,
    note_of,
    release_lines,
    texts_of,
)

# Characters that XML 1.0 cannot hold, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(results: Results, path: Path) -> None:
    """Write the file whole, or not at all."""
    tree = ElementTree.ElementTree(_suites(results))
    ElementTree.indent(tree, "")
    with atomic_write(path) as partial:
        tree.write(partial, "utf-8", xml_declaration=True)


def _suites(results: Results) -> Element:
    outcomes: dict[tuple[int, str], list[Outcome]] = {}
    for outcome in results.outcomes:
        step = outcome.step
        outcomes.setdefault((step.exchange.api_key, step.api_name), []).append(outcome)
    began = timestamp(results.run.start_time_ns) or ""
    run = Counter(
        tests=1 + len(results.findings) + bool(release_lines(results.outcomes)),
        errors=int(bool(results.run.ended)),
        failures=sum(results.fails(each) for each in results.findings),
    )
    counts = {key: _count(results, each) for key, each in outcomes.items()}
    seconds = _seconds(results.run.elapsed_ns)
    total = sum(counts.values(), run)
    root = Element("testsuites", {"name": "kdissect replay", **_numbers(total), "time": seconds})
    attributes = {**_numbers(run), "time": seconds, "timestamp": began}
    suite = SubElement(root, "testsuite", {"name": "replay", **attributes})
    _properties(results, suite)
    case = SubElement(
        suite, "testcase", classname="kdissect.replay", name="the run reaches its end"
    )
    if results.run.ended:
        SubElement(case, "error", message=_text(results.run.ended), type="run")
    for finding in results.findings:
        name = f"{finding.kind} of {finding.subject}"
        case = SubElement(suite, "testcase", classname="kdissect.replay", name=_text(name))
        if results.fails(finding):
            SubElement(case, "failure", message=_text(finding_text(finding)), type=finding.kind)
        else:
            SubElement(case, "system-out").text = _text(finding_text(finding))
    if lines := release_lines(results.outcomes):
        case = SubElement(
            suite, "testcase", classname="kdissect.replay", name="changes of this release"
        )
        SubElement(case, "system-out").text = _text("\n".join(lines))
    for key in sorted(outcomes):
        seconds = _seconds(sum(max(each.latency_ns, 0) for each in outcomes[key]))
        attributes = {**_numbers(counts[key]), "time": seconds, "timestamp": began}
        suite = SubElement(root, "testsuite", {"name": _text(key[1]), **attributes})
        for outcome in outcomes[key]:
            _case(results, outcome, suite)
    return root


def _numbers(counts: Counter[str]) -> dict[str, str]:
    """The counting attributes of a suite."""
    return {name: str(counts[name]) for name in ("tests", "failures", "errors", "skipped")}


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.6f}"


def _count(results: Results, outcomes: list[Outcome]) -> Counter[str]:
    names = {"failure": "failures", "error": "errors", "skipped": "skipped"}
    elements = (_element(results, judgement_of(outcome).verdict) for outcome in outcomes)
    return Counter(tests=len(outcomes)) + Counter(names[each] for each in elements if each)


def _element(results: Results, verdict: Verdict) -> str:
    """The name of the JUnit element for a verdict: failure, error or skipped; "" if it passes."""
    if verdict in results.fail_on.verdicts:
        return "error" if verdict is Verdict.ERROR else "failure"
    return "skipped" if verdict is Verdict.SKIPPED else ""


def _properties(results: Results, suite: Element) -> None:
    lag = results.lag()
    values = {
        "source": results.plan.workload.source,
        "target": results.target,
        "cluster_id": results.cluster_id or "",
        "pace": results.pace,
        "compared_with": f"{results.reference.value} {results.reference_name}".strip(),
        "fail_on": str(results.fail_on),
        "lag_p99_ms": "" if lag.p99 is None else f"{lag.p99 / 1e6:.3f}",
    }
    properties = SubElement(suite, "properties")
    for name, value in values.items():
        SubElement(properties, "property", name=name, value=_text(value))


def _case(results: Results, outcome: Outcome, suite: Element) -> None:
    step, judgement = outcome.step, judgement_of(outcome)
    exchange = step.exchange
    client = f" of {exchange.client_id}" if exchange.client_id else ""
    name = f"{step.api_name} v{exchange.api_version} exchange {exchange.exchange_id}{client}"
    case = SubElement(
        suite, "testcase", classname=_text(f"kdissect.replay.{step.api_name}"), name=_text(name),
        time=_seconds(max(outcome.latency_ns, 0)),
    )  # fmt: skip
    element = _element(results, judgement.verdict)
    if element:
        child = SubElement(
            case,
            element,
            message=_text(headline(exchange.api_key, judgement)),
            type=judgement.verdict.value,
        )
        if element != "skipped":
            child.text = _text(_details(outcome, judgement))
    elif judgement.verdict is not Verdict.SAME or outcome.dropped or outcome.earlier:
        SubElement(case, "system-out").text = _text(_details(outcome, judgement))


def headline(api_key: int, judgement: Judgement) -> str:
    """The judgement in one line."""
    telling = [each for each in judgement.differences if not each.rule] or judgement.differences
    if not telling:
        return judgement.reason or judgement.verdict.value
    more = f" (and {len(telling) - 1} more)" if len(telling) > 1 else ""
    return f"{_line(api_key, telling[0])}{more}"


def _line(api_key: int, one: Difference) -> str:
    captured, answered = texts_of(api_key, one)
    return f"{one.path}: captured {captured}, answered {answered}"


def _details(outcome: Outcome, judgement: Judgement) -> str:
    exchange = outcome.step.exchange
    lines = [f"{judgement.verdict.value}: {judgement.reason}".rstrip(": ")]
    for each in judgement.differences:
        line = _line(exchange.api_key, each)
        line += f" [tolerated by {each.rule}]" if each.rule else ""
        note = note_of(each)
        lines.append(line + (f" ({note})" if note else ""))
    lines += [
        f"v{outcome.api_version} has no {each.path}: {dropped_text(each)} was not sent"
        for each in outcome.dropped
    ]
    for index, earlier in enumerate(outcome.earlier, 1):
        lines.append(f"answer {index} was not final: {earlier.reason}")
    where = [f"exchange {exchange.exchange_id}", f"connection {outcome.step.connection}"]
    if exchange.request_packet >= 0:
        where.append(f"{exchange.capture} packet {exchange.request_packet}".strip())
    return "\n".join([*lines, ", ".join(where)])


def _text(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
