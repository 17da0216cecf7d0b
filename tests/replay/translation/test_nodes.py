"""Requests for several nodes: cut by leader and coordinator, answers put together again."""

from typing import Any
from uuid import UUID

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batches import headers
from kdissect.replay.translation import nodes
from kdissect.replay.translation.nodes import coordinators_of_plan, merged, node_of, parts_of
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload.messages import GROUP_KEY, partitions
from tests.builders.messages import a_request, a_response
from tests.builders.workloads import MS, exchange, produce
from tests.replay.made import translated

TOPIC_ID = UUID(int=7)


def world(*requests: tuple[Message, Message | None]) -> Translator:
    """Two nodes: of topic t, partitions 0 and 2 are led by node 1, partition 1 by node 2; group a
    is coordinated by node 1, group b by node 2."""
    exchanges = [
        exchange(0, request, 10 * at, 10 * at + 5, answer)
        for at, (request, answer) in enumerate(requests)
    ]
    t, _ = translated(*exchanges)
    partitions = [
        {"partition_index": number, "leader_id": leader, "leader_epoch": 0}
        for number, leader in enumerate((1, 2, 1))
    ]
    brokers = [{"node_id": node, "host": "h", "port": 9000 + node} for node in (1, 2)]
    topics = [{"name": "t", "error_code": 0, "partitions": partitions}]
    t.ids.target.learn_metadata({"brokers": brokers, "topics": topics})
    t.ids.target.coordinators |= {(GROUP_KEY, "a"): 1, (GROUP_KEY, "b"): 2}
    return t


def cut(t: Translator, number: int = 0) -> dict[int, dict[str, Any]]:
    """node -> the body that it is sent."""
    step = t.ids.plan.steps[number]
    frame = t.request(step)
    assert isinstance(frame, bytes)
    return {
        node: decode_message(part, side="request").body
        for node, part in parts_of(t.ids, step, frame)
        if node is not None
    }


def list_offsets(*partitions: int) -> Message:
    asked = [{"partition_index": each, "timestamp": -1} for each in partitions]
    return a_request(ApiKey.LIST_OFFSETS, 1, topics=[{"name": "t", "partitions": asked}])


def offsets_of(*partitions: int) -> bytes:
    told = [{"partition_index": each, "offset": 7} for each in partitions]
    topics = [{"name": "t", "partitions": told}]
    return encode_message(a_response(ApiKey.LIST_OFFSETS, 1, topics=topics))


def test_requests_go_to_the_leader_and_the_coordinator() -> None:
    """Metadata and FindCoordinator decide the node; of one node any connection will do."""
    join = a_request(ApiKey.JOIN_GROUP, 3, group_id="b", session_timeout_ms=1)
    t = world((produce(1), None), (join, None))
    first, second = t.ids.plan.steps
    assert node_of(t.ids, first) == node_of(t.ids, second) == 2
    assert coordinators_of_plan(t.ids) == [(GROUP_KEY, "b")]
    t.ids.target.nodes.clear()
    assert node_of(t.ids, first) is None


def test_requests_to_the_controller_follow_it() -> None:
    """A broker with ZooKeeper that is not the controller answers NOT_CONTROLLER."""
    t = world((a_request(ApiKey.CREATE_TOPICS, 4, topics=[]), None))
    for controller in (2, 1):
        t.ids.target.learn_metadata({"controller_id": controller})
        assert node_of(t.ids, t.ids.plan.steps[0]) == controller


def test_a_node_that_metadata_does_not_list_any_more() -> None:
    """Its requests go to another node. It may come back."""
    t = world((produce(1), None))
    [step] = t.ids.plan.steps
    for listed, node in (((1,), 1), ((1, 2), 2)):
        brokers = [{"node_id": each, "host": "h", "port": 9000 + each} for each in listed]
        t.ids.target.learn_metadata({"brokers": brokers})
        assert node_of(t.ids, step) == node


def test_each_leader_is_asked_for_its_own() -> None:
    """And one that leads all of them alone."""
    t = world((list_offsets(0, 1, 2), None), (list_offsets(2, 0), None))
    found = cut(t)
    told = {
        node: [each["partition_index"] for topic in body["topics"] for each in topic["partitions"]]
        for node, body in found.items()
    }
    assert told == {1: [0, 2], 2: [1]}
    assert [*cut(t, 1)] == [1]


def test_answers_become_one() -> None:
    """It has the partitions of all parts; an answer that is no message stands for all."""
    t = world((list_offsets(0, 1, 2), None))
    step = t.ids.plan.steps[0]
    whole = merged(t.ids, step, [offsets_of(0, 2), offsets_of(1)])
    body = decode_message(whole, side="response", api_key=ApiKey.LIST_OFFSETS, api_version=1).body
    assert [number for _, number, _ in partitions(body)] == [0, 2, 1]
    assert merged(t.ids, step, [offsets_of(0), b"\0\0\0\0\xff"]) == b"\0\0\0\0\xff"


def test_batches_go_to_their_leaders() -> None:
    """A Produce for two leaders becomes a Produce for each, with its own partition."""
    request = produce(0)
    more = produce(1).body["topic_data"][0]["partition_data"]
    request.body["topic_data"][0]["partition_data"] += more
    found = cut(world((request, None)))
    for node, number in ((1, 0), (2, 1)):
        [part] = found[node]["topic_data"][0]["partition_data"]
        assert part["index"] == number
        assert [each.record_count for each in headers(part["records"])] == [1]
        assert found[node]["acks"] == -1


def test_groups_go_to_their_coordinators() -> None:
    """A DescribeGroups becomes one for each coordinator of its groups."""
    request = a_request(ApiKey.DESCRIBE_GROUPS, 1, groups=["a", "b", "other"])
    found = cut(world((request, None)))
    assert {node: body["groups"] for node, body in found.items()} == {1: ["a", "other"], 2: ["b"]}


def test_lists_come_from_all_nodes() -> None:
    """Each lists what it coordinates; filters that brokers do not know are named once."""
    t = world((a_request(ApiKey.LIST_TRANSACTIONS, 0, state_filters=["Lost"]), None))
    assert [body["state_filters"] for body in cut(t).values()] == [["Lost"], ["Lost"]]
    answers = [
        encode_message(
            a_response(
                ApiKey.LIST_TRANSACTIONS,
                0,
                unknown_state_filters=["Lost"],
                transaction_states=[{"transactional_id": name}],
            )
        )
        for name in "ab"
    ]
    whole = t.ids.answer_of(t.ids.plan.steps[0], merged(t.ids, t.ids.plan.steps[0], answers))
    assert whole is not None
    assert whole.body["unknown_state_filters"] == ["Lost"]
    assert [each["transactional_id"] for each in whole.body["transaction_states"]] == ["a", "b"]


def session_fetch(session: int, epoch: int, *partitions: int) -> Message:
    asked = [{"partition": each, "fetch_offset": 0} for each in partitions]
    topics = [{"topic": "t", "partitions": asked}] if asked else []
    names = {"session_id": session, "session_epoch": epoch}
    return a_request(ApiKey.FETCH, 12, max_wait_ms=500, min_bytes=1, topics=topics, **names)


def with_data(session: int, partition: int) -> Message:
    data = produce(partition).body["topic_data"][0]["partition_data"][0]["records"]
    entry = {"partition_index": partition, "high_watermark": 1, "records": data}
    topics = [{"topic": "t", "partitions": [entry]}]
    return a_response(ApiKey.FETCH, 12, session_id=session, responses=topics)


def test_a_fetch_of_a_session_has_all_its_partitions() -> None:
    """Without a session, since one is with one node; no node keeps its answer for longer
    than the captured broker did."""
    t = world((session_fetch(0, 0, 0, 1), with_data(9, 0)), (session_fetch(9, 1), with_data(9, 1)))
    first = cut(t)
    assert [first[node]["max_wait_ms"] for node in (1, 2)] == [5, 5]
    step = t.ids.plan.steps[0]
    assert step.exchange.latency_ns == 5 * MS
    parts = [encode_message(with_data(0, number)) for number in (0, 1)]
    t.learn(step, merged(t.ids, step, parts))
    second = cut(t, 1)
    for node, number in ((1, 0), (2, 1)):
        body = second[node]
        assert (body["session_id"], body["session_epoch"]) == (0, -1)
        [asked] = body["topics"][0]["partitions"]
        assert asked["partition"] == number
    assert [second[node]["max_wait_ms"] for node in (1, 2)] == [5, 5]


def test_a_session_goes_on_after_a_fetch_that_was_not_sent() -> None:
    """The next Fetch asks for the partitions that the lost one named."""
    t = world((session_fetch(0, 0, 0, 1), with_data(9, 0)), (session_fetch(9, 1), with_data(9, 1)))
    t.failed(t.ids.plan.steps[0])
    found = cut(t, 1)
    assert {
        node: body["topics"][0]["partitions"][0]["partition"] for node, body in found.items()
    } == {1: 0, 2: 1}


def test_a_fetch_of_an_earlier_session_asks_for_what_it_got() -> None:
    """The capture does not show how the session began."""
    t = world((session_fetch(9, 4), with_data(9, 1)), (session_fetch(9, 5, 0), with_data(9, 0)))
    assert cut(t)[2]["topics"][0]["partitions"][0]["fetch_offset"] == 0
    assert cut(t, 1).keys() == {1, 2}


def share_request(api: ApiKey, epoch: int, *numbers: int) -> tuple[Message, Message]:
    asked = [{"partition_index": each, "acknowledgement_batches": []} for each in numbers]
    topics = [{"topic_id": TOPIC_ID, "partitions": asked}] if asked else []
    names = {"group_id": "g", "member_id": "m", "share_session_epoch": epoch}
    return a_request(api, 1, **names, topics=topics), a_response(api, 1, responses=[])


def test_each_node_has_a_share_session_of_its_own() -> None:
    """KIP-932: a node counts the requests that it got itself. Both are told of the end."""
    t = world(
        share_request(ApiKey.SHARE_FETCH, 0, 0),
        share_request(ApiKey.SHARE_ACKNOWLEDGE, 1, 0),
        share_request(ApiKey.SHARE_FETCH, 2, 1),
        share_request(ApiKey.SHARE_FETCH, 3),
        share_request(ApiKey.SHARE_ACKNOWLEDGE, -1),
    )
    t.ids.topic_ids[TOPIC_ID] = TOPIC_ID
    t.ids.target.names[TOPIC_ID] = "t"
    t.ids.names.by_id[TOPIC_ID] = "t"
    told = []
    for step in t.ids.plan.steps:
        frame = t.request(step)
        assert isinstance(frame, bytes)
        epochs = {}
        for node, part in parts_of(t.ids, step, frame):
            body = decode_message(part, side="request").body
            numbers = [each for _, each, _ in partitions(body)]
            epochs[node] = body["share_session_epoch"], numbers
        told.append(epochs)
        t.learn(step, encode_message(a_response(step.exchange.api_key, 1, responses=[])))
    assert told == [
        {1: (0, [0])},
        {1: (1, [0])},
        {1: (2, [0]), 2: (0, [1])},
        {1: (3, [0]), 2: (1, [1])},
        {1: (-1, []), 2: (-1, [])},
    ]


def test_every_api_that_is_split_has_its_array() -> None:
    """The tables are about fields that the definitions have."""
    for keys, names in ((nodes._BY_LEADER, nodes._TOPICS), (nodes._BY_COORDINATOR, nodes._NAMED)):
        for key in keys:
            assert {*names} & {one.name for one in catalog.api(key).request.fields}, key
