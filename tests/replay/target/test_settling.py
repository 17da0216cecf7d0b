"""Waits for a target that is not ready, and for what requests have changed there."""

import time
from typing import Any

import pytest

from kdissect.codec.message import decode_message
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import Exchange, Outcome, ReplayPlan
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.target.cluster import READY_S, Target
from kdissect.replay.target.settling import SHORT_WAIT_S, WAIT_S, Patience, SettlingWaits
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.source import gather_facts
from tests.builders.messages import a_request, a_response
from tests.builders.workloads import call, exchange, workload
from tests.replay.made import METADATA, NODE, Answer, FakeBroker, answering, with_target
from tests.replay.other_cluster import everything

ONE, OTHER, THIRD = (("log", "t", number) for number in (1, 2, 3))


def test_a_partition_that_keeps_failing_is_given_up() -> None:
    """After one wait, for all requests; another partition in the same answer has its own."""
    patience = Patience()
    assert patience.lasts([ONE], 0)
    assert patience.lasts([ONE, OTHER], WAIT_S - 1)
    assert not patience.lasts([ONE], WAIT_S)
    assert not patience.lasts([ONE], 0)
    assert patience.lasts([ONE, OTHER], 0)
    assert not patience.lasts([], 0)


def test_waits_in_vain_share_their_time() -> None:
    """Whatever fails after a long wait in vain is given a short one."""
    patience = Patience()
    patience.lasts([ONE], WAIT_S)
    assert patience.lasts([THIRD], SHORT_WAIT_S - 0.1)
    assert not patience.lasts([THIRD], SHORT_WAIT_S)


def plan_of(*connections: list[Exchange]) -> ReplayPlan:
    made = workload(*connections)
    made.facts = gather_facts(made.connections)
    return make_plan(made, everything())


def telling(listing: int, body: dict[str, Any] | None) -> Answer:
    """Answers of a target of one node; `body` is that of an API, which has no answer if it is
    None."""
    told = answering(
        lambda api_key, _: {METADATA: {"brokers": [NODE]}, listing: body or {}}.get(api_key)
    )

    def answer(number: int, frame: bytes) -> Any:
        is_silent = decode_message(frame, side="request").api_key == listing and body is None
        return b"" if is_silent else told(number, frame)

    return answer


@pytest.mark.parametrize("body", [{"error_code": ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}, None])
def test_all_parts_of_a_wait_share_its_time(body: dict[str, Any] | None) -> None:
    """Whether the target says that it is not ready, or says nothing."""
    plan = plan_of([call(ApiKey.END_TXN, 3, 0, transactional_id="x", producer_id=1)])

    async def settle(target: Target) -> None:
        patience, began_s = Patience(), time.monotonic()
        patience.in_vain(WAIT_S)
        waits = SettlingWaits(target, IdMap(plan, target=target.cluster), patience)
        await waits.after(Outcome(plan.steps[0]))
        assert SHORT_WAIT_S <= time.monotonic() - began_s < READY_S
        assert patience.limit_s == SHORT_WAIT_S

    with_target(telling(ApiKey.LIST_TRANSACTIONS, body), settle)


def test_the_controller_is_looked_up_again() -> None:
    """After NOT_CONTROLLER, also for a request that names no topic; by another node if the address
    of the target does not answer any more."""
    plan = plan_of([call(ApiKey.ELECT_LEADERS, 1, 0, topic_partitions=None)])
    there: FakeBroker

    async def settle(target: Target) -> None:
        target.cluster.nodes |= {2: ("127.0.0.1", there.port), 3: ("127.0.0.1", 1)}
        target.close()
        target.port = 1
        ids = IdMap(plan, target=target.cluster)
        await SettlingWaits(target, ids, Patience()).look_up(plan.steps[0])
        assert target.cluster.controller_id == 2

    of_second = answering(lambda api_key, _: {"controller_id": 2} if api_key == METADATA else None)
    with FakeBroker(of_second).running() as there:
        with_target(None, settle)


def test_a_group_that_keeps_its_members_is_awaited_once() -> None:
    """In the capture the session of its member had run out before both requests."""
    protocols = {"protocol_type": "consumer", "protocols": []}
    told = {"generation_id": 1, "member_id": "a", "leader": "a"}
    join = call(
        ApiKey.JOIN_GROUP, 5, 0, told=told, group_id="g", session_timeout_ms=100, **protocols
    )
    lists = [call(ApiKey.LIST_GROUPS, 4, 9000 + at, told={"groups": []}) for at in (0, 10)]
    plan = plan_of([join], lists)
    [(resource, limit_ns)] = plan.steps[1].awaits
    assert plan.steps[2].awaits == ((resource, limit_ns),)
    for step in plan.steps[1:]:
        step.awaits = ((resource, 300_000_000),)

    async def settle(target: Target) -> None:
        waits = SettlingWaits(target, IdMap(plan, target=target.cluster), Patience())
        took_s = []
        for step in plan.steps[1:]:
            began_s = time.monotonic()
            await waits.before(step)
            took_s.append(time.monotonic() - began_s)
        assert took_s[0] >= 0.3 > took_s[1]

    groups = [{"group_id": "g", "protocol_type": "consumer", "group_state": "Stable"}]
    with_target(telling(ApiKey.LIST_GROUPS, {"groups": groups}), settle)


def test_a_topic_that_metadata_makes_is_awaited() -> None:
    """A target may show it, and lead its partitions, some time after it answered the request."""
    asked = a_request(3, 9, topics=[{"name": "new"}])
    missing, there = (
        a_response(3, 9, topics=[{"name": "new", "error_code": code}]) for code in (3, 0)
    )
    made = workload([exchange(0, asked, 0, 1, missing), exchange(0, asked, 2, 3, there)])
    made.facts = gather_facts(made.connections)
    plan, asks = make_plan(made, everything()), 0

    def body_of(api_key: int, request: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal asks
        part = {"error_code": 0, "partition_index": 0, "leader_id": 1}
        if api_key == ApiKey.LIST_OFFSETS:
            return {"topics": [{"name": "new", "partitions": [part]}]}
        if api_key != ApiKey.METADATA:
            return None
        asks += 1
        topic = {"error_code": 0, "name": "new", "partitions": [part]}
        return {"brokers": [NODE], "topics": [topic] * (asks > 3)}

    async def settle(target: Target) -> None:
        ids = IdMap(plan, target=target.cluster)
        await SettlingWaits(target, ids, Patience()).after(Outcome(plan.steps[0]))
        assert ids.target.topics == {"new": 1}

    with_target(answering(body_of), settle)
    assert asks == 4
