"""Answers to GetTelemetrySubscriptions that no broker gives."""

from __future__ import annotations

from uuid import UUID

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.telemetry_state import TelemetryState
from tests.replay.comparison.test_run_state import Run

NONE = UUID(int=0)
# (instance id, metrics, push interval, subscription id), as Kafka 4.3.1 gave them
FIRST = (UUID("6938ff54-3b00-40f0-8ffe-5f5884b0bcba"), [], 300_000, -1917778024)
SECOND = (UUID("884f5811-b286-4e72-a54f-e92f87f73d2c"), [], 300_000, -860448322)
METRICS = ["org.apache.kafka.producer.", "org.apache.kafka.consumer."]
THIRD = (UUID("b1d91752-676c-4c14-b6f2-69de011661e3"), METRICS, 500, 1491542023)
Subscription = tuple[UUID, list[str], int, int]


def subscribe(run: Run, answered: Subscription, requested: UUID = NONE, code: int = 0) -> int:
    given, metrics, interval_ms, number = answered
    answer = {
        "error_code": code, "client_instance_id": given, "subscription_id": number,
        "push_interval_ms": interval_ms, "requested_metrics": metrics,
    }  # fmt: skip
    request = {"client_instance_id": requested}
    return run.add(1, ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, 0, request, answer)


def test_a_subscription_id_follows_the_formula_of_the_others() -> None:
    run = Run()
    subscribe(run, FIRST)
    subscribe(run, THIRD)
    assert run.said(TelemetryState) == []
    number = subscribe(run, (*SECOND[:3], 0))
    assert run.said(TelemetryState) == [(number, "subscription_id", "0")]


def test_a_broker_may_have_another_formula() -> None:
    """One answer that follows Kafka's is no evidence."""
    run = Run()
    subscribe(run, FIRST)
    subscribe(run, (*SECOND[:3], 5))
    subscribe(run, (*THIRD[:3], 6))
    assert run.said(TelemetryState) == []


def test_the_checksum_may_have_another_text_for_all_metrics() -> None:
    run = Run()
    subscribe(run, FIRST)
    subscribe(run, THIRD)
    subscribe(run, (SECOND[0], ["*"], 500, 5))
    assert run.said(TelemetryState) == []


def test_a_client_gets_its_instance_id_back() -> None:
    run = Run()
    subscribe(run, FIRST, requested=FIRST[0])
    subscribe(run, (NONE, [], 0, 0), requested=FIRST[0], code=42)
    assert run.said(TelemetryState) == []
    number = subscribe(run, SECOND, requested=FIRST[0])
    assert run.said(TelemetryState) == [(number, "client_instance_id", str(SECOND[0]))]


def test_instance_ids_are_random_if_the_others_are() -> None:
    run = Run()
    other = UUID(int=77)
    subscribe(run, FIRST)
    subscribe(run, (other, [], 300_000, 5))
    assert run.said(TelemetryState) == []
    run.outcomes.pop()
    subscribe(run, (*SECOND[:3], 5))
    number = subscribe(run, (other, [], 300_000, 5))
    assert run.said(TelemetryState) == [(number, "client_instance_id", str(other))]
