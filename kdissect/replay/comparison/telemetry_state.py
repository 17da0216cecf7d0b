"""Finds answers to GetTelemetrySubscriptions that no broker gives (KIP-714).

- A client that names its instance id gets it back.
- The subscription id is a checksum of the metrics and the push interval, mixed with the instance
  id. KIP-714 leaves the formula to brokers: an answer has to follow Kafka's if two others of the
  run do. By chance they do once in 2^64 runs.
- A broker makes random instance ids (version 4), if the other answers have such ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import crc32c

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.target_facts import ZERO_UUID
from kdissect.replay.workload.messages import decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_ID, _SUBSCRIPTION = "client_instance_id", "subscription_id"
_ALL_METRICS = {"", "*"}  # texts for all of them: the checksum may be of another one
_RANDOM = 4  # version of a UUID
_EVIDENCE = 2  # other answers


class TelemetryState:
    """Subscriptions of a run: the answers without an error, with the ids of their requests."""

    def __init__(self, ids: IdMap) -> None:
        self._answers: list[tuple[Outcome, UUID, Body]] = []

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if outcome.sent is None or api_key != ApiKey.GET_TELEMETRY_SUBSCRIPTIONS:
            return
        request = decoded(outcome.sent, "request", api_key, outcome.api_version)
        answer = decoded(outcome.answer or b"", "response", api_key, outcome.api_version)
        if request is not None and answer is not None and not answer.body["error_code"]:
            self._answers.append((outcome, request.body[_ID] or ZERO_UUID, answer.body))

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        are_right = [_follows_kafka(answer) for _, _, answer in self._answers]
        are_random = [answer[_ID].version == _RANDOM for _, _, answer in self._answers]
        is_kafka, has_random = sum(are_right) >= _EVIDENCE, sum(are_random) >= _EVIDENCE
        rows = zip(self._answers, are_right, are_random, strict=True)
        for (outcome, requested, answer), is_right, is_random in rows:
            given = answer[_ID]
            if requested != ZERO_UUID:
                if given != requested:
                    add(outcome, _ID, requested, given, "the client has named its id")
            elif has_random and not is_random:
                add(outcome, _ID, "a random id", given, "other answers have random ones")
            if is_kafka and not is_right and _ALL_METRICS.isdisjoint(_metrics(answer)):
                note = "not the checksum of the metrics, the interval and the instance"
                add(outcome, _SUBSCRIPTION, _kafka_id(answer), answer[_SUBSCRIPTION], note)


def _metrics(answer: Body) -> list[str]:
    return entries(answer["requested_metrics"])


def _follows_kafka(answer: Body) -> bool:
    return bool(answer[_SUBSCRIPTION] == _kafka_id(answer))


def _kafka_id(answer: Body) -> int:
    """The subscription id as Kafka makes it: a CRC-32C of a text, and the hash of a Java UUID."""
    text = f"[{', '.join(_metrics(answer))}]{answer['push_interval_ms']}"
    halves = (answer[_ID].int >> 64) ^ answer[_ID].int & (1 << 64) - 1
    mixed = crc32c.crc32c(text.encode()) ^ (halves >> 32) ^ halves & (1 << 32) - 1
    return int(mixed) - (mixed >> 31 << 32)
