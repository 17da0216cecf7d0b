"""How a plan is played, and what is left of it: options and results of a run."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kdissect.replay.model import Outcome, ReplayPlan
from kdissect.replay.planning.schedule import Pace


@dataclass(frozen=True)
class RunOptions:
    """answer_timeout_s: for an answer, beyond the captured latency where the answer may block.

    in_flight_bytes: sent and not answered, over all connections, before sending pauses.
    """

    pace: Pace = field(default_factory=Pace)
    answer_timeout_s: float = 30.0
    in_flight_bytes: int = 64 << 20


@dataclass(slots=True)
class LinkRecord:
    """A connection as it was, for the table set of the run. Times in ns since its start."""

    ours: tuple[str, int]
    theirs: tuple[str, int]
    opened_ns: int
    closed_ns: int = -1


@dataclass(frozen=True, slots=True)
class Attempt:
    """Traffic beside the outcomes: a request that was answered with "not yet" and sent again, or
    one part of a request to several nodes. link: index in `links`. answer: empty where none is due.
    """

    link: int
    sent: bytes
    sent_ns: int
    answer: bytes
    answered_ns: int


@dataclass
class RunResult:
    """What a run did.

    outcomes: by step number; every step has one. own_lag_ns: by step number, the part of the lag
    that is ours (ready to go and not yet sent), -1 where not sent or not timed. link_of: by step
    number the index in `links`, -1 none. ended: "" or why the run ended early; is_interrupted: by
    the user. start_time_ns: wall clock at the run's start. send_cpu_ns: CPU time of this process
    while it sent (and judged, at a recorded pace); judge_cpu_ns: after that.
    """

    outcomes: list[Outcome]
    own_lag_ns: array[int]
    link_of: array[int]
    links: list[LinkRecord]
    start_time_ns: int
    elapsed_ns: int = 0
    ended: str = ""
    is_interrupted: bool = False
    reconnects: int = 0
    retried: list[Attempt] = field(default_factory=list)
    send_cpu_ns: int = 0
    judge_cpu_ns: int = 0


def not_begun(plan: ReplayPlan, reason: str, start_time_ns: int) -> RunResult:
    """The result of a run that never began: every step that would have been sent has an error."""
    outcomes = [
        Outcome(step, skipped=step.skipped)
        if step.skipped is not None
        else Outcome(step, error=f"not sent: {reason}")
        for step in plan.steps
    ]
    unset = array("q", [-1]) * len(outcomes)
    links = array("i", [-1]) * len(outcomes)
    return RunResult(outcomes, unset, links, [], start_time_ns, ended=reason)
