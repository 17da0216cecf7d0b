"""Files of a replay for others: JUnit XML, one HTML page, a capture or table set of its traffic.

In the XML an API is a test suite, and an exchange a test case. The dialect is what GitHub's
reporters and Jenkins read alike: testsuites > testsuite > testcase with failure, error, skipped,
system-out. A verdict that --fail-on does not name passes, and says what it saw in system-out.

The page has no script and loads nothing. `templates/replay.html.j2` escapes every text.

The capture is raw IP packets with the requests and responses of the run. It is written after the
run from the outcomes, so it costs the run no time. The payload is plaintext, also if the run used
TLS, and has no SASL exchanges. For --out the usual pipeline dissects it.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from jinja2 import Environment, PackageLoader, StrictUndefined

from kdissect import api
from kdissect.atomic_file import atomic_write
from kdissect.capture.packet_builder import BROKER, CLIENT, LINK_TYPE_RAW, Flow
from kdissect.replay.model import Verdict
from kdissect.replay.output.rows import Results, Row, rows, summary_row, timestamp
from kdissect.replay.output.text import finding_text, followers_text, release_lines, time_text
from kdissect.replay.running.runner import RunResult
from kdissect.text import visible

# Characters that XML 1.0 cannot hold, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MAGIC_NS = 0xA1B23C4D
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


# -- traffic --------------------------------------------------------------------------------------


def write_tables(result: RunResult, out: str) -> None:
    """Write a table set of the requests that the replay sent and the target's responses.

    `captures.path` is `replay.pcap`. Raises OutputError if `out` cannot be used.
    """
    ports = sorted({record.theirs[1] for record in result.links})
    with tempfile.TemporaryDirectory(prefix="kdissect-replay-") as folder:
        path = Path(folder, "replay.pcap")
        write_capture(result, path)
        api.read(path, ports=ports).write(out)


def write_capture(result: RunResult, path: Path) -> int:
    """Write a pcap file (nanoseconds); returns the number of packets."""
    flows = [Flow(_end(record.ours), _end(record.theirs)) for record in result.links]
    count = 0
    with open(path, "wb") as file:
        file.write(struct.pack("<IHHiIII", _MAGIC_NS, 2, 4, 0, 0, 1 << 18, LINK_TYPE_RAW))
        for at_ns, link, kind, payload in sorted(_events(result), key=lambda each: each[0]):
            flow, time_ns = flows[link], result.start_time_ns + at_ns
            if kind == "open":
                packets = list(flow.opened())
            elif kind == "close":
                packets = list(flow.closed())
            else:
                side = CLIENT if kind == "sent" else BROKER
                packets = list(flow.sent(side, len(payload).to_bytes(4, "big") + payload))
            for packet in packets:
                _write(file, time_ns, packet)
            count += len(packets)
    return count


def _events(result: RunResult) -> Iterator[tuple[int, int, str, bytes]]:
    """Yield the events of links: (ns since start, link, kind, frame), in order for each link."""
    for number, record in enumerate(result.links):
        yield record.opened_ns, number, "open", b""
    for attempt in result.attempts:
        yield attempt.sent_ns, attempt.link, "sent", attempt.sent
        if attempt.answer:
            yield attempt.answered_ns, attempt.link, "answer", attempt.answer
    for number, record in enumerate(result.links):
        if record.closed_ns >= 0:
            yield record.closed_ns, number, "close", b""


def _end(address: tuple[str, int]) -> tuple[str, int]:
    """Return an endpoint without the zone of a link-local address."""
    return address[0].partition("%")[0], address[1]


def _write(file: BinaryIO, time_ns: int, packet: bytes) -> None:
    seconds, rest = divmod(time_ns, 10**9)
    file.write(struct.pack("<IIII", seconds, rest, len(packet), len(packet)) + packet)
