"""Kinds of differences: their order, what is folded into them, and their words."""

from collections.abc import Sequence

import pytest

from kdissect.replay.comparison import kinds
from kdissect.replay.model import Difference, Judgement, Outcome, ReplayPlan, Verdict
from tests.builders.workloads import exchange, fetch, fetched, metadata, planned, produce, produced

CODE = "responses[].partition_responses[].error_code"
REFUSED = Difference(CODE, ("t", "0"), 0, 20)
EXPLAINER = kinds.Explainer(kinds.Releases(), {})


def plan() -> ReplayPlan:
    """Produce and Fetch of partition 0, of partition 1, of partition 0 again, and a Metadata."""
    return planned(
        exchange(0, produce(0), 0, 1, produced(0, 0)),
        exchange(0, produce(1), 2, 3, produced(1, 0)),
        exchange(0, fetch(0), 4, 5, fetched(0)),
        exchange(0, fetch(1), 6, 7, fetched(1)),
        exchange(0, fetch(0), 8, 9, fetched(0)),
        exchange(0, metadata(), 10, 11, None),
    )


def judged(
    made: ReplayPlan, different: dict[int, Sequence[Difference]], unanswered: Sequence[int] = ()
) -> list[Outcome]:
    outcomes = []
    for step in made.steps:
        found = [*different.get(step.number, ())]
        verdict = Verdict.DIFFERENT if found else Verdict.SAME
        verdict = Verdict.ERROR if step.number in unanswered else verdict
        outcomes.append(Outcome(step, judgement=Judgement(verdict, found)))
    return outcomes


def found(
    different: dict[int, Sequence[Difference]], unanswered: Sequence[int] = ()
) -> list[kinds.Kind]:
    return kinds.find_kinds(judged(plan(), different, unanswered), EXPLAINER)[0]


def test_later_differences_of_a_partition_follow_its_first_one() -> None:
    """The Produce of partition 0 is the root of both Fetches there; partition 1 has its own."""
    made = plan()
    outcomes = judged(made, {number: [REFUSED] for number in range(5)})
    assert kinds.find_roots(outcomes, lambda _: True) == {2: 0, 3: 1, 4: 0}
    assert kinds.find_roots(outcomes, lambda outcome: outcome.step.number == 3) == {3: 1}
    only = judged(made, {1: [REFUSED], 2: [REFUSED], 4: [REFUSED]})
    assert kinds.find_roots(only, lambda _: True) == {4: 2}


def test_a_folded_answer_is_named_by_its_error_or_field() -> None:
    """Records that are missing since their Produce was refused are no kind of their own."""
    missing = Difference("records[]", ("t", "0", "3"), "a record", None)
    out_of_range = Difference("responses[].partitions[].error_code", ("t", "0"), 0, 1)
    [kind] = found({0: [REFUSED], 2: [missing], 4: [out_of_range]})
    assert (kind.api_name, kind.found) == ("Produce", [(0, REFUSED)])
    assert kind.followers == {("Fetch", "records"): 1, ("Fetch", "OFFSET_OUT_OF_RANGE"): 1}
    # A record that the consumer gets twice does not follow from a refusal.
    twice = Difference("records[]", ("t", "0", "3"), None, "a record", note="a second time")
    assert len(found({0: [REFUSED], 2: [twice]})) >= 1


def test_nothing_is_folded_into_a_request_without_answer() -> None:
    """It has no kind, so the records that are missing after it have one. After a difference, it is
    counted there itself, with what follows."""
    missing = Difference("records[]", ("t", "0", "3"), "a record", None)
    [kind] = found({2: [missing], 4: [missing]}, unanswered=[0])
    assert (kind.api_name, kind.found) == ("Fetch", [(2, missing)])
    assert kind.followers == {("Fetch", "records"): 1}
    [kind] = found({0: [REFUSED], 4: [missing]}, unanswered=[2])
    assert kind.followers == {("Fetch", "no answer"): 1, ("Fetch", "records"): 1}


def test_records_do_not_follow_from_a_config() -> None:
    """Nor from another value that explains nothing."""
    missing = Difference("records[]", ("t", "0", "3"), "a record", None)
    for place in ("results[].configs[].value", "responses[].partitions[].diverging_epoch"):
        kinds_found = found({0: [Difference(place, ("t", "0"), "1", "2")], 4: [missing]})
        assert [each.api_name for each in kinds_found] == ["Fetch", "Produce"]


def test_what_would_hurt_comes_first() -> None:
    """Refused writes, then records, then other answers; whatever came first in the run."""
    name = Difference("topics[].is_internal", ("other",), False, True)
    records = Difference("records[].compression", ("t", "1", "0"), "none", "gzip")
    order = [each.api_name for each in found({3: [records], 5: [name], 0: [REFUSED]})]
    assert order == ["Produce", "Fetch", "Metadata"]


def test_differences_of_one_kind_are_together() -> None:
    """Each pair of errors is a kind; a config of many topics is one, with its values counted."""
    configs = [
        Difference("results[].configs[].value", (topic, "retention.ms"), "1", value)
        for topic, value in (("a", "2"), ("b", "2"), ("c", "3"))
    ]
    other = Difference("results[].configs[].value", ("a", "segment.ms"), "1", "2")
    outcomes = judged(plan(), {0: [REFUSED, Difference(CODE, ("t", "1"), 0, 19)], 1: [REFUSED],
                               5: [*configs, other]})  # fmt: skip
    found = kinds.kinds_of(outcomes)
    assert [[one.keys[0] for _, one in each.found] for each in found] == [
        ["t", "t"], ["t"], ["a", "b", "c"], ["a"],
    ]  # fmt: skip
    assert [step for step, _ in found[0].found] == [0, 1]


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (REFUSED, "in sync than the partition has at the target: min.insync.replicas = 3"),
        (Difference(CODE, ("t", "0"), 0, 10), "batches may be smaller at the target (max.message"),
        (Difference(CODE, ("t", "0"), 0, 29), "its ACLs decide"),
        (Difference("records[].compression", ("t", "0", "0"), "none", "gzip"),
         "the target compresses batches anew: compression.type = gzip"),
        (Difference("records[].timestamp_type", ("t", "0", "0"), "CreateTime", "LogAppendTime"),
         "who sets the times of records"),
    ],
)  # fmt: skip
def test_a_likely_cause_names_the_settings_of_the_target(one: Difference, says: str) -> None:
    """Settings of the topic itself before those of brokers; of other topics never."""
    settings = {
        "broker 1": {"min.insync.replicas": "2"},
        "topic t": {"min.insync.replicas": "3", "compression.type": "gzip"},
        "topic u": {"max.message.bytes": "7"},
    }
    [outcome, *_] = judged(plan(), {0: [one]})
    notes = list(kinds.Explainer(kinds.Releases(), settings).notes(outcome, one))
    assert says in notes[0]
    assert "7" not in "".join(notes)
