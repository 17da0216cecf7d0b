"""Files of a replay for others: JUnit XML, one HTML page, a table set of its traffic.

In the XML an API is a test suite, and an exchange a test case. The dialect is what GitHub's
reporters and Jenkins read alike: testsuites > testsuite > testcase with failure, error, skipped,
system-out. A verdict that --fail-on does not name passes, and says what it saw in system-out.

The page has no script and loads nothing.

The traffic is raw IP packets with the requests and responses of the run. They are made after the
run from its attempts, so they cost the run no time. The payload is plaintext, also if the run used
TLS, and has no SASL exchanges. For --out the usual pipeline dissects it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from kdissect import api
from kdissect.atomic_file import atomic_write
from kdissect.capture.packet_builder import BROKER, CLIENT, LINK_TYPE_RAW, Flow
from kdissect.capture.pcapng import PcapngWriter
from kdissect.replay.output.rows import Results, rows, summary_row
from kdissect.replay.output.text import rendered
from kdissect.replay.running.runner import RunResult
from kdissect.text import visible

# Characters that XML 1.0 cannot hold, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _write(path: Path, text: str) -> None:
    """Write a file whole, or not at all."""
    with atomic_write(path) as partial_file:
        Path(partial_file).write_text(text, "utf-8", "backslashreplace")


# -- JUnit ----------------------------------------------------------------------------------------


def write_junit(results: Results, path: Path) -> None:
    first, *exchanges, summary = rows(results)
    page = rendered(
        "replay.xml.j2",
        lambda text: _NOT_XML.sub("\ufffd", text),
        results=results,
        run=first,
        rows=exchanges,
        summary=summary,
    )
    _write(path, page)


# -- the page -------------------------------------------------------------------------------------


def write_html(results: Results, path: Path) -> None:
    summary = summary_row(results)
    _write(path, rendered("replay.html.j2", visible, results=results, summary=summary))


# -- traffic --------------------------------------------------------------------------------------


def write_tables(result: RunResult, out: str) -> None:
    """Write a table set of the requests that the replay sent and the target's responses.

    `captures.path` is `replay.pcapng`. Raises OutputError if `out` cannot be used.
    """
    ports = sorted({record.theirs[1] for record in result.links})
    with tempfile.TemporaryDirectory(prefix="kdissect-replay-") as folder:
        path = Path(folder, "replay.pcapng")
        write_capture(result, path)
        api.read(path, ports=ports).write(out)


def write_capture(result: RunResult, path: Path) -> None:
    """Write the traffic as pcapng."""
    with open(path, "wb") as file:
        writer = PcapngWriter(file, "kdissect replay")
        for at_ns, packets in sorted(_events(result), key=lambda each: each[0]):
            for packet in packets():
                writer.packet(LINK_TYPE_RAW, result.start_time_ns + at_ns, packet, len(packet))


def _events(result: RunResult) -> Iterator[tuple[int, Callable[[], Iterator[bytes]]]]:
    """Yield (ns since start, its packets) of each event, in order for each link."""
    for record in result.links:
        flow = Flow(_end(record.ours), _end(record.theirs), record.opened_ns)
        yield record.opened_ns, flow.opened
        for attempt in record.attempts:
            yield attempt.sent_ns, partial(flow.sent, CLIENT, _framed(attempt.sent))
            if attempt.answer:
                yield attempt.answered_ns, partial(flow.sent, BROKER, _framed(attempt.answer))
        if record.closed_ns >= 0:
            yield record.closed_ns, flow.closed


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message


def _end(address: tuple[str, int]) -> tuple[str, int]:
    """Return an endpoint without the zone of a link-local address."""
    return address[0].partition("%")[0], address[1]
