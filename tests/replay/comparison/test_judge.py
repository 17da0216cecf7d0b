"""Answers are compared with captured responses in one vocabulary; rules allow differences."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kdissect.codec.message import Message, encode_message
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.layout import layout
from kdissect.protocol.model import Type
from kdissect.replay.comparison.judge import NOISE, Judge, Noise, RunFacts, judge_run
from kdissect.replay.comparison.kinds import Releases
from kdissect.replay.fields import built_in_fields, load_fields
from kdissect.replay.model import (
    ABSENT,
    Attempt,
    Difference,
    Judgement,
    Outcome,
    ReplayPlan,
    SkipCode,
    Skipped,
    Step,
    TopicFacts,
    Verdict,
)
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.translation.id_map import IdMap, OffsetMap, Producer
from kdissect.replay.workload.messages import response_of
from kdissect.replay.workload.source import load_workload
from tests.builders.messages import numbered_batch
from tests.builders.workloads import exchange, fetch, fetched, planned, produce, produced, workload
from tests.cases import cases
from tests.material import CAPTURES, needs_material
from tests.replay.comparison.made_run import Run
from tests.replay.made import PlanMaker
from tests.replay.other_cluster import OtherCluster, everything, replay

PER_VERSION = 2  # answers of each API and version whose fields are changed one by one
PER_ANSWER = 100  # of these at most, evenly chosen
Body = dict[str, Any]


@pytest.fixture
def plan(captures: Path) -> ReplayPlan:
    return make_plan(load_workload(str(captures / "librdkafka.pcap")), everything())


def judged(plan: ReplayPlan, step: Step, change: Callable[[Body], Any], **how: Any) -> Judgement:
    """The judgement of an answer that is the captured response, changed."""
    message = copy.deepcopy(response_of(step.exchange))
    assert message is not None
    change(message.body)
    outcome = Outcome(step, answer=encode_message(message))
    Judge(RunFacts(IdMap(plan), [outcome]), load_fields(**how)).judge()
    return outcome.judgement


def test_a_batch_that_clients_sent_again_is_not_missed() -> None:
    """The captured broker refused it without effect, so the replay has not sent it."""
    captured, answered = produced(0, -1, 1, 7, codes=[6]), produced(1, 7)
    plan = planned(exchange(0, produce(0, 1), 0, 5, captured))
    outcome = Outcome(plan.steps[0], answer=encode_message(answered))
    Judge(RunFacts(IdMap(plan), [outcome]), built_in_fields()).judge()
    [one] = outcome.judgement.differences
    assert (one.captured, one.answered, one.rule) == (6, 0, "not-ready-then")


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_batch_that_the_replay_sent_again_has_a_time(is_repeated: bool) -> None:
    """Brokers take the time of a batch that they have written already from its records."""
    plan = planned(exchange(0, produce(0, 1), 0, 5, produced(0, 0)))
    answered = produced(0, 0)
    [topic] = answered.body["responses"]
    topic["partition_responses"][0]["log_append_time_ms"] = 1_700_000_000_000
    [step], answer = plan.steps, encode_message(answered)
    assert step.exchange.request is not None
    earlier = [Attempt(step.exchange.request, 1, answer, 2, "why")] * is_repeated
    outcome = Outcome(step, answer=answer, earlier=earlier)
    Judge(RunFacts(IdMap(plan), [outcome]), built_in_fields()).judge()
    [one] = outcome.judgement.differences
    assert one.rule == "written-before" * is_repeated


def step_named(plan: ReplayPlan, name: str) -> Step:
    return next(each for each in plan.steps if each.api_name == name and each.skipped is None)


def new(judgement: Judgement) -> list[tuple[str, Any, Any]]:
    """Differences that no rule allows."""
    return [
        (each.path, each.captured, each.answered) for each in judgement.differences if not each.rule
    ]


def test_verdicts(plan: ReplayPlan) -> None:
    """Same, tolerated by a rule, different, no answer, not sent."""
    step, coordinator = step_named(plan, "Metadata"), step_named(plan, "FindCoordinator")
    assert judged(plan, step, lambda body: None).verdict is Verdict.SAME
    tolerated = judged(plan, step, lambda body: body.update(throttle_time_ms=9))
    assert tolerated.verdict is Verdict.TOLERATED
    assert tolerated.differences == [Difference("throttle_time_ms", (), 0, 9, "throttle-time")]
    late = judged(plan, step, lambda body: body.update(throttle_time_ms=30_000))
    assert new(late) == [("throttle_time_ms", 0, 30_000)]
    different = judged(plan, coordinator, lambda body: body.update(error_code=29))
    assert new(different) == [("error_code", 15, 29)]
    lacks_version = Skipped(SkipCode.API_VERSION, "old")
    neither = replace(step.exchange, response=None, response_missing="it is not in the capture")
    gone = Outcome(replace(step, exchange=neither), error="the target closed the connection")
    Judge(RunFacts(IdMap(plan), [gone]), load_fields()).judge()
    assert gone.judgement == Judgement(
        Verdict.TOLERATED,
        reason="the target closed the connection; no captured response: it is not in the capture",
    )
    unanswered = replace(step, exchange=replace(step.exchange, response=None))
    for outcome, verdict in (
        (Outcome(step, error="timed out"), Verdict.ERROR),
        (Outcome(step, answer=b"\0\0\0\1"), Verdict.ERROR),
        (Outcome(step, skipped=lacks_version), Verdict.DIFFERENT),
        (Outcome(unanswered, skipped=lacks_version), Verdict.SKIPPED),
        (Outcome(step, skipped=Skipped(SkipCode.NOT_ALLOWED, "no")), Verdict.SKIPPED),
    ):
        Judge(RunFacts(IdMap(plan), [outcome]), load_fields()).judge()
        assert outcome.judgement.verdict is verdict


def test_a_code_that_differs_stands_for_its_struct(plan: ReplayPlan) -> None:
    """The other fields follow from it, and the broker's words are beside it."""
    step = step_named(plan, "CreateTopics")

    def refuse(body: Body) -> None:
        body["topics"][0] |= {"error_code": 44, "error_message": "a policy"}

    judgement = judged(plan, step, refuse)
    [(path, captured, answered)] = new(judgement)
    assert path.endswith("error_code")
    assert (captured, answered) == (0, 44)
    assert judgement.differences[0].note == "the target says: a policy"


def test_order_is_free_and_elements_have_names(plan: ReplayPlan) -> None:
    """A reversed list is the same; a new element has its name, and one that is listed twice."""
    step = step_named(plan, "ApiVersions")
    assert judged(plan, step, lambda body: body["api_keys"].reverse()).verdict is Verdict.SAME
    added = {"api_key": 99, "min_version": 0, "max_version": 1}
    found = judged(plan, step, lambda body: body["api_keys"].append(added))
    assert new(found) == [("api_keys[Api99]", ABSENT, added)]
    found = judged(plan, step, lambda body: body["api_keys"].append(body["api_keys"][0]))
    assert new(found)[0][0] == "api_keys[Produce again]"


def test_a_topic_may_have_several_entries(plan: ReplayPlan) -> None:
    """Brokers join only neighbouring partitions of a topic in one entry."""
    step = step_named(plan, "Produce")

    def split(body: Body) -> None:
        body["responses"].append(body["responses"][0] | {"partition_responses": []})

    assert judged(plan, step, split).verdict is Verdict.SAME


def test_strict_allows_only_ids_and_order(plan: ReplayPlan) -> None:
    step = step_named(plan, "Metadata")
    changed = judged(plan, step, lambda body: body.update(throttle_time_ms=9), is_strict=True)
    assert changed.verdict is Verdict.DIFFERENT
    assert judged(plan, step, lambda body: None, is_strict=True).verdict is Verdict.SAME
    fetch = step_named(plan, "Fetch")

    def fetched_apart(body: Body) -> None:
        body["session_id"] = 9
        body["responses"][0]["partitions"][0]["records"] = None

    other = judged(plan, fetch, fetched_apart, is_strict=True)
    [lost] = other.differences  # records are compared over all answers, not bytes of one
    assert (lost.place, lost.answered) == ("responses[].partitions[].records", "no records")


@pytest.mark.parametrize(
    ("rule", "raised_by", "allowed"),
    [
        ('kind = "tolerance"\npath = "api_keys[].max_version"\nabsolute = 2', 2, True),
        ('kind = "tolerance"\npath = "api_keys[].max_version"\nabsolute = 2', 3, False),
        ('kind = "ignore"\npath = "api_keys"', 3, True),
        ('kind = "ignore"\npath = "max_version"\nwhere = { api_key = "^0$" }', 3, True),
        ('kind = "ignore"\npath = "max_version"\nwhere = { api_key = "^1$" }', 3, False),
        ('kind = "ignore"\npath = "api_keys"\napis = ["Fetch"]', 3, False),
    ],
)
def test_rules_of_a_file(
    plan: ReplayPlan, tmp_path: Path, rule: str, raised_by: int, allowed: bool
) -> None:
    """They allow a difference at their place, or below it."""
    file = tmp_path / "mine.toml"
    file.write_text(f'[[rule]]\nname = "ours"\n{rule}\n')

    def change(body: Body) -> None:
        body["api_keys"][0]["max_version"] += raised_by

    found = judged(plan, step_named(plan, "ApiVersions"), change, paths=[str(file)])
    assert [each.rule for each in found.differences] == ["ours" if allowed else ""]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ('kind = "tolerance"\npath = "api_keys[].max_version"\nabsolute = 3', []),
        ('kind = "tolerance"\npath = "api_keys[].max_version"\nabsolute = 2',
         ["rule ours allowed nothing"]),
        ('kind = "text"\npath = "api_keys[].max_version"', []),
        ('kind = "text"\npath = "api_keys[].max_versoin"',
         ["rule ours fits no field of the compared answers"]),
        ('kind = "ignore"\npath = "max_version"\napis = ["Fetch"]',
         ["rule ours fits no field of the compared answers"]),
    ],
)  # fmt: skip
def test_rules_of_a_file_that_had_no_effect_are_noted(
    plan: ReplayPlan, tmp_path: Path, rule: str, said: list[str]
) -> None:
    """One that allowed nothing, though something may differ there, and one about no field."""
    file = tmp_path / "mine.toml"
    file.write_text(f'[[rule]]\nname = "ours"\n{rule}\n')
    step = step_named(plan, "ApiVersions")
    message = copy.deepcopy(response_of(step.exchange))
    assert message is not None
    message.body["api_keys"][0]["max_version"] += 3
    outcome = Outcome(step, answer=encode_message(message))
    facts, table = RunFacts(IdMap(plan), [outcome]), load_fields([str(file)])
    assert judge_run(facts, [], [], table, Releases()) == said


def metadata(version: int, numbers: Iterable[int], **topic: Any) -> Message:
    """A Metadata answer about partitions of topic t."""
    partitions = [{"error_code": 0, "partition_index": each, "leader_id": 1} for each in numbers]
    topics = [{"error_code": 0, "name": "t", "partitions": partitions, **topic}]
    body = {"brokers": [], "topics": topics}
    return Message(ApiKey.METADATA, version, "response", {"correlation_id": 1}, body)


def plan_of(answer: Message) -> ReplayPlan:
    """A Metadata with its captured answer."""
    request = Message(ApiKey.METADATA, answer.api_version, "request", {"client_id": "c"},
                      {"topics": [{"name": "t"}]})  # fmt: skip
    return make_plan(workload([exchange(0, request, 0, 1, answer)]), everything())


def described(
    count: int, racing: bool, *partitions: int, code: int = 0, early: bool = False
) -> Judgement:
    """A Metadata answer about a topic that had `count` partitions in the capture."""
    plan = plan_of(metadata(7, range(count)))
    plan.steps[0].is_racing, plan.steps[0].is_early = racing, early
    answer = encode_message(metadata(7, partitions, error_code=code))
    outcome = Outcome(plan.steps[0], answer=answer)
    Judge(RunFacts(IdMap(plan), [outcome]), load_fields()).judge()
    return outcome.judgement


def test_reads_of_what_was_just_changing() -> None:
    """They may lack new elements, but have no other error."""
    assert described(2, False, 0).verdict is Verdict.DIFFERENT
    assert described(2, True, 0).verdict is Verdict.TOLERATED
    assert new(described(2, True)) == [("topics[t].partitions", ["0", "1"], [])]
    assert described(2, True, 0, 1, code=3).verdict is Verdict.TOLERATED
    assert described(2, True, 0, 1, code=-1).verdict is Verdict.DIFFERENT


def test_a_read_that_was_racing_in_one_run_is_not_in_another() -> None:
    """One that raced in the reference may differ from that, too."""
    plan = plan_of(metadata(7, range(2)))
    [step], ids = plan.steps, IdMap(plan)
    racing, other = (
        Outcome(step, answer=encode_message(metadata(7, [0])), api_version=7, is_racing=each)
        for each in (True, False)
    )
    whole = Outcome(step, answer=encode_message(metadata(7, range(2))))
    for outcome, reference, verdict in (
        (racing, None, Verdict.TOLERATED),
        (other, None, Verdict.DIFFERENT),
        (whole, racing, Verdict.TOLERATED),
        (whole, other, Verdict.DIFFERENT),
    ):
        of_reference = reference and RunFacts(ids, [reference])
        Judge(RunFacts(ids, [outcome]), load_fields(), of_reference).judge()
        assert outcome.judgement.verdict is verdict


def test_reads_after_topics_were_made() -> None:
    """The captured broker may lack them, but the replay has waited for them."""
    assert described(1, False, 0, 1, early=True).verdict is Verdict.TOLERATED
    assert described(2, False, 0, early=True).verdict is Verdict.DIFFERENT
    assert described(2, False, 0, 1, code=3, early=True).verdict is Verdict.DIFFERENT


def test_groups_of_other_brokers_are_listed_beside_the_captured_ones() -> None:
    """The replay asks all nodes of a cluster, and so none may be missing."""
    request = Message(ApiKey.LIST_GROUPS, 4, "request", {"client_id": "c"}, {"states_filter": []})
    names = {"groups": ["a", "b"]}
    naming = Message(ApiKey.DESCRIBE_GROUPS, 0, "request", {"client_id": "c"}, names)

    def listed(*names: str) -> Message:
        groups = [{"group_id": name, "group_state": "Stable"} for name in names]
        return Message(ApiKey.LIST_GROUPS, 4, "response", {"correlation_id": 1}, {"groups": groups})

    for captured, answered, count, verdict in (
        (["a"], ["b", "a"], 2, Verdict.TOLERATED),
        ([], ["b"], 2, Verdict.TOLERATED),
        (["a"], ["b", "a"], 1, Verdict.DIFFERENT),
        (["a"], ["b"], 2, Verdict.DIFFERENT),
        (["a"], [], 2, Verdict.DIFFERENT),
    ):
        exchanges = exchange(0, request, 0, 1, listed(*captured)), exchange(0, naming, 2, 3, None)
        plan = make_plan(workload([*exchanges]), everything())
        outcome = Outcome(plan.steps[0], answer=encode_message(listed(*answered)))
        ids = IdMap(plan)
        ids.target.nodes |= {node: ("h", node) for node in range(count)}
        Judge(RunFacts(ids, [outcome]), load_fields()).judge()
        assert outcome.judgement.verdict is verdict


def test_a_config_that_the_run_has_set_is_right() -> None:
    """The captured broker showed the value of before; the target may show the new one, no other,
    and then no other source. It may not leave the config out."""
    run = Run()
    config = {"name": "retention.ms", "config_operation": 0, "value": "5"}
    resource = {"resource_type": 2, "resource_name": "t"}
    result = {"error_code": 0, **resource}
    altered = {"resources": [{**resource, "configs": [config]}]}
    run.add(0, ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, altered, {"responses": [result]})
    answers = [
        {"results": [{**result, "configs": [{"name": "retention.ms", "value": value,
                                             "config_source": source}]}]}
        for value, source in (("9", 5), ("5", 1), ("6", 1))
    ]  # fmt: skip
    for at_s, answer in enumerate(
        [*answers[1:], {"results": [{**result, "configs": [{"name": "other", "value": "1"}]}]}], 1
    ):
        run.add(at_s, ApiKey.DESCRIBE_CONFIGS, 4, {"resources": [resource]}, answer, answers[0])
    Judge(RunFacts(run.ids(), run.outcomes), load_fields()).judge()
    _, right, *wrong = [each.judgement for each in run.outcomes]
    assert {each.rule for each in right.differences} == {"as-set"}
    assert [[each.rule for each in one.differences] for one in wrong] == [["", ""], ["", ""]]


def test_a_default_beside_an_error_is_no_id() -> None:
    """The target has given producer id 0 to another producer; here it is what is always there."""
    run = Run()
    state = {"error_code": 105, "transactional_id": "nope", "producer_id": 0}
    answers = [{"throttle_time_ms": each, "transaction_states": [state]} for each in (0, 9)]
    asked = {"transactional_ids": ["nope"]}
    run.add(0, ApiKey.DESCRIBE_TRANSACTIONS, 0, asked, answers[1], answers[0])
    run.plan.steps.append(run.outcomes[0].step)
    ids = run.ids()
    ids.producers.learn(Producer(7, 0), Producer(0, 0))
    Judge(RunFacts(ids, run.outcomes), load_fields()).judge()
    assert new(run.outcomes[0].judgement) == []


def test_offsets_are_positions() -> None:
    """By the last batch that both sides have; next to it, offsets of the target may be fewer."""
    offsets = OffsetMap("relative").of(("t", 0), 0)
    assert offsets.to_capture(7) == 7
    offsets.target_starts(100)
    offsets.add_captured(start=0)
    assert offsets.to_capture(103) == 3
    offsets.produced(10, 110)
    offsets.produced(20, 118)
    positions = {captured: offsets.to_target(captured) for captured in (10, 15, 20, 25)}
    assert {offsets.to_capture(each) for each in positions.values()} == set(positions)
    assert offsets.to_capture(117) == 17


def test_another_run_is_the_reference(plan: ReplayPlan) -> None:
    """Both answers are compared in the capture's terms, and so is what only a reference tells."""
    step = next(each for each in plan.steps if _has_partitions(each))
    message = copy.deepcopy(response_of(step.exchange))
    assert message is not None
    table = load_fields()
    reference = [Outcome(each, skipped=each.skipped) for each in plan.steps]
    version = step.exchange.api_version
    reference[step.number] = Outcome(step, answer=encode_message(message), api_version=version)
    topic = next(each for each in message.body["topics"] if each["partitions"])
    topic["partitions"][0]["isr_nodes"] = []
    outcome = Outcome(step, answer=encode_message(message))
    ids = IdMap(plan)
    Judge(RunFacts(ids, [outcome]), table).judge()
    assert outcome.judgement == Judgement(Verdict.SAME)
    Judge(RunFacts(ids, [outcome]), table, RunFacts(IdMap(plan), reference)).judge()
    assert [each[0].rpartition(".")[2] for each in new(outcome.judgement)] == ["isr_nodes"]


def test_a_reference_may_bring_records_in_several_tries() -> None:
    """The target has to bring those of all."""
    parts = [numbered_batch(first, 2) for first in (0, 2)]
    plan = planned(exchange(0, fetch(0), 0, 1, fetched(0, b"".join(parts))))
    [step] = plan.steps

    def tried(*records: bytes) -> RunFacts:
        answers = [encode_message(fetched(0, each)) for each in records]
        outcome = Outcome(step, step.exchange.request, answers.pop(), 3, 4, api_version=12)
        outcome.earlier = [Attempt(outcome.sent or b"", 1, each, 2, "why") for each in answers]
        return RunFacts(IdMap(plan), [outcome])

    for records, lost in ((parts, 0), (parts[::-1], 0), (parts[1:], 1), (parts[:1], 1)):
        facts = tried(*records)
        Judge(facts, load_fields(), tried(*parts)).judge()
        found = [place for place, *_ in new(facts.outcomes[0].judgement)]
        assert sum(place.endswith("records") for place in found) == lost


def test_a_reference_without_an_answer_hides_no_difference(plan: ReplayPlan) -> None:
    """Of several references, one that has no answer to compare counts only if none has."""
    step = step_named(plan, "FindCoordinator")
    message = copy.deepcopy(response_of(step.exchange))
    assert message is not None
    version, silent = step.exchange.api_version, [Outcome(each) for each in plan.steps]
    answered = list(silent)
    answered[step.number] = Outcome(step, answer=encode_message(message), api_version=version)
    message.body["error_code"] = 29
    without, having = (RunFacts(IdMap(plan), outcomes) for outcomes in (silent, answered))
    for references, verdict in (
        ([without, having], Verdict.DIFFERENT),
        ([having, without], Verdict.DIFFERENT),
        ([without, without], Verdict.TOLERATED),
    ):
        outcome = Outcome(step, answer=encode_message(message), api_version=version)
        judge_run(RunFacts(IdMap(plan), [outcome]), [], references, built_in_fields(), Releases())
        assert outcome.judgement.verdict is verdict
    broken = Outcome(step, answer=b"\0\0\0\1", api_version=version)
    facts = RunFacts(IdMap(plan), [broken])
    judge_run(facts, [], [without, having], built_in_fields(), Releases())
    assert broken.judgement.verdict is Verdict.ERROR


def _has_partitions(step: Step) -> bool:
    response = response_of(step.exchange) if step.api_name == "Metadata" else None
    topics = [] if response is None else response.body["topics"]
    return step.skipped is None and any(each["partitions"] for each in topics)


def test_a_topic_id_is_a_name() -> None:
    """The id of another topic is a difference, by the names of both."""
    captured, other = UUID(int=1), UUID(int=2)
    one = plan_of(metadata(12, [0], topic_id=captured))
    one.workload.facts.topics["t"] = TopicFacts("t", [str(captured)])
    ids = IdMap(one)
    ids.target.names.update({UUID(int=5): "t", other: "another"})
    for topic_id, found in ((UUID(int=5), []), (other, [("topics[t].topic_id", "t", "another")])):
        answer = encode_message(metadata(12, [0], topic_id=topic_id))
        outcome = Outcome(one.steps[0], answer=answer)
        Judge(RunFacts(ids, [outcome]), load_fields()).judge()
        assert new(outcome.judgement) == found


# -- noise of control runs -------------------------------------------------------------------------


def noise(place: str, *runs: Sequence[tuple[Any, Any]]) -> Noise:
    """Of control runs that differ from the first one at a place of Heartbeats in these values."""
    maker, found = PlanMaker(), Noise()
    for pairs in runs:
        differences = [Difference(place, (), *values) for values in pairs]
        steps = [maker.steps[maker.add(0)] for _ in pairs]
        found.add(
            Outcome(step, judgement=Judgement(Verdict.DIFFERENT, [one]))
            for step, one in zip(steps, differences, strict=True)
        )
    return found


def is_excused(found: Noise, place: str, captured: Any, answered: Any) -> bool:
    one = found.tolerated("Heartbeat", Difference(place, ("7",), captured, answered))
    return one.rule == NOISE


@pytest.mark.parametrize(
    ("pairs", "value", "excused"),
    [
        ([(3, 5)], (8, 10), True),  # as far apart as control runs
        ([(3, 5)], (8, 11), False),
        ([("a", "b"), ("a", "b")], ("a", "b"), True),
        ([("a", "b"), ("a", "b")], ("a", "c"), False),
        ([("x1", "x2"), ("x3", "x4")], ("x5", "x6"), True),  # random
        ([("x1", "x2"), ("x3", "x4")], ("x5", None), False),
        ([("x1", "x2"), ("x3", "x4")], ("x5", ABSENT), False),
    ],
)
def test_values_that_differ_between_control_runs(
    pairs: list[tuple[Any, Any]], value: tuple[Any, Any], excused: bool
) -> None:
    """A number within their spread, a known text, or any text if none ever repeats."""
    assert is_excused(noise("members[].name", pairs), "members[].name", *value) is excused
    assert not is_excused(noise("members[].name", pairs), "members[].other", *value)


@pytest.mark.parametrize(
    "place",
    ["topics[].error_code", "responses[].partitions[].high_watermark",
     "responses[].partitions[].log_start_offset", "responses[].partitions[].records[].key",
     "responses[].partitions[].aborted_transactions"],
)  # fmt: skip
def test_evidence_is_never_noise(place: str) -> None:
    """Error codes, offsets and records count though the control runs differ there."""
    assert not is_excused(noise(place, [(0, 1)]), place, 0, 1)


@pytest.mark.parametrize(
    ("last", "excused"),
    [
        ([("a1", "d1"), ("a2", "d2")], True),
        ([("a1", "d1"), ("a2", "c2")], False),  # as the one before has it
        ([("a1", "d1")], False),  # elsewhere as the first one has it
    ],
)
def test_texts_of_four_control_runs_that_never_agree(
    last: list[tuple[str, str]], excused: bool
) -> None:
    """Any text is allowed then, as after two runs."""
    runs = [("a1", "b1"), ("a2", "b2")], [("a1", "c1"), ("a2", "c2")], last
    assert is_excused(noise("members[].name", *runs), "members[].name", "e1", "e2") is excused


# -- every field ----------------------------------------------------------------------------------


def exact_places(of: Any, values: Body, api: str, path: str = "", at: str = "") -> Any:
    """(path with indices, holder, name) of each value to which the table gives no kind."""
    for name, slot in of.by_name.items():
        value, here, place = values[name], f"{path}{name}", f"{at}{name}"
        kinds = [rule.kind for rule in built_in_fields().kinds(api, here, slot.field)]
        if slot.inner is not None and value is not None and not kinds:
            several = value if slot.field.is_array else [value]
            inner = f"{here}{'[]' * slot.field.is_array}"
            left_out = built_in_fields().kinds(api, inner, slot.field)
            for each in several if not left_out else ():
                yield from exact_places(slot.inner, each, api, f"{inner}.", f"{place}.")
        elif slot.inner is None and not slot.field.is_array and kinds[:1] in ([], ["exact"]):
            yield place, values, name, slot.field.type


def other(kind: Type, value: Any) -> Any:
    """Another value of a type; None if it has no other."""
    if kind is Type.BOOL:
        return not value
    if kind is Type.STRING:
        return f"{value or ''}x"
    if kind in (Type.BYTES, Type.RECORDS, Type.UUID, Type.FLOAT64):
        return None
    return value + 1 if value < 100 else value - 1


def missed(path: Path) -> tuple[int, set[str]]:
    """Change each exact value of answers alone: how many, and those that are not found."""
    captured = load_workload(str(path))
    done = replay(captured, OtherCluster(captured))
    judge, ids = done.judge, done.translator.ids
    assert judge is not None
    seen: dict[tuple[str, int], int] = {}
    count, lost = 0, set()
    for outcome in done.outcomes:
        step, response = outcome.step, response_of(outcome.step.exchange)
        key = step.api_name, step.exchange.api_version
        seen[key] = seen.get(key, 0) + 1
        if response is None or outcome.skipped is not None or seen[key] > PER_VERSION:
            continue
        answer = OtherCluster(captured).moved(response)
        shape = layout(catalog.api(answer.api_key).response, answer.api_version)
        places = list(exact_places(shape, answer.body, step.api_name))
        for place, holder, name, kind in places[:: 1 + len(places) // PER_ANSWER]:
            value = holder[name]
            holder[name] = other(kind, value)
            if holder[name] is not None and not judge.differences(step, response, answer):
                lost.add(f"{step.api_name} {place}")
            holder[name] = value
            count += 1
    assert ids is judge._facts.ids
    return count, lost


@cases("name", ["librdkafka.pcap"], heavy=["java_0_10_2_2.pcap"])
def test_every_exact_value_is_compared(captures: Path, name: str) -> None:
    """Those to which the table of fields gives no other kind."""
    count, lost = missed(captures / name)
    assert count > 100
    assert lost == set()


@needs_material
@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    ["java_latest/java_latest", "admin/admin", "share_streams/share", "version_sweep/sweep_4_3_1"],
)
def test_every_exact_value_of_many_apis_is_compared(name: str) -> None:
    count, lost = missed(CAPTURES / f"{name}.pcap")
    assert count > 300
    assert lost == set()


def test_what_only_another_target_is_compared_in() -> None:
    """With a reference, the number of replicas has to be equal; ids of brokers and members, their
    addresses, and who leads a group, are each target's own."""

    def run(node: int, replicas: int, member: str) -> RunFacts:
        made = Run()
        joined = {
            "generation_id": 1,
            "leader": member,
            "member_id": member,
            "members": [{"member_id": member}],
        }
        partition = {"partition_index": 0, "leader_id": node, "replica_nodes": [node] * replicas}
        topics = [{"name": "t", "partitions": [partition]}]
        asked = {"topics": [{"name": "t"}]}
        broker = {"node_id": node, "host": "h", "port": 1}
        made.add(1, ApiKey.METADATA, 8, asked, {"brokers": [broker], "topics": topics})
        made.add(2, ApiKey.JOIN_GROUP, 5, {"group_id": "g"}, joined)
        address = {"name": "listeners", "value": f"PLAINTEXT://h:{node}"}
        described = {"resource_type": 4, "resource_name": "1"}
        answered = {**described, "configs": [{**address, "synonyms": [address]}]}
        made.add(3, ApiKey.DESCRIBE_CONFIGS, 4, {"resources": [described]}, {"results": [answered]})
        ids = made.ids()
        ids.target.nodes[node] = ("h", 1)
        ids.groups.learn("g", "captured", member)
        of_topic = replace(made.outcomes[0].step, accesses=[(("topic", "t"), "read")])
        ids.plan.steps.append(of_topic)
        return RunFacts(ids, made.outcomes)

    facts = run(1, 2, "a")
    for reference, differing in (run(7, 2, "b"), []), (run(7, 1, "b"), ["replica_nodes"]):
        Judge(facts, built_in_fields(), reference).judge()
        found = [one.path for each in facts.outcomes for one in each.judgement.differences]
        assert [path.rpartition(".")[2] for path in found] == differing
