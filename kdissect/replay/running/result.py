"""Options of a run, and its results."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kdissect.replay.model import Attempt, Outcome, ReplayPlan
from kdissect.replay.planning.schedule import Pace


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    pace: when to send.
    answer_timeout_s: how long to wait for a response. For requests that wait at the broker, the
    captured latency is added.
    in_flight_bytes: sending pauses while unanswered requests of all connections have more bytes.
    """

    pace: Pace = field(default_factory=Pace)
    answer_timeout_s: float = 30.0
    in_flight_bytes: int = 64 << 20


@dataclass(slots=True)
class LinkRecord:
    """Addresses and times of a connection to the target. Times in ns since the run's start."""

    ours: tuple[str, int]
    theirs: tuple[str, int]
    opened_ns: int
    closed_ns: int = -1


@dataclass
class RunResult:
    """Outcomes and connections of a run. Lists "by step" have an entry for each step number.

    outcomes: by step.
    own_lag_ns: by step, how long it could have been sent but was not; -1 if not sent or not timed.
    link_of: by step, the index of its connection in `links`; -1 if none.
    ended: why the run ended early, else "".
    is_interrupted: the user ended the run.
    start_time_ns: wall clock at the run's start.
    send_cpu_ns: CPU time of this process while it sent, and judged at a recorded pace.
    judge_cpu_ns: CPU time of this process for the judging after that.
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
