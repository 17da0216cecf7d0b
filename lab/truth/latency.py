"""`service_ms` beside the total times of the brokers' request logs.

Recordings of one machine, quiet and busy, have more times: a line of ``server.log`` is written
after the response was sent, so its time less the total time is when the broker had read it.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kdissect
from kdissect import Tables
from lab.truth import logged
from lab.truth.captures import log_of, read_capture
from lab.truth.section import table
from tests.truth.latency import (
    CORRELATION,
    SHARE_OF_ALL,
    SHARE_OF_EACH,
    SLOW_COUNT,
    SLOW_MS,
    WITHIN_MS,
    Compared,
    compare,
    together,
)
from tests.truth.request_log import read_lines

LINE_MS = 5.0  # at most, from the line in the log to the response's packet
PLACES = BEFORE, SENDING, OTHER = "before", "sending", "other"


def explain(tables: Tables, log: Path) -> Counter[str]:
    """The requests beyond WITHIN_MS by the place of their difference.

    `before`: between the request's packet, or the previous response, and the broker's reading.
    `sending`: the broker had sent the response, and had not noticed it yet.
    """
    rows: dict[logged.Key, list[tuple[float, float]]] = defaultdict(list)
    for row in tables.sql(_STARTS).to_pylist():
        key = (row["client_port"], row["correlation_id"], row["api_key"])
        rows[key].append((row["start_ms"], row["service_ms"]))
    places = Counter[str]()
    for key, time_of_line, values in logged.read_requests(log):
        if not rows[key]:
            continue
        start, service = rows[key].pop(0)
        difference = service - values["totalTimeMs"]
        before = time_of_line - values["totalTimeMs"] - start
        if abs(difference) <= WITHIN_MS:
            continue
        if difference > 0 and difference <= before + LINE_MS:
            places[BEFORE] += 1
        elif difference < 0 and -difference <= values["sendTimeMs"]:
            places[SENDING] += 1
        else:
            places[OTHER] += 1
    return places


_STARTS = """
    select client_port, correlation_id, api_key,
        epoch_ns(request_end_time) / 1e6 + queued_ms as start_ms, service_ms
    from exchanges where service_ms is not null order by request_time_ns
"""


def section(captures: Path) -> str:
    """The section of the page."""
    compared = [
        compare(f"{path.parent.name}/{path.stem}", read_capture(path), read_lines(log_of(path)))
        for path in sorted(captures.glob("*/*.pcap"))
        if log_of(path).is_file()
    ]
    total = together(compared)
    wrong = [one.name for one in compared if not one.is_right]
    if total.share < SHARE_OF_ALL:
        wrong.append("all")
    return "\n".join(
        [
            "## Latency",
            "",
            "`service_ms` of `exchanges` beside the total time of the broker's request log. Right: "
            f"{SHARE_OF_ALL:.0%} of all requests and {SHARE_OF_EACH:.0%} of each capture's within "
            f"{WITHIN_MS:g} ms, rank correlation {CORRELATION} over requests of {SLOW_MS:g} ms or "
            f"more, where there are {SLOW_COUNT}.",
            f"{len(compared) - len(wrong)} captures right, {len(wrong)} wrong, 0 not decided"
            + (f": {', '.join(wrong)}" if wrong else "")
            + ".",
            "",
            table(("capture", *_HEADS), [(one.name, *_cells(one)) for one in [*compared, total]]),
            "",
            *_recordings(),
        ]
    )


_HEADS = (
    *("requests", f"within {WITHIN_MS:g} ms", "`latency_ms`", "p95 ms", "log's p95"),
    *("slow", "rank correlation"),
)


def _cells(one: Compared) -> list[str]:
    return [
        str(len(one.service)),
        f"{one.share:.2%}",
        f"{one.latency_share:.2%}",
        f"{np.quantile(one.service, 0.95):.1f}",
        f"{np.quantile(one.logged, 0.95):.1f}",
        str(one.slow.sum()),
        "" if one.correlation is None else f"{one.correlation:.4f}",
    ]


def _logged(log: Path) -> Iterator[dict[str, Any]]:
    """The requests of a ``server.log``, as in the log beside a capture."""
    for (port, correlation_id, api_key), _, row in logged.read_requests(log):
        yield {
            "forwarded": row["isForwarded"],
            "client": (row["connection"].split("-")[1].rpartition(":")[0], port),
            "correlation_id": correlation_id,
            "api_key": api_key,
            "total_time_ms": row["totalTimeMs"],
        }


def _recordings() -> list[str]:
    """The same workloads on a quiet and on a busy machine."""
    lines = [
        "The same workloads recorded twice: with broker, clients and recorder before all other "
        f"processes of the machine (quiet), and beside {logged.BUSY_PROCESSES} processes that "
        "never pause (busy). The last columns have the requests that are not within "
        f"{WITHIN_MS:g} ms. *Before*: the whole difference lies between the request's packet and "
        "the broker's reading of it, since the line's time in the log less the total time is when "
        "the broker had read it. The log begins there, a capture and a client earlier. *Sending*: "
        "the broker's thread noticed only later that the response was sent. *Waited*: how long the "
        "broker's threads could run and had no processor, by the kernel's count.",
        "",
    ]
    rows = []
    for is_busy in (False, True):
        for path in logged.made_of_each(is_busy):
            tables, log = kdissect.read(path / "capture.pcap"), path / "server.log"
            machine = json.loads((path / "machine.json").read_text())
            places = explain(tables, log)
            waited = (f"{machine['load']:.1f}", f"{machine['waited_s']:.1f} s")
            cells = _cells(compare(path.name, tables, _logged(log)))
            rows.append((path.name, *waited, *cells, *(places[one] for one in PLACES)))
    return [*lines, table(("recording", "load average", "waited", *_HEADS, *PLACES), rows)]
