"""Files of a replay for others: JUnit XML, and one self-contained HTML page.

In the XML an API is a test suite, and an exchange a test case. The dialect is what GitHub's
reporters and Jenkins read alike: testsuites > testsuite > testcase with failure, error, skipped,
system-out. A verdict that --fail-on does not name passes, and says what it saw in system-out.

The page has no script and loads nothing. `templates/replay.html.j2` escapes every text.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from jinja2 import Environment, PackageLoader, StrictUndefined

from kdissect.atomic_file import atomic_write
from kdissect.replay.model import Verdict
from kdissect.replay.output.rows import Results, Row, rows, summary_row, timestamp
from kdissect.replay.output.text import finding_text, followers_text, release_lines, time_text
from kdissect.text import visible

# Characters that XML 1.0 cannot hold, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def write_junit(results: Results, path: Path) -> None:
    """Write the file whole, or not at all."""
    tree = ElementTree.ElementTree(_suites(results))
    ElementTree.indent(tree, "")
    with atomic_write(path) as partial:
        tree.write(partial, "utf-8", xml_declaration=True)


def _suites(results: Results) -> Element:
    first, *exchanges, summary = rows(results)
    root = Element("testsuites", {"name": "kdissect replay"})
    suite = SubElement(root, "testsuite", {"name": "replay"})
    _add_run(results, first, summary, suite)
    exchanges.sort(key=lambda row: (row["api_key"], row["step"]))
    for api_name, of_api in groupby(exchanges, key=lambda row: str(row["api_name"])):
        suite = SubElement(root, "testsuite", {"name": _text(api_name)})
        for row in of_api:
            _add_exchange(results, row, suite)
        _count(suite, sum(float(case.get("time", 0)) for case in suite))
    _count(root[0], summary["elapsed_s"])
    _count(root, summary["elapsed_s"])
    for suite in root:
        suite.set("timestamp", first["start_time"] or "")
    return root


def _count(element: Element, seconds: float) -> None:
    """Give a suite, or all of them, its counts and duration."""
    element.set("tests", str(len([*element.iter("testcase")])))
    for name, tag in _COUNTED.items():
        element.set(name, str(len([*element.iter(tag)])))
    element.set("time", _seconds(seconds))


def _seconds(seconds: float) -> str:
    return f"{seconds:.6f}"


def _add_run(results: Results, first: Row, summary: Row, suite: Element) -> None:
    """Properties of the run, and a case for its end and each finding about the whole of it."""
    lag = summary["lag"]["p99_us"]
    values = {
        **{name: first[name] for name in ("source", "target", "cluster_id", "pace")},
        "compared_with": results.compared_with,
        "fail_on": ",".join(sorted(results.fail_on)),
        "lag_p99_ms": "" if lag is None else f"{lag / 1e3:.3f}",
    }
    properties = SubElement(suite, "properties")
    for name, value in values.items():
        SubElement(properties, "property", name=name, value=_text(value or ""))
    case = _case(suite, "kdissect.replay", "the run reaches its end")
    if summary["ended"]:
        SubElement(case, "error", message=_text(summary["ended"]), type="run")
    for finding in results.findings:
        case = _case(suite, "kdissect.replay", f"{finding.kind} of {finding.subject}")
        if results.fails(finding):
            SubElement(case, "failure", message=_text(finding_text(finding)), type=finding.kind)
        else:
            SubElement(case, "system-out").text = _text(finding_text(finding))
    if lines := release_lines(summary["release_changes"]):
        case = _case(suite, "kdissect.replay", "changes of this release")
        SubElement(case, "system-out").text = _text("\n".join(lines))


def _case(suite: Element, class_name: str, name: str) -> Element:
    return SubElement(suite, "testcase", classname=_text(class_name), name=_text(name))


def _add_exchange(results: Results, row: Row, suite: Element) -> None:
    client = f" of {row['client_id']}" if row["client_id"] else ""
    name = f"{row['api_name']} v{row['api_version']} exchange {row['exchange_id']}{client}"
    case = _case(suite, f"kdissect.replay.{row['api_name']}", name)
    case.set("time", _seconds((row["latency_us"] or 0) / 1e6))
    verdict = Verdict(row["verdict"])
    tag = "skipped" if verdict is Verdict.SKIPPED else ""
    if verdict.value in results.fail_on:
        tag = "error" if verdict is Verdict.ERROR else "failure"
    if tag:
        child = SubElement(case, tag, message=_text(_headline(row)), type=verdict.value)
        child.text = _text(_details(row)) if tag != "skipped" else None
    elif verdict is not Verdict.SAME or row["dropped"] or row["earlier_answers"]:
        SubElement(case, "system-out").text = _text(_details(row))


def _headline(row: Row) -> str:
    """The judgement in one line."""
    telling = [each for each in row["differences"] if not each["rule"]] or row["differences"]
    if not telling:
        return str(row["reason"] or row["verdict"])
    more = f" (and {len(telling) - 1} more)" if len(telling) > 1 else ""
    return f"{_line(telling[0])}{more}"


def _line(one: Row) -> str:
    return f"{one['path']}: captured {one['captured']}, answered {one['answered']}"


def _details(row: Row) -> str:
    lines = [f"{row['verdict']}: {row['reason'] or ''}".rstrip(": ")]
    for each in row["differences"]:
        rule = f" [tolerated by {each['rule']}]" if each["rule"] else ""
        lines.append(f"{_line(each)}{rule}" + (f" ({each['note']})" if each["note"] else ""))
    lines += [
        f"v{row['sent_api_version']} has no {each['path']}: {each['value']} was not sent"
        for each in row["dropped"]
    ]
    lines += [
        f"answer {index} was not final: {each['reason']}"
        for index, each in enumerate(row["earlier_answers"], 1)
    ]
    where = [f"exchange {row['exchange_id']}", f"connection {row['connection']}"]
    if row["request_packet"] is not None:
        where.append(f"{row['capture'] or ''} packet {row['request_packet']}".strip())
    return "\n".join([*lines, ", ".join(where)])


def _text(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


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
        "visible": visible, "time": time_text, "timestamp": timestamp, "followers": followers_text,
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
