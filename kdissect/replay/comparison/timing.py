"""Decides if timing explains an answer that was not final.

A replay sends a request again if its answer says "not yet", as clients do. So a broker that hides a
wrong answer behind a retry could pass. An answer that is not final is explained if

- a write of the run that touches the same resource was under way, or had been answered a bounded
  time before: the change was not seen everywhere yet; or
- it says "not ready", and no request of that API for that resource had succeeded before; or
- the target has lost a fetch session: sessions there are the replay's own (KIP-227).

Any other is a finding, even if a later answer is right.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdissect.replay.model import READ, EarlierAnswer, Mode, Outcome, Resource, Verdict
from kdissect.replay.workload.messages import SESSION_LOST, TRANSIENT

# Seconds until a write is seen everywhere. Members, transactions and locks of share groups change
# by timers of the broker too, up to a minute after the last request.
WRITE_S = 5.0
TIMER_S = 60.0
_BY_TIMER = frozenset({"group", "groups", "share", "txn", "txns"})

Interval = tuple[int, int]  # sent_ns, answered_ns


class Timing:
    """Writes and successes of a finished run, for its retried requests."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        retried_apis = {each.step.exchange.api_key for each in outcomes if each.earlier}
        self._resources: dict[int, list[Resource]] = {}  # by step
        self._writes: dict[Resource, list[tuple[int, Interval]]] = {}  # with the step
        self._successes: dict[tuple[int, Resource], int] = {}  # (API, resource) -> first answer
        for outcome in sorted(outcomes, key=lambda each: each.step.number):
            step = outcome.step
            api_key = step.exchange.api_key
            is_read = step.step_class == READ and not step.creates
            if outcome.sent is None or (is_read and api_key not in retried_apis):
                continue
            resources = [resource for resource, _ in step.accesses] or [("api", api_key)]
            self._resources[step.number] = resources
            interval = _interval(outcome)
            for resource, mode in step.accesses:
                if not is_read and mode in (Mode.WRITE, Mode.COMMUTING_WRITE):
                    self._writes.setdefault(resource, []).append((step.number, interval))
            if outcome.answer is not None and _is_as_captured(outcome):
                for resource in resources:
                    key = api_key, resource
                    first = self._successes.get(key, outcome.answered_ns)
                    self._successes[key] = min(first, outcome.answered_ns)

    def explains(self, outcome: Outcome, answer: EarlierAnswer) -> bool:
        """Return whether timing explains an answer of `outcome.earlier`."""
        step = outcome.step
        if step.is_racing or step.expired or answer.error_codes & SESSION_LOST:
            return True
        resources = self._resources[step.number]
        if any(self._was_changing(each, step.number, answer) for each in resources):
            return True
        if not answer.error_codes & TRANSIENT:
            return False
        firsts = [self._successes.get((step.exchange.api_key, each)) for each in resources]
        return any(first is None or first > answer.sent_ns for first in firsts)

    def _was_changing(self, resource: Resource, number: int, answer: EarlierAnswer) -> bool:
        bound_ns = int((TIMER_S if resource[0] in _BY_TIMER else WRITE_S) * 1e9)
        return any(
            writer != number
            and sent_ns <= answer.answered_ns
            and answered_ns >= answer.sent_ns - bound_ns
            for writer, (sent_ns, answered_ns) in self._writes.get(resource, ())
        )


def _interval(outcome: Outcome) -> Interval:
    """From the first time a request was sent; up to where it may still have been under way."""
    first = outcome.earlier[0].sent_ns if outcome.earlier else outcome.sent_ns
    last = outcome.answered_ns
    return first, last if last >= 0 else outcome.sent_ns + int(TIMER_S * 1e9)


def _is_as_captured(outcome: Outcome) -> bool:
    judgement = outcome.judgement
    return judgement is not None and judgement.verdict in (Verdict.SAME, Verdict.TOLERATED)
