"""Decides if a target may have lost a fetch session (KIP-227).

A broker removes a session if a request ends it or opens another one instead, if it is restarted, or
if its cache is full. From a full cache it removes those that nothing has used for two minutes
(`min.incremental.fetch.session.eviction.ms`), and any one for a follower. So the only broker of a
run knows a session that it had a minute before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import EarlierAnswer, Outcome
from kdissect.replay.translation.fetch_sessions import FINAL_EPOCH, INITIAL_EPOCH
from kdissect.replay.workload.messages import decoded

_KNOWN_NS = 60_000_000_000


class LostSessions:
    """Fetch sessions of a finished run, by their id at the target."""

    def __init__(self, outcomes: Sequence[Outcome], *, has_one_node: bool) -> None:
        self._outcomes = outcomes
        self._is_alone = has_one_node and not any(each.error for each in outcomes)

    @cached_property
    def _sessions(self) -> tuple[dict[int, list[int]], set[int]]:
        """When answers had each session, and the sessions that requests have ended."""
        used: dict[int, list[int]] = defaultdict(list)
        ended = set()
        for outcome in self._outcomes:
            if outcome.step.exchange.api_key != ApiKey.FETCH:
                continue
            attempts: list[Outcome | EarlierAnswer] = [outcome, *outcome.earlier]
            for sent in attempts:
                request = _message(outcome, sent.sent, "request")
                answer = _message(outcome, sent.answer, "response")
                if request is not None:
                    if request.body.get("session_epoch") in (FINAL_EPOCH, INITIAL_EPOCH):
                        ended.add(request.body["session_id"])
                if answer is not None and not answer.body.get("error_code"):
                    used[answer.body.get("session_id", 0)].append(sent.answered_ns)
        return used, ended

    def may_be(self, outcome: Outcome, answer: EarlierAnswer) -> bool:
        """Return whether an answer of `outcome.earlier` may say that its session is lost."""
        request = _message(outcome, answer.sent, "request")
        is_unknown = ErrorCode.FETCH_SESSION_ID_NOT_FOUND in answer.error_codes
        if not is_unknown or not self._is_alone or request is None:
            return True
        used, ended = self._sessions
        session_id = request.body.get("session_id", 0)
        last_ns = max((each for each in used[session_id] if each < answer.sent_ns), default=None)
        return session_id in ended or last_ns is None or answer.sent_ns - last_ns > _KNOWN_NS


def _message(outcome: Outcome, frame: bytes | None, side: str) -> Message | None:
    return decoded(frame or b"", side, ApiKey.FETCH, outcome.api_version)
