"""The completion of steps releases those that depend on them."""

from kdissect.replay.model import Outcome, PlanOptions, ReplayPlan, Step, Workload, WorkloadFacts
from kdissect.replay.running.completion import StepCompletion
from kdissect.replay.running.lanes import Lane
from tests.replay.planning.test_plan import exchange, fetch, fetched


def completion_of(
    lanes: list[list[int]], **after: dict[int, tuple[int, ...]]
) -> tuple[StepCompletion, list[int], list[int]]:
    """A completion of these lanes, the freed lanes, and the completed steps."""
    owners = {number: owner for owner, lane in enumerate(lanes) for number in lane}
    steps = [
        Step(
            number, owners[number], exchange(number, fetch(0), 0, 1, fetched(0)), "Fetch", "read",
            0, True,
            depends_on=after.get("depends_on", {}).get(number, ()),
            follows=after.get("follows", {}).get(number, ()),
        )
        for number in sorted(owners)
    ]  # fmt: skip
    plan = ReplayPlan(Workload("made", "capture", [], WorkloadFacts()), PlanOptions(), steps, lanes)
    freed: list[int] = []
    done: list[int] = []
    completion = StepCompletion(
        plan,
        [Lane(n, numbers) for n, numbers in enumerate(lanes)],
        lambda lane: freed.append(lane.number),
        lambda outcome: done.append(outcome.step.number),
    )
    return completion, freed, done


def complete(completion: StepCompletion, number: int) -> None:
    completion.complete(number, Outcome(completion._plan.steps[number]))


def test_a_step_proceeds_after_its_last_dependency() -> None:
    """A step waits for the responses to its dependencies and the sending of earlier steps."""
    completion, freed, done = completion_of(
        [[0, 1], [2]], depends_on={2: (0, 1)}, follows={2: (1,)}
    )
    assert completion.waits[2] == 3
    complete(completion, 0)
    completion.sent(1)
    assert (freed, completion.waits[2]) == ([], 1)
    completion.sent(1)
    assert completion.waits[2] == 1, "a step is sent once"
    complete(completion, 1)
    assert (freed, done, completion.left) == ([1], [0, 1], 1)


def test_in_the_order_of_the_connection() -> None:
    """A step completes only after the earlier steps of its connection."""
    completion, freed, done = completion_of([[0, 1, 2], [3]], depends_on={3: (2,)})
    complete(completion, 2)
    complete(completion, 1)
    assert (done, freed, completion.left) == ([], [], 4)
    complete(completion, 0)
    assert (done, freed) == ([0, 1, 2], [1])
    complete(completion, 0)
    assert done == [0, 1, 2], "settled once"


def test_a_released_lane_reports_its_completed_steps() -> None:
    """Releasing a lane reports its completed steps after one that has no response."""
    completion, _, done = completion_of([[0, 1, 2]])
    complete(completion, 2)
    completion.release(completion._lanes[0])
    assert (done, completion.left) == ([2], 2)
