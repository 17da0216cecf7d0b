"""When each step is due: the recorded times, stretched or squeezed, with long pauses cut."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kdissect.errors import Error
from kdissect.pipeline.selection import duration_ms
from kdissect.replay.model import ReplayPlan


class PaceError(Error, ValueError):
    """A pace or a span of time that cannot be read."""


@dataclass(frozen=True)
class Pace:
    """speed: 1 as recorded, 4 four times as fast, inf without waiting.

    max_gap_s: no pause of the replay between two requests is longer; None: as recorded.
    """

    speed: float = 1.0
    max_gap_s: float | None = None

    @property
    def is_max(self) -> bool:
        return math.isinf(self.speed)

    def __str__(self) -> str:
        if self.is_max:
            return "max"
        name = "recorded" if self.speed == 1 else f"x{self.speed:g}"
        return name if self.max_gap_s is None else f"{name}, pauses up to {self.max_gap_s:g} s"


def parse_pace(text: str, max_gap: str | None = None) -> Pace:
    """``recorded``, ``max``, ``x4``, ``x0.5``; `max_gap` as in `parse_span`. Raises PaceError."""
    gap = None if max_gap is None else parse_span(max_gap)
    if text == "recorded":
        return Pace(1.0, gap)
    if text == "max":
        return Pace(math.inf, gap)
    found = re.fullmatch(r"x(\d+(?:\.\d+)?)", text)
    if not found or not 0 < float(found[1]) <= 1e6:
        raise PaceError(f"pace {text!r} is none of recorded, max, x2, x0.5 and the like")
    return Pace(float(found[1]), gap)


def parse_span(text: str) -> float:
    """Seconds of ``250ms``, ``5s``, ``2m``, ``1.5``. Raises PaceError."""
    bare = text.strip()
    try:
        return duration_ms(f"{bare}s" if bare[-1:].isdigit() else bare) / 1000
    except ValueError:
        raise PaceError(f"{text!r} is no span of time such as 250ms, 5s or 2m") from None


def schedule(plan: ReplayPlan, pace: Pace) -> list[int]:
    """When each step is due, ns since the run's start: at pace max at once, like steps that are not
    sent."""
    max_gap_ns = math.inf if pace.max_gap_s is None else pace.max_gap_s * 1e9
    due = [0] * len(plan.steps)
    now, before_ns = 0.0, -1
    for step in plan.steps:
        if step.skipped is None:
            if before_ns >= 0:
                now += min((step.at_ns - before_ns) / pace.speed, max_gap_ns)
            before_ns, due[step.number] = step.at_ns, int(now)
    return due


def duration_ns(plan: ReplayPlan, pace: Pace) -> int | None:
    """From the first to the last request of the replay; None where nothing is timed."""
    if pace.is_max:
        return None
    return max(schedule(plan, pace), default=0)
