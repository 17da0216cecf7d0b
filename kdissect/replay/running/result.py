"""Options of a run, and its results."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kdissect.replay.model import Attempt, Outcome, ReplayPlan, RunFinding
from kdissect.replay.planning.schedule import Pace
from kdissect.replay.target.end_state import EndState
from kdissect.replay.target.preparation import Prepared
from kdissect.replay.translation.id_map import IdMap


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    pace: when to send.
    answer_timeout_s: how long to wait for a response. For requests that wait at the broker, the
    captured latency is added.
    """

    pace: Pace = field(default_factory=Pace)
    answer_timeout_s: float = 30.0


@dataclass(slots=True)
class LinkRecord:
    """Addresses and times of a connection to the target. Times in ns since the run's start."""

    ours: tuple[str, int]
    theirs: tuple[str, int]
    opened_ns: int
    closed_ns: int = -1


@dataclass
class RunResult:
    """Outcomes and connections of a run, and the state of the target after it.

    outcomes: by step number.
    attempts: all requests that were sent, also those of the replay's own to members of groups.
    ended: why the run ended early, else "". is_interrupted: the user ended the run.
    start_time_ns: wall clock at the run's start.
    ids: None if the run never began. state, findings: in the capture's terms.
    """

    outcomes: list[Outcome]
    attempts: list[Attempt]
    links: list[LinkRecord]
    start_time_ns: int
    elapsed_ns: int = 0
    ended: str = ""
    is_interrupted: bool = False
    reconnects: int = 0
    ids: IdMap | None = None
    prepared: list[Prepared] = field(default_factory=list)
    state: EndState | None = None
    findings: list[RunFinding] = field(default_factory=list)


def not_begun(plan: ReplayPlan, reason: str) -> RunResult:
    """The result of a run that never began: every step that would have been sent has an error."""
    outcomes = [
        Outcome(step, skipped=step.skipped)
        if step.skipped is not None
        else Outcome(step, error=f"not sent: {reason}")
        for step in plan.steps
    ]
    return RunResult(outcomes, [], [], time.time_ns(), ended=reason)
