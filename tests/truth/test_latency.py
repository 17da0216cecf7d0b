"""`service_ms` agrees with the brokers' request logs; `reports/truth.md` has the table."""

from __future__ import annotations

from collections.abc import Callable

from tests.truth.material import LOGGED, Capture, each
from tools.truth import latency

_compared: list[latency.Compared] = []


@each("capture", LOGGED)
def test_service_ms_is_the_brokers_total_time(capture: Capture) -> None:
    """Most `service_ms` agree with the broker's logged total time."""
    compared = latency.compare(str(capture), capture.tables, capture.request_log_path)
    _compared.append(compared)
    assert len(compared.service) >= 30
    assert compared.share >= latency.SHARE_OF_EACH
    assert compared.share >= compared.latency_share
    assert compared.correlation is None or compared.correlation >= latency.CORRELATION


def test_service_ms_of_all_captures(say: Callable[[str], None]) -> None:
    """Those that this run compared."""
    total = latency.together(_compared)
    assert total.share >= latency.SHARE_OF_ALL
    say(f"service_ms of {len(total.service)} requests: {total.share:.2%} within 15 ms of the log")
