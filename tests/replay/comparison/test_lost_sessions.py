"""A broker knows a fetch session for a while, unless a request ended it."""

from __future__ import annotations

import pytest

from kdissect.codec.message import Message, encode_message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.lost_sessions import LostSessions
from kdissect.replay.model import READ, EarlierAnswer, Exchange, Outcome, Step

S = 1_000_000_000
UNKNOWN_ID, WRONG_EPOCH = 70, 71


def fetch(at_s: int, sent: tuple[int, int], session_id: int, error_code: int = 0) -> Outcome:
    """sent: session id and epoch of the request. session_id: of the answer."""
    request = {"session_id": sent[0], "session_epoch": sent[1], "topics": []}
    answer = {"session_id": session_id, "error_code": error_code, "responses": []}
    frames = [
        encode_message(Message(ApiKey.FETCH, 12, side, {}, body))
        for side, body in (("request", request), ("response", answer))
    ]
    exchange = Exchange(0, 0, 0, ApiKey.FETCH, 12, 0, "c", *frames, 0, 0)
    step = Step(0, 0, exchange, "Fetch", READ, 0, True)
    return Outcome(step, *frames, at_s * S, at_s * S + 1, api_version=12)


def is_possible(*outcomes: Outcome, has_one_node: bool = True, code: int = UNKNOWN_ID) -> bool:
    """Whether the last answer may say that its session is lost."""
    last = outcomes[-1]
    assert last.sent is not None
    assert last.answer is not None
    answer = EarlierAnswer(last.sent, last.answer, "because", last.sent_ns, last.answered_ns)
    answer.error_codes = frozenset({code})
    sessions = LostSessions(outcomes, has_one_node=has_one_node)
    return sessions.may_be(last, answer)


LOST = fetch(10, (7, 2), 0, UNKNOWN_ID)


def test_a_session_that_was_used_before_is_known() -> None:
    opened = fetch(1, (0, 0), 7)
    assert not is_possible(opened, LOST)
    assert is_possible(opened, LOST, has_one_node=False)
    assert is_possible(opened, fetch(10, (7, 2), 0, WRONG_EPOCH), code=WRONG_EPOCH)
    assert is_possible(opened, fetch(90, (7, 2), 0, UNKNOWN_ID))
    assert is_possible(fetch(1, (0, 0), 8), LOST)


@pytest.mark.parametrize("epoch", [-1, 0])
def test_a_session_that_a_request_ended_is_lost(epoch: int) -> None:
    """Epoch -1 ends it, epoch 0 opens another one instead."""
    assert is_possible(fetch(1, (0, 0), 7), fetch(2, (7, epoch), 0), LOST)


def test_a_session_may_be_lost_after_a_failure() -> None:
    """The broker may have been restarted."""
    failed = fetch(2, (8, 1), 8)
    failed.error = "the connection was closed"
    assert is_possible(fetch(1, (0, 0), 7), failed, LOST)
