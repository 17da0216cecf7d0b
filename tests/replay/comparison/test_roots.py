"""The first divergence of each resource is shown, later ones are folded."""

from __future__ import annotations

from kdissect.replay.comparison.grouping import OTHER_CODE, group_roots
from kdissect.replay.comparison.roots import find_roots
from kdissect.replay.model import Difference, Judgement, Outcome, ReplayPlan, Verdict
from kdissect.replay.planning.plan import make_plan
from tests.builders.workloads import exchange, fetch, fetched, produce, produced, workload
from tests.replay.other_cluster import everything


def plan() -> ReplayPlan:
    """Produce and Fetch of partition 0, of partition 1, and of partition 0 again."""
    return make_plan(
        workload(
            [
                exchange(0, produce(0), 0, 1, produced(0, 0)),
                exchange(0, produce(1), 2, 3, produced(1, 0)),
                exchange(0, fetch(0), 4, 5, fetched(0)),
                exchange(0, fetch(1), 6, 7, fetched(1)),
                exchange(0, fetch(0), 8, 9, fetched(0)),
            ]
        ),
        everything(),
    )


def judged(made: ReplayPlan, *different: int) -> list[Outcome]:
    """Outcomes of which some differ."""
    return [
        Outcome(
            step,
            judgement=Judgement(
                Verdict.DIFFERENT, [Difference("error_code", "0", str(step.number))]
            )
            if step.number in different
            else Judgement(Verdict.SAME),
        )
        for step in made.steps
    ]


def test_later_differences_of_a_partition_follow_its_first_one() -> None:
    """The Produce of partition 0 is the root of both Fetches there; partition 1 has its own."""
    made = plan()
    outcomes = judged(made, 0, 1, 2, 3, 4)
    roots = find_roots(made, outcomes)
    assert roots == {2: 0, 3: 1, 4: 0}
    groups = group_roots(outcomes, roots)
    assert [(each.example, dict(each.later)) for each in groups] == [
        (0, {"Fetch": 2}),
        (1, {"Fetch": 1}),
    ]


def test_a_difference_before_is_no_consequence() -> None:
    """Only partition 1 differed before: the Fetches of partition 0 are roots of their own."""
    made = plan()
    assert find_roots(made, judged(made, 1, 2, 4)) == {4: 2}
    assert find_roots(made, judged(made, 4)) == {}


def test_fields_beside_another_error_code_are_counted_with_it() -> None:
    """They follow from the code, so they have no line of their own."""
    [first, *_] = outcomes = judged(plan(), 0)
    first.judgement = Judgement(
        Verdict.DIFFERENT,
        [Difference("topics[0].error_code", "29", "0"),
         Difference("topics[0].name", "", "t", note=OTHER_CODE)],
    )  # fmt: skip
    [group] = group_roots(outcomes, {})
    assert (group.path, group.beside) == ("topics[].error_code", 1)
    assert group.followers() == "with 1 difference in fields beside it"
