"""`service_ms` agrees with the brokers' request logs; `reports/truth.md` has the table."""

import functools
from collections.abc import Callable

from tests.truth import latency
from tests.truth.material import LOGGED, REPEATED, Capture, each
from tests.truth.request_log import read_lines


@functools.cache
def _compared(capture: Capture) -> latency.Compared:
    return latency.compare(str(capture), capture.tables, read_lines(capture.request_log_path))


@each("capture", LOGGED)
def test_service_ms_is_the_brokers_total_time(capture: Capture) -> None:
    """Most `service_ms` agree with the broker's logged total time."""
    compared = _compared(capture)
    assert len(compared.service) >= 30
    assert compared.share >= latency.SHARE_OF_EACH
    assert compared.share >= compared.latency_share
    assert compared.correlation is None or compared.correlation >= latency.CORRELATION


def test_service_ms_of_all_captures(say: Callable[[str], None]) -> None:
    """All captures together, but for the large and repeated ones."""
    total = latency.together([_compared(each) for each in LOGGED if str(each) not in REPEATED])
    assert total.share >= latency.SHARE_OF_ALL
    say(f"service_ms of {len(total.service)} requests: {total.share:.2%} within 15 ms of the log")
