"""`service_ms` beside the total times of the brokers' request logs.

A broker's total time runs from when it has read a request to when it has sent the response. A log
lies beside its capture as NAME.requests.jsonl.gz. A correlation id may come again on a connection:
its nth request in the capture is the nth in the log.

Recordings of one machine, quiet and busy, have more times: a line of ``server.log`` is written
after the response was sent, so its time less the total time is when the broker had read it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kdissect
from kdissect import Tables
from kdissect.report.sections.broker_log import rank_correlation, read_log
from tools.truth import logged

WITHIN_MS = 15.0
SHARE_OF_ALL, SHARE_OF_EACH = 0.99, 0.98
SLOW_MS, SLOW_COUNT, CORRELATION = 5.0, 50, 0.94
LINE_MS = 5.0  # at most, from the line in the log to the response's packet
BEFORE, SENDING, OTHER = "before", "sending", "other"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Compared:
    """The requests of a capture that are in its log; times in ms, float64[n]."""

    name: str
    service: Floats
    latency: Floats
    logged: Floats

    @property
    def share(self) -> float:
        """Of the requests, those whose service_ms is within WITHIN_MS of the log."""
        return float((np.abs(self.service - self.logged) <= WITHIN_MS).mean())

    @property
    def latency_share(self) -> float:
        """The same of latency_ms."""
        return float((np.abs(self.latency - self.logged) <= WITHIN_MS).mean())

    @property
    def slow(self) -> npt.NDArray[np.bool_]:
        return self.logged >= SLOW_MS

    @property
    def correlation(self) -> float | None:
        """Rank correlation over the slow requests; None where there are too few."""
        if self.slow.sum() < SLOW_COUNT:
            return None
        return rank_correlation(self.service[self.slow], self.logged[self.slow])

    @property
    def is_right(self) -> bool:
        correlation = self.correlation
        return self.share >= SHARE_OF_EACH and (correlation is None or correlation >= CORRELATION)


def log_of(capture: Path) -> Path:
    """Return the path of a capture's request log, which may not exist."""
    return capture.with_suffix(".requests.jsonl.gz")


def read_capture(capture: Path) -> Tables:
    """The tables of a capture, decrypted if its key log lies beside it."""
    key_log = capture.with_suffix(".keylog")
    return kdissect.read(capture, keylog=key_log if key_log.is_file() else ())


def compare(name: str, tables: Tables, log: Path) -> Compared:
    """The exchanges of a capture beside its log."""
    keys = ("client_ip", "client_port", "correlation_id", "api_key")
    columns = tables.exchanges.to_arrow([*keys, "request_time_ns", "service_ms", "latency_ms"])
    logged: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for *key, total in read_log(str(log)):
        logged[tuple(key)].append(total)
    pairs = []
    for row in columns.sort_by("request_time_ns").to_pylist():
        times = logged.get(tuple(row[name] for name in keys))
        if row["request_time_ns"] is None or not times:
            continue
        total = times.pop(0)
        if row["service_ms"] is not None:
            pairs.append((row["service_ms"], row["latency_ms"], total))
    table = np.array(pairs, np.float64).reshape(-1, 3)
    return Compared(name, *table.T)


def together(all_compared: list[Compared]) -> Compared:
    """The requests of all captures as of one."""
    columns = [
        np.concatenate([getattr(one, name) for one in all_compared])
        for name in ("service", "latency", "logged")
    ]
    return Compared("all", *columns)


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
        compare(f"{path.parent.name}/{path.stem}", read_capture(path), log_of(path))
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
            f"| capture | {_HEADS} |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
            *(f"| {one.name} | {_cells(one)} |" for one in [*compared, total]),
            "",
            *_recordings(),
        ]
    )


_HEADS = (
    f"requests | within {WITHIN_MS:g} ms | `latency_ms` | p95 ms | log's p95 | slow | "
    "rank correlation"
)


def _cells(one: Compared) -> str:
    correlation = "" if one.correlation is None else f"{one.correlation:.4f}"
    return (
        f"{len(one.service)} | {one.share:.2%} | {one.latency_share:.2%} | "
        f"{np.quantile(one.service, 0.95):.1f} | {np.quantile(one.logged, 0.95):.1f} | "
        f"{one.slow.sum()} | {correlation}"
    )


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
        f"| recording | load average | waited | {_HEADS} | before | sending | other |",
        f"|---|{'---:|' * 12}",
    ]
    for is_busy in (False, True):
        for path in logged.made_of_each(is_busy):
            tables, log = kdissect.read(path / "capture.pcap"), path / "server.log"
            machine = json.loads((path / "machine.json").read_text())
            places = explain(tables, log)
            lines.append(
                f"| {path.name} | {machine['load']:.1f} | {machine['waited_s']:.1f} s | "
                f"{_cells(compare(path.name, tables, log))} | "
                f"{places[BEFORE]} | {places[SENDING]} | {places[OTHER]} |"
            )
    return lines
