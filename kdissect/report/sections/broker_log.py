"""The broker's own times beside those of the capture: how the two differ.

A broker that logs its requests says of each how long it took (`total_time_ms`: from when it had
read the request to when it had sent the answer). The capture's latency ends with the first byte of
the answer and includes the way to the broker and back where the capture was taken at the client. A
broker reads the next request of a connection only when it has answered the one before, and its
clock starts then: it is `service_ms` that has to agree, `latency_ms` does where
clients do not pipeline.

A log is lines of JSON, gzip-compressed or not: Kafka's own request log ("Completed request:{...}"),
or objects with client [ip, port], correlation_id, api_key and total_time_ms.
"""

from __future__ import annotations

import gzip
import ipaddress
import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect import text as f
from kdissect.charts import Chart, columns_of, histogram, logarithmic_edges, times_beside
from kdissect.errors import CaptureError
from kdissect.report.document import Block, Document, Listing, Options
from kdissect.sql import Database

CELLS_PER_DECADE = 12
_HISTOGRAM_BINS = 48
_CHUNK = 50_000
# local address - remote address - index of the connection (- index of the processor)
_CONNECTION = re.compile(r"^.*:\d+-\[?(?P<ip>[^\]]*)\]?:(?P<port>\d+)(-\d+)+$")

LOG_SCHEMA = pa.schema(
    [
        ("client_ip", pa.string()),
        ("client_port", pa.int32()),
        ("correlation_id", pa.int32()),
        ("api_key", pa.int16()),
        ("total_time_ms", pa.float64()),
        ("number", pa.int64()),
    ]
)


def read_log(path: str) -> Iterator[tuple[str, int, int, int, float]]:
    """(client ip, client port, correlation id, api key, total time in ms) of a log's requests.

    Requests that a broker forwarded are left out: on the wire they are inside an Envelope.
    Raises CaptureError for a file that cannot be read or has no such line.
    """
    has_entries = False
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with (
            gzip.open(path, "rt", errors="replace")
            if packed
            else open(path, errors="replace") as lines
        ):
            for line in lines:
                entry = _entry(line)
                if entry is not None:
                    has_entries = True
                    yield entry
    except (OSError, EOFError) as error:
        raise CaptureError(f"{path}: not readable ({error})") from error
    if not has_entries:
        raise CaptureError(
            f"{path}: no line of a request log in it; wanted are Kafka's "
            "'Completed request:{...}' lines (logger kafka.request.logger at DEBUG)"
        )


def _entry(line: str) -> tuple[str, int, int, int, float] | None:
    start = line.find("{")
    if start < 0:
        return None
    try:
        said = json.loads(line[start:])
        if "requestHeader" in said:
            header = said["requestHeader"]
            match = _CONNECTION.match(said["connection"])
            if match is None or said.get("isForwarded"):
                return None
            ip, port = match["ip"], int(match["port"])
            numbers = int(header["correlationId"]), int(header["requestApiKey"])
            return _canonical(ip), port, *numbers, float(said["totalTimeMs"])
        if said.get("forwarded"):
            return None
        ip, port = said["client"]
        numbers = int(said["correlation_id"]), int(said["api_key"])
        return _canonical(ip), int(port), *numbers, float(said["total_time_ms"])
    except (ValueError, KeyError, TypeError):
        return None


def _canonical(ip: str) -> str:
    address = ipaddress.ip_address(ip)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _load(database: Database, paths: Sequence[str]) -> None:
    """Make the table `broker_log` of the requests in logs."""
    database.create("broker_log", LOG_SCHEMA.empty_table())
    entries = enumerate(entry for path in paths for entry in read_log(path))
    while chunk := [(*entry, number) for number, entry in islice(entries, _CHUNK)]:
        rows = [list(column) for column in zip(*chunk, strict=True)]
        database.create("logged_chunk", pa.table(rows, schema=LOG_SCHEMA))
        database.run("INSERT INTO broker_log FROM logged_chunk; DROP TABLE logged_chunk")


def collect(database: Database, options: Options) -> Document | None:
    """Table `broker_times`, and the distribution of the difference. None without a log."""
    paths = options.broker_logs
    if not paths:
        return None
    _load(database, paths)
    # a correlation id may come again on a connection: the nth in the capture is the nth in the log
    database.run(
        """
        CREATE TEMP TABLE broker_times AS
        WITH logged AS (
          SELECT *, row_number() OVER (
            PARTITION BY client_ip, client_port, correlation_id, api_key ORDER BY number) AS nth
          FROM broker_log
        ), seen AS (
          SELECT e.exchange_id, e.client_ip, e.client_port, e.correlation_id, e.api_key,
            e.latency_ms,
            row_number() OVER (
              PARTITION BY client_ip, client_port, correlation_id, api_key
              ORDER BY request_time_ns, exchange_id) AS nth
          FROM exchanges e WHERE request_time IS NOT NULL
        )
        SELECT s.exchange_id, x.api, x.client_id, x.client_ip, x.broker, x.request_time,
          s.latency_ms,
          x.service_ms, x.queued_ms, l.total_time_ms,
          l.total_time_ms - x.service_ms AS difference_ms, x.wait
        FROM seen s JOIN logged l USING (client_ip, client_port, correlation_id, api_key, nth)
        JOIN requests x USING (exchange_id)
        WHERE x.service_ms IS NOT NULL
        """
    )
    share = ", ".join(
        f"quantile_cont(difference_ms, {q}) AS p{q * 100:g}"
        for q in (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
    )
    spread = f"count(*) AS count, {share}, min(difference_ms) AS min, max(difference_ms) AS max"
    totals = database.row(f"SELECT {spread} FROM broker_times")
    differences = database.table("SELECT difference_ms FROM broker_times")["difference_ms"]
    cells = database.rows(
        f"""
        SELECT floor(log10(greatest(service_ms, 0.01)) * {CELLS_PER_DECADE})::INTEGER AS bin,
          floor(log10(greatest(total_time_ms, 0.01)) * {CELLS_PER_DECADE})::INTEGER AS log_bin,
          count(*) AS count FROM broker_times GROUP BY ALL ORDER BY ALL
        """
    )
    return {
        "files": [Path(path).name for path in paths],
        "logged": database.value("SELECT count(*) FROM broker_log"),
        "matched": totals["count"],
        "difference_ms": totals,
        "by_api": database.rows(
            f"SELECT api, {spread} FROM broker_times GROUP BY api ORDER BY count DESC, api"
        ),
        "histogram": _histogram(differences.to_numpy()),
        "cells": {
            "bins_per_decade": CELLS_PER_DECADE,
            **columns_of(cells, "bin", "log_bin", "count"),
        },
    }


def _histogram(difference: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Counts of equal bins over the middle 98 %, and how many lie below and above."""
    if not len(difference):
        return {"edges": [], "counts": [], "below": 0, "above": 0}
    low, high = (float(value) for value in np.quantile(difference, [0.01, 0.99]))
    high = max(high, low + 1e-3)
    counts, edges = np.histogram(difference, bins=_HISTOGRAM_BINS, range=(low, high))
    return {
        "edges": [round(float(edge), 6) for edge in edges],
        "counts": [int(count) for count in counts],
        "below": int((difference < low).sum()),
        "above": int((difference > high).sum()),
    }


def blocks(d: Document | None) -> list[Block]:
    """Return what the section on latency shows of it."""
    if not d:
        return []
    rows = [{"api": "all", **d["difference_ms"]}, *d["by_api"]]
    return [
        f"Beside the broker's own times: {_text(d)}",
        (_difference(d["histogram"]), _cells(d["cells"])),
        Listing("broker_times", rows),
    ]


def _text(d: Document) -> str:
    spread = d["difference_ms"]
    return (
        f"{f.count(d['matched'])} of {f.count(d['logged'])} logged requests are in the capture "
        f"with an answer. The broker's total time less `service_ms`: p1 "
        f"{f.decimal(spread['p1'])} ms, median {f.decimal(spread['p50'])} ms, p99 "
        f"{f.decimal(spread['p99'])} ms."
    )


def _difference(d: dict[str, Any]) -> Chart | None:
    """The broker's time less the capture's."""
    if not d["edges"]:
        return None
    return histogram(
        "broker-difference",
        "How the broker's times differ",
        f"The middle 98 %; {f.count(d['below'])} lie below and {f.count(d['above'])} above.",
        {
            "series": ["exchanges"] * len(d["counts"]),
            "from": d["edges"][:-1],
            "to": d["edges"][1:],
            "count": d["counts"],
        },
        ("exchanges",),
        x_title="broker's time less the capture's, ms",
        x_scale={"type": "linear"},
        count_title="exchanges",
        count_scale="symlog",
    )


def _cells(d: dict[str, Any]) -> Chart | None:
    """The capture's time against the broker's."""
    if not d["bin"]:
        return None
    return times_beside(
        "broker-cells",
        "The capture's time beside the broker's",
        "On the diagonal both agree.",
        {
            **logarithmic_edges(d["bin"], d["bins_per_decade"], ("capture", "capture_to")),
            **logarithmic_edges(d["log_bin"], d["bins_per_decade"], ("broker", "broker_to")),
            "count": d["count"],
        },
    )
