"""Faults of the capture itself: packets that are missing, and clocks that jump."""

import pytest

from tests.builders.tables import START_US, Row, at, connection, exchange, expect, found


def _produced(*later_s: float) -> Row:
    """Produced batches, one each 100 ms, and how much later the capture has each of them."""
    exchanges, batches = [], []
    for number, later in enumerate(later_s):
        place = {"api_name": "Produce", "response_capture_id": 7}
        exchanges.append(exchange(number, second=number / 10 + later, **place))
        stamp = (START_US + number * 100_000) // 1000
        batches.append({"exchange_id": number, "source": "produce", "max_timestamp_ms": stamp})
    return {"exchanges": exchanges, "record_batches": batches, "connections": [connection()]}


@pytest.mark.parametrize(("step_s", "direction"), [(2.0, "forward"), (-2.0, "back")])
def test_a_step_of_the_clock_is_found(step_s: float, direction: str) -> None:
    """A step of two seconds is an incident with its direction and its size."""
    (step,) = found(**_produced(*[0] * 20, *[step_s] * 20))
    expect(step, "clock_step", start=1.901)
    assert f"went {direction} by 2" in step["text"] or f"went {direction} by 1.9" in step["text"]


@pytest.mark.parametrize(("sign", "direction"), [(1, "forward"), (-1, "back")])
def test_a_clock_that_steps_all_the_time(sign: int, direction: str) -> None:
    """Eight steps of two seconds are one incident, from the first to the last."""
    (steps,) = found(**_produced(*(2 * sign * min(number // 10, 8) for number in range(100))))
    assert f"went {direction} 8 times, by " in steps["text"]
    last = 8 + 2 * 8 if sign > 0 else 0.901
    expect(steps, "clock_step", start=0.901, end=last)


def test_a_producer_that_waits_is_no_step() -> None:
    """Its batches are late, and later ones are in time again."""
    late = [(29.9 - number) / 10 for number in range(15, 30)]
    assert found(**_produced(*[0] * 15, *late, *[0] * 10)) == []


def test_missing_bytes_are_a_loss_between_two_requests() -> None:
    """Missing bytes are an incident from the last request before the gap to the next one."""
    exchanges = [
        exchange(number, at_us=number * 1_000_000, request_pos=104 * number)
        for number in (0, 1, 2, 4, 5, 6)
    ]
    gap = {"kind": "gap", "severity": "error", "connection_id": 1, "capture_id": 7, "packet": 8,
           "byte_count": 500, "direction": "request", "pos": 104 * 3}  # fmt: skip
    counts = {"request_byte_count": 9500, "request_missing_byte_count": 500}
    (loss,) = found(exchanges=exchanges, anomalies=[gap], connections=[connection(**counts)])
    # from the last request before the gap to the request in packet 8
    expect(loss, "capture_loss", "bad", subject="trace.pcap", start=2, end=4)
    assert "500 B are missing in 1 gap of 1 connection. The Kafka" in loss["text"]
    assert "lack 5.00 % of their bytes" in loss["text"]
    # what another capture lacks does not count here
    other = {"capture_id": 8, "path": "other.pcap", "first_time": at(0), "last_time": at(60)}
    its_own = connection(2, request_byte_count=99_999, request_missing_byte_count=1)
    asked = [exchange(8 + n, second=n, connection_id=2, request_capture_id=8) for n in (1, 5)]
    (_, slight) = found(
        captures=[other | {"capture_id": 7, "path": "trace.pcap"}, other],
        exchanges=[*exchanges, *asked],
        anomalies=[gap, gap | {"connection_id": 2, "capture_id": 8, "byte_count": 1}],
        connections=[connection(**counts), its_own],
    )
    expect(slight, "capture_loss", "warn", subject="other.pcap")
    assert "1 B are missing in 1 gap of 1 connection" in slight["text"]


def test_a_missing_response_is_no_older_than_its_request() -> None:
    """The connection idled for 20 s; the request after that was captured, its response was not."""
    exchanges = [
        exchange(
            number, at_us=second * 1_000_000, request_pos=104 * number, response_pos=204 * number
        )
        for number, second in enumerate([0, 1, 21, 22])
    ]
    exchanges[2] = exchange(2, at_us=21_000_000, request_pos=208, latency_us=None)
    gap = {"kind": "gap", "severity": "error", "connection_id": 1, "capture_id": 7, "packet": 7,
           "byte_count": 204, "direction": "response", "pos": 408}  # fmt: skip
    counts = {"request_byte_count": 400, "response_byte_count": 600}
    lost = connection(response_missing_byte_count=204, response_gap_count=1, **counts)
    (loss,) = found(exchanges=exchanges, anomalies=[gap], connections=[lost])
    expect(loss, "capture_loss", start=21)
