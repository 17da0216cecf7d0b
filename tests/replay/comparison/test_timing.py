"""Answers that were not final are in the outcome, and findings unless timing explains them."""

from __future__ import annotations

from typing import Any

import pytest

from kdissect.codec.message import Message, encode_message
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.comparator import Comparator
from kdissect.replay.comparison.grouping import retry_notes
from kdissect.replay.comparison.timing import _is_change
from kdissect.replay.model import (
    Connection,
    Difference,
    EarlierAnswer,
    Exchange,
    Judgement,
    Outcome,
    PlanOptions,
    ReplayPlan,
    Step,
    TopicFacts,
    Verdict,
    Workload,
    WorkloadFacts,
)
from kdissect.replay.planning.dependencies import ResourceAccesses
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import step_class

S = 1_000_000_000
NEWEST = {ApiKey.LIST_GROUPS: 5}  # has types; of other APIs version 2 is enough
NOT_AVAILABLE = 5  # LEADER_NOT_AVAILABLE
DESCRIBE, ALTER, METADATA, CREATE = (
    ApiKey.DESCRIBE_CONFIGS, ApiKey.ALTER_CONFIGS, ApiKey.METADATA, ApiKey.CREATE_TOPICS,
)  # fmt: skip
TOKENS, CREATE_TOKEN, EXPIRE_TOKEN = (
    ApiKey.DESCRIBE_DELEGATION_TOKEN, ApiKey.CREATE_DELEGATION_TOKEN,
    ApiKey.EXPIRE_DELEGATION_TOKEN,
)  # fmt: skip
PRODUCERS, TRANSACTIONS, END, GROUPS, LEAVE = (
    ApiKey.DESCRIBE_PRODUCERS, ApiKey.LIST_TRANSACTIONS, ApiKey.END_TXN, ApiKey.LIST_GROUPS,
    ApiKey.LEAVE_GROUP,
)  # fmt: skip


def metadata(error_code: int = 0) -> dict[str, Any]:
    partitions = [{"partition_index": 0, "leader_id": -1}]
    return {"topics": [{"name": "t", "error_code": error_code, "partitions": partitions}]}


def configs(value: str) -> dict[str, Any]:
    config = {"name": "retention.ms", "value": value}
    return {"results": [{"resource_type": 2, "resource_name": "t", "configs": [config]}]}


def producers(
    name: str = "t", numbers: tuple[int, ...] = (0, 1), ids: tuple[int, ...] = ()
) -> dict[str, Any]:
    active = [{"producer_id": each} for each in ids]
    partitions = [{"partition_index": each, "active_producers": active} for each in numbers]
    return {"topics": [{"name": name, "partitions": partitions}]}


def transactions(*names: str) -> dict[str, Any]:
    states = [{"transactional_id": each, "transaction_state": "Ongoing"} for each in names]
    return {"transaction_states": states}


def tokens(*codes: bytes) -> dict[str, Any]:
    return {"tokens": [{"token_id": each.hex(), "hmac": each} for each in codes]}


def described(*members: str, topics: tuple[str, ...] = ("t",)) -> dict[str, Any]:
    assignment: dict[str, Any] = {"topic_partitions": []}
    rest = {"subscribed_topic_names": topics, "assignment": assignment, "member_epoch": 1}
    listed = [{"member_id": each, **rest, "target_assignment": assignment} for each in members]
    epochs = {"group_epoch": 1, "assignment_epoch": 1}
    return {"groups": [{"group_id": "g", "group_state": "Stable", **epochs, "members": listed}]}


def groups(group_state: str = "Stable", group_type: str = "classic") -> dict[str, Any]:
    group = {"group_id": "g", "group_state": group_state, "group_type": group_type}
    return {"groups": [group]}


RESOURCES = {"resources": [{"resource_type": 2, "resource_name": "t"}]}
BODIES: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {
    METADATA: ({"topics": [{"name": "t"}]}, metadata()),
    DESCRIBE: (RESOURCES, configs("1")),
    ALTER: (RESOURCES, {"responses": [{"resource_type": 2, "resource_name": "t"}]}),
    CREATE: ({"topics": [{"name": "t"}]}, {"topics": [{"name": "t"}]}),
    PRODUCERS: ({"topics": [{"name": "t", "partition_indexes": [0, 1]}]}, producers()),
    TRANSACTIONS: ({}, transactions("x")),
    END: ({"transactional_id": "x"}, {}),
    ApiKey.FETCH: ({"topics": [{"topic": "t", "partitions": [{"partition": 0}]}]}, {}),
    GROUPS: ({}, groups()),
    TOKENS: ({"owners": None}, tokens(b"a")),
    CREATE_TOKEN: ({}, {"hmac": b"c"}),
    EXPIRE_TOKEN: ({"hmac": b"c"}, {}),
    LEAVE: ({"group_id": "g"}, {}),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: (
        {"group_id": "g", "member_id": "m"},
        {"member_id": "m", "member_epoch": 1},
    ),
    ApiKey.CONSUMER_GROUP_DESCRIBE: ({"group_ids": ["g"]}, described("m")),
}


class Run:
    """Requests about topic t, one a connection, that are answered as captured."""

    def __init__(self) -> None:
        self.connection = Connection(0, 0, ("10.0.0.1", 1000), ("10.0.0.2", 9092), 0, 1)
        self.steps: list[Step] = []
        self.outcomes: list[Outcome] = []

    def add(
        self, api_key: int, at_s: float, *, first: dict[str, Any] | None = None,
        captured: dict[str, Any] | None = None,
    ) -> int:  # fmt: skip
        """A request answered at a time; first: the body of an answer a second before. captured:
        further fields of both responses."""
        number, version = (
            len(self.steps),
            min(catalog.api(api_key).request.versions[1], NEWEST.get(api_key, 2)),
        )
        sent, answered = BODIES[api_key]
        bodies = sent, {**answered, **(captured or {})}
        request, response = (
            encode_message(Message(api_key, version, side, {}, body))
            for side, body in zip(("request", "response"), bodies, strict=True)
        )
        exchange = Exchange(
            number, 0, number, api_key, version, 0, "c", request, response, number, number, number,
            number,
        )  # fmt: skip
        name = catalog.api(api_key).name
        step = Step(number, 0, exchange, name, step_class(api_key), number, True)
        at_ns = int(at_s * S)
        outcome = Outcome(step, request, response, at_ns - 1000, at_ns, api_version=version)
        if first is not None:
            answer = encode_message(Message(api_key, version, "response", {}, first))
            outcome.earlier = [
                EarlierAnswer(request, answer, "because", at_ns - S - 1000, at_ns - S)
            ]
        self.steps.append(step)
        self.outcomes.append(outcome)
        return number

    def judgements(self, brokers: int = 2) -> dict[int, Judgement]:
        facts = WorkloadFacts(topics={"t": TopicFacts("t")})
        accesses = ResourceAccesses(facts)
        for step in self.steps:
            step.accesses = accesses.of(step.exchange)
        workload = Workload("made", "capture", [self.connection], facts)
        lanes = [list(range(len(self.steps)))]
        plan = ReplayPlan(workload, PlanOptions(), self.steps, lanes)
        ids = IdMap(plan)
        ids.target.nodes = {node: ("broker", node) for node in range(brokers)}
        comparator = Comparator(ids)
        for outcome in self.outcomes:
            outcome.judgement = comparator.judge(outcome)
        found = {each.step.number: each.judgement for each in self.outcomes if each.judgement}
        return found | comparator.finish()


@pytest.mark.parametrize(
    ("api_key", "first", "said"),
    [
        (METADATA, metadata(NOT_AVAILABLE), ("topics[0].error_code", "0", "5")),
        (DESCRIBE, configs("2"), ("results[0].configs[0].value", "1", "2")),
    ],
    ids=["an error hidden by a retry", "a value hidden by a retry"],
)
def test_a_first_answer_with_another_value_is_a_finding(
    api_key: int, first: dict[str, Any], said: tuple[str, str, str]
) -> None:
    """A first answer with another value is a finding, though the retry agreed."""
    run = Run()
    run.add(api_key, 1)
    number = run.add(api_key, 100, first=first)
    found = run.judgements()[number]
    assert found.verdict is Verdict.DIFFERENT
    [difference] = [each for each in found.differences if not each.rule]
    assert (difference.path, difference.captured, difference.answered) == said
    assert difference.note == "answer 1 of 2: because"
    assert not run.outcomes[number].earlier[0].is_explained
    assert retry_notes(run.outcomes) == [
        f"1 {run.steps[number].api_name} request sent again: because"
    ]


def test_a_resource_that_was_not_ready_yet() -> None:
    """Before the first success of the API for that topic."""
    run = Run()
    number = run.add(METADATA, 100, first=metadata(NOT_AVAILABLE))
    assert run.judgements()[number].verdict is not Verdict.DIFFERENT
    [earlier] = run.outcomes[number].earlier
    assert earlier.is_explained
    assert [each.path for each in earlier.differences] == ["topics[0].error_code"]


@pytest.mark.parametrize(
    ("written_s", "brokers", "is_explained"),
    [(98, 2, True), (90, 2, False), (99.5, 2, False), (97, 1, False), (98.5, 1, True)],
)
def test_a_write_before_explains_a_read(written_s: float, brokers: int, is_explained: bool) -> None:
    """A write of the same topic shortly before, not long before, and not after it. The only broker
    shows it within a second."""
    run = Run()
    run.add(DESCRIBE, 1)
    run.add(ALTER, written_s)
    number = run.add(DESCRIBE, 100, first=configs("2"))
    assert (run.judgements(brokers)[number].verdict is not Verdict.DIFFERENT) is is_explained


@pytest.mark.parametrize(
    ("api_key", "first"),
    [
        (METADATA, metadata(-1)),
        (DESCRIBE, {**configs("1"), "throttle_time_ms": 30_000}),
        (ApiKey.FETCH, {"throttle_time_ms": 30_000}),
    ],
)
def test_a_write_explains_no_failure_and_no_throttle(api_key: int, first: dict[str, Any]) -> None:
    """Neither UNKNOWN_SERVER_ERROR nor 30 s come from a change of the topic."""
    run = Run()
    run.add(CREATE, 99)
    number = run.add(api_key, 100, first=first)
    assert run.judgements()[number].verdict is Verdict.DIFFERENT


@pytest.mark.parametrize(
    ("api_key", "first", "answered"),
    [
        (PRODUCERS, producers(numbers=(1,)), "none"),
        (PRODUCERS, producers(numbers=(0, 1, 1)), "t 1"),
        (PRODUCERS, producers(numbers=(0, 7)), "t 7"),
        (PRODUCERS, producers("u"), "u"),
        (PRODUCERS, producers(ids=(5,)), "t 0 5"),
        (TRANSACTIONS, transactions("x", "x"), "x, 2 times"),
        (TRANSACTIONS, transactions("y"), "y"),
        (TRANSACTIONS, transactions(""), '""'),
    ],
)
def test_no_change_explains_a_wrong_name(
    api_key: int, first: dict[str, Any], answered: str
) -> None:
    """Soon after a write: other partitions than the request names, a name twice, and one that is in
    no other answer."""
    run = Run()
    run.add(END, 99)
    run.add(CREATE, 99)
    number = run.add(api_key, 100, first=first)
    found = run.judgements()[number]
    assert found.verdict is Verdict.DIFFERENT
    assert answered in [each.answered for each in found.differences]


@pytest.mark.parametrize(
    ("first", "wanted"),
    [
        (described("m"), None),
        (described(), None),
        (described("m-x"), "g m-x"),
        (described("m", topics=("t", "t")), "t, t"),
        (described("m", topics=("t-x",)), "t-x"),
    ],
)
def test_members_of_a_description(first: dict[str, Any], wanted: str | None) -> None:
    """Soon after a heartbeat: a member that never joined, and its topics."""
    run = Run()
    run.add(ApiKey.CONSUMER_GROUP_HEARTBEAT, 99)
    number = run.add(ApiKey.CONSUMER_GROUP_DESCRIBE, 100, first=first)
    found = run.judgements()[number]
    assert found.verdict is (Verdict.SAME if wanted is None else Verdict.DIFFERENT)
    assert wanted is None or wanted in [each.answered for each in found.differences]


@pytest.mark.parametrize(
    ("first", "is_explained"),
    [
        (groups(group_state="Empty"), True),
        (groups(group_state="Stable-x"), False),
        (groups(group_state=""), False),
        (groups(group_type="consumer"), False),
        ({**groups(group_type="consumer"), "error_code": 14}, False),
        ({**groups(group_type=""), "error_code": 14}, True),
    ],
)
def test_a_change_explains_only_what_changes(first: dict[str, Any], is_explained: bool) -> None:
    """A group's state changes to another one of Kafka's, its type does not."""
    run = Run()
    run.add(LEAVE, 99)
    number = run.add(GROUPS, 100, first=first)
    assert (run.judgements()[number].verdict is not Verdict.DIFFERENT) is is_explained


@pytest.mark.parametrize(("operations", "is_default"), [("-2147483648", True), ("0", False)])
def test_authorized_operations_beside_an_error(operations: str, is_default: bool) -> None:
    """Kafka's default is the least number."""
    difference = Difference("topics[0].topic_authorized_operations", "3576", operations)
    assert _is_change(difference, has_error=True) is is_default


@pytest.mark.parametrize(("name", "is_explained"), [("t", True), ("t-x", False)])
def test_an_error_stands_beside_a_requested_topic(name: str, is_explained: bool) -> None:
    """The topic is just being created; error 3 is UNKNOWN_TOPIC_OR_PARTITION."""
    run = Run()
    run.add(CREATE, 99)
    first = {"topics": [{"name": name, "error_code": 3, "partitions": []}]}
    number = run.add(METADATA, 100, first=first)
    assert (run.judgements()[number].verdict is not Verdict.DIFFERENT) is is_explained


@pytest.mark.parametrize(
    ("writer", "first", "is_explained"),
    [
        (END, transactions(), True),
        (CREATE_TOKEN, tokens(), True),
        (CREATE_TOKEN, tokens(b"a", b"b"), False),
        (EXPIRE_TOKEN, tokens(b"a", b"b"), True),
        (EXPIRE_TOKEN, tokens(), False),
        (EXPIRE_TOKEN, tokens(b"a", b"a"), False),
    ],
)
def test_a_change_explains_elements_that_it_adds_or_removes(
    writer: int, first: dict[str, Any], is_explained: bool
) -> None:
    """An element is missing before it is added, and is one too many before it is removed."""
    run = Run()
    run.add(writer, 98.99)
    number = run.add(TRANSACTIONS if writer == END else TOKENS, 100, first=first)
    assert (run.judgements()[number].verdict is not Verdict.DIFFERENT) is is_explained


def test_an_error_of_the_captured_response_is_no_failure() -> None:
    """Beside it the other groups have their types."""
    run = Run()
    run.add(LEAVE, 99)
    both = {"error_code": 14}
    number = run.add(GROUPS, 100, first={**groups(group_type="consumer"), **both}, captured=both)
    assert run.judgements()[number].verdict is Verdict.DIFFERENT
