"""`service_ms` beside the total times of the brokers' request logs.

A broker's total time runs from when it has read a request to when it has sent the response. A
correlation id may come again on a connection: its nth request in the capture is the nth in the log.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect import Tables

WITHIN_MS = 15.0
SHARE_OF_ALL, SHARE_OF_EACH = 0.99, 0.98
SLOW_MS, SLOW_COUNT, CORRELATION = 5.0, 50, 0.94

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
        from scipy.stats import spearmanr  # a second that only one worker needs

        return float(spearmanr(self.service[self.slow], self.logged[self.slow]).statistic)

    @property
    def is_right(self) -> bool:
        correlation = self.correlation
        return self.share >= SHARE_OF_EACH and (correlation is None or correlation >= CORRELATION)


def compare(name: str, tables: Tables, log: Iterable[dict[str, Any]]) -> Compared:
    """The exchanges of a capture beside the objects of its log."""
    keys = ("client_ip", "client_port", "correlation_id", "api_key")
    columns = tables.exchanges.to_arrow([*keys, "request_time_ns", "service_ms", "latency_ms"])
    logged: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for entry in log:
        if not entry["forwarded"]:  # on the wire it is inside an Envelope
            key = (*entry["client"], entry["correlation_id"], entry["api_key"])
            logged[key].append(entry["total_time_ms"])
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
