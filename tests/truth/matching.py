"""Rows of `exchanges` and entries of the request log, each with its counterpart."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

from tests.truth import request_log
from tests.truth.material import Capture
from tests.truth.request_log import Entry, Key
from tests.truth.rows import Row

ENVELOPE = 58
_key: Callable[[Row], Key] = itemgetter(
    "client_ip", "client_port", "broker_port", "correlation_id", "api_key", "api_version"
)


@dataclass
class Match:
    """`pairs` are logged requests that have a row; SASL tokens and envelopes are never logged."""

    pairs: list[tuple[Entry, Row]] = field(default_factory=list)
    only_in_log: list[Entry] = field(default_factory=list)
    only_in_capture: list[Row] = field(default_factory=list)
    envelopes: list[Row] = field(default_factory=list)
    sasl_tokens: list[Row] = field(default_factory=list)


@functools.lru_cache(maxsize=2)
def match(capture: Capture) -> Match:
    entries = request_log.by_key(direct(capture))
    found = Match()
    for row in sorted(capture.rows("exchanges"), key=lambda r: r["request_time_ns"] or 0):
        if row["api_name"] == "SaslToken":
            found.sasl_tokens.append(row)
        elif row["api_key"] == ENVELOPE:
            found.envelopes.append(row)
        elif waiting := entries.get(_key(row)):
            found.pairs.append((waiting.pop(0), row))
        else:
            found.only_in_capture.append(row)
    found.only_in_log = [entry for waiting in entries.values() for entry in waiting]
    return found


def direct(capture: Capture) -> list[Entry]:
    """Log entries at their first broker: all but those of an Envelope."""
    return [e for e in request_log.load(capture.request_log_path) if not e.is_forwarded]
