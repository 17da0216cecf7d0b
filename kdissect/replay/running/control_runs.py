"""Control runs: the same workload sent to the reference several times, around the run that counts.

The order is A B A: half of the control runs come before, so that a cluster that warms up or slows
down meanwhile affects both. Runs must not see each other's data. Either a command of the user
resets the cluster before each run, or the names that the plan writes to get a suffix in each run.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kdissect.errors import EnvironmentFailed
from kdissect.replay.model import OptionError, ReplayPlan
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.guard import Effects, Name, delete_names, effects_of, topics_to_make
from kdissect.replay.workload.messages import request_body
from kdissect.text import visible

if TYPE_CHECKING:
    from kdissect.replay.running.session import SessionOptions

FEWEST = 2  # fewer control runs cannot differ from each other
_REGEX = "subscribed_topic_regex"


@dataclass
class PlannedRun:
    """One of the runs of a replay.

    options: of the replay, with the renames of this run. suffix: of the names that it writes to.
    effects: these names. existing: those that were there before the run, with their data.
    """

    target: Target
    name: str
    options: SessionOptions
    is_control: bool = False
    suffix: str = ""
    effects: Effects = field(default_factory=Effects)
    existing: dict[Name, str] = field(default_factory=dict)

    async def reset(self, command: str) -> None:
        """Run the user's command to its end. Raises EnvironmentFailed if it fails."""
        self.target.close()
        variables = {"KDISSECT_TARGET": str(self.target), "KDISSECT_RUN": self.name}
        with tempfile.TemporaryFile() as output:  # what it starts may keep the file open
            process = await asyncio.create_subprocess_shell(
                command, stdout=output, stderr=output, env={**os.environ, **variables}
            )
            code = await process.wait()
            output.seek(max(output.seek(0, os.SEEK_END) - 2000, 0))
            lines = output.read().decode(errors="replace").split("\n")
        if code:
            said = next((visible(line.strip()) for line in reversed(lines) if line.strip()), "")
            text = f"--reset ended with exit code {code} before {self.name}"
            raise EnvironmentFailed(f"{text}: {said}" if said else text)

    async def delete_made(self) -> list[str]:
        """Delete what a run with a suffix has created; return a line for each that is still
        there."""
        names = self.effects.all() if self.suffix else []
        made = [name for name in names if name not in self.existing]
        return [f"{self.name}: {line}" for line in await delete_names(self.target, made)]


def plan_runs(
    plan: ReplayPlan, target: Target, against: Target | None, options: SessionOptions
) -> list[PlannedRun]:
    """The runs in their order. Raises OptionError if they would see each other's data."""
    reference, count = against or target, options.control_runs
    options = replace(options, has_reference=against is not None)
    names = [f"control run {number} of {count}" for number in range(1, count + 1)]
    if against is not None and not names:
        names = [f"the run against {against}"]
    runs = [PlannedRun(reference, name, options, is_control=True) for name in names]
    runs.insert((len(runs) + 1) // 2, PlannedRun(target, "the run", options))
    if count and not options.reset:
        _keep_apart(plan, runs, options)
    for run in runs:
        run.effects = effects_of(plan, run.options)
    return runs


def _keep_apart(plan: ReplayPlan, runs: Sequence[PlannedRun], options: SessionOptions) -> None:
    """Give each run another suffix for the names that the plan writes to."""
    effects = effects_of(plan, replace(options, renames={}))
    _check_names(plan, effects, options.makes_topics)
    started = f"{int(time.time()):x}"
    for number, run in enumerate(runs, 1):
        run.suffix = f"-{started}-{number}"
        renames = {each: f"{options.name(*each)}{run.suffix}" for each in effects.all()}
        run.options = replace(options, renames={**options.renames, **renames})


def _check_names(plan: ReplayPlan, effects: Effects, makes_topics: bool) -> None:
    """Refuse a plan whose topics nothing creates, or whose members subscribe to a pattern."""
    missing = {each.name for each in topics_to_make(plan)}.intersection(effects.names("topic"))
    if missing and not makes_topics:
        shown = ", ".join(map(visible, sorted(missing)[:10]))
        raise OptionError(
            f"--control-runs writes to topics with a suffix in each run, and the replay does not "
            f"create {shown}: give --create-topics, or --reset"
        )
    for step in plan.steps:
        request = request_body(step.exchange) if step.skipped is None else {}
        if request.get(_REGEX):
            raise OptionError(
                f"group {visible(request['group_id'])} subscribes to a pattern, which would "
                "match the topics of every control run: give --reset"
            )
