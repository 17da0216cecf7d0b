"""What waits for what while a plan is played: the bookkeeping alone."""

from kdissect.replay.model import Outcome, PlanOptions, ReplayPlan, Step, Workload, WorkloadFacts
from kdissect.replay.running.completion import Settling
from kdissect.replay.running.lane import Script
from tests.replay.planning.test_plan import exchange, fetch, fetched


def made(
    scripts: list[list[int]], **after: dict[int, tuple[int, ...]]
) -> tuple[Settling, list[int], list[int]]:
    """Of steps of these scripts; the connections that were let go, the steps that were settled."""
    owners = {number: owner for owner, script in enumerate(scripts) for number in script}
    steps = [
        Step(
            number, owners[number], exchange(number, fetch(0), 0, 1, fetched(0)), "Fetch", "read",
            0, True,
            depends_on=after.get("depends_on", {}).get(number, ()),
            follows=after.get("follows", {}).get(number, ()),
        )
        for number in sorted(owners)
    ]  # fmt: skip
    plan = ReplayPlan(
        Workload("made", "capture", [], WorkloadFacts()), PlanOptions(), steps, scripts
    )
    freed: list[int] = []
    done: list[int] = []
    settling = Settling(
        plan,
        [Script(n, numbers) for n, numbers in enumerate(scripts)],
        lambda script: freed.append(script.number),
        lambda outcome: done.append(outcome.step.number),
    )
    return settling, freed, done


def settle(settling: Settling, number: int) -> None:
    settling.settle(number, Outcome(settling._plan.steps[number]))


def test_who_waits_is_let_go_by_the_last() -> None:
    """By answers of all that it depends on, and the sending of what it follows."""
    settling, freed, done = made([[0, 1], [2]], depends_on={2: (0, 1)}, follows={2: (1,)})
    assert settling.waits[2] == 3
    settle(settling, 0)
    settling.sent(1)
    assert (freed, settling.waits[2]) == ([], 1)
    settling.sent(1)
    assert settling.waits[2] == 1, "a step is sent once"
    settle(settling, 1)
    assert (freed, done, settling.left) == ([1], [0, 1], 1)


def test_in_the_order_of_the_connection() -> None:
    """What is done behind a step that is not is held until then, whoever waits for it."""
    settling, freed, done = made([[0, 1, 2], [3]], depends_on={3: (2,)})
    settle(settling, 2)
    settle(settling, 1)
    assert (done, freed, settling.left) == ([], [], 4)
    settle(settling, 0)
    assert (done, freed) == ([0, 1, 2], [1])
    settle(settling, 0)
    assert done == [0, 1, 2], "settled once"


def test_what_is_held_when_nothing_comes_any_more() -> None:
    settling, _, done = made([[0, 1, 2]])
    settle(settling, 2)
    settling.release(settling._scripts[0])
    assert (done, settling.left) == ([2], 2)
