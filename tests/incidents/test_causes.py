"""An incident hides another one only if it can explain it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kdissect.incidents.causes import without_consequences
from kdissect.incidents.incident import BAD, INFO, WARN, Incident

_START = datetime(2026, 11, 27, tzinfo=UTC)
_OUTAGE: dict[str, Any] = {
    "kind": "broker_unreachable", "subject": "b1", "brokers": {"b1"}, "clients": {"shop"},
}  # fmt: skip
_LOGINS: dict[str, Any] = {
    "kind": "login_failures", "subject": "shop", "brokers": {"b1"}, "clients": {"shop"},
}  # fmt: skip
_STOP = _OUTAGE | {"severity": INFO}
_WAIT = _LOGINS | {"kind": "throttled", "severity": WARN}


def _incident(
    kind: str, subject: str, seconds: tuple[int, int], severity: str = BAD, **of: set[str]
) -> Incident:
    parties = {name: frozenset(some) for name, some in of.items()}
    start, end = (_START + timedelta(seconds=second) for second in seconds)
    return Incident(kind, severity, start, end, subject, "", **parties)


@pytest.mark.parametrize(
    ("cause", "other", "is_explained"),
    [
        # one that lasts from 10 to 15 s
        (_OUTAGE, _incident("consumer_stuck", "orders-0", (12, 16), clients={"shop"}), True),
        (_OUTAGE, _incident("consumer_stuck", "orders-0", (12, 60), clients={"shop"}), False),
        (_OUTAGE, _incident("request_errors", "Fetch", (12, 16), brokers={"b1", "b2"}), True),
        (_OUTAGE, _incident("request_errors", "Fetch", (12, 16), brokers={"c1"}), False),
        (_OUTAGE, _incident("slow_api", "Fetch", (12, 16), clients={"shop", "till"}), False),
        (_LOGINS, _incident("unanswered_requests", "shop", (12, 13), brokers={"b1"}), True),
        (_LOGINS, _incident("unanswered_requests", "till", (12, 13), brokers={"b1"}), False),
        (_LOGINS, _incident("refused_requests", "Produce", (12, 13), brokers={"b1"}), False),
        # none hides a worse severity
        (_STOP, _incident("request_errors", "Fetch", (12, 16), INFO, brokers={"b1"}), True),
        (_STOP, _incident("retry_storm", "till", (12, 16), brokers={"b1"}), False),
        (_WAIT, _incident("slow_upload", "shop", (12, 16), WARN, brokers={"b1"}), True),
        (_WAIT, _incident("slow_upload", "shop", (12, 16), BAD, brokers={"b1"}), False),
    ],
)  # fmt: skip
def test_a_cause_hides_what_it_can_explain(
    cause: dict[str, Any], other: Incident, is_explained: bool
) -> None:
    """They share a broker or their clients, and the other one ends soon after the cause."""
    first = _incident(**({"seconds": (10, 15)} | cause))
    assert without_consequences([first, other]) == ([first] if is_explained else [first, other])
