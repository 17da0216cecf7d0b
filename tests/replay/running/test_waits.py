"""Requests that fail for one partition share one wait for it."""

from __future__ import annotations

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange, Mode, Outcome, Step
from kdissect.replay.running.waits import PATIENCE_NS, Patience
from tests.replay.made import response

KEY, VERSION = ApiKey.OFFSET_COMMIT, 5
REASON = "error 3: not ready yet"


def commit(codes: dict[int, int]) -> tuple[Outcome, bytes]:
    """An OffsetCommit of group g with the answer by partition of topic t."""
    parts = [{"partition_index": number, "error_code": code} for number, code in codes.items()]
    answer = response(KEY, VERSION, topics=[{"name": "t", "partitions": parts}])
    exchange = Exchange(1, 0, 0, KEY, VERSION, 7, "c", None, answer, 0, 0, 0, 0)
    step = Step(1, 0, exchange, "", "groups", 0, True, accesses=((("group", "g"), Mode.READ),))
    return Outcome(step, api_version=VERSION), answer


def test_a_partition_that_keeps_failing_is_given_up() -> None:
    """After one wait, for all requests; another partition in the same answer has its own."""
    patience = Patience()
    failed = commit({1: 3})
    assert not patience.is_over(*failed, 0)
    patience.note(*failed, REASON, 0)
    assert not patience.is_over(*failed, PATIENCE_NS - 1)
    patience.note(*commit({0: 0}), "", PATIENCE_NS)  # another partition of the topic
    assert patience.is_over(*failed, PATIENCE_NS)
    assert patience.is_over(*commit({0: 0, 1: 3}), PATIENCE_NS)
    assert not patience.is_over(*commit({0: 3, 1: 3}), PATIENCE_NS)
    assert not patience.is_over(*commit({0: 0}), PATIENCE_NS)


def test_a_partition_that_answers_again_is_waited_for_again() -> None:
    """An error may come and go."""
    patience = Patience()
    patience.note(*commit({1: 3}), REASON, 0)
    patience.note(*commit({1: 0}), "", 5)
    patience.note(*commit({1: 3}), REASON, PATIENCE_NS)
    assert not patience.is_over(*commit({1: 3}), PATIENCE_NS + 5)
