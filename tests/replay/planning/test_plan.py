"""Plans: steps to send, steps to skip, and the order between them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.pipeline.selection import Selection
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay import model
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.workload.source import INTERNAL_APIS, load_workload
from tests.builders.messages import a_request
from tests.builders.workloads import (
    ANSWERS,
    call,
    exchange,
    fetch,
    fetched,
    heartbeat,
    metadata,
    planned,
    produce,
    produced,
    step_of,
    workload,
)
from tests.replay.other_cluster import everything

DELETED = {"name": "t", "partitions": [{"partition_index": 0, "offset": 1}]}  # records


def runnable(plan: model.ReplayPlan) -> bool:
    """Whether a runner that follows the plan gets to the end: every wait is for something that can
    come, in the order of the lanes."""
    settled = {step.number for step in plan.steps if step.skipped is not None}
    sent = set(settled)
    places = [0] * len(plan.lanes)
    while True:
        moved = False
        for number, lane in enumerate(plan.lanes):
            while places[number] < len(lane):
                step = plan.steps[lane[places[number]]]
                ready = set(step.depends_on) <= settled and set(step.sent_after) <= sent
                if step.number not in settled and not ready:
                    break
                sent.add(step.number)
                settled.add(step.number)
                places[number] += 1
                moved = True
        if not moved:
            return len(settled) == len(plan.steps)


@pytest.mark.parametrize(
    ("chosen", "apis"),
    [
        (Selection(apis=frozenset({ApiKey.FETCH})), {"Fetch"}),
        (Selection(apis=frozenset({ApiKey.FETCH, ApiKey.HEARTBEAT}), topics=("?",)),
         {"Fetch", "Heartbeat"}),
        (Selection(topics=("T*",)), {"Fetch", "Heartbeat", "Metadata"}),
        (Selection(topics=("x*",)), {"Heartbeat", "Metadata"}),
        (Selection(groups=("*",)), {"Fetch", "Heartbeat", "Metadata"}),
        (Selection(groups=("x*", "h")), {"Fetch", "Metadata"}),
    ],
)  # fmt: skip
def test_names_are_chosen_by_patterns(chosen: Selection, apis: set[str]) -> None:
    """A fetch of topic "t", a heartbeat of group "g", Metadata of all topics, of client "c".

    Names match in any case."""
    made = workload(
        [exchange(0, each, at, at + 1, answer) for at, (each, answer) in enumerate([
            (fetch(0), fetched(0)),
            (heartbeat(), ANSWERS[ApiKey.HEARTBEAT]),
            (metadata(), ANSWERS[ApiKey.METADATA]),
        ])]
    )  # fmt: skip
    plan = make_plan(made, model.PlanOptions(frozenset({"groups"}), chosen))
    assert {step.api_name for step in plan.steps if step.skipped is None} == apis


def test_pipelined_requests_stay_pipelined() -> None:
    """The third request follows from the first answer; the second was sent before it was seen."""
    first = exchange(0, metadata(), 0, 5, ANSWERS[ApiKey.METADATA])
    second = exchange(0, metadata(), 1, 6, ANSWERS[ApiKey.METADATA])
    third = exchange(0, metadata(), 5, 9, ANSWERS[ApiKey.METADATA])
    plan = planned(first, second, third)
    assert step_of(plan, second).depends_on == ()
    assert step_of(plan, third).depends_on == (step_of(plan, first).number,)


def test_a_fetch_waits_for_what_was_produced_before_it() -> None:
    """It depends on the Produce of its partition, and of no other."""
    made = exchange(0, produce(0), 0, 5, produced(0, 0))
    read = exchange(1, fetch(0), 6, 9, fetched(0))
    other = exchange(2, fetch(1), 6, 9, fetched(1))
    plan = planned(made, read, other)
    assert step_of(plan, read).depends_on == (step_of(plan, made).number,)
    assert step_of(plan, other).depends_on == ()


def test_records_are_deleted_after_the_fetches_before() -> None:
    """DeleteRecords moves the log start, which each answer to a Fetch has: it waits for those that
    were answered before, but a Produce does not."""
    before = exchange(0, fetch(0), 0, 2, fetched(0))
    writing = exchange(1, produce(0), 4, 5, produced(0, 0))
    deletion = call(ApiKey.DELETE_RECORDS, 2, 4, 2, topics=[DELETED])
    plan = planned(before, writing, deletion)
    assert step_of(plan, before).number in step_of(plan, deletion).depends_on
    assert step_of(plan, before).number not in step_of(plan, writing).depends_on
    assert runnable(plan)


def test_a_topic_is_deleted_after_the_fetches_of_its_sessions() -> None:
    """A Fetch of a session (KIP-227) names no topic that stays as it was: DeleteTopics waits for
    such a Fetch of its topic, and not for one of another session."""

    def in_session(connection: int, session: int, epoch: int, sent_ms: int) -> model.Exchange:
        request, answer = fetch(0), fetched(0)
        request.body["topics"][0]["topic"] = "t" if session == 7 else "other"
        request.body |= {"session_epoch": epoch, "session_id": session if epoch else 0}
        if epoch:
            request.body["topics"], answer.body["responses"] = [], []
        answer.body["session_id"] = session
        return exchange(connection, request, sent_ms, sent_ms + 1, answer)

    first, later = in_session(0, 7, 0, 0), in_session(0, 7, 1, 2)
    others = in_session(1, 8, 0, 0), in_session(1, 8, 1, 2)
    deletion = call(ApiKey.DELETE_TOPICS, 4, 6, 2, topic_names=["t"])
    plan = planned(first, later, *others, deletion)
    assert step_of(plan, deletion).depends_on == (step_of(plan, later).number,)


def test_requests_in_flight_at_once_keep_the_order_of_their_log() -> None:
    """The later one got the smaller offset: so it goes first."""
    late = exchange(0, produce(0), 0, 9, produced(0, 1))
    early = exchange(1, produce(0), 3, 8, produced(0, 0))
    plan = planned(late, early)
    assert step_of(plan, late).depends_on == (step_of(plan, early).number,)


def test_logs_that_disagree_about_the_order_close_no_circle() -> None:
    """Two requests in flight at once, each before the other in one of two partitions."""
    one = exchange(0, produce(0, 1), 0, 9, produced(0, 0, 1, 1))
    two = exchange(1, produce(0, 1), 1, 9, produced(0, 1, 1, 0))
    plan = planned(one, two)
    assert runnable(plan)
    assert any("disagree" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("requests", "waits"),
    [
        ([(1, -1, 3, None), (4, 6, 2, 5)], [set(), {0}]),
        ([(0, 3, 2, 3), (4, -1, 3, None), (5, 9, 2, 8)], [set(), {0}, {0, 1}]),
        ([(0, 3, 2, 0), (1, -1, 3, None), (4, 6, 2, 5)], [set(), {0}, {0, 1}]),
        ([(0, -1, 1, None), (1, 3, 1, 0), (4, 6, 1, 2)], [{1}, set(), {0, 1}]),
    ],
    ids=["before", "not before one that was answered earlier", "between", "behind a later one"],
)
def test_records_of_acks_0_lie_in_gaps(
    requests: list[tuple[int, int, int, int | None]], waits: list[set[int]]
) -> None:
    """Each request (sent, answered, records, base offset; None: acks 0) waits for those before it
    in the log."""
    made = [
        exchange(n, produce(0, count=count, acks=0 if base is None else -1), sent_ms, seen_ms,
                 None if base is None else produced(0, base))
        for n, (sent_ms, seen_ms, count, base) in enumerate(requests)
    ]  # fmt: skip
    plan = planned(*made)
    by_number = {step_of(plan, each).number: n for n, each in enumerate(made)}
    for one, expected in zip(made, waits, strict=True):
        assert {by_number[each] for each in step_of(plan, one).depends_on} == expected
    assert plan.notes == []


def test_a_skipped_request_names_the_option_that_allows_it() -> None:
    """The reason names --allow and the class."""
    read = exchange(0, metadata(), 0, 5, ANSWERS[ApiKey.METADATA])
    write = exchange(0, produce(0), 6, 9, produced(0, 0))
    plan = make_plan(workload([read, write]))
    assert step_of(plan, read).skipped is None
    skipped = step_of(plan, write).skipped
    assert skipped is not None
    assert (skipped.code, skipped.reason) == (model.SkipCode.NOT_ALLOWED, "needs --allow produce")


def test_a_request_refused_as_not_ready_is_skipped() -> None:
    """NOT_LEADER_OR_FOLLOWER skips the step."""
    refused = exchange(0, produce(0), 0, 5, produced(0, -1, codes=[6]))
    skipped = planned(refused).steps[0].skipped
    assert skipped is not None
    assert skipped.code is model.SkipCode.NOT_READY


@pytest.mark.parametrize(
    ("principal", "own", "codes", "is_skipped"),
    [
        ("User:alice", "User:admin", [29], True),
        (model.ANONYMOUS_PRINCIPAL, "User:admin", [29, 29], True),
        ("User:admin", "User:admin", [29], False),
        ("User:alice", "User:admin", [29, 0], False),
        ("User:alice", "User:admin", [3], False),
        ("User:alice", "", [29], False),
        ("", "User:admin", [29], False),
    ],
)
def test_a_request_refused_to_another_user_is_skipped(
    principal: str, own: str, codes: list[int], is_skipped: bool
) -> None:
    """If all that it named was refused, and both users are known."""
    told = {"topics": [{"name": "t", "error_code": code} for code in codes]}
    captured = workload([call(ApiKey.CREATE_TOPICS, 5, 0, told=told, topics=[])])
    captured.connections[0].principal = principal
    skipped = make_plan(captured, replace(everything(), principal=own)).steps[0].skipped
    assert (skipped is not None) is is_skipped
    if skipped is not None:
        assert skipped.code is model.SkipCode.OTHER_PRINCIPAL
        assert f"refused it to {principal}" in skipped.reason


def test_a_read_while_somebody_writes_is_a_race() -> None:
    """Overlapping times make the read's result uncertain."""
    made = exchange(0, produce(0), 0, 5, produced(0, 0))
    read = exchange(1, fetch(0), 3, 9, fetched(0))
    plan = planned(made, read)
    assert step_of(plan, read).is_racing


@pytest.mark.parametrize("api_key", [ApiKey.OFFSET_COMMIT, ApiKey.SYNC_GROUP])
def test_committed_offsets_change_by_commits(api_key: ApiKey) -> None:
    """A member that joins meanwhile changes the group, and no offset of it."""
    topics = [{"name": "t", "partitions": [{"partition_index": 0}]}]
    told = {"topics": topics} if api_key == ApiKey.OFFSET_COMMIT else {}
    change = call(api_key, 3, 0, 0, told=told, group_id="g", member_id="m", **told)
    read = call(ApiKey.OFFSET_FETCH, 5, 0, 1, told={"topics": topics}, group_id="g", topics=[])
    plan = planned(change, read)
    assert step_of(plan, read).is_racing is (api_key == ApiKey.OFFSET_COMMIT)


@st.composite
def traffic(draw: Any) -> model.Workload:
    """Some connections with requests at any times, pipelined or not, offsets in any order."""
    offsets: dict[int, int] = {0: 0, 1: 0}
    connections = []
    for _ in range(draw(st.integers(1, 5))):
        exchanges = []
        at = draw(st.integers(0, 20))
        seen = at
        for _ in range(draw(st.integers(1, 6))):
            at += draw(st.integers(0, 4))
            seen = max(seen, at + draw(st.integers(0, 8)))
            partition = draw(st.integers(0, 1))
            kind = draw(st.sampled_from(["produce", "silent", "fetch", "read", "beat"]))
            if kind == "produce":
                offset = draw(st.integers(0, 30))
                pair = produce(partition), produced(partition, offset)
            elif kind == "silent":
                pair = produce(partition, acks=0), None
            elif kind == "fetch":
                pair = fetch(partition), fetched(partition)
            elif kind == "read":
                pair = metadata(), ANSWERS[ApiKey.METADATA]
            else:
                pair = heartbeat(), ANSWERS[ApiKey.HEARTBEAT]
            offsets[partition] += 1
            exchanges.append(exchange(0, pair[0], at, seen, pair[1]))
        connections.append(exchanges)
    return workload(*connections)


@given(traffic(), st.booleans())
def test_every_plan_can_be_run_to_its_end(found: model.Workload, wait_for_data: bool) -> None:
    """Whatever the times and offsets: no circle, the order of connections is kept, and nothing
    waits for a step that does not exist."""
    options = everything()
    options.wait_for_data = wait_for_data
    plan = make_plan(found, options)
    assert runnable(plan)
    for number, lane in enumerate(plan.lanes):
        steps = [plan.steps[each] for each in lane]
        assert [step.exchange.index for step in steps] == list(range(len(steps)))
        assert all(step.connection == number for step in steps)
        assert lane == sorted(lane)
    for step in plan.steps:
        assert not set(step.depends_on) & {step.number}
        assert not set(step.depends_on) & set(step.sent_after)


@pytest.mark.parametrize(
    "name", ["librdkafka.pcap", "java_2_0_1.pcap", "java_0_10_2_2.pcap", "sarama.pcap.gz"]
)
def test_plans_of_real_captures(captures: Path, name: str) -> None:
    """Plans of captures can be run, and leave out what brokers send each other."""
    found = load_workload(str(captures / name))
    options = everything()
    options.wait_for_data = True
    plan = make_plan(found, options)
    assert runnable(plan)
    assert all(
        step.skipped is not None and step.skipped.code is model.SkipCode.INTERNAL
        for step in plan.steps
        if step.exchange.api_key in INTERNAL_APIS
    )


def test_a_new_group_waits_for_who_looked_before() -> None:
    """A leave that waited for a list of groups does not speak for it: leaves and joins commute, so
    a later join waits for the list itself."""
    listed = call(ApiKey.LIST_GROUPS, 2, 0)
    left = call(ApiKey.LEAVE_GROUP, 2, 6, group_id="g", member_id="m")
    join = a_request(ApiKey.JOIN_GROUP, 3, group_id="other", session_timeout_ms=1)
    joined = exchange(1, join, 8, 9, None)
    plan = planned(listed, left, joined)
    assert step_of(plan, listed).number in step_of(plan, joined).depends_on


def topics_answer(names: list[str], code: int, connection: int, at_ms: int) -> model.Exchange:
    """Metadata of topics, with one error code for all; of all topics if `names` is empty."""
    topics = [{"name": name} for name in names] or None
    partitions = [] if code else [{"partition_index": 0, "leader_id": 1}]
    told = [{"name": name, "error_code": code, "partitions": partitions} for name in names]
    return call(ApiKey.METADATA, 7, at_ms, connection, {"topics": told}, topics=topics)


def test_who_asks_for_a_topic_waits_for_the_heartbeat_that_makes_it() -> None:
    """The coordinator of a streams group makes its internal topics (KIP-1071)."""
    made = {"repartition_source_topics": [{"name": "t"}], "state_changelog_topics": []}
    part = {"subtopology_id": "0", "source_topics": ["lines"], **made}
    topology = {"epoch": 1, "subtopologies": [part]}
    joined = call(ApiKey.STREAMS_GROUP_HEARTBEAT, 0, 0, group_id="g", topology=topology)
    there = topics_answer(["t"], 0, 1, 2)
    plan = planned(joined, there)
    assert step_of(plan, joined).number in step_of(plan, there).depends_on


def test_a_topic_that_metadata_makes_comes_after_lists_of_all_topics() -> None:
    """A captured list without the topic stays without it. Other clients ask after the first
    response that has it."""
    listed, made = topics_answer([], 0, 0, 0), topics_answer(["t"], 5, 1, 2)
    there, later = topics_answer(["t"], 0, 1, 4), topics_answer(["t"], 0, 2, 6)
    work = workload([listed], [made, there], [later])
    work.facts.topics["t"] = model.TopicFacts("t", first_time_ns=4)
    plan = make_plan(work, everything())
    assert step_of(plan, listed).number in step_of(plan, made).depends_on
    assert step_of(plan, there).number in step_of(plan, later).depends_on


@pytest.mark.parametrize("pattern", ["orders.*", None])
def test_a_pattern_waits_for_the_topics_that_it_may_match(pattern: str | None) -> None:
    """The broker looks for topics when a member joins with a pattern (KIP-848)."""
    topics = [{"name": "orders-1"}]
    created = call(ApiKey.CREATE_TOPICS, 5, 0, told={"topics": topics}, topics=topics)
    asked = {"group_id": "g", "member_id": "m", "subscribed_topic_regex": pattern}
    joined = call(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, 5, 1, **asked)
    plan = planned(created, joined)
    waits = step_of(plan, created).number in step_of(plan, joined).depends_on
    assert waits is (pattern is not None)


def test_a_produce_while_records_are_deleted_is_a_race() -> None:
    """Its answer has the log start offset."""
    made = exchange(0, produce(0), 0, 5, produced(0, 0))
    deleted = call(ApiKey.DELETE_RECORDS, 2, 3, 1, topics=[DELETED])
    later = exchange(0, produce(0), 12, 15, produced(0, 1))
    plan = planned(made, later, deleted)
    assert step_of(plan, made).is_racing
    assert not step_of(plan, later).is_racing


@pytest.mark.parametrize(
    ("is_allowed", "is_made", "read_ms", "is_early"),
    [(True, True, 9, True), (False, True, 9, False), (True, False, 9, False),
     (True, True, 2009, False)],
)  # fmt: skip
def test_topics_that_metadata_requests_make(
    is_allowed: bool, is_made: bool, read_ms: int, is_early: bool
) -> None:
    """Brokers announce them some time after they answered that the topic is not there."""
    asked = {"topics": [{"name": "new"}], "allow_auto_topic_creation": is_allowed}
    told = {"topics": [{"error_code": 3, "name": "new"}]}
    making = call(ApiKey.METADATA, 9, 4, told=told, **asked)
    read = exchange(1, metadata(), read_ms, read_ms + 1, ANSWERS[ApiKey.METADATA])
    captured = workload([making], [read])
    captured.facts.topics["new"] = model.TopicFacts(
        "new", first_time_ns=9_000_000 if is_made else -1
    )
    plan = make_plan(captured, everything())
    step = step_of(plan, read)
    assert (step.is_racing, step.is_early) == (False, is_early)


@pytest.mark.parametrize(
    ("api_key", "version", "read_ms", "is_racing", "is_early"),
    [(ApiKey.CREATE_TOPICS, 5, 9, False, True), (ApiKey.CREATE_PARTITIONS, 2, 9, False, True),
     (ApiKey.DELETE_TOPICS, 6, 9, True, False), (ApiKey.DELETE_TOPICS, 6, 2009, False, False)],
)  # fmt: skip
def test_a_read_moments_after_a_change_of_topics(
    api_key: int, version: int, read_ms: int, is_racing: bool, is_early: bool
) -> None:
    """The replay waits for what was made, but a captured broker may show what was deleted."""
    change = call(api_key, version, 0, topics=[])
    read = exchange(1, metadata(), read_ms, read_ms + 1, ANSWERS[ApiKey.METADATA])
    step = step_of(planned(change, read), read)
    assert (step.is_racing, step.is_early) == (is_racing, is_early)


@pytest.mark.parametrize(("code", "is_skipped"), [(113, True), (27, True), (14, True), (25, False)])
def test_a_commit_that_was_refused(code: int, is_skipped: bool) -> None:
    """One that its client sent again is left out: at the target it may be in time."""
    asked = {"group_id": "g", "member_id": "m", "generation_id_or_member_epoch": 1}
    part = {"partition_index": 0, "error_code": code}
    told = {"topics": [{"name": "t", "partitions": [part]}]}
    made = call(ApiKey.OFFSET_COMMIT, 9, 10, told=told, **asked)
    skipped = step_of(planned(made), made).skipped
    assert (skipped is not None and skipped.code is model.SkipCode.NOT_READY) is is_skipped
