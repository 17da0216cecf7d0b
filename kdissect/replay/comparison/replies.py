"""The requests of a run as sent, each with its answer, for `claims`, `logs` and `groups`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kdissect.replay.model import FOREVER_NS, Difference, Outcome
from kdissect.replay.workload.messages import decoded

Body = dict[str, Any]
Contradiction = tuple[int, Difference]  # the step whose answer is wrong


class Reply(NamedTuple):
    """A request and its answer, by the target's names; None without one."""

    outcome: Outcome
    request: Body
    answer: Body | None

    @property
    def body(self) -> Body:
        """The answer, empty without one."""
        return self.answer or {}

    @property
    def is_trial(self) -> bool:
        """Return whether the request changes nothing."""
        return bool(self.request.get("validate_only"))

    @property
    def sent_ns(self) -> int:
        return self.outcome.sent_ns

    @property
    def end_ns(self) -> int:
        """When it was answered, far away if it was not."""
        return FOREVER_NS if self.answer is None else self.outcome.answered_ns

    @property
    def taken(self) -> Body:
        """The answer, if it has no error; else nothing."""
        return {} if self.answer is None or self.answer.get("error_code") else self.answer

    def wrong(self, one: Difference) -> Contradiction:
        return self.outcome.step.number, one


Readers = Mapping[int, Callable[[Reply], None]]  # by API


def read(outcomes: Iterable[Outcome], of_all: Iterable[Readers], of_final: Readers) -> None:
    """Give each reply to its readers, in the order in which answers came. of_final: readers that
    follow from final answers alone."""
    for outcome in sorted(outcomes, key=_completed_ns):
        api_key = outcome.step.exchange.api_key
        always = [each[api_key] for each in of_all if api_key in each]
        at_last = [of_final[api_key]] if api_key in of_final else []
        for each in outcome.tries() if always or at_last else ():
            request = decoded(each.sent or b"", "request", api_key, each.api_version)
            answer = decoded(each.answer or b"", "response", api_key, each.api_version)
            if request is not None:
                reply = Reply(each, request.body, None if answer is None else answer.body)
                for reader in always + at_last * (each is outcome):
                    reader(reply)


def _completed_ns(outcome: Outcome) -> int:
    return outcome.answered_ns if outcome.answered_ns >= 0 else outcome.sent_ns
